"""The sum of 2 ranks' gradients in bfloat16, in one pass over memory.

Made by zerofx.codegen.  An element moves 8 bytes:

    total: float32, written
    value0: bfloat16, read
    value1: bfloat16, read
"""

import triton
import triton.language as tl


@triton.jit
def stream(address, begin, dtype: tl.constexpr, ALIGNMENT: tl.constexpr):
    """The address of a segment's stream, from the block's first element on."""
    return tl.multiple_of(tl.load(address).to(tl.pointer_type(dtype)), ALIGNMENT) + begin


@triton.jit
def dequantize_sum_block(total_ptr, value0_ptr, value1_ptr, lane, mask):
    """Sum one block; ``lane`` counts its elements."""
    value0 = tl.load(value0_ptr + lane, mask).to(tl.float32)
    value1 = tl.load(value1_ptr + lane, mask).to(tl.float32)

    # One behind the other, in float32.
    total = value0 + value1
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
    row = segments + segment * 5
    begin = first - tl.multiple_of(tl.load(row), CHUNK)
    rest = tl.load(row + 1) - begin
    total_ptr = stream(row + 2, begin, tl.float32, ALIGNMENT)
    value0_ptr = stream(row + 3, begin, tl.bfloat16, ALIGNMENT)
    value1_ptr = stream(row + 4, begin, tl.bfloat16, ALIGNMENT)
    lane = tl.arange(0, BLOCK)
    if rest >= BLOCK:
        dequantize_sum_block(total_ptr, value0_ptr, value1_ptr, lane, lane < BLOCK)
    else:
        dequantize_sum_block(total_ptr, value0_ptr, value1_ptr, lane, lane < rest)
