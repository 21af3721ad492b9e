"""Memory from the system begins at a page, holds what it should, and goes back to it."""

import ctypes
import gc
import re
import sys
from pathlib import Path

import pytest
import torch

from zerofx.runtime.memory.pages import HUGE_PAGE_BYTES, PAGE_BYTES, aligned_empty, in_huge_pages


@pytest.mark.parametrize("nbytes", [1, PAGE_BYTES, 2**21 - 1, 2**21, 2**21 + 1])
def test_memory_begins_at_a_page_and_outlives_its_maker(nbytes):
    memory = aligned_empty(nbytes)
    assert memory.data_ptr() % PAGE_BYTES == 0 and memory.nbytes == nbytes
    view = memory[nbytes // 2 :].fill_(7)
    del memory
    gc.collect()
    assert (view == 7).all()


def test_pinned_memory_is_let_go_of_before_it_is_unmapped(monkeypatch):
    calls = []

    class Cudart:
        """What CUDA would be told."""

        def cudaHostRegister(self, address, nbytes, flags):  # noqa: N802
            calls.append(("register", address, nbytes))
            return 0

        def cudaHostUnregister(self, address):  # noqa: N802
            calls.append(("unregister", address, ctypes.string_at(address, 1)))  # still there

    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    memory = aligned_empty(3 * PAGE_BYTES + 1, pinned=True).fill_(7)
    address, view = memory.data_ptr(), memory[5:]
    del memory
    gc.collect()
    assert calls == [("register", address, 3 * PAGE_BYTES + 1)]
    del view
    gc.collect()
    assert calls[1:] == [("unregister", address, b"\x07")]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_fork_does_not_copy_pinned_memory(monkeypatch):
    monkeypatch.setattr("zerofx.runtime.memory.pages._pin", lambda *_: lambda address: None)
    for pinned in (False, True):
        memory = aligned_empty(2**21 + 1, pinned=pinned).fill_(7)
        pages = re.split(r"(?m)^([0-9a-f]+)-([0-9a-f]+) ", Path("/proc/self/smaps").read_text())
        (flags,) = (
            re.search("VmFlags:(.*)", text)[1].split()
            for start, stop, text in zip(*(pages[n::3] for n in (1, 2, 3)), strict=True)
            if int(start, 16) <= memory.data_ptr() < int(stop, 16)
        )
        assert ("dc" in flags) is pinned


def test_memory_that_cuda_does_not_pin_is_an_error(monkeypatch):
    """CUDA keeps it for the next launch that is checked on this thread: no other may meet it."""
    last_errors = []

    class Cudart:
        def cudaHostRegister(self, address, nbytes, flags):  # noqa: N802
            last_errors.append(2)
            return 2

    def zeros(_numel, device):
        raise RuntimeError(f"CUDA error on {device}: {last_errors.pop()}")

    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(RuntimeError, match=f"pin {PAGE_BYTES} bytes.*error 2.*ulimit -l"):
        aligned_empty(PAGE_BYTES, pinned=True)
    assert not last_errors


def test_what_is_large_enough_is_copied_to_huge_pages_and_nothing_else():
    large = torch.arange(2 * HUGE_PAGE_BYTES // 4 + 7, dtype=torch.int32)
    moved = in_huge_pages(large)
    assert moved.equal(large) and moved.data_ptr() != large.data_ptr()
    small = large[: 2 * HUGE_PAGE_BYTES // 4 - 1]
    assert in_huge_pages(small) is small


def test_memory_that_there_is_not_is_said_so():
    with pytest.raises(MemoryError, match=f"no {2**60} bytes more of host memory .*offload_cache"):
        aligned_empty(2**60)
