"""Files for the values that a process does not keep in memory: opened, used in order, given up."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerofx.errors import FileTierError, StepError
from zerofx.runtime.memory.flat import ordinary_tensors
from zerofx.runtime.memory.pages import aligned_empty
from zerofx.runtime.storage.bucket import Bucket, Left, Location, ValueBucket, words_for
from zerofx.runtime.storage.disk import FileStore, HostCache, Key
from zerofx.runtime.storage.disk.stripes import NO_ROOM
from zerofx.runtime.storage.disk.system import SystemCalls
from zerofx.runtime.storage.memory import HostMemory

DEFAULT_SHARE = 0.5
"""Of what the machine has available, for the caches of all its ranks together."""


@dataclass(frozen=True)
class FileOptions:
    """The options of a tier.

    ``cache_bytes`` None is half of what the machine has available divided by ``ranks_here``.
    """

    directories: tuple[str, ...]
    cache_bytes: int | None
    checksums: bool
    ranks_here: int


class FileTier:
    """Buckets in files of some directories, and a bounded part of them in host memory.

    Buckets that a program will use are made with a ``name`` of this tier's, and ``reserve`` makes
    room for them; ``buckets`` are those that have it.  A step is ``begin`` with the buckets as it
    uses them, ``acquire`` and ``release`` for each of these in that order, ``finish``; or
    ``failed`` at any time. What fails with a FileTierError leaves the states ``lost``: part of them
    are of the step before.
    """

    location = Location.FILE

    def __init__(self, options: FileOptions, host: HostMemory, system: SystemCalls | None) -> None:
        self.options, self.host, self._system = options, host, system
        self.lost: FileTierError | None = None
        self.num_grown = 0  # how often a bucket has been given more room
        self._open(options.cache_bytes or 0)
        self.buckets: weakref.WeakSet[Bucket] = weakref.WeakSet()
        self._lost_with: list[tuple[Any, Any]] = []  # optimizers, and the states that they had
        self._numbers = itertools.count()
        self._gone: deque[str] = deque()  # names in the store that nothing needs any more
        self._in_use: Counter[Bucket] = Counter()  # how often each is, in order
        # A worker may fetch and release while the thread that runs the step asks for something.
        self._lock = threading.RLock()

    def _open(self, memory_bytes: int) -> None:
        """Take files in which nothing is yet, and a cache for them."""
        options = self.options
        self.store = FileStore(
            options.directories, checksums=options.checksums, system=self._system
        )
        self.cache = HostCache(self.store, memory_bytes, self.host)

    # Before the first step

    def name(self, words: str) -> str:
        """A name for a new bucket, which no other one has."""
        return f"{words}, {next(self._numbers)}"

    def reserve(self, buckets: Sequence[Bucket], in_use_bytes: int = 0) -> None:
        """Make room on disk for what of a program's buckets is new, for all of it or for none.

        ``in_use_bytes`` is what the program uses at once, at most.

        Raises: FileTierError with the numbers if a disk has no room, StepError if the cache's
        bound is too small for them.
        """
        with self._lock:
            if self.lost is not None:
                self._open_again()
            self._remove_gone()
            new = [one for one in dict.fromkeys(buckets) if one.name not in self.store.layouts]
            self._check_cache(buckets, in_use_bytes)
            if not new:
                return
            try:
                self.store.add([bucket.layout for bucket in new])
            except FileTierError as error:
                if error.errno in NO_ROOM:
                    raise self._no_room(new, error) from error
                raise
            for bucket in new:
                self.buckets.add(bucket)
                weakref.finalize(bucket, self._gone.append, bucket.name).atexit = False
                self.cache.is_pinned |= bucket.is_pinned

    def cache_bytes_to_come(self, buckets: Sequence[Bucket]) -> int:
        """Host memory that the cache will take for these buckets and does not hold yet."""
        total = sum({bucket.name: bucket.layout.nbytes for bucket in buckets}.values())
        return max(min(total, self.cache.memory_bytes) - self.cache.held_bytes, 0)

    def _check_cache(self, buckets: Sequence[Bucket], in_use_bytes: int) -> None:
        sizes = {bucket: bucket.layout.nbytes for bucket in buckets}
        if not sizes:
            return
        largest = max(sizes, key=lambda bucket: sizes[bucket])
        least = max(2 * sizes[largest], in_use_bytes)
        smaller = "bucket_bytes" if largest.outlives_steps else "batch"
        given = self.options.cache_bytes
        if given is None:
            if self.cache.memory_bytes == 0:
                available = self.host.available_bytes() or 0
                self.cache.memory_bytes = int(available * DEFAULT_SHARE) // self.options.ranks_here
            self.cache.memory_bytes = max(self.cache.memory_bytes, least)
        elif given < least:
            why = f"what a step has in use at once of what is in files: {least} bytes on this rank"
            if given < 2 * sizes[largest]:
                why = (
                    f"two of the largest buckets of {largest.what}: {largest.name!r} takes "
                    f"{sizes[largest]} bytes on this rank, and one is read while another is used"
                )
            raise StepError(
                f"offload_cache_bytes={given} is less than {why}. Give at least {least}, or a "
                f"smaller {smaller}."
            )

    def _no_room(self, new: Sequence[Bucket], error: FileTierError) -> FileTierError:
        needed = sum(bucket.layout.nbytes for bucket in new)
        return FileTierError(
            f"this rank's {words_for(new)} need {needed} bytes in files: {error}",
            path=error.path,
            errno=error.errno,
        )

    # In a step

    def begin(self, buckets: Sequence[Bucket]) -> None:
        """Start a step that uses these buckets, each time it does, in this order.

        Raises: FileTierError if what they hold is lost, or a write has failed since.
        """
        with self._lock, ordinary_tensors():
            if self.lost is not None:
                self._open_again()
            self._remove_gone()
            self.cache.begin([bucket.name for bucket in buckets])

    def acquire(self, bucket: Bucket) -> None:
        """Have a bucket in host memory, where its user finds it.

        Raises: FileTierError if it cannot be read.
        """
        with self._lock, ordinary_tensors():
            views = self.cache.use(bucket.name)
            bucket.prepare()
            self._in_use[bucket] += 1  # it may be interrupted
            bucket.arrive(views)

    def release(self, bucket: Bucket, *, dirty: bool, void: bool) -> None:
        """Take a bucket back from its user, with what has been changed or made of it."""
        with self._lock, ordinary_tensors():
            views = self.cache.views(bucket.name)
            is_last = self._in_use[bucket] == 1
            left = bucket.leave(views) if is_last else Left.KNOWN
            # Only now may something else be read into the memory that it lay in.
            if left is Left.RELAYOUT:
                self._lay_out_anew(bucket)
                self.cache.drop(bucket.name)
            else:
                dirty = left is Left.NEW or (left is Left.KNOWN and dirty)
                self.cache.release(bucket.name, dirty=dirty, void=void)
            self._in_use[bucket] -= 1
            if is_last:
                del self._in_use[bucket]

    def grow(self, bucket: ValueBucket, num_bytes: int, in_use_bytes: int) -> None:
        """Give a bucket that holds nothing, and is not in use, more room.

        ``in_use_bytes`` is what the program then uses at once, at most.

        Raises: StepError if there is none; nothing has changed then.
        """
        with self._lock:
            larger = ValueBucket(self, bucket.name, num_bytes, bucket.device)
            self._check_cache([larger], in_use_bytes)
            try:
                self.store.lay_out_anew(larger.layout)
            except FileTierError as error:
                raise StepError(str(self._no_room([larger], error))) from error
            self.cache.drop(bucket.name)
            bucket.resize(num_bytes)
            self.num_grown += 1

    def finish(self) -> None:
        """End a step.  Raises: FileTierError if a write is known to have failed."""
        assert not self._in_use, "a program lets go of all that it uses"
        self.store.transfers.check_usable()

    def failed(
        self, error: BaseException, optimizers: Iterable[torch.optim.Optimizer] = ()
    ) -> None:
        """Leave a step that failed: nothing holds memory of the cache any more.

        If what files hold is lost, a checkpoint has to be loaded into these ``optimizers`` too.
        """
        with self._lock:
            errors = [error] if isinstance(error, FileTierError) else []
            for bucket in list(self._in_use):
                try:
                    self._in_use[bucket] = 1  # ``begin`` forgets how often it was in use
                    self.release(bucket, dirty=True, void=not bucket.outlives_steps)
                except FileTierError as another:
                    errors.append(another)
                except Exception as another:
                    words = f"{bucket.name!r} could not be let go of after {error!r}: {another}"
                    errors.append(FileTierError(words, bucket=bucket.name))
            self._in_use.clear()
            if errors and self.lost is None:
                self.lost = errors[0]
                owners = {*optimizers, *(bucket.optimizer() for bucket in self.buckets)} - {None}
                self._lost_with = [(weakref.ref(one), one.state) for one in owners if one.state]

    def read(self, bucket: Bucket) -> dict[Key, Tensor]:
        """All of a bucket, in memory of its own, at any time.

        Raises: FileTierError if it is lost, or cannot be read.
        """
        with self._lock, ordinary_tensors():
            self._check_not_lost()
            return self.cache.read(bucket.name)

    def _lay_out_anew(self, bucket: Bucket) -> None:
        """Write values that do not fit a bucket's layout, and give it theirs from now on."""
        bucket.lay_out_anew()
        self.store.lay_out_anew(bucket.layout)
        self.num_grown += 1
        memory = aligned_empty(bucket.layout.nbytes)
        bucket.leave(bucket.layout.views(memory))
        self.store.start_write(bucket.name, memory).wait()

    def _remove_gone(self) -> None:
        for bucket in list(self.buckets):
            if bucket.is_gone:  # a program that outlives it has the bucket still
                self.buckets.discard(bucket)
                self._gone.append(bucket.name)
        while self._gone:
            name = self._gone.popleft()
            if name in self.store.layouts:
                self.cache.drop(name)
                self.store.remove(name)

    # After a failure

    def _check_not_lost(self) -> None:
        if self.lost is None:
            return
        raise FileTierError(
            f"the {words_for(self.buckets)} in files are lost since a step failed in the middle:"
            " some are of that step and some of the one before. Load a checkpoint into the model"
            " and the optimizer (load_state_dict of both), or start again from one. The step had"
            f" failed with: {self.lost}",
            path=self.lost.path,
            bucket=self.lost.bucket,
            offset=self.lost.offset,
            errno=self.lost.errno,
        ) from self.lost

    def _open_again(self) -> None:
        """Go on with new files once a checkpoint has been loaded into every optimizer."""
        buckets = list(self.buckets)
        if any(bucket.has_any() for bucket in buckets):
            self._check_not_lost()
        for optimizer, states in self._lost_with:
            alive = optimizer()
            if alive is not None and alive.state is states:
                self._check_not_lost()
        self.store.close()
        is_pinned = self.cache.is_pinned
        self._open(self.cache.memory_bytes)
        self.cache.is_pinned = is_pinned
        self.store.add([bucket.layout for bucket in buckets])
        self._gone.clear()
        for bucket in buckets:
            bucket.forget()
        self.lost, self._lost_with = None, []


