"""Puts updates into one ``update_together``: what the passes that fuse updates share."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import fx

from zerofx.ir import ops
from zerofx.ir.interface import STANDS_FOR
from zerofx.ir.offload import operands_of_updates
from zerofx.ir.roles import Provenance, Role, bucket_of


def is_update_alone(node: fx.Node) -> bool:
    """Return whether a node runs the update of one parameter."""
    is_update = node.target in (ops.update, ops.update_together)
    return is_update and len(operands_of_updates(node)) == 1


def run_together(
    graph: fx.Graph,
    updates: Sequence[fx.Node],
    inserted_by: str,
    gradient: fx.Node | None = None,
    squares: Any = None,
    **arguments: Any,
) -> fx.Node:
    """Replace updates alone, which have all but their tensors in common, by one node behind them.

    ``gradient`` takes the place of the one update's own; ``squares`` is the metadata of a sum of
    squares, for updates that get a norm here; ``arguments`` are added to what they have.
    """
    first, last = updates[0], updates[-1]
    pieces = [piece for update in updates for piece in operands_of_updates(update)]
    values, parameters = [piece.value for piece in pieces], [piece.parameter for piece in pieces]
    gradients = [gradient or piece.gradient for piece in pieces]
    given = (values, gradients, first.args[2], parameters, *first.args[4:])
    if first.target is ops.update_together and len(first.meta["val"]) == 2:
        squares = first.meta["val"][1]
    with graph.inserting_after(last):
        together = graph.create_node(
            "call_function",
            ops.update_together,
            given,
            {**first.kwargs, **arguments},
            name="updates" if len(updates) > 1 else first.name,
        )
    together.meta = {key: first.meta[key] for key in _KEPT if key in first.meta}
    together.meta["val"] = [value.meta["val"] for value in values]
    together.meta["val"] += [] if squares is None else [squares] * len(values)
    together.meta[STANDS_FOR] = first.meta.get(STANDS_FOR, first.name)
    alone = len(updates) == 1
    parameter = parameters[0] if alone else -1
    bucket = -1 if alone or len(set(map(bucket_of, values))) > 1 else bucket_of(values[0])
    together.meta["zerofx"] = Provenance(Role.UPDATE, parameter, inserted_by, bucket)
    for position, update in reversed(list(enumerate(updates))):
        if update.target is ops.update:
            if update.users:
                update.replace_all_uses_with(result_of(together, position))
        else:
            for part in list(update.users):  # its value, or its squares
                place = position if part.args[1] == 0 else len(updates) + position
                part.replace_all_uses_with(result_of(together, place))
                graph.erase_node(part)
        graph.erase_node(update)
    return together


_KEPT = ("stack_trace", "autograd_backward", "nn_module_stack", "zerofx_work")


def result_of(together: fx.Node, position: int) -> fx.Node:
    """Insert one of the results behind what runs updates together."""
    parameters = together.args[3]
    is_value = position < len(parameters)
    parameter = parameters[position % len(parameters)]
    inserted_by = together.meta["zerofx"].inserted_by
    with together.graph.inserting_after(together):
        part = together.graph.call_function(operator.getitem, (together, position))
    part.meta["val"] = together.meta["val"][position]
    role = Role.UPDATED if is_value else Role.SQUARES
    part.meta["zerofx"] = Provenance(role, parameter, inserted_by)
    return part
