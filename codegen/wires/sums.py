"""Sum what ranks have sent of gradients, in plain torch.  ``ir/wires.py`` has the format."""

from __future__ import annotations

import torch
from torch import Tensor

from zerofx.codegen.wires import blocks
from zerofx.ir.wires import NARROW, check_parts, wire_length


def dequantize_sum(
    received: Tensor, code: str, parts: int, numel: int, divisor: int, dtype: torch.dtype
) -> Tensor:
    """Return the sum of the values of wires of equal parts, divided by ``divisor``.

    They are added in float32, one part behind the other.

    Shapes: [parts * wire_length(numel)] -> [numel].
    Raises: ValueError if what was received is of another length.
    """
    check_parts(parts, received.numel(), wire_length(numel, code))
    total = torch.zeros(numel, dtype=torch.float32, device=received.device)
    for number, wire in enumerate(received.chunk(parts) if numel else ()):
        add = total.copy_ if number == 0 else total.add_
        add(values_of(wire, code, numel))
    if divisor > 1:
        total.div_(divisor)
    return total.to(dtype)


def values_of(wire: Tensor, code: str, numel: int, parts: int = 1) -> Tensor:
    """Return the float32 values of a wire of gradients."""
    if code == NARROW:
        return wire.to(torch.float32)
    return blocks.dequantize(wire, code, parts, numel, torch.float32)
