"""The mesh of ranks as plain data: its axes, and those over which tensors are cut."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

DATA = "data"
"""The one axis of ranks that are not arranged any further."""

NUMBERS_TOGETHER = 64
"""So many numbers of eight bytes, or a multiple, tell the other ranks what an own step has left."""

EVERY_RANK = -1
"""In place of a shard's number: what each rank does for itself."""


@dataclass(frozen=True)
class Mesh:
    """Ranks that each have a batch of their own, along axes with names and sizes.

    The last axis varies fastest among ranks: it is the inner one, of ranks that are near to each
    other.  What is sharded is cut over that axis first.  From ``outer_stage`` 1 on the shards of
    optimizer states are cut again over the outer axis, from 2 on those of gradients, and at 3 those
    of parameters; else the ranks along it hold the same shards.  A shard is one of states, and a
    ``coarse`` one is cut over the inner axis alone.  ``rank`` is the one that looks at it.

    Source: hybrid sharding, Zhao et al. 2023 (PyTorch FSDP), section 3.2.2.
    """

    axes: tuple[tuple[str, int], ...] = ((DATA, 1),)
    rank: int = 0
    outer_stage: int = 0

    @classmethod
    def flat(cls, world_size: int, rank: int = 0) -> Mesh:
        """Return ranks along one axis."""
        return cls(((DATA, world_size),), rank)

    @property
    def world_size(self) -> int:
        """The number of all ranks."""
        return math.prod(size for _, size in self.axes)

    @property
    def inner(self) -> str:
        """The axis of ranks that are near to each other."""
        return self.axes[-1][0]

    @property
    def outer(self) -> str:
        """The other axis; empty if there is none."""
        return self.axes[0][0] if len(self.axes) > 1 else ""

    @property
    def everywhere(self) -> str:
        """The name of all axes together, as operators have it."""
        return ",".join(name for name, _ in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names that an operator may have for its axis: of each, and of all together."""
        return tuple(dict.fromkeys((*(name for name, _ in self.axes), self.everywhere)))

    @property
    def is_cut(self) -> bool:
        """Return whether anything is cut over the outer axis."""
        return bool(self.outer and self.outer_stage)

    @property
    def parts(self) -> int:
        """The number of shards that a coarse one consists of, if parameters are cut so."""
        return self.size(self.outer) if self.outer and self.outer_stage in (1, 2) else 1

    @property
    def hops(self) -> tuple[str, ...]:
        """The axes that tensors are cut over, in the order of reductions; gathers go back."""
        return (self.inner, self.outer) if self.is_cut else (self.inner,)

    def carried(self, reduces: bool) -> Sequence[tuple[str, float]]:
        """The axes that a buffer travels along, and how many times its bytes are gathered there.

        It is put together from shards, or reduced, a mean over replicas being an all-reduce: a
        reduction and a gather in one.
        """
        carried = [(self.inner, 1.0)]
        if self.outer and (reduces or (self.is_cut and self.parts == 1)):
            carried.append((self.outer, (1 if self.is_cut else 2) / self.size(self.inner)))
        return carried

    @property
    def across(self) -> str:
        """The axis, or all of them, along which ranks hold different shards."""
        return self.everywhere if self.is_cut else self.inner

    @property
    def num_shards(self) -> int:
        """The number of shards of a tensor."""
        return math.prod(map(self.size, self.hops))

    @property
    def shard(self) -> int:
        """The number of this rank's shard."""
        return self.shard_of(self.rank)

    def replica_among(self, num_shards: int) -> tuple[int, int]:
        """Return its number among the ranks with the same of so many shards, and that of these."""
        num_replicas = self.world_size // num_shards
        return self.rank // num_shards if num_replicas > 1 else 0, num_replicas

    def shard_of(self, rank: int) -> int:
        """The number of a rank's shard: those that are cut from one again follow one another."""
        outer, inner = divmod(rank, self.size(self.inner))
        return inner * self.size(self.outer) + outer if self.is_cut else inner

    def rank_of(self, shard: int) -> int:
        """Return the first rank that holds the shard of this number."""
        if not self.is_cut:
            return shard
        inner, outer = divmod(shard, self.size(self.outer))
        return outer * self.size(self.inner) + inner

    def size(self, axis: str) -> int:
        """The number of ranks along an axis, or along all."""
        return self.world_size if axis == self.everywhere else dict(self.axes)[axis]

    def ranks_along(self, axis: str) -> Sequence[int]:
        """The ranks that this one communicates with along an axis, itself among them, in order."""
        if axis == self.everywhere:
            return range(self.world_size)
        size = self.size(self.inner)
        outer, inner = divmod(self.rank, size)
        if axis == self.inner:
            return range(outer * size, (outer + 1) * size)
        return range(inner, self.world_size, size)

    # The keywords of operators; none if there is but one axis.

    def over(self, axis: str) -> Mapping[str, str]:
        """Return those of an operator along an axis."""
        return {"axis": axis} if self.outer else {}

    @property
    def over_shards(self) -> Mapping[str, str]:
        """Return those of an operator between ranks that hold different shards."""
        return self.over(self.across)

    def cut_in(self, num_shards: int) -> Mapping[str, str]:
        """Return those of an operator on shards, so many of a tensor: none, or for coarse ones."""
        return {} if num_shards == self.num_shards else self.over(self.inner)

    @property
    def over_all(self) -> Mapping[str, str]:
        """Return those of an operator between all ranks."""
        return self.over(self.everywhere)

    @property
    def facts(self) -> dict[str, object]:
        """Return the facts that a dumped program states of its mesh; none if it has one axis."""
        return {"MESH": self.axes, "OUTER_STAGE": self.outer_stage} if self.outer else {}

    def __str__(self) -> str:
        sizes = " x ".join(f"{name} {size}" for name, size in self.axes)
        return f"{sizes}, stage {self.outer_stage} over {self.outer}" if self.outer else sizes


def axes_in(axis: str) -> frozenset[str]:
    """The names of the axes that an operator's argument names."""
    return frozenset(axis.split(","))


def balanced(
    work: Sequence[int], num_ranks: int, loads: Sequence[int] = ()
) -> tuple[list[int], int]:
    """Return a rank for each piece of work, and how much the rank has that has most.

    The heaviest first, each to the rank that has least so far: at most 4/3 of what the best
    choice would leave a rank with.  Ranks may have ``loads`` already.
    Source: Graham 1969, "Bounds on Multiprocessing Timing Anomalies".
    """
    loads = list(loads) or [0] * num_ranks
    owners = [0] * len(work)
    for position in sorted(range(len(work)), key=lambda position: -work[position]):
        rank = min(range(num_ranks), key=loads.__getitem__)
        owners[position] = rank
        loads[rank] += work[position]
    return owners, max(loads)
