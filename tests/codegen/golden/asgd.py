"""ASGD's update of flat shards, in one pass over memory.

Made by zerofx.codegen from the optimizer's own step.  An element moves 16 bytes:

    param: float32, read and written
    grad: float32, read
    ax: float32, written

The host computes once a step, for each segment:

    weight_decay
    one_minus_eta_value_lambd = 1 - eta_value*lambd
    eta_value
"""

import triton
import triton.language as tl


@triton.jit
def stream(address, begin, dtype: tl.constexpr, ALIGNMENT: tl.constexpr):
    """The address of a segment's stream, from the block's first element on."""
    return tl.multiple_of(tl.load(address).to(tl.pointer_type(dtype)), ALIGNMENT) + begin


@triton.jit
def asgd_block(
    param_ptr, grad_ptr, ax_ptr, weight_decay, one_minus_eta_value_lambd, eta_value,
    lane, mask,
):
    """Update one block; ``lane`` counts its elements."""
    param = tl.load(param_ptr + lane, mask)
    grad = tl.load(grad_ptr + lane, mask)

    # asgd.py:250: grad = grad.add(param, alpha=weight_decay)
    grad = grad + weight_decay * param
    # asgd.py:257: param.mul_(1 - lambd * eta_value)
    param = param * one_minus_eta_value_lambd
    # asgd.py:258: param.add_(grad, alpha=-eta_value)
    param = param - eta_value * grad

    tl.store(param_ptr + lane, param, mask)
    tl.store(ax_ptr + lane, param, mask)


@triton.jit
def asgd(
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
    ax_ptr = stream(row + 4, begin, tl.float32, ALIGNMENT)
    numbers += segment * 3
    weight_decay = tl.load(numbers + 0).to(tl.float32)
    one_minus_eta_value_lambd = tl.load(numbers + 1).to(tl.float32)
    eta_value = tl.load(numbers + 2).to(tl.float32)
    lane = tl.arange(0, BLOCK)
    if rest >= BLOCK:
        asgd_block(
            param_ptr, grad_ptr, ax_ptr, weight_decay, one_minus_eta_value_lambd, eta_value,
            lane, lane < BLOCK,
        )
    else:
        asgd_block(
            param_ptr, grad_ptr, ax_ptr, weight_decay, one_minus_eta_value_lambd, eta_value,
            lane, lane < rest,
        )
