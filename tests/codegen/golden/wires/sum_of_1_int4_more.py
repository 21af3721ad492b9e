"""The sum of 1 ranks' gradients in int4, in one pass over memory.

Made by zerofx.codegen.  An element moves 8.51562 bytes:

    total: float32, read and written
    code0: int8, read, one for 2
    scale0: float32, read, one for 256
"""

import triton
import triton.language as tl


@triton.jit
def stream(address, begin, dtype: tl.constexpr, ALIGNMENT: tl.constexpr):
    """The address of a segment's stream, from the block's first element on."""
    return tl.multiple_of(tl.load(address).to(tl.pointer_type(dtype)), ALIGNMENT) + begin


@triton.jit
def unpacked(x):
    """The codes of two elements that are in each byte, with their signs."""
    return tl.join(((x & 15) ^ 8) - 8, x >> 4).reshape(x.numel * 2)


@triton.jit
def of_part(x):
    """For each element what its part of 256 has."""
    return tl.broadcast_to(x[:, None], x.numel, 256).reshape(x.numel * 256)


@triton.jit
def dequantize_sum_block(
    total_ptr, code0_ptr, scale0_ptr, lane, mask, part, part_mask, pair, pair_mask,
):
    """Sum one block; ``lane`` counts its elements, ``part`` its parts of 256, ``pair`` its pairs."""
    total = tl.load(total_ptr + lane, mask)
    code0 = tl.load(code0_ptr + pair, pair_mask)
    scale0 = tl.load(scale0_ptr + part, part_mask)

    # One behind the other, in float32.
    value0 = unpacked(code0).to(tl.float32) * of_part(scale0)
    total = total + value0

    tl.store(total_ptr + lane, total, mask)


@triton.jit
def dequantize_sum(
    segments, segment_of_chunk, numbers, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Sum BLOCK elements of one segment."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    segment = tl.load(segment_of_chunk + first // CHUNK)
    row = segments + segment * 5
    begin = first - tl.multiple_of(tl.load(row), CHUNK)
    rest = tl.load(row + 1) - begin
    total_ptr = stream(row + 2, begin, tl.float32, ALIGNMENT)
    code0_ptr = stream(row + 3, begin // 2, tl.int8, ALIGNMENT)
    scale0_ptr = stream(row + 4, begin // 256, tl.float32, 4)
    lane = tl.arange(0, BLOCK)
    part = tl.arange(0, BLOCK // 256)
    pair = tl.arange(0, BLOCK // 2)
    if rest >= BLOCK:
        dequantize_sum_block(
            total_ptr, code0_ptr, scale0_ptr, lane, lane < BLOCK, part, part < BLOCK // 256,
            pair, pair < BLOCK // 2,
        )
    else:
        dequantize_sum_block(
            total_ptr, code0_ptr, scale0_ptr, lane, lane < rest, part, part * 256 < rest, pair,
            pair * 2 < rest,
        )
