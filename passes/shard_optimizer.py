"""Stage 1: each rank keeps and updates its shard of the optimizer's states."""

from __future__ import annotations

from torch import fx

from zerofx import ops
from zerofx.graph import parameter_of, role
from zerofx.passes.base import Counts, PassContext
from zerofx.passes.gathers import flatten
from zerofx.passes.placement import stagger_waits
from zerofx.passes.sharding import ShardPropagation


def shard_optimizer(gm: fx.GraphModule, ctx: PassContext) -> Counts:
    """Reduce-scatter the gradients of updated parameters; update shards; gather the result.

    Before::

        g = zerofx.wait(zerofx.all_reduce_start(mm, "mean"))
        c = clip(g, norm(g))
        new = zerofx.optimizer_step([p], [c], 1)[0]
        copy_(p, new)

    After::

        g = zerofx.wait(zerofx.reduce_scatter_start(flatten(mm), "mean", 2))
        c = clip(g, sqrt(all_reduce(norm(g) ** 2)))
        s = zerofx.update(zerofx.take_shard(p, 0, n), c, 1, 0)
        copy_(p, unflatten(zerofx.wait(zerofx.all_gather_start(s, 2))))

    The whole local gradient lives until its first reader; stage 2 reduces it at once.
    Source: ZeRO, Rajbhandari et al. 2020, section 5.1.
    """
    updated = {
        index
        for node in gm.graph.nodes
        if node.target is ops.optimizer_step
        for index in node.args[4]
    }
    propagation = ShardPropagation(gm, ctx, "shard_optimizer")
    pairs = scatter_gradients(propagation, ctx, updated)
    counts = propagation.run()
    stagger_waits(pairs)
    return {"reduce-scatters": len(pairs), **counts}


def scatter_gradients(
    propagation: ShardPropagation, ctx: PassContext, parameters: set[int]
) -> list[tuple[fx.Node, fx.Node]]:
    """Turn the all-reduces of these parameters' gradients into reduce-scatters.

    Returns the new (start, wait) pairs, standing where the averaged gradient is first read.
    """
    graph, builder = propagation.graph, propagation.builder
    pairs = []
    for wait in [node for node in graph.nodes if node.target is ops.wait]:
        whole = wait.args[0]
        if whole.target is not ops.all_reduce_start or role(whole) != "reduce_gradient":
            continue
        info = ctx.table[parameter_of(whole)]
        if info.index not in parameters or not wait.users:
            continue
        origin = {"parameter": info.index, "like": whole}
        with graph.inserting_before(min(wait.users)):
            flat = flatten(builder, whole.args[0], info, **origin)
            start = builder.call(
                ops.reduce_scatter_start,
                flat,
                whole.args[1],
                ctx.world_size,
                role="reduce_gradient",
                **origin,
            )
            shard = builder.call(ops.wait, start, role="reduce_gradient", **origin)
        propagation.add_source(wait, info.index, shard)
        pairs.append((start, shard))
    return pairs
