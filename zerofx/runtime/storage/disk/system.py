"""The file tier's calls to the operating system, behind one object that tests replace."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

O_DIRECT = getattr(os, "O_DIRECT", 0)


class SystemCalls:
    """The calls themselves.  A test overrides one to fail, to be slow or to do half of it."""

    def make_file(self, directory: str) -> IO[bytes]:
        """Open a new file without a name: it goes with the last process that has it open."""
        return tempfile.TemporaryFile(buffering=0, dir=directory)

    def make_direct(self, fd: int) -> None:
        """Have a file read and written past the page cache.  Raises: OSError if it cannot be."""
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | O_DIRECT)

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
        with suppress(OSError), open("/proc/self/mountinfo", errors="replace") as mounts:
            for line in mounts:
                before, _, after = line.partition(" - ")
                if before.split()[2] == wanted:
                    return after.split()[0]
        return ""
