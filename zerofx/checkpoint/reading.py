"""Reading a checkpoint: its files, whose damage is found first, and its table of contents.

No code from a file is run.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, LoadPlan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from zerofx.checkpoint.contents import EXTRA, FROZEN, MODEL, OPTIMIZER, RNG
from zerofx.checkpoint.folders import METADATA, NOTES, Notes, notes_of
from zerofx.checkpoint.pieces import Box, chunk_of, decode, view_of
from zerofx.errors import CheckpointError

NEWEST_VERSION = (1, 0)
"""The newest major and minor version of torch's format that is known here."""

_DCP = "torch.distributed.checkpoint"
_SAFE = {
    **dict.fromkeys(
        (
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "MetadataIndex",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        ),
        (f"{_DCP}.metadata",),
    ),
    "_StorageInfo": (f"{_DCP}.filesystem",),
    "Size": ("torch",),
    "_get_layout": ("torch.serialization",),
    "OrderedDict": ("collections",),
    **dict.fromkeys(("PosixPath", "WindowsPath"), ("pathlib", "pathlib._local")),
}
"""The classes that a checkpoint's metadata may hold, and the modules that they may come from."""


class _MetadataUnpickler(pickle.Unpickler):
    """Builds metadata and nothing else, whatever the file asks for."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module in _SAFE.get(name, ()):
            return _path if name.endswith("Path") else super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of metadata")


def _path(*parts: str) -> str:
    """Return the path that a checkpoint was written to, maybe on another system, as text."""
    return os.path.join(*parts) if parts else ""


def unpickled(data: bytes) -> Metadata:
    """Return the metadata in a pickle.  Runs no code from it.

    Raises: pickle.UnpicklingError; anything at all for a damaged pickle.
    """
    metadata = _MetadataUnpickler(io.BytesIO(data)).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}")
    return metadata


def read_metadata(folder: Path) -> tuple[Metadata, Notes | None]:
    """Read a checkpoint's metadata: what it holds, and where.  Runs no code from the file.

    Raises: FileNotFoundError if there is no checkpoint; CheckpointError for one that is damaged,
    of a newer format, or asks for anything but metadata.
    """
    path = folder / METADATA
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(_why_none(folder)) from error
    notes = notes_of(folder)
    if notes is not None and zlib.crc32(data) != notes.metadata_crc32:
        raise CheckpointError(
            f"{path} is not what was written: its CRC-32 differs from the one in {NOTES}. The "
            "checkpoint is damaged: load another."
        )
    try:
        metadata = unpickled(data)
        version = getattr(metadata, "version", None)
        _check_version(version, path)
        _check_shape(metadata)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle fails in any way at all
        raise CheckpointError(
            f"{path} cannot be read: {error}. It is damaged, not a checkpoint of "
            f"torch.distributed.checkpoint, or written by a newer torch than {torch.__version__}: "
            "load another checkpoint, or use the torch that wrote it."
        ) from error
    return metadata, notes


def _why_none(folder: Path) -> str:
    if not folder.exists():
        return f"there is no checkpoint at {folder}: zerofx.latest(folder) finds the last complete"
    inner = [path.name for path in folder.iterdir() if (path / METADATA).exists()]
    if inner:
        return (
            f"{folder} is no checkpoint but holds some: {', '.join(sorted(inner)[:5])}. Load one "
            "of them; zerofx.latest(folder) finds the last complete."
        )
    return (
        f"{folder} has no {METADATA} and so is no complete checkpoint of "
        "torch.distributed.checkpoint: it was left half written, or is something else. Load "
        "another."
    )


def _check_version(version: str | None, path: Path) -> None:
    numbers = tuple(int(part) for part in (version or "0").split(".")[:2])
    if numbers > NEWEST_VERSION:
        known = ".".join(map(str, NEWEST_VERSION))
        raise CheckpointError(
            f"{path} is of format {version}, and formats up to {known} are known here. Use the "
            f"torch that wrote it (this is {torch.__version__}), and a zerofx for it."
        )


def _check_shape(metadata: Metadata) -> None:
    """Raise for parts of other types than metadata has: later code would believe them."""
    if not isinstance(metadata.state_dict_metadata, dict):
        raise pickle.UnpicklingError("it has no table of tensors")
    if not isinstance(metadata.storage_data, dict):
        raise pickle.UnpicklingError("it has no table of where things are")
    for path in {info.relative_path for info in metadata.storage_data.values()}:
        if os.path.isabs(path) or ".." in Path(path).parts:
            raise pickle.UnpicklingError(f"it points out of the checkpoint, to {path!r}")


class Reader:
    """Reads tensors and values of one checkpoint, each rank what it needs."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        self.folder, self.metadata = folder, metadata
        self._reader = FileSystemReader(folder)
        self._reader.set_up_storage_reader(metadata, False)
        self._storage: dict[MetadataIndex, Any] = metadata.storage_data

    def items(self, name: str, boxes: Sequence[Box]) -> list[ReadItem]:
        """Return what has to be read to fill these boxes of a tensor.

        Raises: CheckpointError if the checkpoint does not have each element once.
        """
        tensor = self.metadata.state_dict_metadata[name]
        assert isinstance(tensor, TensorStorageMetadata)
        items = create_read_items_for_chunk_list(name, tensor, [chunk_of(box) for box in boxes])
        wanted = sum(box.numel for box in boxes)
        found = sum(math.prod(item.lengths) for item in items)
        if wanted != found:
            raise CheckpointError(
                f"{self.folder} does not have each element of {name} once ({found} elements for "
                f"{wanted}): one of the ranks that saved it is missing, or its metadata is "
                "damaged. Load another checkpoint."
            )
        return items

    def check(self, indices: Iterable[MetadataIndex]) -> None:
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

    def read_tensor(
        self, items: Sequence[ReadItem], boxes: Sequence[Box], order: Sequence[int], into: Any
    ) -> None:
        """Fill a flat range of a tensor, whose ``boxes`` these are, in its own memory.

        Shapes: ``into`` is ``[sum of the boxes' elements]``.
        """
        by_offset = {torch.Size(box.offsets): box for box in boxes}

        def resolve(item: ReadItem) -> torch.Tensor:
            box = by_offset[item.dest_index.offset]
            view = view_of(into, box, order)
            for dim, (offset, length) in enumerate(
                zip(item.dest_offsets, item.lengths, strict=True)
            ):
                view = view.narrow(dim, offset, length)
            return view

        self._reader.read_data(LoadPlan(list(items)), _Filling(resolve)).wait()

    def read_value(self, name: str) -> Any:
        """Read an entry that is no tensor.  Runs no code from the file.

        Raises: CheckpointError if it cannot be read so.
        """
        index, nothing = MetadataIndex(name), torch.Size([0])
        item = ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)
        found: list[bytes] = []
        self._reader.read_data(LoadPlan([item]), _Filling(take=found.append)).wait()
        return decode(found[0], f"{name!r} in {self.folder}")


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


