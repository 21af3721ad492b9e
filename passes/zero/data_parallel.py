"""Make the single-device step a data-parallel one: gradients become means over ranks."""

from __future__ import annotations

import operator

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.graph import Builder
from zerofx.ir.interface import mark_gradient
from zerofx.ir.roles import Role
from zerofx.passes.base import Counts, PassContext
from zerofx.passes.schedule.placement import hoist, sink_past_fused, stagger_waits
from zerofx.passes.zero.local_gradients import leave_unreduced, take_in_unreduced
from zerofx.passes.zero.uniformity import check_updates_are_uniform

aten = torch.ops.aten


def data_parallel(gm: fx.GraphModule, ctx: PassContext) -> Counts:
    """Average every gradient over the ranks; at stage 0 also write the update in place.

    Before::

        g = zerofx.gradient(mm, 0)

    After::

        start = zerofx.all_reduce_start(mm, "mean");  g = zerofx.wait(start)

    Gradients that a loop adds up inside the step are averaged once, after the sum, unless
    ``accumulate="sharded"`` asks for each micro-batch.  With ``accumulate="local"`` those that
    a call leaves in ``p.grad`` are not averaged, unless it reads them; the call that does
    averages what has come together.
    """
    check_updates_are_uniform(gm.graph, ctx.table, ctx.world_size)
    counts = {"sums averaged once": 0}
    if ctx.options.accumulate == "local":
        take_in_unreduced(gm.graph)
    if ctx.options.accumulate != "sharded":
        counts["sums averaged once"] = _average_sums_once(gm.graph)
    if ctx.options.accumulate == "local":
        counts["left unreduced"] = leave_unreduced(gm, ctx)
    pairs = _reduce_gradients(gm, ctx)
    for start, _ in pairs:
        for cast in start.all_input_nodes:
            if cast.meta.get("zerofx") and cast.target is aten._to_copy.default:
                hoist(cast)
        hoist(start)
    if ctx.options.stage == 0 and ctx.options.lowering == "inductor":
        for start, _ in sorted(pairs, reverse=True):
            sink_past_fused(start)
    stagger_waits(pairs)
    if ctx.options.stage == 0:
        _update_in_place(gm, ctx)
    return {"averaged": len(pairs), **counts}


def _average_sums_once(graph: fx.Graph) -> int:
    """``gradient(a) + gradient(b)`` -> ``gradient(a + b)`` where neither term is read alone."""
    merged = 0
    for node in list(graph.nodes):
        if node.target is not aten.add.Tensor or node.kwargs.get("alpha", 1) != 1:
            continue
        if len(node.args) != 2 or not all(_is_gradient(term) for term in node.args):
            continue
        left, right = node.args
        if left.args[1] != right.args[1] or len(left.users) > 1 or len(right.users) > 1:
            continue
        with graph.inserting_after(node):
            marker = graph.call_function(ops.gradient, (node, left.args[1]))
        marker.meta = dict(node.meta)
        node.replace_all_uses_with(marker, lambda user, marker=marker: user is not marker)
        node.args = (left.args[0], right.args[0])
        graph.erase_node(left)
        graph.erase_node(right)
        merged += 1
    return merged


def _is_gradient(node) -> bool:
    return isinstance(node, fx.Node) and node.target is ops.gradient


def _reduce_gradients(gm: fx.GraphModule, ctx: PassContext) -> list[tuple[fx.Node, fx.Node]]:
    builder = Builder(gm, "data_parallel", ctx.table)
    pairs = []
    for node in list(gm.graph.nodes):
        if node.target is not ops.gradient:
            continue
        gradient, parameter = node.args
        mark_gradient(gradient, parameter)
        dtype = gradient.meta["val"].dtype
        reduce_dtype = ctx.options.reduce_dtype or dtype
        origin = {"parameter": parameter, "like": node}
        with gm.graph.inserting_before(node):
            if reduce_dtype != dtype:
                gradient = builder.call(
                    aten._to_copy.default,
                    gradient,
                    dtype=reduce_dtype,
                    role=Role.REDUCE_CAST,
                    **origin,
                )
            start = builder.call(
                ops.all_reduce_start, gradient, "mean", role=Role.REDUCE_GRADIENT, **origin
            )
            wait = builder.call(ops.wait, start, role=Role.REDUCE_GRADIENT, **origin)
            averaged = wait
            if reduce_dtype != dtype:
                averaged = builder.call(
                    aten._to_copy.default, wait, dtype=dtype, role=Role.REDUCE_CAST, **origin
                )
        node.replace_all_uses_with(averaged)
        gm.graph.erase_node(node)
        pairs.append((start, wait))
    return pairs


def _update_in_place(gm: fx.GraphModule, ctx: PassContext) -> None:
    """``optimizer_step`` over lists -> one in-place ``update`` per whole parameter."""
    builder = Builder(gm, "data_parallel", ctx.table)
    for step in [node for node in gm.graph.nodes if node.target is ops.optimizer_step]:
        parameters, gradients, optimizer, found_inf, indices = step.args
        results = {user.args[1]: user for user in step.users if user.target is operator.getitem}
        for position, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            index = indices[position]
            with gm.graph.inserting_before(step):
                updated = builder.call(
                    ops.update,
                    parameter,
                    gradient,
                    optimizer,
                    index,
                    found_inf,
                    role=Role.UPDATE,
                    parameter=index,
                    like=step,
                )
            if position in results:
                results[position].replace_all_uses_with(updated)
                gm.graph.erase_node(results[position])
        gm.graph.erase_node(step)
    for node in list(gm.graph.nodes):
        if node.target is aten.copy_.default and _root(node.args[1]) is node.args[0]:
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)


def _root(node: fx.Node) -> fx.Node:
    """The parameter that a chain of in-place updates writes to."""
    while isinstance(node, fx.Node) and node.target is ops.update:
        node = node.args[0]
    return node
