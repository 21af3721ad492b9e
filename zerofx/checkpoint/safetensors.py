"""``zerofx.export_safetensors`` and ``load_safetensors``: models for and from Hugging Face.

The format (github.com/huggingface/safetensors) is a length, a JSON header with every tensor's
dtype, shape and place, and the bytes.  Its library reads files, but writes only tensors that are
whole.  So exports are written here: files are made in full size, and each rank writes the bytes of
its part of every tensor.  No rank has a tensor whole, and nothing is sent.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import operator
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerofx.checkpoint.barrier import Ranks, meet
from zerofx.checkpoint.contents import Contents
from zerofx.checkpoint.entries import (
    entries_to_give,
    give,
    model_entries,
    plain_name,
    unlike_hooked,
)
from zerofx.checkpoint.folders import Draft, Notes, as_path, state_of
from zerofx.checkpoint.matching import Differences, target_of
from zerofx.checkpoint.pieces import Box, Piece, Range, Shape
from zerofx.checkpoint.targets import Target, into_tensor
from zerofx.errors import CheckpointError, MismatchError, StepError
from zerofx.runtime.memory.flat import ordinary_tensors

logger = logging.getLogger("zerofx")

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
"""The names that ``from_pretrained`` looks for."""

STAGING_BYTES = 16 << 20
"""Bounds what is copied to host memory before it is written."""

_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


def export_safetensors(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    file_bytes: int = 5_000_000_000,
    process_group: Any = None,
) -> Path:
    """Write ``model`` to the new folder ``path`` as ``from_pretrained`` reads it.  Collective.

    Every rank writes its own part of each tensor, and none has one whole; the folder appears when
    everything is there.  A tied parameter is written under each of its names.  A file takes at most
    ``file_bytes``, or one tensor.  The config of a Hugging Face model goes with them.

    Raises: FileExistsError if ``path`` exists; ValueError for a dtype that the format does not
    have; CheckpointError if it cannot be written; RuntimeError if a rank does not join.
    """
    target = as_path(path)
    ranks = meet(model, [], process_group, "zerofx.export_safetensors()")
    ranks.check_same(path=target)
    draft = Draft(target, ranks.rank)
    with draft.written():
        ranks.on_first(draft.begin)
        _write(model, draft.folder, ranks, file_bytes)
        ranks.on_first(lambda: draft.publish(Notes()))
    return target


def _write(model: nn.Module, folder: Path, ranks: Ranks, file_bytes: int) -> None:
    contents = Contents(ranks.rank, ranks.world_size)
    tensors: dict[str, torch.Tensor | Piece] = {
        plain_name(name): contents.of_model(plain_name(name), value)
        for name, value in _tensors(model.state_dict(keep_vars=True)).items()
    }
    parts = list(split(tensors, file_bytes))
    number = f"of-{len(parts):05}"
    names = [f"model-{index + 1:05}-{number}.safetensors" for index in range(len(parts))]
    files = dict(zip(names if len(parts) > 1 else [SINGLE], parts, strict=True))
    layouts = {name: lay_out(part) for name, part in files.items()}

    def reserve() -> None:
        for name, (header, _) in layouts.items():
            nbytes = len(header) + sum(tensor.nbytes for tensor in files[name].values())
            with open(folder / name, "xb") as file:  # in full size: a full disk is an error first
                os.posix_fallocate(file.fileno(), 0, nbytes)
                file.write(header)
        if len(files) > 1:
            total = sum(tensor.nbytes for tensor in tensors.values())
            where = {name: file for file, part in files.items() for name in part}
            index = {"metadata": {"total_size": total}, "weight_map": where}
            (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
        for config in (getattr(model, "config", None), getattr(model, "generation_config", None)):
            if config is not None and hasattr(config, "save_pretrained"):
                config.save_pretrained(folder)

    def fill() -> None:
        for name, part in files.items():
            # Not mapped, nor open for reading: else an NFS client writes back whole pages, and with
            # them its old values of what other machines' ranks write there.
            descriptor = os.open(folder / name, os.O_WRONLY)
            try:
                for key, value in part.items():
                    _copy_part(descriptor, layouts[name][1][key], value, ranks.rank)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    ranks.on_first(reserve)
    with torch.no_grad(), ordinary_tensors():
        ranks.together(fill)


def _tensors(entries: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a state dict, which is all that this format has of it."""
    return {name: value for name, value in entries.items() if isinstance(value, torch.Tensor)}


