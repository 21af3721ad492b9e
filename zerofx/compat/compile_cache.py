"""Inductor's cache on disk, which processes share: of those, one compiles what all need."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator

LOCKS = "zerofx.lock"
"""An empty file in the folder of the cache, of which each program has a byte to lock."""


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
    try:
        yield locks is None or _lock(locks, place, waits)
    finally:
        if locks is not None:
            os.close(locks)


def is_kept() -> bool:
    """Return whether Inductor keeps on disk what it compiles."""
    from torch._inductor import config

    return bool(config.fx_graph_cache and not config.force_disable_caches)


def _locks() -> int | None:
    """Open the file of locks; None if Inductor keeps nothing, or its folder takes no file."""
    # Not at the top: the import takes 1.6 to 2.0 s, and only what compiles needs it.
    from torch._inductor.codecache import cache_dir

    if not is_kept():
        return None
    try:
        return os.open(os.path.join(cache_dir(), LOCKS), os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        return None


def _lock(locks: int, place: int, waits: bool) -> bool:
    """Lock a byte; return whether it is held now, which it is where there are no locks."""
    try:
        fcntl.lockf(locks, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
