"""Reading a checkpoint's files, whose damage is found first.  No code from a file is run."""

from __future__ import annotations

import io
import math
import os
import weakref
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, LoadPlan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from zerofx.checkpoint.folders import DamageError, state_of
from zerofx.checkpoint.pieces import Range, chunk_of, decode
from zerofx.checkpoint.targets import Target
from zerofx.errors import CheckpointError, StepError


class Reader:
    """Reads tensors and values of one checkpoint, each rank what it needs.

    It is a ``Source`` of targets.  What is read late is checked again then, for a disk may damage a
    file that was not written to: this rank's share before a step changes anything, so that all
    ranks hear of damage, and whatever else this rank reads when it does.
    """

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        self.folder, self.metadata = folder, metadata
        self.name = str(folder)
        self._reader = FileSystemReader(folder)
        self._reader.set_up_storage_reader(metadata, False)
        self._storage: dict[MetadataIndex, Any] = metadata.storage_data
        self.values: dict[str, Any] = {}  # that have been read
        self._checked: set[MetadataIndex] = set()
        self._late: dict[str, list[MetadataIndex]] = {}  # by entry
        self._share: frozenset[MetadataIndex] = frozenset()
        self._states: dict[str, tuple[int, int, int] | None] = {}

    def items(self, name: str, wanted: Range) -> list[ReadItem]:
        """Return what has to be read to fill a range of a tensor.

        Raises: DamageError if the checkpoint does not have each element once.
        """
        tensor = self.metadata.state_dict_metadata[name]
        assert isinstance(tensor, TensorStorageMetadata)
        items = create_read_items_for_chunk_list(name, tensor, list(map(chunk_of, wanted.boxes)))
        num_wanted = sum(box.numel for box in wanted.boxes)
        found = sum(math.prod(item.lengths) for item in items)
        if num_wanted != found:
            raise DamageError(
                f"{self.folder} does not have each element of {name} once ({found} elements for "
                f"{num_wanted}): one of the ranks that saved it is missing, or its metadata is "
                "damaged. Load another checkpoint."
            )
        return items

    def check_all(self, targets: Iterable[Target], rank: int, world_size: int) -> None:
        """Check what is read now, and this rank's share of what any rank reads late.

        The files of that must stay as they are from here on.

        Raises: as ``check_parts``.
        """
        now: list[MetadataIndex] = []
        for target in targets:
            parts = [item.storage_index for item in self.items(target.entry, target.part)]
            if target.is_lazy:
                self._late[target.entry] = parts
            else:
                now += parts
        share = [part for parts in self._late.values() for part in parts][rank::world_size]
        self._share = frozenset(share)
        self._states = {
            name: state_of(self.folder / name)
            for entry in self._late
            for name in self._files_of(entry)
        }
        self.check_parts([*now, *share])
        self._checked = set(now)
        if self._late:
            _UNREAD.add(self)

    def _files_of(self, entry: str) -> list[str]:
        known = (self._storage.get(part) for part in self._late.get(entry, ()))
        return sorted({info.relative_path for info in known if info is not None})

    def check_parts(self, indices: Iterable[MetadataIndex]) -> None:
        """Read these parts of files once, and compare them with their checksums.

        Raises: DamageError for what is missing, cut short or damaged; CheckpointError if a file
        cannot be read at the moment.
        """
        by_file: dict[str, list[Any]] = {}
        for index in dict.fromkeys(indices):
            info = self._storage.get(index)
            if info is None:
                raise DamageError(
                    f"the metadata of {self.folder} does not say where {index.fqn} is: it is "
                    "damaged. Load another checkpoint."
                )
            by_file.setdefault(info.relative_path, []).append((info, index.fqn))
        for path, parts in by_file.items():
            self._check_file(path, parts)

    def _check_file(self, path: str, parts: list[tuple[Any, str]]) -> None:
        try:
            with open(self.folder / path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                for info, name in sorted(parts, key=lambda part: part[0].offset):
                    if info.offset + info.length > size:
                        raise DamageError(
                            f"{self.folder / path} has been cut short: {name} ends at byte "
                            f"{info.offset + info.length}, the file at {size}. Load another "
                            "checkpoint."
                        )
                    if not info.__dict__.get("transform_descriptors"):
                        file.seek(info.offset)
                        _check_sums(file.read(info.length))
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
            raise DamageError(
                f"{self.folder / path} is damaged where {name} is, from byte {info.offset} on: "
                f"{error}. Load another checkpoint."
            ) from error
        except FileNotFoundError as error:
            raise DamageError(
                f"{self.folder / path} cannot be read: {error}. Bring the file back, or load "
                "another checkpoint."
            ) from error
        except OSError as error:
            raise CheckpointError(
                f"{self.folder / path} cannot be read: {error}. It may be whole: try again when "
                "the cause is gone, or load another checkpoint by its path."
            ) from error

    def check(self, entry: str) -> None:
        """Raise StepError if what is read late of an entry is not what it was."""
        for name in self._files_of(entry):
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
        self._check_again(
            entry, [part for part in self._late.get(entry, ()) if part in self._share]
        )

    def _check_again(self, entry: str, parts: Sequence[MetadataIndex]) -> None:
        parts = [part for part in parts if part not in self._checked]
        try:
            self.check_parts(parts)
        except CheckpointError as error:
            raise StepError(
                f"{error} It was whole when zerofx.load checked it, and {entry} was to be made "
                "from it now."
            ) from error
        self._checked.update(parts)

    def read(self, entry: str, wanted: Range, into: torch.Tensor) -> None:
        """Fill ``into``, ``[stop - start]``, with a range of a tensor."""
        items = self.items(entry, wanted)
        self._check_again(entry, [item.storage_index for item in items])
        planner = _Filling(lambda index: wanted.view_at(into, index.offset))
        self._reader.read_data(LoadPlan(items), planner).wait()

    def value(self, name: str) -> Any:
        """Check and read an entry that is no tensor, once.  Runs no code from the file.

        Raises: CheckpointError if it cannot be read so.
        """
        if name not in self.values:
            index, nothing = MetadataIndex(name), torch.Size([0])
            self.check_parts([index])
            item = ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)
            planner = _Filling()
            self._reader.read_data(LoadPlan([item]), planner).wait()
            self.values[name] = decode(planner.data, f"{name!r} in {self.folder}")
        return self.values[name]


_UNREAD: weakref.WeakSet[Reader] = weakref.WeakSet()
"""Those that will still read something, for as long as that refers to them."""


def in_use() -> set[Path]:
    """Return the checkpoints that this process will still read."""
    return {reader.folder for reader in _UNREAD}


@dataclass
class _Filling(DefaultLoadPlanner):
    """Lets torch's reader read into memory that is there already, and values as they are."""

    find: Callable[[MetadataIndex], torch.Tensor] | None = None
    data: bytes = b""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.data = value.getvalue()

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        assert self.find is not None
        return self.find(index)


def _check_sums(part: bytes) -> None:
    """Compare every record that ``torch.save`` wrote with its checksum, which torch does not do.

    Raises: zipfile.BadZipFile if one differs.
    """
    with zipfile.ZipFile(io.BytesIO(part)) as archive:
        record = archive.testzip()
    if record is not None:
        raise zipfile.BadZipFile(f"{record} does not have its CRC-32")
