"""The effects of a program on parameters, gradients and optimizers, read off its graph."""

from __future__ import annotations

from collections import Counter

import torch
from torch import fx

from zerofx import compat
from zerofx.ir import ops
from zerofx.ir.aliases import readers, writers
from zerofx.ir.graph import is_random, may_be_batch, updated_by
from zerofx.ir.interface import input_role, placeholders, recorded
from zerofx.ir.offload import is_staged, operands_of_updates
from zerofx.ir.reach import reached
from zerofx.ir.rules import at, rules


def groups_on_host(graph: fx.Graph) -> list[tuple[int, tuple[int, ...]]]:
    """Return the updates in host memory: (optimizer, parameters) of each such operator."""
    starts = filter(ops.updates_on_host, graph.nodes)
    return [(start.args[2], tuple(start.args[3])) for start in starts]


def owned_parameters(graph: fx.Graph) -> dict[int, frozenset[int]]:
    """By optimizer, the parameters whose updates may need them whole."""
    owned: dict[int, frozenset[int]] = {}
    for node in graph.nodes:
        if node.target is ops.on_owners:
            optimizer, parameters = node.args[2:4]
            owned[optimizer] = owned.get(optimizer, frozenset()) | frozenset(parameters)
    return owned


def taking_own_steps(graph: fx.Graph) -> set[int]:
    """Return the optimizers whose own step runs."""
    found = graph.find_nodes(op="call_function", target=ops.on_owners)
    return {node.args[2] for node in found if ops.argument(node, "own_step")}


def shards_changed_by_user(graph: fx.Graph) -> set[int]:
    """The parameters whose shards something writes to that is no update's part."""
    return {
        input_role(node).parameter
        for node in placeholders(graph, "parameter")
        if not all(updated_by(writer) or ops.is_move(writer) for writer in writers(node))
    }


def shards_written(graph: fx.Graph) -> set[int]:
    """The parameters whose shards the program writes to."""
    inputs = placeholders(graph, "parameter")
    return {input_role(node).parameter for node in inputs if writers(node)}


def written_of_batch(graph: fx.Graph) -> list[int]:
    """Return the positions of inputs that the program writes what it has of the rank's batch to.

    Running statistics and sums of metrics are, averages of parameters are not.
    """
    inputs = placeholders(graph)
    others = [(at, node) for at, node in enumerate(inputs) if input_role(node).parameter < 0]
    written = {node: at for at, node in others if writers(node)}
    of_batch = {node for _, node in others if node not in written and may_be_batch(node)}

    def onward(node: fx.Node) -> list[fx.Node]:
        return [] if rules(node).uniform or node.op == "placeholder" else node.all_input_nodes

    return [
        at
        for node, at in written.items()
        if any(one in of_batch or is_random(one) for one in reached(writers(node), onward))
    ]


def why_not_without_data(graph: fx.Graph) -> str:
    """Return why a rank without data cannot go through the program; empty if it can."""
    flags = graph.find_nodes(op="call_function", target=ops.has_data)
    if not flags:
        return (
            "the step has no backward. Call it on this rank as on the others: an update alone as "
            "it is, an evaluation with any batch, whose result you drop."
        )
    return next(filter(None, (ops.argument(flag, "why_not") for flag in flags)), "")


def moved_out(graph: fx.Graph) -> set[int]:
    """The parameters of whose whole value a shard is taken to be moved to the host, once."""
    found: Counter[int] = Counter()
    for node in graph.nodes:
        if node.target is ops.take_shard:
            only_moves = all(map(is_staged, node.users))
            found[node.args[1]] += 1 if only_moves else 2
    return {parameter for parameter, count in found.items() if count == 1}


def changed_gradients(graph: fx.Graph) -> set[int]:
    """The parameters whose unreduced gradient the program adds to or replaces."""
    return set(recorded(graph).written_gradients.values()) | {
        input_role(node).parameter
        for node in placeholders(graph, "gradient")
        if input_role(node).unreduced and writers(node)
    }


def gradients_read_after_update(graph: fx.Graph) -> set[int]:
    """The parameters whose gradient has a reader behind the update that reads it."""
    read = [
        (update.parameter, update.gradient, node)
        for node in graph.nodes
        for update in operands_of_updates(node)
    ]
    for node in graph.find_nodes(op="call_function", target=ops.on_owners):
        read += [
            (index, grad, node) for index, grad in zip(node.args[3], node.args[1], strict=True)
        ]
    return {
        parameter
        for parameter, gradient, node in read
        if any(reader > node for reader in readers(gradient))
    }


def why_uncaptured(node: fx.Node) -> str:
    """Return why a CUDA graph cannot hold a node; empty if it can."""
    if node.op == "placeholder" and input_role(node).kind == "gradient":
        return "a gradient that is kept between calls lies where the last call has left it"
    if node.op == "output" and recorded(node.graph).gradients:
        return "it hands on gradients, which the next call's must not overwrite"
    if compat.inductor.is_higher_order(node.target):
        return "the host runs programs of its own, such as the branch that it has chosen"
    if torch.Tag.data_dependent_output in getattr(node.target, "tags", ()):
        return "the host reads a value from the device"
    if torch.Tag.dynamic_output_shape in getattr(node.target, "tags", ()):
        return "the size of its result depends on values"
    return at(rules(node).uncaptured, node)
