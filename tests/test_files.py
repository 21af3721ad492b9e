"""The file store gives back what it was given, or says what went wrong and what to do."""

import ctypes
import errno
import gc
import os
import re
import stat
import threading
import time

import pytest
import torch
from files import (
    BLOCK,
    Buffered,
    BufferedShort,
    Failing,
    Gated,
    Short,
    Slow,
    Watched,
    all_same_bits,
    empty_values,
    layout,
    random_bytes,
    random_values,
)

from zerofx.errors import FileTierError
from zerofx.runtime.files import BucketLayout, Field, FileStore
from zerofx.runtime.files.layout import ALIGNMENT
from zerofx.runtime.files.memory import aligned_empty

pytestmark = pytest.mark.filterwarnings("ignore:.*page cache:UserWarning")

DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.float64)
NUMELS = (0, 1, 1023, 1024, 1025, BLOCK // 4, BLOCK // 4 + 1, 400_001)
BIG = layout("big", shard=5 * BLOCK // 4 + 7, exp_avg=(torch.bfloat16, 3), empty=0)


@pytest.fixture
def open_store(tmp_path):
    """Open stores on so many directories; closed after the test."""
    opened = []

    def open_one(layouts=(BIG,), num_directories=1, **options):
        directories = [tmp_path / f"disk{index}" for index in range(num_directories)]
        for directory in directories:
            directory.mkdir(exist_ok=True)
        options = {"block_bytes": BLOCK, "depth": 8, **options}
        opened.append(FileStore(directories, layouts, **options))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


def write(store, bucket, values):
    store.wait(store.start_write(bucket, values))


def read(store, bucket):
    values = empty_values(store.layout(bucket))
    store.wait(store.start_read(bucket, values))
    return values


def files_of(store):
    return sorted(
        os.path.join(folder, name)
        for folder in store.folders
        for name in os.listdir(folder)
        if name.startswith("bucket-")
    )


@pytest.mark.parametrize("num_directories", [1, 2, 3])
@pytest.mark.parametrize("checksums", [False, True])
def test_odd_sizes_and_dtypes_come_back_bitwise(open_store, num_directories, checksums):
    layouts = [
        layout(f"{dtype} {numel}", first=(dtype, numel), second=(torch.int8, 5))
        for dtype in DTYPES
        for numel in NUMELS
    ]
    store = open_store(layouts, num_directories, checksums=checksums, system=Watched())
    values = {each.bucket: random_values(each, seed) for seed, each in enumerate(layouts)}
    writes = [store.start_write(bucket, each) for bucket, each in values.items()]
    found = {each.bucket: empty_values(each) for each in layouts}
    reads = [store.start_read(bucket, each) for bucket, each in found.items()]  # none waited for
    for operation in writes + reads:
        store.wait(operation)
    assert all(all_same_bits(values[bucket], found[bucket]) for bucket in values)
    assert (
        store.bytes_written
        == store.bytes_read
        == sum(field.nbytes for each in layouts for field in each.fields)
    )


def test_a_bucket_of_nothing_is_read_and_written(open_store):
    store = open_store([layout("none"), layout("empty", shard=0)])
    for bucket in ("none", "empty"):
        write(store, bucket, store.empty(bucket))
        store.wait(store.start_read(bucket, store.empty(bucket)))


def test_what_is_written_by_fields_is_read_whole(open_store):
    store = open_store(num_directories=2, checksums=True)
    values = random_values(BIG)
    write(store, "big", values)
    memory = store.empty("big")
    store.wait(store.start_read("big", memory))
    assert all_same_bits(BIG.views(memory), values)
    memory.random_()
    write(store, "big", memory)
    assert all_same_bits(read(store, "big"), BIG.views(memory))


def test_one_field_is_written_without_the_others(open_store):
    store = open_store()
    values = random_values(BIG)
    write(store, "big", values)
    values["shard"] = random_bytes(torch.float32, values["shard"].numel(), seed=9)
    write(store, "big", {"shard": values["shard"]})
    assert all_same_bits(read(store, "big"), values)


def test_blocks_go_over_all_directories_and_small_buckets_too(open_store):
    small = [layout(f"small {index}", shard=10) for index in range(6)]
    store = open_store([BIG, *small], num_directories=3)
    sizes = {}
    for path in files_of(store):
        sizes.setdefault(os.path.basename(path), []).append(os.path.getsize(path))
    assert sorted(sizes["bucket-0"]) == [2 * ALIGNMENT + BLOCK] + 2 * [2 * BLOCK]
    used = [sizes[f"bucket-{number}"].index(ALIGNMENT) for number in range(1, 7)]
    assert [used.count(directory) for directory in range(3)] == [2, 2, 2]
    values = random_values(BIG)
    write(store, "big", values)
    assert all_same_bits(read(store, "big"), values)


def test_memory_of_the_store_moves_without_a_copy(open_store):
    system = Watched()
    store = open_store(system=system)
    if not all(store.is_direct):
        pytest.skip("the file system of the tests has no direct I/O")
    memory = store.empty("big")
    for start in (store.start_write, store.start_read):
        system.calls.clear()
        store.wait(start("big", memory))
        begin, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
        assert len(system.calls) == 7
        assert all(begin <= address and address + n <= end for _, address, n, _ in system.calls)


def test_memory_that_is_not_aligned_goes_through_staging_and_its_neighbours_stay(open_store):
    system = Watched()  # which checks that direct calls are aligned
    store = open_store(system=system)
    write(store, "big", random_values(BIG))
    numel = BIG.fields[0].numel
    around = aligned_empty(4 * numel + 2 * ALIGNMENT)
    around.fill_(0x5A)
    inside = around[12 : 12 + 4 * numel].view(torch.float32)
    system.calls.clear()
    store.wait(store.start_read("big", {"shard": inside}))
    assert torch.equal(inside.view(torch.uint8), read(store, "big")["shard"].view(torch.uint8))
    assert (around[:12] == 0x5A).all() and (around[12 + 4 * numel :] == 0x5A).all()
    if all(store.is_direct):
        begin, end = around.data_ptr(), around.data_ptr() + around.nbytes
        assert not any(begin <= address < end for _, address, _, _ in system.calls[:6])


def test_an_aligned_tensor_of_odd_length_keeps_what_is_behind_it(open_store):
    store = open_store(system=Watched())
    values = random_values(BIG)
    write(store, "big", values)
    nbytes = values["shard"].nbytes
    around = aligned_empty(nbytes + ALIGNMENT)
    around.fill_(0x5A)
    store.wait(store.start_read("big", {"shard": around[:nbytes].view(torch.float32)}))
    assert torch.equal(around[:nbytes], values["shard"].view(torch.uint8))
    assert (around[nbytes:] == 0x5A).all()


@pytest.mark.parametrize("nbytes", [1, ALIGNMENT, 2**21 - 1, 2**21, 2**21 + 1])
def test_memory_begins_at_a_page_and_outlives_its_maker(nbytes):
    memory = aligned_empty(nbytes)
    assert memory.data_ptr() % ALIGNMENT == 0 and memory.nbytes == nbytes
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
    memory = aligned_empty(3 * ALIGNMENT + 1, pinned=True).fill_(7)
    address, view = memory.data_ptr(), memory[5:]
    del memory
    gc.collect()
    assert calls == [("register", address, 3 * ALIGNMENT + 1)]
    del view
    gc.collect()
    assert calls[1:] == [("unregister", address, b"\x07")]


def test_memory_that_cuda_does_not_pin_is_an_error(monkeypatch):
    class Cudart:
        def cudaHostRegister(self, address, nbytes, flags):  # noqa: N802
            return 2

    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    with pytest.raises(RuntimeError, match=f"pin {ALIGNMENT} bytes.*error 2.*ulimit -l"):
        aligned_empty(ALIGNMENT, pinned=True)


def test_as_many_calls_are_outstanding_as_the_depth(open_store):
    system = Watched()
    met = threading.Barrier(12)

    def meet(kind, call, fd, buffers, offset):
        met.wait(timeout=30)  # broken, an error, unless 12 calls are under way
        return call(fd, buffers, offset)

    layouts = [layout(f"b{index}", shard=8) for index in range(24)]
    store = open_store(layouts, depth=12, system=system)
    system.move = meet
    for operation in [store.start_write(each.bucket, random_values(each)) for each in layouts]:
        store.wait(operation)
    assert system.most_under_way == 12


def test_operations_on_one_bucket_take_effect_in_their_order(open_store):
    store = open_store(system=Slow(0.01, kinds=["write"]))
    old, new = random_values(BIG, 1), random_values(BIG, 2)
    first, second = empty_values(BIG), empty_values(BIG)
    operations = [
        store.start_write("big", old),
        store.start_read("big", first),
        store.start_write("big", new),
        store.start_read("big", second),
    ]
    for operation in reversed(operations):
        store.wait(operation)
    assert all_same_bits(first, old) and all_same_bits(second, new)


def test_a_write_waits_for_reads_started_before_it(open_store):
    store = open_store(system=Slow(0.01, kinds=["read"]))
    old, new = random_values(BIG, 1), random_values(BIG, 2)
    write(store, "big", old)
    into = [empty_values(BIG) for _ in range(3)]
    reads = [store.start_read("big", each) for each in into]
    write(store, "big", new)
    assert all(operation.is_done for operation in reads)
    assert all(all_same_bits(each, old) for each in into)


def test_a_read_after_another_buckets_write_waits_for_it(open_store):
    layouts = [layout("one", shard=BLOCK), layout("two", shard=BLOCK)]
    store = open_store(layouts, system=Slow(0.02, kinds=["write"]))
    one, two = (random_values(each, seed) for seed, each in enumerate(layouts))
    write(store, "two", two)
    memory = store.empty("one")
    layouts[0].views(memory)["shard"].copy_(one["shard"])
    leaving = store.start_write("one", memory)
    store.wait(store.start_read("two", memory, after=[leaving]))
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
                writes.append(store.start_write(each.bucket, now[each.bucket]))
            else:
                into = empty_values(each)
                reads.append((store.start_read(each.bucket, into), each.bucket, into))
        for operation, bucket, into in reads:
            store.wait(operation)
            assert all_same_bits(into, now[bucket])
        for operation in writes:
            store.wait(operation)


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
    assert store.staging_bytes == 4 * BLOCK
    unaligned = torch.zeros(8 * BLOCK + 1)[1:]
    assert unaligned.data_ptr() % ALIGNMENT

    def work(times):
        for _ in range(times):
            write(store, "b", {"shard": unaligned})
            store.wait(store.start_read("b", {"shard": unaligned}))
        gc.collect()
        return resident_bytes()

    before = work(5)
    assert work(50) - before < 2**20  # one operation's bucket is 16 of them


# What goes wrong while data moves


def test_a_failed_read_names_everything_and_leaves_the_store_usable(open_store):
    system = Failing()
    store = open_store(system=system)
    values = random_values(BIG)
    write(store, "big", values)
    system.arm("read", errno.EIO, at=3)
    operation = store.start_read("big", empty_values(BIG))
    with pytest.raises(FileTierError, match="reading bucket 'big' failed at byte") as caught:
        store.wait(operation)
    error = caught.value
    assert (error.errno, error.bucket, error.path) == (errno.EIO, "big", files_of(store)[0])
    assert error.offset % BLOCK == 0
    for part in (
        error.path,
        f"errno {errno.EIO}",
        "dmesg",
        "field 'shard'",
        f"byte {error.offset}",
    ):
        assert part in str(error)
    with pytest.raises(FileTierError):
        store.wait(operation)  # it stays failed
    system.armed = None
    assert all_same_bits(read(store, "big"), values)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_after_a_failed_write_nothing_more_is_read_or_written(open_store, code):
    system = Failing()
    store = open_store([BIG, layout("other", shard=3)], system=system)
    for each in store.layouts.values():
        write(store, each.bucket, random_values(each))
    system.arm("write", code, at=2)
    with pytest.raises(FileTierError, match="start again from a checkpoint") as caught:
        write(store, "big", random_values(BIG, 1))
    assert caught.value.errno == code and caught.value.bucket == "big"
    assert caught.value.path in str(caught.value)
    system.armed = None
    for start in (store.start_read, store.start_write):
        with pytest.raises(FileTierError, match="unusable since a write failed.*'big'"):
            start("other", random_values(store.layout("other")))


def test_a_failed_write_that_nobody_waits_for_is_not_forgotten(open_store):
    system = Failing()
    store = open_store([BIG, layout("other", shard=3)], system=system)
    write(store, "other", random_values(store.layout("other")))
    system.arm("write", errno.EIO)
    store.start_write("big", random_values(BIG))
    into = empty_values(store.layout("other"))
    deadline = time.monotonic() + 10
    with pytest.raises(FileTierError, match="unusable since a write failed"):
        while time.monotonic() < deadline:
            store.wait(store.start_read("other", into))


def test_a_read_behind_a_write_that_fails_fails_too(open_store):
    system = Gated("write")
    store = open_store([BIG, layout("other", shard=3)], system=system)
    system.arm("write", errno.EIO)
    system.gate.clear()
    leaving = store.start_write("big", random_values(BIG))
    behind = store.start_read("big", empty_values(BIG))
    dependent = store.start_write("other", store.empty("other"), after=[leaving])
    system.gate.set()
    for operation in (dependent, behind, leaving):
        with pytest.raises(FileTierError, match="writing bucket 'big' failed"):
            store.wait(operation)


def test_a_write_behind_a_read_that_fails_goes_on(open_store):
    system = Gated("read")
    store = open_store(system=system)
    write(store, "big", random_values(BIG))
    system.arm("read", errno.EIO)
    system.gate.clear()
    reading = store.start_read("big", empty_values(BIG))
    values = random_values(BIG, 1)
    writing = store.start_write("big", values)
    system.gate.set()
    with pytest.raises(FileTierError, match="reading bucket 'big' failed"):
        store.wait(reading)
    store.wait(writing)
    system.armed = None
    assert all_same_bits(read(store, "big"), values)


@pytest.mark.parametrize("system", [Short, BufferedShort])
@pytest.mark.parametrize("most", [5000, ALIGNMENT, BLOCK - 512])
def test_short_calls_are_gone_on_with(open_store, system, most):
    system = system(most)
    each = layout("b", shard=BLOCK // 4 + 5, exp_avg=77)
    store = open_store([each], depth=2, system=system, checksums=True)
    values = random_values(each)
    write(store, "b", values)
    assert all_same_bits(read(store, "b"), values)
    pieces = 3 * 2
    assert len(system.calls) >= pieces + 2


def test_calls_that_move_nothing_end_in_an_error(open_store):
    system = Watched()
    store = open_store(system=system)
    write(store, "big", random_values(BIG))
    system.move = lambda kind, call, fd, buffers, offset: 100 if kind == "read" else 0
    if all(store.is_direct):
        with pytest.raises(FileTierError, match="in a row moved less than"):
            read(store, "big")
    with pytest.raises(FileTierError, match="in a row moved less than"):
        write(store, "big", random_values(BIG))


def test_a_file_cut_short_is_an_error(open_store):
    store = open_store()
    write(store, "big", random_values(BIG))
    (path,) = files_of(store)
    os.truncate(path, 2 * BLOCK)
    with pytest.raises(FileTierError, match="met the end of .* more were written") as caught:
        read(store, "big")
    assert caught.value.path == path and caught.value.offset >= 2 * BLOCK


def test_what_was_never_written_cannot_be_read(open_store):
    store = open_store()
    with pytest.raises(FileTierError, match="field 'shard' of bucket 'big' was never written"):
        store.start_read("big", empty_values(BIG))
    write(store, "big", {"shard": random_values(BIG)["shard"]})
    with pytest.raises(FileTierError, match="field 'exp_avg' of bucket 'big' was never written"):
        store.start_read("big", store.empty("big"))
    store.wait(store.start_read("big", {"shard": empty_values(BIG)["shard"]}))


@pytest.mark.parametrize("num_directories", [1, 2])
def test_a_flipped_bit_is_found_with_checksums_and_only_with_them(open_store, num_directories):
    for checksums in (False, True):
        store = open_store(num_directories=num_directories, checksums=checksums)
        values = random_values(BIG)
        write(store, "big", values)
        path = files_of(store)[-1]
        with open(path, "r+b") as file:
            file.seek(BLOCK + 12345)
            byte = file.read(1)[0]
            file.seek(BLOCK + 12345)
            file.write(bytes([byte ^ 0x10]))
            file.flush()
            os.fsync(file.fileno())
        if not checksums:
            assert not all_same_bits(read(store, "big"), values)
            continue
        with pytest.raises(FileTierError, match="is not what was written.*CRC-32") as caught:
            read(store, "big")
        assert (caught.value.path, caught.value.offset) == (path, BLOCK)
        write(store, "big", values)  # which heals it
        assert all_same_bits(read(store, "big"), values)


def test_a_torn_write_is_found_with_checksums(open_store):
    class Torn(Watched):
        def move(self, kind, call, fd, buffers, offset):
            if kind == "write" and offset == BLOCK and self.tears:
                (buffer,) = buffers
                call(fd, [buffer[: ALIGNMENT * 3]], offset)
                return len(buffer)
            return super().move(kind, call, fd, buffers, offset)

    system = Torn()
    system.tears = False
    store = open_store(system=system, checksums=True)
    write(store, "big", random_values(BIG))
    system.tears = True
    write(store, "big", random_values(BIG, 1))
    with pytest.raises(FileTierError, match="is not what was written") as caught:
        read(store, "big")
    assert caught.value.offset == BLOCK


# What goes wrong before


@pytest.mark.filterwarnings("default:.*page cache:UserWarning")
def test_without_direct_io_files_are_buffered_with_a_warning(open_store):
    system = Buffered()
    synced = []
    system.sync = synced.append
    with pytest.warns(UserWarning, match="does not support direct I/O"):
        store = open_store(system=system)
    assert store.is_direct == [False]
    values = random_values(BIG)
    write(store, "big", values)
    assert synced  # or a failure to write later would be nobody's
    assert all_same_bits(read(store, "big"), values)


def test_a_buffered_write_that_never_reaches_the_disk_is_an_error(open_store):
    system = Buffered()

    def fail(fd):
        raise OSError(errno.EIO, "Input/output error")

    system.sync = fail
    store = open_store(system=system)
    with pytest.raises(FileTierError, match="writing bucket 'big' failed"):
        write(store, "big", random_values(BIG))


def test_a_directory_in_memory_is_warned_of(open_store):
    system = Watched()
    system.file_system = lambda directory: "tmpfs"
    with pytest.warns(UserWarning, match=r"is in memory \(tmpfs\)"):
        open_store(system=system)


def test_the_kind_of_a_file_system_is_known():
    assert Watched().file_system("/proc") == "proc"


def test_directories_that_cannot_be_used_are_named_with_the_remedy(tmp_path):
    missing, file = tmp_path / "missing", tmp_path / "file"
    file.write_text("")
    with pytest.raises(FileTierError, match=f"'{missing}' does not exist.*mkdir -p {missing}"):
        FileStore([missing])
    with pytest.raises(FileTierError, match=f"'{file}' is not a directory"):
        FileStore([file])


@pytest.mark.parametrize(
    "code, words",
    [
        (errno.EROFS, "mounted read-only: remount it"),
        (errno.EACCES, "may not write there: change its mode"),
        (errno.ENOSPC, "is full: free space"),
    ],
)
def test_a_directory_that_cannot_be_written_is_named_with_the_remedy(tmp_path, code, words):
    system = Watched()

    def refuse(path):
        raise OSError(code, os.strerror(code))

    system.make_folder = refuse
    with pytest.raises(FileTierError, match=re.escape(words)) as caught:
        FileStore([tmp_path], system=system)
    assert str(tmp_path) in str(caught.value) and caught.value.errno == code


def test_a_full_disk_is_an_error_before_anything_is_written_with_the_numbers(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    system = Watched()
    system.free_bytes = lambda directory: BIG.nbytes - 1
    with pytest.raises(FileTierError, match="no room for the buckets") as caught:
        FileStore([first], [BIG], block_bytes=BLOCK, system=system)
    for part in (str(first), f"need {BIG.nbytes} bytes", f"{BIG.nbytes - 1} are free"):
        assert part in str(caught.value)
    assert caught.value.errno == errno.ENOSPC
    # Each of two directories has room for its half, but they are of one file system.
    with pytest.raises(FileTierError, match=f"need {BIG.nbytes} bytes"):
        FileStore([first, second], [BIG], block_bytes=BLOCK, system=system)
    assert os.listdir(first) == os.listdir(second) == []


def test_a_disk_that_fills_up_meanwhile_leaves_the_store_as_it_was(open_store):
    system = Watched()
    other = layout("other", shard=3)
    store = open_store([other], system=system)
    values = random_values(other)
    write(store, "other", values)
    before = files_of(store)
    allocate, allowed = system.allocate, [1]

    def fill_up(fd, nbytes):
        allowed[0] -= 1
        if allowed[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(fd, nbytes)

    system.allocate = fill_up
    with pytest.raises(FileTierError, match=r"no room .* \(errno 28"):
        store.add([BIG, layout("more", shard=8)])
    assert files_of(store) == before and list(store.layouts) == ["other"]
    assert all_same_bits(read(store, "other"), values)
    system.allocate = allocate
    store.add([BIG])
    write(store, "big", random_values(BIG))
    assert all_same_bits(read(store, "big"), random_values(BIG))


@pytest.mark.parametrize("num_directories", [1, 2, 3, 4])
def test_exactly_what_is_written_is_reserved_when_the_store_is_opened(open_store, num_directories):
    numels = [BLOCK // 4 * blocks + rest for blocks in range(6) for rest in (0, 5)]
    layouts = [layout(f"b{index}", shard=numel) for index, numel in enumerate(numels)]
    store = open_store(layouts, num_directories, system=Watched())
    reserved = {path: os.path.getsize(path) for path in files_of(store)}
    assert sum(reserved.values()) == sum(each.nbytes for each in layouts)
    for path, nbytes in reserved.items():
        assert os.stat(path).st_blocks * 512 >= nbytes
        os.truncate(path, 0)
    for each in layouts:
        write(store, each.bucket, store.empty(each.bucket))
    assert {path: os.path.getsize(path) for path in files_of(store)} == reserved


def test_nobody_else_may_read_the_files(open_store):
    mask = os.umask(0)
    try:
        store = open_store()
    finally:
        os.umask(mask)
    (folder,) = store.folders
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    for name in os.listdir(folder):
        assert stat.S_IMODE(os.stat(os.path.join(folder, name)).st_mode) == 0o600


def test_arguments_that_make_no_sense_are_refused(tmp_path):
    with pytest.raises(ValueError, match="at least one directory"):
        FileStore([])
    with pytest.raises(TypeError, match="is a list"):
        FileStore(str(tmp_path))
    with pytest.raises(ValueError, match="named twice"):
        FileStore([tmp_path, f"{tmp_path}/."])
    for block_bytes in (BLOCK // 2, BLOCK + 1):
        with pytest.raises(ValueError, match="block_bytes must be a multiple of"):
            FileStore([tmp_path], block_bytes=block_bytes)
    with pytest.raises(ValueError, match="depth"):
        FileStore([tmp_path], depth=0)
    with pytest.raises(ValueError, match="two fields of one name"):
        BucketLayout("b", (Field("x", torch.int8, 1), Field("x", torch.int8, 1)))
    assert os.listdir(tmp_path) == []


def test_tensors_that_do_not_fit_are_refused(open_store):
    store = open_store()
    shard = random_values(BIG)["shard"]
    with pytest.raises(ValueError, match="no bucket 'small'.*Known: big"):
        store.start_write("small", shard)
    with pytest.raises(ValueError, match="no field 'grad'.*Known: shard"):
        store.start_write("big", {"grad": shard})
    with pytest.raises(ValueError, match="elements of torch.float32, and the tensor has"):
        store.start_write("big", {"shard": shard[1:]})
    with pytest.raises(ValueError, match="of torch.float32, and the tensor has .* torch.int32"):
        store.start_write("big", {"shard": shard.view(torch.int32)})
    with pytest.raises(ValueError, match="contiguous"):
        store.start_write("big", {"shard": torch.zeros(2 * len(shard))[::2]})
    with pytest.raises(TypeError, match="the tensor is on meta"):
        store.start_write("big", {"shard": shard.to("meta")})
    with pytest.raises(ValueError, match="has a bucket 'big' already"):
        store.add([BIG])
    with pytest.raises(ValueError, match="of the same file store"):
        other = open_store(system=Slow(0.05))
        operation = other.start_write("big", random_values(BIG))
        store.start_write("big", random_values(BIG), after=[operation])
    other.wait(operation)


def test_closing_gives_up_what_is_under_way_and_removes_the_files(open_store):
    store = open_store(system=Slow(0.02), depth=1)
    (folder,) = store.folders
    operation = store.start_write("big", random_values(BIG))
    store.close()
    assert not os.path.exists(folder)
    with pytest.raises(FileTierError, match="the store was closed before it ended"):
        store.wait(operation)
    with pytest.raises(FileTierError, match="closed"):
        store.start_write("big", random_values(BIG))
    store.close()


def test_a_store_that_is_dropped_stops_its_threads_and_removes_its_files(tmp_path):
    before = threading.active_count()
    store = FileStore([tmp_path], [BIG], block_bytes=BLOCK, depth=5)
    write(store, "big", random_values(BIG))
    assert threading.active_count() == before + 5
    del store
    gc.collect()
    assert threading.active_count() == before
    assert os.listdir(tmp_path) == []
