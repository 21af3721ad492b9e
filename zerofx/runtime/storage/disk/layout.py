"""The layout of a bucket's tensors, in its files and in memory alike."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property

import torch

from zerofx.runtime.memory.pages import PAGE_BYTES

ALIGNMENT = PAGE_BYTES
"""Positions, lengths and addresses are multiples of this, in bytes: direct I/O asks for it."""


def round_up(nbytes: int, multiple: int) -> int:
    """The smallest multiple that holds so many bytes."""
    return -(-nbytes // multiple) * multiple


@dataclass(frozen=True)
class Field:
    """One flat tensor of a bucket: ``shard``, ``exp_avg``, ...  ``numel`` may be 0."""

    name: str
    dtype: torch.dtype
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class BucketLayout:
    """A bucket's tensors one after the other, each from a multiple of ``ALIGNMENT`` on.

    The same in the files and in memory, so that a bucket is read as it is used.
    """

    bucket: str
    fields: tuple[Field, ...]

    @cached_property
    def offsets(self) -> dict[str, int]:
        """The offset of each field.  Units: bytes."""
        offsets, end = {}, 0
        for field in self.fields:
            offsets[field.name] = end
            end += round_up(field.nbytes, ALIGNMENT)
        return offsets

    @cached_property
    def nbytes(self) -> int:
        """The whole bucket with the padding between and after its fields.  Units: bytes."""
        return sum(round_up(field.nbytes, ALIGNMENT) for field in self.fields)

    def views(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """The fields of a bucket that lies in ``memory``, by name.

        Shapes: uint8[nbytes] -> ``[field.numel]`` of ``field.dtype`` each.
        """
        return {
            field.name: memory.narrow(0, self.offsets[field.name], field.nbytes).view(field.dtype)
            for field in self.fields
        }

    def names_in(self, start: int, stop: int) -> str:
        """Say which fields have bytes in a range of the bucket."""
        names = [
            f"field {field.name!r}"
            for field in self.fields
            if self.offsets[field.name] < stop and start < self.offsets[field.name] + field.nbytes
        ]
        return " and ".join(names) or "padding"


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A dense CPU tensor's memory, writable.  The caller keeps the tensor alive."""
    if tensor.nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
