"""Ways to run collectives: NCCL's own, gloo's bytes, a neighbour's memory, none for one rank.

All keep one promise: a reduction adds the ranks' values in rank order, element by element, in the
tensor's own dtype, so the result does not depend on how gradients are cut into buffers.  NCCL makes
its own order instead.
"""

from __future__ import annotations

import atexit
import ctypes
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from zerofx import compat
from zerofx.runtime.comm.peer_memory import PeerMemory
from zerofx.runtime.memory.buffers import BufferPool

# 2.13 renames both and warns at the old names; for 2.11 and 2.12, which have only those.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

SCALAR_BYTES = 4096
"""A sum or maximum up to this size is latency, not bandwidth: norms, found-inf flags.

It takes one phase instead of two (0.3 ms each on gloo) and is counted apart.  A mean is a
gradient whatever its size: it always costs the 2(N-1)/N that the traffic formula says.
"""

REDUCTIONS: Mapping[str, Callable[..., torch.Tensor]] = {
    "mean": torch.add,
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def _nothing() -> None:
    pass


@dataclass(slots=True)
class Started:
    """A collective in flight: its result buffer, and what is left to do once it has run."""

    result: torch.Tensor
    work: dist.Work | GlooWork | PeerWork | None = None
    finish: Callable[[], None] = _nothing
    sent_bytes: int = 0
    kind: str = ""

    def abandon(self) -> None:
        """Nobody will wait for it, as the step has failed."""
        if isinstance(self.work, GlooWork):
            self.work.abandon()
        elif isinstance(self.work, dist.Work):
            # Until the current stream waits, the allocator may hand out memory a kernel writes.
            self.work.wait()


class GlooWork:
    """A collective that gloo runs, and the tensors it was given.

    When gloo's thread is the last to hold a tensor, it takes the GIL to drop it, and in an
    interpreter that is shutting down that kills the process ("terminate called without an active
    exception": 1 exit in 8 on a busy machine, torch 2.13).  So they are held here until gloo has
    let go of them, microseconds after its work is done.
    """

    _known: set[GlooWork] = set()  # of the whole process, like the hazard

    def __init__(self, work: dist.Work, *buffers: torch.Tensor) -> None:
        self.work: dist.Work | None = work
        self.buffers = buffers
        for abandoned in [known for known in self._known if known.work is None]:
            abandoned._forget_if_released()
        self._known.add(self)

    def wait(self) -> None:
        """Block until it is done and its memory is the caller's alone."""
        assert self.work is not None, "waited for once"
        try:
            self.work.wait()
        finally:
            self.work = None  # it holds the tensors too
            self._settle(time.monotonic() + RELEASE_S)

    def abandon(self) -> None:
        """Nobody will wait for this one."""
        self.work = None
        self._forget_if_released()

    def _forget_if_released(self) -> bool:
        released = not any(map(compat.is_held_elsewhere, self.buffers))
        if released:
            self._known.discard(self)
        return released

    def _settle(self, deadline: float) -> None:
        while not self._forget_if_released() and time.monotonic() < deadline:
            time.sleep(1e-5)

    @classmethod
    def settle_all(cls) -> None:
        """At exit: wait for what is in flight, and let no thread drop what is left."""
        deadline = time.monotonic() + EXIT_S
        for work in list(cls._known):
            work.work = None
            work._settle(deadline)
        for work in cls._known:
            for buffer in work.buffers:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(buffer))


RELEASE_S = 0.1
"""The time that a wait gives gloo to let go of its buffers."""

EXIT_S = 5.0
"""The time that exit waits for works in flight; a peer that never joins must not hold it up."""

atexit.register(GlooWork.settle_all)


def _divide(result: torch.Tensor, reduction: str, world_size: int) -> None:
    if reduction == "mean":
        result.div_(world_size)


