"""The part of two programs in which they differ: what leads from values that both compute alike
to the first that they do not.

Source of the idea: Weiser 1981, "Program Slicing".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

import torch
from torch import fx

from zerofx import ops
from zerofx.graph import (
    InputRole,
    aliases,
    copied,
    memory_of,
    mutated_inputs,
    program_order,
    set_input_role,
)


def cut_out(
    gm: fx.GraphModule, targets: Sequence[fx.Node], given: Mapping[str, bool]
) -> fx.GraphModule:
    """The least of a program that computes ``targets``, as a program that returns them.

    Nodes named in ``given`` become inputs, the same on all ranks where it says so; but not those
    whose memory somebody writes to, of which more than their value counts.
    """
    graph = copied(gm.graph)
    nodes = {node.name: node for node in graph.nodes}
    ends = [nodes[target.name] for target in targets]
    inputs = {nodes[name] for name in given} - set(ends) - _written(graph)
    needed = _needed(graph, ends, inputs)
    least, kept = fx.Graph(), {}
    for node in graph.nodes:  # inputs come first
        if node in needed and node.op == "placeholder":
            kept[node] = least.node_copy(node)
    for node in graph.nodes:
        if node in needed & inputs and node not in kept:
            kept[node] = least.placeholder(node.name)
            kept[node].meta = {"val": node.meta["val"]}
            is_same = given[node.name]
            set_input_role(kept[node], InputRole("buffer" if is_same else "other"))
    for node in graph.nodes:
        if node in needed and node not in kept:
            kept[node] = least.node_copy(node, lambda source: kept[source])
    returned = [kept[end] for end in ends if isinstance(end.meta.get("val"), torch.Tensor)]
    least.output(tuple(returned))
    return fx.GraphModule(gm, least)


def _needed(graph: fx.Graph, ends: Iterable[fx.Node], inputs: Set[fx.Node]) -> set[fx.Node]:
    """The nodes that the ends depend on: operands, and who has written to their memory before."""
    order = program_order(graph)
    needed: set[fx.Node] = set()
    pending = list(ends)
    while pending:
        node = pending.pop()
        if node in needed:
            continue
        needed.add(node)
        if node in inputs or node.op == "placeholder":
            continue
        pending += node.all_input_nodes
        for source in node.all_input_nodes:
            pending += [one for one in _changers(source) if order[one] < order[node]]
    return needed


def _written(graph: fx.Graph) -> set[fx.Node]:
    """Every node whose memory somebody writes to or gives up."""
    changed = [one for node in graph.nodes for one in _changed_by(node)]
    roots = {root for one in changed for root in memory_of(one)}
    return {alias for root in roots for alias in aliases(root)}


def _changers(node: fx.Node) -> set[fx.Node]:
    """Who writes to a node's memory, or gives it up."""
    shared = {alias for root in memory_of(node) for alias in aliases(root)}
    return {user for one in shared for user in one.users if one in _changed_by(user)}


def _changed_by(node: fx.Node) -> list[fx.Node]:
    if node.target in (ops.free, ops.drop_value):
        return list(node.all_input_nodes)
    return mutated_inputs(node)