class FileTiers:
    """The file tiers of this process, one for each set of directories.

    One is closed, and its files are removed, when nothing that uses it is left: no compiled
    function and no optimizer with states there.  ``system`` is for tests.
    """

    def __init__(self, host: HostMemory) -> None:
        self.system: SystemCalls | None = None
        self._host = host
        self._tiers: weakref.WeakValueDictionary[tuple[str, ...], FileTier] = (
            weakref.WeakValueDictionary()
        )

    @property
    def is_empty(self) -> bool:
        return not self._tiers

    def open(self, options: FileOptions) -> FileTier:
        """The tier of these directories.

        Raises: FileTierError for a directory that cannot be used, StepError if the tier has been
        opened with other options.
        """
        key = tuple(map(os.path.realpath, options.directories))
        tier = self._tiers.get(key)
        if tier is None:
            tier = self._tiers[key] = FileTier(options, self._host, self.system)
        mine, its = ((one.cache_bytes, one.checksums) for one in (options, tier.options))
        if mine != its:
            raise StepError(
                f"offload_cache_bytes={mine[0]} and offload_checksums={mine[1]} are not what "
                f"another function of this process has opened {', '.join(options.directories)} "
                f"with: {its[0]} and {its[1]}. Give all of them the same."
            )
        return tier
