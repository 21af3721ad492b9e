"""Collectives over gloo's sockets."""

from __future__ import annotations

import atexit
import ctypes
import time
from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist

from zerofx import compat
from zerofx.runtime.comm.transport import (
    REDUCTIONS,
    SCALAR_BYTES,
    Started,
    Work,
    divide,
    is_exact,
)
from zerofx.runtime.memory.pages import BufferPool


class GlooWork(Work):
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
            abandoned._settle()
        self._known.add(self)

    def wait(self) -> None:
        assert self.work is not None, "waited for once"
        try:
            self.work.wait()
        finally:
            self.work = None  # it holds the tensors too
            self._settle(time.monotonic() + RELEASE_S)

    def abandon(self) -> None:
        self.work = None
        self._settle()

    def _settle(self, deadline: float = 0.0) -> None:
        """Forget its buffers once gloo has let go of them, if it does until ``deadline``."""
        while any(map(compat.tensors.is_held_elsewhere, self.buffers)):
            if time.monotonic() >= deadline:
                return
            time.sleep(1e-5)
        self._known.discard(self)

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


class GlooTransport:
    """gloo moves bytes; this process does the arithmetic, in rank order.

    gloo's own reduce_scatter sends as much as an all-reduce and takes 1.2 to 4 times as long as
    an all-to-all and a local sum (4 KiB to 64 MiB, 2 and 4 ranks on 2 cores).  Bytes, because
    gloo knows few dtypes.  Never the functional ``all_gather_into_tensor``: several of them in
    flight corrupt the heap (torch 2.13, 2.15).
    """

    overlaps = True
    """True if tensors travel while the rank computes."""

    def __init__(
        self, group: dist.ProcessGroup, buffers: BufferPool, mean_of: int | None = None
    ) -> None:
        self.group = group
        self.buffers = buffers
        self.rank = group.rank()
        self.world_size = group.size()
        self.mean_of = mean_of or self.world_size

    def all_reduce(self, input: torch.Tensor, reduction: str, in_place: bool = False) -> Started:
        flat = input.reshape(-1).contiguous()  # reshape keeps the stride of one dimension
        into = flat if in_place and not flat.numel() % self.world_size else None
        is_scalar = reduction != "mean" and flat.nbytes <= SCALAR_BYTES
        adds_floats = reduction in ("mean", "sum") and not is_exact(flat.dtype)
        if is_scalar or not adds_floats:
            started = self._reduce_at_once(flat, reduction)
        elif self.world_size == 2:
            started = self._exchange(flat, reduction, into)
        else:
            scattered = self.reduce_scatter(_padded(flat, self.world_size), reduction)
            started = self._gathered(scattered, into)
        started.result = started.result[: flat.numel()].view(input.shape)
        return started

    def reduce_scatter(self, flat: torch.Tensor, reduction: str) -> Started:
        received = self.buffers.empty(flat.numel(), flat)
        result = flat.new_empty(flat.numel() // self.world_size)
        work = self._all_to_all(received, flat)
        finish = partial(self._reduce, received.chunk(self.world_size), reduction, result)
        return Started(result, work, finish)

    def all_gather(self, shard: torch.Tensor, into: torch.Tensor | None = None) -> Started:
        result = into
        if result is None:
            result = self.buffers.empty(shard.numel() * self.world_size, shard)
        return Started(result, self._gather(result, shard))

    def broadcast(self, tensor: torch.Tensor, src: int) -> Started:
        buffer = _as_bytes(tensor.view(-1))
        work = dist.broadcast(buffer, group=self.group, group_src=src, async_op=True)
        return Started(tensor, GlooWork(work, buffer))

    def all_to_all(self, flat: torch.Tensor, sent: list[int], received: list[int]) -> Started:
        result = flat.new_empty(sum(received))
        splits = ([numel * flat.itemsize for numel in numels] for numels in (received, sent))
        return Started(result, self._all_to_all(result, flat, *splits))

    def swap(self, parts: torch.Tensor) -> Started:
        result = self.buffers.empty(parts.numel(), parts)
        return Started(result, self._all_to_all(result, parts))

    def _gather(self, out: torch.Tensor, shard: torch.Tensor) -> Work:
        """Start receiving every rank's shard into ``out``.

        gloo's own all-gather receives into a buffer of its own, as large as ``out``, and copies.
        Two ranks swap instead: half the time below 10 kB, four fifths at 8 MiB.
        """
        if self.world_size == 2:
            own, other = out.chunk(2) if self.rank == 0 else reversed(out.chunk(2))
            copy_unless_there(own, shard)
            splits = [0, shard.nbytes] if self.rank == 0 else [shard.nbytes, 0]
            return self._all_to_all(other, shard, splits, splits)
        buffers = _as_bytes(out), _as_bytes(shard)
        return GlooWork(compat.tensors.start_all_gather(*buffers, self.group), *buffers)

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
        divide(out, reduction, self.mean_of)

    def _reduce_at_once(self, flat: torch.Tensor, reduction: str) -> Started:
        """Gather everything and reduce at the wait: one phase, N-1 times the bytes."""
        started = self.all_gather(flat)
        pieces = started.result.chunk(self.world_size)
        result = torch.empty_like(flat)
        return Started(result, started.work, partial(self._reduce, pieces, reduction, result))

    def _exchange(self, flat: torch.Tensor, reduction: str, into: torch.Tensor | None) -> Started:
        """Swap whole buffers between two ranks: the bytes of two phases, in one."""
        own = _padded(flat, 2)
        received = torch.empty_like(own)
        result = torch.empty_like(own) if into is None else into
        splits = [0, own.nbytes] if self.rank == 0 else [own.nbytes, 0]
        work = self._all_to_all(received, own, splits, splits)
        pieces = (own, received) if self.rank == 0 else (received, own)
        return Started(result, work, partial(self._reduce, pieces, reduction, result))

    def _gathered(self, scattered: Started, into: torch.Tensor | None) -> Started:
        """Gather at the wait what is being scattered: every rank must wait in the same order."""
        result = into
        if result is None:
            result = scattered.result.new_empty(scattered.result.numel() * self.world_size)

        def finish() -> None:
            scattered.finish()
            self._gather(result, scattered.result).wait()

        return Started(result, scattered.work, finish)


def copy_unless_there(own: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    return own if own.data_ptr() == shard.data_ptr() else own.copy_(shard)


def _as_bytes(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(torch.uint8)


def _padded(flat: torch.Tensor, multiple: int) -> torch.Tensor:
    missing = -flat.numel() % multiple
    return torch.cat((flat, flat.new_zeros(missing))) if missing else flat
