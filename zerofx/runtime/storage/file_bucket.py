"""What is in files under one name while nobody uses it, whatever it is that it holds."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from zerofx.runtime.storage.disk import BucketLayout


class Left(Enum):
    """What a bucket has been left with, when its user is done with it."""

    NOTHING = auto()
    KNOWN = auto()
    """What it held before, with what has been changed of it."""
    NEW = auto()
    """Values that it did not hold before."""
    RELAYOUT = auto()
    """Values that do not fit its layout: they are still with their user."""


class FiledBucket:
    """Values in files, or in the host memory that caches them, for a user who lets go of them.

    ``name`` is the store's for it, ``tier`` the ``FileTier`` that it is in; ``what`` says in words
    what it holds.
    """

    what = "values"
    outlives_steps = True
    is_copied_by_gpu = True

    optimizer: Callable[[], torch.optim.Optimizer | None] = staticmethod(lambda: None)
    """Gives the optimizer into which a checkpoint has to be loaded when this is lost."""

    def __init__(self, tier: Any, name: str) -> None:
        self.tier = tier
        self.name = name

    @property
    def layout(self) -> BucketLayout:
        raise NotImplementedError

    @property
    def key(self) -> Hashable:
        """What it is found by when another program looks for it; None if it is not looked for."""
        return None

    @property
    def nbytes(self) -> int:
        """What its values take, without padding; whether it holds any yet or not."""
        return sum(field.nbytes for field in self.layout.fields)

    @property
    def is_gone(self) -> bool:
        """Whether nobody is left to use it."""
        return False

    def has_any(self) -> bool:
        """Whether its user still counts on something that lies here."""
        return False

    def forget(self) -> None:
        """Hold nothing: what its user counts on comes from elsewhere now."""

    def make_whole(self) -> None:
        """Have all of it at hand, before there is memory for it.  It may fail."""

    def arrive(self, views: Mapping[str, Tensor]) -> None:
        """Have its user find it in memory, as ``views`` of the layout's fields."""

    def leave(self, views: Mapping[str, Tensor]) -> Left:
        """Take it back from its user, who finds it in this memory no longer."""
        return Left.KNOWN

    def lay_out_anew(self) -> None:
        """Forget what it holds, and take the layout of what its user has."""
        raise NotImplementedError


def words_for(buckets: Iterable[FiledBucket]) -> str:
    """What these hold that outlives a step; what they hold at all if nothing does."""
    buckets = list(buckets)
    kept = [bucket for bucket in buckets if bucket.outlives_steps] or buckets
    return " and ".join(sorted({bucket.what for bucket in kept}))
