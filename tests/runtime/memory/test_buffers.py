"""Buffers are given out again only when nothing can see them any more."""

import sys
from concurrent.futures import ThreadPoolExecutor

import torch

from zerofx.runtime.memory.pages import HUGE_PAGE_BYTES, BufferPool

LIKE = torch.empty(0)


def test_memory_is_used_again_once_nothing_holds_it():
    pool = BufferPool()
    first = pool.empty(100, LIKE)
    address = first.data_ptr()
    assert pool.empty(100, LIKE).data_ptr() != address
    view = first[10:].view(9, 10)
    del first
    assert pool.empty(100, LIKE).data_ptr() != address
    del view
    again = pool.empty(100, LIKE)
    assert again.data_ptr() == address and again.shape == (100,)


def test_memory_that_an_array_holds_is_left_alone():
    pool = BufferPool()
    array = pool.empty(100, LIKE).numpy()
    assert pool.empty(100, LIKE).data_ptr() != array.ctypes.data


def test_a_buffer_of_bytes_serves_any_dtype():
    pool = BufferPool()
    address = pool.empty(100, LIKE).data_ptr()
    half = pool.empty(200, torch.empty(0, dtype=torch.bfloat16))
    assert half.data_ptr() == address and half.dtype == torch.bfloat16


def test_idle_buffers_of_another_size_are_let_go():
    pool = BufferPool()
    kept = pool.empty(100, LIKE)
    pool.empty(1000, LIKE)
    pool.empty(10, LIKE)
    assert sorted(nbytes for _, nbytes in pool._ranges) == [40, 400]
    pool.clear()
    assert kept.numel() == 100 and not pool._storages


def test_a_large_buffer_begins_on_a_page_and_holds_what_was_asked_for():
    pool = BufferPool()
    numel = HUGE_PAGE_BYTES // 4 + 3
    buffer = pool.empty(numel, LIKE)
    assert buffer.data_ptr() % HUGE_PAGE_BYTES == 0 and buffer.shape == (numel,)
    buffer.fill_(1)
    address = buffer.data_ptr()
    del buffer
    assert pool.empty(numel, LIKE).data_ptr() == address


def test_without_reuse_every_buffer_is_its_own_and_no_larger():
    pool = BufferPool()
    pool.is_on = False
    buffer = pool.empty(HUGE_PAGE_BYTES, LIKE)
    assert buffer.untyped_storage().nbytes() == 4 * HUGE_PAGE_BYTES
    assert not pool._storages


def test_threads_never_have_one_memory_at_once():
    pool, before = BufferPool(), sys.getswitchinterval()

    def fill(number: int) -> bool:
        for _ in range(300):
            held = [pool.empty(100 + size, LIKE).fill_(number) for size in range(4)]
            if any((one != number).any() for one in held):
                return False
            pool.clear()
        return True

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(fill, range(4)))
    finally:
        sys.setswitchinterval(before)
