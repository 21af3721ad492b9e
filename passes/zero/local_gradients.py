"""Gradients that are not averaged yet between calls, over all ranks or a mesh's outer axis.

With ``accumulate="local"`` they stay each rank's own: ``p.grad`` holds a value whose *mean over the
ranks* is the gradient.  An average is such a value too, so whatever an earlier call has left can be
added to.  With stage 1 on the outer axis it holds this rank's shard of the sum over the inner one.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliases import aliased_inputs, mutated_inputs
from zerofx.ir.graph import Builder
from zerofx.ir.interface import input_role, placeholders, recorded, set_input_role, written_input
from zerofx.ir.roles import Role
from zerofx.passes.base import PassContext
from zerofx.passes.schedule.placement import hoist

aten = torch.ops.aten


def take_in_unreduced(graph: fx.Graph, over: str) -> int:
    """Let gradients come in that are not averaged over these axes; return how many.

    Before::

        u = zerofx.optimizer_step([p], [gradient_p], 1)

    After::

        g = zerofx.gradient(gradient_p, 0);  u = zerofx.optimizer_step([p], [g], 1)
    """
    inputs = placeholders(graph, "gradient")
    for node in inputs:
        set_input_role(node, replace(input_role(node), unreduced=over))
        if not any(_reads(user, node) for user in node.users):
            continue
        with graph.inserting_before(placeholders(graph)[-1].next):
            marker = graph.call_function(ops.gradient, (node, input_role(node).parameter))
        marker.meta = dict(node.meta)
        del marker.meta["zerofx_input"]
        node.replace_all_uses_with(marker, lambda user, node=node: _reads(user, node))
    return len(inputs)


def _reads(user: fx.Node, node: fx.Node) -> bool:
    """Return whether the reader wants the value, and not the object or a place to write to."""
    if user.target is ops.gradient or user.op == "output":
        return False
    return user.target is not aten.copy_.default or user.args[0] is not node


def leave_unreduced(gm: fx.GraphModule, ctx: PassContext, over: str) -> int:
    """Let gradients that nobody reads leave as they are; return how many.

    Before::

        g = zerofx.gradient(add(gradient_p, mm), 0);  copy_(gradient_p, g)

    After::

        g = add_(gradient_p, mm)

    What is written to a gradient that came in becomes a result of the program instead, one that
    the runtime keeps: what came in is whole, and what replaces it may be a shard.
    """
    graph, builder = gm.graph, Builder(gm, "data_parallel", ctx.table)
    output = graph.output_node()
    slots = recorded(graph).gradients
    unreduced: dict[fx.Node, None] = {}
    for marker in [node for node in graph.nodes if node.target is ops.gradient]:
        local, parameter = marker.args
        writes = [
            user
            for user in marker.users
            if (into := written_input(user)) is not None
            and (into.kind, into.parameter) == ("gradient", parameter)
        ]
        places = [place for place, result in enumerate(output.args[0]) if result is marker]
        others = [user for user in marker.users if user not in writes and user is not output]
        if others or not marker.users or any(slots.get(place) != parameter for place in places):
            continue
        marker.replace_all_uses_with(local)
        graph.erase_node(marker)
        for write in writes:
            unreduced[_add_in_place(builder, write, parameter)] = None
        if not writes:
            unreduced[local] = None
    _keep_what_is_written(graph, unreduced)
    # Whole averages, of stages 0 and 1, are kept alike: the next call may add to them.
    whole_averages = ctx.options.stage < 2
    recorded(graph).unreduced |= {
        position: over
        for position in slots
        if whole_averages or output.args[0][position] in unreduced
    }
    return len(unreduced)


def _add_in_place(builder: Builder, write: fx.Node, parameter: int) -> fx.Node:
    """``copy_(g, add(add(g, a), b))`` -> ``add_(add_(g, a), b)``; return the last write.

    Each addend is gone once it has been added, as in eager torch.
    """
    into, source = write.args
    chain = []
    while _is_plain_sum(source):
        chain.append(source)
        source = source.args[0]
    if source is not into or set(into.users) != {write, chain[-1] if chain else write}:
        return write
    total = into
    for node in reversed(chain):
        addend = node.args[1]
        with builder.before(node, role=Role.ACCUMULATE, parameter=parameter) as call:
            total = call(aten.add_.Tensor, total, addend)
        hoist(total, _is_view)
    write.replace_all_uses_with(total)
    builder.graph.erase_node(write)
    for node in chain:
        builder.graph.erase_node(node)
    return total


def _is_plain_sum(node: fx.Node) -> bool:
    return (
        node.target is aten.add.Tensor
        and node.kwargs.get("alpha", 1) == 1
        and all(isinstance(term, fx.Node) for term in node.args)
        and len(node.users) == 1
        and node.meta["val"].dtype == node.args[0].meta["val"].dtype
        and node.meta["val"].shape == node.args[0].meta["val"].shape
    )


def _is_view(node: fx.Node) -> bool:
    return bool(aliased_inputs(node)) and not mutated_inputs(node)


def _keep_what_is_written(graph: fx.Graph, unreduced: dict[fx.Node, None]) -> None:
    """Make results of what the step writes to gradients that came in, but their sums.

    Where the step then sets ``p.grad`` to another tensor, nobody can see what was written.
    """
    output = graph.output_node()
    results = list(output.args[0])
    slots, written = recorded(graph).gradients, recorded(graph).written_gradients
    for node in [n for n in graph.nodes if n.target is aten.copy_.default]:
        into, source = node.args
        if node in unreduced or into.op != "placeholder" or not input_role(into).unreduced:
            continue
        results = [into if result is node else result for result in results]
        parameter = input_role(into).parameter
        if not any(
            slots[position] == parameter and results[position] is not into for position in slots
        ):
            written[len(results)] = parameter
            results.append(source)
        node.replace_all_uses_with(into)
        graph.erase_node(node)
    output.args = (tuple(results),)
