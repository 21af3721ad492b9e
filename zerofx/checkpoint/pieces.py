"""Parts of tensors, and other values, as torch.distributed.checkpoint takes them to be written.

That format knows boxes of tensors, and a shard is a flat range: a range is cut into boxes.  Values
that are no tensors are pickles that run no code when they are read.
"""

from __future__ import annotations

import functools
import io
import math
import operator
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from zerofx import compat
from zerofx.errors import CheckpointError
from zerofx.runtime.parameters.snapshots import Snapshot

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A box of a tensor; it begins at element ``start`` of the flat range that it is cut from."""

    offsets: Shape
    sizes: Shape
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of the box in the tensor."""
        ends = map(operator.add, self.offsets, self.sizes)
        return tuple(map(slice, self.offsets, ends))


@dataclass(frozen=True)
class Range:
    """The elements from ``start`` to ``stop`` of a tensor that is flattened.

    Its dimensions are flattened in ``order``, from slowest to fastest.
    """

    shape: Shape
    order: Sequence[int]
    start: int
    stop: int

    @classmethod
    def whole(cls, shape: Shape, order: Sequence[int]) -> Range:
        return cls(shape, order, 0, math.prod(shape))

    @functools.cached_property
    def boxes(self) -> list[Box]:
        """The range cut into boxes, in the order in which they lie in it.

        There are at most 2 ndim - 1 of them: one for a single number, none for an empty range.  A
        tensor without elements is one empty box on every rank; it is written once, so that a reader
        finds its name.

        Shapes: [4, 3], 2 to 10 -> [1, 1] at (0, 2), [2, 3] at (1, 0), [1, 1] at (3, 0).
        """
        if math.prod(self.shape) == 0:
            return [Box((0,) * len(self.shape), self.shape, 0)]
        permuted = tuple(self.shape[dim] for dim in self.order)
        inverse = self._inverse()
        found, position = [], 0
        for offsets, sizes in _cut(permuted, self.start, self.stop):
            where = tuple(offsets[place] for place in inverse)
            found.append(Box(where, tuple(sizes[place] for place in inverse), position))
            position += found[-1].numel
        return found

    def view(self, values: torch.Tensor, box: Box) -> torch.Tensor:
        """View a box's part of the range's values in the box's shape.

        Shapes: ``[stop - start]`` -> ``box.sizes``, whose dimensions lie in ``order`` in memory.
        """
        flat = values[box.start : box.start + box.numel]
        return flat.view([box.sizes[dim] for dim in self.order]).permute(self._inverse())

    def _inverse(self) -> list[int]:
        return sorted(range(len(self.order)), key=self.order.__getitem__)


def _cut(shape: Shape, start: int, stop: int) -> list[tuple[Shape, Shape]]:
    """Return (offsets, sizes) of the boxes of a range of a contiguous tensor."""
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    if len(shape) == 1:
        return [((start,), (stop - start,))]
    rest = shape[1:]
    inner = math.prod(rest)
    (first, head), (last, tail) = divmod(start, inner), divmod(stop, inner)

    def within(row: int, begin: int, end: int) -> list[tuple[Shape, Shape]]:
        return [((row, *o), (1, *s)) for o, s in _cut(rest, begin, end)]

    if first == last:
        return within(first, head, tail)
    found = []
    if head:
        found += within(first, head, inner)
        first += 1
    if first < last:
        found.append(((first, *(0 for _ in rest)), (last - first, *rest)))
    return found + within(last, 0, tail)


@dataclass(frozen=True)
class Changes:
    """The tensors that a piece is read from, if only compiled updates of ``parameter`` change them.

    Until the next update ``read`` of the piece gives the same values, whenever it is called.
    """

    parameter: nn.Parameter
    sources: Sequence[torch.Tensor]
    name: str


