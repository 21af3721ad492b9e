"""The targets of tensors that are read, and their files: read now, or when needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from zerofx.checkpoint.pieces import Range
from zerofx.deferred.ledger import LEDGER
from zerofx.deferred.tape import Source
from zerofx.ir.parameters import ParameterInfo
from zerofx.runtime.optimizer.lazy_states import standing_for
from zerofx.runtime.parameters.parameter import ParameterState

if TYPE_CHECKING:
    from zerofx.checkpoint.reading import Reader
    from zerofx.checkpoint.safetensors import OpenFile

Keep = Callable[[torch.Tensor], object]


@dataclass(frozen=True)
class Target:
    """A ``part`` of the tensor ``entry`` of a checkpoint, and its place.

    ``take`` reads it, or if ``is_lazy`` arranges that it is read when it is needed.
    """

    entry: str
    part: Range
    take: Callable[[Source], object]
    is_lazy: bool = False

    def fill(self, files: Reader | OpenFile) -> None:
        """Take it from files, which are checked again before they are read late."""
        # What is read late must not refer to this, whose ``take`` refers to what keeps it.
        entry, shape = self.entry, self.part.shape

        def read(order: Sequence[int], start: int, stop: int, into: torch.Tensor) -> None:
            files.check(entry)
            files.read(entry, Range(shape, order, start, stop), into)

        self.take(Source(f"{files.name}: {entry}", read, partial(files.check, entry)))


def into_tensor(entry: str, tensor: torch.Tensor) -> Target:
    """Read a whole tensor in place: a parameter, a buffer, or one that has just been made.

    One whose making is deferred is read when it is made, in the place of its initialisation.
    """
    whole = Range.whole(tuple(tensor.shape))
    if LEDGER.memory_of(tensor) is None:
        return Target(entry, whole, lambda source: source.fill(tensor))
    return Target(entry, whole, partial(LEDGER.fill_later, tensor), is_lazy=True)


def into_shard(entry: str, bound: ParameterState) -> Target:
    """Read this rank's shard of a parameter, wherever it is kept."""
    info = bound.info.kept
    owned = _owned(info)

    def take(source: Source) -> None:
        shard = torch.zeros(info.shard_numel, dtype=info.dtype, device="cpu")
        source.read(owned.order, owned.start, owned.stop, shard[: owned.stop - owned.start])
        bound.write_shard(shard)

    return Target(entry, owned, take)


def into_state(
    entry: str,
    like: torch.Tensor,
    device: torch.device,
    keep: Keep,
    *,
    bound: ParameterState | None,
    is_late: bool,
) -> Target:
    """Read a state into new memory on ``device``, for ``keep``.

    ``like`` is a dense tensor of its shape, strides and dtype.  If it has a number for each element
    of the sharded parameter ``bound``, this rank's shard of it is read.  If ``is_late``, ``keep``
    gets what stands for it, and it is read when its values are needed.
    """
    part, held = Range.whole(tuple(like.shape)), None
    if bound is not None:
        part, like = _owned(bound.info), like.new_empty(bound.info.shard_numel)
        held = (part.order, part.start, part.stop)

    def take(source: Source) -> None:
        state = standing_for(source, like, device, held)
        keep(state)
        if not is_late:
            state.arrive()  # in the memory of the state that ``keep`` has dropped

    return Target(entry, part, take, is_late)


def _owned(info: ParameterInfo) -> Range:
    """Return this rank's range of a parameter."""
    return Range(info.shape, info.storage_order, *info.owned_by(info.rank))
