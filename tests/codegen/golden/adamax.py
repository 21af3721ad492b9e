"""Adamax's update of flat shards, in one pass over memory.

Made by zerofx.codegen from the optimizer's own step.  An element moves 28 bytes:

    param: float32, read and written
    grad: float32, read
    exp_avg: float32, read and written
    exp_inf: float32, read and written

The host computes once a step, for each segment:

    weight_decay
    one_minus_beta1 = 1 - beta1
    beta2
    eps
    clr = lr/(1 - beta1**(step + 1))
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
def maximum(x, y):
    """torch.maximum: NaN if either is."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def adamax_block(
    param_ptr, grad_ptr, exp_avg_ptr, exp_inf_ptr, weight_decay, one_minus_beta1, beta2,
    eps, clr, lane, mask,
):
    """Update one block; ``lane`` counts its elements."""
    param = tl.load(param_ptr + lane, mask)
    grad = tl.load(grad_ptr + lane, mask)
    exp_avg = tl.load(exp_avg_ptr + lane, mask)
    exp_inf = tl.load(exp_inf_ptr + lane, mask)

    # adamax.py:268: grad = grad.add(param, alpha=weight_decay)
    grad = grad + weight_decay * param
    # adamax.py:277: exp_avg.lerp_(grad, 1 - beta1)
    exp_avg = lerp(exp_avg, grad, one_minus_beta1)
    # adamax.py:281: exp_inf.mul_(beta2),
    exp_inf = exp_inf * beta2
    # adamax.py:282: grad.abs().add_(eps),
    value = tl.abs(grad) + eps
    # adamax.py:280: torch.maximum( exp_inf.mul_(beta2), grad.abs().add_(eps), out=exp_inf, )
    exp_inf = maximum(exp_inf, value)
    # adamax.py:303: param.addcdiv_(exp_avg, exp_inf, value=-clr)
    param = param - clr * tl.div_rn(exp_avg, exp_inf)

    tl.store(param_ptr + lane, param, mask)
    tl.store(exp_avg_ptr + lane, exp_avg, mask)
    tl.store(exp_inf_ptr + lane, exp_inf, mask)


@triton.jit
def adamax(
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
    exp_avg_ptr = stream(row + 4, begin, tl.float32, ALIGNMENT)
    exp_inf_ptr = stream(row + 5, begin, tl.float32, ALIGNMENT)
    numbers += segment * 5
    weight_decay = tl.load(numbers + 0).to(tl.float32)
    one_minus_beta1 = tl.load(numbers + 1).to(tl.float32)
    beta2 = tl.load(numbers + 2).to(tl.float32)
    eps = tl.load(numbers + 3).to(tl.float32)
    clr = tl.load(numbers + 4).to(tl.float32)
    lane = tl.arange(0, BLOCK)
    if rest >= BLOCK:
        adamax_block(
            param_ptr, grad_ptr, exp_avg_ptr, exp_inf_ptr, weight_decay, one_minus_beta1, beta2,
            eps, clr, lane, lane < BLOCK,
        )
    else:
        adamax_block(
            param_ptr, grad_ptr, exp_avg_ptr, exp_inf_ptr, weight_decay, one_minus_beta1, beta2,
            eps, clr, lane, lane < rest,
        )
