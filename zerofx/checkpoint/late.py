"""A checkpoint's files, some of which are read later than they are checked."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
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
    with its checksums once more.  What only one rank reads, it ``compares`` before a step changes
    anything, so that all ranks hear of it.
    """

    def __init__(
        self,
        reader: Reader,
        late: Mapping[str, Sequence[MetadataIndex]],
        compares: Mapping[str, Sequence[MetadataIndex]],
    ) -> None:
        """Made before they are checked.

        ``late`` are the parts of files that each entry is read from late; ``compares`` those of
        them that this rank alone will read, and in whole.
        """
        self.folder = reader.folder.absolute()
        self._reader, self._compares = reader, compares
        storage = reader.metadata.storage_data
        self._names = {
            entry: sorted({storage[one].relative_path for one in its if one in storage})
            for entry, its in late.items()
        }
        names = {name for its in self._names.values() for name in its}
        self._states = {name: state_of(self.folder / name) for name in names}
        self._compared: set[str] = set()

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
        if entry not in self._compares:
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
        if entry in self._compares and entry not in self._compared:
            self._compare(entry, self._compares[entry])
            self._compared.add(entry)

    def _compare(self, entry: str, parts: Sequence[MetadataIndex]) -> None:
        try:
            self._reader.check(parts)
        except CheckpointError as error:
            raise StepError(
                f"{error} It was whole when zerofx.load checked it, and {entry} was to be made "
                "from it now."
            ) from error


def state_of(path: Path) -> State | None:
    """What changes if somebody writes to a file or replaces it; None if it is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
