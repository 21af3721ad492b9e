"""Folders of checkpoints: each appears whole, under its name, or not at all.

A checkpoint is written to ``.NAME.saving`` next to its place and renamed when all of it is on the
disk; before it is removed it is renamed to ``.NAME.removing``.  So what a killed process leaves has
one of these names: it is not taken for a checkpoint, and the next save removes it.  The process
that writes a checkpoint holds a lock on its notes, which keeps others from removing it.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import logging
import os
import shutil
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from zerofx.errors import CheckpointError, NewerFormatError, RankError
from zerofx.versions import __version__

logger = logging.getLogger("zerofx")

NOTES = "zerofx.json"
METADATA = ".metadata"
FORMAT = 1

_SAVING, _REMOVING = ".saving", ".removing"


class DamageError(CheckpointError):
    """A checkpoint is damaged for certain, so that no later try can read it: says where."""


def as_path(path: str | os.PathLike[str]) -> Path:
    """Return the absolute folder of a checkpoint.  Raises: ValueError if it cannot be one."""
    text = os.fspath(path)
    if "://" in text:
        raise ValueError(
            f"{text!r} is no path: checkpoints are folders of a file system that all ranks see. "
            "Save to one, and copy the folder."
        )
    found = Path(text)
    if not found.name or found.name.startswith("."):
        raise ValueError(
            f"{text!r} cannot be a checkpoint's name: it must have one that does not begin with a "
            "dot, such as 'checkpoints/step-100'"
        )
    return found.absolute()


@dataclass(frozen=True)
class Notes:
    """The notes that zerofx writes beside a checkpoint's contents.

    ``serial`` counts the checkpoints of a folder.  ``keep`` is how many there may be; None if this
    one is never removed.  ``metadata_crc32`` is of the file that says where everything is.
    """

    serial: int = 0
    keep: int | None = None
    metadata_crc32: int = 0
    torch: str = torch.__version__
    zerofx: str = __version__
    format: int = FORMAT


def notes_of(folder: Path) -> Notes | None:
    """Return the notes of a checkpoint; None if others than zerofx have written it.

    Raises: DamageError for notes that are no notes; NewerFormatError.
    """
    try:
        text = (folder / NOTES).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        values: dict[str, Any] = json.loads(text)
        if values["format"] > FORMAT:
            raise NewerFormatError(
                f"{folder} is of format {values['format']}, written by zerofx "
                f"{values.get('zerofx')}, and this is a zerofx that reads up to {FORMAT}: install "
                "that one or a newer one"
            )
        return Notes(**{name: values[name] for name in Notes.__dataclass_fields__})
    except (ValueError, TypeError, KeyError) as error:
        raise DamageError(
            f"{folder / NOTES} cannot be read ({error!r}): the checkpoint is damaged. Load another."
        ) from error


def checkpoints_in(folder: Path) -> tuple[list[tuple[Notes, Path]], dict[Path, CheckpointError]]:
    """Return the checkpoints that zerofx has written in a folder, the oldest first.

    Beside them those whose notes cannot be read or whose metadata is lost, and how.  A link to one
    of them, such as a user's ``latest``, does not count.
    """
    complete, damaged = [], {}
    for path in folder.iterdir() if folder.exists() else ():
        is_link_within = path.is_symlink() and path.resolve().parent == path.parent.resolve()
        if path.name.startswith(".") or is_link_within or not _is_saved(path):
            continue
        try:
            notes = notes_of(path)
            if notes is None or not (path / METADATA).is_file():
                raise CheckpointError(
                    f"{path} is damaged: it has {NOTES} and no {METADATA}. Load another checkpoint."
                )
            complete.append((notes, path))
        except CheckpointError as error:
            if os.path.lexists(path):  # else another process has just removed it
                damaged[path] = error
    return sorted(complete, key=lambda one: one[0].serial), damaged


def without_notes(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder that are another library's, or have lost their notes."""
    paths = sorted(folder.iterdir()) if folder.exists() else []
    found = [path for path in paths if not path.name.startswith(".")]
    return [path for path in found if METADATA in (names := _names_in(path)) and NOTES not in names]


def _is_saved(path: Path) -> bool:
    """Return whether it has notes, which are written first, and a file that exports do not have."""
    names = _names_in(path)
    return NOTES in names and any(name == METADATA or name.endswith(".distcp") for name in names)


