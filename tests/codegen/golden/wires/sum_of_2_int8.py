"""The sum of 2 ranks' gradients in int8, in one pass over memory.

Made by zerofx.codegen.  An element moves 6.03125 bytes:

    total: float32, written
    code0: int8, read
    scale0: float32, read, one for 256
    code1: int8, read
    scale1: float32, read, one for 256
"""

import triton
import triton.language as tl


@triton.jit
def stream(address, begin, dtype: tl.constexpr, ALIGNMENT: tl.constexpr):
    """The address of a segment's stream, from the block's first element on."""
    return tl.multiple_of(tl.load(address).to(tl.pointer_type(dtype)), ALIGNMENT) + begin


@triton.jit
def of_part(x):
    """For each element what its part of 256 has."""
    return tl.broadcast_to(x[:, None], x.numel, 256).reshape(x.numel * 256)


@triton.jit
def dequantize_sum_block(
    total_ptr, code0_ptr, scale0_ptr, code1_ptr, scale1_ptr, lane, mask, part, part_mask,
):
    """Sum one block; ``lane`` counts its elements, ``part`` its parts of 256."""
    code0 = tl.load(code0_ptr + lane, mask)
    scale0 = tl.load(scale0_ptr + part, part_mask)
    code1 = tl.load(code1_ptr + lane, mask)
    scale1 = tl.load(scale1_ptr + part, part_mask)

    # One behind the other, in float32.
    total = code0.to(tl.float32) * of_part(scale0) + code1.to(tl.float32) * of_part(scale1)
    # The mean.
    total = tl.div_rn(total, 2.0)

    tl.store(total_ptr + lane, total, mask)


@triton.jit
def dequantize_sum(
    segments, segment_of_chunk, numbers, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Sum BLOCK elements of one segment."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    segment = tl.load(segment_of_chunk + first // CHUNK)
    row = segments + segment * 7
    begin = first - tl.multiple_of(tl.load(row), CHUNK)
    rest = tl.load(row + 1) - begin
    total_ptr = stream(row + 2, begin, tl.float32, ALIGNMENT)
    code0_ptr = stream(row + 3, begin, tl.int8, ALIGNMENT)
    scale0_ptr = stream(row + 4, begin // 256, tl.float32, 4)
    code1_ptr = stream(row + 5, begin, tl.int8, ALIGNMENT)
    scale1_ptr = stream(row + 6, begin // 256, tl.float32, 4)
    lane = tl.arange(0, BLOCK)
    part = tl.arange(0, BLOCK // 256)
    if rest >= BLOCK:
        dequantize_sum_block(
            total_ptr, code0_ptr, scale0_ptr, code1_ptr, scale1_ptr, lane, lane < BLOCK, part,
            part < BLOCK // 256,
        )
    else:
        dequantize_sum_block(
            total_ptr, code0_ptr, scale0_ptr, code1_ptr, scale1_ptr, lane, lane < rest, part,
            part * 256 < rest,
        )
