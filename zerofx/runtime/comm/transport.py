"""Ways to run collectives: NCCL's own, none for one rank; gloo's and peers' are in rooms of theirs.

All keep one promise: a reduction adds the ranks' values in rank order, element by element, in the
tensor's own dtype, so the result does not depend on how gradients are cut into buffers.  NCCL makes
its own order instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from zerofx import compat

SCALAR_BYTES = 4096
"""A sum or maximum up to this size is latency, not bandwidth: norms, found-inf flags.

It takes one phase instead of two (0.3 ms each on gloo).  A mean is a gradient whatever its size: it
always costs the 2(N-1)/N that the traffic formula says.
"""

REDUCTIONS: Mapping[str, Callable[..., torch.Tensor]] = {
    "mean": torch.add,
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def _nothing() -> None:
    pass


class Work:
    """A collective of which this process does a part itself, when it is waited for."""

    def wait(self) -> None:
        """Block until it is done and its memory is the caller's alone."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Nobody will wait for this one."""


@dataclass(slots=True)
class Started:
    """A collective in flight: its result buffer, and what is left to do once it has run."""

    result: torch.Tensor
    work: dist.Work | Work | None = None
    finish: Callable[[], None] = _nothing
    kind: str = ""

    def abandon(self) -> None:
        """Nobody will wait for it, as the step has failed."""
        if isinstance(self.work, Work):
            self.work.abandon()
        elif self.work is not None:
            # Until the current stream waits, the allocator may hand out memory a kernel writes.
            self.work.wait()


def divide(result: torch.Tensor, reduction: str, mean_of: int) -> None:
    if reduction == "mean" and mean_of > 1:
        result.div_(mean_of)


class LocalTransport:
    """A world of one: no collective and no copy, only a view of what was given."""

    overlaps = True

    def all_reduce(self, input: torch.Tensor, reduction: str, in_place: bool = False) -> Started:
        return Started(input.contiguous().view(input.shape))

    def reduce_scatter(self, flat: torch.Tensor, reduction: str) -> Started:
        return Started(flat.view(-1))

    def all_gather(self, shard: torch.Tensor, into: torch.Tensor | None = None) -> Started:
        return Started(shard.view(-1) if into is None else into)

    def broadcast(self, tensor: torch.Tensor, src: int) -> Started:
        return Started(tensor)

    def all_to_all(self, flat: torch.Tensor, sent: list[int], received: list[int]) -> Started:
        return Started(flat)

    def swap(self, parts: torch.Tensor) -> Started:
        return Started(parts.view(-1))


class NativeTransport:
    """The backend's own collectives: NCCL, and any other that needs no detour.

    Waiting makes the current stream wait, not the host; the division is enqueued behind it, if
    the backend does not average by itself, as NCCL does (``averages``): the sum in fp16 overflows
    earlier.  NCCL multiplies by 1/N in the tensor's dtype.  In bf16, of three ranks that makes
    every mean 0.2 % too large, so there it averages only where 1/N is exact.  In fp16 every mean is
    0.024 % too small, and stays so: sums would overflow.
    """

    overlaps = True

    OPERATIONS = {
        "mean": dist.ReduceOp.SUM,
        "sum": dist.ReduceOp.SUM,
        "max": dist.ReduceOp.MAX,
        "min": dist.ReduceOp.MIN,
    }

    def __init__(
        self, group: dist.ProcessGroup, averages: bool = False, mean_of: int | None = None
    ) -> None:
        self.group = group
        self.world_size = group.size()
        self.averages = averages
        self.mean_of = mean_of or self.world_size

    def all_reduce(self, input: torch.Tensor, reduction: str, in_place: bool = False) -> Started:
        result = input if in_place else input.clone(memory_format=torch.contiguous_format)
        operation, divisor = self._operation(reduction, result.dtype)
        if reduction in ("max", "min") and result.is_floating_point():
            return self._extreme(result, operation, -1 if reduction == "min" else 1)
        work = dist.all_reduce(result, operation, group=self.group, async_op=True)
        return Started(result, work, partial(divide, result, reduction, divisor))

    def _operation(self, reduction: str, dtype: torch.dtype) -> tuple[dist.ReduceOp, int]:
        """Return the operation to ask for, and what its result is to be divided by."""
        is_exact = self.mean_of & (self.mean_of - 1) == 0
        if reduction == "mean" and self.averages and (dtype != torch.bfloat16 or is_exact):
            return dist.ReduceOp.AVG, 1
        return self.OPERATIONS[reduction], self.mean_of

    def _extreme(self, result: torch.Tensor, operation: dist.ReduceOp, sign: int) -> Started:
        """Have a NaN of any rank be the result, as torch's own reductions do: it travels apart.

        Backends may take the other value.
        """
        is_nan = result.isnan()
        numbers = result.masked_fill(is_nan, -sign * math.inf)
        both = torch.stack((numbers, sign * is_nan.to(result.dtype)))
        work = dist.all_reduce(both, operation, group=self.group, async_op=True)

        def finish() -> None:
            found, flags = both
            result.copy_(found.masked_fill_(flags != 0, math.nan))

        return Started(result, work, finish)

    def reduce_scatter(self, flat: torch.Tensor, reduction: str) -> Started:
        result = flat.new_empty(flat.numel() // self.world_size)
        operation, divisor = self._operation(reduction, flat.dtype)
        work = compat.tensors.start_reduce_scatter(result, flat, operation, self.group)
        return Started(result, work, partial(divide, result, reduction, divisor))

    def all_gather(self, shard: torch.Tensor, into: torch.Tensor | None = None) -> Started:
        result = shard.new_empty(shard.numel() * self.world_size) if into is None else into
        return Started(result, compat.tensors.start_all_gather(result, shard, self.group))

    def broadcast(self, tensor: torch.Tensor, src: int) -> Started:
        work = dist.broadcast(tensor, group=self.group, group_src=src, async_op=True)
        return Started(tensor, work)

    def all_to_all(self, flat: torch.Tensor, sent: list[int], received: list[int]) -> Started:
        result = flat.new_empty(sum(received))
        work = dist.all_to_all_single(result, flat, received, sent, group=self.group, async_op=True)
        return Started(result, work)

    def swap(self, parts: torch.Tensor) -> Started:
        result = torch.empty_like(parts)
        work = dist.all_to_all_single(result, parts, group=self.group, async_op=True)
        return Started(result, work)


def is_exact(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)