def _names_in(path: Path) -> list[str]:
    try:
        return os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):  # another process removes it
        return []


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Return the checkpoint in ``folder`` that ``zerofx.save`` has completed last, None if none.

    Folders that are being written or were left half written do not count.
    """
    complete, _ = checkpoints_in(Path(folder))
    return complete[-1][1] if complete else None


class Draft:
    """The folder of a checkpoint while all ranks write it; rank 0 makes, publishes or discards it.

    ``publish`` and ``discard`` do nothing unless ``begin`` has been called.
    """

    def __init__(self, target: Path, rank: int = 0) -> None:
        self.target, self.rank = target, rank
        self.folder = target.with_name(f".{target.name}{_SAVING}")
        self._lock: int | None = None

    def begin(self) -> None:
        """Make the folder.

        Raises: FileExistsError if ``target`` exists, or another process is writing it.
        """
        if self.target in SKIPPED and os.path.lexists(self.target):
            _set_aside(self.target)
        if os.path.lexists(self.target):
            raise FileExistsError(
                f"{self.target} exists, and a checkpoint is never written over another: killed in "
                "the middle it would be a mix of both. Save under a new name, such as one with the "
                "step's number; keep=K removes old ones."
            )
        self.target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.target.parent)
        for _ in range(100):  # another process may just have removed it
            self.folder.mkdir(exist_ok=True)
            self._lock = _locked(self.folder / NOTES, os.O_CREAT)
            if self._lock is None:
                continue
            if os.listdir(self.folder) == [NOTES]:
                return
            self.discard()  # a killed process has left it
        raise FileExistsError(
            f"another process is writing {self.target} (it holds {self.folder}). Let each training "
            "save to a folder of its own."
        )

    def publish(self, notes: Notes) -> None:
        """Give it its name, with all of it on the disk."""
        if self._lock is None:
            return
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, (json.dumps(asdict(notes), indent=1) + "\n").encode(), 0)
        os.fsync(self._lock)
        _sync(self.folder)
        os.rename(self.folder, self.target)
        try:
            _sync(self.target.parent)
        except OSError as error:  # it is there, all of it
            logger.warning("the disk has not confirmed the name of %s: %s", self.target, error)
        os.close(self._lock)
        self._lock = None

    def discard(self) -> None:
        if self._lock is None:
            return
        try:
            _remove(self.folder)
        except OSError:
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)
        self._lock = None

    @contextlib.contextmanager
    def written(self) -> Iterator[None]:
        """Discard it if anything fails, with a CheckpointError that names ``target``."""
        try:
            yield
        except BaseException as error:
            self.discard()
            words = str(error)
            if not isinstance(error, RankError):
                says_it = (ValueError, FileExistsError, CheckpointError)
                if isinstance(error, says_it) or not isinstance(error, Exception):
                    raise
                words = f"on rank {self.rank}: {type(error).__name__}: {error}"
            raise CheckpointError(
                f"{self.target} could not be written: {words}. Nothing else was changed: earlier "
                "checkpoints are whole, and what was written of this one is removed."
            ) from error


SKIPPED: set[Path] = set()
"""Damaged checkpoints that ``resume`` went past: the training will save under their names."""


def _set_aside(path: Path) -> None:
    """Make room for a new checkpoint of this name."""
    number = itertools.count(1)
    aside = path.with_name(f".{path.name}.damaged")
    while os.path.lexists(aside):
        aside = path.with_name(f".{path.name}.damaged-{next(number)}")
    os.rename(path, aside)
    SKIPPED.discard(path)
    logger.warning("%s was damaged and is saved anew: the old one is %s now", path, aside)


def state_of(path: Path) -> tuple[int, int, int] | None:
    """Return numbers that change if a file is written to or replaced; None if it is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def prune(parent: Path, keep: int, unread: Collection[Path]) -> None:
    """Remove all but the ``keep`` newest of the checkpoints that were saved with ``keep``.

    One that is still ``unread`` stays until the next time; one that ``resume`` has found damaged
    stays, and does not count.
    """
    try:
        complete, _ = checkpoints_in(parent)
        whole = [(notes, path) for notes, path in complete if path not in SKIPPED]
        rotating = [path for notes, path in whole if notes.keep is not None]
        for path in rotating[:-keep]:
            if path.resolve() not in unread:
                _remove(path)
    except OSError as error:  # the new checkpoint is there all the same
        logger.warning("an old checkpoint could not be removed: %s", error)


def remove_leftovers(parent: Path) -> None:
    """Remove what killed processes have left."""
    for path in parent.glob(f".*{_REMOVING}"):
        shutil.rmtree(path, ignore_errors=True)
    for path in parent.glob(f".*{_SAVING}"):
        with contextlib.suppress(OSError):
            os.rmdir(path)  # killed before it had notes; refused if there is anything in it
        with contextlib.suppress(OSError), contextlib.ExitStack() as unlocked:
            if (lock := _locked(path / NOTES)) is not None:
                unlocked.callback(os.close, lock)
                _remove(path)


def _remove(folder: Path) -> None:
    """Remove a folder; if the process is killed meanwhile, the next save removes the rest.

    Raises: OSError.
    """
    removed = folder.with_name(f".{folder.name.removeprefix('.')}{_REMOVING}")
    shutil.rmtree(removed, ignore_errors=True)
    os.rename(folder, removed)
    shutil.rmtree(removed)


def _locked(path: Path, flags: int = 0) -> int | None:
    """Open and lock a file; return None if it is gone, or another process has locked it.

    Where files cannot be locked, it is opened.
    """
    with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as unless_locked:
        descriptor = os.open(path, os.O_RDWR | flags, 0o666)
        unless_locked.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        except OSError:
            pass
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):
            unless_locked.pop_all()
            return descriptor
    return None


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
