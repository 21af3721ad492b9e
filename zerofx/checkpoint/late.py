"""A checkpoint's files, some of which are read later than they are checked."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from zerofx.checkpoint.boxes import Box
from zerofx.checkpoint.errors import CheckpointError
from zerofx.checkpoint.folders import Use
from zerofx.checkpoint.reading import Reader
from zerofx.errors import StepError

State = tuple[int, int, int]


class Files:
    """What targets are filled from: now, or from files that are as they were when it was made.

    A disk may damage a file although nobody has written to it, so what is read late is compared
    with its checksums once more: this rank's ``share`` of it before a step changes anything, so
    that all ranks hear of damage, and what it reads itself when it does.
    """

    def __init__(
        self,
        reader: Reader,
        late: Mapping[str, Sequence[MetadataIndex]],
        share: Collection[MetadataIndex],
    ) -> None:
        """Made before they are checked.  ``late`` are the parts of files by entry, of all ranks."""
        self.folder = reader.folder.absolute()
        self.name = str(self.folder)
        self._reader, self._late, self._share = reader, late, share
        storage = reader.metadata.storage_data
        self._names = {
            entry: sorted({storage[one].relative_path for one in its if one in storage})
            for entry, its in late.items()
        }
        names = {name for its in self._names.values() for name in its}
        self._states = {name: state_of(self.folder / name) for name in names}
        self._compared: set[MetadataIndex] = set()

    def use(self) -> Use:
        return Use(self.folder)

    def read(
        self, entry: str, boxes: Sequence[Box], order: Sequence[int], into: torch.Tensor
    ) -> None:
        self._reader.read_tensor(self._reader.items(entry, boxes), boxes, order, into)

    def read_late(
        self, entry: str, boxes: Sequence[Box], order: Sequence[int], into: torch.Tensor
    ) -> None:
        self.check(entry)
        items = self._reader.items(entry, boxes)
        self._compare(entry, [item.storage_index for item in items])
        self._reader.read_tensor(items, boxes, order, into)

    def check(self, entry: str) -> None:
        for name in self._names[entry]:
            path = self.folder / name
            state = state_of(path)
            if state is None:
                raise StepError(
                    f"{path} is gone, and {entry} was to be made from it: before the first step "
                    "zerofx.load reads no states, and none of the parameters that deferred_init "
                    "has put off. Keep a checkpoint until a step has run; load another one now."
                )
            if state != self._states[name]:
                raise StepError(
                    f"{path} has been written to, or replaced, since zerofx.load checked it, and "
                    f"{entry} was to be made from it. Load a checkpoint again."
                )
        self._compare(entry, [part for part in self._late[entry] if part in self._share])

    def _compare(self, entry: str, parts: Sequence[MetadataIndex]) -> None:
        parts = [part for part in parts if part not in self._compared]
        try:
            self._reader.check(parts)
        except CheckpointError as error:
            raise StepError(
                f"{error} It was whole when zerofx.load checked it, and {entry} was to be made "
                "from it now."
            ) from error
        self._compared.update(parts)


def state_of(path: Path) -> State | None:
    """What changes if somebody writes to a file or replaces it; None if it is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
