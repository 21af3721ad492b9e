"""Store numbers in fewer bits: unbiased rounding, and blocks of eight-bit codes.

These functions stand in an update's graph as they are; a compiler traces through them.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from zerofx.ir.wires import BLOCK

LOW = (torch.bfloat16, torch.float16)
"""The dtypes that kernels compute in float32."""

CODES = 127
"""The largest code: values are kept as one sign bit and this many levels."""


def random_bits(like: Tensor, offset: Tensor, key: Tensor, stream: int) -> Tensor:
    """Return 16 random bits per element, from a counter: torch's generators are not touched.

    The element at ``i`` of ``like``, flattened, draws by its number ``offset + i``, an int64, so
    that it does not matter which rank holds it.  ``key`` is an int32 that tells steps apart,
    ``stream`` a number that tells apart what is drawn for one element.  Shapes: both 0-dim; the
    result is an int32 like ``like``.

    Source: the 32-bit mixer "lowbias32", C. Wellons, hash-prospector, 2018.
    """
    index = torch.arange(like.numel(), device=like.device).view(like.shape) + offset
    upper = (index >> 32).to(torch.int32) * 0x2545F491  # beyond 4,294,967,296 elements
    mixed = _mix(index.to(torch.int32) ^ upper ^ key ^ _as_int32(stream))
    return (mixed >> 16) & 0xFFFF


def _mix(x: Tensor) -> Tensor:
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    return (x ^ ((x >> 15) & 0x1FFFF)) * _as_int32(0x846CA68B)


def step_key(seed: int, step: int) -> int:
    """The ``key`` of one step: an int32.  Equal seeds draw equal numbers."""
    x = (seed * 0x9E3779B97F4A7C15 + step * 0xD1B54A32D192ED03 + 1) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64
        x = (x ^ (x >> shift)) * factor % 2**64
    return _as_int32((x ^ (x >> 31)) >> 32)


def _as_int32(number: int) -> int:
    number %= 2**32
    return number - 2**32 if number >= 2**31 else number


def round_stochastically(value: Tensor, bits: Tensor) -> Tensor:
    """Round float32 to bfloat16, up or down in proportion to what is nearer: unbiased.

    ``bits`` are random, of 16 bits.  What is exact stays so, and what is not finite.
    """
    raw = (value.view(torch.int32) + bits) & -65536
    return torch.where(value.isfinite(), raw.view(torch.float32), value).to(torch.bfloat16)


def round_to(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float32 to what bfloat16 or float16 can hold, and keep it in float32.

    By bits: Inductor leaves out a cast to fewer of them that is followed by one to more.
    """
    if dtype is torch.bfloat16:
        raw = value.view(torch.int32)
        rounded = (raw + 0x7FFF + ((raw >> 16) & 1)) & -65536  # to nearest, ties to even
        return torch.where(value.isnan(), value, rounded.view(torch.float32))
    raw = value.to(dtype).view(torch.int16)
    raw = (raw & 0x7FFF) | (raw & -0x8000)  # the same: else both views are left out, and the casts
    return raw.view(dtype).to(torch.float32)


def decode_blocks(codes: Tensor, scale: Tensor) -> Tensor:
    """Return the float32 values of int8 codes: ``scale * (code / 127)**4``, with the code's sign.

    Shapes: codes [blocks, BLOCK or fewer], scale [blocks].
    """
    level = codes.to(torch.float32) * (1 / CODES)
    square = level * level
    return torch.where(level < 0, -square, square) * square * scale.unsqueeze(-1)


def scale_of(value: Tensor) -> Tensor:
    """The scale of each block: its largest magnitude.  Shapes: [blocks, n] -> [blocks]."""
    return value.abs().amax(-1)


def encode_blocks(value: Tensor, scale: Tensor, bits: Tensor) -> Tensor:
    """Return the int8 codes of float32 values; which of two levels, at random: unbiased.

    Levels lie as fourth powers, denser towards zero: the smallest is 4e-9 of a block's largest
    magnitude.  What is not zero never becomes so (an Adam divides by such a root): it is rounded
    up to the smallest level.  A block with a NaN or an infinity loses its other values.

    Source: blockwise quantisation, Dettmers et al. 2022, section 2.1, whose "dynamic tree" these
    levels stand in for: they need no table.
    """
    scale = scale.unsqueeze(-1)
    ratio = torch.where(scale > 0, value.abs() / scale, 0.0)
    below = (ratio.sqrt().sqrt() * CODES).floor().clamp(max=CODES - 1)
    low, high = _fourth_power(below * (1 / CODES)), _fourth_power((below + 1) * (1 / CODES))
    goes_up = ratio - low > bits.to(torch.float32) * 2.0**-16 * (high - low)
    level = torch.where(goes_up, below + 1, below)
    level = torch.where(ratio > 0, level.clamp(min=1), level)
    return torch.where(value < 0, -level, level).to(torch.int8)


def _fourth_power(x: Tensor) -> Tensor:
    square = x * x
    return square * square


def in_blocks(numel: int, at_once: int | None = None) -> list[tuple[slice, slice]]:
    """Cut a flat tensor into its whole blocks, ``at_once`` at a time, and the rest.

    Returns which elements, and which blocks.  Nothing for no elements.
    """
    whole = numel // BLOCK
    ends = [*range(0, whole, at_once or max(whole, 1)), whole]
    cuts = [(slice(at * BLOCK, to * BLOCK), slice(at, to)) for at, to in pairwise(ends)]
    if numel % BLOCK:
        cuts.append((slice(whole * BLOCK, numel), slice(whole, whole + 1)))
    return cuts
