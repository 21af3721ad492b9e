"""AdamW's update of flat shards, in one pass over memory.

Made by zerofx.codegen from the optimizer's own step.  An element moves 18.0625 bytes:

    param: bfloat16, read and written
    grad: bfloat16, read
    exp_avg: int8, read and written
    exp_avg_sq: int8, read and written
    master: float32, read and written
    exp_avg_scale: float32, read and written, one for 256
    exp_avg_sq_scale: float32, read and written, one for 256

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
def of_part(x):
    """For each element what its part of 256 has."""
    return tl.broadcast_to(x[:, None], x.numel, 256).reshape(x.numel * 256)


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
def largest_of_part(x, mask):
    """The largest of each part's 256 elements; NaN if one is."""
    parts = tl.where(mask, x, float("-inf")).reshape(x.numel // 256, 256)
    return tl.reduce(parts, 1, maximum)


@triton.jit
def minimum(x, y):
    """torch.minimum: NaN if either is."""
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def adamw_block(
    param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, master_ptr, exp_avg_scale_ptr,
    exp_avg_sq_scale_ptr, one_minus_lr_weight_decay, one_minus_beta1, beta2,
    one_minus_beta2, bias_correction2_sqrt, eps, step_size, offset, key, begin, lane,
    mask, part, part_mask,
):
    """Update one block; ``lane`` counts its elements, ``part`` its parts of 256."""
    param = tl.load(param_ptr + lane, mask).to(tl.float32)
    grad = tl.load(grad_ptr + lane, mask).to(tl.float32)
    exp_avg = tl.load(exp_avg_ptr + lane, mask)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + lane, mask)
    master = tl.load(master_ptr + lane, mask)
    exp_avg_scale = tl.load(exp_avg_scale_ptr + part, part_mask)
    exp_avg_sq_scale = tl.load(exp_avg_sq_scale_ptr + part, part_mask)

    # resume_master: A parameter's value before an update: its master's, unless somebody has written to it.
    value = master.to(tl.int32, bitcast=True)
    value = value + 32767 + ((value >> 16) & 1)
    resume_master = tl.where((value & -65536) == param.to(tl.int32, bitcast=True), master, param)
    # decode_blocks: Return the float32 values of int8 codes: ``scale * (code / 127)**4``, with the code's sign.
    value = exp_avg.to(tl.float32) * 0.007874015748031496
    value_1 = value * value
    value = tl.where(value < 0, -value_1, value_1) * value_1
    decode_blocks = value * of_part(exp_avg_scale)
    value = exp_avg_sq.to(tl.float32) * 0.007874015748031496
    value_1 = value * value
    value = tl.where(value < 0, -value_1, value_1) * value_1
    decode_blocks_1 = value * of_part(exp_avg_sq_scale)
    # adam.py:419: param.mul_(1 - lr * weight_decay)
    param = resume_master * one_minus_lr_weight_decay
    # adam.py:456: exp_avg.lerp_(grad, 1 - device_beta1)
    exp_avg = lerp(decode_blocks, grad, one_minus_beta1)
    # adam.py:475: exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    exp_avg_sq = decode_blocks_1 * beta2 + one_minus_beta2 * grad * grad
    # adam.py:544: denom = (exp_avg_sq.sqrt() / bias_correction2_sqrt).add_(eps)
    denom = tl.div_rn(tl.sqrt_rn(exp_avg_sq), bias_correction2_sqrt) + eps
    # adam.py:546: param.addcdiv_(exp_avg, denom, value=-step_size)
    master = param - step_size * tl.div_rn(exp_avg, denom)
    param = master.to(tl.bfloat16).to(tl.float32)
    # scale_of: The scale of each block: its largest magnitude.  Shapes: [blocks, n] -> [blocks].
    exp_avg_scale = largest_of_part(tl.abs(exp_avg), mask)
    # random_bits: Return 16 random bits per element, from a counter: torch's generators are not touched.
    value = begin + lane + offset
    value = value.to(tl.int32) ^ ((value >> 32).to(tl.int32) * 625341585)
    value = (value ^ key) ^ 713639735
    value = (value ^ ((value >> 16) & 65535)) * 2146121005
    value = (value ^ ((value >> 15) & 131071)) * -2073254261
    random_bits = (value >> 16) & 65535
    # encode_blocks: Return the int8 codes of float32 values; which of two levels, at random: unbiased.
    value = of_part(exp_avg_scale)
    value = tl.where(value > 0, tl.div_rn(tl.abs(exp_avg), value), 0.0)
    value_1 = tl.floor(tl.sqrt_rn(tl.sqrt_rn(value)) * 127)
    value_1 = minimum(value_1, 126)
    value_2 = value_1 * 0.007874015748031496
    value_2 = value_2 * value_2
    value_2 = value_2 * value_2
    value_3 = (value_1 + 1) * 0.007874015748031496
    value_3 = value_3 * value_3
    value_3 = random_bits.to(tl.float32) * 1.52587890625e-05 * (value_3 * value_3 - value_2)
    value_1 = tl.where((value - value_2) > value_3, value_1 + 1, value_1)
    value = tl.where(value > 0, maximum(value_1, 1), value_1)
    exp_avg = tl.where(exp_avg < 0, -value, value).to(tl.int8)
    # scale_of: The scale of each block: its largest magnitude.  Shapes: [blocks, n] -> [blocks].
    exp_avg_sq_scale = largest_of_part(tl.abs(exp_avg_sq), mask)
    # random_bits: Return 16 random bits per element, from a counter: torch's generators are not touched.
    value = begin + lane + offset
    value = value.to(tl.int32) ^ ((value >> 32).to(tl.int32) * 625341585)
    value = (value ^ key) ^ -1312175495
    value = (value ^ ((value >> 16) & 65535)) * 2146121005
    value = (value ^ ((value >> 15) & 131071)) * -2073254261
    random_bits = (value >> 16) & 65535
    # encode_blocks: Return the int8 codes of float32 values; which of two levels, at random: unbiased.
    value = of_part(exp_avg_sq_scale)
    value = tl.where(value > 0, tl.div_rn(tl.abs(exp_avg_sq), value), 0.0)
    value_1 = tl.floor(tl.sqrt_rn(tl.sqrt_rn(value)) * 127)
    value_1 = minimum(value_1, 126)
    value_2 = value_1 * 0.007874015748031496
    value_2 = value_2 * value_2
    value_2 = value_2 * value_2
    value_3 = (value_1 + 1) * 0.007874015748031496
    value_3 = value_3 * value_3
    value_3 = random_bits.to(tl.float32) * 1.52587890625e-05 * (value_3 * value_3 - value_2)
    value_1 = tl.where((value - value_2) > value_3, value_1 + 1, value_1)
    value = tl.where(value > 0, maximum(value_1, 1), value_1)
    exp_avg_sq = tl.where(exp_avg_sq < 0, -value, value).to(tl.int8)

    tl.store(param_ptr + lane, param.to(tl.bfloat16), mask)
    tl.store(exp_avg_ptr + lane, exp_avg, mask)
    tl.store(exp_avg_sq_ptr + lane, exp_avg_sq, mask)
    tl.store(master_ptr + lane, master, mask)
    tl.store(exp_avg_scale_ptr + part, exp_avg_scale, part_mask)
    tl.store(exp_avg_sq_scale_ptr + part, exp_avg_sq_scale, part_mask)


