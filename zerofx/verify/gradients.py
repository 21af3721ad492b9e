"""The invariants of gradients, once they are averaged over the ranks."""

from __future__ import annotations

from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliases import mutated_inputs
from zerofx.ir.graph import rank_varying
from zerofx.ir.interface import input_role, recorded
from zerofx.ir.offload import operands_of_updates
from zerofx.ir.parameters import ParameterInfo, ParameterTable
from zerofx.ir.roles import Role, provenance
from zerofx.verify.broken import broken


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
    """Every update's gradient is a mean over ranks, or came in as one; no two share a value."""
    written: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.target is ops.gradient:
            raise broken(node, "is a gradient that nobody averages over the ranks.")
        if node.target is ops.optimizer_step:
            operands = list(zip(node.args[1], node.args[4], strict=True))
        else:
            operands = [(update.gradient, update.parameter) for update in operands_of_updates(node)]
        if operands and node.target is not ops.optimizer_step:
            for value in mutated_inputs(node):
                if value in written:
                    raise broken(node, f"updates what {written[value].name} has updated.")
                written[value] = node
        for gradient, parameter in operands:
            what = f"updates {table[parameter].name!r} with {gradient.name}, which"
            if not _is_average_of(gradient, table[parameter]):
                raise broken(node, f"{what} is not computed from the average of its gradient.")
            if gradient in varying:
                raise broken(node, f"{what} differs between ranks.")


def _stored_gradients_are_what_they_are_called(
    graph: fx.Graph, table: ParameterTable, varying: set[fx.Node]
) -> None:
    """Check that ``p.grad`` is left the same on all ranks, or declared to be unreduced."""
    results = graph.output_node().args[0]
    declared = recorded(graph).unreduced
    for position, parameter in {
        **recorded(graph).gradients,
        **recorded(graph).written_gradients,
    }.items():
        result = results[position]
        if result in varying and position not in declared and result.op != "placeholder":
            raise broken(
                result,
                f"becomes the gradient of {table[parameter].name!r}, and is neither averaged over "
                "the ranks nor declared to be unreduced.",
            )


def _is_own_range(node: fx.Node, info: ParameterInfo) -> bool:
    """Return whether a node is the parameter's range of its bucket's averaged gradients."""
    reduced, dim, start, stop = node.args
    reduction = reduced.args[0] if reduced.target is ops.wait else reduced
    if reduction.target is ops.reduce_bucket_start:
        parameters = reduction.args[1]
    elif reduction.target is not ops.reduce_scatter_start:
        return False
    elif reduction.args[0].target is not ops.flatten_bucket:
        return False
    else:
        parameters = reduction.args[0].args[1]
    return (
        ops.argument(reduction, "reduction") == "mean"
        and info.index in parameters
        and (dim, start) == (0, info.position_in_shard)
        and stop - start == info.shard_numel
    )


def _is_average_of(gradient: fx.Node, info: ParameterInfo) -> bool:
    """Return whether ``gradient`` is computed from the parameter's averaged gradient."""
    parameter = info.index
    pending, seen = [gradient], set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "placeholder":
            role_of_input = input_role(node)
            is_gradient = role_of_input.kind == "gradient" and not role_of_input.unreduced
            if is_gradient and role_of_input.parameter == parameter:
                return True
            continue
        origin = provenance(node)
        if origin and origin.role == Role.REDUCE_GRADIENT and node.target is ops.wait:
            if origin.parameter == parameter and ops.argument(node.args[0], "reduction") == "mean":
                return True
            continue
        if origin and origin.role == Role.REDUCED_GRADIENT:
            if origin.parameter == parameter and _is_own_range(node, info):
                return True
            continue
        pending.extend(node.all_input_nodes)
    return False
