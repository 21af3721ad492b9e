"""Stage 1: each rank keeps and updates its shard of the optimizer's states."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.roles import Role, parameter_of, role
from zerofx.options import Options
from zerofx.passes.base import Conflict, Counts, PassContext
from zerofx.passes.schedule.placement import place_reductions
from zerofx.passes.zero.bucket import travelling_together
from zerofx.passes.zero.gathers import flatten
from zerofx.passes.zero.propagate import ShardPropagation

aten = torch.ops.aten


def needs_sharded_states(choice: str, is_made: Callable[[Options], object]) -> Conflict:
    """Return the conflict of a choice about states with stage 0."""
    return Conflict(
        lambda options: options.stage == 0 and is_made(options),
        f"{choice} needs stage 1, 2 or 3: at stage 0 the optimizer keeps its states itself. Drop"
        f" {choice}, or choose another stage",
    )


CONFLICTS = (
    Conflict(
        lambda options: options.master_weights and options.stochastic_rounding,
        "master_weights and stochastic_rounding exclude each other: with a master in float32"
        " nothing of a parameter is lost to rounding. Choose one; moments that are kept in"
        " moment_dtype are rounded stochastically in either case",
    ),
    needs_sharded_states("master_weights", lambda options: options.master_weights),
    needs_sharded_states("moment_dtype", lambda options: options.moment_dtype),
)


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
    On a mesh the shards' sums over its inner axis are averaged over the outer one, or scattered
    again if that is cut too::

        g = zerofx.wait(zerofx.reduce_scatter_start(flatten(mm), "sum", 2, axis="gpu"))
        h = zerofx.wait(zerofx.all_reduce_start(g, "mean", axis="node"))

    Source: ZeRO, Rajbhandari et al. 2020, section 5.1.
    """
    steps = gm.graph.find_nodes(op="call_function", target=ops.optimizer_step)
    updated = {index for step in steps for index in step.args[4]}
    propagation = ShardPropagation(gm, ctx, "shard_optimizer")
    pairs = scatter_gradients(propagation, ctx, updated)
    counts = propagation.run()
    place_reductions(pairs)
    return {"reduce-scatters": len(pairs), **counts}


def scatter_gradients(
    propagation: ShardPropagation, ctx: PassContext, parameters: set[int]
) -> list[tuple[fx.Node, fx.Node]]:
    """Turn the all-reduces of these parameters' gradients into reduce-scatters, one per bucket.

    Returns the new (start, wait) pairs, standing where an averaged gradient is first read; on a
    mesh each is followed by the reduction of its shard.
    """
    waits = []
    for wait in [node for node in propagation.graph.nodes if node.target is ops.wait]:
        whole = wait.args[0]
        if whole.target is not ops.all_reduce_start or role(whole) != Role.REDUCE_GRADIENT:
            continue
        if whole.kwargs != ctx.mesh.over_all:  # it reduces shards
            continue
        if parameter_of(whole) in parameters and wait.users:
            waits.append(wait)
    return [_scatter(propagation, ctx, group) for group in travelling_together(waits, ctx.table)]


def _scatter(
    propagation: ShardPropagation, ctx: PassContext, group: list[fx.Node]
) -> tuple[fx.Node, fx.Node]:
    """One reduce-scatter of a bucket's gradients, each then a range of its result; or of one."""
    builder = propagation.builder
    members = sorted(group, key=lambda wait: ctx.table[parameter_of(wait)].place.offset)
    infos = [ctx.table[parameter_of(wait)] for wait in members]
    indices, place = [info.index for info in infos], infos[0].place
    wholes = [wait.args[0].args[0] for wait in members]
    first = members[0].args[0]
    shares = infos[0].shares_bucket
    here = min(min(wait.users) for wait in members)
    origin = {"like": max(wholes) if shares else first, **builder.serving(indices)}
    with builder.before(here, role=Role.REDUCE_GRADIENT, **origin) as call:
        if shares:
            numel = place.shard_numel * ctx.mesh.num_shards
            flat = call(ops.flatten_bucket, wholes, indices, numel, role=Role.FLATTEN)
        else:
            flat = flatten(builder, wholes[0], infos[0], first)
        mesh, reduction = ctx.mesh, first.args[1]
        given = (flat, "sum" if mesh.outer else reduction, mesh.size(mesh.inner))
        start = call(ops.reduce_scatter_start, *given, **mesh.over(mesh.inner))
        scattered = reduced = call(ops.wait, start)
        over = mesh.over(mesh.outer)
        if mesh.is_cut:
            given = (scattered, reduction, mesh.size(mesh.outer))
            reduced = call(ops.wait, call(ops.reduce_scatter_start, *given, **over))
        elif mesh.outer:
            reduced = call(ops.wait, call(ops.all_reduce_start, scattered, reduction, **over))
    for wait, info in zip(members, infos, strict=True):
        shard = reduced
        if shares:
            origin = {"role": Role.REDUCED_GRADIENT, "parameter": info.index, "like": wait}
            with builder.before(here, **origin) as call:
                begin = info.position_in_shard
                shard = call(aten.slice.Tensor, reduced, 0, begin, begin + info.shard_numel)
        propagation.add_source(wait, info, shard)
    return start, scattered
