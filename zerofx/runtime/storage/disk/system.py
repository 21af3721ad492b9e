"""The file tier's calls to the operating system, behind one object that tests replace."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Sequence

O_DIRECT = getattr(os, "O_DIRECT", 0)

_PROBE_BYTES = max(4096, mmap.PAGESIZE)


class SystemCalls:
    """The calls themselves.  A test overrides one to fail, to be slow or to do half of it."""

    def make_folder(self, path: str) -> None:
        """Make a folder that only this user may enter."""
        os.mkdir(path, 0o700)

    def open(self, path: str, flags: int) -> int:
        """Open a file for reading and writing, for this user alone."""
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def allocate(self, fd: int, nbytes: int) -> None:
        """Reserve the first ``nbytes`` of a file on its disk."""
        os.posix_fallocate(fd, 0, nbytes)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        """Have written data reach the disk, so that a failure to is known."""
        os.fdatasync(fd)

    def free_bytes(self, directory: str) -> int:
        """Return the bytes that this user may still write on a directory's file system."""
        figures = os.statvfs(directory)
        return figures.f_bavail * figures.f_frsize

    def file_system(self, directory: str) -> str:
        """The kind of a directory's file system, ``ext4`` or ``tmpfs``; empty if not known."""
        device = os.stat(directory).st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        try:
            with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
                for line in mounts:
                    before, _, after = line.partition(" - ")
                    if before.split()[2] == wanted:
                        return after.split()[0]
        except OSError:
            return ""
        return ""


def supports_direct(system: SystemCalls, folder: str) -> bool:
    """Try whether files in a folder can be read and written past the page cache.

    Raises: OSError for anything but a refusal of direct I/O.
    """
    if not O_DIRECT:
        return False
    path = os.path.join(folder, "probe")
    mapping = mmap.mmap(-1, _PROBE_BYTES)
    page = memoryview((ctypes.c_char * _PROBE_BYTES).from_buffer(mapping)).cast("B")
    try:
        fd = system.open(path, os.O_RDWR | os.O_CREAT | O_DIRECT)
    except OSError as error:
        if error.errno in _REFUSALS:
            return False
        raise
    try:
        system.pwritev(fd, [page], 0)
        system.preadv(fd, [page], 0)
    except OSError as error:
        if error.errno in _REFUSALS:
            return False
        raise
    finally:
        os.close(fd)
        os.unlink(path)
    return True


_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)
