"""Reading a checkpoint's files, whose damage is found first.  No code from a file is run."""

from __future__ import annotations

import io
import math
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, LoadPlan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from zerofx.checkpoint.folders import Use, state_of
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

        Raises: CheckpointError if the checkpoint does not have each element once.
        """
        tensor = self.metadata.state_dict_metadata[name]
        assert isinstance(tensor, TensorStorageMetadata)
        items = create_read_items_for_chunk_list(name, tensor, list(map(chunk_of, wanted.boxes)))
        num_wanted = sum(box.numel for box in wanted.boxes)
        found = sum(math.prod(item.lengths) for item in items)
        if num_wanted != found:
            raise CheckpointError(
                f"{self.folder} does not have each element of {name} once ({found} elements for "
                f"{num_wanted}): one of the ranks that saved it is missing, or its metadata is "
                "damaged. Load another checkpoint."
            )
        return items

    def check_all(self, targets: Iterable[Target], rank: int, world_size: int) -> None:
        """Check what is read now, and this rank's share of what any rank reads late.

        The files of that must stay as they are from here on.

        Raises: CheckpointError for what is missing, cut short or damaged.
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

    def _files_of(self, entry: str) -> list[str]:
        known = (self._storage.get(part) for part in self._late[entry])
        return sorted({info.relative_path for info in known if info is not None})

    def check_parts(self, indices: Iterable[MetadataIndex]) -> None:
        """Read these parts of files once, and compare them with their checksums.

        Raises: CheckpointError for what is missing, cut short or damaged.
        """
        by_file: dict[str, list[Any]] = {}
        for index in dict.fromkeys(indices):
            info = self._storage.get(index)
            if info is None:
                raise CheckpointError(
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
                        raise CheckpointError(
                            f"{self.folder / path} has been cut short: {name} ends at byte "
                            f"{info.offset + info.length}, the file at {size}. Load another "
                            "checkpoint."
                        )
                    if not info.__dict__.get("transform_descriptors"):
                        _check_sums(_Part(file, info.offset, info.length))
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
            raise CheckpointError(
                f"{self.folder / path} is damaged where {name} is, from byte {info.offset} on: "
                f"{error}. Load another checkpoint."
            ) from error
        except OSError as error:
            raise CheckpointError(
                f"{self.folder / path} cannot be read: {error}. Bring the file back, or load "
                "another checkpoint."
            ) from error

    def use(self) -> Use:
        return Use(self.folder)

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
        self._check_again(entry, [part for part in self._late[entry] if part in self._share])

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
        by_offset = {torch.Size(box.offsets): box for box in wanted.boxes}

        def resolve(item: ReadItem) -> torch.Tensor:
            view = wanted.view(into, by_offset[item.dest_index.offset])
            ranges = zip(item.dest_offsets, item.lengths, strict=True)
            return view[tuple(slice(offset, offset + length) for offset, length in ranges)]

        self._reader.read_data(LoadPlan(items), _Filling(resolve)).wait()

    def value(self, name: str) -> Any:
        """Check and read an entry that is no tensor, once.  Runs no code from the file.

        Raises: CheckpointError if it cannot be read so.
        """
        if name not in self.values:
            index, nothing = MetadataIndex(name), torch.Size([0])
            self.check_parts([index])
            item = ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)
            found: list[bytes] = []
            self._reader.read_data(LoadPlan([item]), _Filling(take=found.append)).wait()
            self.values[name] = decode(found[0], f"{name!r} in {self.folder}")
        return self.values[name]


class _Filling(DefaultLoadPlanner):
    """Lets torch's reader read into memory that is there already."""

    def __init__(
        self,
        resolve: Callable[[ReadItem], torch.Tensor] | None = None,
        take: Callable[[bytes], object] | None = None,
    ) -> None:
        super().__init__()
        self._resolve, self._take = resolve, take

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        assert self._take is not None
        self._take(value.getvalue())

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        assert self._resolve is not None
        return self._resolve(read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """It is in its place already."""


class _Part(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._offset + self._at)
        wanted = min(len(buffer), max(self._length - self._at, 0))
        data = self._file.read(wanted)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


_STRIDE = 1 << 20


def _check_sums(part: io.RawIOBase) -> None:
    """Compare every record that ``torch.save`` wrote with its checksum, which torch does not do.

    Raises: zipfile.BadZipFile if one differs.
    """
    with zipfile.ZipFile(part) as archive:
        for record in archive.infolist():
            with archive.open(record) as data:
                while data.read(_STRIDE):
                    pass