@triton.jit
def adamw(
    segments, segment_of_chunk, numbers, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Update BLOCK elements of one segment."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    segment = tl.load(segment_of_chunk + first // CHUNK)
    row = segments + segment * 9
    begin = first - tl.multiple_of(tl.load(row), CHUNK)
    rest = tl.load(row + 1) - begin
    param_ptr = stream(row + 2, begin, tl.bfloat16, ALIGNMENT)
    grad_ptr = stream(row + 3, begin, tl.bfloat16, ALIGNMENT)
    exp_avg_ptr = stream(row + 4, begin, tl.int8, ALIGNMENT)
    exp_avg_sq_ptr = stream(row + 5, begin, tl.int8, ALIGNMENT)
    master_ptr = stream(row + 6, begin, tl.float32, ALIGNMENT)
    exp_avg_scale_ptr = stream(row + 7, begin // 256, tl.float32, 4)
    exp_avg_sq_scale_ptr = stream(row + 8, begin // 256, tl.float32, 4)
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
    part = tl.arange(0, BLOCK // 256)
    if rest >= BLOCK:
        adamw_block(
            param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, master_ptr, exp_avg_scale_ptr,
            exp_avg_sq_scale_ptr, one_minus_lr_weight_decay, one_minus_beta1, beta2,
            one_minus_beta2, bias_correction2_sqrt, eps, step_size, offset, key, begin, lane,
            lane < BLOCK, part, part < BLOCK // 256,
        )
    else:
        adamw_block(
            param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, master_ptr, exp_avg_scale_ptr,
            exp_avg_sq_scale_ptr, one_minus_lr_weight_decay, one_minus_beta1, beta2,
            one_minus_beta2, bias_correction2_sqrt, eps, step_size, offset, key, begin, lane,
            lane < rest, part, part * 256 < rest,
        )
