"""The files of buckets: cut into blocks, block after block over the directories."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from zerofx.errors import FileTierError
from zerofx.runtime.storage.disk.scratch import RunFolder
from zerofx.runtime.storage.disk.system import O_DIRECT, SystemCalls, supports_direct

_IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class StripeFile:
    """A bucket's file in one directory."""

    fd: int
    path: str
    is_direct: bool


class Stripes:
    """One file a bucket and directory, in a private folder of each directory.

    Raises: FileTierError for a directory that cannot be used.
    """

    def __init__(
        self,
        directories: Sequence[str | os.PathLike[str]],
        block_bytes: int,
        system: SystemCalls,
    ) -> None:
        self.block_bytes = block_bytes
        self.is_direct: list[bool] = []
        self._system = system
        self._folders: list[RunFolder] = []
        self._files: list[list[StripeFile]] = []
        try:
            for directory in directories:
                self._folders.append(RunFolder(os.path.realpath(directory), system))
            for folder in self._folders:
                self.is_direct.append(self._try_direct(folder))
        except BaseException:
            self.close()
            raise

    @property
    def folders(self) -> list[str]:
        return [folder.path for folder in self._folders]

    def add(self, sizes: Sequence[int]) -> None:
        """Make the files of more buckets, with room for so many bytes each; all or none.

        Raises: FileTierError with what is needed and what is free if there is no room.
        """
        numbers = range(len(self._files), len(self._files) + len(sizes))
        plans = [self._file_sizes(nbytes, n) for nbytes, n in zip(sizes, numbers, strict=True)]
        self._check_room(plans)
        made: list[list[StripeFile]] = []
        try:
            for number, plan in zip(numbers, plans, strict=True):
                made.append([])
                for folder, is_direct, nbytes, needed in zip(
                    self.folders, self.is_direct, plan, self._needed(plans), strict=True
                ):
                    path = os.path.join(folder, f"bucket-{number}")
                    made[-1].append(self._make_file(path, is_direct, nbytes, needed))
        except BaseException:
            for file in (file for files in made for file in files):
                os.close(file.fd)
                os.unlink(file.path)
            raise
        self._files += made

    @property
    def num_buckets(self) -> int:
        """The number that have been added, those included that are gone again."""
        return len(self._files)

    def remove(self, number: int) -> None:
        """Remove the files of bucket ``number``, which keeps its number."""
        files, self._files[number] = self._files[number], []
        for file in files:
            os.close(file.fd)
            os.unlink(file.path)

    def locate(self, number: int, position: int) -> tuple[StripeFile, int, int]:
        """Locate a byte of bucket ``number``: file, offset in it, bytes left of its block."""
        files = self._files[number]
        block, within = divmod(position, self.block_bytes)
        offset = block // len(files) * self.block_bytes + within
        return files[(number + block) % len(files)], offset, self.block_bytes - within

    def close(self) -> None:
        """Remove files and folders."""
        for file in (file for files in self._files for file in files):
            os.close(file.fd)
        self._files.clear()
        for folder in self._folders:
            folder.remove()

    def _needed(self, plans: list[list[int]]) -> list[int]:
        """Return the bytes that all these buckets take in each directory."""
        return [sum(plan[index] for plan in plans) for index in range(len(self._folders))]

    def _file_sizes(self, nbytes: int, number: int) -> list[int]:
        """Return the bytes that bucket ``number`` takes in each directory.

        Each begins in another directory, or the first one would hold all small buckets.
        """
        num_directories = len(self._folders)
        whole_blocks, rest = divmod(nbytes, self.block_bytes)
        sizes = []
        for directory in range(num_directories):
            first = (directory - number) % num_directories  # its first block of the bucket
            count = max(0, -(-(whole_blocks - first) // num_directories))
            has_rest = whole_blocks % num_directories == first
            sizes.append(count * self.block_bytes + (rest if has_rest else 0))
        return sizes

    def _try_direct(self, folder: RunFolder) -> bool:
        kind = self._system.file_system(folder.directory)
        try:
            is_direct = supports_direct(self._system, folder.path)
        except OSError as error:
            raise FileTierError(
                f"cannot write in {folder.path} (errno {error.errno}, {error.strerror}): see to"
                " the disk, or name another directory",
                path=folder.path,
                errno=error.errno,
            ) from error
        if kind in _IN_MEMORY:
            warnings.warn(
                f"{folder.directory} is in memory ({kind}): buckets in files there take as much"
                " memory as without files. Name a directory on a disk",
                stacklevel=4,
            )
        elif not is_direct:
            warnings.warn(
                f"the file system of {folder.directory} ({kind or 'of unknown kind'}) does not"
                " support direct I/O: files there go through the page cache, which is slower and"
                " takes memory. Name a directory on another one (ext4, xfs)",
                stacklevel=4,
            )
        return is_direct

    def _check_room(self, plans: list[list[int]]) -> None:
        """Raise FileTierError if a file system has less room than its directories need."""
        needs: dict[int, int] = {}
        for folder, needed in zip(self.folders, self._needed(plans), strict=True):
            device = os.stat(folder).st_dev
            needs[device] = needs.get(device, 0) + needed
            free = self._system.free_bytes(folder)
            if needs[device] > free:
                raise self._no_room(folder, needs[device], free)

    def _make_file(self, path: str, is_direct: bool, nbytes: int, needed: int) -> StripeFile:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | (O_DIRECT if is_direct else 0)
        try:
            fd = self._system.open(path, flags)
            try:
                if nbytes:
                    self._system.allocate(fd, nbytes)
            except BaseException:
                os.close(fd)
                os.unlink(path)
                raise
        except OSError as error:
            folder = os.path.dirname(path)
            if error.errno in _NO_ROOM:
                free = self._system.free_bytes(folder)
                raise self._no_room(folder, needed, free, error) from error
            raise FileTierError(
                f"cannot make a file of {nbytes} bytes, {path}: errno {error.errno},"
                f" {error.strerror}. {_REMEDIES.get(error.errno or 0, 'See to the disk')}",
                path=path,
                errno=error.errno,
            ) from error
        return StripeFile(fd, path, is_direct)

    def _no_room(
        self, folder: str, needed: int, free: int, error: OSError | None = None
    ) -> FileTierError:
        directory = os.path.dirname(folder)
        code = errno.ENOSPC if error is None or error.errno is None else error.errno
        said = "" if error is None else f" (errno {error.errno}, {error.strerror})"
        return FileTierError(
            f"no room for the buckets in {directory}: they need {needed} bytes there, {free} are"
            f" free{said}. Room is reserved before the first step, so that none fails for want of"
            " it: free space, name another directory or more of them, or keep less in files",
            path=directory,
            errno=code,
        )


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REMEDIES = {
    errno.EMFILE: "Too many files are open in this process: raise the limit (ulimit -n), name"
    " fewer directories or make larger buckets",
}
