"""Lion's update of flat shards, in one pass over memory.

Made by zerofx.codegen from the optimizer's own step.  An element moves 18 bytes:

    param: float32, read and written
    grad: bfloat16, read
    exp_avg: float32, read and written

The host computes once a step, for each segment:

    one_minus_lr_weight_decay = 1 - lr*weight_decay
    one_minus_beta1 = 1 - beta1
    lr
    one_minus_beta2 = 1 - beta2
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
def sign_of(x):
    """torch.sign: 0 for NaN."""
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


@triton.jit
def lion_block(
    param_ptr, grad_ptr, exp_avg_ptr, one_minus_lr_weight_decay, one_minus_beta1, lr,
    one_minus_beta2, lane, mask,
):
    """Update one block; ``lane`` counts its elements."""
    param = tl.load(param_ptr + lane, mask)
    grad = tl.load(grad_ptr + lane, mask).to(tl.float32)
    exp_avg = tl.load(exp_avg_ptr + lane, mask)

    # lion.py:21: p.mul_(1 - lr * group["weight_decay"])
    param = param * one_minus_lr_weight_decay
    # lion.py:22: update = exp_avg.lerp(p.grad, 1 - beta1).sign_()
    update = sign_of(lerp(exp_avg, grad, one_minus_beta1))
    # lion.py:23: p.add_(update, alpha=-lr)
    param = param - lr * update
    # lion.py:24: exp_avg.lerp_(p.grad, 1 - beta2)
    exp_avg = lerp(exp_avg, grad, one_minus_beta2)

    tl.store(param_ptr + lane, param, mask)
    tl.store(exp_avg_ptr + lane, exp_avg, mask)


@triton.jit
def lion(
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
    grad_ptr = stream(row + 3, begin, tl.bfloat16, ALIGNMENT)
    exp_avg_ptr = stream(row + 4, begin, tl.float32, ALIGNMENT)
    numbers += segment * 4
    one_minus_lr_weight_decay = tl.load(numbers + 0).to(tl.float32)
    one_minus_beta1 = tl.load(numbers + 1).to(tl.float32)
    lr = tl.load(numbers + 2).to(tl.float32)
    one_minus_beta2 = tl.load(numbers + 3).to(tl.float32)
    lane = tl.arange(0, BLOCK)
    if rest >= BLOCK:
        lion_block(
            param_ptr, grad_ptr, exp_avg_ptr, one_minus_lr_weight_decay, one_minus_beta1, lr,
            one_minus_beta2, lane, lane < BLOCK,
        )
    else:
        lion_block(
            param_ptr, grad_ptr, exp_avg_ptr, one_minus_lr_weight_decay, one_minus_beta1, lr,
            one_minus_beta2, lane, lane < rest,
        )
