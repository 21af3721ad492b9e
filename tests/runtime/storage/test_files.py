"""The file store gives back what it was given, or says what went wrong and what to do."""

import gc
import os
import threading

import pytest
import torch

from tests.kit.covering import each_value
from tests.kit.files import (
    BIG,
    BLOCK,
    Slow,
    Watched,
    all_same_bits,
    empty,
    files_of,
    filled,
    layout,
    open_store_fixture,  # noqa: F401
    random_values,
    read,
    write,
)
from zerofx.runtime.storage.disk.layout import ALIGNMENT

pytestmark = pytest.mark.filterwarnings("ignore:.*page cache:UserWarning")

DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.float64)
NUMELS = (0, 1, 1023, 1024, 1025, BLOCK // 4, BLOCK // 4 + 1, 400_001)


@pytest.mark.parametrize("num_directories, checksums", each_value([1, 2, 3], [False, True]))
def test_odd_sizes_and_dtypes_come_back_bitwise(open_store, num_directories, checksums):
    layouts = [
        layout(f"{dtype} {numel}", first=(dtype, numel), second=(torch.int8, 5))
        for dtype in DTYPES
        for numel in NUMELS
    ]
    store = open_store(layouts, num_directories, checksums=checksums, system=Watched())
    values = {each.bucket: random_values(each, seed) for seed, each in enumerate(layouts)}
    writes = [store.start_write(name, filled(store, name, each)) for name, each in values.items()]
    found = {each.bucket: empty(store, each.bucket) for each in layouts}
    reads = [store.start_read(bucket, each) for bucket, each in found.items()]  # none waited for
    for operation in writes + reads:
        operation.wait()
    for each in layouts:
        assert all_same_bits(values[each.bucket], each.views(found[each.bucket]))
    assert (
        store.transfers.bytes_written
        == store.transfers.bytes_read
        == sum(part.nbytes for each in layouts for part in each.parts)
    )


def test_a_bucket_of_nothing_is_read_and_written(open_store):
    store = open_store([layout("none"), layout("empty", shard=0)])
    for bucket in ("none", "empty"):
        store.start_write(bucket, empty(store, bucket)).wait()
        store.start_read(bucket, empty(store, bucket)).wait()


def test_blocks_go_over_all_directories_and_small_buckets_too(open_store):
    small = [layout(f"small {index}", shard=10) for index in range(6)]
    store = open_store([BIG, *small], num_directories=3)
    big, *others = [files_of(store)[first : first + 3] for first in range(0, 21, 3)]
    assert list(map(os.path.getsize, big)) == 2 * [2 * BLOCK] + [BLOCK + 2 * ALIGNMENT]
    used = []
    for paths in others:
        assert list(map(os.path.getsize, paths)) == [ALIGNMENT, 0, 0]
        used.append(os.path.basename(os.path.dirname(os.readlink(paths[0]))))
    assert [used.count(f"disk{directory}") for directory in range(3)] == [2, 2, 2]
    values = random_values(BIG)
    write(store, "big", values)
    assert all_same_bits(read(store, "big"), values)


def test_memory_of_the_store_moves_without_a_copy(open_store):
    system = Watched()
    store = open_store(system=system)
    if not all(store.stripes.is_direct):
        pytest.skip("the file system of the tests has no direct I/O")
    memory = empty(store, "big")
    for start in (store.start_write, store.start_read):
        system.calls.clear()
        start("big", memory).wait()
        begin, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
        assert len(system.calls) == 6
        assert all(begin <= address and address + n <= end for _, address, n, _ in system.calls)


def test_as_many_calls_are_outstanding_as_the_depth(open_store):
    system = Watched()
    met = threading.Barrier(12)

    def meet(kind, call, fd, buffers, offset):
        met.wait(timeout=30)  # broken, an error, unless 12 calls are under way
        return call(fd, buffers, offset)

    layouts = [layout(f"b{index}", shard=8) for index in range(24)]
    store = open_store(layouts, depth=12, system=system)
    system.move = meet
    names = [each.bucket for each in layouts]
    for operation in [store.start_write(name, empty(store, name)) for name in names]:
        operation.wait()
    assert system.most_under_way == 12


def test_operations_on_one_bucket_take_effect_in_their_order(open_store):
    store = open_store(system=Slow(0.01, kinds=["write"]))
    old, new = (filled(store, "big", random_values(BIG, seed)) for seed in (1, 2))
    first, second = empty(store, "big"), empty(store, "big")
    operations = [
        store.start_write("big", old),
        store.start_read("big", first),
        store.start_write("big", new),
        store.start_read("big", second),
    ]
    for operation in reversed(operations):
        operation.wait()
    assert torch.equal(first, old) and torch.equal(second, new)


def test_a_write_waits_for_reads_started_before_it(open_store):
    store = open_store(system=Slow(0.01, kinds=["read"]))
    old, new = random_values(BIG, 1), random_values(BIG, 2)
    write(store, "big", old)
    into = [empty(store, "big") for _ in range(3)]
    reads = [store.start_read("big", each) for each in into]
    write(store, "big", new)
    assert all(operation.is_done for operation in reads)
    assert all(all_same_bits(BIG.views(each), old) for each in into)


def test_a_read_after_another_buckets_write_waits_for_it(open_store):
    layouts = [layout("one", shard=BLOCK), layout("two", shard=BLOCK)]
    store = open_store(layouts, system=Slow(0.02, kinds=["write"]))
    one, two = (random_values(each, seed) for seed, each in enumerate(layouts))
    write(store, "two", two)
    memory = filled(store, "one", one)
    leaving = store.start_write("one", memory)
    store.start_read("two", memory, after=[leaving]).wait()
    assert leaving.is_done
    assert all_same_bits(layouts[1].views(memory), two)
    assert all_same_bits(read(store, "one"), one)


def test_buckets_are_overwritten_while_others_are_read(open_store):
    layouts = [layout(f"b{index}", shard=BLOCK // 3 + index) for index in range(6)]
    store = open_store(layouts, num_directories=2, checksums=True, system=Watched())
    now = {each.bucket: random_values(each) for each in layouts}
    for bucket, values in now.items():
        write(store, bucket, values)
    for turn in range(20):
        writes, reads = [], []
        for index, each in enumerate(layouts):
            if (index + turn) % 2:
                now[each.bucket] = random_values(each, 10 * turn + index)
                memory = filled(store, each.bucket, now[each.bucket])
                writes.append(store.start_write(each.bucket, memory))
            else:
                into = empty(store, each.bucket)
                reads.append((store.start_read(each.bucket, into), each.bucket, into))
        for operation, bucket, into in reads:
            operation.wait()
            assert all_same_bits(store.layouts[bucket].views(into), now[bucket])
        for operation in writes:
            operation.wait()


def test_several_threads_may_use_one_store(open_store):
    layouts = [layout(f"b{index}", shard=BLOCK // 3) for index in range(4)]
    store = open_store(layouts)
    failed = []

    def work(seed, each):
        for turn in range(15):
            values = random_values(each, seed + turn)
            write(store, each.bucket, values)
            if not all_same_bits(read(store, each.bucket), values):
                failed.append(each.bucket)

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate(layouts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_hundred_operations_take_no_more_memory_than_ten(open_store):
    store = open_store([layout("b", shard=8 * BLOCK)], depth=4)
    memory = empty(store, "b").fill_(1)

    def work(times):
        for _ in range(times):
            store.start_write("b", memory).wait()
            store.start_read("b", memory).wait()
        gc.collect()
        return resident_bytes()

    before = work(5)
    assert work(50) - before < 2**20  # one operation's bucket is 16 of them
