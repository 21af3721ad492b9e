"""Large buffers that live for a layer, given out again within a step."""

from __future__ import annotations

import torch

from zerofx import compat
from zerofx.runtime.memory.pages import HUGE_PAGE_BYTES, prefer_huge_pages


class BufferPool:
    """Flat CPU buffers for what is gathered and what is sent to be reduced.

    Memory fresh from the system is zeroed page by page when it is first written, which every
    layer would pay again.  A buffer is given out again once nothing else holds its
    memory, so a buffer stays with the code that holds it, or a view of it (as a tensor:
    while a program runs, nothing holds bare storages).  CUDA's allocator does all of this.
    With ``is_on`` false nothing is kept, so that a budget knows of every byte.
    """

    def __init__(self) -> None:
        self.is_on = True
        self._storages: list[torch.UntypedStorage] = []
        self._ranges: list[tuple[int, int]] = []  # of each storage: first byte, bytes asked for

    def empty(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """An uninitialised flat tensor of ``like``'s dtype and device.  Units: elements."""
        if like.device.type != "cpu" or not self.is_on:
            return like.new_empty(numel)
        nbytes = numel * like.itemsize
        free = [index for index in range(len(self._storages)) if not self._is_held(index)]
        chosen = next((index for index in free if self._ranges[index][1] == nbytes), None)
        if chosen is None:
            for index in reversed(free):  # of another size: kept, they would only add to the peak
                del self._storages[index], self._ranges[index]
            chosen = len(self._storages)
            self._add(nbytes)
        offset = self._ranges[chosen][0] // like.itemsize
        return like.new_empty(0).set_(self._storages[chosen], offset, (numel,), (1,))

    def clear(self) -> None:
        """Keep nothing for the next step: between steps a rank keeps its shards alone."""
        self._storages.clear()
        self._ranges.clear()

    def _add(self, nbytes: int) -> None:
        aligned = nbytes >= HUGE_PAGE_BYTES
        memory = torch.empty(nbytes + aligned * HUGE_PAGE_BYTES, dtype=torch.uint8)
        start = -memory.data_ptr() % HUGE_PAGE_BYTES if aligned else 0
        prefer_huge_pages(memory[start : start + nbytes])
        self._storages.append(memory.untyped_storage())
        self._ranges.append((start, nbytes))

    def _is_held(self, index: int) -> bool:
        return compat.is_storage_held(self._storages[index])
