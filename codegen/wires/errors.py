"""Add to gradients what their wires have lost before, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zerofx.codegen.wires.sums import values_of

Ranges = Sequence[tuple[int, int]]


def corrected(flat: Tensor, error: Tensor, ranges: Ranges, scale: Tensor | None = None) -> Tensor:
    """Return float32 values and errors, times ``scale``, in these ranges, and zeros besides.

    Shapes: [n], [m] -> [m], with m at least n.
    """
    result = torch.zeros_like(error)
    for start, stop in ranges:
        part = error[start:stop]
        into = result[start:stop]
        into.copy_(part if scale is None else part * scale)
        into.add_(flat[start:stop].to(torch.float32))
    return result


def rounding_error(
    exact: Tensor, wire: Tensor, code: str, parts: int, scale: Tensor | None = None
) -> Tensor:
    """Return what a wire has lost of float32 values, divided by ``scale``; 0 for what is no number.

    Shapes: [parts * n] -> [parts * n].
    """
    lost = exact - values_of(wire, code, exact.numel() // parts, parts)
    if scale is not None:
        lost.div_(scale)
    return lost.nan_to_num_(0.0, 0.0, 0.0)


def keep(
    error: Tensor,
    rest: Tensor,
    sums: Sequence[Tensor],
    begin: int,
    num_ranks: int,
    ranges: Ranges,
    found_inf: Tensor | None = None,
) -> None:
    """Write to ``error``, in these ranges, what is left over now: unless ``found_inf`` is set.

    ``sums`` are errors of means over ``num_ranks``, of elements that begin with ``begin``.
    """
    if sums:
        rest = rest.clone()
    for lost in sums:
        rest[begin : begin + lost.numel()].add_(lost, alpha=num_ranks)
    for start, stop in ranges:
        new = rest[start:stop]
        if found_inf is not None:
            new = torch.where(found_inf.bool().reshape(()), error[start:stop], new)
        error[start:stop].copy_(new)
