"""What wires of gradients have lost and ranks have yet to bring: saved, and shared out anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from zerofx.deferred.tape import Source
from zerofx.ir.mesh import Mesh
from zerofx.ir.parameters import ParameterInfo


@dataclass(frozen=True)
class Extent:
    """Where a parameter is in the errors of its bucket.

    Elements ``start`` to ``stop`` of the flat parameter begin at ``at`` of the tensor.
    """

    at: int
    start: int
    stop: int


def extent_of(info: ParameterInfo, numel: int) -> Extent:
    """Return where a parameter is in this rank's errors of its bucket, of ``numel`` elements."""
    shard = info.place.shard_numel
    num_shards = numel // shard
    first = info.rank // num_shards * num_shards * shard if num_shards else 0
    start = min(max(first - info.place.offset, 0), info.numel)
    stop = max(min(first + num_shards * shard - info.place.offset, info.numel), start)
    return Extent(info.place.offset + start - first, start, stop)


@dataclass(frozen=True)
class SavedError:
    """What a rank had lost of a parameter over an axis, in a file that is read when it is needed.

    ``mesh`` is that of the ranks that saved, with the one that had it.  It is elements ``start`` to
    ``stop`` of the flat parameter.
    """

    axis: str
    mesh: Mesh
    start: int
    stop: int
    source: Source

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Read a part of it: these elements of the parameter."""
        into = torch.empty(stop - start, dtype=torch.float32, device="cpu")
        self.source.check()
        self.source.read((0,), start - self.start, stop - self.start, into)
        return into

    def share_in(self, start: int, stop: int) -> torch.Tensor:
        """What it has of the mean gradient's elements ``start`` to ``stop``; zeros elsewhere."""
        share = torch.zeros(stop - start, dtype=torch.float32, device="cpu")
        begin, end = max(start, self.start), min(stop, self.stop)
        if begin < end:
            share[begin - start : end - start] = self.read(begin, end) / self.mesh.world_size
        return share


NOWHERE = Source("nowhere", lambda order, start, stop, into: None, lambda: None)
"""The source of what is not in a file yet."""


class SavedErrors:
    """The errors of checkpoints that were loaded, by parameter, until a step adds them."""

    def __init__(self) -> None:
        self._of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def replace(self, parameter: nn.Parameter, saved: Sequence[SavedError]) -> None:
        """Have these for a parameter, and no others."""
        self._of.pop(parameter, None)
        if saved:
            self._of[parameter] = list(saved)

    def left(self, parameter: nn.Parameter) -> list[SavedError]:
        """Return those that no step has added yet."""
        return list(self._of.get(parameter, ()))

    def take(
        self, parameter: nn.Parameter, mesh: Mesh, axis: str, takes_all: bool, extent: Extent
    ) -> Iterator[torch.Tensor]:
        """Yield what this rank is to add over an axis, in this extent, and forget it.

        On the mesh that it was saved on, that is what this rank had there.  On another, or if
        buckets are others and the rank reduces other elements now, ranks that reduce the same
        elements each have an equal share of what all together had lost: the sum of what they bring
        to the mean stays.  On another mesh one axis ``takes_all``.
        """
        saved = self.left(parameter)
        is_same = all(_is_same(one.mesh, mesh) for one in saved)
        if not is_same and not takes_all:
            return
        taken = [one for one in saved if not is_same or one.axis == axis]
        place = (mesh.rank, extent.start, extent.stop)
        mine = [one for one in taken if (one.mesh.rank, one.start, one.stop) == place]
        if is_same and mine:
            for one in mine:
                yield one.read(extent.start, extent.stop)
        else:
            sharers = mesh.size(axis) if axis == mesh.outer else mesh.world_size
            for one in taken:
                yield one.share_in(extent.start, extent.stop) * (mesh.world_size / sharers)
        self.replace(parameter, [one for one in saved if is_same and one.axis != axis])


def _is_same(one: Mesh, other: Mesh) -> bool:
    return (one.axes, one.outer_stage) == (other.axes, other.outer_stage)


SAVED_ERRORS = SavedErrors()