class FlatPiece(torch.Tensor):
    """A ``part`` of a tensor, with the shape and dtype of the whole, and no memory.

    ``read`` returns the part's elements, ``[stop - start]``, when they are written: values that lie
    in files come to memory one tensor at a time.  It is a tensor subclass because
    torch.distributed.checkpoint asks only tensors for their parts, by ``__create_write_items__``
    and so on.  Computing with it raises.
    """

    part: Range
    read: Callable[[], torch.Tensor]
    changes: Changes | None

    @staticmethod
    def __new__(
        cls,
        part: Range,
        dtype: torch.dtype,
        read: Callable[[], torch.Tensor],
        changes: Changes | None = None,
    ) -> FlatPiece:
        piece = compat.tensor_without_memory(cls, part.shape, dtype)
        piece.part, piece.read, piece.changes = part, read, changes
        return piece

    def __init__(self, *_arguments: Any) -> None:
        """Do nothing: ``__new__`` has, and a tensor's ``__init__`` takes no such arguments."""

    def __repr__(self) -> str:
        return f"FlatPiece({self.part}, dtype={self.dtype})"

    def taken(self, snapshot: Snapshot) -> FlatPiece:
        """Return this piece with its elements of now, in host memory of its own.

        ``snapshot`` copies them if only updates change them; others are copied at once.
        """
        if (changes := self.changes) is not None:
            read = snapshot.add(changes.parameter, changes.sources, self.read, changes.name)
            return FlatPiece(self.part, self.dtype, read)
        values = self.read().detach().to("cpu", copy=True)
        return FlatPiece(self.part, self.dtype, lambda: values)

    def __create_write_items__(self, fqn: str, _object: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, box.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk_of(box), properties, self.size()),
            )
            for box in self.part.boxes
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk_of(box) for box in self.part.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        # By offset: the index counts the chunks of all ranks.
        (box,) = (box for box in self.part.boxes if torch.Size(box.offsets) == index.offset)
        return self.part.view(self.read(), box)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        raise NotImplementedError(f"{func} needs a tensor's values, and a FlatPiece has none")


def chunk_of(box: Box) -> ChunkStorageMetadata:
    """Return the box as torch.distributed.checkpoint writes one."""
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


@dataclass(frozen=True)
class Encoded:
    """A value as it will be in the file.

    torch.distributed.checkpoint would take dicts apart, write their keys as text and forget empty
    ones; this it leaves whole.
    """

    data: bytes


def encode(value: Any, name: str) -> Encoded:
    """Pickle ``value`` as ``torch.save`` does, if it can be read again without running code.

    Raises: ValueError, naming it ``name``, if it cannot.
    """
    if type(value) in (bool, float, type(None)) or (type(value) is int and abs(value) < 2**63):
        return _encoded_number(value, repr(value))
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        decode(buffer.getvalue(), name)
    except (CheckpointError, pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{name} is a {type(value).__name__} that cannot be read again without running code "
            f"from the file ({str(error).splitlines()[0]}), which zerofx.load never does. Give "
            "numbers, text, tensors, and lists, tuples and dicts of them, such as an object's "
            "state_dict()."
        ) from error
    return Encoded(buffer.getvalue())


@functools.lru_cache(maxsize=1024, typed=True)
def _encoded_number(value: Any, _text: str) -> Encoded:
    """Encode a number once: many parameters have the same.  The text tells 0.0 from -0.0."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return Encoded(buffer.getvalue())


def decode(data: bytes, name: str) -> Any:
    """Read a value that ``encode`` or ``torch.save`` has written, with tensors on the CPU.

    Raises: CheckpointError if it is no pickle, or one that asks for code to be run.
    """
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        unsafe = str(error).partition("WeightsUnpickler error: ")[2] or str(error)
        raise CheckpointError(
            f"{name} is not plain data: {' '.join(unsafe.split())[:300]}. zerofx.load runs no code "
            "from files. If you trust the file, name the class with "
            "torch.serialization.add_safe_globals."
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{name} cannot be read: {error}. The file is damaged: load another checkpoint."
        ) from error
