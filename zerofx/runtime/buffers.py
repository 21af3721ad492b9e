"""Large buffers that live for a layer, given out again within a step."""

from __future__ import annotations

import ctypes
import sys

import torch

from zerofx import compat


class BufferPool:
    """Flat CPU buffers for what is gathered and what is sent to be reduced.

    Memory fresh from the system is zeroed page by page when it is first written, which every
    layer would pay again.  A buffer is given out again once nothing else holds its
    memory, so whoever keeps one, or a view of it, keeps it (a tensor: while a program runs,
    nobody asks for bare storages).  CUDA's allocator does all of this.
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


HUGE_PAGE_BYTES = 2**21


def prefer_huge_pages(tensor: torch.Tensor) -> None:
    """Ask Linux to back the large pages that lie inside a tensor's CPU memory as such.

    One fault instead of 512 when it is first written, and less to look up when another rank
    reads it.  With all of a process's memory asked for like that (glibc.malloc.hugetlb=1) a step
    took 84 ms instead of 103 (10M parameters, stage 1, 2 ranks); what these buffers alone give has
    not been told from noise.
    """
    if _LIBC is None or tensor.device.type != "cpu":
        return
    start = -(-tensor.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    stop = (tensor.data_ptr() + tensor.nbytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if start < stop:  # a kernel without huge pages says no, and nothing is lost
        _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_HUGEPAGE)


def in_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of what is large enough for huge pages, on them; else the tensor itself.

    For what a CPU goes through at every step: an AdamW over 32M elements took 28.5 ms with all it
    reads and writes on such pages and 31.3 without (one thread, 2026-11-22).
    """
    if _LIBC is None or tensor.device.type != "cpu" or tensor.nbytes < 2 * HUGE_PAGE_BYTES:
        return tensor
    copy = torch.empty_like(tensor)
    prefer_huge_pages(copy)
    return copy.copy_(tensor)


_MADV_HUGEPAGE = 14
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def return_freed_memory() -> None:
    """Hand memory that has been freed back to the system; where there is no glibc, do nothing.

    Binding cuts every parameter to its shard and compiling takes much for a moment.  glibc would
    keep most of what they free, in pieces under 32 MiB, for later: a rank with 211M parameters on
    2 ranks peaked at 1.79 GiB, and at 1.45 with MALLOC_TRIM_THRESHOLD_=1048576.
    """
    trim = getattr(_LIBC, "malloc_trim", None)
    if trim is not None:
        trim(0)
