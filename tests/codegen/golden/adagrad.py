"""Adagrad's update of flat shards, in one pass over memory.

Made by zerofx.codegen from the optimizer's own step.  An element moves 20 bytes:

    param: float32, read and written
    grad: float32, read
    sum: float32, read and written

The host computes once a step, for each segment:

    weight_decay
    eps
    clr = lr/(lr_decay*step + 1)
"""

import triton
import triton.language as tl


@triton.jit
def stream(address, begin, dtype: tl.constexpr, ALIGNMENT: tl.constexpr):
    """The address of a segment's stream, from the block's first element on."""
    return tl.multiple_of(tl.load(address).to(tl.pointer_type(dtype)), ALIGNMENT) + begin


@triton.jit
def adagrad_block(param_ptr, grad_ptr, sum_ptr, weight_decay, eps, clr, lane, mask):
    """Update one block; ``lane`` counts its elements."""
    param = tl.load(param_ptr + lane, mask)
    grad = tl.load(grad_ptr + lane, mask)
    sum = tl.load(sum_ptr + lane, mask)

    # adagrad.py:400: grad = grad.add(param, alpha=weight_decay)
    grad = grad + weight_decay * param
    # adagrad.py:421: state_sum.addcmul_(grad, grad, value=1)
    sum = sum + grad * grad
    # adagrad.py:425: std = state_sum.sqrt().add_(eps)
    std = tl.sqrt_rn(sum) + eps
    # adagrad.py:426: param.addcdiv_(grad, std, value=-clr)
    param = param - clr * tl.div_rn(grad, std)

    tl.store(param_ptr + lane, param, mask)
    tl.store(sum_ptr + lane, sum, mask)


@triton.jit
def adagrad(
    segments, segment_of_chunk, numbers, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Update BLOCK elements of one segment."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    segment = tl.load(segment_of_chunk + first // CHUNK)
    row = segments + segment * 5
    begin = first - tl.multiple_of(tl.load(row), CHUNK)
    rest = tl.load(row + 1) - begin
    param_ptr = stream(row + 2, begin, tl.float32, ALIGNMENT)
    grad_ptr = stream(row + 3, begin, tl.float32, ALIGNMENT)
    sum_ptr = stream(row + 4, begin, tl.float32, ALIGNMENT)
    numbers += segment * 3
    weight_decay = tl.load(numbers + 0).to(tl.float32)
    eps = tl.load(numbers + 1).to(tl.float32)
    clr = tl.load(numbers + 2).to(tl.float32)
    lane = tl.arange(0, BLOCK)
    if rest >= BLOCK:
        adagrad_block(param_ptr, grad_ptr, sum_ptr, weight_decay, eps, clr, lane, lane < BLOCK)
    else:
        adagrad_block(param_ptr, grad_ptr, sum_ptr, weight_decay, eps, clr, lane, lane < rest)
