"""The targets of tensors that are read, and their files: read now, or when needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from zerofx.checkpoint.pieces import Box, boxes_of
from zerofx.deferred import tape
from zerofx.deferred.ledger import LEDGER
from zerofx.ir.parameters import storage_order
from zerofx.runtime.memory.flat import ordinary_tensors
from zerofx.runtime.optimizer.lazy_states import LazyState, SavedState, standing_for
from zerofx.runtime.parameters.parameter import ParameterState

Keep = Callable[[torch.Tensor], object]


class Source(Protocol):
    """Files that targets are filled from.  Their ``name`` is the same on all ranks."""

    name: str

    def read(
        self, entry: str, boxes: Sequence[Box], order: Sequence[int], into: torch.Tensor
    ) -> object:
        """Fill ``into``, ``[sum of the boxes' elements]``, with these boxes of a tensor."""

    def check(self, entry: str) -> object:
        """Raise StepError if the files have changed or are gone.  Call it before a late read."""

    def use(self) -> object:
        """Return an object that keeps the files for as long as it lives."""


@dataclass(frozen=True)
class Target:
    """A part of the tensor ``entry`` of a checkpoint, in ``boxes``, and its place.

    ``take`` reads it from a source, or if ``is_lazy`` arranges that it is read when it is needed.
    """

    entry: str
    boxes: Sequence[Box]
    take: Callable[[Source], object]
    is_lazy: bool = False

    def fill(self, source: Source) -> None:
        self.take(source)


def into_tensor(entry: str, tensor: torch.Tensor) -> Target:
    """Read a whole tensor in place: a parameter, a buffer, or one that has just been made.

    One whose making is deferred is read when it is made, in the place of its initialisation.
    """
    target = _in_place(entry, tensor)
    if LEDGER.memory_of(tensor) is None:
        return target
    shape = tuple(tensor.shape)

    def put_off(source: Source) -> None:
        read, check = _later(source, entry, shape)

        def fill(tensor: torch.Tensor, use: object = source.use()) -> None:
            check()
            _in_place(entry, tensor).fill(source)

        LEDGER.fill_later(tensor, fill, tape.Source(f"{source.name}: {entry}", read, check))

    return Target(entry, target.boxes, put_off, is_lazy=True)


def _in_place(entry: str, tensor: torch.Tensor) -> Target:
    shape = tuple(tensor.shape)
    try:
        order = storage_order(shape, tensor.stride())
        is_dense = True
    except ValueError:
        order, is_dense = tuple(range(len(shape))), False

    def begin() -> torch.Tensor:
        if is_dense:
            return tensor.detach().permute(order).reshape(-1)
        return torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu")

    def end(values: torch.Tensor) -> None:
        if not is_dense:
            tensor.detach().copy_(values.view(shape))
        # A graph built on the old values says so when it is run backward.
        torch.autograd.graph.increment_version(tensor)

    return _into_memory(entry, boxes_of(shape, order, 0, tensor.numel()), order, begin, end)


def into_shard(entry: str, bound: ParameterState) -> Target:
    """Read this rank's shard of a parameter, wherever it is kept."""
    info = bound.info
    start, stop = info.owned_by(bound.communicator.rank)

    def begin() -> torch.Tensor:
        return torch.zeros(info.shard_numel, dtype=info.dtype, device="cpu")[: stop - start]

    def end(values: torch.Tensor) -> None:
        bound.write_shard(values.as_strided((info.shard_numel,), (1,)))  # with its padding

    boxes = boxes_of(info.shape, info.storage_order, start, stop)
    return _into_memory(entry, boxes, info.storage_order, begin, end)


def new_shard(
    entry: str, bound: ParameterState, dtype: torch.dtype, device: torch.device, keep: Keep
) -> Target:
    """Read this rank's shard of a state like a parameter, into new memory for ``keep``."""
    info = bound.info
    start, stop = info.owned_by(bound.communicator.rank)

    def begin() -> torch.Tensor:
        with ordinary_tensors():
            shard = torch.zeros(info.shard_numel, dtype=dtype, device=device)
            keep(shard)
            return shard[: stop - start]

    boxes = boxes_of(info.shape, info.storage_order, start, stop)
    return _into_memory(entry, boxes, info.storage_order, begin)


def new_tensor(
    entry: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    like: torch.Tensor | None,
    keep: Keep,
) -> Target:
    """Read a whole tensor into new memory for ``keep``; strided as ``like`` if of its shape."""
    order = tuple(range(len(shape)))
    if like is not None and shape == tuple(like.shape):
        order = storage_order(shape, torch.empty_like(like, device="meta").stride())

    def begin() -> torch.Tensor:
        with ordinary_tensors():
            memory = torch.empty([shape[dim] for dim in order], dtype=dtype, device=device)
            inverse = sorted(range(len(order)), key=order.__getitem__)
            keep(memory.permute(inverse))
            return memory.view(-1)

    return _into_memory(entry, boxes_of(shape, order, 0, math.prod(shape)), order, begin)


def _into_memory(
    entry: str,
    boxes: Sequence[Box],
    order: Sequence[int],
    begin: Callable[[], torch.Tensor],
    end: Keep = lambda _values: None,
) -> Target:
    """Read into the memory that ``begin`` returns when its turn comes, then give it to ``end``."""

    def take(source: Source) -> None:
        memory = begin()
        source.read(entry, boxes, order, memory)
        end(memory)

    return Target(entry, boxes, take)


def lazy_state(
    entry: str, like: torch.Tensor, dtype: torch.dtype, device: torch.device, keep: Keep
) -> Target:
    """Give ``keep`` what stands for a whole state of the shape of the parameter ``like``.

    Each rank reads the part that it will keep, in the first step.
    """
    order = range(like.dim())
    return _lazy(entry, like, order, (0, like.numel()), dtype, device, keep)


def lazy_shard(
    entry: str, bound: ParameterState, dtype: torch.dtype, device: torch.device, keep: Keep
) -> Target:
    """Give ``keep`` what stands for this rank's shard of a state, read when an update needs it."""
    info, rank = bound.info, bound.communicator.rank
    like = torch.empty_strided(info.shape, info.stride, device="meta")

    def keep_shard(state: LazyState) -> None:
        keep(state.shard(info, rank))

    order, bounds = info.storage_order, info.owned_by(rank)
    return _lazy(entry, like, order, bounds, dtype, device, keep_shard)


def _lazy(
    entry: str,
    like: torch.Tensor,
    order: Sequence[int],
    bounds: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    keep: Callable[[LazyState], object],
) -> Target:
    shape = tuple(like.shape)

    def put_off(source: Source) -> None:
        # The state must not refer to ``keep``, which refers to all that keeps the state.
        state = SavedState(entry, shape, dtype, *_later(source, entry, shape), source.use())
        keep(standing_for(state, like, device))

    return Target(entry, boxes_of(shape, order, *bounds), put_off, is_lazy=True)


def _later(source: Source, entry: str, shape: tuple[int, ...]) -> tuple[Any, Callable[[], object]]:
    """Return a function that reads a flat range of a tensor later, and one that checks if it can.

    The first takes (order, start, stop, into).
    """

    def read(order: Sequence[int], start: int, stop: int, into: torch.Tensor) -> None:
        source.check(entry)
        source.read(entry, boxes_of(shape, order, start, stop), order, into)

    return read, partial(source.check, entry)
