"""SGD's update of flat shards, in one pass over memory.

Made by zerofx.codegen from the optimizer's own step.  An element moves 20 bytes:

    param: float32, read and written
    grad: float32, read
    momentum_buffer: float32, read and written

The host computes once a step, for each segment:

    weight_decay
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
def sgd_block(
    param_ptr, grad_ptr, momentum_buffer_ptr, weight_decay, momentum, lr, lane, mask,
):
    """Update one block; ``lane`` counts its elements."""
    param = tl.load(param_ptr + lane, mask)
    grad = tl.load(grad_ptr + lane, mask)
    momentum_buffer = tl.load(momentum_buffer_ptr + lane, mask)

    # sgd.py:344: grad = grads[i] if not maximize else -grads[i]
    grad = -grad
    # sgd.py:355: grad = grad.add(param, alpha=weight_decay)
    grad = grad + weight_decay * param
    # sgd.py:364: buf.mul_(momentum).add_(grad, alpha=1 - dampening)
    momentum_buffer = momentum_buffer * momentum + grad
    # sgd.py:367: grad = grad.add(buf, alpha=momentum)
    grad = grad + momentum * momentum_buffer
    # sgd.py:379: param.add_(grad, alpha=-lr)
    param = param - lr * grad

    tl.store(param_ptr + lane, param, mask)
    tl.store(momentum_buffer_ptr + lane, momentum_buffer, mask)


@triton.jit
def sgd(
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
    momentum_buffer_ptr = stream(row + 4, begin, tl.float32, ALIGNMENT)
    numbers += segment * 3
    weight_decay = tl.load(numbers + 0).to(tl.float32)
    momentum = tl.load(numbers + 1).to(tl.float32)
    lr = tl.load(numbers + 2).to(tl.float32)
    lane = tl.arange(0, BLOCK)
    if rest >= BLOCK:
        sgd_block(
            param_ptr, grad_ptr, momentum_buffer_ptr, weight_decay, momentum, lr, lane,
            lane < BLOCK,
        )
    else:
        sgd_block(
            param_ptr, grad_ptr, momentum_buffer_ptr, weight_decay, momentum, lr, lane,
            lane < rest,
        )
