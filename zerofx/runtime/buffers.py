"""Large buffers that live for a layer, given out again within a step."""

from __future__ import annotations

import ctypes
import sys

import torch

from zerofx import compat


class BufferPool:
    """Flat CPU buffers for what is gathered and what is sent to be reduced.

    Memory fresh from the system is zeroed page by page when it is first written: 0.25 ms a MiB,
    as long as it takes to gather it.  A buffer is given out again once nothing else holds its
    memory, so whoever keeps one, or a view of it, keeps it.  CUDA's allocator does all of this.
    With ``is_on`` false nothing is kept, so that a budget knows of every byte.
    """

    def __init__(self) -> None:
        self.is_on = True
        self._storages: list[torch.UntypedStorage] = []

    def empty(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """An uninitialised flat tensor of ``like``'s dtype and device.  Units: elements."""
        if like.device.type != "cpu" or not self.is_on:
            return like.new_empty(numel)
        nbytes = numel * like.itemsize
        free = [index for index in range(len(self._storages)) if not self._is_held(index)]
        for index in free:
            if self._storages[index].nbytes() == nbytes:
                return like.new_empty(0).set_(self._storages[index], 0, (numel,), (1,))
        for index in reversed(free):  # of another size: kept, they would only add to the peak
            del self._storages[index]
        fresh = like.new_empty(numel)
        self._storages.append(fresh.untyped_storage())
        return fresh

    def clear(self) -> None:
        """Keep nothing for the next step: between steps a rank keeps its shards alone."""
        self._storages.clear()

    def _is_held(self, index: int) -> bool:
        return compat.is_storage_held(self._storages[index])


def return_freed_memory() -> None:
    """Hand memory that has been freed back to the system; where there is no glibc, do nothing.

    Binding cuts every parameter to its shard and compiling takes much for a moment.  glibc would
    keep most of what they free, in pieces under 32 MiB, for later: 0.3 GiB of 2.2 with 211M
    parameters on 2 ranks.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
