"""Buckets: tensors that lie in one place together, for users that let go of them between uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum, auto
from typing import Any, Protocol

import torch
from torch import Tensor

from zerofx.accelerator import is_accelerator
from zerofx.runtime.storage.disk import BucketLayout, Key, Part


class Location(Enum):
    """The place of values while nothing uses them."""

    DEVICE = auto()
    HOST = auto()
    FILE = auto()


class Left(Enum):
    """The contents of a bucket after its user has let go of it."""

    NOTHING = auto()
    KNOWN = auto()
    """Its former contents, with the changes that its user has made."""
    NEW = auto()
    """Values that it did not hold before."""
    RELAYOUT = auto()
    """Values that do not fit its layout: its user still has them."""


class Place(Protocol):
    """Memory of a device or of the host, or files: what buckets lie in."""

    location: Location

    def acquire(self, bucket: Any) -> None:
        """Have a bucket's user find its values here, or in the memory that caches files.

        Values from elsewhere (another place, a state dict, other buckets) come in here.

        Raises: FileTierError if they cannot be read.
        """

    def release(self, bucket: Any, *, dirty: bool, void: bool) -> None:
        """Take the values back; ``dirty`` if they were changed, ``void`` if nothing needs them."""


class Bucket:
    """Tensors that lie in a ``place`` together, for a user that lets go of them.

    A use is ``acquire``, which has the user find them in memory, then ``release``, which takes
    them back.  ``name`` is theirs among files, ``device`` where they are used.  ``what`` says in
    words what the bucket holds; ``optimizer`` gives the optimizer into which a checkpoint has to be
    loaded when that is lost, if there is one.
    """

    what = "values"
    outlives_steps = True
    device = torch.device("cpu")
    optimizer: Callable[[], torch.optim.Optimizer | None] = staticmethod(lambda: None)

    def __init__(self, place: Place, name: str, parts: tuple[Part, ...]) -> None:
        self.place: Any = place
        self.name, self.parts = name, parts

    def acquire(self) -> None:
        self.place.acquire(self)

    def release(self, *, dirty: bool = True, void: bool = False) -> None:
        self.place.release(self, dirty=dirty, void=void)

    @property
    def layout(self) -> BucketLayout:
        return BucketLayout(self.name, self.parts)

    @property
    def is_pinned(self) -> bool:
        return is_accelerator(self.device)  # which copies them by itself

    @property
    def nbytes(self) -> int:
        """The bytes of all its values, without padding, also before it holds any."""
        return sum(part.nbytes for part in self.parts)

    # What each kind of bucket says of its user

    @property
    def is_gone(self) -> bool:
        """True if nothing is left that could use it."""
        return False

    def has_any(self) -> bool:
        """Return whether its user still needs something that lies here."""
        return False

    def forget(self) -> None:
        """Hold nothing: the values that its user needs come from elsewhere now."""

    def prepare(self) -> None:
        """Have all values at hand before there is memory for them.  It may fail."""

    def parts_elsewhere(self, memory: Any) -> Sequence[Part]:
        """The parts, as its user has them now, of which something does not lie in this memory."""
        raise NotImplementedError

    def arrive(self, views: Mapping[Key, Tensor]) -> None:
        """Have its user find the values in memory: ``views`` by their keys."""
        raise NotImplementedError

    def leave(self, views: Mapping[Key, Tensor]) -> Left:
        """Take the values back from the user, which no longer finds them in this memory."""
        raise NotImplementedError

    def lay_out_anew(self) -> None:
        """Forget what it holds, and take the layout of what its user has."""
        raise NotImplementedError


class ValueBucket(Bucket):
    """Room for one saved value of a step on ``device`` at a time, of at most ``num_bytes``.

    ``memory`` is where it lies while something uses it, uint8[num_bytes].
    """

    what = "activations"
    outlives_steps = False

    def __init__(self, place: Place, name: str, num_bytes: int, device: torch.device) -> None:
        super().__init__(place, name, ())
        self.device = device
        self.resize(num_bytes)

    def resize(self, num_bytes: int) -> None:
        """Have room for so much, and nothing there."""
        self.num_bytes = num_bytes
        self.memory: Tensor | None = None
        self.parts = (Part("value", torch.uint8, ((0, num_bytes),)),)

    def acquired(self) -> Tensor:
        """Acquire it, and return its memory."""
        self.acquire()
        assert self.memory is not None, "it has arrived"
        return self.memory

    def parts_elsewhere(self, memory: Any) -> Sequence[Part]:
        return self.parts if self.memory is None else ()

    def arrive(self, views: Mapping[Key, Tensor]) -> None:
        (self.memory,) = views.values()

    def leave(self, views: Mapping[Key, Tensor]) -> Left:
        self.memory = None
        return Left.NEW


class Reader:
    """Reads values out of turn, a bucket at a time.

    It keeps the last bucket that it has read: drop the reader when it has served.
    """

    def __init__(self) -> None:
        self._bucket: Bucket | None = None
        self._values: dict[Key, Tensor] = {}

    def read(self, bucket: Bucket, key: Key) -> Tensor:
        """One tensor of a bucket, on the CPU: not to be written to.

        Raises: FileTierError if it is lost, or cannot be read.
        """
        if bucket is not self._bucket:
            self._bucket, self._values = None, {}  # before there is another
            self._values = bucket.place.read(bucket)
            self._bucket = bucket
        return self._values[key]


def words_for(buckets: Iterable[Bucket]) -> str:
    """Say what these hold that outlives a step, or what they hold at all if nothing does."""
    buckets = list(buckets)
    kept = [bucket for bucket in buckets if bucket.outlives_steps] or buckets
    return " and ".join(sorted({bucket.what for bucket in kept}))
