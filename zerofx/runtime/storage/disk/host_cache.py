"""As many buckets in host memory as a bound allows, read ahead in the order they are used in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from zerofx.errors import FileTierError
from zerofx.runtime.memory.pages import aligned_empty
from zerofx.runtime.storage.disk.layout import Key
from zerofx.runtime.storage.disk.store import FileStore
from zerofx.runtime.storage.disk.transfers import Operation

if TYPE_CHECKING:
    from zerofx.runtime.storage.memory import HostMemory


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


class HostCache:
    """Keeps buckets of a store in at most ``memory_bytes`` of host memory.

    The order given to ``begin`` is the buckets as a step uses them, one entry a use, over and over.
    At every ``use`` and ``release`` it looks along the order: the first bucket that is not in
    memory is read if there is room, or if what makes room is used later than it (and so on, up to
    one round).  What makes room is the coldest: the one whose next use is farthest.  If it is dirty
    it is written first, and the read into its memory waits for that, not the caller.  Nothing that
    is chosen depends on how fast the disk is.

    Memory is given out again for a bucket of the same size, so buckets of one size allocate nothing
    after the first round. One of another size waits for memory to be written and freed. A bucket
    that was never written, or released as ``void``, gets memory without a read, for its user to
    fill.

    Callers see to it that the bound holds the largest bucket, and all that is in use at once.  One
    thread at a time may call it.

    Source: Cao, Felten, Karlin and Li 1995, "A Study of Integrated Prefetching and Caching
    Strategies", the aggressive algorithm.
    """

    def __init__(self, store: FileStore, memory_bytes: int, host: HostMemory) -> None:
        self.memory_bytes = memory_bytes
        self.held_bytes = 0
        """The bytes allocated now; never more than ``memory_bytes``."""
        self.is_pinned = False
        """True if a GPU copies what is there."""
        self._store, self._host = store, host
        self._resident: dict[str, _Resident] = {}
        # Memory that nothing lives in, once what still moves out of or into it has ended.
        self._free: list[tuple[torch.Tensor, Operation | None]] = []
        self._order: list[str] = []
        self._position = -1  # in no order yet

    def begin(self, order: Sequence[str]) -> None:
        """Go by an order from its start; if its end has just been reached, as if it went on.

        What was in use, in a step that failed, is taken for released and changed.
        """
        in_use = any(resident.num_uses for resident in self._resident.values())
        if self._order == list(order) and not self._position and not in_use:
            return
        for resident in self._resident.values():
            resident.is_dirty |= resident.num_uses > 0
            resident.num_uses = 0
        self._order, self._position = list(order), 0
        self._read_ahead()

    def use(self, bucket: str) -> dict[Key, torch.Tensor]:
        """Return the tensors of the bucket that is next in the order, once they are in memory.

        They stay there until ``release``.  Those of a bucket that was never written, nor released
        as dirty, hold anything.

        Shapes: ``[numel]`` by number and name.
        """
        assert bucket == self._order[self._position], f"{bucket!r} is not next in the order"
        is_there = bucket in self._resident or self._load(bucket, 0)
        assert is_there, f"no room for {bucket!r} besides what is in use"
        resident = self._resident[bucket]
        resident.num_uses += 1
        self._position = (self._position + 1) % len(self._order)
        self._read_ahead()
        try:
            self._wait_for(resident)
        except Exception:
            self.drop(bucket)  # nothing of it is there: another try reads it again
            raise
        except BaseException:  # a key was pressed: the caller has not been given it
            resident.num_uses -= 1
            raise
        return resident.views

    def views(self, bucket: str) -> dict[Key, torch.Tensor]:
        """The tensors of a bucket that is in use."""
        return self._resident[bucket].views

    def release(self, bucket: str, *, dirty: bool, void: bool = False) -> None:
        """Let a bucket go after its use; ``dirty`` if its values were changed.

        ``void`` if nothing needs them any more: they are neither written nor read again.
        """
        resident = self._resident[bucket]
        assert resident.num_uses, f"{bucket!r} is not in use"
        resident.num_uses -= 1
        resident.is_dirty |= dirty
        if void:
            self._store.written.discard(bucket)
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
        layout = self._store.layouts[bucket]
        memory = aligned_empty(layout.nbytes)
        self._store.start_read(bucket, memory).wait()
        return layout.views(memory)

    def drop(self, bucket: str) -> None:
        """Forget what memory holds of a bucket, which nothing needs, or not in this layout."""
        resident = self._resident.pop(bucket, None)
        if resident is not None:
            self._free.append((resident.memory, resident.load))

    def _read_ahead(self) -> None:
        for distance in range(len(self._order)):
            bucket = self._order[(self._position + distance) % len(self._order)]
            if bucket not in self._resident and not self._load(bucket, distance):
                return

    def _load(self, bucket: str, distance: int) -> bool:
        """Start to read a bucket whose use is ``distance`` uses away, if there is room for it."""
        layout = self._store.layouts[bucket]
        if not self._make_room(layout.nbytes, distance):
            return False
        sizes = [memory.nbytes for memory, _ in self._free]
        if layout.nbytes in sizes:
            memory, last = self._free.pop(sizes.index(layout.nbytes))
        else:
            while self.held_bytes + layout.nbytes > self.memory_bytes:
                self._give_back()
            memory = self._host.empty(layout.nbytes, torch.uint8, self.is_pinned)
            last = None
            self.held_bytes += layout.nbytes
        is_new = bucket not in self._store.written
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
        room = self.memory_bytes - self.held_bytes + sum(free.nbytes for free, _ in self._free)
        to_come = self._order[self._position :] + self._order[: self._position]
        next_use = {name: place for place, name in reversed(list(enumerate(to_come)))}
        next_use |= {name: len(to_come) for name in self._resident if name not in next_use}
        evictable = [name for name, held in self._resident.items() if not held.num_uses]
        evictable.sort(key=next_use.__getitem__, reverse=True)
        victims = []
        for name in evictable:
            if room >= nbytes or next_use[name] <= distance:
                break
            victims.append(name)
            room += self._resident[name].memory.nbytes
        if room < nbytes:
            return False
        for name in victims:
            resident = self._resident.pop(name)
            last = resident.load
            if resident.is_dirty:
                last = self._store.start_write(name, resident.memory)
            self._free.append((resident.memory, last))
        return True

    def _give_back(self) -> None:
        """Free memory of a size that nothing asks for."""
        memory, last = self._free.pop(0)
        if last is not None:
            last.wait_for_its_end()  # until then it holds the memory
        self.held_bytes -= memory.nbytes
