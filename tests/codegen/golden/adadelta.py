"""Adadelta's update of flat shards, in one pass over memory.

Made by zerofx.codegen from the optimizer's own step.  An element moves 28 bytes:

    param: float32, read and written
    grad: float32, read
    square_avg: float32, read and written
    acc_delta: float32, read and written

The host computes once a step, for each segment:

    weight_decay
    rho
    one_minus_rho = 1 - rho
    eps
    lr
"""

import triton
import triton.language as tl


@triton.jit
def stream(address, begin, dtype: tl.constexpr, ALIGNMENT: tl.constexpr):
    """The address of a segment's stream, from the block's first element on."""
    return tl.multiple_of(tl.load(address).to(tl.pointer_type(dtype)), ALIGNMENT) + begin


@triton.jit
def adadelta_block(
    param_ptr, grad_ptr, square_avg_ptr, acc_delta_ptr, weight_decay, rho, one_minus_rho,
    eps, lr, lane, mask,
):
    """Update one block; ``lane`` counts its elements."""
    param = tl.load(param_ptr + lane, mask)
    grad = tl.load(grad_ptr + lane, mask)
    square_avg = tl.load(square_avg_ptr + lane, mask)
    acc_delta = tl.load(acc_delta_ptr + lane, mask)

    # adadelta.py:285: grad = grad.add(param, alpha=weight_decay)
    grad = grad + weight_decay * param
    # adadelta.py:292: square_avg.mul_(rho).addcmul_(grad, grad, value=1 - rho)
    square_avg = square_avg * rho + one_minus_rho * grad * grad
    # adadelta.py:293: std = square_avg.add(eps).sqrt_()
    std = tl.sqrt_rn(square_avg + eps)
    # adadelta.py:294: delta = acc_delta.add(eps).sqrt_()
    delta = tl.sqrt_rn(acc_delta + eps)
    # adadelta.py:297: delta.div_(std).mul_(grad)
    delta = tl.div_rn(delta, std) * grad
    # adadelta.py:298: acc_delta.mul_(rho).addcmul_(delta, delta, value=1 - rho)
    acc_delta = acc_delta * rho + one_minus_rho * delta * delta
    # adadelta.py:302: param.add_(delta, alpha=-lr)
    param = param - lr * delta

    tl.store(param_ptr + lane, param, mask)
    tl.store(square_avg_ptr + lane, square_avg, mask)
    tl.store(acc_delta_ptr + lane, acc_delta, mask)


@triton.jit
def adadelta(
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
    square_avg_ptr = stream(row + 4, begin, tl.float32, ALIGNMENT)
    acc_delta_ptr = stream(row + 5, begin, tl.float32, ALIGNMENT)
    numbers += segment * 5
    weight_decay = tl.load(numbers + 0).to(tl.float32)
    rho = tl.load(numbers + 1).to(tl.float32)
    one_minus_rho = tl.load(numbers + 2).to(tl.float32)
    eps = tl.load(numbers + 3).to(tl.float32)
    lr = tl.load(numbers + 4).to(tl.float32)
    lane = tl.arange(0, BLOCK)
    if rest >= BLOCK:
        adadelta_block(
            param_ptr, grad_ptr, square_avg_ptr, acc_delta_ptr, weight_decay, rho, one_minus_rho,
            eps, lr, lane, lane < BLOCK,
        )
    else:
        adadelta_block(
            param_ptr, grad_ptr, square_avg_ptr, acc_delta_ptr, weight_decay, rho, one_minus_rho,
            eps, lr, lane, lane < rest,
        )
