"""Inductor's cache on disk, which processes share: what one of them compiles, and our programs."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import tempfile
import threading
from collections.abc import Iterator

logger = logging.getLogger("zerofx")

LOCKS = "zerofx.lock"
"""An empty file in the folder of the cache, of which each program has a byte to lock."""


PROGRAMS = "zerofx"
"""The folder of kept programs, in that of the cache."""

MOST_BYTES = 2**30
"""The most that kept programs take together; those go first that were not used for longest."""

_failed: set[str] = set()


def kept(key: str) -> bytes | None:
    """Return what was kept under a key, whole as it was written; None if nothing is there."""
    try:
        path = _path_of(key)
    except OSError as error:
        _say_once("", error)
        return None
    with contextlib.suppress(OSError):
        with open(path, "rb") as file:
            digest, data = file.read(_DIGEST), file.read()
        if hashlib.sha256(data).digest() != digest:
            os.unlink(path)
            return None
        with contextlib.suppress(OSError):  # a folder that is only read
            os.utime(path)
        return data
    return None


def keep(key: str, data: bytes) -> None:
    """Keep bytes under a key, for other processes too, for as long as there is room.

    What is there is whole at any moment: a process that is killed leaves a file of another name.
    Where the folder takes nothing, that is said once, and nothing is kept.
    """
    folder = ""  # until it is known
    try:
        path = _path_of(key)
        folder = os.path.dirname(path)
        os.makedirs(folder, exist_ok=True)
        _make_room(folder, len(data) + _DIGEST)
        descriptor, unfinished = tempfile.mkstemp(suffix=_UNFINISHED, dir=folder)
        try:
            with open(descriptor, "wb") as file:
                file.write(hashlib.sha256(data).digest() + data)
            os.replace(unfinished, path)
        except BaseException:
            os.unlink(unfinished)
            raise
    except OSError as error:
        _say_once(folder, error)


def _say_once(folder: str, error: OSError) -> None:
    if folder not in _failed:
        _failed.add(folder)
        logger.warning("programs are compiled anew at the next start: %s", error)


_DIGEST = hashlib.sha256().digest_size
_UNFINISHED = ".unfinished"


def folder() -> str:
    """Return the folder of the cache.  Raises: OSError if it is not there and cannot be made."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def _path_of(key: str) -> str:
    return os.path.join(folder(), PROGRAMS, key)


def _make_room(folder: str, nbytes: int) -> None:
    """Remove the files that were used longest ago, so that ``nbytes`` more are not too many."""
    found = []
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):  # another process removes them too
            found.append((entry.stat().st_mtime, entry.stat().st_size, entry.path))
    room = MOST_BYTES - nbytes - sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if room >= 0:
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        room += size


@contextlib.contextmanager
def turn_to_compile(program: str, waits: bool = True) -> Iterator[bool]:
    """Give whether this process is the only one that compiles what ``program`` describes.

    Whoever has its turn later finds what was compiled in Inductor's cache.  The lock is the
    operating system's, so that nobody waits for a process that has ended.  With ``waits=False``
    one that is held gives False at once.  Where Inductor keeps nothing, or the folder takes no
    locks, all have their turn together and compile for themselves.
    """
    place = int.from_bytes(hashlib.sha256(program.encode()).digest()[:7], "little")
    locks = _locks()
    is_locked = locks is not None and _lock(locks, place, waits)
    try:
        yield locks is None or is_locked
    finally:
        if locks is not None and is_locked:
            with contextlib.suppress(OSError):
                fcntl.lockf(locks, fcntl.LOCK_UN, 1, place)


def is_kept() -> bool:
    """Return whether Inductor keeps on disk what it compiles."""
    from torch._inductor import config

    return bool(config.fx_graph_cache and not config.force_disable_caches)


def _locks() -> int | None:
    """Open the file of locks, once; None if Inductor keeps nothing, or its folder takes no file.

    It stays open: whoever closes a file lets go of all locks that the process has in it.
    """
    if not is_kept():
        return None
    path = os.path.join(folder(), LOCKS)
    with _OPENING, contextlib.suppress(OSError):
        if path in _opened and not _is_there(path, _opened[path]):
            os.close(_opened.pop(path))
        if path not in _opened:
            _opened[path] = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        return _opened[path]
    return None


_opened: dict[str, int] = {}
_OPENING = threading.Lock()


def _is_there(path: str, descriptor: int) -> bool:
    """Return whether a file that is open is the one of this path still: folders are deleted."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:
        return False


def _lock(locks: int, place: int, waits: bool) -> bool:
    """Lock a byte; return whether it is held now, which it is where there are no locks."""
    try:
        fcntl.lockf(locks, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