OPTIMIZER_ROOTS = (OPTIMIZER, "optim")
"""The names of an optimizer's part; the second is from torch's own tutorials."""

Keys = tuple[Any, ...]


@dataclass
class Saved:
    """The entries of a checkpoint, by their meaning; an entry is a key of its metadata.

    ``model`` maps names to entries.  ``states`` maps a parameter's name to the entries of its
    state, by the path of keys that leads to each.  ``groups`` maps the number of a parameter group
    to the entries of its hyperparameters.  ``extra`` maps paths to entries of the user's own, and
    ``rng`` ranks to the states of their generators.  ``frozen`` is the entry with the names of
    parameters that were left out, None if there are none.
    """

    metadata: Metadata
    model: dict[str, str] = field(default_factory=dict)
    states: dict[str, dict[Keys, str]] = field(default_factory=dict)
    groups: dict[int, dict[str, str]] = field(default_factory=dict)
    extra: dict[Keys, str] = field(default_factory=dict)
    rng: dict[int, str] = field(default_factory=dict)
    frozen: str | None = None
    has_optimizer: bool = False

    def tensor(self, entry: str) -> TensorStorageMetadata | None:
        """Return the metadata of a tensor; None if the entry is something else."""
        found = self.metadata.state_dict_metadata[entry]
        return found if isinstance(found, TensorStorageMetadata) else None

    @property
    def roots(self) -> list[str]:
        """The names at the top, for errors about a checkpoint of something else."""
        return sorted({entry.partition(".")[0] for entry in self.metadata.state_dict_metadata})


def sort_out(metadata: Metadata, names: Collection[str]) -> Saved:
    """Sort a checkpoint's entries.  ``names`` are the parameters', which may have dots."""
    saved = Saved(metadata)
    paths = metadata.planner_data or {}
    for entry in metadata.state_dict_metadata:
        path = tuple(paths.get(entry) or _split(entry, names))
        root, *rest = path
        if root == MODEL and rest:
            saved.model[".".join(map(str, rest))] = entry
        elif root == EXTRA and rest:
            saved.extra[tuple(rest)] = entry
        elif root == RNG and len(rest) == 1 and str(rest[0]).isdigit():
            saved.rng[int(rest[0])] = entry
        elif path == (FROZEN,):
            saved.frozen = entry
        elif root in OPTIMIZER_ROOTS and rest:
            saved.has_optimizer = True
            _add_of_optimizer(saved, rest, entry)
    return saved


def _add_of_optimizer(saved: Saved, path: list[Any], entry: str) -> None:
    kind, *rest = path
    if kind == "state" and len(rest) >= 2:
        name, *inner = rest
        saved.states.setdefault(str(name), {})[tuple(inner)] = entry
    elif kind == "param_groups" and len(rest) == 2 and str(rest[0]).isdigit():
        number, key = rest
        saved.groups.setdefault(int(number), {})[str(key)] = entry


def _split(entry: str, names: Collection[str]) -> Iterator[str]:
    """Yield the path of an entry in a checkpoint that was saved without paths."""
    root, _, rest = entry.partition(".")
    yield root
    kind, _, below = rest.partition(".")
    if root not in OPTIMIZER_ROOTS or kind not in ("state", "param_groups"):
        if rest:
            yield rest
        return
    yield kind
    if kind == "param_groups":
        yield from below.split(".", 1)
        return
    parts = below.split(".")
    for end in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:end])
        if name in names:
            yield from (name, ".".join(parts[end:]))
            return
    yield below
