"""Shared memory in a program: aliases, writers, and last readers."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.interface import input_role
from zerofx.ir.reach import reached
from zerofx.ir.roles import parameter_of

aten = torch.ops.aten


def aliased_inputs(node: fx.Node) -> list[fx.Node]:
    """Arguments whose memory the node's result may share."""
    if node.op != "call_function":
        return []
    shares = ops.rules(node).shares
    if shares is not None:
        return list(shares(node))
    if node.target is operator.getitem:
        return _whole_of(*node.args)
    return _arguments(node, _memory_arguments(node.target)[0])


def _whole_of(whole: fx.Node | Any, position: int) -> list[fx.Node]:
    """The memory that one of several results is in."""
    if not isinstance(whole, fx.Node):
        return []
    if whole.target is ops.update_together:
        return list(whole.args[0][position : position + 1])  # what is behind the values is new
    if whole.target is ops.wait_shards:
        (start,) = whole.args
        return [mutated_inputs(start)[position]]  # and not those written to with it
    return [whole]


def mutated_inputs(node: fx.Node) -> list[fx.Node]:
    """Arguments that the node writes to."""
    return _arguments(node, _memory_arguments(node.target)[1])


_UNSAFE = (aten._unsafe_view, aten.unsafe_split, aten.unsafe_split_with_sizes)
"""Operators whose results are views, and whose schemas do not say so."""

Arguments = tuple[tuple[int, str], ...]
"""Positions and names."""

_KNOWN: dict[int, tuple[Arguments, Arguments, Any]] = {}
"""By the ``id`` of an operator, which is kept: to hash one takes torch longer."""


def _memory_arguments(target: Any) -> tuple[Arguments, Arguments, Any]:
    """Arguments whose memory a result may share, those that are written to, and the operator."""
    known = _KNOWN.get(id(target))
    if known is not None:
        return known
    if not isinstance(target, torch._ops.OpOverload):
        return (), (), None
    schema = target._schema
    marked = [
        (argument.alias_info.is_write, (position, argument.name))
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None
    ]
    shared = tuple(which for _, which in marked if schema.returns)
    if target.overloadpacket in _UNSAFE:
        shared = ((0, "self"),)
    written = tuple(which for is_write, which in marked if is_write)
    _KNOWN[id(target)] = shared, written, target
    return _KNOWN[id(target)]


def _arguments(node: fx.Node, which: Arguments) -> list[fx.Node]:
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


Heirs = Mapping[fx.Node, Sequence[fx.Node]]
"""The nodes whose memory is that of a node, itself and not through others."""


def heirs_in(graph: fx.Graph) -> Heirs:
    """Find the heirs of all nodes; what is gathered from a shard counts as the shard's memory."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        for source in node.all_input_nodes if ops.rules(node).gathers else aliased_inputs(node):
            found.setdefault(source, []).append(node)
    return found


def aliases(node: fx.Node, heirs: Heirs | None = None) -> set[fx.Node]:
    """``node`` and every later node that may share its memory; by these ``heirs``, if given."""
    found = {node}
    pending = [node]
    while pending:
        source = pending.pop()
        for user in source.users if heirs is None else heirs.get(source, ()):
            # Not of its own operand alone: a part of a wait's result is what the start was given.
            if user not in found and (heirs or not found.isdisjoint(aliased_inputs(user))):
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
    return set(reached([node], aliased_inputs))


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


def shards_in(packed: fx.Node) -> dict[int, fx.Node]:
    """The shards that a bucket's shard is packed of, by parameter; itself if it packs none."""
    if packed.target is ops.pack:
        return dict(zip(packed.args[1], packed.args[0], strict=True))
    return {shard_of(packed): packed}


def writers(node: fx.Node) -> set[fx.Node]:
    """Every node that writes to ``node``'s memory."""
    return {reader for reader, alias in uses(node) if alias in mutated_inputs(reader)}


def done_with(reader: fx.Node) -> fx.Node:
    """The node with which a reader is done with its operands: a start reads them until its wait."""
    if ops.is_collective(reader) or ops.is_move(reader):
        return max(map(done_with, reader.users))
    return reader