def split(tensors: Mapping[str, torch.Tensor | Piece], most_bytes: int) -> Iterator[dict[str, Any]]:
    """Yield the tensors of one file after the other: at most so many bytes, or one tensor."""
    part: dict[str, Any] = {}
    total = 0
    for name, tensor in tensors.items():
        if part and total + tensor.nbytes > most_bytes:
            yield part
            part, total = {}, 0
        part[name] = tensor
        total += tensor.nbytes
    yield part


def lay_out(tensors: Mapping[str, torch.Tensor | Piece]) -> tuple[bytes, dict[str, int]]:
    """Return a file's header for tensors of these shapes, and the byte where each begins.

    Tensors of wide dtypes come first, so that each begins at a multiple of its own width.

    Raises: ValueError for a dtype that the format does not have.
    """
    ranges: dict[str, Any] = {}
    starts, end = {}, 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
        if tensor.dtype not in _DTYPES:
            raise ValueError(
                f"{name!r} is of {tensor.dtype}, which safetensors does not have. Convert it, or "
                "use zerofx.save."
            )
        ranges[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        starts[name] = end
        end += tensor.nbytes
    text = json.dumps({"__metadata__": {"format": "pt"}, **ranges}).encode()
    text += b" " * (-len(text) % 8)  # so that the first tensor is aligned
    header = struct.pack("<Q", len(text)) + text
    return header, {name: len(header) + start for name, start in starts.items()}


def _copy_part(descriptor: int, start: int, value: torch.Tensor | Piece, rank: int) -> None:
    """Write this rank's part of a tensor that begins at byte ``start`` of a file."""
    if isinstance(value, Piece):
        part, values = value.part, value.read()
    elif rank == 0:
        part, values = Range.whole(tuple(value.shape)), value.detach().reshape(-1)
    else:
        return
    width = value.dtype.itemsize
    for at in range(part.start, part.stop, STAGING_BYTES // width):
        stop = min(at + STAGING_BYTES // width, part.stop)
        staged = Range(part.shape, part.order, at, stop)
        there = values[at - part.start : stop - part.start].cpu()
        for box in staged.boxes:
            data = staged.view(there, box).contiguous().view(-1).view(torch.uint8).numpy()
            for element, numel in _runs(part.shape, box):
                run, data = data[: numel * width], data[numel * width :]
                _write_at(descriptor, memoryview(run), start + element * width)


def _runs(shape: Shape, box: Box) -> Iterator[tuple[int, int]]:
    """Yield the first element and the length of each run of a tensor that is in a box, in order.

    Shapes: the box [2, 3] at (1, 0) of [4, 3] -> (3, 6); [3, 1] at (0, 2) -> (2, 1), (5, 1), (8, 1)
    """
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    dim = len(shape) - 1  # the slowest of the dimensions that lie together in the box
    while dim > 0 and box.sizes[dim] == shape[dim]:
        dim -= 1
    numel = math.prod(box.sizes[max(dim, 0) :])
    first = sum(map(operator.mul, box.offsets, strides))
    for place in itertools.product(*map(range, box.sizes[: max(dim, 0)])):
        yield first + sum(map(operator.mul, place, strides)), numel


def _write_at(descriptor: int, data: memoryview, start: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, start)
        data, start = data[written:], start + written


def load_safetensors(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    strict: bool = True,
    process_group: Any = None,
) -> None:
    """Read a safetensors file, or a folder with one or several, into ``model``.  Collective.

    Every rank reads the bytes that it keeps: its shards at stage 3, else everything.  Values are
    cast to the model's dtypes, as ``from_pretrained`` does.  A tied parameter may be there under
    one of its names.  With ``strict=False`` tensors that do not fit are left as they are, and
    logged.  Needs the package ``safetensors``.

    Raises: MismatchError with all names or shapes that differ; CheckpointError for files that are
    damaged; FileNotFoundError; RuntimeError if a rank does not join.  Nothing has changed then.
    """
    ranks = meet(model, [], process_group, "zerofx.load_safetensors()")
    ranks.check_same(path=Path(path).absolute())
    plan: list[tuple[Target, OpenFile]] = []
    given: dict[str, torch.Tensor] = {}

    def check() -> None:
        found: dict[str, OpenFile] = {}
        for file in _files_at(Path(path)):
            opened = OpenFile(file)
            found |= dict.fromkeys(opened.shapes, opened)
        differences = _match(model, found, plan, given)
        if differences and strict:
            raise MismatchError(
                f"{path} does not fit: {differences}. Load it into the model that it is of, or "
                "leave out what does not fit with strict=False."
            )
        if differences:
            logger.warning("zerofx.load_safetensors left out what does not fit: %s", differences)

    def read() -> None:
        for target, file in plan:
            target.fill(file)
        give(model, given)

    ranks.together(check)
    with torch.no_grad(), ordinary_tensors():
        ranks.together(read)


class OpenFile:
    """One safetensors file as a source.  It is mapped, so it stays when its name is removed.

    Raises: CheckpointError if it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        try:
            import safetensors
        except ImportError as error:
            raise CheckpointError(
                "zerofx.load_safetensors reads with the package safetensors, which is not "
                "installed: pip install 'zerofx[safetensors]'"
            ) from error
        self.path, self.name = path, str(path.absolute())
        self._state = state_of(path)
        try:
            self._file = safetensors.safe_open(self.name, framework="pt")
            self.shapes = {
                name: tuple(self._file.get_slice(name).get_shape()) for name in self._file.keys()
            }
        except (OSError, safetensors.SafetensorError) as error:
            raise CheckpointError(
                f"{path} cannot be read: {error}. It is damaged or no safetensors file: fetch it "
                "again."
            ) from error

    def read(self, entry: str, wanted: Range, into: torch.Tensor) -> None:
        whole = self._file.get_tensor(entry)  # a view of the file
        for box in wanted.boxes:
            wanted.view(into, box).copy_(whole[box.slices])

    def check(self, entry: str) -> None:
        """Raise StepError if the file has been written to; one that is gone stays mapped.

        Reading behind the new end of a shorter file would kill the process.
        """
        now = state_of(self.path)
        if now is None or self._state is None or now[0] != self._state[0] or now == self._state:
            return
        raise StepError(
            f"{self.path} has been written to since zerofx.load_safetensors read its header, and "
            "parameters that deferred_init has put off were to be made from it. Load it again."
        )


def _files_at(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    if (path / INDEX).is_file():
        index = json.loads((path / INDEX).read_text(encoding="utf-8"))
        names = sorted(set(index["weight_map"].values()))
        return [path / Path(name).name for name in names]
    raise FileNotFoundError(
        f"there is no {SINGLE} or {INDEX} in {path}: give a safetensors file, or the folder of a "
        "model"
    )


def _match(
    model: nn.Module,
    found: Mapping[str, OpenFile],
    plan: list[tuple[Target, OpenFile]],
    given: dict[str, torch.Tensor],
) -> Differences:
    """Plan to read the tensors of a model, and into new memory those that it is to be ``given``."""
    differences = Differences()
    here, unhooked = model_entries(model)
    differences.different += unlike_hooked(unhooked, (), found)
    to_give, entries = entries_to_give(model), _tensors(here)
    there = {id(value) for name, value in entries.items() if name in found}
    for name, value in entries.items():
        if name not in found:
            if id(value) not in there:
                differences.missing.append(name)
        elif (shape := found[name].shapes[name]) != tuple(value.shape):
            differences.different.append(
                f"{name} (shape {shape} in the file, {tuple(value.shape)} here)"
            )
        elif name in to_give:
            with ordinary_tensors():
                given[name] = torch.empty(shape, dtype=value.dtype, device="cpu")
            plan.append((into_tensor(name, given[name]), found[name]))
        else:
            plan.append((target_of(name, name, value), found[name]))
    differences.unknown += [name for name in found if name not in entries]
    return differences
