"""The invariants of gradients that travel in fewer bits."""

from __future__ import annotations

from torch import fx

from zerofx.ir import ops
from zerofx.ir.parameters import ParameterTable
from zerofx.ir.reduction_hops import code_of
from zerofx.ir.roles import Role, role
from zerofx.ir.wires import NARROW, wire_length
from zerofx.verify.broken import broken
from zerofx.verify.wires import check_read_as_made


def verify_reductions(graph: fx.Graph, table: ParameterTable) -> None:
    """Check that wires of gradients are sent, summed and gathered as what they are.

    Raises: GraphError.
    """
    world_size = max((info.world_size for info in table), default=1)
    for node in graph.nodes:
        if node.target is ops.all_to_all_start:
            _sends_parts(node, world_size)
            _is_summed(node)
        elif node.target is ops.dequantize_sum:
            _is_of_what_was_sent(node)
        elif node.target is ops.all_gather_start and role(node) == Role.REDUCE_GRADIENT:
            _gathers_sums(node, world_size)
        elif node.target in (ops.quantize, ops.fill_up) and role(node) == Role.GRADIENT_WIRE:
            _says_what_it_holds(node)
            if node.target is ops.quantize and not code_of(node):
                raise broken(node, f"has {node.args[1]!r} for a code, and there is no such one.")
        elif node.target is ops.dequantize and role(node) == Role.REDUCE_GRADIENT:
            if role(node.args[0]) != Role.REDUCE_GRADIENT:
                raise broken(
                    node, f"reads {node.args[0].name}, which no gradient has been sent as."
                )
        if code_of(node):
            _is_sent(node)


def _sends_parts(start: fx.Node, world_size: int) -> None:
    wire, ranks = start.args[:2]
    if not code_of(wire):
        raise broken(start, f"sends {wire.name}, which is no wire of a gradient.")
    if ranks != ops.num_ranks(start, world_size):
        raise broken(start, f"sends {ranks} parts to {ops.num_ranks(start, world_size)} ranks.")
    if wire.target is ops.quantize and ops.argument(wire, "parts") != ranks:
        parts = ops.argument(wire, "parts")
        raise broken(start, f"sends {ranks} parts of {wire.name}, which has {parts}.")


def _is_summed(start: fx.Node) -> None:
    """Check that what ranks have sent is for one sum, in the code and the parts that they sent."""
    wait = ops.wait_of(start)
    for reader in wait.users:
        if reader.target is not ops.dequantize_sum:
            raise broken(reader, f"reads {wait.name}, which is of parts that are yet to be summed.")
    if len(wait.users) != 1:
        raise broken(start, f"is summed {len(wait.users)} times; it must be once.")
    (total,) = wait.users
    wire, ranks = start.args[:2]
    length = _flat(wire).meta["val"].shape[0]
    check_read_as_made(total, (code_of(wire), ranks, length // ranks))


def _is_of_what_was_sent(total: fx.Node) -> None:
    received = total.args[0]
    if received.target is not ops.wait or received.args[0].target is not ops.all_to_all_start:
        raise broken(total, f"sums {received.name}, which ranks have not sent each other.")


def _gathers_sums(start: fx.Node, world_size: int) -> None:
    """Check that sums go back over the axis along which ranks have sent their parts."""
    wire, ranks = start.args[:2]
    total = _flat(wire)
    if not code_of(wire) or total.target is not ops.dequantize_sum:
        raise broken(start, f"gathers {wire.name}, which is no wire of a sum.")
    sent, axis = total.args[0].args[0], ops.argument(start, "axis")
    if axis != ops.argument(sent, "axis") or ranks != ops.num_ranks(start, world_size):
        of = f"{ops.argument(sent, 'axis')} between {sent.args[1]} ranks"
        raise broken(start, f"gathers over {axis} between {ranks} ranks what is summed over {of}.")
    if code_of(wire) != total.args[1]:
        raise broken(start, f"gathers in {code_of(wire)} what is summed in {total.args[1]}.")
    for reader in total.users:
        if reader is not wire and reader.target is not ops.rounding_error:
            raise broken(
                reader,
                f"reads {total.name}, which no other rank has: they compute with what {start.name} "
                "gathers, and so must this one.",
            )
    wait = ops.wait_of(start)
    for values in wait.users:
        if code_of(wire) != NARROW:
            if values.target is not ops.dequantize:
                raise broken(values, f"reads {wait.name}, which is a wire of {total.name}.")
            check_read_as_made(values, (code_of(wire), ranks, total.meta["val"].shape[0]))


def _flat(wire: fx.Node) -> fx.Node:
    """The buffer whose parts a wire has."""
    return wire.args[0]


def _says_what_it_holds(node: fx.Node) -> None:
    """Check that what counts as zeros is what the gradients of a bucket do not fill."""
    flat, indices = node.args[0], ops.argument(node, "parameters")
    if flat.target is ops.flatten_bucket and sorted(flat.args[1]) != sorted(indices):
        raise broken(node, f"does not name the parameters that {flat.name} has.")


def _is_sent(wire: fx.Node) -> None:
    """Check that nothing computes with a wire, and that all of it is there."""
    for reader in wire.users:
        if not (ops.is_collective(reader) or reader.target is ops.rounding_error):
            raise broken(reader, f"reads {wire.name}, which is a wire of {_flat(wire).name}.")
    times = sum(map(ops.is_collective, wire.users))
    if times != 1:
        raise broken(wire, f"is sent {times} times; it must be once.")
    numel, parts = _flat(wire).meta["val"].shape[0], 1
    if wire.target is ops.quantize:
        parts = ops.argument(wire, "parts")
    length = parts * wire_length(numel // parts, code_of(wire))
    if wire.meta["val"].shape[0] != length:
        raise broken(wire, f"has {wire.meta['val'].shape[0]} elements, and needs {length}.")
