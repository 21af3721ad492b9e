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
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from zerofx.checkpoint.folders import DamageError
from zerofx.errors import CheckpointError

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
    def whole(cls, shape: Shape, order: Sequence[int] | None = None) -> Range:
        return cls(shape, order or range(len(shape)), 0, math.prod(shape))

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
        shape = [self.shape[dim] for dim in self.order] or [1]
        inner = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
        inverse = self._inverse()
        found, at = [], self.start
        while at < self.stop:  # the largest box that begins here
            offsets = [at // numel % size for size, numel in zip(shape, inner, strict=True)]
            first = [at % numel == 0 and at + numel <= self.stop for numel in inner].index(True)
            rows = min((self.stop - at) // inner[first], shape[first] - offsets[first])
            sizes = [*[1] * first, rows, *shape[first + 1 :]]
            where, extent = (tuple(of[place] for place in inverse) for of in (offsets, sizes))
            found.append(Box(where, extent, at - self.start))
            at += found[-1].numel
        return found

    def view(self, values: torch.Tensor, box: Box) -> torch.Tensor:
        """View a box's part of the range's values in the box's shape.

        Shapes: ``[stop - start]`` -> ``box.sizes``, whose dimensions lie in ``order`` in memory.
        """
        flat = values[box.start : box.start + box.numel]
        return flat.view([box.sizes[dim] for dim in self.order]).permute(self._inverse())

    def view_at(self, values: torch.Tensor, offsets: Sequence[int] | None) -> torch.Tensor:
        """View the part of the range's values that is in the box which begins at ``offsets``."""
        (box,) = (box for box in self.boxes if torch.Size(box.offsets) == offsets)
        return self.view(values, box)

    def _inverse(self) -> list[int]:
        return sorted(range(len(self.order)), key=self.order.__getitem__)


@dataclass(frozen=True)
class Piece:
    """A ``part`` of a tensor of this dtype.

    ``read`` returns the part's elements, ``[stop - start]``, when they are written: values that lie
    in files come to memory one tensor at a time.
    """

    part: Range
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole tensor."""
        return torch.Size(self.part.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the whole tensor."""
        return self.shape.numel() * self.dtype.itemsize

    def __create_write_items__(self, fqn: str, _object: Any) -> list[WriteItem]:
        """Return what is to be written; torch.distributed.checkpoint asks for it by this name."""
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, box.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk_of(box), properties, self.shape),
            )
            for box in self.part.boxes
        ]


def chunk_of(box: Box) -> ChunkStorageMetadata:
    """Return the box as torch.distributed.checkpoint writes one."""
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def encode(value: Any, name: str) -> bytes:
    """Pickle ``value`` as ``torch.save`` does, if it can be read again without running code.

    torch.distributed.checkpoint would take dicts apart, write their keys as text and forget empty
    ones; bytes it leaves whole.  Numbers of numpy's are saved as Python's.

    Raises: ValueError, naming it ``name``, if it cannot.
    """
    if type(value) in (bool, float, type(None)) or (type(value) is int and abs(value) < 2**63):
        return _encoded_number(value, repr(value))
    failure: Exception | None = None
    for tried in (lambda: value, lambda: _with_plain_numbers(value)):
        try:
            data = _pickled(tried())
            decode(data, name)
            return data
        except (
            CheckpointError,
            pickle.PicklingError,
            AttributeError,
            TypeError,
            RecursionError,
        ) as error:
            failure = failure or error
    raise ValueError(
        f"{name} is a {type(value).__name__} that cannot be read again without running code from "
        f"the file ({str(failure).splitlines()[0]}), which zerofx.load never does. Give numbers, "
        "text, tensors, and lists, tuples and dicts of them, such as an object's state_dict()."
    ) from failure


def _with_plain_numbers(value: Any) -> Any:
    """Return a value with Python's numbers in place of numpy's, in lists, tuples and dicts too."""
    numpy, kind = sys.modules.get("numpy"), type(value)
    if numpy is not None and isinstance(value, numpy.generic):
        return value.item()
    if kind in (list, tuple):
        return kind(map(_with_plain_numbers, value))
    if kind is dict:
        return {_with_plain_numbers(key): _with_plain_numbers(one) for key, one in value.items()}
    return value


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    write_value(value, buffer)
    return buffer.getvalue()


def write_value(value: Any, stream: IO[bytes]) -> None:
    """Write a value as ``torch.save`` does, with checksums, also if the script wants none."""
    are_wanted = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        torch.save(value, stream)
    finally:
        torch.serialization.set_crc32_options(are_wanted)


@functools.lru_cache(maxsize=1024, typed=True)
def _encoded_number(value: Any, _text: str) -> bytes:
    """Encode a number once: many groups have the same.  The text tells 0.0 from -0.0."""
    return _pickled(value)


def decode(data: bytes, name: str) -> Any:
    """Read a value that ``encode`` or ``torch.save`` has written, with tensors on the CPU.

    Raises: DamageError if it is no pickle; CheckpointError if it asks for code to be run.
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
        raise DamageError(
            f"{name} cannot be read: {error}. The file is damaged: load another checkpoint."
        ) from error
