"""The collectives behind the ``zerofx::`` operators, and a count of what they send.

Each backend has its own way to run them (a transport).  All keep one promise: a reduction adds
the ranks' values in rank order, element by element, in the tensor's own dtype, so the result
does not depend on how gradients are cut into buffers.  NCCL makes its own order instead.
"""

from __future__ import annotations

import atexit
import ctypes
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zerofx import compat

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


class Traffic:
    """Bytes this rank sends, by category, and gathered bytes alive on it.

    Categories: ``gather`` and ``reduce`` (parameters and gradients), ``scalar`` (sums and
    maxima of at most ``SCALAR_BYTES``), ``setup`` (broadcasts and gathers outside steps) and
    ``agreement`` (what goes through the store).  A broadcast counts as (N-1)/N of its size on
    every rank, the group's total shared out: who forwards to whom is the backend's choice.
    """

    CATEGORIES = ("gather", "reduce", "scalar", "setup", "agreement")

    def __init__(self) -> None:
        self.gathered_bytes = 0
        self.peak_gathered_bytes = 0
        self.reset()

    def reset(self) -> None:
        """Zero every count of what was sent; what is alive stays counted."""
        self.sent_bytes = dict.fromkeys(self.CATEGORIES, 0)
        self.collectives: Counter[str] = Counter()

    def reset_peak(self) -> None:
        self.peak_gathered_bytes = self.gathered_bytes

    def count(self, kind: str, category: str, nbytes: int) -> None:
        self.sent_bytes[category] += nbytes
        self.collectives[kind] += 1

    def gathered(self, nbytes: int) -> None:
        """Note that ``nbytes`` of gathered buffers came alive, or were freed if negative."""
        self.gathered_bytes += nbytes
        self.peak_gathered_bytes = max(self.peak_gathered_bytes, self.gathered_bytes)

    def snapshot(self) -> dict[str, object]:
        """Return a copy of all counts; ``sent_bytes`` and ``collectives`` are dicts in it."""
        return {
            "sent_bytes": dict(self.sent_bytes),
            "collectives": dict(self.collectives),
            "gathered_bytes": self.gathered_bytes,
            "peak_gathered_bytes": self.peak_gathered_bytes,
        }


def _nothing() -> None:
    pass


@dataclass(slots=True)
class Started:
    """A collective in flight: its result buffer, and what is left to do once it has run."""

    result: torch.Tensor
    work: dist.Work | None = None
    finish: Callable[[], None] = _nothing
    sent_bytes: int = 0
    kind: str = ""


# Process-wide, like the hazard: when gloo's thread is the last to hold a tensor, it takes the GIL
# to drop it, and in an interpreter that is shutting down that kills the process ("terminate called
# without an active exception": 1 exit in 8 on a busy machine, torch 2.13).  So what gloo has been
# given is held here until gloo has let go of it, which is a little after its work is done.
_given_to_gloo: list[torch.Tensor] = []

STEP_END_S = 0.1
"""How long a step's end waits for gloo to let go of buffers, which takes microseconds."""

EXIT_S = 5.0
"""How long exit waits for works in flight; a peer that never joins must not hold it up."""


def _hold(work: dist.Work, *buffers: torch.Tensor) -> dist.Work:
    _given_to_gloo.extend(buffers)
    return work


def _drop_released() -> None:
    # A work holds its tensors, and gloo its works.
    _given_to_gloo[:] = filter(compat.is_held_elsewhere, _given_to_gloo)


def _settle(seconds: float) -> None:
    """Wait until gloo has let go of everything, but not longer than this."""
    _drop_released()
    deadline = time.monotonic() + seconds
    while _given_to_gloo and time.monotonic() < deadline:
        time.sleep(1e-5)
        _drop_released()


@atexit.register
def _settle_at_exit() -> None:
    _settle(EXIT_S)
    for buffer in _given_to_gloo:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(buffer))  # never dropped by anyone


def _divide(result: torch.Tensor, reduction: str, world_size: int) -> None:
    if reduction == "mean":
        result.div_(world_size)


