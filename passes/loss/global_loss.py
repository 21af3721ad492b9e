"""Sum up over the ranks what their losses are divided by, and average the losses themselves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.graph import Builder, is_backward, is_of_batch, move_to_front
from zerofx.ir.interface import placeholders
from zerofx.ir.reach import reached
from zerofx.ir.roles import Role, role
from zerofx.passes.base import Counts, PassContext

aten = torch.ops.aten


def global_loss(gm: fx.GraphModule, ctx: PassContext) -> Counts:
    """Turn ``over_ranks`` into collectives: of all counts one, of all results another.

    Before::

        a = zerofx.over_ranks(count, "sum");  ...;  b = zerofx.over_ranks(loss, "mean")

    After::

        start = zerofx.all_reduce_start(cat([count, ...]), "sum");  ...
        a = select(zerofx.wait(start), 0, 0);  ...;  start_1 = zerofx.all_reduce_start(loss, "mean")
        ...;  b = zerofx.wait(start_1)

    Once it is known how many ranks have data, behind forward at the latest, the call ends if none
    has: ``zerofx.end_without_data(a)``.

    Statistics of batch norms are sums too, each in a collective of its own.

    What is counted in the batch alone is known before forward, which hides the collective: what is
    computed of it moves to its first reader.  Counts that forward computes are summed up where they
    are; nothing waits for a result but the end.
    """
    graph, builder = gm.graph, Builder(gm, "global_loss", ctx.table)
    marked = graph.find_nodes(op="call_function", target=ops.over_ranks)
    sums = [node for node in marked if node.args[1] == "sum"]
    early = [node for node in sums if is_of_batch(node) and not _of_others(node)]
    move_to_front(graph, early)
    _compute_late(graph, early)
    late = [node for node in sums if node not in early]
    results = [node for node in marked if node.args[1] == "mean"]
    groups = [*filter(None, (early, *([node] for node in late), results))]
    for together in groups:
        _reduce(builder, ctx, together)
    return {"counts": len(sums), "returned": len(results), "collectives": len(groups)}


def _compute_late(graph: fx.Graph, sums: Sequence[fx.Node]) -> None:
    """Move what is computed of sums to its first reader: until then nothing waits for them."""
    of_sums = set(sums)
    for node in graph.nodes:
        is_small = node.op == "call_function" and role(node) == Role.LOSS_COUNT
        if is_small and node.target is not ops.over_ranks and of_sums & {*node.all_input_nodes}:
            of_sums.add(node)
    for node in sorted(of_sums.difference(sums), reverse=True):
        if node.users:
            min(node.users).prepend(node)


def _of_others(node: fx.Node) -> bool:
    """Return whether a value is computed of what is summed up before it."""
    read = reached(node.all_input_nodes, lambda reader: reader.all_input_nodes)
    return any(one.target is ops.over_ranks for one in read)


def _reduce(builder: Builder, ctx: PassContext, nodes: Sequence[fx.Node]) -> None:
    """One collective for values of any shape, as soon as the last of them is there."""
    nodes = sorted(nodes)
    reduction = nodes[0].args[1]
    counts = reduction == "sum"
    of = role(nodes[0]) or Role.STATISTICS
    origin = {"role": of if counts else Role.LOSS_VALUE, "like": nodes[0]}
    after = max(node.args[0] for node in nodes)
    last = max(after, placeholders(builder.graph)[-1])
    dtypes = {node.meta["val"].dtype for node in nodes}
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    with builder.before(last.next, **origin) as call:
        parts = []
        for node in nodes:
            value = node.args[0]
            if value.meta["val"].dtype != dtype:
                value = call(aten._to_copy.default, value, dtype=dtype)
            parts.append(call(aten.view.default, value, [value.meta["val"].numel()]))
        flat = call(aten.cat.default, parts)
        start = call(ops.all_reduce_start, flat, reduction, **ctx.mesh.over_all)
    users = [user for node in nodes for user in node.users]
    ranks = [node for node in nodes if node.args[0].target is ops.has_data]
    backward = (
        next((node for node in builder.graph.nodes if is_backward(node)), None) if ranks else None
    )
    first = min(filter(None, [builder.graph.output_node(), backward, *users]))
    with builder.before(first, **origin) as call:
        total, begin = call(ops.wait, start), 0
        for node in nodes:
            value = node.meta["val"]
            part = call(aten.slice.Tensor, total, 0, begin, begin + value.numel())
            part = call(aten.view.default, part, list(value.shape))
            if value.dtype != dtype:
                part = call(aten._to_copy.default, part, dtype=value.dtype)
            elif not counts:
                part = call(aten.clone.default, part)  # a result has memory of its own
            if node in ranks:
                call(ops.end_without_data, part)
            node.replace_all_uses_with(part)
            builder.graph.erase_node(node)
            begin += value.numel()
