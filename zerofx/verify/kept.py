"""The invariants of what a rank keeps of a parameter beside what updates have: on a mesh."""

from __future__ import annotations

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliases import shard_of, shards_in
from zerofx.ir.graph import updates
from zerofx.ir.interface import input_role, placeholders, recorded
from zerofx.ir.parameters import ParameterInfo, ParameterTable
from zerofx.ir.roles import Role, parameter_of, role
from zerofx.ir.wire_graph import exact_shard
from zerofx.verify.broken import broken

aten = torch.ops.aten


def verify_kept(graph: fx.Graph, table: ParameterTable) -> None:
    """Check that updates have their own ranges, and that all ranks' new values come together.

    Raises: GraphError.
    """
    mesh = recorded(graph).mesh
    if mesh is None:
        return
    for node in graph.find_nodes(op="call_function", target=ops.refill_start):
        _is_filled_with_newest(node, mesh.outer)
    if mesh.parts == 1:
        return
    renewed = set()
    for node in graph.nodes:
        if role(node) == Role.TAKE_SHARD and node.target is aten.slice.Tensor:
            _is_own_range(node, table[parameter_of(node)])
        if role(node) == Role.KEPT_SHARD and node.target is aten.copy_.default:
            _is_joined(node, table[parameter_of(node)], mesh.outer)
            renewed.add(shard_of(node.args[0]))
    for node in placeholders(graph, "parameter"):
        index = input_role(node).parameter
        if not input_role(node).sharded or index in renewed:
            continue
        if any(parameter == index for _, parameter in updates(graph)):
            raise broken(node, f"is updated, and new values along {mesh.outer} do not come to it.")


def _is_filled_with_newest(refill: fx.Node, axis: str) -> None:
    """Check that a second shard is of the newest values of the parameters that it names."""
    sent, indices = refill.args[:2]
    shards = shards_in(exact_shard(sent)).values()
    if [shard_of(shard) for shard in shards] != list(indices):
        raise broken(refill, "does not hold the shards of the parameters that it names.")
    if ops.argument(refill, "axis") != axis:
        raise broken(refill, f"is not filled along {axis}.")
    is_new = any(shard.op != "placeholder" for shard in shards)
    if is_new is not ops.argument(refill, "is_new"):
        raise broken(
            refill, "takes what was there before the program has written to a parameter, or not so."
        )


def _is_own_range(node: fx.Node, info: ParameterInfo) -> None:
    begin = info.position_in_kept
    given = (shard_of(node.args[0]), *node.args[1:])
    if given != (info.index, 0, begin, begin + info.shard_numel):
        raise broken(node, f"is not this rank's range of what it keeps of {info.name!r}.")


def _is_joined(write: fx.Node, info: ParameterInfo, axis: str) -> None:
    """Check that what is written are new values from all ranks along the outer axis."""
    kept, source = info.kept, write.args[1]
    begin = kept.position_in_shard
    if source.target is aten.slice.Tensor:
        if source.args[1:] != (0, begin, begin + kept.shard_numel):
            raise broken(source, f"does not read what the rank keeps of {info.name!r}.")
        source = source.args[0]
    starts = ops.hops_of(source) if source.target is ops.wait else []
    if [ops.argument(start, "axis") for start in starts] != [axis]:
        raise broken(write, f"is not of values that are gathered along {axis}, and them alone.")
    held = shards_in(starts[0].args[0])
    if shard_of(write.args[0]) != info.index or info.index not in held:
        raise broken(write, f"is not of values of {info.name!r}.")
    if role(held[info.index]) == Role.TAKE_SHARD:
        raise broken(write, f"is of the old values of {info.name!r}.")
