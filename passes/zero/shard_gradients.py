"""Stage 2: each rank keeps only its shard of every gradient."""

from __future__ import annotations

from torch import fx

from zerofx.ir import ops
from zerofx.ir.interface import input_role, placeholders
from zerofx.passes.base import Counts, PassContext
from zerofx.passes.schedule.placement import hoist_reduction, place_reductions
from zerofx.passes.zero.propagate import ShardPropagation
from zerofx.passes.zero.shard_optimizer import scatter_gradients, scatter_where_it_lies


def shard_gradients(gm: fx.GraphModule, ctx: PassContext) -> Counts:
    """Reduce-scatter each gradient as soon as backward has it, and keep only the shard.

    Before::

        mm = ...;  relu_backward = ...
        g = zerofx.wait(zerofx.reduce_scatter_start(flatten(mm), "mean", 2))

    After::

        mm = ...;  start = zerofx.reduce_scatter_start(flatten(mm), "mean", 2)
        relu_backward = ...;  g = zerofx.wait(start)

    Gradients that other functions left in ``p.grad`` come in, and go out, as shards, unless they
    are unreduced.
    Source: ZeRO, Rajbhandari et al. 2020, section 5.2.
    """
    propagation = ShardPropagation(gm, ctx, "shard_gradients")
    for node in placeholders(gm.graph, "gradient"):
        if not input_role(node).unreduced:
            propagation.shard_input(node)
    scatter_gradients(propagation, ctx, {info.index for info in ctx.table})
    counts = propagation.run(shard_gradient_results=True)
    scatter_where_it_lies(gm.graph)
    pairs = []
    waits = dict.fromkeys(node for node in gm.graph.nodes if node.target is ops.wait)
    for wait in waits:
        start = wait.args[0]
        is_second = start.args[0] in waits  # which follows the first
        if start.target is ops.reduce_scatter_start and not is_second:
            hoist_reduction(start)
            pairs.append((start, wait))
    place_reductions(pairs)
    return {"reduce-scatters": len(pairs), **counts}
