"""Where what is read goes: memory to read into, and what is done with it then."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from zerofx.checkpoint.boxes import Box, boxes_of
from zerofx.deferred import tape
from zerofx.deferred.ledger import LEDGER
from zerofx.ir.parameters import storage_order
from zerofx.runtime.memory.flat import ordinary_tensors
from zerofx.runtime.optimizer.lazy_states import LazyState, SavedState, standing_for
from zerofx.runtime.parameters.parameter import ParameterState


class Source(Protocol):
    """Files that targets are filled from.  ``name`` is of these, the same on all ranks."""

    name: str

    def read(
        self, entry: str, boxes: Sequence[Box], order: Sequence[int], into: torch.Tensor
    ) -> object:
        """Fill a flat range of the tensor ``entry``, whose ``boxes`` these are.

        Shapes: ``into`` is ``[sum of the boxes' elements]``.
        """

    def read_late(
        self, entry: str, boxes: Sequence[Box], order: Sequence[int], into: torch.Tensor
    ) -> object:
        """``read``, when the files may have changed since they were checked.

        Raises: StepError if they have.
        """

    def check(self, entry: str) -> object:
        """Raise StepError if the files are gone."""

    def use(self) -> object:
        """What to keep for as long as the files are to stay."""


@dataclass(frozen=True)
class Target:
    """A part of the tensor ``entry`` of the checkpoint, in ``boxes``, and where it goes."""

    entry: str
    boxes: Sequence[Box]
    is_late = False

    def fill(self, source: Source) -> None:
        """Read it, or have it read when it is needed."""
        raise NotImplementedError


@dataclass(frozen=True)
class MemoryTarget(Target):
    """A flat range of a tensor, with its dimensions in ``order``, read into memory now.

    ``begin`` gives memory for it, ``[number of elements in the range]``, and ``end`` takes that
    memory when it is full.
    """

    order: Sequence[int]
    begin: Callable[[], torch.Tensor]
    end: Callable[[torch.Tensor], object]

    def fill(self, source: Source) -> None:
        self.fill_by(source.read)

    def fill_by(self, read: Callable[..., object]) -> None:
        """Have ``read``, one of a source's two, fill the memory."""
        memory = self.begin()
        read(self.entry, self.boxes, self.order, memory)
        self.end(memory)


@dataclass(frozen=True)
class LateTarget(Target):
    """A whole tensor whose making is deferred: it is read when it is made, not initialized.

    So it is one of those that are there one at a time.
    """

    tensor: torch.Tensor
    is_late = True

    def fill(self, source: Source) -> None:
        entry, shape = self.entry, tuple(self.tensor.shape)

        def fill(tensor: torch.Tensor, use: object = source.use()) -> None:
            _in_place(entry, tensor).fill_by(source.read_late)

        def read(order: Sequence[int], start: int, stop: int, into: torch.Tensor) -> None:
            source.read_late(entry, boxes_of(shape, order, start, stop), order, into)

        check = partial(source.check, entry)
        LEDGER.fill_later(self.tensor, fill, tape.Source(f"{source.name}: {entry}", read, check))


@dataclass(frozen=True)
class LateStateTarget(Target):
    """A state of the shape of ``like``, of which a rank reads what it keeps when it is used.

    ``keep`` takes what stands for all of it until then.
    """

    like: torch.Tensor
    dtype: torch.dtype
    device: torch.device
    keep: Callable[[LazyState], object]
    is_late = True

    def fill(self, source: Source) -> None:
        entry, shape = self.entry, tuple(self.like.shape)  # not self, which knows who keeps it

        def read(order: Sequence[int], start: int, stop: int, into: torch.Tensor) -> None:
            source.read_late(entry, boxes_of(shape, order, start, stop), order, into)

        check = partial(source.check, entry)
        saved = SavedState(entry, shape, self.dtype, read, check, source.use())
        self.keep(standing_for(saved, self.like, self.device))


def into_tensor(entry: str, tensor: torch.Tensor) -> Target:
    """A whole tensor, in place: a parameter, a buffer, or one that has just been made.

    One whose making is deferred is read when it is made.
    """
    target = _in_place(entry, tensor)
    if LEDGER.memory_of(tensor) is None:
        return target
    return LateTarget(entry, target.boxes, tensor)


def _in_place(entry: str, tensor: torch.Tensor) -> MemoryTarget:
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
        return torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu")

    def end(values: torch.Tensor) -> None:
        if not is_dense:
            tensor.detach().copy_(values.view(shape))
        # A graph built on the old values says so when it is run backward.
        torch.autograd.graph.increment_version(tensor)

    return MemoryTarget(entry, boxes, order, begin, end)


def into_shard(entry: str, bound: ParameterState) -> Target:
    """This rank's shard of a parameter, wherever it is kept."""
    info = bound.info
    start, stop = info.owned_by(bound.communicator.rank)

    def end(values: torch.Tensor) -> None:
        bound.write_shard(_padded(values, info.shard_numel))

    def begin() -> torch.Tensor:
        return torch.empty(stop - start, dtype=info.dtype, device="cpu")

    boxes = boxes_of(info.shape, info.storage_order, start, stop)
    return MemoryTarget(entry, boxes, info.storage_order, begin, end)


def late_state(
    entry: str,
    like: torch.Tensor,
    dtype: torch.dtype,
    device: torch.device,
    keep: Callable[[torch.Tensor], object],
) -> Target:
    """A whole state of the shape of the parameter ``like``, read by who will keep a part of it."""
    shape = tuple(like.shape)
    boxes = boxes_of(shape, range(len(shape)), 0, like.numel())
    return LateStateTarget(entry, boxes, like, dtype, device, keep)


def late_shard(
    entry: str,
    bound: ParameterState,
    dtype: torch.dtype,
    device: torch.device,
    keep: Callable[[torch.Tensor], object],
) -> Target:
    """This rank's shard of a state like a parameter, read when an update needs it."""
    info, rank = bound.info, bound.communicator.rank
    like = torch.empty_strided(info.shape, info.stride, device="meta")
    boxes = boxes_of(info.shape, info.storage_order, *info.owned_by(rank))

    def keep_shard(late: LazyState) -> None:
        keep(late.shard(info, rank))

    return LateStateTarget(entry, boxes, like, dtype, device, keep_shard)


def new_shard(
    entry: str,
    bound: ParameterState,
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
    return MemoryTarget(entry, boxes, info.storage_order, begin, lambda _values: None)


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
    return MemoryTarget(entry, boxes, order, begin, lambda _values: None)


def _padded(values: torch.Tensor, length: int) -> torch.Tensor:
    if len(values) == length:
        return values
    padded = values.new_zeros(length)
    padded[: len(values)] = values
    return padded
