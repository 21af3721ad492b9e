"""The codes in int8 of flat shards, and a scale for each 256 elements, in one pass over memory.

Made by zerofx.codegen.  An element moves 3.01562 bytes:

    value: float16, read
    code: int8, written
    scale: float32, written, one for 256
"""

import triton
import triton.language as tl


@triton.jit
def stream(address, begin, dtype: tl.constexpr, ALIGNMENT: tl.constexpr):
    """The address of a segment's stream, from the block's first element on."""
    return tl.multiple_of(tl.load(address).to(tl.pointer_type(dtype)), ALIGNMENT) + begin


@triton.jit
def maximum(x, y):
    """torch.maximum: NaN if either is."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_of_part(x, mask):
    """The largest of each part's 256 elements; NaN if one is."""
    parts = tl.where(mask, x, float("-inf")).reshape(x.numel // 256, 256)
    return tl.reduce(parts, 1, maximum)


@triton.jit
def of_part(x):
    """For each element what its part of 256 has."""
    return tl.broadcast_to(x[:, None], x.numel, 256).reshape(x.numel * 256)


@triton.jit
def rounded(x):
    """torch.round, of what is below 2**22: a sum of more has no digits behind the point."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def quantize_block(value_ptr, code_ptr, scale_ptr, lane, mask, part, part_mask):
    """Quantise one block; ``lane`` counts its elements, ``part`` its parts of 256."""
    value = tl.load(value_ptr + lane, mask).to(tl.float32)

    # The scale of a part: its largest magnitude / 127, a product that all round alike.
    largest = largest_of_part(tl.abs(value), mask)
    scale = largest * 0.007874015718698502
    # 0 for what is too small, infinity for what is not finite: both have codes of 0.
    scale = tl.where(largest < float("inf"), tl.where(scale >= 1.1754943508222875e-38, scale, 0.0), float("inf"))
    # The codes: whole numbers, ties to even.
    divisor = of_part(scale)
    is_coded = (divisor > 0.0) & (divisor < float("inf"))
    code = rounded(tl.div_rn(tl.where(is_coded, value, 0.0), tl.where(is_coded, divisor, 1.0)))
    code = code.to(tl.int8)

    tl.store(code_ptr + lane, code, mask)
    tl.store(scale_ptr + part, scale, part_mask)


@triton.jit
def quantize(
    segments, segment_of_chunk, numbers, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Quantise BLOCK elements of one segment."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    segment = tl.load(segment_of_chunk + first // CHUNK)
    row = segments + segment * 5
    begin = first - tl.multiple_of(tl.load(row), CHUNK)
    rest = tl.load(row + 1) - begin
    value_ptr = stream(row + 2, begin, tl.float16, ALIGNMENT)
    code_ptr = stream(row + 3, begin, tl.int8, ALIGNMENT)
    scale_ptr = stream(row + 4, begin // 256, tl.float32, 4)
    lane = tl.arange(0, BLOCK)
    part = tl.arange(0, BLOCK // 256)
    if rest >= BLOCK:
        quantize_block(
            value_ptr, code_ptr, scale_ptr, lane, lane < BLOCK, part, part < BLOCK // 256,
        )
    else:
        quantize_block(value_ptr, code_ptr, scale_ptr, lane, lane < rest, part, part * 256 < rest)
