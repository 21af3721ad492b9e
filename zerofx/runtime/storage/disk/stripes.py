"""The files of buckets: cut into blocks, block after block over the directories."""

from __future__ import annotations

import contextlib
import errno
import os
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO

from zerofx.errors import FileTierError
from zerofx.runtime.memory.pages import aligned_empty
from zerofx.runtime.storage.disk.layout import ALIGNMENT, bytes_of
from zerofx.runtime.storage.disk.system import O_DIRECT, SystemCalls

_IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True, eq=False)
class StripeFile:
    """A bucket's file in one directory.  ``checksums`` are of what was written, by offset."""

    file: IO[bytes]
    directory: str
    is_direct: bool
    checksums: dict[int, int] = field(default_factory=dict)


class Stripes:
    """Makes the files of buckets, one a bucket and directory.

    They have no names: nobody else finds them, and they are gone when they are closed or the
    process ends, however it ends.

    Raises: FileTierError for a directory that cannot be used.
    """

    def __init__(
        self, directories: Sequence[str | os.PathLike[str]], block_bytes: int, system: SystemCalls
    ) -> None:
        self.block_bytes = block_bytes
        self._system = system
        self._directories = [os.path.realpath(directory) for directory in directories]
        self.is_direct = [self._try(directory) for directory in self._directories]
        self._num_made = 0

    def make(self, sizes: Sequence[int]) -> list[list[StripeFile]]:
        """Make the files of more buckets, with room for so many bytes each; all or none.

        Block after block of a bucket is in file after file.  Each bucket begins in another
        directory, or the first one would hold all small buckets.

        Raises: FileTierError with what is needed and what is free if there is no room.
        """
        plans = [self._plan(bucket, nbytes) for bucket, nbytes in enumerate(sizes, self._num_made)]
        needed: Counter[int] = Counter()
        for plan in plans:
            needed.update(dict(plan))
        self._check_room(needed)
        with contextlib.ExitStack() as made:
            files = [
                [self._make_file(number, nbytes, needed[number], made) for number, nbytes in plan]
                for plan in plans
            ]
            made.pop_all()
        self._num_made += len(sizes)
        return files

    def _plan(self, bucket: int, nbytes: int) -> list[tuple[int, int]]:
        """Return the directories of a bucket's files, and the bytes in each."""
        count, size = len(self._directories), self.block_bytes
        blocks, rest = divmod(nbytes, size)
        rounds, last = divmod(blocks, count)
        return [
            ((bucket + turn) % count, (rounds + (turn < last)) * size + (turn == last) * rest)
            for turn in range(count)
        ]

    def _try(self, directory: str) -> bool:
        """Make a file; return whether it can be read and written past the page cache."""
        _check_directory(directory)
        try:
            with self._system.make_file(directory) as file:
                is_direct = self._is_direct(file.fileno())
        except OSError as error:
            raise _cannot_make(directory, error) from error
        kind = self._system.file_system(directory)
        if kind in _IN_MEMORY:
            warnings.warn(
                f"{directory} is in memory ({kind}): buckets in files there take as much"
                " memory as without files. Name a directory on a disk",
                stacklevel=4,
            )
        elif not is_direct:
            warnings.warn(
                f"the file system of {directory} ({kind or 'of unknown kind'}) does not"
                " support direct I/O: files there go through the page cache, which is slower and"
                " takes memory. Name a directory on another one (ext4, xfs)",
                stacklevel=4,
            )
        return is_direct

    def _is_direct(self, fd: int) -> bool:
        page = aligned_empty(ALIGNMENT)
        try:
            self._system.make_direct(fd)
            self._system.pwritev(fd, [bytes_of(page)], 0)
            self._system.preadv(fd, [bytes_of(page)], 0)
        except OSError as error:
            if error.errno in _REFUSALS:
                return False
            raise
        return O_DIRECT != 0

    def _check_room(self, needed: Counter[int]) -> None:
        """Raise FileTierError if a file system has less room than its directories need."""
        needs: Counter[int] = Counter()
        for number, nbytes in needed.items():
            directory = self._directories[number]
            _check_directory(directory)  # it may have gone since the first files were made
            device = os.stat(directory).st_dev
            needs[device] += nbytes
            if needs[device] > self._system.free_bytes(directory):
                raise self._no_room(directory, needs[device])

    def _make_file(
        self, number: int, nbytes: int, needed: int, made: contextlib.ExitStack
    ) -> StripeFile:
        directory, is_direct = self._directories[number], self.is_direct[number]
        try:
            file = made.enter_context(self._system.make_file(directory))
            if nbytes:  # first: where the system cannot, libc writes bytes that are no block
                self._system.allocate(file.fileno(), nbytes)
            if is_direct:
                self._system.make_direct(file.fileno())
        except OSError as error:
            if error.errno in NO_ROOM:
                raise self._no_room(directory, needed, error) from error
            raise FileTierError(
                f"cannot make a file of {nbytes} bytes in {directory}: errno {error.errno},"
                f" {error.strerror}. {_REMEDIES.get(error.errno or 0, 'See to the disk')}",
                path=directory,
                errno=error.errno,
            ) from error
        return StripeFile(file, directory, is_direct)

    def _no_room(self, directory: str, needed: int, error: OSError | None = None) -> FileTierError:
        code = errno.ENOSPC if error is None or error.errno is None else error.errno
        said = "" if error is None else f" (errno {error.errno}, {error.strerror})"
        return FileTierError(
            f"no room for the buckets in {directory}: they need {needed} bytes there,"
            f" {self._system.free_bytes(directory)} are free{said}. Room is reserved before the"
            " first step, so that none fails for want of it: free space, name another directory"
            " or more of them, or keep less in files",
            path=directory,
            errno=code,
        )


def _check_directory(directory: str) -> None:
    if os.path.isdir(directory):
        return
    if os.path.exists(directory):
        code = errno.ENOTDIR
        words = (
            f"{directory!r} is not a directory: the file tier keeps its scratch files in one."
            " Name a directory on a fast local disk"
        )
    else:
        code = errno.ENOENT
        words = (
            f"the directory {directory!r} does not exist: the file tier makes files in it, never"
            " the directory itself, for its disk may not be mounted. Create it"
            f" (mkdir -p {directory}) or name another one"
        )
    raise FileTierError(words, path=directory, errno=code)


def _cannot_make(directory: str, error: OSError) -> FileTierError:
    remedies = {
        errno.EROFS: "its file system is mounted read-only: remount it for writing",
        errno.EACCES: f"user {os.getuid()} may not write there: change its mode or owner",
        errno.EPERM: f"user {os.getuid()} may not write there: change its mode or owner",
        errno.ENOSPC: "its file system is full: free space",
        errno.EDQUOT: "this user's quota is used up: free space",
    }
    why = remedies.get(error.errno or 0, f"{error.strerror}: see to the disk")
    return FileTierError(
        f"cannot make a file in {directory!r} (errno {error.errno}): {why}, or name another"
        " directory",
        path=directory,
        errno=error.errno,
    )


_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REMEDIES = {
    errno.EMFILE: "Too many files are open in this process: raise the limit (ulimit -n), name"
    " fewer directories or make larger buckets"
}
