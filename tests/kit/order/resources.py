"""Count as memory what is used in order as memory is: folders of checkpoints, a cache's bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from zerofx.checkpoint import folders, loading, saving
from zerofx.checkpoint.folders import Draft
from zerofx.order.clocks import Block, Range, Where
from zerofx.order.notes import Notes
from zerofx.runtime.storage.disk.host_cache import HostCache


class Resources:
    """Notes who reads and writes a folder of checkpoints, and what a cache counts as free."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes
        self._folders: dict[Path, Block] = {}

    def patches(self) -> Iterator[Any]:
        patch = mock.patch.object
        for name in ("begin", "publish", "discard"):
            yield patch(Draft, name, self._written_by(getattr(Draft, name)))
        for module in (folders, loading, saving):
            yield patch(module, "checkpoints_in", self._read_by(folders.checkpoints_in))
        yield patch(HostCache, "_give_back", self._give_back(HostCache._give_back))

    def _use(self, folder: Path, writes: bool, name: str) -> None:
        block = self._folders.get(folder)
        if block is None:
            block = self._folders[folder] = Block(0, 1, f"folder {folder.name}", Where.HOST)
        self.notes.operator(name, [Range(block, 0, 1, writes)])

    def _written_by(self, original: Callable) -> Callable:
        def write(draft: Draft, *args: Any) -> None:
            self._use(draft.target.parent, True, f"Draft.{original.__name__}")
            original(draft, *args)

        return write

    def _read_by(self, original: Callable) -> Callable:
        def read(folder: Path) -> Any:
            self._use(folder.absolute(), False, "checkpoints_in")
            return original(folder)

        return read

    def _give_back(self, original: Callable) -> Callable:
        """Count what a cache counts as free as written to by whoever has that room next.

        An operation on files holds its memory itself, and the room is not there before it ends.
        """

        def give_back(cache: HostCache) -> None:
            memory, _ = cache._free[0]
            ranges = self.notes.ranges(memory, True, "room in the cache")
            original(cache)
            self.notes.operator("whoever has the room in the cache next", ranges)

        return give_back
