"""Start the next step's first gather before this step returns."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from zerofx.ir import ops
from zerofx.ir.graph import (
    Builder,
    Provenance,
    bucket_of,
    input_role,
    parameter_of,
    provenance,
    role,
    writers,
)
from zerofx.passes.base import Counts, PassContext


def prefetch_across_steps(gm: fx.GraphModule, ctx: PassContext) -> Counts:
    """Gather what the program reads first at its end too, and leave it to the next call.

    Before::

        w = zerofx.wait(zerofx.all_gather_start(p, 2));  y = mm(x, w);  ...
        zerofx.update(p, g, 1, 0)

    After::

        w = zerofx.wait(zerofx.resume_gather(p, [0], 2));  y = mm(x, w);  ...
        u = zerofx.update(p, g, 1, 0)
        zerofx.carry(zerofx.all_gather_start(u, 2), [0])

    It starts behind the last write to these shards and the last collective that the program waits
    for, so it delays none, and travels while other parameters are updated, the step returns and
    the next batch is fetched.  A program that updates nothing is left alone, and so is one whose
    first gather is of something it has just computed.
    """
    start = next((n for n in gm.graph.nodes if n.target is ops.all_gather_start), None)
    updates_something = any(node.target is ops.update for node in gm.graph.nodes)
    if start is None or not updates_something or ctx.world_size == 1:
        return {"carried": 0}
    sent = start.args[0]
    prepared = []  # what stands between the shards and their gather
    while isinstance(sent, fx.Node) and role(sent) in ("gather_cast", "pack"):
        prepared.append(sent)
        sent = sent.args[0]
    shards = [sent] if isinstance(sent, fx.Node) else sent
    if not all(map(_is_shard_of_parameter, shards)):
        return {"carried": 0}
    parameters = [input_role(shard).parameter for shard in shards]
    now = {shard: _last_value(shard) for shard in shards}
    waits = [node for node in gm.graph.nodes if node.target is ops.wait]
    builder = Builder(gm, "prefetch_across_steps", ctx.table)
    origin = {"parameter": parameter_of(start), "bucket": bucket_of(start), "like": start}
    with gm.graph.inserting_before(max(*now.values(), *waits).next):
        for node in reversed(prepared):
            now[node] = builder.copy(node, now.__getitem__)
            now[node].meta["zerofx"] = _ours(node)
        shard = now[start.args[0]]
        again = builder.call(ops.all_gather_start, shard, ctx.world_size, role="carry", **origin)
        builder.call(ops.carry, again, parameters, role="carry", **origin)
    start.target, start.args = ops.resume_gather, (start.args[0], parameters, ctx.world_size)
    start.meta["zerofx"] = _ours(start)
    builder.refresh(start)
    return {"carried": 1}


def _ours(node: fx.Node) -> Provenance:
    origin = provenance(node)
    assert origin is not None, "a pass has inserted it"
    return replace(origin, inserted_by="prefetch_across_steps")


def _is_shard_of_parameter(node: fx.Node) -> bool:
    if node.op != "placeholder":
        return False
    return input_role(node).kind == "parameter" and input_role(node).sharded


def _last_value(shard: fx.Node) -> fx.Node:
    """The result of the last node that writes to a shard, or the shard if none does."""
    return max(writers(shard), default=shard)
