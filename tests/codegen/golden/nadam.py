"""NAdam's update of flat shards, in one pass over memory.

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
    bias_correction2 = 1 - beta2**(step + 1)
    eps
    coefficient = -lr*(1 - beta1*(1 - 0.5*0.96**(momentum_decay*(step + 1))))/(1 - beta1*mu_product*(1 - 0.5*0.96**(momentum_decay*(step + 1))))
    coefficient_1 = -beta1*lr*(1 - 0.5*0.96**(momentum_decay*(step + 2)))/(1 - beta1**2*mu_product*(1 - 0.5*0.96**(momentum_decay*(step + 1)))*(1 - 0.5*0.96**(momentum_decay*(step + 2))))
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
def nadam_block(
    param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, weight_decay, one_minus_beta1,
    beta2, one_minus_beta2, bias_correction2, eps, coefficient, coefficient_1, lane,
    mask,
):
    """Update one block; ``lane`` counts its elements."""
    param = tl.load(param_ptr + lane, mask)
    grad = tl.load(grad_ptr + lane, mask)
    exp_avg = tl.load(exp_avg_ptr + lane, mask)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + lane, mask)

    # nadam.py:344: grad = grad.add(param, alpha=weight_decay)
    grad = grad + weight_decay * param
    # nadam.py:354: exp_avg.lerp_(grad, 1 - beta1)
    exp_avg = lerp(exp_avg, grad, one_minus_beta1)
    # nadam.py:355: exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    exp_avg_sq = exp_avg_sq * beta2 + one_minus_beta2 * grad * grad
    # nadam.py:356: denom = exp_avg_sq.div(bias_correction2).sqrt()
    denom = tl.sqrt_rn(tl.div_rn(exp_avg_sq, bias_correction2))
    # nadam.py:370: denom.add_(eps)
    denom = denom + eps
    # nadam.py:371: param.addcdiv_( grad, denom, value=(-lr * (1.0 - mu) / (1.0 - _get_value(mu_p...
    param = param + coefficient * tl.div_rn(grad, denom)
    # nadam.py:374: param.addcdiv_( exp_avg, denom, value=cast(float, (-lr * mu_next) / (1.0 - mu...
    param = param + coefficient_1 * tl.div_rn(exp_avg, denom)

    tl.store(param_ptr + lane, param, mask)
    tl.store(exp_avg_ptr + lane, exp_avg, mask)
    tl.store(exp_avg_sq_ptr + lane, exp_avg_sq, mask)


@triton.jit
def nadam(
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
    numbers += segment * 8
    weight_decay = tl.load(numbers + 0).to(tl.float32)
    one_minus_beta1 = tl.load(numbers + 1).to(tl.float32)
    beta2 = tl.load(numbers + 2).to(tl.float32)
    one_minus_beta2 = tl.load(numbers + 3).to(tl.float32)
    bias_correction2 = tl.load(numbers + 4).to(tl.float32)
    eps = tl.load(numbers + 5).to(tl.float32)
    coefficient = tl.load(numbers + 6).to(tl.float32)
    coefficient_1 = tl.load(numbers + 7).to(tl.float32)
    lane = tl.arange(0, BLOCK)
    if rest >= BLOCK:
        nadam_block(
            param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, weight_decay, one_minus_beta1,
            beta2, one_minus_beta2, bias_correction2, eps, coefficient, coefficient_1, lane,
            lane < BLOCK,
        )
    else:
        nadam_block(
            param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, weight_decay, one_minus_beta1,
            beta2, one_minus_beta2, bias_correction2, eps, coefficient, coefficient_1, lane,
            lane < rest,
        )
