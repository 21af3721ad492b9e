"""Questions about a gradient's way through reductions: over which axes, of what, and in what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.roles import Role, role
from zerofx.ir.wires import CODES, NARROW

aten = torch.ops.aten


@dataclass(frozen=True)
class Hop:
    """One reduction over an axis of ranks.

    ``source`` is what it reduces, or the start itself if that has the gradients of a bucket.
    With a ``code`` it is a sum of wires; ``comes_back`` says that all ranks have gathered it.
    """

    start: fx.Node
    reduction: str
    source: fx.Node
    code: str = ""
    comes_back: bool = False

    @property
    def axis(self) -> str:
        return ops.argument(self.start, "axis")


def code_of(wire: fx.Node) -> str:
    """The code of a gradient's wire; empty for what is none."""
    if role(wire) != Role.GRADIENT_WIRE:
        return ""
    if wire.target is ops.quantize:
        return wire.args[1] if wire.args[1] in CODES else ""
    is_cast = wire.target is aten._to_copy.default
    return NARROW if is_cast and wire.kwargs.get("dtype") is torch.bfloat16 else ""


def gathered_sum(reduced: fx.Node) -> fx.Node | None:
    """The sum that ranks have gathered from each other to this one; None if they have not."""
    if role(reduced) != Role.REDUCE_GRADIENT:
        return None
    values = reduced.args[0] if reduced.target is aten.slice.Tensor else reduced
    if values.target not in (ops.dequantize, aten._to_copy.default):
        return None
    wait = values.args[0]
    if wait.target is not ops.wait or not ops.rules(wait.args[0]).gathers:
        return None
    wire = wait.args[0].args[0]
    return wire.args[0] if code_of(wire) else None


def hop_into(reduced: Any) -> Hop | None:
    """The reduction whose result a node is; None if it is none's."""
    if not isinstance(reduced, fx.Node):
        return None
    if reduced.target is ops.wait and ops.rules(reduced.args[0]).reduces:
        (start,) = reduced.args
        of_buffer = start.target in (ops.reduce_scatter_start, ops.all_reduce_start)
        source = start.args[0] if of_buffer else start
        return Hop(start, ops.argument(start, "reduction"), source)
    total = gathered_sum(reduced)
    summed = reduced if total is None else total
    if summed.target is not ops.dequantize_sum:
        return None
    received, code, _, _, reduction, _ = summed.args
    if received.target is not ops.wait or received.args[0].target is not ops.all_to_all_start:
        return None
    start = received.args[0]
    return Hop(start, reduction, quantised_from(start.args[0]), code, total is not None)


def quantised_from(wire: fx.Node) -> fx.Node:
    """The flat buffer that a gradient's wire is made of."""
    source = wire.args[0] if code_of(wire) else wire
    return source.args[0] if source.target in (ops.fill_up, ops.correct) else source


def hops_into(reduced: Any) -> list[Hop]:
    """The reductions of which a node is the result, each of what the next one made; last first."""
    hops: list[Hop] = []
    while (hop := hop_into(reduced)) is not None:
        hops.append(hop)
        reduced = hop.source
        if reduced is hop.start:
            break
    return hops
