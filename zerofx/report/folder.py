"""The folder of a run's dumps: a rerun replaces it, and no other living run writes to it."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from zerofx import compat

logger = logging.getLogger("zerofx")

CLAIM = ".zerofx-run"
"""A file with the name of the folder's run; the run's processes share a lock on it."""

MARKER = ".zerofx-dump"
"""A file in every folder that a run has made and the next run may remove."""


class DumpFolder:
    """A folder to write to.  After the first file that cannot be written, it warns and stops.

    ``path`` has a folder per rank, those one per compiled program.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.works = True
        self._claim: int | None = None  # open for as long as the process lives, for its lock

    def write(self, name: str, content: str | bytes) -> Path | None:
        """Write one file, ``rank0/step0_0/00_captured.py``; text as UTF-8.  Return where it is."""
        if not self.works:
            return None
        path = self.path / name
        data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            (path.parent / MARKER).touch()
            path.write_bytes(data)
        except OSError as error:
            self.fail(path, error)
            with contextlib.suppress(OSError):  # half a program is worse than none
                path.unlink(missing_ok=True)
            return None
        return path

    def fail(self, path: Path, error: OSError) -> None:
        self.works = False
        logger.warning(
            "zerofx cannot write %s: %s. Programs are not dumped any further; the step runs on.",
            path,
            error,
        )


def claim(path: str | Path, run: str) -> DumpFolder:
    """Return the folder of this run below ``path``, the same for all processes of the run.

    It is ``path`` itself, without the dumps of earlier runs; if a living run writes there, it is
    ``path/run2`` or the next.
    """
    folder = DumpFolder(path)
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            directory = os.open(folder.path, os.O_RDONLY)
            stack.callback(os.close, directory)
            _lock(directory, fcntl.LOCK_EX)  # one process claims a folder at a time
            claimed = _claimed(folder.path, run)
    except OSError as error:
        folder.fail(folder.path, error)
        return folder
    if claimed.path != folder.path:
        logger.warning(
            "another run is writing its programs to %s; this one's go to %s",
            folder.path,
            claimed.path,
        )
    return claimed


@contextlib.contextmanager
def written_anew(path: Path) -> Iterator[Path]:
    """Give a path to write to: the file is there whole then, as it was or as it is to be."""
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def run_of_this_process() -> str:
    """Return the name of the run that this process is a rank of; other runs have other names.

    The first rank to ask chooses it, and no rank waits for another.  A process whose store does not
    answer, as that of torch's fake group, is a run of its own.
    """
    mine = uuid.uuid4().hex
    store = compat.tensors.world_store()
    if store is None:
        return mine
    try:
        return store.compare_set("dump/run", "", mine).decode()
    except RuntimeError:
        return mine


def _claimed(path: Path, run: str) -> DumpFolder:
    claims = (path / CLAIM, *path.glob(f"run*/{CLAIM}"))
    known = [claim.parent for claim in claims if claim.exists()]
    for folder in known:
        if (folder / CLAIM).read_bytes() == run.encode():
            return _taken(folder, run)
    alive = [folder for folder in known if not _is_free(folder)]
    for folder in known:
        if folder not in alive:
            _remove_dumps(folder)
    candidates = (path, *(path / f"run{number}" for number in range(2, len(alive) + 2)))
    return _taken(next(folder for folder in candidates if folder not in alive), run)


def _taken(folder: Path, run: str) -> DumpFolder:
    """Write the claim, and share its lock with the other processes of the run."""
    folder.mkdir(exist_ok=True)
    claimed = DumpFolder(folder)
    claimed._claim = os.open(folder / CLAIM, os.O_RDWR | os.O_CREAT, 0o666)
    _lock(claimed._claim, fcntl.LOCK_SH | fcntl.LOCK_NB)
    os.ftruncate(claimed._claim, 0)
    os.pwrite(claimed._claim, run.encode(), 0)
    return claimed


def _is_free(folder: Path) -> bool:
    """Return whether every process of the folder's run has ended."""
    with open(folder / CLAIM, "r+b") as claim:
        return _lock(claim.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove_dumps(folder: Path) -> None:
    """Remove what a run has made, and nothing else."""
    for marker in list(folder.glob(f"rank*/*/{MARKER}")):
        shutil.rmtree(marker.parent)
        with contextlib.suppress(OSError):  # something else is in there
            marker.parent.parent.rmdir()
    (folder / CLAIM).unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()


def _lock(descriptor: int, how: int) -> bool:
    """Take a lock; return whether it is held now, which it is where there are no locks."""
    try:
        fcntl.flock(descriptor, how)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
