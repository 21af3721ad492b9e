"""Finds what codes in int8 have lost of values, in one pass over memory.

Made by zerofx.codegen.  An element moves 9.01562 bytes:

    exact: float32, read
    code: int8, read
    scale: float32, read, one for 256
    error: float32, written
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
def rounding_error_block(
    exact_ptr, code_ptr, scale_ptr, error_ptr, loss_scale, lane, mask, part, part_mask,
):
    """Find the errors of one block; ``lane`` counts its elements, ``part`` its parts of 256."""
    exact = tl.load(exact_ptr + lane, mask)
    code = tl.load(code_ptr + lane, mask)
    scale = tl.load(scale_ptr + part, part_mask)

    # What has travelled.
    value = code.to(tl.float32) * of_part(scale)
    # What has not.
    lost = exact - value
    # In units of gradients.
    lost = tl.div_rn(lost, loss_scale)
    # Nothing of what is no number.
    error = tl.where(tl.abs(lost) < float("inf"), lost, 0.0)

    tl.store(error_ptr + lane, error, mask)


@triton.jit
def rounding_error(
    segments, segment_of_chunk, numbers, loss_scale_ptr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr, ALIGNMENT: tl.constexpr,
):
    """Find the errors of BLOCK elements of one segment."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    segment = tl.load(segment_of_chunk + first // CHUNK)
    row = segments + segment * 6
    begin = first - tl.multiple_of(tl.load(row), CHUNK)
    rest = tl.load(row + 1) - begin
    exact_ptr = stream(row + 2, begin, tl.float32, ALIGNMENT)
    code_ptr = stream(row + 3, begin, tl.int8, ALIGNMENT)
    scale_ptr = stream(row + 4, begin // 256, tl.float32, 4)
    error_ptr = stream(row + 5, begin, tl.float32, ALIGNMENT)
    loss_scale = tl.load(loss_scale_ptr).to(tl.float32)
    lane = tl.arange(0, BLOCK)
    part = tl.arange(0, BLOCK // 256)
    if rest >= BLOCK:
        rounding_error_block(
            exact_ptr, code_ptr, scale_ptr, error_ptr, loss_scale, lane, lane < BLOCK, part,
            part < BLOCK // 256,
        )
    else:
        rounding_error_block(
            exact_ptr, code_ptr, scale_ptr, error_ptr, loss_scale, lane, lane < rest, part,
            part * 256 < rest,
        )
