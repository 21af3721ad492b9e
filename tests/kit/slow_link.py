"""A slow link between nodes, for ranks of one machine: what goes there takes its bytes' time.

gloo moves the bytes as always; a wait returns no earlier than a link of so many bytes a second
would have brought them.  What measures is slowed as what trains.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zerofx.runtime.comm.communication import Communicator
from zerofx.runtime.comm.gloo import GlooTransport
from zerofx.runtime.comm.transport import Started, Work


class TokenBucket:
    """The link that a rank sends over: so many bytes a second, of all that is in flight together.

    What has been sent arrives ``latency_s`` later; meanwhile the next is being sent.
    """

    def __init__(self, latency_s: float, bytes_per_s: float) -> None:
        self.latency_s, self.bytes_per_s = latency_s, bytes_per_s
        self.sent_bytes = 0
        self._free_s = 0.0

    def arrives_s(self, nbytes: int) -> float:
        """Send bytes behind what is being sent; return when they arrive, by ``perf_counter``."""
        self.sent_bytes += nbytes
        self._free_s = max(self._free_s, time.perf_counter()) + nbytes / self.bytes_per_s
        return self._free_s + self.latency_s


class _Late(Work):
    """A collective that is not done before its bytes have arrived."""

    def __init__(self, work: Work, arrives_s: float) -> None:
        self.work, self.arrives_s = work, arrives_s

    def wait(self) -> None:
        self.work.wait()
        while (left_s := self.arrives_s - time.perf_counter()) > 0:
            time.sleep(left_s)

    def abandon(self) -> None:
        self.work.abandon()


class SlowTransport(GlooTransport):
    """gloo's, of which the bytes for some ranks go through token buckets: ``links`` says which."""

    links: Sequence[tuple[TokenBucket, Sequence[int]]]

    def broadcast(self, tensor: torch.Tensor, src: int) -> Started:
        started = super().broadcast(tensor, src)
        started.work = self._late(
            started.work, [tensor.nbytes // self.world_size] * self.world_size
        )
        return started

    def _gather(self, out: torch.Tensor, shard: torch.Tensor) -> Work:
        work = super()._gather(out, shard)
        if isinstance(work, _Late):  # between two ranks it is a swap
            return work
        return self._late(work, [shard.nbytes] * self.world_size)

    def _all_to_all(self, out: torch.Tensor, flat: torch.Tensor, *splits: list[int]) -> Work:
        work = super()._all_to_all(out, flat, *splits)
        even = [flat.nbytes // self.world_size] * self.world_size
        return self._late(work, splits[1] if splits else even)

    def _late(self, work: Work, sent: Sequence[int]) -> _Late:
        """Return the work once what is sent to each rank has arrived there."""
        arrivals = [link.arrives_s(sum(sent[rank] for rank in to)) for link, to in self.links]
        return _Late(work, max(arrivals))


@contextlib.contextmanager
def slow_between_nodes(
    mesh: DeviceMesh, latency_s: float, bytes_per_s: float, inside: TokenBucket | None = None
) -> Iterator[TokenBucket]:
    """Have what this rank sends to other nodes, ranks apart on the outer axis, take its time.

    And what it sends to its own node, if a link ``inside`` is given.  For a mesh of the world's
    ranks whose communicators have not been connected yet: along the axes, and between all ranks.
    Yields the link between nodes.
    """
    between, connect = TokenBucket(latency_s, bytes_per_s), Communicator._connect
    own_node = set(dist.get_process_group_ranks(mesh.get_group(1)))

    def slowed(self: Communicator, device: str, group: dist.ProcessGroup):
        ranks = dist.get_process_group_ranks(group)
        others = [at for at, rank in enumerate(ranks) if rank not in own_node]
        near = [at for at, rank in enumerate(ranks) if rank in own_node and rank != dist.get_rank()]
        links = [(link, to) for link, to in ((between, others), (inside, near)) if link and to]
        if not links:
            return connect(self, device, group)
        transport = SlowTransport(group, self.buffers, self.mean_of)
        transport.links = links
        return transport

    with mock.patch.object(Communicator, "_connect", slowed):
        yield between