class LocalTransport:
    """A world of one: no collective and no copy, only a view of what was given."""

    def all_reduce(self, input: torch.Tensor, reduction: str) -> Started:
        return Started(input.contiguous().view(input.shape))

    def reduce_scatter(self, flat: torch.Tensor, reduction: str) -> Started:
        return Started(flat.view(-1))

    def all_gather(self, shard: torch.Tensor) -> Started:
        return Started(shard.view(-1))

    def broadcast(self, tensor: torch.Tensor, src: int) -> Started:
        return Started(tensor)

    def forget(self, work: dist.Work) -> None:
        pass


class NativeTransport:
    """The backend's own collectives: NCCL, and any other that needs no detour.

    Waiting makes the current stream wait, not the host; the division is enqueued behind it.
    """

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

    def all_gather(self, shard: torch.Tensor) -> Started:
        result = shard.new_empty(shard.numel() * self.world_size)
        work = _all_gather(result, shard, group=self.group, async_op=True)
        return Started(result, work, sent_bytes=(self.world_size - 1) * shard.nbytes)

    def broadcast(self, tensor: torch.Tensor, src: int) -> Started:
        work = dist.broadcast(tensor, group=self.group, group_src=src, async_op=True)
        sent_bytes = (self.world_size - 1) * tensor.nbytes // self.world_size
        return Started(tensor, work, sent_bytes=sent_bytes)

    def forget(self, work: dist.Work) -> None:
        # Until the current stream waits, the allocator may hand out memory a kernel writes.
        work.wait()


