"""Inductor's cache on disk, which processes share: of those, one compiles what all need."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

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
    folder = _folder()
    with contextlib.ExitStack() as ending:
        if folder is not None:
            place = int.from_bytes(hashlib.sha256(program.encode()).digest()[:7], "little")
            try:
                locks = os.open(folder / LOCKS, os.O_RDWR | os.O_CREAT, 0o666)
                ending.callback(os.close, locks)
                fcntl.lockf(locks, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB), 1, place)
            except BlockingIOError:
                yield False
                return
            except OSError:
                pass
        yield True


def _folder() -> Path | None:
    """Return where Inductor keeps what it compiles; None if it keeps nothing."""
    # Not at the top: the import takes 1.6 to 2.0 s, and only what compiles needs it.
    from torch._inductor import config
    from torch._inductor.codecache import cache_dir

    if config.force_disable_caches or not config.fx_graph_cache:
        return None
    try:
        return Path(cache_dir())
    except OSError:
        return None
