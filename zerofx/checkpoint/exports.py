"""``zerofx.export_safetensors`` and ``load_safetensors``: models for and from Hugging Face."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zerofx.checkpoint.safetensors as files
from zerofx.checkpoint.background import meet
from zerofx.checkpoint.boxes import Box
from zerofx.checkpoint.contents import Contents, model_entries
from zerofx.checkpoint.errors import MismatchError
from zerofx.checkpoint.folders import Draft, Notes, draft_of, telling_what_failed
from zerofx.checkpoint.matching import Differences, target_of
from zerofx.checkpoint.meeting import Ranks
from zerofx.checkpoint.paths import as_path
from zerofx.checkpoint.pieces import FlatPiece, view_of
from zerofx.checkpoint.targets import Target
from zerofx.runtime.memory.flat import ordinary_tensors
from zerofx.versions import __version__

logger = logging.getLogger("zerofx")


def export_safetensors(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    file_bytes: int = 5_000_000_000,
    process_group: Any = None,
) -> Path:
    """Write ``model`` to the new folder ``path`` as ``from_pretrained`` reads it.  Collective.

    Every rank writes its own part of each tensor, and none has one whole; the folder appears when
    all is there.  A tied parameter is written under each of its names, a file takes ``file_bytes``
    at most, and the config of a Hugging Face model goes with them.

    Raises: FileExistsError if ``path`` exists; ValueError for a dtype that the format does not
    have; CheckpointError if it cannot be written; RuntimeError if a rank does not join.
    """
    target = as_path(path)
    ranks = meet(model, [], process_group, "zerofx.export_safetensors()")
    ranks.check_same(path=target)
    drafts: list[Draft] = []
    try:
        with telling_what_failed(target, ranks.rank):
            ranks.together(lambda: drafts.append(Draft(target)) if ranks.rank == 0 else None)
            _write(model, target, drafts, ranks, file_bytes)
    except BaseException:
        for draft in drafts:
            draft.discard()
        raise
    return target


def _write(
    model: nn.Module, target: Path, drafts: list[Draft], ranks: Ranks, file_bytes: int
) -> None:
    folder = draft_of(target)
    tensors = {
        name: value
        for name, value in Contents(ranks.rank, ranks.world_size).of_model(model)
        if isinstance(value, torch.Tensor)
    }
    parts = list(files.split(tensors, file_bytes))
    number = f"of-{len(parts):05}"
    names = [f"model-{index + 1:05}-{number}.safetensors" for index in range(len(parts))]
    names = names if len(parts) > 1 else [files.SINGLE]
    layouts = [files.lay_out(part) for part in parts]

    def reserve() -> None:
        for name, (header, entries) in zip(names, layouts, strict=True):
            files.reserve(folder / name, header, entries)
        if len(parts) > 1:
            total = sum(entry.nbytes for _, entries in layouts for entry in entries.values())
            where = {name: file for file, part in zip(names, parts, strict=True) for name in part}
            index = {"metadata": {"total_size": total}, "weight_map": where}
            (folder / files.INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
        for config in (getattr(model, "config", None), getattr(model, "generation_config", None)):
            if config is not None and hasattr(config, "save_pretrained"):
                config.save_pretrained(folder)

    def fill() -> None:
        for name, part, (_, entries) in zip(names, parts, layouts, strict=True):
            mapped = files.MappedFile(folder / name, entries, writes=True)
            for key, value in part.items():
                _copy_part(mapped.tensor(key), value, ranks.rank)
            mapped.sync()

    def publish() -> None:
        for draft in drafts:
            draft.publish(Notes(0, None, 0, torch.__version__, __version__))
        drafts.clear()

    ranks.on_first(reserve)
    with torch.no_grad(), ordinary_tensors():
        ranks.together(fill)
    ranks.together(publish)


def _copy_part(into: torch.Tensor, value: torch.Tensor, rank: int) -> None:
    if isinstance(value, FlatPiece):
        flat = value.read()
        for box in value.boxes:
            _at(into, box).copy_(view_of(flat, box, value.order))
    elif rank == 0:
        into.copy_(value)


def _at(whole: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole


def load_safetensors(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    strict: bool = True,
    process_group: Any = None,
) -> None:
    """Read a safetensors file, or a folder with one or several, into ``model``.  Collective.

    Every rank reads the bytes that it keeps: its shards at stage 3, else all.  Values are cast to
    the model's dtypes, as ``from_pretrained`` does.  A tied parameter may be there under one of its
    names.  With ``strict=False`` what does not fit is left as it is, and logged.

    Raises: MismatchError with all names or shapes that differ; CheckpointError for files that are
    damaged; FileNotFoundError; RuntimeError if a rank does not join.  Nothing has changed then.
    """
    ranks = meet(model, [], process_group, "zerofx.load_safetensors()")
    ranks.check_same(path=Path(path).absolute())
    plan: list[tuple[Target, files.MappedFile]] = []

    def check() -> None:
        found: dict[str, files.MappedFile] = {}
        for file in _files_at(Path(path)):
            mapped = files.MappedFile(file, files.read_header(file), writes=False)
            found |= dict.fromkeys(mapped.entries, mapped)
        differences = _match(model, found, plan)
        if differences and strict:
            raise MismatchError(
                f"{path} does not fit: {differences}. Load it into the model that it is of, or "
                "leave out what does not fit with strict=False."
            )
        if differences:
            logger.warning("zerofx.load_safetensors left out what does not fit: %s", differences)

    def read() -> None:
        for target, mapped in plan:
            target.fill(_Mapped(mapped))

    ranks.together(check)
    with torch.no_grad(), ordinary_tensors():
        ranks.together(read)


class _Mapped:
    """One safetensors file, which stays as it was mapped, also without its name."""

    def __init__(self, file: files.MappedFile) -> None:
        self._file = file
        self.name = str(file.path.absolute())

    def read(
        self, entry: str, boxes: Sequence[Box], order: Sequence[int], into: torch.Tensor
    ) -> None:
        whole = self._file.tensor(entry)
        for box in boxes:
            view_of(into, box, order).copy_(_at(whole, box))

    def read_late(
        self, entry: str, boxes: Sequence[Box], order: Sequence[int], into: torch.Tensor
    ) -> None:
        self.check(entry)
        self.read(entry, boxes, order, into)

    def check(self, entry: str) -> None:
        self._file.check()

    def use(self) -> None:
        """It stays, as it is mapped."""


def _files_at(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if (path / files.SINGLE).is_file():
        return [path / files.SINGLE]
    if (path / files.INDEX).is_file():
        index = json.loads((path / files.INDEX).read_text(encoding="utf-8"))
        names = sorted(set(index["weight_map"].values()))
        return [path / Path(name).name for name in names]
    raise FileNotFoundError(
        f"there is no {files.SINGLE} or {files.INDEX} in {path}: give a safetensors file, or the "
        "folder of a model"
    )


def _match(
    model: nn.Module,
    found: Mapping[str, files.MappedFile],
    plan: list[tuple[Target, files.MappedFile]],
) -> Differences:
    differences = Differences()
    entries = model_entries(model)
    there = {id(value) for name, value in entries.items() if name in found}
    for name, value in entries.items():
        if name not in found:
            if id(value) not in there:
                differences.missing.append(name)
            continue
        shape = found[name].entries[name].shape
        if shape != tuple(value.shape):
            differences.different.append(
                f"{name} (shape {shape} in the file, {tuple(value.shape)} here)"
            )
            continue
        plan.append((target_of(name, name, value), found[name]))
    differences.unknown += [name for name in found if name not in entries]
    return differences
