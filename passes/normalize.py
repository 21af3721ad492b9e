"""Put a captured program into the form that passes expect, without changing what it computes.

Functionalisation leaves ``copy`` where the user wrote in place, and reads parameters only for
their shape.  Passes would have to see through each.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliases import aliases, is_view, memory_of
from zerofx.ir.graph import Builder, erase_unused
from zerofx.ir.interface import input_role, placeholders
from zerofx.passes.base import Counts, PassContext

aten = torch.ops.aten


def normalize(gm: fx.GraphModule, ctx: PassContext) -> Counts:
    """Drop copies into fresh memory, no-ops and reads of a mere shape; write what is assigned.

    Before::

        e = empty_like(p);  c = copy(e, x + 1);  w = copy_(q, q);  s = set_(r, y)

    After: ``x + 1`` is read for ``c``, ``q`` for ``w``, and ``p`` by nothing; ``s = copy_(r, y)``.
    An update of what is read later, and is no parameter itself, is one of a clone.
    """
    before = len(gm.graph.nodes)
    _write_assigned_data(gm)
    shapes = _detach_shapes_from_parameters(gm)
    _drop_copies(gm)
    dropped = before - len(gm.graph.nodes)
    _clone_what_is_read_later(gm)
    return {"shapes": shapes, "dropped": dropped}


def _clone_what_is_read_later(gm: fx.GraphModule) -> None:
    """``optimizer_step([y], ...)``, ``y`` -> ``optimizer_step([clone(y)], ...)``, ``y``.

    Updates will write to their operands, which are parameters, or what was written to one before,
    or to several: an update each has memory of its own.
    """
    builder = Builder(gm, "normalize")
    for step in gm.graph.find_nodes(op="call_function", target=ops.optimizer_step):
        operands = list(step.args[0])
        for position, operand in enumerate(operands):
            if any(source.op == "placeholder" for source in memory_of(operand)):
                continue
            same = aliases(operand)
            is_shared = any(one in same or operand in aliases(one) for one in operands[:position])
            if is_shared or any(user > step for alias in same for user in alias.users):
                with gm.graph.inserting_before(step):
                    clone = gm.graph.call_function(aten.clone.default, (operand,))
                clone.meta = dict(operand.meta)
                builder.refresh(clone)
                operands[position] = clone
        step.args = (operands, *step.args[1:])


def _write_assigned_data(gm: fx.GraphModule) -> None:
    """``set_(p, value)``, which is ``p.data = value`` -> ``copy_(p, value)``.

    A parameter and its gradient keep their memory, which may be a shard's.
    """
    for node in gm.graph.find_nodes(op="call_function", target=aten.set_.source_Tensor):
        into = node.args[0]
        if into.op == "placeholder" and input_role(into).parameter >= 0:
            node.target = aten.copy_.default


def _detach_shapes_from_parameters(gm: fx.GraphModule) -> int:
    """``empty_like(parameter)`` -> ``empty_strided(...)``: it reads no values."""
    detached = 0
    fills = {aten.zeros_like.default: 0, aten.ones_like.default: 1}
    builder = Builder(gm, "normalize")
    for parameter in placeholders(gm.graph, "parameter"):
        for node in list(parameter.users):
            if node.target not in (aten.empty_like.default, *fills):
                continue
            value, fill = node.meta["val"], fills.get(node.target)
            layout = (list(value.shape), list(value.stride()))
            options = {"dtype": value.dtype, "device": value.device}
            with gm.graph.inserting_before(node):
                made = [gm.graph.call_function(aten.empty_strided.default, layout, options)]
                if fill is not None:
                    made.append(gm.graph.call_function(aten.fill.Scalar, (*made, fill)))
            for replacement in made:
                replacement.meta = dict(node.meta)
                builder.refresh(replacement)
            node.replace_all_uses_with(made[-1])
            gm.graph.erase_node(node)
            detached += 1
    return detached


def _drop_copies(gm: fx.GraphModule) -> None:
    """``copy(x, y)`` -> ``y`` where both have one dtype, shape and layout and y is no input's."""
    kept = set(placeholders(gm.graph))
    for node in list(gm.graph.nodes):
        if node.target is not aten.copy.default:
            continue
        into, source = node.args[0], node.args[1]
        if _layout(into.meta["val"]) != _layout(source.meta["val"]):
            continue
        if kept & memory_of(source):
            continue  # a copy of an input, which may be written later, must not become its alias
        if into in kept and is_view(source):
            # The new value of an input, which will be updated in place: not a view of another.
            node.target, node.args = aten.clone.default, (source,)
            continue
        node.replace_all_uses_with(source)
        gm.graph.erase_node(node)
        erase_unused(gm.graph, [into])
    _drop_identity_writes(gm)


def _drop_identity_writes(gm: fx.GraphModule) -> None:
    for node in list(gm.graph.nodes):
        if node.target is aten.copy_.default and node.args[0] is node.args[1]:
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
        elif node.target is operator.getitem and not node.users:
            gm.graph.erase_node(node)


def _layout(value: torch.Tensor) -> tuple:
    return value.dtype, value.device, value.shape, value.stride()
