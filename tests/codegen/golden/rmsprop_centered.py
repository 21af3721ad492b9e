"""RMSprop's update of flat shards, in one pass over memory.

Made by zerofx.codegen from the optimizer's own step.  An element moves 36 bytes:

    param: float32, read and written
    grad: float32, read
    square_avg: float32, read and written
    momentum_buffer: float32, read and written
    grad_avg: float32, read and written

The host computes once a step, for each segment:

    weight_decay
    alpha
    one_minus_alpha = 1 - alpha
    eps
    momentum
    lr
"""

import triton
import triton.language as tl


@triton.jit
def stream(address, begin, dtype: tl.constexpr, ALIGNMENT: tl.constexpr):
    """The address of a segment's stream, from the block's first element on."""
    return tl.multiple_of(tl.load(address).to(tl.pointer_type(dtype)), ALIGNMENT) + begin


@triton.jit
def lerp(start, end, weight):
    """torch.lerp, which is exact at both ends."""
    near_start = start + weight * (end - start)
    near_end = end - (end - start) * (1.0 - weight)
    return tl.where(tl.abs(weight) < 0.5, near_start, near_end)


@triton.jit
def rmsprop_block(
    param_ptr, grad_ptr, square_avg_ptr, momentum_buffer_ptr, grad_avg_ptr, weight_decay,
    alpha, one_minus_alpha, eps, momentum, lr, lane, mask,
):
    """Update one block; ``lane`` counts its elements."""
    param = tl.load(param_ptr + lane, mask)
    grad = tl.load(grad_ptr + lane, mask)
    square_avg = tl.load(square_avg_ptr + lane, mask)
    momentum_buffer = tl.load(momentum_buffer_ptr + lane, mask)
    grad_avg = tl.load(grad_avg_ptr + lane, mask)

    # rmsprop.py:308: grad = grad.add(param, alpha=weight_decay)
    grad = grad + weight_decay * param
    # rmsprop.py:316: square_avg.mul_(alpha).addcmul_(grad, grad, value=1 - alpha)
    square_avg = square_avg * alpha + one_minus_alpha * grad * grad
    # rmsprop.py:322: grad_avg.lerp_(grad, 1 - alpha)
    grad_avg = lerp(grad_avg, grad, one_minus_alpha)
    # rmsprop.py:323: avg = square_avg.addcmul(grad_avg, grad_avg, value=-1).sqrt_()
    avg = tl.sqrt_rn(square_avg - grad_avg * grad_avg)
    # rmsprop.py:330: avg = avg.add_(eps)
    avg = avg + eps
    # rmsprop.py:336: buf.mul_(momentum).addcdiv_(grad, avg)
    momentum_buffer = momentum_buffer * momentum + tl.div_rn(grad, avg)
    # rmsprop.py:337: param.add_(buf, alpha=-lr)
    param = param - lr * momentum_buffer

    tl.store(param_ptr + lane, param, mask)
    tl.store(square_avg_ptr + lane, square_avg, mask)
    tl.store(momentum_buffer_ptr + lane, momentum_buffer, mask)
    tl.store(grad_avg_ptr + lane, grad_avg, mask)


@triton.jit
def rmsprop(
    segments, segment_of_chunk, numbers, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Update BLOCK elements of one segment."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    segment = tl.load(segment_of_chunk + first // CHUNK)
    row = segments + segment * 7
    begin = first - tl.multiple_of(tl.load(row), CHUNK)
    rest = tl.load(row + 1) - begin
    param_ptr = stream(row + 2, begin, tl.float32, ALIGNMENT)
    grad_ptr = stream(row + 3, begin, tl.float32, ALIGNMENT)
    square_avg_ptr = stream(row + 4, begin, tl.float32, ALIGNMENT)
    momentum_buffer_ptr = stream(row + 5, begin, tl.float32, ALIGNMENT)
    grad_avg_ptr = stream(row + 6, begin, tl.float32, ALIGNMENT)
    numbers += segment * 6
    weight_decay = tl.load(numbers + 0).to(tl.float32)
    alpha = tl.load(numbers + 1).to(tl.float32)
    one_minus_alpha = tl.load(numbers + 2).to(tl.float32)
    eps = tl.load(numbers + 3).to(tl.float32)
    momentum = tl.load(numbers + 4).to(tl.float32)
    lr = tl.load(numbers + 5).to(tl.float32)
    lane = tl.arange(0, BLOCK)
    if rest >= BLOCK:
        rmsprop_block(
            param_ptr, grad_ptr, square_avg_ptr, momentum_buffer_ptr, grad_avg_ptr, weight_decay,
            alpha, one_minus_alpha, eps, momentum, lr, lane, lane < BLOCK,
        )
    else:
        rmsprop_block(
            param_ptr, grad_ptr, square_avg_ptr, momentum_buffer_ptr, grad_avg_ptr, weight_decay,
            alpha, one_minus_alpha, eps, momentum, lr, lane, lane < rest,
        )
