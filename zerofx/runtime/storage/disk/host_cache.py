"""As many buckets in host memory as a bound allows, read ahead in the order they are used in."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zerofx.errors import FileTierError
from zerofx.runtime.memory.pages import aligned_empty
from zerofx.runtime.storage.disk.layout import Key
from zerofx.runtime.storage.disk.store import FileStore
from zerofx.runtime.storage.disk.transfers import Operation
from zerofx.runtime.storage.host import HostMemory


@dataclass(eq=False)
class _Resident:
    """A bucket in memory, or on its way there.

    ``load`` is its read; for one that was never written, what its memory still waits for, if
    anything.
    """

    memory: torch.Tensor
    views: dict[Key, torch.Tensor]
    load: Operation | None
    is_new: bool
    is_dirty: bool = False
    num_uses: int = 0


@dataclass(frozen=True)
class _Free:
    """Memory that nothing lives in, once what still moves out of or into it has ended."""

    memory: torch.Tensor
    last: Operation | None


class HostCache:
    """Keeps buckets of a store in at most ``memory_bytes`` of host memory.

    ``order``, or that of ``begin``, is the buckets as a step uses them, one entry a use, over and
    over.  At every
    ``use`` and ``release`` it looks along the order: the first bucket that is not in memory is
    read if there is room, or if what makes room is used later than it (and so on, up to one round).
    What makes room is the coldest: the one whose next use is farthest.  If it is dirty it
    is written first, and the read into its memory waits for that, not the caller.  Nothing that
    is chosen depends on how fast the disk is.

    Memory is given out again for a bucket of the same size, so buckets of one size allocate nothing
    after the first round. One of another size waits for memory to be written and freed. A bucket
    that was never written, or released as ``void``, gets memory without a read, for its user to
    fill. Memory is taken from the ``host``'s, or is the store's if that is not given.

    One thread at a time may call it.

    Source: Cao, Felten, Karlin and Li 1995, "A Study of Integrated Prefetching and Caching
    Strategies", the aggressive algorithm.
    Raises: ValueError if the bound is less than the largest bucket, or the order empty.
    """

    def __init__(
        self,
        store: FileStore,
        order: Sequence[str] = (),
        *,
        memory_bytes: int,
        host: HostMemory | None = None,
    ) -> None:
        self.memory_bytes = memory_bytes
        self.held_bytes = 0
        """The bytes allocated now; never more than ``memory_bytes``."""
        self._store = store
        self.is_pinned = False
        """True if a GPU copies what is there."""
        self._host = host
        self._resident: dict[str, _Resident] = {}
        self._free: list[_Free] = []
        self._order: list[str] = []
        self._position = -1  # in no order yet
        if order:
            self.begin(order)

    def begin(self, order: Sequence[str]) -> None:
        """Go by an order from its start; if its end has just been reached, as if it went on.

        What was in use, in a step that failed, is taken for released and changed.
        """
        in_use = any(resident.num_uses for resident in self._resident.values())
        if self._order == list(order) and not self._position and not in_use:
            return
        self._check_order(order)
        for resident in self._resident.values():
            resident.is_dirty |= resident.num_uses > 0
            resident.num_uses = 0
        self._order, self._position = list(order), 0
        self._places: dict[str, list[int]] = {}
        for place, bucket in enumerate(order):
            self._places.setdefault(bucket, []).append(place)
        self._read_ahead()

    def use(self, bucket: str) -> dict[Key, torch.Tensor]:
        """Return the tensors of the bucket that is next in the order, once they are in memory.

        They stay there until ``release``.  Those of a bucket that was never written, nor released
        as dirty, hold anything.

        Shapes: ``[numel]`` by number and name.
        Raises: ValueError if another bucket is next, or there is no room besides what is in use.
        """
        expected = self._order[self._position]
        if bucket != expected:
            raise ValueError(
                f"bucket {bucket!r} is not next in the order: {expected!r} is, at place"
                f" {self._position} of {len(self._order)}"
            )
        if bucket not in self._resident and not self._load(bucket, 0):
            in_use = [name for name, held in self._resident.items() if held.num_uses]
            raise ValueError(
                f"no room for bucket {bucket!r} ({self._store.layout(bucket).nbytes} bytes) in"
                f" {self.memory_bytes} bytes of host memory, while in use are:"
                f" {', '.join(in_use)}"
            )
        resident = self._resident[bucket]
        resident.num_uses += 1
        self._position = (self._position + 1) % len(self._order)
        self._read_ahead()
        try:
            self._wait_for(resident)
        except Exception:
            # Nothing of it is there: another try reads it again.
            del self._resident[bucket]
            self._free.append(_Free(resident.memory, resident.load))
            raise
        except BaseException:  # a key was pressed: the caller has not been given it
            resident.num_uses -= 1
            raise
        return resident.views

    def views(self, bucket: str) -> dict[Key, torch.Tensor]:
        """The tensors of a bucket that is in use.  Raises: ValueError if it is not."""
        return self._in_use(bucket).views

    def _in_use(self, bucket: str) -> _Resident:
        resident = self._resident.get(bucket)
        if resident is None or resident.num_uses == 0:
            raise ValueError(f"bucket {bucket!r} is not in use")
        return resident

    def release(self, bucket: str, *, dirty: bool, void: bool = False) -> None:
        """Let a bucket go after its use; ``dirty`` if its values were changed.

        ``void`` if nothing needs them any more: they are neither written nor read again.

        Raises: ValueError if it is not in use.
        """
        resident = self._in_use(bucket)
        resident.num_uses -= 1
        resident.is_dirty |= dirty
        if void:
            self._store.forget(bucket)
            resident.is_dirty, resident.is_new = False, True
        self._read_ahead()

    def read(self, bucket: str) -> dict[Key, torch.Tensor]:
        """Return the tensors of any bucket, out of turn, in memory of their own beside the bound.

        Raises: FileTierError if it was neither written nor released as dirty.
        """
        resident = self._resident.get(bucket)
        if resident is not None and not (resident.is_new and not resident.is_dirty):
            self._wait_for(resident)
            return {name: view.clone() for name, view in resident.views.items()}
        layout = self._store.layout(bucket)
        memory = aligned_empty(layout.nbytes)
        self._store.start_read(bucket, memory).wait()
        return layout.views(memory)

    def drop(self, bucket: str) -> None:
        """Forget what memory holds of a bucket, which nothing needs, or not in this layout."""
        resident = self._resident.pop(bucket, None)
        if resident is not None:
            self._free.append(_Free(resident.memory, resident.load))

    def _read_ahead(self) -> None:
        for distance in range(len(self._order)):
            bucket = self._order[(self._position + distance) % len(self._order)]
            if bucket not in self._resident and not self._load(bucket, distance):
                return

    def _load(self, bucket: str, distance: int) -> bool:
        """Start to read a bucket whose use is ``distance`` uses away, if there is room for it."""
        layout = self._store.layout(bucket)
        if not self._make_room(layout.nbytes, distance):
            return False
        last = None
        for index, free in enumerate(self._free):
            if free.memory.nbytes == layout.nbytes:
                memory, last = self._free.pop(index).memory, free.last
                break
        else:
            while self.held_bytes + layout.nbytes > self.memory_bytes:
                self._give_back(self._free.pop(0))
            if self._host is not None:
                memory = self._host.empty(layout.nbytes, torch.uint8, self.is_pinned)
            else:
                memory = self._store.empty(bucket)
            self.held_bytes += layout.nbytes
        is_new = not self._store.was_written(bucket)
        if not is_new:
            last = self._store.start_read(bucket, memory, after=[last] if last else [])
        self._resident[bucket] = _Resident(memory, layout.views(memory), last, is_new)
        return True

    def _wait_for(self, resident: _Resident) -> None:
        if resident.load is None:
            return
        try:
            resident.load.wait()
        except FileTierError:
            if resident.is_new and not resident.load.is_write:
                return  # a read that nothing needed in the end
            raise

    def _make_room(self, nbytes: int, distance: int) -> bool:
        """Evict the coldest that are used later than ``distance`` until so much can be had.

        False, and nothing evicted, if that is not enough.
        """
        room = self.memory_bytes - self.held_bytes + sum(f.memory.nbytes for f in self._free)
        evictable = [name for name, held in self._resident.items() if not held.num_uses]
        evictable.sort(key=self._distance_to, reverse=True)
        victims = []
        for name in evictable:
            if room >= nbytes or self._distance_to(name) <= distance:
                break
            victims.append(name)
            room += self._resident[name].memory.nbytes
        if room < nbytes:
            return False
        for name in victims:
            self._evict(name)
        return True

    def _evict(self, bucket: str) -> None:
        resident = self._resident.pop(bucket)
        last = resident.load
        if resident.is_dirty:
            last = self._store.start_write(bucket, resident.memory)
        self._free.append(_Free(resident.memory, last))

    def _give_back(self, free: _Free) -> None:
        """Free memory of a size that nothing asks for."""
        if free.last is not None and not free.last.is_done:
            free.last.wait()
        self.held_bytes -= free.memory.nbytes

    def _distance_to(self, bucket: str) -> int:
        """Count the uses of other buckets before this one's next; all of a round if never."""
        places = self._places.get(bucket)
        if places is None:
            return len(self._order)
        index = bisect_left(places, self._position)
        if index < len(places):
            return places[index] - self._position
        return places[0] + len(self._order) - self._position

    def _check_order(self, order: Sequence[str]) -> None:
        if not order:
            raise ValueError("the order of uses is empty")
        largest = max(map(self._store.layout, order), key=lambda layout: layout.nbytes)
        if largest.nbytes > self.memory_bytes:
            raise ValueError(
                f"bucket {largest.bucket!r} takes {largest.nbytes} bytes, and the host may keep"
                f" {self.memory_bytes}"
            )
