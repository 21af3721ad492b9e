"""Whatever goes wrong with files is an error in words, and nothing stale is given out."""

import errno
import gc
import os
import re
import stat
import threading
import time

import pytest

from tests.kit.files import (
    BIG,
    BLOCK,
    Buffered,
    BufferedShort,
    Failing,
    Gated,
    Short,
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
    store_of,
    write,
)
from zerofx.errors import FileTierError
from zerofx.runtime.storage.disk import FileStore
from zerofx.runtime.storage.disk.layout import ALIGNMENT

pytestmark = pytest.mark.filterwarnings("ignore:.*page cache:UserWarning")


# What goes wrong while data moves


def test_a_failed_read_names_everything_and_leaves_the_store_usable(open_store, tmp_path):
    system = Failing()
    store = open_store(system=system)
    values = random_values(BIG)
    write(store, "big", values)
    system.arm("read", errno.EIO, at=3)
    operation = store.start_read("big", empty(store, "big"))
    with pytest.raises(FileTierError, match="reading bucket 'big' failed at byte") as caught:
        operation.wait()
    error = caught.value
    assert (error.errno, error.bucket, error.path) == (errno.EIO, "big", str(tmp_path / "disk0"))
    assert error.offset % BLOCK == 0
    for part in (
        error.path,
        f"errno {errno.EIO}",
        "dmesg",
        "'shard' (float32)",
        f"byte {error.offset}",
    ):
        assert part in str(error)
    with pytest.raises(FileTierError):
        operation.wait()  # it stays failed
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
            start("other", empty(store, "other"))


def test_a_failed_write_that_nobody_waits_for_is_not_forgotten(open_store):
    system = Failing()
    store = open_store([BIG, layout("other", shard=3)], system=system)
    write(store, "other", random_values(store.layouts["other"]))
    system.arm("write", errno.EIO)
    store.start_write("big", empty(store, "big"))
    into = empty(store, "other")
    deadline = time.monotonic() + 10
    with pytest.raises(FileTierError, match="unusable since a write failed"):
        while time.monotonic() < deadline:
            store.start_read("other", into).wait()


def test_a_read_behind_a_write_that_fails_fails_too(open_store):
    system = Gated("write")
    store = open_store([BIG, layout("other", shard=3)], system=system)
    system.arm("write", errno.EIO)
    system.gate.clear()
    leaving = store.start_write("big", empty(store, "big"))
    behind = store.start_read("big", empty(store, "big"))
    dependent = store.start_write("other", empty(store, "other"), after=[leaving])
    system.gate.set()
    for operation in (dependent, behind, leaving):
        with pytest.raises(FileTierError, match="writing bucket 'big' failed"):
            operation.wait()


def test_a_write_behind_a_read_that_fails_goes_on(open_store):
    system = Gated("read")
    store = open_store(system=system)
    write(store, "big", random_values(BIG))
    system.arm("read", errno.EIO)
    system.gate.clear()
    reading = store.start_read("big", empty(store, "big"))
    values = random_values(BIG, 1)
    writing = store.start_write("big", filled(store, "big", values))
    system.gate.set()
    with pytest.raises(FileTierError, match="reading bucket 'big' failed"):
        reading.wait()
    writing.wait()
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
    assert len(system.calls) > 2 * 2  # it is in two blocks


def test_calls_that_move_nothing_end_in_an_error(open_store):
    system = Watched()
    store = open_store(system=system)
    write(store, "big", random_values(BIG))
    system.move = lambda kind, call, fd, buffers, offset: 100 if kind == "read" else 0
    if all(store.stripes.is_direct):
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
    assert caught.value.path == os.path.dirname(os.readlink(path))
    assert caught.value.offset >= 2 * BLOCK


def test_what_was_never_written_cannot_be_read(open_store):
    store = open_store()
    with pytest.raises(FileTierError, match="bucket 'big' was never written"):
        store.start_read("big", empty(store, "big"))


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
        assert caught.value.path == os.path.dirname(os.readlink(path))
        assert caught.value.offset == BLOCK
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
    assert store.stripes.is_direct == [False]
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


def test_a_directory_that_goes_during_a_training_is_named_with_the_remedy(open_store, tmp_path):
    store = open_store()
    gone = tmp_path / "disk0"
    gone.rmdir()
    with pytest.raises(FileTierError, match=f"'{gone}' does not exist.*mkdir -p {gone}"):
        store.add([layout("more", shard=100)])


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

    def refuse(directory):
        raise OSError(code, os.strerror(code))

    system.make_file = refuse
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
        store_of([first], [BIG], block_bytes=BLOCK, system=system)
    for part in (str(first), f"need {BIG.nbytes} bytes", f"{BIG.nbytes - 1} are free"):
        assert part in str(caught.value)
    assert caught.value.errno == errno.ENOSPC
    # Each of two directories has room for its half, but they are of one file system.
    with pytest.raises(FileTierError, match=f"need {BIG.nbytes} bytes"):
        store_of([first, second], [BIG], block_bytes=BLOCK, system=system)
    assert os.listdir(first) == os.listdir(second) == []


def test_room_is_reserved_though_the_disk_takes_only_blocks_directly(open_store):
    """The system's libc writes a byte of each block, where a file system reserves no room."""
    system = Watched()
    allocate = system.allocate

    def allocate_by_bytes(fd, nbytes):
        if fd in system.direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        allocate(fd, nbytes)

    system.allocate = allocate_by_bytes
    store = open_store(system=system)
    values = random_values(BIG)
    write(store, "big", values)
    assert system.direct and all_same_bits(read(store, "big"), values)


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
        store.start_write(each.bucket, empty(store, each.bucket)).wait()
    assert {path: os.path.getsize(path) for path in files_of(store)} == reserved


def test_nobody_else_finds_or_may_read_the_files(open_store, tmp_path):
    mask = os.umask(0)
    try:
        store = open_store()
    finally:
        os.umask(mask)
    assert os.listdir(tmp_path / "disk0") == []
    for path in files_of(store):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def test_arguments_that_make_no_sense_are_refused(tmp_path):
    with pytest.raises(ValueError, match="at least one directory"):
        FileStore([])
    with pytest.raises(ValueError, match="named twice"):
        FileStore([tmp_path, f"{tmp_path}/."])
    assert os.listdir(tmp_path) == []


def test_closing_gives_up_what_is_under_way_and_removes_the_files(open_store):
    store = open_store(system=Slow(0.02), depth=1)
    (path,) = files_of(store)
    operation = store.start_write("big", empty(store, "big"))
    file = os.readlink(path)
    store.close()
    assert not os.path.exists(path) or os.readlink(path) != file
    with pytest.raises(FileTierError, match="the store was closed before it ended"):
        operation.wait()
    with pytest.raises(FileTierError, match="closed"):
        store.start_write("big", empty(store, "big"))
    store.close()


def test_a_store_that_is_dropped_stops_its_threads_and_removes_its_files(tmp_path):
    before = threading.active_count()
    store = store_of([tmp_path], [BIG], block_bytes=BLOCK, depth=5)
    write(store, "big", random_values(BIG))
    assert threading.active_count() == before + 5
    del store
    gc.collect()
    assert threading.active_count() == before
    assert os.listdir(tmp_path) == []
