"""Folders of other libraries' checkpoints, in which each rank writes its shards.

A save that is killed leaves the checkpoint that was there, or a new one, or none that is loaded; no
mix of both.  New shards are written beside the old ones; then the library writes the rest; then the
new shards take the place of the old.  The shards and the rest of one save have one token, by which
the shards that belong to the rest are found.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

import zerofx
from zerofx.checkpoint.barrier import Ranks
from zerofx.checkpoint.metadata import read_metadata, sort_out
from zerofx.checkpoint.reading import Reader, in_use
from zerofx.integrations.models import is_peft, meet, names_in_peft

CHECKPOINT = "zero"
"""The folder in a checkpoint of another library's that has what the ranks have written."""

TOKEN = "zerofx_token"
"""The name of a save's token among the values of its shards, and in a rest that is one mapping."""

_INCOMPLETE = "incomplete"
"""The token of a rest that is being written: of no shards, not those of older versions either."""

_NAMES = re.compile(rf"{CHECKPOINT}(\.([0-9a-f]{{16}}|next)(\.old)?)?")
"""The names of folders of shards: with a token, of saves that were killed; older ones' ``next``."""

_TOKEN_FILE = "zero.token"
"""The file that has the token of a rest that is several files."""


@dataclass(frozen=True)
class Saved:
    """Shards that have been written beside those of an earlier save, each model's in a folder."""

    ranks: Ranks
    token: str
    folders: list[Path]

    def begin_rest(self, folder: Path) -> None:
        """Say that a rest of several files is being written: it has no shards yet.  Collective."""
        self.ranks.on_first(lambda: (folder / _TOKEN_FILE).write_text(_INCOMPLETE))

    def write_token(self, folder: Path) -> None:
        """Write the token beside a rest of several files that are all there.  Collective."""
        self.ranks.on_first(lambda: (folder / _TOKEN_FILE).write_text(self.token))

    def replace_old(self) -> None:
        """Give the new shards the name of the old ones, and remove these.  Collective.

        Shards that a rank will still read stay where they are until the next save.
        """
        unread = set[Path]().union(*self.ranks.together(in_use))

        def replace() -> None:
            for folder in self.folders:
                _replace_in(folder, self.token, unread)

        self.ranks.on_first(replace)


def save_beside(
    folder: Path, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
) -> Saved:
    """Write each rank's shards beside those that have been saved there before.  Collective.

    Of a model of peft the adapters alone.  Write the rest next, with the token.

    Raises: FileExistsError if ``folder`` is a file; ValueError for an optimizer of no model.
    """
    parts = each_with_optimizers(folder, models, optimizers)
    ranks = meet(nn.ModuleList(models), optimizers)

    def begin() -> str:
        if folder.is_file():
            raise FileExistsError(
                f"{folder} is a file, and ranks write their shards into a folder: remove it, or "
                "save under another name."
            )
        for place, _, _ in parts:
            place.mkdir(parents=True, exist_ok=True)
        return secrets.token_hex(8)

    token = ranks.on_first(begin)
    for place, model, own in parts:
        of_peft = is_peft(model)
        zerofx.save(
            _new(place, token),
            model,
            own,
            {TOKEN: token},
            trainable_only=of_peft,
            and_frozen=names_in_peft(model, ranks) if of_peft else (),
        ).wait()
    return Saved(ranks, token, [place for place, _, _ in parts])


def remove_shards(folder: Path, ranks: Ranks) -> None:
    """Remove the shards beside a model that is written anew without them.  Collective.

    Those that a rank will still read stay, as shards of another save, and so does a folder of that
    name without a token beside it, which is the user's.
    """
    unread = set[Path]().union(*ranks.together(in_use))

    def remove() -> None:
        if token_in(folder) is None:
            return
        for path in _places(folder):
            if path.resolve() not in unread:
                shutil.rmtree(path)
        if _places(folder):
            (folder / _TOKEN_FILE).write_text(_INCOMPLETE)
        else:
            (folder / _TOKEN_FILE).unlink(missing_ok=True)

    ranks.on_first(remove)


