"""Quantise and dequantise flat buffers in blocks, in plain torch.  ``ir/wires.py`` has the format.

Whatever makes kernels of these has to give the same bits: ranks that differ in their kernels hold
the same parameters.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from zerofx.codegen.rewrite.rounding import in_blocks
from zerofx.ir.wires import (
    BLOCK,
    CODES,
    SCALE_BYTES,
    SMALLEST_SCALE,
    check_parts,
    num_blocks,
    quantized_bytes,
)

BLOCKS_AT_ONCE = 2**15
"""Blocks that are computed with at once, in all parts: 32 MiB of float32."""


def codes_of(values: Tensor, code: str) -> tuple[Tensor, Tensor]:
    """Return the codes of blocks and the scales.  Shapes: [..., n] -> int8 [..., n], [...]."""
    values = values.to(torch.float32)
    largest = values.abs().amax(-1)
    scale = largest * CODES[code].reciprocal
    is_finite = largest < math.inf  # a NaN is not
    is_coded = is_finite & (scale >= SMALLEST_SCALE)
    divisor = torch.where(is_coded, scale, 1.0).unsqueeze(-1)
    ratio = torch.where(is_coded.unsqueeze(-1), values, 0.0) / divisor
    scale = torch.where(is_coded, scale, torch.where(is_finite, 0.0, math.inf))
    return ratio.round().to(torch.int8), scale


def in_bytes(codes: Tensor, code: str) -> Tensor:
    """Lay out codes as bytes.  Shapes: int8 [..., n] -> uint8 [..., n], or half as many."""
    return (packed(codes) if CODES[code].bits == 4 else codes).view(torch.uint8)


def from_bytes(laid_out: Tensor, code: str) -> Tensor:
    """Read codes.  Shapes: as ``in_bytes``, the other way."""
    codes = laid_out.view(torch.int8)
    return unpacked(codes) if CODES[code].bits == 4 else codes


def packed(codes: Tensor) -> Tensor:
    """Put codes of four bits two to a byte.  Shapes: int8 [..., 2n] -> int8 [..., n]."""
    return (codes[..., 0::2] & 15) | (codes[..., 1::2] << 4)


def unpacked(packed: Tensor) -> Tensor:
    """Return the codes in bytes, with their signs.  Shapes: int8 [..., n] -> int8 [..., 2n]."""
    return torch.stack((((packed & 15) ^ 8) - 8, packed >> 4), -1).flatten(-2)


def decode(laid_out: Tensor, scale: Tensor, code: str, dtype: torch.dtype) -> Tensor:
    """Return the values of blocks.  Shapes: uint8 [..., bytes of a block], [...] -> [..., n]."""
    codes = from_bytes(laid_out, code)
    return (codes.to(torch.float32) * scale.unsqueeze(-1)).to(dtype)


def quantize(flat: Tensor, code: str, parts: int = 1) -> Tensor:
    """Return the wires of equal parts of a flat buffer, one behind the other.

    Shapes: [parts * n] -> uint8 [parts * quantized_bytes(n)].
    Raises: ValueError if it is not ``parts`` equal parts.
    """
    check_parts(parts, flat.numel())
    numel = flat.numel() // parts
    wire = flat.new_empty(parts * quantized_bytes(numel, code), dtype=torch.uint8)
    if not numel:
        return wire
    fill_up(wire, code, parts, numel)
    coded, scales = fields_of(wire, code, parts, numel)
    rows = flat.view(parts, numel)
    for elements, its in in_blocks(numel, max(BLOCKS_AT_ONCE // parts, 1)):
        values = rows[:, elements]
        missing = -values.shape[1] % BLOCK
        if missing:
            values = F.pad(values, (0, missing))
        its_codes, its_scales = codes_of(values.reshape(parts, -1, BLOCK), code)
        coded[:, its].copy_(in_bytes(its_codes, code))
        scales[:, its].copy_(its_scales)
    return wire


def dequantize(wire: Tensor, code: str, parts: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Return the values of wires of equal parts.

    Shapes: uint8 [parts * quantized_bytes(numel)] -> [parts * numel].
    Raises: ValueError if the wire is of another length.
    """
    check_parts(parts, wire.numel(), quantized_bytes(numel, code))
    flat = torch.empty(parts * numel, dtype=dtype, device=wire.device)
    if not numel:
        return flat
    coded, scales = fields_of(wire, code, parts, numel)
    rows = flat.view(parts, numel)
    for elements, its in in_blocks(numel, max(BLOCKS_AT_ONCE // parts, 1)):
        values = decode(coded[:, its], scales[:, its], code, dtype).flatten(1)
        into = rows[:, elements]
        into.copy_(values[:, : into.shape[1]])
    return flat


def fields_of(wire: Tensor, code: str, parts: int, numel: int) -> tuple[Tensor, Tensor]:
    """View the codes and the scales in a wire that has any.

    Shapes: uint8 [parts, blocks, bytes of a block], float32 [parts, blocks].
    """
    blocks, nbytes = num_blocks(numel), CODES[code].bytes_per_block
    rows = wire.view(parts, quantized_bytes(numel, code))
    codes = rows[:, : blocks * nbytes].unflatten(1, (blocks, nbytes))
    return codes, rows[:, blocks * nbytes : blocks * (nbytes + SCALE_BYTES)].view(torch.float32)


def fill_up(wire: Tensor, code: str, parts: int, numel: int) -> None:
    """Write zeros to what of a wire stands for no element: it travels too."""
    rows = wire.view(parts, quantized_bytes(numel, code))
    nbytes = CODES[code].bytes_per_block
    begin, end = numel // BLOCK * nbytes, num_blocks(numel) * nbytes
    rows[:, begin:end].zero_()
    rows[:, num_blocks(numel) * (nbytes + SCALE_BYTES) :].zero_()
