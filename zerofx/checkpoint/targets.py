"""Where what is read goes: memory to read into, and what is done with it then."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from zerofx.checkpoint.boxes import Box, boxes_of
from zerofx.deferred.ledger import LEDGER
from zerofx.plan import storage_order
from zerofx.runtime.bound import BoundParameter
from zerofx.runtime.flat import ordinary_tensors
from zerofx.runtime.parameters import REGISTRY


@dataclass(frozen=True)
class Target:
    """A flat range of one tensor of the checkpoint, and where it goes on this rank.

    ``begin`` gives memory for it, ``[number of elements in the range]``, and ``end`` takes that
    memory when it is full.
    """

    entry: str
    boxes: Sequence[Box]
    order: Sequence[int]
    begin: Callable[[], torch.Tensor]
    end: Callable[[torch.Tensor], object]

    def fill(self, read: Callable[[torch.Tensor], object], _check: Callable[[], object]) -> None:
        """Have ``read`` fill the memory."""
        memory = self.begin()
        read(memory)
        self.end(memory)


@dataclass(frozen=True)
class LateTarget(Target):
    """A whole tensor whose making is deferred: it is read when it is made, not initialized.

    So it is one of those that are there one at a time.
    """

    tensor: torch.Tensor

    def fill(self, read: Callable[[torch.Tensor], object], check: Callable[[], object]) -> None:
        """Have ``read`` fill the memory when it is there; ``check`` raises if it cannot."""

        def fill(tensor: torch.Tensor) -> None:
            _in_place(self.entry, tensor).fill(read, check)

        LEDGER.fill_later(self.tensor, fill, check)


def into_tensor(entry: str, tensor: torch.Tensor) -> Target:
    """A whole tensor, in place: a parameter, a buffer, or one that has just been made.

    One whose making is deferred is read when it is made.
    """
    target = _in_place(entry, tensor)
    if LEDGER.memory_of(tensor) is None:
        return target
    return LateTarget(entry, target.boxes, target.order, target.begin, target.end, tensor)


def _in_place(entry: str, tensor: torch.Tensor) -> Target:
    shape = tuple(tensor.shape)
    try:
        order = storage_order(shape, tensor.stride())
        is_dense = True
    except ValueError:
        order, is_dense = tuple(range(len(shape))), False
    boxes = boxes_of(shape, order, 0, tensor.numel())

    def begin() -> torch.Tensor:
        if is_dense:
            return tensor.detach().permute(order).reshape(-1)
        return torch.empty(tensor.numel(), dtype=tensor.dtype)

    def end(values: torch.Tensor) -> None:
        if not is_dense:
            tensor.detach().copy_(values.view(shape))
        # A graph built on the old values says so when it is run backward.
        torch.autograd.graph.increment_version(tensor)

    return Target(entry, boxes, order, begin, end)


def into_shard(entry: str, bound: BoundParameter) -> Target:
    """This rank's shard of a parameter, wherever it is kept."""
    info = bound.info
    start, stop = info.owned_by(bound.communicator.rank)

    def end(values: torch.Tensor) -> None:
        REGISTRY.carried.shard_changes(bound, by="zerofx.load()")
        bound.write_shard(_padded(values, info.shard_numel))

    def begin() -> torch.Tensor:
        return torch.empty(stop - start, dtype=info.dtype)

    boxes = boxes_of(info.shape, info.storage_order, start, stop)
    return Target(entry, boxes, info.storage_order, begin, end)


def new_shard(
    entry: str,
    bound: BoundParameter,
    dtype: torch.dtype,
    device: torch.device,
    keep: Callable[[torch.Tensor], object],
) -> Target:
    """This rank's shard of a state like a parameter, in new memory, for ``keep`` to keep."""
    info = bound.info
    start, stop = info.owned_by(bound.communicator.rank)

    def begin() -> torch.Tensor:
        with ordinary_tensors():
            shard = torch.zeros(info.shard_numel, dtype=dtype, device=device)
            keep(shard)
            return shard[: stop - start]

    boxes = boxes_of(info.shape, info.storage_order, start, stop)
    return Target(entry, boxes, info.storage_order, begin, lambda _values: None)


def new_tensor(
    entry: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    like: torch.Tensor | None,
    keep: Callable[[torch.Tensor], object],
) -> Target:
    """A whole tensor in new memory, for ``keep`` to keep; strided as ``like`` if of its shape."""
    is_like = like is not None and shape == tuple(like.shape)
    order = tuple(range(len(shape)))
    if is_like:
        order = storage_order(shape, torch.empty_like(like, device="meta").stride())

    def begin() -> torch.Tensor:
        with ordinary_tensors():
            memory = torch.empty([shape[dim] for dim in order], dtype=dtype, device=device)
            inverse = sorted(range(len(order)), key=order.__getitem__)
            keep(memory.permute(inverse))
            return memory.view(-1)

    boxes = boxes_of(shape, order, 0, math.prod(shape))
    return Target(entry, boxes, order, begin, lambda _values: None)


def _padded(values: torch.Tensor, length: int) -> torch.Tensor:
    if len(values) == length:
        return values
    padded = values.new_zeros(length)
    padded[: len(values)] = values
    return padded
