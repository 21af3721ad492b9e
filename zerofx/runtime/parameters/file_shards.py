"""Shards of parameters that are in files while no move and no update is about them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zerofx.errors import FileTierError
from zerofx.ir.parameters import ParameterInfo
from zerofx.runtime.memory.flat import ordinary_tensors
from zerofx.runtime.parameters.parameter import BoundParameter
from zerofx.runtime.storage.disk import BucketLayout, Field
from zerofx.runtime.storage.file_bucket import FiledBucket, Left


class ShardBucket(FiledBucket):
    """This rank's shards of one bucket's parameters, one behind the other, of one dtype.

    ``infos`` are of the parameters; ``adopt`` says which they are.
    """

    what = "parameter shards"

    def __init__(self, tier: Any, name: str, infos: Sequence[ParameterInfo]) -> None:
        super().__init__(tier, name)
        self.lengths = [info.shard_numel for info in infos]
        self.dtype = infos[0].dtype
        self.bounds: list[weakref.ref[BoundParameter]] = []
        self._has_new = False

    @property
    def layout(self) -> BucketLayout:
        return BucketLayout(self.name, (Field(_FIELD, self.dtype, sum(self.lengths)),))

    @property
    def is_gone(self) -> bool:
        return bool(self.bounds) and all(one is None for one, _ in self._members())

    def adopt(self, bounds: Sequence[BoundParameter]) -> None:
        """Be the bucket of these parameters, whose shards are still where they are."""
        self.bounds = [weakref.ref(bound) for bound in bounds]
        for bound in bounds:
            bound.file = self

    def has_any(self) -> bool:
        return any(bound is not None and bound.is_in_file for bound, _ in self._members())

    def arrive(self, views: Mapping[str, Tensor]) -> None:
        """Have each shard, the same tensor as ever, lie in this memory; copy what does not yet."""
        for bound, part in self._parts_of(views):
            if bound is not None:
                self._has_new |= not bound.is_in_file
                bound.lie_in(part)

    def leave(self, views: Mapping[str, Tensor]) -> Left:
        for bound, _ in self._members():
            if bound is not None:
                bound.leave_memory()
        left, self._has_new = Left.NEW if self._has_new else Left.KNOWN, False
        return left

    def value_of(self, bound: BoundParameter) -> Tensor:
        """A copy of one shard, on the CPU.

        Raises: FileTierError if it is lost, or cannot be read.
        """
        parts = self.read()
        if bound in parts:
            return parts[bound].clone()
        raise FileTierError(
            f"the shard of {bound.name!r} is not in {self.name!r}", bucket=self.name
        )

    def read(self) -> dict[BoundParameter, Tensor]:
        """All shards that are in it, in memory of their own on the CPU.

        Raises: FileTierError if they are lost, or cannot be read.
        """
        parts = self._parts_of(self.tier.read(self))
        return {bound: part for bound, part in parts if bound is not None}

    def _members(self) -> Iterator[tuple[BoundParameter | None, int]]:
        """Who is in it, None for one that is no more, and the length of its shard."""
        for reference, numel in zip(self.bounds, self.lengths, strict=True):
            bound = reference()
            alive = bound is not None and not bound.retired and bound.file is self
            yield bound if alive else None, numel

    def _parts_of(
        self, views: Mapping[str, Tensor]
    ) -> Iterator[tuple[BoundParameter | None, Tensor]]:
        with torch.no_grad(), ordinary_tensors():
            parts = views[_FIELD].split(self.lengths)
        for (bound, _), part in zip(self._members(), parts, strict=True):
            yield bound, part


class ShardReader:
    """Reads shards for who wants them out of turn, a bucket of those in files at a time.

    It keeps the last one that it has read: drop it when it has served.
    """

    def __init__(self) -> None:
        self._bucket: ShardBucket | None = None
        self._parts: dict[BoundParameter, Tensor] = {}

    def value(self, bound: BoundParameter) -> Tensor:
        """A shard's values, on the device or in host memory: not to be written to.

        Raises: FileTierError if they are lost, or cannot be read.
        """
        bucket = bound.file
        if bucket is None or not bound.is_in_file:
            return bound.values()
        if bucket is not self._bucket:
            self._bucket, self._parts = None, {}  # before there is another
            self._parts = bucket.read()
            self._bucket = bucket
        return self._parts[bound]


_FIELD = "shards"
