"""Buckets, and operating systems that fail, for the tests of the file tier."""

import ctypes
import os
import threading
import time

import pytest
import torch

from zerofx.runtime.memory.pages import aligned_empty
from zerofx.runtime.storage.disk import BucketLayout, FileStore, Part
from zerofx.runtime.storage.disk.layout import ALIGNMENT
from zerofx.runtime.storage.disk.system import SystemCalls

BLOCK = 512 * 1024


def layout(bucket, **fields):
    """A bucket of one float32 tensor of each name, of these lengths, or of (dtype, length)."""
    typed = {
        name: field if isinstance(field, tuple) else (torch.float32, field)
        for name, field in fields.items()
    }
    return BucketLayout(bucket, tuple(Part(name, d, ((0, n),)) for name, (d, n) in typed.items()))


def random_bytes(dtype, numel, seed=0):
    """A tensor of any bits at all, NaNs of all kinds among them."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    if dtype == torch.bool:
        data %= 2
    return data.view(dtype)


def random_values(layout, seed=0):
    return {
        (number, part.name): random_bytes(part.dtype, numel, seed + index)
        for index, part in enumerate(layout.parts)
        for number, numel in part.numels
    }


def same_bits(left, right):
    return left.dtype == right.dtype and torch.equal(
        left.view(torch.uint8), right.view(torch.uint8)
    )


def all_same_bits(left, right):
    return left.keys() == right.keys() and all(same_bits(left[name], right[name]) for name in left)


class Watched(SystemCalls):
    """The system, with a log of its calls; what a disk refuses to move directly is an error."""

    def __init__(self):
        self.calls = []
        self.direct = set()
        self.under_way = 0
        self.most_under_way = 0
        self._lock = threading.Lock()

    def make_file(self, directory):
        file = super().make_file(directory)
        self.direct.discard(file.fileno())
        return file

    def make_direct(self, fd):
        super().make_direct(fd)
        self.direct.add(fd)

    def preadv(self, fd, buffers, offset):
        return self._watch("read", super().preadv, fd, buffers, offset)

    def pwritev(self, fd, buffers, offset):
        return self._watch("write", super().pwritev, fd, buffers, offset)

    def move(self, kind, call, fd, buffers, offset):
        """For others to override."""
        return call(fd, buffers, offset)

    def _watch(self, kind, call, fd, buffers, offset):
        (buffer,) = buffers
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        with self._lock:
            self.calls.append((kind, address, len(buffer), offset))
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            if fd in self.direct:
                assert (address % ALIGNMENT, len(buffer) % ALIGNMENT, offset % ALIGNMENT) == (
                    0,
                ) * 3
            return self.move(kind, call, fd, buffers, offset)
        finally:
            with self._lock:
                self.under_way -= 1


class Failing(Watched):
    """Fails with ``code`` at the n-th call of a kind after ``arm``."""

    def __init__(self):
        super().__init__()
        self.armed = None

    def arm(self, kind, code, at=0):
        self.armed = [kind, code, at]

    def move(self, kind, call, fd, buffers, offset):
        with self._lock:
            if self.armed and self.armed[0] == kind:
                _, code, at = self.armed
                self.armed[2] -= 1
                if at <= 0:
                    raise OSError(code, os.strerror(code))
        return super().move(kind, call, fd, buffers, offset)


class Gated(Failing):
    """Moves nothing of a kind while the gate is shut (``gate.clear()``)."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.gate = threading.Event()
        self.gate.set()

    def move(self, kind, call, fd, buffers, offset):
        if kind == self.kind:
            assert self.gate.wait(timeout=30)
        return super().move(kind, call, fd, buffers, offset)


class Short(Watched):
    """Moves at most so many bytes a call."""

    def __init__(self, most):
        super().__init__()
        self.most = most

    def move(self, kind, call, fd, buffers, offset):
        (buffer,) = buffers
        if len(buffer) <= self.most:
            return super().move(kind, call, fd, buffers, offset)
        with open(f"/proc/self/fd/{fd}", "r+b", buffering=0) as file:  # not direct, any length
            call = os.preadv if kind == "read" else os.pwritev
            return call(file.fileno(), [buffer[: self.most]], offset)


class Slow(Watched):
    """Takes its time for every call of these kinds."""

    def __init__(self, delay_s, kinds=("read", "write")):
        super().__init__()
        self.delay_s = delay_s
        self.kinds = kinds

    def move(self, kind, call, fd, buffers, offset):
        if kind in self.kinds:
            time.sleep(self.delay_s)
        return super().move(kind, call, fd, buffers, offset)


class Buffered(Watched):
    """On a file system without direct I/O."""

    def make_direct(self, fd):
        raise OSError(22, "Invalid argument")


class BufferedShort(Buffered, Short):
    """Both."""


BIG = layout("big", shard=5 * BLOCK // 4 + 7, exp_avg=(torch.bfloat16, 3), empty=0)


def store_of(directories, layouts=(), kind=FileStore, **options):
    """A store with room for these buckets; closed if there is none."""
    store = kind(directories, **options)
    try:
        store.add(layouts)
    except BaseException:
        store.close()
        raise
    return store


def empty(store, bucket):
    """Memory for a whole bucket."""
    return aligned_empty(store.layouts[bucket].nbytes)


@pytest.fixture(name="open_store")
def open_store_fixture(tmp_path):
    """Open stores on so many directories; closed after the test."""
    opened = []

    def open_one(layouts=(BIG,), num_directories=1, **options):
        directories = [tmp_path / f"disk{index}" for index in range(num_directories)]
        for directory in directories:
            directory.mkdir(exist_ok=True)
        options = {"block_bytes": BLOCK, "depth": 8, **options}
        opened.append(store_of(directories, layouts, **options))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


def filled(store, bucket, values):
    """Memory of a bucket that holds these values."""
    memory = empty(store, bucket)
    for name, view in store.layouts[bucket].views(memory).items():
        view.view(torch.uint8).copy_(values[name].view(torch.uint8))
    return memory


def write(store, bucket, values):
    store.start_write(bucket, filled(store, bucket, values)).wait()


def read(store, bucket):
    memory = empty(store, bucket)
    store.start_read(bucket, memory).wait()
    return store.layouts[bucket].views(memory)


def files_of(store):
    """Paths of the files, which have no names of their own: bucket by bucket."""
    files = (one.file for bucket in store.layouts for one in store.files[bucket])
    return [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in files]


def open_in(directory):
    """Paths of the files of a directory that this process has open, without names or with."""
    paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    found = [path for path in paths if os.path.lexists(path)]
    return [path for path in found if os.path.dirname(os.readlink(path)) == str(directory)]
