"""The format in which values travel in fewer bits: codes of whole numbers, a scale for each block.

A flat buffer of floating point numbers becomes bytes, the *wire*: the codes of all its blocks, one
behind the other, then one float32 scale for each, and zeros up to a multiple of ``ALIGNMENT``.  It
is one tensor, so that one collective moves all of it.  A block is ``BLOCK`` elements that follow
one another, whatever parameters they are of; the last one is filled up with zeros.

An element's code is the whole number nearest to ``element / scale``, ties to the even one, and it
comes back as ``code * scale``, computed in float32.  A block's scale is its largest magnitude times
``1 / largest``, rounded to float32: a product, which all devices and compilers round alike, where
torch divides by a number on one device and multiplies on another.  So an element comes back with
an error of at most that magnitude / 254 in ``int8``, / 14 in ``int4``, and what rounding in float32
adds to it.

Two kinds of blocks have codes of 0.  One with scales below the smallest normal float32, which some
devices take for 0, has the scale 0: it comes back as zeros.  One with an infinity or a NaN has the
scale infinity: it comes back as NaN throughout, so that nobody trains on the rest of it.

Source: blockwise quantised weights, ZeRO++, Wang et al. 2023, section 3.1 (qwZ).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zerofx.ir.parameters import ParameterInfo

BLOCK = 256
"""Elements that share a scale, whose 4 bytes are 1.6% of the codes' in ``int8``.

Moments that are kept in eight bits have the same: kernels take both.
"""

SCALE_BYTES = 4

ALIGNMENT = 16
"""Wires' bytes are a multiple of it: kernels read 16 at a time, in whatever part of a buffer."""

SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32."""


@dataclass(frozen=True)
class Code:
    """A kind of codes: how many bits each takes, and the largest; the smallest is its negative."""

    bits: int
    largest: int

    @property
    def bytes_per_block(self) -> int:
        return BLOCK * self.bits // 8

    @property
    def reciprocal(self) -> float:
        """``1 / largest`` as a float32 has it."""
        return torch.tensor(1 / self.largest, dtype=torch.float32).item()


CODES = {"int8": Code(8, 127), "int4": Code(4, 7)}
"""The codes, by their names in programs and options.

Two of four bits share a byte: the first is in its lower half.
"""


NARROW = "bfloat16"
"""The name of what gradients may travel in too, as it is."""


def num_blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def quantized_bytes(numel: int, code: str) -> int:
    """Return the bytes of the wire of so many elements, scales included."""
    nbytes = num_blocks(numel) * (CODES[code].bytes_per_block + SCALE_BYTES)
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def wire_length(numel: int, code: str) -> int:
    """Return the length of the wire of so many gradients: ``bfloat16`` is one that has no scales.

    Units: elements of the wire's dtype.
    """
    return numel if code == NARROW else quantized_bytes(numel, code)


def check_parts(parts: int, length: int, of_each: int | None = None) -> None:
    """Raise ValueError unless a tensor of this length is so many equal parts, of that length."""
    if parts < 1 or length % parts or (of_each is not None and length != parts * of_each):
        each = "" if of_each is None else f" of {of_each}"
        raise ValueError(f"{length} elements are not {parts} equal parts{each}")


def is_quantizable(dtype: torch.dtype) -> bool:
    """Return whether values of this dtype have codes: complex numbers and integers have none."""
    return dtype.is_floating_point


def gaps(infos: Sequence[ParameterInfo], numel: int) -> list[tuple[int, int]]:
    """Return the ranges of a bucket's flat buffer that hold no element of these parameters.

    The buffer is this rank's shard of their bucket, or so many shards as it has room for: those
    that a multiple of their number comes before, this rank's among them.  All of them is the
    bucket.  Whoever shares a block with what a range happens to hold, maybe a NaN in padding, would
    get its scale.  Units: elements.
    """
    if not numel:
        return []
    place = infos[0].place
    first = infos[0].rank // (numel // place.shard_numel) * numel
    found, end = [], 0
    for info in sorted(infos, key=lambda info: info.place.offset):
        start, stop = info.place.offset - first, info.place.offset + info.numel - first
        if end < min(start, numel):
            found.append((end, min(start, numel)))
        end = max(end, min(stop, numel))
    return [*found, (end, numel)] if end < numel else found
