"""The layout of a bucket's tensors, in its files and in memory alike."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from zerofx.runtime.memory.flat import ordinary_tensors, without_base
from zerofx.runtime.memory.pages import PAGE_BYTES

ALIGNMENT = PAGE_BYTES
"""Positions, lengths and addresses are multiples of this, in bytes: direct I/O asks for it."""


Key = tuple[int, str]
"""One tensor of a bucket: its number, and the name of its part."""


@dataclass(frozen=True)
class Part:
    """Tensors of one name and dtype, one behind the other; ``numels`` are (number, elements)."""

    name: str
    dtype: torch.dtype
    numels: tuple[tuple[int, int], ...]

    @property
    def numel(self) -> int:
        return sum(numel for _, numel in self.numels)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def views(self, flat: torch.Tensor) -> dict[Key, torch.Tensor]:
        """The tensors that ``flat``, ``[numel]``, is made of, none of them a view of it."""
        pieces = flat.split([numel for _, numel in self.numels])
        keys = [(number, self.name) for number, _ in self.numels]
        return dict(zip(keys, map(without_base, pieces), strict=True))


@dataclass(frozen=True)
class BucketLayout:
    """A bucket's parts one after the other, each from a multiple of ``ALIGNMENT`` on.

    The same in the files and in memory, so that a bucket is read as it is used.
    """

    bucket: str
    parts: tuple[Part, ...]

    @cached_property
    def offsets(self) -> list[int]:
        """The offset of each part, and the end of the last.  Units: bytes."""
        padded = (-(-part.nbytes // ALIGNMENT) * ALIGNMENT for part in self.parts)
        return list(accumulate(padded, initial=0))

    @property
    def nbytes(self) -> int:
        """The whole bucket with the padding between and after its parts.  Units: bytes."""
        return self.offsets[-1]

    def views(self, memory: torch.Tensor) -> dict[Key, torch.Tensor]:
        """The tensors of a bucket that lies in ``memory``.

        Shapes: uint8[nbytes] -> ``[numel]`` of ``part.dtype`` each.
        """
        found: dict[Key, torch.Tensor] = {}
        with ordinary_tensors():
            for part, start in zip(self.parts, self.offsets, strict=False):
                found |= part.views(memory.narrow(0, start, part.nbytes).view(part.dtype))
        return found

    def names_in(self, start: int, stop: int) -> str:
        """Say which parts have bytes in a range of the bucket."""
        names = [
            f"{part.name!r} ({str(part.dtype).removeprefix('torch.')})"
            for part, offset in zip(self.parts, self.offsets, strict=False)
            if offset < stop and start < offset + part.nbytes
        ]
        return " and ".join(names) or "padding"


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A dense CPU tensor's memory, writable.  The caller keeps the tensor alive."""
    if tensor.nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
