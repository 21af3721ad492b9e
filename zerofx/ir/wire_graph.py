"""Questions about wires in a program: what they are of, and what becomes of them."""

from __future__ import annotations

from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliases import memory_of, mutated_inputs, readers
from zerofx.ir.graph import updated_by
from zerofx.ir.interface import input_role
from zerofx.ir.reach import reached
from zerofx.ir.roles import Role, role


def is_parameter(shard: fx.Node) -> bool:
    """Return whether a node is a parameter's shard, as it came in or with a new value."""
    return any(
        source.op == "placeholder" and input_role(source).kind == "parameter"
        for source in memory_of(shard)
    )


def becomes_parameters(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that new values of parameters are computed of, but for gradients.

    A gradient is what ranks reduce: what it is computed of does not count.
    """
    values: list[fx.Node] = []
    for node in graph.nodes:
        if updated_by(node) or any(map(is_parameter, mutated_inputs(node))):
            values += node.all_input_nodes

    def computed_from(node: fx.Node) -> list[fx.Node]:
        return [] if ops.rules(node).reduces else node.all_input_nodes

    return set(reached(values, computed_from))


def quantized_as(wire: fx.Node) -> fx.Node | None:
    """The ``quantize`` that made a wire, here or before its gather; None for what is no wire."""
    while ops.is_wait(wire) or ops.rules(wire).gathers:
        wire = wire.args[0]
    return wire if wire.target is ops.quantize else None


def frees_of(wait: fx.Node) -> list[fx.Node]:
    """The frees of what a gather gives to who reads it: its result, or the values of its wire."""
    whole = next((user for user in wait.users if user.target is ops.dequantize), wait)
    return [reader for reader in readers(whole) if reader.target is ops.free]


def exact_shard(sent: fx.Node) -> fx.Node:
    """The shard that is sent as this: it may be a wire of it, or a cast to the dtype that uses it.

    Another gather of the same second shard may have made a wire of it already.
    """
    shard = sent.args[0] if sent.target is ops.quantize else sent
    return shard.args[0] if role(shard) == Role.GATHER_CAST else shard


def exact_behind(gathered: fx.Node) -> fx.Node:
    """The shard that a gather's wait, or the values of its wire, are put together from."""
    wait = gathered.args[0] if gathered.target is ops.dequantize else gathered
    return exact_shard(ops.gathered_from(wait))
