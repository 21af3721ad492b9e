"""RAdam's update of flat shards, in one pass over memory.

Made by zerofx.codegen from the optimizer's own step.  An element moves 28 bytes:

    param: float32, read and written
    grad: float32, read
    exp_avg: float32, read and written
    exp_avg_sq: float32, read and written

The host computes once a step, for each segment:

    weight_decay
    one_minus_beta1 = 1 - beta1
    beta2
    one_minus_beta2 = 1 - beta2
    bias_correction1 = 1 - beta1**(step + 1)
    lr
    eps
    coefficient = (1 - beta2**(step + 1))**0.5
    coefficient_1 = ((2/(1 - beta2) - 1)*(2/(1 - beta2) - beta2**(step + 1)*(2*step + 2)/(1 - beta2**(step + 1)) - 5)*(2/(1 - beta2) - beta2**(step + 1)*(2*step + 2)/(1 - beta2**(step + 1)) - 3)/((2/(1 - beta2) - 5)*(2/(1 - beta2) - 3)*(2/(1 - beta2) - beta2**(step + 1)*(2*step + 2)/(1 - beta2**(step + 1)) - 1)))**0.5
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
def radam_block(
    param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, weight_decay, one_minus_beta1,
    beta2, one_minus_beta2, bias_correction1, lr, eps, coefficient, coefficient_1, lane,
    mask,
):
    """Update one block; ``lane`` counts its elements."""
    param = tl.load(param_ptr + lane, mask)
    grad = tl.load(grad_ptr + lane, mask)
    exp_avg = tl.load(exp_avg_ptr + lane, mask)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + lane, mask)

    # radam.py:308: grad = grad.add(param, alpha=weight_decay)
    grad = grad + weight_decay * param
    # radam.py:311: exp_avg.lerp_(grad, 1 - beta1)
    exp_avg = lerp(exp_avg, grad, one_minus_beta1)
    # radam.py:312: exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    exp_avg_sq = exp_avg_sq * beta2 + one_minus_beta2 * grad * grad
    # radam.py:318: bias_corrected_exp_avg = exp_avg / bias_correction1
    bias_corrected_exp_avg = tl.div_rn(exp_avg, bias_correction1)
    # radam.py:334: exp_avg_sq_sqrt = exp_avg_sq.sqrt()
    exp_avg_sq_sqrt = tl.sqrt_rn(exp_avg_sq)
    # radam.py:338: exp_avg_sq_sqrt = exp_avg_sq_sqrt.add_(eps)
    exp_avg_sq_sqrt = exp_avg_sq_sqrt + eps
    # radam.py:340: return (bias_correction2**0.5) / exp_avg_sq_sqrt
    value = tl.div_rn(1.0, exp_avg_sq_sqrt) * coefficient
    # radam.py:351: bias_corrected_exp_avg
    value = bias_corrected_exp_avg * lr * value * coefficient_1
    # radam.py:350: param.add_( bias_corrected_exp_avg * lr * _compute_adaptive_lr() * _compute_r...
    param = param - value

    tl.store(param_ptr + lane, param, mask)
    tl.store(exp_avg_ptr + lane, exp_avg, mask)
    tl.store(exp_avg_sq_ptr + lane, exp_avg_sq, mask)


@triton.jit
def radam(
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
    exp_avg_sq_ptr = stream(row + 5, begin, tl.float32, ALIGNMENT)
    numbers += segment * 9
    weight_decay = tl.load(numbers + 0).to(tl.float32)
    one_minus_beta1 = tl.load(numbers + 1).to(tl.float32)
    beta2 = tl.load(numbers + 2).to(tl.float32)
    one_minus_beta2 = tl.load(numbers + 3).to(tl.float32)
    bias_correction1 = tl.load(numbers + 4).to(tl.float32)
    lr = tl.load(numbers + 5).to(tl.float32)
    eps = tl.load(numbers + 6).to(tl.float32)
    coefficient = tl.load(numbers + 7).to(tl.float32)
    coefficient_1 = tl.load(numbers + 8).to(tl.float32)
    lane = tl.arange(0, BLOCK)
    if rest >= BLOCK:
        radam_block(
            param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, weight_decay, one_minus_beta1,
            beta2, one_minus_beta2, bias_correction1, lr, eps, coefficient, coefficient_1, lane,
            lane < BLOCK,
        )
    else:
        radam_block(
            param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, weight_decay, one_minus_beta1,
            beta2, one_minus_beta2, bias_correction1, lr, eps, coefficient, coefficient_1, lane,
            lane < rest,
        )
