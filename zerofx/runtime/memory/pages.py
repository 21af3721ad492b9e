"""Memory by the page: taken from the system, on huge pages, given out again, given back."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from zerofx import compat

PAGE_BYTES = max(4096, mmap.PAGESIZE)
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


_MADV_DONTFORK = 10
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


def aligned_empty(
    nbytes: int,
    *,
    pinned: bool = False,
    before_free: Callable[[int], object] = lambda address: None,
) -> torch.Tensor:
    """Return zeroed memory that begins at a page and goes back to the system when dropped.

    From 2 MiB on it begins at a huge page and asks for such: a disk then moves a block in a few
    pieces instead of 256 (docs/decisions/files-are-read-by-threads.md).  ``pinned``
    registers it with CUDA, exactly as much as is asked for; torch's own pinned allocations are
    rounded up to a power of two.  ``before_free`` is called with its address before that ends.

    Shapes: uint8[nbytes].  Raises: MemoryError if there is none; RuntimeError if CUDA refuses to
    pin it.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    alignment = HUGE_PAGE_BYTES if nbytes >= HUGE_PAGE_BYTES else PAGE_BYTES
    # Private: Linux seldom gives huge pages to memory that could be shared.
    try:
        mapping = mmap.mmap(-1, nbytes + alignment, **_PRIVATE)
    except OSError as error:
        raise MemoryError(
            f"the system gives this process no {nbytes} bytes more of host memory ({error}): keep "
            "less there (smaller buckets; of files a lower offload_cache_bytes), or raise its "
            "limit (ulimit -d, ulimit -v, a container's)"
        ) from error
    start = -ctypes.addressof(ctypes.c_char.from_buffer(mapping)) % alignment
    # What the tensor holds on to, and what in turn holds on to the mapping.
    owner = (ctypes.c_char * nbytes).from_buffer(mapping, start)
    memory = torch.frombuffer(owner, dtype=torch.uint8)
    prefer_huge_pages(memory)
    address = ctypes.addressof(owner)
    if pinned and _LIBC is not None:
        # Else a fork (a loader's workers) copies all pages that a device may write to.
        _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _MADV_DONTFORK)
    unpin = _pin(address, nbytes) if pinned else lambda address: None

    def free() -> None:
        before_free(address)
        unpin(address)

    # Called before the owner lets go of the mapping; at exit CUDA may be gone already.
    weakref.finalize(owner, free).atexit = False
    return memory


# Where there are no such flags (Windows), memory is private anyway.
_PRIVATE: dict[str, Any] = (
    {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
)


def _pin(address: int, nbytes: int) -> Callable[[int], object]:
    """Pin memory for CUDA; return what unpins it."""
    cudart = torch.cuda.cudart()
    code = int(cudart.cudaHostRegister(address, nbytes, 0))
    if code != 0:
        # CUDA keeps the error for this thread's next check of a launch, which clears it by raising.
        with contextlib.suppress(Exception):
            torch.zeros(1, device="cuda")
        raise RuntimeError(
            f"CUDA refused to pin {nbytes} bytes of host memory (cudaHostRegister: error {code})."
            " Lower the host memory bound, or raise the limit of locked memory (ulimit -l)"
        )
    return cudart.cudaHostUnregister


class BufferPool:
    """Flat CPU buffers for what is gathered and what is sent to be reduced.

    Memory fresh from the system is zeroed page by page when it is first written, which every
    layer would pay again.  A buffer is given out again once nothing else holds its
    memory, so a buffer stays with the code that holds it, or a view of it (as a tensor:
    while a program runs, nothing holds bare storages).  CUDA's allocator does all of this.
    With ``is_on`` false nothing is kept, so that a budget knows of every byte.  Threads may share
    one.
    """

    def __init__(self) -> None:
        self.is_on = True
        self._lock = threading.Lock()
        self._storages: list[torch.UntypedStorage] = []
        self._ranges: list[tuple[int, int]] = []  # of each storage: first byte, bytes asked for

    def empty(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """An uninitialised flat tensor of ``like``'s dtype and device.  Units: elements."""
        if like.device.type != "cpu" or not self.is_on:
            return like.new_empty(numel)
        nbytes = numel * like.itemsize
        with self._lock:
            free = [index for index in range(len(self._storages)) if not self._is_held(index)]
            chosen = next((index for index in free if self._ranges[index][1] == nbytes), None)
            if chosen is None:
                for index in reversed(free):  # of another size: they would only add to the peak
                    del self._storages[index], self._ranges[index]
                chosen = len(self._storages)
                self._add(nbytes)
            offset = self._ranges[chosen][0] // like.itemsize
            return like.new_empty(0).set_(self._storages[chosen], offset, (numel,), (1,))

    def clear(self) -> None:
        """Keep nothing for the next step: between steps a rank keeps its shards alone."""
        with self._lock:
            self._storages.clear()
            self._ranges.clear()

    def _add(self, nbytes: int) -> None:
        aligned = nbytes >= HUGE_PAGE_BYTES
        memory = torch.empty(nbytes + aligned * HUGE_PAGE_BYTES, dtype=torch.uint8, device="cpu")
        start = -memory.data_ptr() % HUGE_PAGE_BYTES if aligned else 0
        prefer_huge_pages(memory[start : start + nbytes])
        self._storages.append(memory.untyped_storage())
        self._ranges.append((start, nbytes))

    def _is_held(self, index: int) -> bool:
        return compat.tensors.is_storage_held(self._storages[index])
