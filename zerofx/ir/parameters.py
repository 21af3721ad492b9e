"""Plain data about parameters and their shards: no tensors, no process group."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch


def shard_numel(numel: int, world_size: int) -> int:
    """Return the elements that every rank owns of a flat buffer, padding included.

    Units: elements.  Source: ZeRO, Rajbhandari et al. 2020, section 5.
    """
    return -(-numel // world_size)


@dataclass(frozen=True)
class Place:
    """The place of a parameter in its bucket.

    A bucket is its parameters one after the other, flat and padded, cut into one shard of
    ``shard_numel`` per rank: what of a parameter a rank owns is where the two overlap, maybe
    nothing.  The parameter has ``extent`` elements from ``offset``; what of them it does not fill
    is padding.  ``bucket`` is a number within one parameter table.  Units: elements.
    """

    bucket: int
    offset: int
    extent: int
    shard_numel: int


@dataclass(frozen=True)
class ParameterInfo:
    """One parameter of the step.

    ``index`` is its position in the table and the ``parameter`` argument of every
    ``zerofx::`` operator.  It is cut into ``world_size`` shards, of which the rank that looks at it
    has number ``rank``: on a mesh neither need be the run's.  At stage 3 a rank keeps ``parts`` of
    these, one behind the other, of its values.  A parameter is flattened in *storage order*: its
    dimensions are permuted so that the last varies fastest in memory, which makes the flat buffer
    of a channels-last weight a view of it, like that of a contiguous one.
    """

    index: int
    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    world_size: int
    rank: int = 0
    assigned: Place | None = None
    parts: int = 1

    @cached_property
    def place(self) -> Place:
        """Its place in its bucket: one of its own, unless it has been assigned one."""
        if self.assigned is not None:
            return self.assigned
        return Place(self.index, 0, self.share_numel * self.world_size, self.share_numel)

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @cached_property
    def kept(self) -> ParameterInfo:
        """The same cut into what ranks keep of its values at stage 3, which may be coarser."""
        if self.parts == 1:
            return self
        place = replace(self.place, shard_numel=self.place.shard_numel * self.parts)
        world_size, rank = self.world_size // self.parts, self.rank // self.parts
        return replace(self, world_size=world_size, rank=rank, assigned=place, parts=1)

    @cached_property
    def position_in_kept(self) -> int:
        """The offset of its shard on this rank in what the rank keeps of its values."""
        return self.extent_of(self.rank)[0] - self.kept.extent_of(self.kept.rank)[0]

    def extent_of(self, rank: int) -> tuple[int, int]:
        """Return the half-open range of the flat parameter and its padding that a rank holds.

        Shapes: f32[16, 8] alone on 4 ranks gives 32 elements each.  Units: elements.
        Raises: ValueError if ``rank`` is outside ``[0, world_size)``.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside [0, {self.world_size})")
        place = self.place
        start = rank * place.shard_numel - place.offset
        stop = start + place.shard_numel
        return min(max(start, 0), place.extent), min(max(stop, 0), place.extent)

    def owned_by(self, rank: int) -> tuple[int, int]:
        """Return the half-open range of the flat parameter, without padding, that a rank holds.

        ``start == stop`` if it holds only padding or nothing.  Units: elements.
        """
        start, stop = self.extent_of(rank)
        return min(start, self.numel), min(stop, self.numel)

    @property
    def share_numel(self) -> int:
        """Elements of an equal share of it: by these ranks plan alike, whose shards differ."""
        return shard_numel(self.numel, self.world_size)

    @cached_property
    def shard_numel(self) -> int:
        """Elements of this parameter's shard on this rank, padding included."""
        start, stop = self.extent_of(self.rank)
        return stop - start

    @cached_property
    def largest_shard_numel(self) -> int:
        """Elements of this parameter's shard on the rank that holds most of it."""
        place = self.place
        if not place.extent:
            return 0
        first = min(place.extent, place.shard_numel - place.offset % place.shard_numel)
        return max(first, min(place.extent - first, place.shard_numel))

    @cached_property
    def position_in_shard(self) -> int:
        """The offset of the parameter's shard in its bucket's shard on this rank."""
        before = self.place.offset - self.rank * self.place.shard_numel
        return min(max(before, 0), self.place.shard_numel - self.shard_numel)

    def lies_like(self, other: ParameterInfo) -> bool:
        """Return whether every rank's shards of both hold the same elements of one shape.

        What is computed element by element from both can then be computed on their shards.
        """
        mine, its = self.place, other.place
        return (
            self.world_size,
            mine.offset,
            mine.extent,
            mine.shard_numel,
            self.storage_order,
        ) == ((other.world_size, its.offset, its.extent, its.shard_numel, other.storage_order))

    @property
    def shares_bucket(self) -> bool:
        """Return whether its bucket is laid out for several parameters."""
        return self.assigned is not None

    @cached_property
    def storage_order(self) -> tuple[int, ...]:
        """The dimensions from slowest to fastest in memory; ``(0, 1, ...)`` if contiguous."""
        return storage_order(self.shape, self.stride)

    @property
    def is_contiguous(self) -> bool:
        return self.storage_order == tuple(range(len(self.shape)))

    @cached_property
    def contiguous(self) -> ParameterInfo:
        """The same with its elements in the order of its dimensions."""
        strides = accumulate(reversed(self.shape[1:]), operator.mul, initial=1)
        return replace(self, stride=(*strides,)[::-1][: len(self.shape)])


