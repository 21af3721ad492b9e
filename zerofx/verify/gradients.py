"""The invariants of gradients, once they are averaged over the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliases import mutated_inputs
from zerofx.ir.interface import gradient_of, input_role, placeholders, recorded
from zerofx.ir.mesh import Mesh
from zerofx.ir.offload import operands_of_updates
from zerofx.ir.parameters import ParameterInfo, ParameterTable
from zerofx.ir.reach import reached
from zerofx.ir.reduction_hops import Hop, hops_into
from zerofx.ir.roles import Role, parameter_of, role
from zerofx.ir.varying import rank_varying
from zerofx.verify.broken import broken

aten = torch.ops.aten

LAYS_OUT = (ops.flatten_bucket, ops.reduce_bucket_start, ops.all_reduce_bucket_start)
"""The operators that take the gradients of a bucket, and their parameters."""


def verify_averages(graph: fx.Graph, table: ParameterTable) -> None:
    """Check that updates read averages, and that what a step leaves in ``p.grad`` is one.

    Raises: GraphError.
    """
    varying = rank_varying(graph, max((info.world_size for info in table), default=1))
    _updates_read_averaged_gradients(graph, table, varying)
    _stored_gradients_are_what_they_are_called(graph, table, varying)


def _updates_read_averaged_gradients(
    graph: fx.Graph, table: ParameterTable, varying: set[fx.Node]
) -> None:
    """Check that updates read means over ranks, or what came in as one; no two share a value.

    A parameter that backward gave no gradient has what the step has assigned to it, as may one
    whose gradient it has replaced by what is computed from none.
    """
    given = {input_role(node).parameter for node in placeholders(graph, "gradient")}
    given = given.union(*map(gradient_of, graph.nodes))
    written: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.target is ops.gradient:
            raise broken(node, "is a gradient that nobody averages over the ranks.")
        if node.target is ops.optimizer_step:
            operands = list(zip(node.args[1], node.args[4], strict=True))
        else:
            operands = [(update.gradient, update.parameter) for update in operands_of_updates(node)]
        for value in mutated_inputs(node) if operands else ():
            if value in written:
                raise broken(node, f"updates what {written[value].name} has updated.")
            written[value] = node
        for gradient, parameter in operands:
            what = f"updates {table[parameter].name!r} with {gradient.name}, which"
            is_its = parameter not in given or _is_average_of(gradient, table[parameter])
            if not is_its and _is_of_gradients(gradient):
                raise broken(node, f"{what} is not computed from the average of its gradient.")
            if gradient in varying:
                raise broken(node, f"{what} differs between ranks.")


def _stored_gradients_are_what_they_are_called(
    graph: fx.Graph, table: ParameterTable, varying: set[fx.Node]
) -> None:
    """Check that ``p.grad`` is left the same on all ranks, or declared to be unreduced."""
    results = graph.output_node().args[0]
    declared = recorded(graph).unreduced
    slots = recorded(graph).gradients | recorded(graph).written_gradients
    for position, parameter in slots.items():
        result = results[position]
        if result in varying and position not in declared and result.op != "placeholder":
            raise broken(
                result,
                f"becomes the gradient of {table[parameter].name!r}, and is neither averaged over "
                "the ranks nor declared to be unreduced.",
            )


def _is_of_gradients(value: fx.Node) -> bool:
    """Return whether a value is computed from any gradient, averaged or not."""
    return any(
        gradient_of(node) or (node.op == "placeholder" and input_role(node).kind == "gradient")
        for node in reached([value], lambda node: node.all_input_nodes)
    )


def _is_own_range(node: fx.Node, info: ParameterInfo) -> bool:
    """Return whether a node is the parameter's range of its bucket's averaged gradients."""
    reduced, dim, start, stop = node.args
    hops = hops_into(reduced)
    if not hops:
        return False
    flat, begin, length = hops[-1].source, info.position_in_shard, info.shard_numel
    if flat.target is ops.all_reduce_bucket_start:
        begin, length = info.place.offset, info.numel
    if (dim, start, stop) != (0, begin, begin + length):
        return False
    if _is_second_hop(hops):
        return _averages_sums(hops[0], info)
    return flat.target in LAYS_OUT and _is_mean(hops) and info.index in flat.args[1]


def _is_mean(hops: Sequence[Hop]) -> bool:
    """Return whether reductions make the mean over all ranks: at once, or inside nodes first.

    What is summed in parts, as wires are, comes back to ranks that hold the same shard.
    """
    if not hops:
        return False
    mesh = recorded(hops[0].start.graph).mesh or Mesh()
    last, *before = (hop.reduction for hop in hops)
    axes = tuple(hop.axis for hop in reversed(hops))
    in_order = axes in ((mesh.everywhere,), (mesh.inner, mesh.outer))
    go_back = all(
        hop.comes_back == (hop.axis == mesh.outer and not mesh.is_cut) for hop in hops if hop.code
    )
    return in_order and go_back and last == "mean" and set(before) <= {"sum"}


def _is_second_hop(hops: Sequence[Hop]) -> bool:
    """Return whether what is averaged has come together of sums over the inner axis."""
    mesh = recorded(hops[0].start.graph).mesh
    return mesh is not None and _over(hops) == [(mesh.outer, "mean")]


def _over(hops: Sequence[Hop]) -> list[tuple[str, str]]:
    return [(hop.axis, hop.reduction) for hop in hops]


def _averages_sums(hop: Hop, info: ParameterInfo) -> bool:
    """Return whether a second hop has a parameter's gradient that is summed over the inner axis."""
    mesh, total = recorded(hop.start.graph).mesh or Mesh(), hop.source
    if total.target is ops.pack:
        held = dict(zip(total.args[1], total.args[0], strict=True))
        if info.index not in held:
            return False
        total = held[info.index]

    def is_sum(node: fx.Node) -> bool | None:
        """None if that depends on what it is computed from."""
        if node.op == "placeholder":
            given = input_role(node)
            is_its = given.kind == "gradient" and given.parameter == info.index
            return is_its and given.unreduced == mesh.outer
        if role(node) not in (Role.REDUCE_GRADIENT, Role.REDUCED_GRADIENT):
            return None
        if parameter_of(node) != info.index and role(node) == Role.REDUCED_GRADIENT:
            return False
        waited = node.args[0] if node.target is aten.slice.Tensor else node
        inside = hops_into(waited)
        kept = info.kept
        part = (0, kept.position_in_shard, kept.position_in_shard + kept.shard_numel)
        is_its = node.target is not aten.slice.Tensor or node.args[1:] == part
        return is_its and _over(inside) == [(mesh.inner, "sum")]

    def computed_from(node: fx.Node) -> list[fx.Node]:
        return node.all_input_nodes if is_sum(node) is None else []

    found = {is_sum(node) for node in reached([total], computed_from)} - {None}
    return found == {True}


def _is_average_of(gradient: fx.Node, info: ParameterInfo) -> bool:
    """Return whether ``gradient`` is computed from the parameter's averaged gradient."""

    def is_average(node: fx.Node) -> bool | None:
        """None if that depends on what it is computed from."""
        if node.op == "placeholder":
            given = input_role(node)
            is_its = given.kind == "gradient" and given.parameter == info.index
            return is_its and not given.unreduced
        of = role(node)
        is_reduced = of == Role.REDUCE_GRADIENT and not ops.starts(node)
        if not is_reduced and of != Role.REDUCED_GRADIENT:
            return None
        if parameter_of(node) != info.index:
            return False
        if not is_reduced:
            return _is_own_range(node, info)
        hops = hops_into(node)
        return _averages_sums(hops[0], info) if hops and _is_second_hop(hops) else _is_mean(hops)

    def computed_from(node: fx.Node) -> list[fx.Node]:
        # The gradient is followed before what it is multiplied with: a norm is of all gradients.
        return node.all_input_nodes[::-1] if is_average(node) is None else []

    return any(map(is_average, reached([gradient], computed_from)))