class LocalTransport:
    """A world of one: no collective and no copy, only a view of what was given."""

    overlaps = True

    def all_reduce(self, input: torch.Tensor, reduction: str) -> Started:
        return Started(input.contiguous().view(input.shape))

    def reduce_scatter(self, flat: torch.Tensor, reduction: str) -> Started:
        return Started(flat.view(-1))

    def all_gather(self, shard: torch.Tensor, into: torch.Tensor | None = None) -> Started:
        return Started(shard.view(-1) if into is None else into)

    def broadcast(self, tensor: torch.Tensor, src: int) -> Started:
        return Started(tensor)

    def all_to_all(self, flat: torch.Tensor, sent: list[int], received: list[int]) -> Started:
        return Started(flat)


class NativeTransport:
    """The backend's own collectives: NCCL, and any other that needs no detour.

    Waiting makes the current stream wait, not the host; the division is enqueued behind it.
    """

    overlaps = True

    OPERATIONS = {
        "mean": dist.ReduceOp.SUM,
        "sum": dist.ReduceOp.SUM,
        "max": dist.ReduceOp.MAX,
        "min": dist.ReduceOp.MIN,
    }

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.world_size = group.size()

    def all_reduce(self, input: torch.Tensor, reduction: str) -> Started:
        result = input.clone(memory_format=torch.contiguous_format)
        operation = self.OPERATIONS[reduction]
        work = dist.all_reduce(result, operation, group=self.group, async_op=True)
        sent_bytes = 2 * (self.world_size - 1) * result.nbytes // self.world_size
        finish = partial(_divide, result, reduction, self.world_size)
        return Started(result, work, finish, sent_bytes)

    def reduce_scatter(self, flat: torch.Tensor, reduction: str) -> Started:
        result = flat.new_empty(flat.numel() // self.world_size)
        operation = self.OPERATIONS[reduction]
        work = _reduce_scatter(result, flat, operation, group=self.group, async_op=True)
        finish = partial(_divide, result, reduction, self.world_size)
        return Started(result, work, finish, (self.world_size - 1) * result.nbytes)

    def all_gather(self, shard: torch.Tensor, into: torch.Tensor | None = None) -> Started:
        result = shard.new_empty(shard.numel() * self.world_size) if into is None else into
        work = _all_gather(result, shard, group=self.group, async_op=True)
        return Started(result, work, sent_bytes=(self.world_size - 1) * shard.nbytes)

    def broadcast(self, tensor: torch.Tensor, src: int) -> Started:
        work = dist.broadcast(tensor, group=self.group, group_src=src, async_op=True)
        sent_bytes = (self.world_size - 1) * tensor.nbytes // self.world_size
        return Started(tensor, work, sent_bytes=sent_bytes)

    def all_to_all(self, flat: torch.Tensor, sent: list[int], received: list[int]) -> Started:
        result = flat.new_empty(sum(received))
        work = dist.all_to_all_single(result, flat, received, sent, group=self.group, async_op=True)
        sent_bytes = (flat.numel() - sent[self.group.rank()]) * flat.itemsize
        return Started(result, work, sent_bytes=sent_bytes)


class GlooTransport:
    """gloo moves bytes; this process does the arithmetic, in rank order.

    gloo's own reduce_scatter sends as much as an all-reduce and takes 1.2 to 4 times as long as
    an all-to-all and a local sum (4 KiB to 64 MiB, 2 and 4 ranks on 2 cores).  Bytes, because
    gloo knows few dtypes.  Never the functional ``all_gather_into_tensor``: several of them in
    flight corrupt the heap (torch 2.13, 2.15).
    """

    overlaps = True

    def __init__(self, group: dist.ProcessGroup, buffers: BufferPool) -> None:
        self.group = group
        self.buffers = buffers
        self.rank = group.rank()
        self.world_size = group.size()

    def all_reduce(self, input: torch.Tensor, reduction: str) -> Started:
        flat = input.reshape(-1).contiguous()  # reshape keeps the stride of one dimension
        is_scalar = reduction != "mean" and flat.nbytes <= SCALAR_BYTES
        adds_floats = reduction in ("mean", "sum") and not is_exact(flat.dtype)
        if is_scalar or not adds_floats:
            started = self._gather_and_reduce(flat, reduction)
        elif self.world_size == 2:
            started = self._exchange(flat, reduction)
        else:
            started = self._scatter_and_gather(flat, reduction)
        started.result = started.result[: flat.numel()].view(input.shape)
        return started

    def reduce_scatter(self, flat: torch.Tensor, reduction: str) -> Started:
        received = self.buffers.empty(flat.numel(), flat)
        result = flat.new_empty(flat.numel() // self.world_size)
        work = self._all_to_all(received, flat)
        finish = partial(self._reduce, received.chunk(self.world_size), reduction, result)
        return Started(result, work, finish, (self.world_size - 1) * result.nbytes)

    def all_gather(self, shard: torch.Tensor, into: torch.Tensor | None = None) -> Started:
        result = into
        if result is None:
            result = self.buffers.empty(shard.numel() * self.world_size, shard)
        return Started(
            result, self._gather(result, shard), sent_bytes=(self.world_size - 1) * shard.nbytes
        )

    def broadcast(self, tensor: torch.Tensor, src: int) -> Started:
        buffer = _as_bytes(tensor.view(-1))
        work = dist.broadcast(buffer, group=self.group, group_src=src, async_op=True)
        sent_bytes = (self.world_size - 1) * tensor.nbytes // self.world_size
        return Started(tensor, GlooWork(work, buffer), sent_bytes=sent_bytes)

    def all_to_all(self, flat: torch.Tensor, sent: list[int], received: list[int]) -> Started:
        result = flat.new_empty(sum(received))
        splits = ([numel * flat.itemsize for numel in numels] for numels in (received, sent))
        sent_bytes = (flat.numel() - sent[self.rank]) * flat.itemsize
        return Started(result, self._all_to_all(result, flat, *splits), sent_bytes=sent_bytes)

    def _gather(self, out: torch.Tensor, shard: torch.Tensor) -> GlooWork:
        """Start receiving every rank's shard into ``out``.

        gloo's own all-gather receives into a buffer of its own, as large as ``out``, and copies.
        Two ranks swap instead: half the time below 10 kB, four fifths at 8 MiB.
        """
        if self.world_size == 2:
            own, other = out.chunk(2) if self.rank == 0 else reversed(out.chunk(2))
            _copy_unless_there(own, shard)
            splits = [0, shard.nbytes] if self.rank == 0 else [shard.nbytes, 0]
            return self._all_to_all(other, shard, splits, splits)
        buffers = _as_bytes(out), _as_bytes(shard)
        return GlooWork(_all_gather(*buffers, group=self.group, async_op=True), *buffers)

    def _all_to_all(self, out: torch.Tensor, flat: torch.Tensor, *splits: list[int]) -> GlooWork:
        buffers = _as_bytes(out), _as_bytes(flat)
        work = dist.all_to_all_single(*buffers, *splits, group=self.group, async_op=True)
        return GlooWork(work, *buffers)

    def _reduce(self, pieces: Iterable[torch.Tensor], reduction: str, out: torch.Tensor) -> None:
        """Reduce one piece per rank into ``out``: ((r0 + r1) + r2) + ..."""
        combine = REDUCTIONS[reduction]
        first, second, *rest = pieces
        combine(first, second, out=out)
        for piece in rest:
            combine(out, piece, out=out)
        _divide(out, reduction, self.world_size)

    def _gather_and_reduce(self, flat: torch.Tensor, reduction: str) -> Started:
        """Gather everything and reduce at the wait: one phase, N-1 times the bytes."""
        started = self.all_gather(flat)
        pieces = started.result.chunk(self.world_size)
        result = torch.empty_like(flat)
        return Started(
            result,
            started.work,
            partial(self._reduce, pieces, reduction, result),
            started.sent_bytes,
        )

    def _exchange(self, flat: torch.Tensor, reduction: str) -> Started:
        """Swap whole buffers between two ranks: the bytes of two phases, in one."""
        own = _padded(flat, 2)
        received, result = torch.empty_like(own), torch.empty_like(own)
        splits = [0, own.nbytes] if self.rank == 0 else [own.nbytes, 0]
        work = self._all_to_all(received, own, splits, splits)
        pieces = (own, received) if self.rank == 0 else (received, own)
        return Started(result, work, partial(self._reduce, pieces, reduction, result), own.nbytes)

    def _scatter_and_gather(self, flat: torch.Tensor, reduction: str) -> Started:
        """Reduce-scatter now, all-gather at the wait: every rank must wait in the same order."""
        scattered = self.reduce_scatter(_padded(flat, self.world_size), reduction)
        result = scattered.result.new_empty(scattered.result.numel() * self.world_size)

        def finish() -> None:
            scattered.finish()
            self._gather(result, scattered.result).wait()

        return Started(result, scattered.work, finish, 2 * scattered.sent_bytes)


class PeerWork:
    """A collective among ranks that read each other's memory: it happens at the wait."""

    def __init__(
        self,
        memory: PeerMemory,
        sources: Sequence[torch.Tensor],
        collect: Callable[[dict[int, list[int]]], None],
    ) -> None:
        self.memory = memory
        self.sources = sources
        self.collect = collect
        self.number = memory.post(sources)

    def wait(self) -> None:
        """Read what this rank needs of the others, which may have to start it first."""
        memory = self.memory
        addresses = {
            peer.rank: memory.find(peer, self.number, self.sources) for peer in memory.peers
        }
        self.collect(addresses)
        memory.finish(self.number)


class PeerTransport:
    """gloo's ranks on one machine: each reads what it needs where the others have it.

    Sums are made piece by piece while a piece is in the cache, so no buffer receives them first.
    """

    overlaps = False
    """Return whether anything travels while the rank computes: here, not before the wait."""

    PIECE_BYTES = 2**20

    def __init__(self, memory: PeerMemory, group: dist.ProcessGroup, buffers: BufferPool) -> None:
        self.memory = memory
        self.buffers = buffers
        self.rank = memory.rank
        self.world_size = memory.world_size
        self.sockets = GlooTransport(group, buffers)

    def all_reduce(self, input: torch.Tensor, reduction: str) -> Started:
        flat = input.reshape(-1).contiguous()  # reshape keeps the stride of one dimension
        is_scalar = reduction != "mean" and flat.nbytes <= SCALAR_BYTES
        adds_floats = reduction in ("mean", "sum") and not is_exact(flat.dtype)
        if adds_floats and not is_scalar and self.world_size > 2:
            started = self._scatter_and_gather(flat, reduction)
        else:
            result = torch.empty_like(flat)
            work = self._reduce([flat], [0], 0, reduction, result)
            padding = -flat.numel() % self.world_size if reduction == "mean" else 0
            sent_bytes = (self.world_size - 1) * (flat.numel() + padding) * flat.itemsize
            started = Started(result, work, sent_bytes=sent_bytes)  # as if cut and padded
        started.result = started.result[: flat.numel()].view(input.shape)
        return started

    def reduce_scatter(self, flat: torch.Tensor, reduction: str) -> Started:
        return self.reduce_scatter_pieces([flat], [0], flat.numel(), reduction)

    def reduce_scatter_pieces(
        self, pieces: Sequence[torch.Tensor], offsets: Sequence[int], numel: int, reduction: str
    ) -> Started:
        """Reduce-scatter a flat buffer of ``numel`` elements that need not exist.

        ``pieces`` are flat and contiguous, and would lie at ``offsets``, in order; the rest of it
        would be zero.
        """
        result = pieces[0].new_empty(numel // self.world_size)
        work = self._reduce(pieces, offsets, self.rank * result.numel(), reduction, result)
        return Started(result, work, sent_bytes=(self.world_size - 1) * result.nbytes)

    def all_gather(self, shard: torch.Tensor, into: torch.Tensor | None = None) -> Started:
        result = into
        if result is None:
            result = self.buffers.empty(shard.numel() * self.world_size, shard)
        work = self._gather(result, shard)
        return Started(result, work, sent_bytes=(self.world_size - 1) * shard.nbytes)

    def broadcast(self, tensor: torch.Tensor, src: int) -> Started:
        return self.sockets.broadcast(tensor, src)

    def all_to_all(self, flat: torch.Tensor, sent: list[int], received: list[int]) -> Started:
        return self.sockets.all_to_all(flat, sent, received)

    def _gather(self, result: torch.Tensor, shard: torch.Tensor) -> PeerWork:
        pieces = result.chunk(self.world_size)
        own = _copy_unless_there(pieces[self.rank], shard)

        def collect(addresses: dict[int, list[int]]) -> None:
            for peer in self.memory.peers:
                (address,) = addresses[peer.rank]
                self.memory.copy(peer, [(address, pieces[peer.rank])])

        return PeerWork(self.memory, [own], collect)

    def _reduce(
        self,
        pieces: Sequence[torch.Tensor],
        offsets: Sequence[int],
        start: int,
        reduction: str,
        result: torch.Tensor,
    ) -> PeerWork:
        """Reduce the range that begins at ``start`` of every rank's buffer into ``result``."""
        combine = REDUCTIONS[reduction]
        peers = {peer.rank: peer for peer in self.memory.peers}
        step = max(self.PIECE_BYTES // result.itemsize, 1)

        def fetch(rank: int, addresses: list[int], parts: list, into: torch.Tensor) -> torch.Tensor:
            if sum(length for *_, length in parts) < into.numel():
                into.zero_()
            if rank == self.rank:
                for index, first, to, length in parts:
                    into[to : to + length] = pieces[index][first : first + length]
                return into
            where = [
                (addresses[index] + first * into.itemsize, into[to : to + length])
                for index, first, to, length in parts
            ]
            self.memory.copy(peers[rank], where)
            return into

        def collect(addresses: dict[int, list[int]]) -> None:
            scratch = result.new_empty(0)
            for at in range(0, result.numel(), step):
                out = result[at : at + step]
                parts = _overlaps(pieces, offsets, start + at, out.numel())
                total = None
                for rank in range(self.world_size):
                    index, first, _, length = parts[0] if parts else (0, 0, 0, 0)
                    if rank == self.rank and length == out.numel():
                        piece = pieces[index][first : first + length]
                    elif rank != self.rank and (total is None or (rank == 1 and self.rank == 0)):
                        piece = fetch(rank, addresses[rank], parts, out)
                    else:
                        if not scratch.numel():
                            scratch = result.new_empty(min(step, result.numel()))
                        piece = fetch(rank, addresses.get(rank, []), parts, scratch[: out.numel()])
                    total = piece if total is None else combine(total, piece, out=out)
                _divide(out, reduction, self.world_size)

        return PeerWork(self.memory, pieces, collect)

    def _scatter_and_gather(self, flat: torch.Tensor, reduction: str) -> Started:
        """Reduce-scatter now, all-gather at the wait: every rank must wait in the same order."""
        scattered = self.reduce_scatter(_padded(flat, self.world_size), reduction)
        result = scattered.result.new_empty(scattered.result.numel() * self.world_size)

        def finish() -> None:
            self._gather(result, scattered.result).wait()

        return Started(result, scattered.work, finish, 2 * scattered.sent_bytes)


def _overlaps(
    pieces: Sequence[torch.Tensor], offsets: Sequence[int], start: int, length: int
) -> list[tuple[int, int, int, int]]:
    """Return each piece's part of a range: its index, its start, the place, the length."""
    found = []
    for index in range(max(bisect_right(offsets, start) - 1, 0), len(pieces)):
        first = max(start - offsets[index], 0)
        to = offsets[index] + first - start
        if to >= length:
            break
        count = min(pieces[index].numel() - first, length - to)
        if count > 0:
            found.append((index, first, to, count))
    return found


Transport = LocalTransport | NativeTransport | GlooTransport | PeerTransport


def is_exact(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def _copy_unless_there(own: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    return own if own.data_ptr() == shard.data_ptr() else own.copy_(shard)


def _as_bytes(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(torch.uint8)


def _padded(flat: torch.Tensor, multiple: int) -> torch.Tensor:
    missing = -flat.numel() % multiple
    return torch.cat((flat, flat.new_zeros(missing))) if missing else flat
