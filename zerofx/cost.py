"""What a program costs before it runs: the bytes alive at each of its nodes."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from zerofx import ops
from zerofx.graph import aliased_inputs, mutated_inputs

UPDATE_TEMPORARIES = 2
"""Shards that an update allocates for itself: AdamW's root and denominator, run op by op."""


def live_bytes(
    graph: fx.Graph,
    world_size: int,
    ignored: Collection[fx.Node] = (),
    *,
    early_updates: bool = False,
    sockets: bool = False,
) -> list[int]:
    """Bytes that the program has allocated and not freed while each of its nodes runs.

    In program order; inputs (parameters, optimizer states, the batch) and constants are not
    counted, nor what an operator allocates for itself, but for updates; with ``sockets`` the buffer
    counts that a reduction on a CPU receives into.  In a world of one, collectives allocate
    nothing.  Memory lives until the last reader of the last view of it; what one call carries to
    the next is there from the program's start, and to its end.  ``ignored`` nodes count as views
    of nothing.  Symbolic sizes count as they were when captured.  With ``early_updates`` each
    update counts as run where its gradient is there, as ``update_in_backward`` will have it.
    """
    place = {node: (position, 0) for position, node in enumerate(graph.nodes)}
    if early_updates:
        _move_updates_up(place)
    nodes = sorted(graph.nodes, key=place.__getitem__)
    order = {node: position for position, node in enumerate(nodes)}
    skipped = set(ignored)
    roots: dict[fx.Node, set[tuple[fx.Node, int]]] = {}
    sizes: dict[tuple[fx.Node, int], int] = {}
    last: dict[tuple[fx.Node, int], int] = {}
    for node in nodes:
        roots[node] = _roots(node, world_size, roots, sizes, skipped)
        death = max((_done_with(user, order) for user in node.users), default=order[node])
        for root in roots[node]:
            last[root] = max(last.get(root, 0), death)
    changes = [0] * (len(nodes) + 1)
    for (node, part), nbytes in sizes.items():
        changes[0 if node.target is ops.resume_gather else order[node]] += nbytes
        changes[last.get((node, part), order[node]) + 1] -= nbytes
    for node in nodes:
        if sockets and node.target in (ops.reduce_scatter_start, ops.all_reduce_start):
            received = _bytes_of(node.args[0].meta["val"])
            if world_size > 1 and node.meta["val"].device.type == "cpu":
                changes[order[node]] += received
                changes[_done_with(node, order) + 1] -= received
        if node.target is ops.update:
            temporary = UPDATE_TEMPORARIES * _bytes_of(node.args[0].meta["val"])
            changes[order[node]] += temporary
            changes[order[node] + 1] -= temporary
    alive: list[int] = []
    total = 0
    for node, change in zip(nodes, changes, strict=False):
        position, _ = place[node]
        alive += [total] * (position - len(alive))  # where a node has gone, nothing happens
        total += change
        alive[position:] = [max([total, *alive[position:]])]
    return alive


def _move_updates_up(place: dict[fx.Node, tuple[int, int]]) -> None:
    """Place each update, and what only it waits for, behind the last thing that these need."""

    def move(node: fx.Node, turn: int) -> None:
        stays = node.op != "call_function" or ops.is_ours(node.target) or mutated_inputs(node)
        if place[node][1] or (stays and node.target is not ops.update) or not node.all_input_nodes:
            return
        for operand in node.all_input_nodes:
            move(operand, turn)
        place[node] = max(place[operand][0] for operand in node.all_input_nodes), turn

    updates = [node for node in place if node.target is ops.update]
    for turn, update in enumerate(updates, 1):
        move(update, turn)


def _done_with(reader: fx.Node, order: dict[fx.Node, int]) -> int:
    """When a reader needs its operands no more: a collective reads them until its wait."""
    if reader.target is ops.carry:
        return len(order) - 1
    if reader.target in ops.STARTS:
        return max(_done_with(user, order) for user in reader.users)
    return order[reader]


def _roots(
    node: fx.Node,
    world_size: int,
    roots: dict[fx.Node, set[tuple[fx.Node, int]]],
    sizes: dict[tuple[fx.Node, int], int],
    skipped: set[fx.Node],
) -> set[tuple[fx.Node, int]]:
    """The allocations that a node's result lies in; notes the size of a new one."""
    if node.op != "call_function" or node in skipped:
        return set()
    if node.target is operator.getitem:
        return {root for root in roots[node.args[0]] if root[1] == node.args[1]}
    sources = aliased_inputs(node) or mutated_inputs(node)
    if world_size == 1 and node.target in ops.STARTS:
        sources = node.all_input_nodes
    if sources:
        return set().union(*(roots[source] for source in sources))
    value = node.meta.get("val")
    parts = value if isinstance(value, (tuple, list)) else [value]
    made = set()
    for index, part in enumerate(parts):
        if isinstance(part, torch.Tensor):
            sizes[node, index] = _bytes_of(part)
            made.add((node, index))
    return made


def _bytes_of(value: Any) -> int:
    return int(value.numel()) * value.dtype.itemsize if isinstance(value, torch.Tensor) else 0
