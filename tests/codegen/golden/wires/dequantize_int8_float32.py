"""The values of codes in int8, with a scale for each 256 of them, in one pass over memory.

Made by zerofx.codegen.  An element moves 5.01562 bytes:

    value: float32, written
    code: int8, read
    scale: float32, read, one for 256
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
def dequantize_block(value_ptr, code_ptr, scale_ptr, lane, mask, part, part_mask):
    """Dequantise one block; ``lane`` counts its elements, ``part`` its parts of 256."""
    code = tl.load(code_ptr + lane, mask)
    scale = tl.load(scale_ptr + part, part_mask)

    # The product in float32, which is rounded where it is stored.
    value = code.to(tl.float32) * of_part(scale)

    tl.store(value_ptr + lane, value, mask)


@triton.jit
def dequantize(
    segments, segment_of_chunk, numbers, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Dequantise BLOCK elements of one segment."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    segment = tl.load(segment_of_chunk + first // CHUNK)
    row = segments + segment * 5
    begin = first - tl.multiple_of(tl.load(row), CHUNK)
    rest = tl.load(row + 1) - begin
    value_ptr = stream(row + 2, begin, tl.float32, ALIGNMENT)
    code_ptr = stream(row + 3, begin, tl.int8, ALIGNMENT)
    scale_ptr = stream(row + 4, begin // 256, tl.float32, 4)
    lane = tl.arange(0, BLOCK)
    part = tl.arange(0, BLOCK // 256)
    if rest >= BLOCK:
        dequantize_block(
            value_ptr, code_ptr, scale_ptr, lane, lane < BLOCK, part, part < BLOCK // 256,
        )
    else:
        dequantize_block(value_ptr, code_ptr, scale_ptr, lane, lane < rest, part, part * 256 < rest)
