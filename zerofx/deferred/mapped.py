"""Files that are mapped into memory, which operations on their tensors do not read."""

from __future__ import annotations

import mmap
import sys

import torch
from torch import Tensor

from zerofx import compat

_FLAGS = (
    {"flags": mmap.MAP_PRIVATE} if hasattr(mmap, "MAP_PRIVATE") else {"access": mmap.ACCESS_COPY}
)
if sys.platform == "linux":
    _FLAGS["flags"] |= 0x4000  # MAP_NORESERVE, or Linux refuses a file larger than its memory


class MappedFiles:
    """Files whose bytes are in memory once something looks at them.

    Tensors over them are ordinary ones, which may be written to: the file does not change.  A
    recorder records what is computed of them, and nothing is read until it is made.
    """

    def __init__(self) -> None:
        self._files: list[tuple[range, torch.UntypedStorage]] = []

    def map(self, path: str, nbytes: int) -> torch.UntypedStorage:
        """Return the first bytes of a file.  Raises: OSError, ValueError if it has fewer."""
        with open(path, "rb") as file:
            mapping = mmap.mmap(file.fileno(), nbytes, **_FLAGS)
        if hasattr(mmap, "MADV_RANDOM"):
            mapping.madvise(mmap.MADV_RANDOM)  # one byte that is read takes no megabytes with it
        with compat.tensors.past_all_modes():
            storage = torch.frombuffer(mapping, dtype=torch.uint8).untyped_storage()
        start = storage.data_ptr()
        self._files.append((range(start, start + nbytes), storage))
        return storage

    def hold(self, tensor: Tensor) -> bool:
        """Return whether a tensor's memory is in one of them."""
        if not self._files or not compat.tensors.has_memory(tensor):
            return False
        try:
            with compat.tensors.without_function_modes():
                start = tensor.untyped_storage().data_ptr()
        except (NotImplementedError, RuntimeError):  # it wraps others
            return False
        return any(start in places for places, _ in self._files)

    def forget(self) -> None:
        """Let go of all: they go with the last tensor over them."""
        self._files.clear()


MAPPED = MappedFiles()
