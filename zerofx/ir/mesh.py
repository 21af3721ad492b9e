"""The mesh of ranks as plain data: its axes, and the axis over which tensors are cut."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

DATA = "data"
"""The one axis of ranks that are not arranged any further."""


@dataclass(frozen=True)
class Mesh:
    """Ranks that each have a batch of their own, along axes with names and sizes.

    The last axis varies fastest among ranks: it is the inner one, of ranks that are near to each
    other.  What is sharded is cut over that axis, and the ranks along the others hold the same
    shards.  ``rank`` is the one that looks at it.

    Source: hybrid sharding, Zhao et al. 2023 (PyTorch FSDP), section 3.2.2.
    """

    axes: tuple[tuple[str, int], ...] = ((DATA, 1),)
    rank: int = 0

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
        """The axis over which tensors are cut."""
        return self.axes[-1][0]

    @property
    def outer(self) -> str:
        """The axis along which ranks hold the same shards; empty if there is none."""
        return self.axes[0][0] if len(self.axes) > 1 else ""

    @property
    def everywhere(self) -> str:
        """The name of all axes together, as operators have it."""
        return ",".join(name for name, _ in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """What operators may be along: an axis, or all."""
        return tuple(dict.fromkeys((*(name for name, _ in self.axes), self.everywhere)))

    @property
    def num_shards(self) -> int:
        """The number of shards of a tensor."""
        return self.axes[-1][1]

    @property
    def num_replicas(self) -> int:
        """The number of ranks that hold the same shard."""
        return self.world_size // self.num_shards

    @property
    def shard(self) -> int:
        """The number of this rank's shard."""
        return self.rank % self.num_shards

    @property
    def replica(self) -> int:
        """The number of this rank among those that hold the same shard."""
        return self.rank // self.num_shards

    def size(self, axis: str) -> int:
        """The number of ranks along an axis, or along all."""
        return self.world_size if axis == self.everywhere else dict(self.axes)[axis]

    def ranks_along(self, axis: str) -> Sequence[int]:
        """The ranks that this one communicates with along an axis, itself among them, in order."""
        if axis == self.everywhere:
            return range(self.world_size)
        if axis == self.inner:
            first = self.rank - self.shard
            return range(first, first + self.num_shards)
        return range(self.shard, self.world_size, self.num_shards)

    # The keywords of operators; none if there is but one axis.

    @property
    def over_shards(self) -> Mapping[str, str]:
        """Of what is between ranks with different shards."""
        return {"axis": self.inner} if self.outer else {}

    @property
    def over_replicas(self) -> Mapping[str, str]:
        """Of what is between ranks with the same shards."""
        return {"axis": self.outer}

    @property
    def over_all(self) -> Mapping[str, str]:
        """Of what is between all ranks."""
        return {"axis": self.everywhere} if self.outer else {}

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in self.axes)


def axes_in(axis: str) -> frozenset[str]:
    """The names of the axes that an operator's argument names."""
    return frozenset(axis.split(","))
