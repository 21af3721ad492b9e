"""AdamW's update of flat shards, in one pass over memory.

Made by zerofx.codegen from the optimizer's own step.  An element moves 26.0039 bytes:

    param: float32, read and written
    grad: float16, read
    exp_avg: float32, read and written
    exp_avg_sq: float32, read and written
    partials: float32, written, one for 1024 or more

The host computes once a step, for each segment:

    one_minus_lr_weight_decay = 1 - lr*weight_decay
    one_minus_beta1 = 1 - beta1
    beta2
    one_minus_beta2 = 1 - beta2
    bias_correction2_sqrt = (1 - beta2**(step + 1))**0.5
    eps
    step_size = lr/(1 - beta1**(step + 1))
"""

import triton
import triton.language as tl


@triton.jit
def stream(address, begin, dtype: tl.constexpr, ALIGNMENT: tl.constexpr):
    """The address of a segment's stream, from the block's first element on."""
    return tl.multiple_of(tl.load(address).to(tl.pointer_type(dtype)), ALIGNMENT) + begin


@triton.jit
def sum_of_squares(x, mask):
    """Of the elements that are there."""
    return tl.sum(tl.where(mask, x * x, 0.0))


@triton.jit
def lerp(start, end, weight):
    """torch.lerp, which is exact at both ends."""
    near_start = start + weight * (end - start)
    near_end = end - (end - start) * (1.0 - weight)
    return tl.where(tl.abs(weight) < 0.5, near_start, near_end)


@triton.jit
def adamw_block(
    param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, one_minus_lr_weight_decay,
    one_minus_beta1, beta2, one_minus_beta2, bias_correction2_sqrt, eps, step_size,
    coefficient, lane, mask,
):
    """Update one block; ``lane`` counts its elements.

    Returns the sum of its gradient's squares.
    """
    param = tl.load(param_ptr + lane, mask)
    grad = tl.load(grad_ptr + lane, mask).to(tl.float32)
    exp_avg = tl.load(exp_avg_ptr + lane, mask)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + lane, mask)

    # work.py:12: return gradient * coefficient
    grad = grad * coefficient
    # round_to: Round float32 to what bfloat16 or float16 can hold, and keep it in float32.
    value = grad.to(tl.float16).to(tl.int16, bitcast=True)
    value = ((value & 32767) | (value & -32768)).to(tl.float16, bitcast=True)
    round_to = value.to(tl.float32)
    # sum_of_squares: The gradient's squares, summed in float32.
    squares = sum_of_squares(round_to, mask)
    # adam.py:419: param.mul_(1 - lr * weight_decay)
    param = param * one_minus_lr_weight_decay
    # adam.py:456: exp_avg.lerp_(grad, 1 - device_beta1)
    exp_avg = lerp(exp_avg, round_to, one_minus_beta1)
    # adam.py:475: exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    exp_avg_sq = exp_avg_sq * beta2 + one_minus_beta2 * round_to * round_to
    # adam.py:544: denom = (exp_avg_sq.sqrt() / bias_correction2_sqrt).add_(eps)
    denom = tl.div_rn(tl.sqrt_rn(exp_avg_sq), bias_correction2_sqrt) + eps
    # adam.py:546: param.addcdiv_(exp_avg, denom, value=-step_size)
    param = param - step_size * tl.div_rn(exp_avg, denom)

    tl.store(param_ptr + lane, param, mask)
    tl.store(exp_avg_ptr + lane, exp_avg, mask)
    tl.store(exp_avg_sq_ptr + lane, exp_avg_sq, mask)
    return squares


@triton.jit
def adamw(
    segments, segment_of_chunk, numbers, partials, coefficient_ptr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr, ALIGNMENT: tl.constexpr,
):
    """Update BLOCK elements of one segment."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    segment = tl.load(segment_of_chunk + first // CHUNK)
    row = segments + segment * 6
    begin = first - tl.multiple_of(tl.load(row), CHUNK)
    rest = tl.load(row + 1) - begin
    param_ptr = stream(row + 2, begin, tl.float32, ALIGNMENT)
    grad_ptr = stream(row + 3, begin, tl.float16, ALIGNMENT)
    exp_avg_ptr = stream(row + 4, begin, tl.float32, ALIGNMENT)
    exp_avg_sq_ptr = stream(row + 5, begin, tl.float32, ALIGNMENT)
    numbers += segment * 7
    one_minus_lr_weight_decay = tl.load(numbers + 0).to(tl.float32)
    one_minus_beta1 = tl.load(numbers + 1).to(tl.float32)
    beta2 = tl.load(numbers + 2).to(tl.float32)
    one_minus_beta2 = tl.load(numbers + 3).to(tl.float32)
    bias_correction2_sqrt = tl.load(numbers + 4).to(tl.float32)
    eps = tl.load(numbers + 5).to(tl.float32)
    step_size = tl.load(numbers + 6).to(tl.float32)
    coefficient = tl.load(coefficient_ptr).to(tl.float32)
    lane = tl.arange(0, BLOCK)
    if rest >= BLOCK:
        partial = adamw_block(
            param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, one_minus_lr_weight_decay,
            one_minus_beta1, beta2, one_minus_beta2, bias_correction2_sqrt, eps, step_size,
            coefficient, lane, lane < BLOCK,
        )
    else:
        partial = adamw_block(
            param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, one_minus_lr_weight_decay,
            one_minus_beta1, beta2, one_minus_beta2, bias_correction2_sqrt, eps, step_size,
            coefficient, lane, lane < rest,
        )
    tl.store(partials + tl.program_id(0), partial)
