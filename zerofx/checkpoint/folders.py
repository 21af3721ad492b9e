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
import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zerofx.errors import CheckpointError, NewerFormatError, RankError

logger = logging.getLogger("zerofx")

NOTES = "zerofx.json"
METADATA = ".metadata"
FORMAT = 1

NOT_WRITTEN = (
    "Nothing else was changed: earlier checkpoints are whole, and what was written of this one is "
    "removed."
)

_SAVING, _REMOVING = ".saving", ".removing"


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

    serial: int
    keep: int | None
    metadata_crc32: int
    torch: str
    zerofx: str
    format: int = FORMAT


def notes_of(folder: Path) -> Notes | None:
    """Return the notes of a checkpoint; None if others than zerofx have written it.

    Raises: CheckpointError for notes that cannot be read, or of a newer format.
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
        raise CheckpointError(
            f"{folder / NOTES} cannot be read ({error!r}): the checkpoint is damaged. Load another."
        ) from error


def complete_in(folder: Path) -> list[tuple[Notes, Path]]:
    """Return the checkpoints that zerofx has written in a folder, the oldest first.

    A link to one of them, such as a user's ``latest``, does not count.
    """
    found = []
    for path in _saved_in(folder):
        with contextlib.suppress(CheckpointError):
            found.append((_notes_of_complete(path), path))
    return sorted(found, key=lambda one: one[0].serial)


def damaged_in(folder: Path) -> dict[Path, str]:
    """Return the checkpoints in a folder whose notes or metadata are lost, and how.

    Raises: CheckpointError if one is of a newer format: it may be the last.
    """
    found = {}
    for path in _saved_in(folder):
        try:
            _notes_of_complete(path)
        except NewerFormatError:
            raise
        except CheckpointError as error:
            if os.path.lexists(path):  # else another process has just removed it
                found[path] = str(error)
    return found


def _saved_in(folder: Path) -> Iterator[Path]:
    with contextlib.suppress(FileNotFoundError):
        for path in folder.iterdir():
            is_hidden = path.name.startswith(".")
            if not is_hidden and not _is_link_within(path) and _is_saved(path):
                yield path


def _is_saved(path: Path) -> bool:
    """Return whether it has notes, which are written first, and a file that exports do not have."""
    try:
        names = os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):  # another process removes it
        return False
    return NOTES in names and any(name == METADATA or name.endswith(".distcp") for name in names)


def _notes_of_complete(path: Path) -> Notes:
    notes = notes_of(path)
    if notes is None or not (path / METADATA).is_file():
        raise CheckpointError(
            f"{path} is damaged: it has {NOTES} and no {METADATA}. Load another checkpoint."
        )
    return notes


def _is_link_within(path: Path) -> bool:
    return path.is_symlink() and path.resolve().parent == path.parent.resolve()


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Return the checkpoint in ``folder`` that ``zerofx.save`` has completed last, None if none.

    Folders that are being written or were left half written do not count.
    """
    found = complete_in(Path(folder))
    return found[-1][1] if found else None


def draft_of(target: Path) -> Path:
    """Return the folder that a checkpoint is written to."""
    return target.with_name(f".{target.name}{_SAVING}")


@contextlib.contextmanager
def telling_what_failed(target: Path, rank: int) -> Iterator[None]:
    """Raise a CheckpointError that names ``target`` for whatever fails while it is written."""
    try:
        yield
    except RankError as error:
        raise CheckpointError(f"{target} could not be written: {error}. {NOT_WRITTEN}") from error
    except (ValueError, FileExistsError, CheckpointError):
        raise  # which say it
    except Exception as error:
        words = f"on rank {rank}: {type(error).__name__}: {error}"
        raise CheckpointError(f"{target} could not be written: {words}. {NOT_WRITTEN}") from error


class Draft:
    """The folder of a checkpoint while rank 0 has it written; ``publish`` or ``discard`` it.

    Raises: FileExistsError if ``target`` exists, or another process is writing it.
    """

    def __init__(self, target: Path) -> None:
        if target in SKIPPED and os.path.lexists(target):
            _set_aside(target)
        if os.path.lexists(target):
            raise FileExistsError(
                f"{target} exists, and a checkpoint is never written over another: killed in the "
                "middle it would be a mix of both. Save under a new name, such as one with the "
                "step's number; keep=K removes old ones."
            )
        self.target = target
        self.folder = draft_of(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target.parent)
        self._lock = self._begin()

    def _begin(self) -> int:
        for _ in range(100):
            self.folder.mkdir(exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # another process has just removed it
                descriptor = os.open(self.folder / NOTES, os.O_RDWR | os.O_CREAT, 0o666)
                with contextlib.ExitStack() as unless_kept:
                    unless_kept.callback(os.close, descriptor)
                    if not _lock(descriptor):
                        break
                    if _is_at(descriptor, self.folder / NOTES):
                        _empty(self.folder)
                        unless_kept.pop_all()
                        return descriptor
        raise FileExistsError(
            f"another process is writing {self.target} (it holds {self.folder}). Let each training "
            "save to a folder of its own."
        )

    def publish(self, notes: Notes) -> None:
        """Give it its name, with all of it on the disk."""
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

    def discard(self) -> None:
        try:
            _remove(self.folder)
        except OSError:
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


@contextlib.contextmanager
def discarded_on_error(drafts: Sequence[Draft]) -> Iterator[None]:
    """Discard what is in ``drafts`` then, if an error is raised."""
    try:
        yield
    except BaseException:
        for draft in drafts:
            draft.discard()
        raise


def next_serial(parent: Path) -> int:
    found = complete_in(parent)
    return found[-1][0].serial + 1 if found else 1


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


class Use:
    """A mark that this process will still read a checkpoint, for as long as the mark lives."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        _IN_USE.add(self)


_IN_USE: weakref.WeakSet[Use] = weakref.WeakSet()


def in_use() -> set[Path]:
    """Return the checkpoints that this process will still read."""
    return {use.folder for use in _IN_USE}


def prune(parent: Path, keep: int, unread: Collection[Path]) -> None:
    """Remove all but the ``keep`` newest of the checkpoints that were saved with ``keep``.

    One that is still ``unread`` stays until the next time.
    """
    try:
        rotating = [path for notes, path in complete_in(parent) if notes.keep is not None]
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
        with contextlib.suppress(OSError):
            descriptor = os.open(path / NOTES, os.O_RDWR)
            try:
                if _lock(descriptor) and _is_at(descriptor, path / NOTES):
                    _remove(path)
            finally:
                os.close(descriptor)


def _remove(folder: Path) -> None:
    """Remove a folder; if the process is killed meanwhile, the next save removes the rest.

    Raises: OSError.
    """
    removed = folder.with_name(f".{folder.name.removeprefix('.')}{_REMOVING}")
    shutil.rmtree(removed, ignore_errors=True)
    os.rename(folder, removed)
    shutil.rmtree(removed)


def _lock(descriptor: int) -> bool:
    """Lock a file; return False if another process has.  True where files cannot be locked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _empty(folder: Path) -> None:
    for path in list(folder.iterdir()):
        if path.name == NOTES:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
