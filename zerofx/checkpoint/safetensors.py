"""Models as safetensors: written and read by every rank at once, each its own bytes.

The format (github.com/huggingface/safetensors) is a length, a JSON header with every tensor's
dtype, shape and place, and the bytes.  Files are mapped into memory and each rank copies its part
there, so nobody has a tensor whole, and nothing is sent.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zerofx.checkpoint.errors import CheckpointError
from zerofx.checkpoint.late import state_of
from zerofx.errors import StepError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
"""The names that ``from_pretrained`` looks for."""

_NAMES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_OF_DTYPE = {dtype: name for name, dtype in _NAMES.items()}
_LONGEST_HEADER = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: its bytes begin at ``start``, counted from the file's."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


def lay_out(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, dict[str, Entry]]:
    """A file's header for tensors of these shapes and dtypes, and where each will be.

    Those of the widest dtypes come first, so that each begins at a multiple of its own.

    Raises: ValueError for a dtype that the format does not have.
    """
    ranges, end = {}, 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
        if tensor.dtype not in _OF_DTYPE:
            raise ValueError(
                f"{name!r} is of {tensor.dtype}, which safetensors does not have. Convert it, or "
                "use zerofx.save."
            )
        nbytes = tensor.numel() * tensor.dtype.itemsize
        ranges[name] = {
            "dtype": _OF_DTYPE[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + nbytes],
        }
        end += nbytes
    text = json.dumps({"__metadata__": {"format": "pt"}, **ranges}).encode()
    text += b" " * (-len(text) % 8)  # the first tensor is aligned
    header = struct.pack("<Q", len(text)) + text
    return header, _entries(ranges, len(header))


def read_header(path: Path) -> dict[str, Entry]:
    """Where each tensor of a file is.  Raises: CheckpointError for a file that is damaged."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size - 8, _LONGEST_HEADER):
                raise ValueError(f"its header would have {length} bytes, and it has {size}")
            ranges = json.loads(file.read(length))
        ranges.pop("__metadata__", None)
        found = _entries(ranges, 8 + length)
        for name, entry in found.items():
            numel = torch.Size(entry.shape).numel()
            if entry.start < 8 + length or entry.nbytes != numel * entry.dtype.itemsize:
                raise ValueError(f"{name} has {entry.nbytes} bytes, which is not its shape's")
            if entry.start + entry.nbytes > size:
                raise ValueError(f"{name} ends behind the file's end, at byte {size}")
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}. It is damaged or no safetensors file: fetch it again."
        ) from error
    return found


def _entries(ranges: Mapping[str, Any], data: int) -> dict[str, Entry]:
    found = {}
    for name, described in ranges.items():
        start, stop = described["data_offsets"]
        shape = tuple(described["shape"])
        found[name] = Entry(_NAMES[described["dtype"]], shape, data + start, stop - start)
    return found


class MappedFile:
    """A file's tensors, in the file itself.  For the ``with`` statement."""

    def __init__(self, path: Path, entries: Mapping[str, Entry], *, writes: bool) -> None:
        self.path, self.entries = path, entries
        self._state = state_of(path)
        size = path.stat().st_size
        self._bytes = torch.from_file(str(path), shared=writes, size=size, dtype=torch.uint8)

    def tensor(self, name: str) -> torch.Tensor:
        entry = self.entries[name]
        data = self._bytes[entry.start : entry.start + entry.nbytes]
        if entry.start % entry.dtype.itemsize:  # files of others need not be aligned
            data = data.clone()
        return data.view(entry.dtype).view(entry.shape)

    def check(self) -> None:
        """Raise StepError if somebody has written to the file since; one that is gone stays here.

        To read what has been cut off would kill the process.
        """
        now = state_of(self.path)
        if now is None or self._state is None or now[0] != self._state[0] or now == self._state:
            return
        raise StepError(
            f"{self.path} has been written to since zerofx.load_safetensors read its header, and "
            "parameters that deferred_init has put off were to be made from it. Load it again."
        )

    def sync(self) -> None:
        """Have what was written reach the disk."""
        with open(self.path, "rb") as file:
            os.fsync(file.fileno())


def reserve(path: Path, header: bytes, entries: Mapping[str, Entry]) -> None:
    """Make a file of full size: writing to a mapped one that has no room would kill the process.

    Raises: OSError if there is no room.
    """
    end = max((e.start + e.nbytes for e in entries.values()), default=len(header))
    with open(path, "xb") as file:
        os.posix_fallocate(file.fileno(), 0, end)
        file.write(header)


def split(tensors: Mapping[str, torch.Tensor], most_bytes: int) -> Iterator[dict[str, Any]]:
    """Tensors for one file after the other, of at most so many bytes or one tensor."""
    part: dict[str, Any] = {}
    total = 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.dtype.itemsize
        if part and total + nbytes > most_bytes:
            yield part
            part, total = {}, 0
        part[name] = tensor
        total += nbytes
    yield part
