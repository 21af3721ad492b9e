"""Stage 3: each rank keeps only its shard of every parameter."""

from __future__ import annotations

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliases import shards_in
from zerofx.ir.interface import input_role, placeholders, written_input
from zerofx.ir.parameters import ParameterInfo
from zerofx.ir.reach import reached
from zerofx.ir.roles import Role, parameter_of, role
from zerofx.options import Options
from zerofx.passes.base import Conflict, Counts, PassContext
from zerofx.passes.zero.propagate import ShardedValue, ShardPropagation

aten = torch.ops.aten


def _inner_axis(options: Options) -> str:
    """The inner axis of the mesh in the options; empty if there is none with two axes."""
    axes = list(getattr(options.process_group, "mesh_dim_names", None) or ())
    return axes[-1] if len(axes) > 1 else ""


CONFLICTS = (
    Conflict(
        lambda options: options.secondary_shard and options.secondary_shard != _inner_axis(options),
        "secondary_shard={secondary_shard!r} must name the inner axis, the last, of a mesh of two"
        " axes in process_group: ranks along it keep a second copy of parameters together. Pass"
        " init_device_mesh(device, (nodes, ranks of a node), mesh_dim_names=('node', 'gpu')) and"
        " 'gpu', or drop it",
    ),
    Conflict(
        lambda options: (
            options.secondary_shard
            and (options.stage, options.outer_stage) not in ((3, None), (3, 3))
        ),
        "secondary_shard={secondary_shard!r} needs parameters that are sharded over both axes:"
        " stage 3. With a smaller stage on the outer axis a rank's shard is that of its node"
        " already. Choose stage 3, or drop secondary_shard",
    ),
    Conflict(
        lambda options: options.secondary_shard and "params" in options.offload,
        "secondary_shard={secondary_shard!r} keeps a second shard on the device, and"
        " offload='params' the first one in host memory: drop one",
    ),
)


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
    With ``secondary_shard`` what is gathered over a mesh's outer axis is kept until the next
    update, and gathers begin with that.
    Source: ZeRO, Rajbhandari et al. 2020, section 5.3; ZeRO++, Wang et al. 2023, section 3.2.
    """
    propagation = ShardPropagation(gm, ctx, "shard_parameters")
    gathered = _gathered_updates(gm.graph)
    inputs = {input_role(node).parameter: node for node in placeholders(gm.graph, "parameter")}
    for index, node in inputs.items():
        propagation.shard_input(node, regather=True)
        for cast in [user for user in node.users if role(user) == Role.HOISTED_CAST]:
            dtype = cast.meta["val"].dtype
            info = ctx.table[index].kept
            propagation.add_source(cast, info, node, regather=True, cast_to=dtype)
    for whole, shard in gathered:
        info = ctx.table[parameter_of(whole)]
        is_own = shard.target is ops.update or info.index in map(_written, whole.users)
        if is_own and info.parts > 1:
            shard, info = _kept(propagation, info, inputs[info.index], whole, shard), info.kept
        propagation.add_source(whole, info, shard, regather=True)
    return {"sharded parameters": len(inputs), **propagation.run()}


def _kept(
    propagation: ShardPropagation,
    info: ParameterInfo,
    parameter: fx.Node,
    whole: fx.Node,
    shard: fx.Node,
) -> fx.Node:
    """Write what the rank keeps of a new value, of which each rank has updated a part."""
    numel, over = info.kept.shard_numel, propagation.ctx.mesh.cut_in(info.kept.world_size)
    with propagation.builder.before(whole, role=Role.KEPT_SHARD, parameter=info.index) as call:
        taken = call(ops.take_shard, whole, info.index, numel, **over)
        written = call(aten.copy_.default, parameter, taken)
    propagation.join(taken, info, shard, written)
    propagation.values[written] = ShardedValue(info.kept, info.shape, None, written)
    return written


def _gathered_updates(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    """Whole new values of parameters and the shards they were gathered from; drops their ``free``.

    By an optimizer's update, or by arithmetic that the step writes to the parameter itself or, as
    an average of weights, to another.
    """
    found = []
    for wait in [node for node in graph.nodes if node.target is ops.wait]:
        start = wait.args[0]
        if not ops.rules(start).gathers:
            continue
        gathered = _gathered(wait)
        written = all(
            shard.target is ops.update or any(_written(user) >= 0 for user in whole.users)
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
    shards = shards_in(packed)

    def parts_of(node: fx.Node) -> list[fx.Node]:
        return [user for user in node.users if role(user) == Role.WHOLE]

    wholes = [node for node in reached(parts_of(wait), parts_of) if not parts_of(node)]
    return [(node, shards.get(parameter_of(node), packed)) for node in wholes]


def _written(node: fx.Node) -> int:
    """Index of the parameter that a node writes to; -1 for none."""
    into = written_input(node)
    return into.parameter if into is not None and into.kind == "parameter" else -1