class GlooTransport:
    """gloo moves bytes; this process does the arithmetic, in rank order.

    gloo's own reduce_scatter sends as much as an all-reduce and takes 1.2 to 4 times as long as
    an all-to-all and a local sum (4 KiB to 64 MiB, 2 and 4 ranks on 2 cores).  Bytes, because
    gloo knows few dtypes.  Never the functional ``all_gather_into_tensor``: several of them in
    flight corrupt the heap (torch 2.13, 2.15).
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = group.rank()
        self.world_size = group.size()

    def all_reduce(self, input: torch.Tensor, reduction: str) -> Started:
        flat = input.reshape(-1)
        is_scalar = reduction != "mean" and flat.nbytes <= SCALAR_BYTES
        adds_floats = reduction in ("mean", "sum") and not _is_exact(flat.dtype)
        if is_scalar or not adds_floats:
            started = self._gather_and_reduce(flat, reduction)
        elif self.world_size == 2:
            started = self._exchange(flat, reduction)
        else:
            started = self._scatter_and_gather(flat, reduction)
        started.result = started.result[: flat.numel()].view(input.shape)
        return started

    def reduce_scatter(self, flat: torch.Tensor, reduction: str) -> Started:
        received = torch.empty_like(flat)
        result = flat.new_empty(flat.numel() // self.world_size)
        work = self._all_to_all(received, flat)
        finish = partial(self._reduce, received.chunk(self.world_size), reduction, result)
        return Started(result, work, finish, (self.world_size - 1) * result.nbytes)

    def all_gather(self, shard: torch.Tensor) -> Started:
        result = shard.new_empty(shard.numel() * self.world_size)
        return Started(
            result, self._gather(result, shard), sent_bytes=(self.world_size - 1) * shard.nbytes
        )

    def broadcast(self, tensor: torch.Tensor, src: int) -> Started:
        buffer = _as_bytes(tensor.view(-1))
        work = _hold(dist.broadcast(buffer, group=self.group, group_src=src, async_op=True), buffer)
        sent_bytes = (self.world_size - 1) * tensor.nbytes // self.world_size
        return Started(tensor, work, sent_bytes=sent_bytes)

    def forget(self, work: dist.Work) -> None:
        pass  # gloo's queue holds the buffers of what it still runs

    def _gather(self, out: torch.Tensor, shard: torch.Tensor) -> dist.Work:
        buffers = _as_bytes(out), _as_bytes(shard)
        return _hold(_all_gather(*buffers, group=self.group, async_op=True), *buffers)

    def _all_to_all(self, out: torch.Tensor, flat: torch.Tensor, *splits: list[int]) -> dist.Work:
        buffers = _as_bytes(out), _as_bytes(flat)
        work = dist.all_to_all_single(*buffers, *splits, group=self.group, async_op=True)
        return _hold(work, *buffers)

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


Transport = LocalTransport | NativeTransport | GlooTransport


def _is_exact(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def _as_bytes(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(torch.uint8)


def _padded(flat: torch.Tensor, multiple: int) -> torch.Tensor:
    missing = -flat.numel() % multiple
    return torch.cat((flat, flat.new_zeros(missing))) if missing else flat


class Communicator:
    """The collectives of one process group.

    ``*_start`` returns the buffer that will hold the result; ``wait`` completes it.  An input
    must not change before its wait, and all ranks must start and wait in the same order.
    An error of a collective keeps its type and says which collective it was.
    """

    # By the identity of the group, which each communicator keeps alive: asking twice for one
    # group must count into one ``traffic``.
    _known: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()

    @classmethod
    def of(cls, group: dist.ProcessGroup | DeviceMesh | None) -> Communicator:
        """Return the communicator of a group or 1-dim mesh; None is the world, or a world of one.

        Raises: ValueError for a mesh of more dimensions and for a group without this rank.
        """
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ValueError(
                    f"process_group is a device mesh of {group.ndim} dimensions "
                    f"({group.mesh_dim_names or tuple(group.shape)}), and one holds the "
                    "data-parallel ranks: pass that dimension, e.g. mesh['dp']"
                )
            group = group.get_group()
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise ValueError(
                f"process_group is {group!r}, which is no process group that this rank is in: "
                "call the step only on ranks of the group, or leave process_group out"
            )
        key = id(group)
        if key not in cls._known:
            communicator = cls(group)
            cls._known[key] = communicator
            return communicator
        return cls._known[key]

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else group.rank()
        self.world_size = 1 if group is None else group.size()
        self.traffic = Traffic()
        self._in_flight: dict[int, Started] = {}
        self._local = LocalTransport()
        self._transports: dict[str, Transport] = {}

    def all_reduce_start(self, input: torch.Tensor, reduction: str) -> torch.Tensor:
        """Start reducing ``input`` over the ranks.  ``mean`` is the sum divided by their number.

        Raises: ValueError for an unknown reduction, or one that this dtype cannot take.
        """
        self._check_reduction(reduction, input.dtype)
        is_scalar = reduction != "mean" and input.nbytes <= SCALAR_BYTES
        transport = self._transport(input)
        launch = partial(transport.all_reduce, input.detach(), reduction)
        category = "scalar" if is_scalar else "reduce"
        return self._start("all_reduce", category, input.nbytes, launch)

    def reduce_scatter_start(
        self, flat: torch.Tensor, reduction: str, world_size: int
    ) -> torch.Tensor:
        """Start reducing a flat [N * n] buffer; this rank receives its own [n] of the result."""
        self._check_world(world_size)
        self._check_reduction(reduction, flat.dtype)
        if flat.dim() != 1 or flat.numel() % world_size:
            raise ValueError(
                f"reduce_scatter of a {tuple(flat.shape)} tensor over {world_size} ranks: the "
                "buffer must be flat and padded to a multiple of the world size"
            )
        launch = partial(
            self._transport(flat).reduce_scatter, flat.detach().contiguous(), reduction
        )
        return self._start("reduce_scatter", "reduce", flat.nbytes, launch)

    def all_gather_start(self, shard: torch.Tensor, world_size: int) -> torch.Tensor:
        """Start concatenating every rank's [n] to [N * n], alive until ``free``."""
        self._check_world(world_size)
        launch = partial(self._transport(shard).all_gather, shard.detach().reshape(-1))
        gathered = self._start("all_gather", "gather", shard.nbytes * world_size, launch)
        self.traffic.gathered(gathered.nbytes)
        return gathered

    def wait(self, started: torch.Tensor) -> torch.Tensor:
        """Complete ``started``, the very tensor that a ``*_start`` returned, and return it."""
        pending = self._in_flight.pop(id(started), None)
        if pending is None:
            raise RuntimeError(
                f"wait on a {started.dtype} tensor of shape {tuple(started.shape)} that is not in "
                "flight: it was waited on before, or is a copy or view of what a start returned"
            )
        try:
            if pending.work is not None:
                pending.work.wait()
                _drop_released()
            pending.finish()
        except Exception as error:
            self._explain(error, pending.kind, started.nbytes)
            raise
        return started

    def free(self, gathered: torch.Tensor) -> None:
        """Count a gathered buffer as released: the program drops its last reference here.

        Resizing the storage instead would crash on any alias that an operator did not declare.
        """
        if id(gathered) in self._in_flight:
            self.wait(gathered)
        _drop_released()
        self.traffic.gathered(-gathered.nbytes)

    def broadcast(self, tensor: torch.Tensor, src_group_rank: int = 0) -> None:
        """Overwrite ``tensor`` with that of one rank of the group; blocks.  For first calls."""
        target = tensor.detach()
        buffer = target.contiguous()
        launch = partial(self._transport(tensor).broadcast, buffer, src_group_rank)
        self.wait(self._start("broadcast", "setup", tensor.nbytes, launch))
        if buffer is not target:
            target.copy_(buffer)

    def gather_whole(self, shard: torch.Tensor) -> torch.Tensor:
        """Return every rank's [n] as [N * n]; blocks.  For state dicts and other reading."""
        launch = partial(self._transport(shard).all_gather, shard.detach().reshape(-1))
        nbytes = shard.nbytes * self.world_size
        return self.wait(self._start("all_gather", "setup", nbytes, launch))

    def settle(self) -> None:
        """Let go of what gloo may still hold of a step that is over."""
        _settle(STEP_END_S)

    def abandon(self) -> None:
        """Forget what is in flight, after a step that failed between a start and its wait."""
        for started in self._in_flight.values():
            if started.work is not None:
                self._transport(started.result).forget(started.work)
        self._in_flight.clear()
        _drop_released()
        self.traffic.gathered_bytes = 0

    def _start(
        self, kind: str, category: str, nbytes: int, launch: Callable[[], Started]
    ) -> torch.Tensor:
        _drop_released()
        try:
            started = launch()
        except Exception as error:
            self._explain(error, kind, nbytes)
            raise
        started.kind = kind
        if started.work is not None:
            self.traffic.count(kind, category, started.sent_bytes)
        self._in_flight[id(started.result)] = started
        return started.result

    def _explain(self, error: Exception, kind: str, nbytes: int) -> None:
        error.add_note(
            f"in {kind} of {nbytes} bytes, on rank {self.rank} of {self.world_size}; if it says "
            "that a connection closed or timed out, another rank has died or is not calling the "
            "same function: look at the other ranks' logs"
        )

    def _check_world(self, world_size: int) -> None:
        if world_size != self.world_size:
            raise ValueError(
                f"this program was compiled for {world_size} ranks and its process group has "
                f"{self.world_size}: compile the step again in the new group"
            )

    def _check_reduction(self, reduction: str, dtype: torch.dtype) -> None:
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction {reduction!r} is unknown; known: {', '.join(REDUCTIONS)}")
        if reduction == "mean" and _is_exact(dtype):
            raise ValueError(f"the mean of {dtype} over ranks is no {dtype}: convert it to a float")
        if reduction in ("max", "min") and dtype.is_complex:
            raise ValueError(f"{reduction} of {dtype} has no meaning: reduce its absolute value")

    def _transport(self, tensor: torch.Tensor) -> Transport:
        """How tensors like this one travel.  One without elements has nowhere to go."""
        if self.group is None or self.world_size == 1 or not tensor.numel():
            return self._local
        device = tensor.device.type
        if device not in self._transports:
            self._transports[device] = _transport_for(device, self.group)
        return self._transports[device]


def _transport_for(device: str, group: dist.ProcessGroup) -> Transport:
    configuration = dist.get_backend_config(group)
    backends = dict(pair.split(":") for pair in configuration.split(","))
    backend = backends.get(device)
    if backend is None or (backend == "gloo" and device != "cpu"):
        raise ValueError(
            f"the process group ({configuration}) cannot move {device} tensors as zerofx needs: "
            "make it with init_process_group('cpu:gloo,cuda:nccl')"
        )
    return GlooTransport(group) if backend == "gloo" else NativeTransport(group)


TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def default_group(environ: Mapping[str, str]) -> dist.ProcessGroup | None:
    """Return the world: the group that exists, the one torchrun describes, or None for one rank.

    A group made here is destroyed at exit unless the user has done so.
    """
    if not dist.is_available():
        return None
    if not dist.is_initialized():
        if not all(name in environ for name in TORCHRUN_VARIABLES):
            return None
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        atexit.register(_destroy, dist.group.WORLD)
    return dist.group.WORLD


def _destroy(group: dist.ProcessGroup) -> None:
    if dist.is_initialized() and dist.group.WORLD is group:
        dist.destroy_process_group()
