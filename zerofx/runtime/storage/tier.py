"""Files for the values that a process does not keep in memory: opened, used in order, given up."""

from __future__ import annotations

import errno
import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from zerofx.errors import FileTierError, StepError
from zerofx.runtime.memory.flat import ordinary_tensors
from zerofx.runtime.storage.bucket import Bucket, Left, ValueBucket, words_for
from zerofx.runtime.storage.disk import FileStore, HostCache, Key
from zerofx.runtime.storage.disk.system import SystemCalls
from zerofx.runtime.storage.host import HostMemory

DEFAULT_SHARE = 0.5
"""Of what the machine has available, for the caches of all its ranks together."""


class FileTier:
    """Buckets in files of some directories, and a bounded part of them in host memory.

    Buckets that a program will use are made with a ``name`` of this tier's, and ``reserve`` makes
    room for them.  ``find`` gives those that there are.  A step is
    ``begin`` with the buckets as it uses them, ``fetch`` and ``release`` for each of these in that
    order, ``finish``; or ``failed`` at any time. What fails with a FileTierError leaves the states
    ``lost``: part of them are of the step before.

    ``cache_bytes`` None is half of what the machine has available divided by ``ranks_here``.
    """

    def __init__(
        self,
        directories: Sequence[str],
        cache_bytes: int | None,
        checksums: bool,
        ranks_here: int,
        host: HostMemory,
        system: SystemCalls | None,
    ) -> None:
        self.directories = tuple(directories)
        self.given_cache_bytes, self.checksums = cache_bytes, checksums
        self.ranks_here = ranks_here
        self.host = host
        self.lost: FileTierError | None = None
        self.store = FileStore(directories, checksums=checksums, system=system)
        self.cache = HostCache(self.store, memory_bytes=cache_bytes or 0, host=host)
        self._system = system
        self._by_key: weakref.WeakValueDictionary[Hashable, Bucket] = weakref.WeakValueDictionary()
        self._all: weakref.WeakSet[Bucket] = weakref.WeakSet()
        self._lost_with: list[tuple[Any, Any]] = []  # optimizers, and the states that they had
        self._numbers = itertools.count()
        self._gone: deque[str] = deque()  # names in the store that nothing needs any more
        self._in_use: dict[Bucket, int] = {}  # how often each is, in order
        # A worker may fetch and release while the thread that runs the step asks for something.
        self._lock = threading.RLock()

    # Before the first step

    def find(self, key: Hashable) -> Bucket | None:
        """The bucket with this key that has room here, if there is one."""
        with self._lock:
            return self._by_key.get(key)

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
            self._make_room(new)

    def _make_room(self, new: Sequence[Bucket]) -> None:
        try:
            self.store.add([bucket.layout for bucket in new])
        except FileTierError as error:
            if error.errno in _NO_ROOM:
                raise self._no_room(new, error) from error
            raise
        for bucket in new:
            self._all.add(bucket)
            weakref.finalize(bucket, self._gone.append, bucket.name).atexit = False
            if bucket.key is not None:
                self._by_key[bucket.key] = bucket
            # States need not be pinned: updates run on the CPU, and no GPU copies these.
            self.cache.is_pinned |= bucket.is_copied_by_gpu and torch.cuda.is_available()

    def cache_bytes_to_come(self, buckets: Sequence[Bucket]) -> int:
        """Host memory that the cache will take for these buckets and does not hold yet."""
        total = sum({bucket.name: bucket.layout.nbytes for bucket in buckets}.values())
        return max(min(total, self.cache_bytes) - self.cached_bytes, 0)

    @property
    def cached_bytes(self) -> int:
        """Host memory that the cache holds now."""
        return self.cache.held_bytes

    @property
    def cache_bytes(self) -> int:
        """The bound of what host memory keeps; if not given, known once buckets are reserved."""
        return self.cache.memory_bytes

    def _check_cache(self, buckets: Sequence[Bucket], in_use_bytes: int) -> None:
        sizes = {bucket: bucket.layout.nbytes for bucket in buckets}
        if not sizes:
            return
        largest = max(sizes, key=lambda bucket: sizes[bucket])
        least = max(2 * sizes[largest], in_use_bytes)
        smaller = "bucket_bytes" if largest.outlives_steps else "batch"
        if self.given_cache_bytes is None:
            if self.cache.memory_bytes == 0:
                available = self.host.available_bytes() or 0
                self.cache.memory_bytes = int(available * DEFAULT_SHARE) // self.ranks_here
            self.cache.memory_bytes = max(self.cache.memory_bytes, least)
        elif self.given_cache_bytes < 2 * sizes[largest]:
            raise StepError(
                f"offload_cache_bytes={self.given_cache_bytes} is less than two of the largest "
                f"buckets of {largest.what}: {largest.name!r} takes {sizes[largest]} bytes on this "
                "rank, and one is read while another is used. Give at least "
                f"{least}, or a smaller {smaller}."
            )
        elif self.given_cache_bytes < least:
            raise StepError(
                f"offload_cache_bytes={self.given_cache_bytes} is less than what a step has in use "
                f"at once of what is in files: {least} bytes on this rank. Give at least that, or "
                f"a smaller {smaller}."
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

    def fetch(self, bucket: Bucket) -> None:
        """Have a bucket in host memory, where its user finds it.

        What comes from elsewhere (the device, a state dict, other buckets) comes in here.

        Raises: FileTierError if it cannot be read.
        """
        with self._lock, ordinary_tensors():
            views = self.cache.use(bucket.name)
            bucket.prepare()
            self._in_use[bucket] = self._in_use.get(bucket, 0) + 1  # it may be interrupted
            bucket.arrive(views)

    def release(self, bucket: Bucket, *, is_dirty: bool = True, is_void: bool = False) -> None:
        """Take a bucket back from its user, with what has been changed or made of it.

        If it ``is_void``, nothing needs what it holds.
        """
        with self._lock, ordinary_tensors():
            views = self.cache.views(bucket.name)
            is_last = self._in_use[bucket] == 1
            left = bucket.leave(views) if is_last else Left.KNOWN
            # Only now may something else be read into the memory that it lay in.
            if left is Left.RELAYOUT:
                self._lay_out_anew(bucket)
                self.cache.drop(bucket.name)
            else:
                is_dirty = left is Left.NEW or (left is Left.KNOWN and is_dirty)
                self.cache.release(bucket.name, dirty=is_dirty, void=is_void)
            self._in_use[bucket] -= 1
            if is_last:
                del self._in_use[bucket]

    def grow(self, bucket: ValueBucket, num_bytes: int, in_use_bytes: int) -> None:
        """Give a bucket that holds nothing, and is not in use, more room.

        ``in_use_bytes`` is what the program then uses at once, at most.

        Raises: StepError if there is none; nothing has changed then.
        """
        with self._lock:
            larger = ValueBucket(self, bucket.name, num_bytes)
            self._check_cache([larger], in_use_bytes)
            try:
                self.store.lay_out_anew(larger.layout)
            except FileTierError as error:
                raise StepError(str(self._no_room([larger], error))) from error
            self.cache.drop(bucket.name)
            bucket.resize(num_bytes)

    def finish(self) -> None:
        """End a step.  Raises: FileTierError if a write is known to have failed."""
        assert not self._in_use, "a program lets go of all that it uses"
        self.store.check_usable()

    def failed(
        self, error: BaseException, optimizers: Iterable[torch.optim.Optimizer] = ()
    ) -> None:
        """Leave a step that failed: nothing holds memory of the cache any more.

        If what files hold is lost, a checkpoint has to be loaded into these ``optimizers`` too.
        """
        with self._lock:
            was_lost = self.lost is not None
            if isinstance(error, FileTierError):
                self._lose(error)
            for bucket in list(self._in_use):
                try:
                    self._in_use[bucket] = 1  # ``begin`` forgets how often it was in use
                    self.release(bucket, is_void=isinstance(bucket, ValueBucket))
                except FileTierError as another:
                    self._lose(another)
                except Exception as another:
                    self._lose(
                        FileTierError(
                            f"{bucket.name!r} could not be let go of after {error!r}: {another}",
                            bucket=bucket.name,
                        )
                    )
            self._in_use.clear()
            if self.lost is not None and not was_lost:
                self._lost_with += [
                    (weakref.ref(one), one.state) for one in optimizers if one.state
                ]

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
        memory = self.store.empty(bucket.name)
        bucket.leave(bucket.layout.views(memory))
        self.store.start_write(bucket.name, memory).wait()

    def _remove_gone(self) -> None:
        for bucket in list(self._all):
            if bucket.is_gone:  # a program that outlives it has the bucket still
                self._all.discard(bucket)
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
            f"the {words_for(self._all)} in files are lost since a step failed in the middle: some"
            " are of that step and some of the one before. Load a checkpoint into the model and the"
            " optimizer (load_state_dict of both), or start again from one. The step had failed"
            f" with: {self.lost}",
            path=self.lost.path,
            bucket=self.lost.bucket,
            offset=self.lost.offset,
            errno=self.lost.errno,
        ) from self.lost

    def _lose(self, error: FileTierError) -> None:
        if self.lost is None:
            self.lost = error
            alive = {
                id(one): one for bucket in self._all if (one := bucket.optimizer()) is not None
            }
            self._lost_with = [(weakref.ref(one), one.state) for one in alive.values()]

    def _open_again(self) -> None:
        """Go on with new files once a checkpoint has been loaded into every optimizer."""
        buckets = list(self._all)
        if any(bucket.has_any() for bucket in buckets):
            self._check_not_lost()
        for optimizer, states in self._lost_with:
            alive = optimizer()
            if alive is not None and alive.state is states:
                self._check_not_lost()
        self.store.close()
        self.store = FileStore(self.directories, checksums=self.checksums, system=self._system)
        self.store.add([bucket.layout for bucket in buckets])
        bound, is_pinned = self.cache.memory_bytes, self.cache.is_pinned
        self.cache = HostCache(self.store, memory_bytes=bound, host=self.host)
        self.cache.is_pinned = is_pinned
        self._gone.clear()
        for bucket in buckets:
            bucket.forget()
        self.lost, self._lost_with = None, []


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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

    def open(
        self,
        directories: Sequence[str],
        cache_bytes: int | None,
        checksums: bool,
        ranks_here: int,
    ) -> FileTier:
        """The tier of these directories.

        Raises: FileTierError for a directory that cannot be used, StepError if the tier has been
        opened with other options.
        """
        key = tuple(os.path.realpath(directory) for directory in directories)
        tier = self._tiers.get(key)
        if tier is None:
            tier = FileTier(
                directories, cache_bytes, checksums, ranks_here, self._host, self.system
            )
            self._tiers[key] = tier
        elif (tier.given_cache_bytes, tier.checksums) != (cache_bytes, checksums):
            raise StepError(
                f"offload_cache_bytes={cache_bytes} and offload_checksums={checksums} are not what "
                f"another function of this process has opened {', '.join(directories)} with: "
                f"{tier.given_cache_bytes} and {tier.checksums}. Give all of them the same."
            )
        return tier
