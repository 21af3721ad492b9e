"""Shared memory in a program: aliases, writers, and last readers."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from functools import cache

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.interface import input_role
from zerofx.ir.roles import parameter_of

aten = torch.ops.aten


def aliased_inputs(node: fx.Node) -> list[fx.Node]:
    """Arguments whose memory the node's result may share."""
    if node.op != "call_function":
        return []
    shares = ops.rules(node).shares
    if shares is not None:
        return list(shares(node))
    if node.target is operator.getitem and node.args[0].target is ops.update_together:
        values, position = node.args[0].args[0], node.args[1]
        return list(values[position : position + 1])  # what is behind the values is new
    if node.target is operator.getitem and node.args[0].target is ops.wait_shards:
        (start,) = node.args[0].args
        return [mutated_inputs(start)[node.args[1]]]  # and not those written to with it
    if node.target in (operator.getitem, aten._unsafe_view.default):  # its schema does not say so
        return [node.args[0]] if isinstance(node.args[0], fx.Node) else []
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    return _arguments(node, _aliased_arguments(node.target))


def mutated_inputs(node: fx.Node) -> list[fx.Node]:
    """Arguments that the node writes to."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return []
    return _arguments(node, _written_arguments(node.target))


@cache
def _aliased_arguments(operator_: torch._ops.OpOverload) -> tuple[tuple[int, str], ...]:
    """Positions and names of the arguments whose memory a result may share."""
    schema = operator_._schema
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and schema.returns
    )


@cache
def _written_arguments(operator_: torch._ops.OpOverload) -> tuple[tuple[int, str], ...]:
    """Positions and names of the arguments that an operator writes to."""
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(operator_._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _arguments(node: fx.Node, which: Iterable[tuple[int, str]]) -> list[fx.Node]:
    found: list[fx.Node] = []
    for position, name in which:
        value = node.args[position] if position < len(node.args) else node.kwargs.get(name)
        fx.node.map_arg(value, found.append)
    return found


def is_compute(node: fx.Node) -> bool:
    """Return whether a node computes a result, or names a part of one, and does nothing else."""
    is_call = node.op == "call_function"
    return is_call and not ops.is_ours(node.target) and not mutated_inputs(node)


def is_view(node: fx.Node) -> bool:
    """Return whether a node only names another's memory, in whatever shape."""
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and is_view(node.args[0])
    return is_compute(node) and len(aliased_inputs(node)) == 1


def aliases(node: fx.Node, through_gathers: bool = False) -> set[fx.Node]:
    """``node`` and every later node that may share its memory.

    ``through_gathers`` takes what is gathered from a shard for the shard's memory too.
    """
    found = {node}
    pending = [node]
    while pending:
        for user in pending.pop().users:
            sources = aliased_inputs(user)
            if through_gathers and ops.rules(user).gathers:
                sources = user.all_input_nodes
            if user not in found and any(source in found for source in sources):
                found.add(user)
                pending.append(user)
    return found


def uses(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Every reader of ``node``'s memory, with the alias that it reads."""
    return ((reader, alias) for alias in aliases(node) for reader in alias.users)


def readers(node: fx.Node) -> set[fx.Node]:
    """Every node that reads ``node``'s memory, through whatever view."""
    return {reader for reader, _ in uses(node)}


def memory_of(node: fx.Node) -> set[fx.Node]:
    """``node`` and every earlier node whose memory it may share."""
    found = {node}
    pending = [node]
    while pending:
        sources = set(aliased_inputs(pending.pop())) - found
        found |= sources
        pending += sources
    return found


def is_kept_on_host(node: fx.Node) -> bool:
    """Return whether a node's memory is a parameter's shard that is kept in host memory."""
    return any(
        source.op == "placeholder" and input_role(source).on_host for source in memory_of(node)
    )


def shard_of(node: fx.Node) -> int:
    """Index of the parameter that a flat shard is of, or is laid out like; -1 for none."""
    if node.target is aten.copy_.default:
        return shard_of(node.args[0])
    if node.op == "placeholder":
        return input_role(node).parameter if input_role(node).sharded else -1
    return parameter_of(node)


def writers(node: fx.Node) -> set[fx.Node]:
    """Every node that writes to ``node``'s memory."""
    return {reader for reader, alias in uses(node) if alias in mutated_inputs(reader)}


def done_with(reader: fx.Node, order: dict[fx.Node, int]) -> int:
    """Return when a reader is done with its operands: a start reads them until its wait."""
    if ops.is_collective(reader) or ops.is_move(reader):
        return max(done_with(user, order) for user in reader.users)
    return order[reader]
