"""One run's folder in a directory: private, locked while its owner lives, gone when it is not.

Files of the file tier are scratch.  A run removes its own folder when it ends; what a killed run
left is removed by the next one that uses the directory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
import stat
from dataclasses import dataclass

from zerofx.errors import FileTierError
from zerofx.runtime.storage.disk.system import SystemCalls

_LOCK = "lock"
_MAKING = ".making"
_NAME = re.compile(
    r"zerofx-files\.run-[0-9a-f]+\.host-(?P<host>.+)\.boot-(?P<boot>[0-9a-f-]+)"
    r"\.pid-(?P<pid>\d+)\.start-(?P<start>\d+)(\.making)?"
)


@dataclass(frozen=True)
class Owner:
    """A process, told apart from a later one of the same number, on this or another machine."""

    host: str
    boot: str
    pid: int
    start: int

    @classmethod
    def this_process(cls) -> Owner:
        pid = os.getpid()
        return cls(_host(), _boot_id(), pid, _start_of(pid) or 0)

    @classmethod
    def of(cls, folder_name: str) -> Owner | None:
        """Return the run that made a folder, by its name; None if no run did."""
        match = _NAME.fullmatch(folder_name)
        if match is None:
            return None
        return cls(match["host"], match["boot"], int(match["pid"]), int(match["start"]))

    def folder_name(self, run: str) -> str:
        return (
            f"zerofx-files.run-{run}.host-{self.host}.boot-{self.boot}"
            f".pid-{self.pid}.start-{self.start}"
        )

    def is_gone(self) -> bool:
        """Return whether it is known to have ended.  A run of another host never is."""
        if self.host != _host():
            return False
        return self.boot != _boot_id() or _start_of(self.pid) != self.start


class RunFolder:
    """A folder of this process's own in ``directory``, where it removes what ended runs left.

    Raises: FileTierError if the directory is missing, is none, or cannot be written.
    """

    def __init__(self, directory: str, system: SystemCalls) -> None:
        self.directory = directory
        self._pid = os.getpid()
        self._lock_fd: int | None
        _check_directory(directory)
        try:
            remove_stale(directory)
            self.path, self._lock_fd = _make_locked(directory, system)
        except OSError as error:
            raise _cannot_make(directory, error) from error

    def remove(self) -> None:
        """Remove the folder and what is in it.  Nothing in a forked child: it is the parent's."""
        if self._lock_fd is None or os.getpid() != self._pid:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock_fd)
        self._lock_fd = None


def remove_stale(directory: str) -> list[str]:
    """Remove what ended runs of this host and this user left in a directory; return the paths.

    A folder is left alone unless its name, its owner's absence and its lock all say that nothing
    uses it: one whose process lives, or whose lock is held by anybody (a child that the owner
    forked; a process in another container), and any of another host.
    """
    removed = []
    for name in sorted(os.listdir(directory)):
        owner = Owner.of(name)
        path = os.path.join(directory, name)
        if owner is None or not owner.is_gone() or not _is_own_folder(path):
            continue
        with contextlib.ExitStack() as opened:
            try:
                lock_fd = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                pass  # its owner died before it had the lock, or while it removed the folder
            except OSError:
                continue
            else:
                opened.callback(os.close, lock_fd)
                if not _try_lock(lock_fd):
                    continue
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed


def _make_locked(directory: str, system: SystemCalls) -> tuple[str, int]:
    """Make a folder that is locked before it has its name.

    A run that cleans up finds it either under the name of one that is being made, or locked.  One
    who takes this process for dead (it looks from another container) may remove it before:
    then another one is made.
    """
    owner = Owner.this_process()
    for attempt in range(_ATTEMPTS):
        path = os.path.join(directory, owner.folder_name(secrets.token_hex(4)))
        system.make_folder(path + _MAKING)
        lock_fd = -1
        try:
            lock_fd = system.open(os.path.join(path + _MAKING, _LOCK), os.O_RDWR | os.O_CREAT)
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(path + _MAKING, path)
            return path, lock_fd
        except OSError as error:
            if lock_fd >= 0:
                os.close(lock_fd)
            if not isinstance(error, FileNotFoundError) or attempt == _ATTEMPTS - 1:
                shutil.rmtree(path + _MAKING, ignore_errors=True)
                raise
    raise AssertionError


_ATTEMPTS = 8


def _check_directory(directory: str) -> None:
    if os.path.isdir(directory):
        return
    if os.path.exists(directory):
        raise FileTierError(
            f"{directory!r} is not a directory: the file tier keeps its scratch files in one."
            " Name a directory on a fast local disk",
            path=directory,
            errno=errno.ENOTDIR,
        )
    raise FileTierError(
        f"the directory {directory!r} does not exist: the file tier makes folders of its own in"
        f" it, never the directory itself, for its disk may not be mounted. Create it (mkdir -p"
        f" {directory}) or name another one",
        path=directory,
        errno=errno.ENOENT,
    )


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
        f"cannot make a folder for this run in {directory!r} (errno {error.errno}): {why}, or name"
        " another directory",
        path=directory,
        errno=error.errno,
    )


def _is_own_folder(path: str) -> bool:
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9-]", "_", socket.gethostname())[:64] or "unknown"


def _boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def _start_of(pid: int) -> int | None:
    """Return a living process's start, in clock ticks since boot; None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # After the command's name, which may hold anything: state, then field 4 on.
            state, *rest = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(rest[18])
