"""Values that forward saves for backward, and the places where they may be moved away."""

from __future__ import annotations

import operator
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliases import (
    aliased_inputs,
    aliases,
    done_with,
    is_compute,
    memory_of,
    mutated_inputs,
    readers,
)
from zerofx.ir.graph import is_backward, program_order
from zerofx.ir.sizes import hinted_bytes
from zerofx.passes.memory.saved_values import is_fused, made_of_parameters

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Activation:
    """A value that nobody reads from ``leaves`` to ``returns``, and backward reads from there on.

    Both are positions: in front of the program's node of that number.  ``readers`` are those from
    ``returns`` on, of the value or of a view of it.
    """

    value: fx.Node
    nbytes: int
    leaves: int
    returns: int
    readers: tuple[fx.Node, ...]


def saved_activations(graph: fx.Graph, device: torch.device) -> list[Activation]:
    """Find what could leave the device between forward and backward, in program order.

    Of memory that an operator of forward makes for one value: no input, parameter, gathered buffer
    or view.  Left out is what only parameters are computed into (it can be had from them again),
    what is written to, and what the step returns: that stays on the device.  Sizes are those that
    there were when the step was captured.
    """
    order, of_parameters = program_order(graph), made_of_parameters(graph)
    values = [n for n in order if n not in of_parameters and _makes_a_value(n, device)]
    found = (_between_its_readers(node, order) for node in values)
    return [activation for activation in found if activation is not None]


def _makes_a_value(node: fx.Node, device: torch.device) -> bool:
    value = node.meta.get("val")
    if node.op != "call_function" or is_backward(node) or not isinstance(value, torch.Tensor):
        return False
    maker = node.args[0] if node.target is operator.getitem else node
    if not isinstance(maker.target, torch._ops.OpOverload) or ops.is_ours(maker.target):
        return False
    if not value.is_floating_point() and _has_dropout(maker):
        return False  # a seed or its offset, on the CPU whatever the fake one says
    if mutated_inputs(maker) or memory_of(node) - {node, maker} or aliased_inputs(maker):
        return False
    return value.layout is torch.strided and value.device == device and hinted_bytes(node) > 0


def _has_dropout(maker: fx.Node) -> bool:
    return any(argument.name == "dropout_p" for argument in maker.target._schema.arguments)


def _between_its_readers(node: fx.Node, order: dict[fx.Node, int]) -> Activation | None:
    """Return where a value is unread until backward reads it; None if it has to stay."""
    views = aliases(node)
    if not all(view is node or _can_be_taken_again(view) for view in views):
        return None
    found = sorted(readers(node) - views)
    if any(reader.op == "output" or reader.target is ops.free for reader in found):
        return None
    if any(not views.isdisjoint(mutated_inputs(reader)) for reader in found):
        return None
    first = next((order[reader] for reader in found if is_backward(reader)), None)
    if first is None:
        return None
    before = [order[done_with(reader)] for reader in found if order[reader] < first]
    if node.target is operator.getitem:  # the tuple of all results holds them too
        before += [order[part] for part in node.args[0].users]
    leaves = max([order[node], *before]) + 1
    late = tuple(reader for reader in found if order[reader] >= first)
    return Activation(node, hinted_bytes(node), leaves, first, late) if leaves < first else None


def _can_be_taken_again(view: fx.Node) -> bool:
    """Return whether a view can be taken of a copy, wherever that lies in memory."""
    if mutated_inputs(view) or ops.is_ours(view.target) or len(view.all_input_nodes) == 0:
        return False
    tensors = [s for s in view.all_input_nodes if isinstance(s.meta.get("val"), torch.Tensor)]
    return len(tensors) <= 1 and view.target is not aten.as_strided.default


def where_to_cut(
    nodes: Sequence[fx.Node],
    activations: Sequence[Activation],
    times: Sequence[float],
    patience_s: Callable[[Activation], float],
) -> tuple[list[int], list[Activation]]:
    """Positions at which moves cost compiled compute little, and activations brought to them.

    A move parts the compute that Inductor makes one region of.  So it stands where a region ends
    anyway, if there is such a place within an activation's ``patience_s``, or else where all that
    is alive is in memory in any case: made or read by what nothing fuses with, or saved for
    backward.  Which places these are depends on what is computed around them, and equal layers
    have equal ones: they are still compiled once.
    """
    ends = _ends_of_regions(nodes)
    free = sorted({*_unfused_positions(nodes), *ends})
    cuts, kept = set(ends), []
    for activation in activations:
        leaves, returns = activation.leaves, activation.returns
        patience = patience_s(activation)
        at_end, at_free = bisect_left(ends, leaves), bisect_left(free, leaves)
        first = free[at_free] if at_free < len(free) else returns
        if at_end < len(ends) and times[ends[at_end]] <= times[leaves] + patience:
            first = ends[at_end]
        at_end, at_free = bisect_right(ends, returns) - 1, bisect_right(free, returns) - 1
        last = free[at_free] if at_free >= 0 else leaves
        if at_end >= 0 and times[ends[at_end]] >= times[returns] - patience:
            last = ends[at_end]
        if first < last:
            cuts |= {first, last}
            kept.append(replace(activation, leaves=first, returns=last))
    return sorted(cuts), kept


def _ends_of_regions(nodes: Sequence[fx.Node]) -> list[int]:
    """Return the borders between compute and other nodes.

    Updates that follow one another are to stay neighbours: they run as one.
    """
    solid = [is_compute(node) for node in nodes if not _passes_on(node)]
    ends, seen = [], 0
    for position, node in enumerate(nodes):
        if 0 < seen < len(solid) and solid[seen - 1] != solid[seen]:
            ends.append(position)
        seen += not _passes_on(node)
    return ends


def _passes_on(node: fx.Node) -> bool:
    """Return whether a node only looks at memory, or cuts a shard out of it for an update."""
    if node.target in (operator.getitem, ops.take_shard) or node.op == "get_attr":
        return True
    return is_compute(node) and bool(aliased_inputs(node))


def _unfused_positions(nodes: Sequence[fx.Node]) -> Iterator[int]:
    """Return the places where compute can be parted without further writes to memory."""
    order = {node: position for position, node in enumerate(nodes)}
    changes = [0] * (len(nodes) + 1)
    for position, node in enumerate(nodes):
        if not is_compute(node) or node.target is operator.getitem or aliased_inputs(node):
            continue
        found = readers(node) - aliases(node)
        if found and not _is_in_memory(node, found):
            changes[position + 1] += 1
            changes[max(order[reader] for reader in found) + 1] -= 1
    inside = 0
    for position, change in enumerate(changes):
        inside += change
        if not inside:
            yield position


def _is_in_memory(node: fx.Node, found: Collection[fx.Node]) -> bool:
    """Return whether a result is written to memory even if all compute around it is one region."""
    return not is_fused(node) or any(
        not is_compute(reader)
        or not is_fused(reader)
        or (is_backward(reader) and not is_backward(node))
        for reader in found
    )
