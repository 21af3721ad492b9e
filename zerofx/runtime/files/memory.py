"""Host memory that a disk can read into directly."""

from __future__ import annotations

import ctypes
import mmap
import weakref

import torch

from zerofx.runtime.buffers import HUGE_PAGE_BYTES, prefer_huge_pages
from zerofx.runtime.files.layout import ALIGNMENT


def aligned_empty(nbytes: int, *, pinned: bool = False) -> torch.Tensor:
    """Return zeroed memory that begins at a page and goes back to the system when dropped.

    From 2 MiB on it begins at a huge page and asks for such: a disk then moves a block in a few
    pieces instead of 256 (docs/decisions/files-are-read-by-threads.md).  ``pinned``
    registers it with CUDA, exactly as much as is asked for; torch's own pinned allocations are
    rounded up to a power of two.

    Shapes: uint8[nbytes].  Raises: RuntimeError if CUDA refuses to pin it.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    alignment = HUGE_PAGE_BYTES if nbytes >= HUGE_PAGE_BYTES else ALIGNMENT
    # Private: Linux seldom gives huge pages to memory that could be shared.
    mapping = mmap.mmap(-1, nbytes + alignment, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(mapping)) % alignment
    # What the tensor holds on to, and what in turn holds on to the mapping.
    owner = (ctypes.c_char * nbytes).from_buffer(mapping, start)
    memory = torch.frombuffer(owner, dtype=torch.uint8)
    prefer_huge_pages(memory)
    if pinned:
        _pin(owner, nbytes)
    return memory


def _pin(owner: ctypes.Array, nbytes: int) -> None:
    cudart = torch.cuda.cudart()
    address = ctypes.addressof(owner)
    code = int(cudart.cudaHostRegister(address, nbytes, 0))
    if code != 0:
        raise RuntimeError(
            f"CUDA refused to pin {nbytes} bytes of host memory (cudaHostRegister: error {code})."
            " Lower the host memory bound, or raise the limit of locked memory (ulimit -l)"
        )
    # Called before the owner lets go of the mapping; at exit CUDA may be gone already.
    weakref.finalize(owner, cudart.cudaHostUnregister, address).atexit = False


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A dense CPU tensor's memory, writable.  The caller keeps the tensor alive."""
    if tensor.nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
