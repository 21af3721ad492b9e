"""The targets of tensors that are read, and their files: read now, or when needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from zerofx.checkpoint.pieces import Range
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

    def read(self, entry: str, wanted: Range, into: torch.Tensor) -> object:
        """Fill ``into``, ``[stop - start]``, with a range of a tensor."""

    def check(self, entry: str) -> object:
        """Raise StepError if the files have changed or are gone.  Call it before a late read."""

    def use(self) -> object:
        """Return an object that keeps the files for as long as it lives."""


@dataclass(frozen=True)
class Target:
    """A ``part`` of the tensor ``entry`` of a checkpoint, and its place.

    ``take`` reads it from a source, or if ``is_lazy`` arranges that it is read when it is needed.
    """

    entry: str
    part: Range
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

    return Target(entry, target.part, put_off, is_lazy=True)


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

    return _into_memory(entry, Range.whole(shape, order), begin, end)


def into_shard(entry: str, bound: ParameterState) -> Target:
    """Read this rank's shard of a parameter, wherever it is kept."""
    info, owned = bound.info, _owned(bound)

    def begin() -> torch.Tensor:
        memory = torch.zeros(info.shard_numel, dtype=info.dtype, device="cpu")
        return memory[: owned.stop - owned.start]

    def end(values: torch.Tensor) -> None:
        bound.write_shard(values.as_strided((info.shard_numel,), (1,)))  # with its padding

    return _into_memory(entry, owned, begin, end)


def new_shard(
    entry: str, bound: ParameterState, dtype: torch.dtype, device: torch.device, keep: Keep
) -> Target:
    """Read this rank's shard of a state like a parameter, into new memory for ``keep``."""
    owned = _owned(bound)

    def begin() -> torch.Tensor:
        with ordinary_tensors():
            shard = torch.zeros(bound.info.shard_numel, dtype=dtype, device=device)
            keep(shard)
            return shard[: owned.stop - owned.start]

    return _into_memory(entry, owned, begin)


def _owned(bound: ParameterState) -> Range:
    """Return this rank's range of a parameter."""
    info = bound.info
    return Range(info.shape, info.storage_order, *info.owned_by(bound.communicator.rank))


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

    return _into_memory(entry, Range.whole(shape, order), begin)


def _into_memory(
    entry: str,
    wanted: Range,
    begin: Callable[[], torch.Tensor],
    end: Keep = lambda _values: None,
) -> Target:
    """Read into the memory that ``begin`` returns when its turn comes, then give it to ``end``."""

    def take(source: Source) -> None:
        memory = begin()
        source.read(entry, wanted, memory)
        end(memory)

    return Target(entry, wanted, take)


def lazy_state(
    entry: str, like: torch.Tensor, dtype: torch.dtype, device: torch.device, keep: Keep
) -> Target:
    """Give ``keep`` what stands for a whole state of the shape of the parameter ``like``.

    Each rank reads the part that it will keep, in the first step.
    """
    shape = tuple(like.shape)
    return _lazy(entry, like, Range.whole(shape, range(len(shape))), dtype, device, keep)


def lazy_shard(
    entry: str, bound: ParameterState, dtype: torch.dtype, device: torch.device, keep: Keep
) -> Target:
    """Give ``keep`` what stands for this rank's shard of a state, read when an update needs it."""
    info = bound.info
    like = torch.empty_strided(info.shape, info.stride, device="meta")

    def keep_shard(state: LazyState) -> None:
        keep(state.shard(info, bound.communicator.rank))

    return _lazy(entry, like, _owned(bound), dtype, device, keep_shard)


def _lazy(
    entry: str,
    like: torch.Tensor,
    wanted: Range,
    dtype: torch.dtype,
    device: torch.device,
    keep: Callable[[LazyState], object],
) -> Target:
    shape = wanted.shape

    def put_off(source: Source) -> None:
        # The state must not refer to ``keep``, which refers to all that keeps the state.
        state = SavedState(entry, shape, dtype, *_later(source, entry, shape), source.use())
        keep(standing_for(state, like, device))

    return Target(entry, wanted, put_off, is_lazy=True)


def _later(source: Source, entry: str, shape: tuple[int, ...]) -> tuple[Any, Callable[[], object]]:
    """Return a function that reads a flat range of a tensor later, and one that checks if it can.

    The first takes (order, start, stop, into).
    """

    def read(order: Sequence[int], start: int, stop: int, into: torch.Tensor) -> None:
        source.check(entry)
        source.read(entry, Range(shape, order, start, stop), into)

    return read, partial(source.check, entry)
