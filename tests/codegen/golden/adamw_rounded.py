"""AdamW's update of flat shards, in one pass over memory.

Made by zerofx.codegen from the optimizer's own step.  An element moves 14 bytes:

    param: bfloat16, read and written
    grad: bfloat16, read
    exp_avg: bfloat16, read and written
    exp_avg_sq: bfloat16, read and written

The host computes once a step, for each segment:

    one_minus_lr_weight_decay = 1 - lr*weight_decay
    one_minus_beta1 = 1 - beta1
    beta2
    one_minus_beta2 = 1 - beta2
    bias_correction2_sqrt = (1 - beta2**(step + 1))**0.5
    eps
    step_size = lr/(1 - beta1**(step + 1))
    offset
    key
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
def adamw_block(
    param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, one_minus_lr_weight_decay,
    one_minus_beta1, beta2, one_minus_beta2, bias_correction2_sqrt, eps, step_size,
    offset, key, begin, lane, mask,
):
    """Update one block; ``lane`` counts its elements."""
    param = tl.load(param_ptr + lane, mask).to(tl.float32)
    grad = tl.load(grad_ptr + lane, mask).to(tl.float32)
    exp_avg = tl.load(exp_avg_ptr + lane, mask).to(tl.float32)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + lane, mask).to(tl.float32)

    # adam.py:419: param.mul_(1 - lr * weight_decay)
    param = param * one_minus_lr_weight_decay
    # adam.py:456: exp_avg.lerp_(grad, 1 - device_beta1)
    exp_avg = lerp(exp_avg, grad, one_minus_beta1)
    # adam.py:475: exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    exp_avg_sq = exp_avg_sq * beta2 + one_minus_beta2 * grad * grad
    # adam.py:544: denom = (exp_avg_sq.sqrt() / bias_correction2_sqrt).add_(eps)
    denom = tl.div_rn(tl.sqrt_rn(exp_avg_sq), bias_correction2_sqrt) + eps
    # adam.py:546: param.addcdiv_(exp_avg, denom, value=-step_size)
    value = param - step_size * tl.div_rn(exp_avg, denom)
    # random_bits: Return 16 random bits per element, from a counter: torch's generators are not touched.
    value_1 = begin + lane + offset
    value_1 = value_1.to(tl.int32) ^ ((value_1 >> 32).to(tl.int32) * 625341585)
    value_1 = (value_1 ^ key) ^ 714576144
    value_1 = (value_1 ^ ((value_1 >> 16) & 65535)) * 2146121005
    value_1 = (value_1 ^ ((value_1 >> 15) & 131071)) * -2073254261
    random_bits = (value_1 >> 16) & 65535
    # round_stochastically: Round float32 to bfloat16, up or down in proportion to what is nearer: unbiased.
    value_1 = (value == value) & (tl.abs(value) != float("inf"))
    value_2 = ((value.to(tl.int32, bitcast=True) + random_bits) & -65536).to(tl.float32, bitcast=True)
    param = tl.where(value_1, value_2, value).to(tl.bfloat16).to(tl.float32)
    # random_bits: Return 16 random bits per element, from a counter: torch's generators are not touched.
    value = begin + lane + offset
    value = value.to(tl.int32) ^ ((value >> 32).to(tl.int32) * 625341585)
    value = (value ^ key) ^ 713639735
    value = (value ^ ((value >> 16) & 65535)) * 2146121005
    value = (value ^ ((value >> 15) & 131071)) * -2073254261
    random_bits = (value >> 16) & 65535
    # round_stochastically: Round float32 to bfloat16, up or down in proportion to what is nearer: unbiased.
    value = (exp_avg == exp_avg) & (tl.abs(exp_avg) != float("inf"))
    value_1 = ((exp_avg.to(tl.int32, bitcast=True) + random_bits) & -65536).to(tl.float32, bitcast=True)
    # random_bits: Return 16 random bits per element, from a counter: torch's generators are not touched.
    value_2 = begin + lane + offset
    value_2 = value_2.to(tl.int32) ^ ((value_2 >> 32).to(tl.int32) * 625341585)
    value_2 = (value_2 ^ key) ^ -1312175495
    value_2 = (value_2 ^ ((value_2 >> 16) & 65535)) * 2146121005
    value_2 = (value_2 ^ ((value_2 >> 15) & 131071)) * -2073254261
    random_bits = (value_2 >> 16) & 65535
    # round_stochastically: Round float32 to bfloat16, up or down in proportion to what is nearer: unbiased.
    value_2 = (exp_avg_sq == exp_avg_sq) & (tl.abs(exp_avg_sq) != float("inf"))
    value_3 = ((exp_avg_sq.to(tl.int32, bitcast=True) + random_bits) & -65536).to(tl.float32, bitcast=True)
    exp_avg = tl.where(value, value_1, exp_avg).to(tl.bfloat16).to(tl.float32)
    exp_avg_sq = tl.where(value_2, value_3, exp_avg_sq).to(tl.bfloat16).to(tl.float32)

    tl.store(param_ptr + lane, param.to(tl.bfloat16), mask)
    tl.store(exp_avg_ptr + lane, exp_avg.to(tl.bfloat16), mask)
    tl.store(exp_avg_sq_ptr + lane, exp_avg_sq.to(tl.bfloat16), mask)


@triton.jit
def adamw(
    segments, segment_of_chunk, numbers, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Update BLOCK elements of one segment."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    segment = tl.load(segment_of_chunk + first // CHUNK)
    row = segments + segment * 6
    begin = first - tl.multiple_of(tl.load(row), CHUNK)
    rest = tl.load(row + 1) - begin
    param_ptr = stream(row + 2, begin, tl.bfloat16, ALIGNMENT)
    grad_ptr = stream(row + 3, begin, tl.bfloat16, ALIGNMENT)
    exp_avg_ptr = stream(row + 4, begin, tl.bfloat16, ALIGNMENT)
    exp_avg_sq_ptr = stream(row + 5, begin, tl.bfloat16, ALIGNMENT)
    numbers += segment * 9
    one_minus_lr_weight_decay = tl.load(numbers + 0).to(tl.float32)
    one_minus_beta1 = tl.load(numbers + 1).to(tl.float32)
    beta2 = tl.load(numbers + 2).to(tl.float32)
    one_minus_beta2 = tl.load(numbers + 3).to(tl.float32)
    bias_correction2_sqrt = tl.load(numbers + 4).to(tl.float32)
    eps = tl.load(numbers + 5).to(tl.float32)
    step_size = tl.load(numbers + 6).to(tl.float32)
    offset = tl.load(numbers + 7).to(tl.int64)
    key = tl.load(numbers + 8).to(tl.int32)
    lane = tl.arange(0, BLOCK)
    if rest >= BLOCK:
        adamw_block(
            param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, one_minus_lr_weight_decay,
            one_minus_beta1, beta2, one_minus_beta2, bias_correction2_sqrt, eps, step_size,
            offset, key, begin, lane, lane < BLOCK,
        )
    else:
        adamw_block(
            param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, one_minus_lr_weight_decay,
            one_minus_beta1, beta2, one_minus_beta2, bias_correction2_sqrt, eps, step_size,
            offset, key, begin, lane, lane < rest,
        )
