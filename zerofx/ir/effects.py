"""What a program does to parameters, gradients and optimizers: questions about its graph."""

from __future__ import annotations

from collections import Counter

from torch import fx

from zerofx.ir import ops
from zerofx.ir.graph import (
    aliases,
    input_role,
    operands_of_updates,
    placeholders,
    writers,
    written_gradients,
)


def has_moves(graph: fx.Graph) -> bool:
    """Whether anything goes between the device and the host."""
    return any(ops.is_move(node.target) for node in graph.nodes)


def groups_on_host(graph: fx.Graph) -> list[tuple[int, tuple[int, ...]]]:
    """What the program updates in host memory: (optimizer, parameters) of each such operator."""
    starts = [node for node in graph.nodes if node.target in ops.HOST_UPDATES]
    return [(start.args[2], tuple(start.args[3])) for start in starts]


def updated_on_host(graph: fx.Graph) -> list[tuple[int, int]]:
    """The updates, as (optimizer, parameter), that the program runs in host memory."""
    groups = groups_on_host(graph)
    return list(dict.fromkeys((handle, index) for handle, group in groups for index in group))


def owned_parameters(graph: fx.Graph) -> dict[int, frozenset[int]]:
    """By optimizer, the parameters whose updates may need them whole."""
    owned: dict[int, frozenset[int]] = {}
    for node in graph.nodes:
        if node.target is ops.on_owners:
            optimizer, parameters = node.args[2:4]
            owned[optimizer] = owned.get(optimizer, frozenset()) | frozenset(parameters)
    return owned


def shards_changed_by_user(graph: fx.Graph) -> set[int]:
    """The parameters whose shards something writes to that is no update's part."""
    of_updates = (ops.update, ops.store_start, *ops.HOST_UPDATES)
    return {
        input_role(node).parameter
        for node in placeholders(graph, "parameter")
        if any(writer.target not in of_updates for writer in writers(node))
    }


def moved_out(graph: fx.Graph) -> set[int]:
    """The parameters of whose whole value a shard is taken to be moved to the host, once."""
    found: Counter[int] = Counter()
    for node in graph.nodes:
        if node.target is ops.take_shard:
            only_moves = all(user.target is ops.to_host_start for user in node.users)
            found[node.args[1]] += 1 if only_moves else 2
    return {parameter for parameter, count in found.items() if count == 1}


def changed_gradients(graph: fx.Graph) -> set[int]:
    """The parameters whose unreduced gradient the program adds to or replaces."""
    return set(written_gradients(graph).values()) | {
        input_role(node).parameter
        for node in placeholders(graph, "gradient")
        if input_role(node).unreduced and writers(node)
    }


def gradients_read_after_update(graph: fx.Graph) -> set[int]:
    """The parameters whose gradient has a reader behind the update that reads it."""
    return {
        update.parameter
        for node in graph.nodes
        for update in operands_of_updates(node)
        for alias in aliases(update.gradient)
        if any(reader > node for reader in alias.users)
    }
