"""Finds what differs between ranks in a program."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import fx

from zerofx.ir import ops
from zerofx.ir.graph import is_random
from zerofx.ir.interface import input_role, placeholders, recorded
from zerofx.ir.mesh import DATA, axes_in

aten = torch.ops.aten


def rank_varying(graph: fx.Graph, world_size: int) -> set[fx.Node]:
    """Nodes whose value may differ between ranks; none if there is only one.

    Batches, buffers and random draws differ, and who has data; so does all that is computed from
    them, until a gradient is averaged.  A 0-dim input (a loss scale, a coefficient) is taken to be
    the same on all ranks, as a Python number is, unless the program itself leaves there what
    differs; the size of a batch is not.  What has been reduced along one axis of a mesh still
    differs along the others; what the step's own collectives have made of all ranks' does not.
    """
    mesh = recorded(graph).mesh
    axes = axes_in(DATA if mesh is None else mesh.everywhere)
    if world_size == 1 and mesh is None:
        return set()
    group = _group_of(world_size if mesh is None else mesh.world_size)
    written: dict[fx.Node, frozenset[str]] = {}
    left = _left_in_scalars(graph)
    while True:
        varying = _varying_along(graph, axes, written, group)
        found = {given: varying[value] for given, value in left if value in varying}
        if found == written:
            return set(varying)
        written = found


def _left_in_scalars(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    """Return 0-dim inputs with what the program leaves in their place for the next call."""
    results = graph.output_node().args[0]
    given = [node for node in placeholders(graph, "other") if _is_scalar(node)]
    assigned = [(node, results[input_role(node).becomes]) for node in given if _is_assigned(node)]
    writes = [user for node in given for user in node.users if user.target is aten.copy_.default]
    return assigned + [write.args for write in writes if write.args[0] in given]


def _is_assigned(node: fx.Node) -> bool:
    return input_role(node).becomes >= 0


def _is_scalar(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _group_of(world_size: int) -> str | None:
    """Return torch's name of the group of all ranks; None if there is none of so many."""
    is_there = dist.is_available() and dist.is_initialized() and dist.group.WORLD is not None
    if not is_there or dist.get_world_size() != world_size:
        return None
    return dist.group.WORLD.group_name


_OF_ALL = ("all_reduce", "all_gather_into_tensor", "broadcast")


def _varying_along(
    graph: fx.Graph,
    axes: frozenset[str],
    written: Mapping[fx.Node, frozenset[str]],
    group: str | None,
) -> dict[fx.Node, frozenset[str]]:
    """Return the nodes that differ along some axes, where ``written`` inputs do.

    ``group`` is the one of all ranks, by torch's name.
    """
    uniform = [f"_c10d_functional::{name}" for name in _OF_ALL] if group is not None else []
    varying = dict(written)
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.name in uniform and node.args[-1] == group:
            continue
        if node.op == "placeholder":
            kind = input_role(node).kind
            unreduced = input_role(node).unreduced
            if kind == "buffer" or (kind == "other" and not _is_scalar(node)):
                varying[node] = axes
            elif unreduced:
                varying[node] = axes_in(unreduced)
            continue
        differs = is_random(node) or node.target is ops.has_data
        along = axes if differs else frozenset()
        along = along.union(*(varying.get(source, ()) for source in node.all_input_nodes))
        if ops.rules(node).uniform:  # the same on ranks once it has been averaged or gathered
            along -= axes if node.target in _OVER_ALL else axes_in(ops.argument(node, "axis"))
        if along:
            varying[node] = along
    return varying


_OVER_ALL = (ops.gradient, ops.over_ranks)
