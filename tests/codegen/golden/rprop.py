"""Rprop's update of flat shards, in one pass over memory.

Made by zerofx.codegen from the optimizer's own step.  An element moves 28 bytes:

    param: float32, read and written
    grad: float32, read
    prev: float32, read and written
    step_size: float32, read and written

The host computes once a step, for each segment:

    etaplus
    etaminus
    step_size_min
"""

import triton
import triton.language as tl


@triton.jit
def stream(address, begin, dtype: tl.constexpr, ALIGNMENT: tl.constexpr):
    """The address of a segment's stream, from the block's first element on."""
    return tl.multiple_of(tl.load(address).to(tl.pointer_type(dtype)), ALIGNMENT) + begin


@triton.jit
def sign_of(x):
    """torch.sign: 0 for NaN."""
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


@triton.jit
def maximum(x, y):
    """torch.maximum: NaN if either is."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(x, y):
    """torch.minimum: NaN if either is."""
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def rprop_block(
    param_ptr, grad_ptr, prev_ptr, step_size_ptr, etaplus, etaminus, step_size_min, lane,
    mask,
):
    """Update one block; ``lane`` counts its elements."""
    param = tl.load(param_ptr + lane, mask)
    grad = tl.load(grad_ptr + lane, mask)
    prev = tl.load(prev_ptr + lane, mask)
    step_size = tl.load(step_size_ptr + lane, mask)

    # rprop.py:267: sign = grad.mul(prev).sign()
    sign = sign_of(grad * prev)
    # rprop.py:274: sign[sign.gt(0)] = etaplus
    sign = tl.where(sign > 0, etaplus, sign)
    # rprop.py:275: sign[sign.lt(0)] = etaminus
    sign = tl.where(sign < 0, etaminus, sign)
    # rprop.py:276: sign[sign.eq(0)] = 1
    sign = tl.where(sign == 0, 1.0, sign)
    # rprop.py:279: step_size.mul_(sign).clamp_(step_size_min, step_size_max)
    step_size = minimum(maximum(step_size * sign, step_size_min), 50)
    # rprop.py:287: grad[sign.eq(etaminus)] = 0
    grad = tl.where(sign == etaminus, 0.0, grad)
    # rprop.py:290: param.addcmul_(grad.sign(), step_size, value=-1)
    param = param - sign_of(grad) * step_size

    tl.store(param_ptr + lane, param, mask)
    tl.store(prev_ptr + lane, grad, mask)
    tl.store(step_size_ptr + lane, step_size, mask)


@triton.jit
def rprop(
    segments, segment_of_chunk, numbers, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Update BLOCK elements of one segment."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    segment = tl.load(segment_of_chunk + first // CHUNK)
    row = segments + segment * 6
    begin = first - tl.multiple_of(tl.load(row), CHUNK)
    rest = tl.load(row + 1) - begin
    param_ptr = stream(row + 2, begin, tl.float32, ALIGNMENT)
    grad_ptr = stream(row + 3, begin, tl.float32, ALIGNMENT)
    prev_ptr = stream(row + 4, begin, tl.float32, ALIGNMENT)
    step_size_ptr = stream(row + 5, begin, tl.float32, ALIGNMENT)
    numbers += segment * 3
    etaplus = tl.load(numbers + 0).to(tl.float32)
    etaminus = tl.load(numbers + 1).to(tl.float32)
    step_size_min = tl.load(numbers + 2).to(tl.float32)
    lane = tl.arange(0, BLOCK)
    if rest >= BLOCK:
        rprop_block(
            param_ptr, grad_ptr, prev_ptr, step_size_ptr, etaplus, etaminus, step_size_min, lane,
            lane < BLOCK,
        )
    else:
        rprop_block(
            param_ptr, grad_ptr, prev_ptr, step_size_ptr, etaplus, etaminus, step_size_min, lane,
            lane < rest,
        )
