"""Make the single-device step a data-parallel one: gradients become means over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import fx

from zerofx.errors import StepError
from zerofx.ir import ops
from zerofx.ir.graph import Builder
from zerofx.ir.interface import mark_gradient, placeholders, recorded, written_input
from zerofx.ir.parameters import ParameterTable
from zerofx.ir.roles import Role
from zerofx.ir.source import source_line
from zerofx.ir.varying import rank_varying
from zerofx.passes.base import Counts, PassContext
from zerofx.passes.schedule.placement import hoist_reduction, sink_past_fused, stagger_waits
from zerofx.passes.zero.local_gradients import leave_unreduced, take_in_unreduced
from zerofx.passes.zero.updates import compute_on_owners, update_one_by_one, updated_in_place

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
    averages what has come together.  With stage 1 on a mesh's outer axis a call leaves what is
    summed over the inner one, and they average that over the outer one.
    """
    _check_updates_are_uniform(gm.graph, ctx.table, ctx.world_size)
    counts, pairs, mesh = {"sums averaged once": 0}, [], ctx.mesh
    unreduced = _unreduced_between_calls(gm.graph, ctx)
    if unreduced == mesh.everywhere:
        take_in_unreduced(gm.graph, unreduced)
    if ctx.options.accumulate != "sharded":
        counts["sums averaged once"] = _average_sums_once(gm.graph)
    if unreduced and unreduced == mesh.outer:
        pairs = _reduce_marked(gm, ctx, "sum", mesh.over(mesh.inner))
        take_in_unreduced(gm.graph, unreduced)
        counts["sums averaged once"] += _average_sums_once(gm.graph)
    if unreduced:
        counts["left unreduced"] = leave_unreduced(gm, ctx, unreduced)
    pairs += _reduce_marked(gm, ctx, "mean", mesh.over(unreduced or mesh.everywhere))
    for marker in gm.graph.find_nodes(op="call_function", target=ops.gradient):
        marker.replace_all_uses_with(marker.args[0])
        gm.graph.erase_node(marker)
    for start, _ in pairs:
        hoist_reduction(start)
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


def _unreduced_between_calls(graph: fx.Graph, ctx: PassContext) -> str:
    """The axes over which gradients that cross calls are not averaged yet; empty if they are."""
    mesh, crosses = ctx.mesh, placeholders(graph, "gradient") or recorded(graph).gradients
    if ctx.options.accumulate == "local":
        return mesh.everywhere
    return mesh.outer if mesh.outer_stage == 1 and ctx.options.stage >= 2 and crosses else ""


def _reduce_marked(
    gm: fx.GraphModule, ctx: PassContext, reduction: str, over: Mapping[str, str]
) -> list[tuple[fx.Node, fx.Node]]:
    """Reduce what is marked as a gradient, and mark that in its place; return (start, wait)."""
    builder, pairs = Builder(gm, "data_parallel", ctx.table), []
    for marker in gm.graph.find_nodes(op="call_function", target=ops.gradient):
        gradient, parameter = marker.args
        mark_gradient(gradient, parameter)
        dtype = gradient.meta["val"].dtype
        reduce_dtype = ctx.options.reduce_dtype or dtype
        with builder.before(marker, parameter=parameter) as call:
            cast = partial(call, aten._to_copy.default, role=Role.REDUCE_CAST)
            reduce = partial(call, role=Role.REDUCE_GRADIENT)
            if reduce_dtype != dtype:
                gradient = cast(gradient, dtype=reduce_dtype)
            start = reduce(ops.all_reduce_start, gradient, reduction, **over)
            wait = reduced = reduce(ops.wait, start)
            if reduce_dtype != dtype:
                reduced = cast(wait, dtype=dtype)
        marker.args = (reduced, parameter)
        pairs.append((start, wait))
    return pairs


def _update_in_place(gm: fx.GraphModule, ctx: PassContext) -> None:
    """``optimizer_step`` over lists -> one in-place ``update`` per whole parameter."""
    builder = Builder(gm, "data_parallel", ctx.table)
    for step in [node for node in gm.graph.nodes if node.target is ops.optimizer_step]:
        operands = list(zip(*step.args[:2], strict=True))
        owned = compute_on_owners(builder, ctx, step, operands.__getitem__)
        operands = [owned.get(position, pair) for position, pair in enumerate(operands)]
        for result, _, updated in update_one_by_one(builder, step, operands.__getitem__):
            if result is not None:
                result.replace_all_uses_with(updated)
                gm.graph.erase_node(result)
        gm.graph.erase_node(step)
    for node in list(gm.graph.nodes):
        if node.target is aten.copy_.default and updated_in_place(node.args[1]) is node.args[0]:
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)


def _check_updates_are_uniform(graph: fx.Graph, table: ParameterTable, world_size: int) -> None:
    """Refuse an update that each rank would compute from its own batch.

    Under plain data parallelism the ranks' parameters would drift apart in silence.
    Raises: StepError naming the parameter and the line.
    """
    varying = rank_varying(graph, world_size)
    for node in graph.nodes:
        if node.target is ops.optimizer_step:
            _, gradients, _, found_inf, indices = node.args
            if found_inf in varying:
                _refuse("found_inf", found_inf)
            for index, gradient in zip(indices, gradients, strict=True):
                if gradient in varying:
                    _refuse(f"the gradient of {table[index].name!r}", gradient)
        else:
            into = written_input(node)
            if into and into.kind in ("parameter", "gradient") and node.args[1] in varying:
                what = "" if into.kind == "parameter" else "the gradient of "
                _refuse(f"{what}{table[into.parameter].name!r}", node.args[1])
    results = graph.output_node().args[0]
    for position, parameter in recorded(graph).gradients.items():
        if results[position] in varying and results[position].op != "placeholder":
            _refuse(f"the gradient of {table[parameter].name!r}", results[position])


def _refuse(what: str, node: fx.Node) -> None:
    line = source_line(node)
    raise StepError(
        f"{what} is computed from values that differ between ranks (this rank's batch or its size, "
        "a buffer or a random draw), so the ranks' parameters would drift apart. Between "
        "backward() and optimizer.step() use only averaged gradients, parameters and numbers that "
        "are the same on every rank. Make a mask, or another tensor that stays as it is, an "
        "nn.Parameter(mask, requires_grad=False) of the model: all ranks have rank 0's."
        f"{chr(10) + '  at ' + line if line else ''}"
    )