def _new(folder: Path, token: str) -> Path:
    return folder / f"{CHECKPOINT}.{token}"


def _replace_in(folder: Path, token: str, unread: set[Path]) -> None:
    place, new = folder / CHECKPOINT, _new(folder, token)
    for path in _places(folder):
        if path not in (place, new) and path.resolve() not in unread:
            shutil.rmtree(path, ignore_errors=True)
    if place.resolve() in unread:
        return
    old = new.with_name(f"{new.name}.old")
    if place.exists():
        os.rename(place, old)
    os.rename(new, place)
    shutil.rmtree(old, ignore_errors=True)


def _places(folder: Path) -> list[Path]:
    """Return the folders that may have shards, among them what killed processes have left."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in paths if _NAMES.fullmatch(path.name) and path.is_dir()]


def is_saved_in(folder: str | os.PathLike[str]) -> bool:
    """Return whether ranks have saved in a folder."""
    return bool(_places(Path(folder)))


def token_in(folder: Path) -> str | None:
    """Return the token of a rest of several files; None if it was not written to the end.

    Checkpoints of older versions have none either, and neither have their shards.
    """
    path = folder / _TOKEN_FILE
    return path.read_text() if path.exists() else None


def shards_in(folder: Path, token: str | None, model: nn.Module) -> Path:
    """Return the folder of the shards that belong to the rest with this token.  Collective.

    Raises: CheckpointError if there are none, or they are damaged; FileNotFoundError.
    """
    return meet(model).on_first(lambda: _find(folder, token))


def _find(folder: Path, token: str | None) -> Path:
    damage: Exception | None = None
    places = _places(folder) or [folder / CHECKPOINT]
    for path in places:
        try:
            if _token_of(path) == token:
                return path
        except (zerofx.CheckpointError, FileNotFoundError) as error:
            damage = damage or error
    raise damage or zerofx.CheckpointError(
        f"{folder} was not saved to the end: the shards in {places[0].name} and the files beside "
        "them are of different saves, so steps, schedules and random numbers would not be those of "
        "the parameters. Load another checkpoint, or the parameters alone: "
        f"zerofx.load({str(places[0])!r}, model)."
    )


def _token_of(path: Path) -> str | None:
    """Return the token of shards, None for those of older versions.

    Raises: CheckpointError for shards of which a part is missing or damaged; FileNotFoundError.
    """
    metadata = read_metadata(path)
    files = {info.relative_path for info in metadata.storage_data.values()}
    for name in sorted(files):
        if not (path / name).is_file():
            raise zerofx.CheckpointError(f"{path / name} is missing. Load another checkpoint.")
    entry = sort_out(metadata).extra.get((TOKEN,))
    return None if entry is None else Reader(path, metadata).value(entry)


def each_with_optimizers(
    folder: Path, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
) -> list[tuple[Path, nn.Module, list[Optimizer]]]:
    """Return the folder of each model, and the optimizers of its parameters.

    Raises: ValueError for an optimizer of none of them.
    """
    found = []
    for number, model in enumerate(models):
        ours = {id(parameter) for parameter in model.parameters()}
        own = [
            optimizer
            for optimizer in optimizers
            if any(id(p) in ours for group in optimizer.param_groups for p in group["params"])
        ]
        found.append((folder_of(folder, number), model, own))
    known = [id(optimizer) for _, _, own in found for optimizer in own]
    for optimizer in optimizers:
        if id(optimizer) not in known:
            raise ValueError(
                f"{type(optimizer).__name__} has parameters of no model that was given: give the "
                "model too, so that the optimizer's states can be saved and loaded."
            )
    return found


def folder_of(folder: Path, number: int) -> Path:
    """Return the folder that a model of a checkpoint is in."""
    return folder / f"model_{number}" if number else folder
