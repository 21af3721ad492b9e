"""Stage 3: each rank keeps only its shard of every parameter."""

from __future__ import annotations

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.interface import input_role, placeholders, written_input
from zerofx.ir.reach import reached
from zerofx.ir.roles import Role, parameter_of, role
from zerofx.passes.base import Counts, PassContext
from zerofx.passes.zero.propagate import ShardPropagation

aten = torch.ops.aten


def shard_parameters(gm: fx.GraphModule, ctx: PassContext) -> Counts:
    """Gather each parameter before it is used, free it after, gather again for backward.

    Before (``p`` whole)::

        y = mm(x, p.t());  dx = mm(dy, p)

    After (``p`` this rank's flat shard)::

        w = unflatten(zerofx.wait(zerofx.all_gather_start(p, 2)))
        y = mm(x, w.t());  zerofx.free(w)
        w2 = unflatten(zerofx.wait(zerofx.all_gather_start(p, 2)))
        dx = mm(dy, w2);  zerofx.free(w2)

    Updates write the shard in place, so what ``shard_optimizer`` gathered for ``p`` goes away.
    Source: ZeRO, Rajbhandari et al. 2020, section 5.3.
    """
    propagation = ShardPropagation(gm, ctx, "shard_parameters")
    gathered = _gathered_updates(gm.graph)
    for node in placeholders(gm.graph, "parameter"):
        propagation.shard_input(node, regather=True)
        index = input_role(node).parameter
        for cast in [user for user in node.users if role(user) == Role.HOISTED_CAST]:
            dtype = cast.meta["val"].dtype
            propagation.add_source(cast, index, node, regather=True, cast_to=dtype)
    for whole, shard in gathered:
        propagation.add_source(whole, parameter_of(whole), shard, regather=True)
    return {"sharded parameters": len(placeholders(gm.graph, "parameter")), **propagation.run()}


def _gathered_updates(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    """Whole new values of parameters and the shards they were gathered from; drops their ``free``.

    By an optimizer's update, or by arithmetic that the step writes to the parameter itself.
    """
    found = []
    for wait in [node for node in graph.nodes if node.target is ops.wait]:
        start = wait.args[0]
        if not ops.rules(start).gathers:
            continue
        gathered = _gathered(wait)
        written = all(
            shard.target is ops.update or any(map(_is_new_value, whole.users))
            for whole, shard in gathered
        )
        if not written:
            continue
        for user in list(wait.users):
            if user.target is ops.free:
                graph.erase_node(user)
        found += gathered
    return found


def _gathered(wait: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """The whole values viewed in one gathered buffer, and the shard of each."""
    packed = ops.gathered_from(wait)
    shards = {-1: packed}
    if packed.target is ops.pack:
        shards = dict(zip(packed.args[1], packed.args[0], strict=True))

    def parts_of(node: fx.Node) -> list[fx.Node]:
        return [user for user in node.users if role(user) == Role.WHOLE]

    wholes = [node for node in reached(parts_of(wait), parts_of) if not parts_of(node)]
    return [(node, shards.get(parameter_of(node), packed)) for node in wholes]


def _is_new_value(node: fx.Node) -> bool:
    into = written_input(node)
    return into is not None and into.kind == "parameter"