def storage_order(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Return the dimensions of a dense tensor from slowest to fastest in memory.

    Raises: ValueError if the tensor has holes or overlaps (an expanded or strided view).
    """
    order = sorted(range(len(shape)), key=lambda dim: (-stride[dim], dim))
    sized = [dim for dim in order if shape[dim] != 1]  # the others may carry any stride
    expected = 1
    for dim in reversed(sized):
        if stride[dim] != expected and math.prod(shape) > 0:
            raise ValueError(f"a tensor of shape {shape} and strides {stride} is not dense")
        expected *= shape[dim]
    return tuple(sorted(order) if sized == sorted(sized) else order)


@dataclass(frozen=True)
class KeptGathered:
    """Says what a program keeps gathered, and which states on the device, of what it could.

    ``choices`` are what it could, in words: the gathers that it would make with nothing kept, a
    line for each bucket or parameter, then a line for each bucket's states.  ``cuts`` are, for
    each of the first, the numbers of the gathers that remain.  The others are spared: what the
    one before them has gathered is kept.  ``states`` are the numbers of those that stay, among
    the second.
    """

    choices: tuple[str, ...]
    cuts: tuple[frozenset[int], ...]
    states: frozenset[int] = frozenset()

    def packed(self) -> bytes:
        """Return what is chosen as bytes, for other ranks."""
        return json.dumps([[sorted(cuts) for cuts in self.cuts], sorted(self.states)]).encode()

    def unpacked(self, packed: bytes) -> KeptGathered:
        """Read what another rank has chosen of the same."""
        cuts, states = json.loads(packed)
        return replace(self, cuts=tuple(map(frozenset, cuts)), states=frozenset(states))

    def also_fitting(self, other: KeptGathered) -> KeptGathered:
        """Keep what both keep: what fits on two ranks.  Both choose of the same."""
        cuts = tuple(map(frozenset.union, self.cuts, other.cuts))
        return replace(self, cuts=cuts, states=self.states & other.states)


@dataclass(frozen=True)
class Residency:
    """What stays on the device within the budget, although others of its kind leave.

    ``kept_gathered`` is None if there is nothing to choose.  ``states`` are the updates, as
    (optimizer, parameter), whose states stay; they take ``state_bytes`` on the rank whose shard is
    largest.
    ``gap`` is the share by which another choice might leave the busiest lane less; None if nothing
    was solved.
    """

    kept_gathered: KeptGathered | None = None
    states: frozenset[tuple[int, int]] = frozenset()
    state_bytes: int = 0
    gap: float | None = None


@dataclass(frozen=True)
class Decisions:
    """What is decided of a program: the pass in brackets applies what it is given, or decides.

    It decides what is None, and leaves it None if there is nothing to decide.  Nodes go by the
    names that they have then.  Stage and offload targets are options.

    ``layout`` (bucket): places of parameters, by index.  ``saved`` (recompute): for each backward
    what it computes again because that is cheap, and why it keeps other values.  ``residency``
    (shard_parameters, place_offload).  ``away`` (offload_activations): values in host memory, and
    the nodes before which each leaves, is gone, starts back and is read.  ``starts`` (prefetch):
    waits of gathers, the node behind which each of these starts, and why.
    """

    layout: Mapping[int, Place] | None = None
    saved: Sequence[tuple[Collection[str], Mapping[str, str]]] | None = None
    residency: Residency | None = None
    away: Mapping[str, Sequence[str]] | None = None
    starts: Mapping[str, tuple[str, str]] | None = None


@dataclass
class ParameterTable:
    """Every parameter of one step, in order of first appearance among its inputs."""

    parameters: tuple[ParameterInfo, ...]

    def __iter__(self):
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)

    def __getitem__(self, index: int) -> ParameterInfo:
        return self.parameters[index]

    def cut(self, index: int, axis: str = "") -> ParameterInfo:
        """A parameter as an operator has it cut that names an axis of a mesh, or none."""
        return self[index].kept if axis else self[index]

    def assign(self, places: Mapping[int, Place]) -> None:
        """Move parameters, by index, to these places in buckets."""
        self.parameters = tuple(
            replace(info, assigned=places[info.index]) if info.index in places else info
            for info in self.parameters
        )

    def bucket(self, number: int) -> tuple[ParameterInfo, ...]:
        """The parameters of one bucket, in the order in which they lie in it."""
        members = (info for info in self.parameters if info.place.bucket == number)
        return tuple(sorted(members, key=lambda info: info.place.offset))
