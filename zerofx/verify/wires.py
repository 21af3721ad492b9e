"""The invariants of what travels in fewer bits."""

from __future__ import annotations

from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliases import aliased_inputs, shard_of, writers
from zerofx.ir.graph import program_order
from zerofx.ir.interface import input_role
from zerofx.ir.parameters import ParameterTable
from zerofx.ir.reach import reached
from zerofx.ir.roles import Role, role
from zerofx.ir.wire_graph import becomes_parameters, quantized_as
from zerofx.verify.broken import broken


def verify_wires(graph: fx.Graph, table: ParameterTable) -> None:
    """Check that wires are read as what they are, and that what is exact stays so.

    Raises: GraphError.
    """
    of_gradients = (Role.GRADIENT_WIRE, Role.REDUCE_GRADIENT)
    quantized, dequantized = (
        [node for node in graph.nodes if node.target is operator and role(node) not in of_gradients]
        for operator in (ops.quantize, ops.dequantize)
    )
    if not quantized and not dequantized:
        return
    for wire in quantized:
        _says_what_it_holds(wire, table)
        _is_read_as_wire(wire)
    written = becomes_parameters(graph)
    order = program_order(graph)
    for values in dequantized:
        _is_of_a_wire(values)
        _is_freed(values)
        _is_of_the_newest(values, order)
        if values in written:
            raise broken(values, "is rounded, and a parameter's new value is computed of it.")


def _says_what_it_holds(wire: fx.Node, table: ParameterTable) -> None:
    """Check that a wire names the parameters of the bucket that it is made of, where they are."""
    flat, indices = wire.args[0], ops.argument(wire, "parameters")
    if flat.target is ops.pack and sorted(flat.args[1]) != sorted(indices):
        raise broken(wire, f"does not name the parameters that {flat.name} has.")
    index = shard_of(flat)
    if flat.target is not ops.pack and index >= 0 and list(indices) not in ([index], []):
        raise broken(wire, f"quantises {flat.name} as if it were of another parameter.")
    if indices and len({table[index].place.bucket for index in indices}) > 1:
        raise broken(wire, "does not hold parameters of one bucket.")


def _is_read_as_wire(wire: fx.Node) -> None:
    """Check that nothing computes with bytes: they are sent, freed, and dequantised as they are."""

    def passed_on(node: fx.Node) -> list[fx.Node]:
        return [user for user in node.users if ops.rules(user).gathers or ops.is_wait(user)]

    for holder in reached([wire], passed_on):
        for reader in holder.users:
            if reader.target is ops.dequantize:
                _is_read_in_parts(reader, wire)
            elif not (ops.is_collective(reader) or ops.is_wait(reader)):
                if reader.target is not ops.free:
                    raise broken(reader, f"reads {holder.name}, which is a wire of {wire.name}.")


def _is_read_in_parts(values: fx.Node, wire: fx.Node) -> None:
    """Check that a wire is dequantised as it was quantised, part by part."""
    flat, code = wire.args[:2]
    parts = ops.argument(wire, "parts")
    length = values.args[0].meta["val"].shape[0]
    num_wires = length // wire.meta["val"].shape[0] if length else 1
    numel = flat.meta["val"].shape[0] // parts
    if numel:
        check_read_as_made(values, (code, parts * num_wires, numel))


def check_read_as_made(reader: fx.Node, made: tuple[str, int, int]) -> None:
    """Check that wires are read in the code, the parts and the elements of each that they have."""
    read = tuple(reader.args[1:4])
    if read != made:
        text = "{} in {} parts of {}"
        of = f"{reader.args[0].name} as {text.format(*read)}"
        raise broken(reader, f"reads {of}, and it is {text.format(*made)}.")


def _is_of_a_wire(values: fx.Node) -> None:
    if quantized_as(values.args[0]) is None:
        raise broken(values, f"reads {values.args[0].name}, which nothing has quantised.")


def _is_freed(values: fx.Node) -> None:
    frees = [user for user in values.users if user.target is ops.free]
    if len(frees) != 1:
        raise broken(values, f"dequantised memory is freed {len(frees)} times; it must be once.")


def _is_of_the_newest(values: fx.Node, order: dict[fx.Node, int]) -> None:
    """Check that no shard is written to between when it was read for a wire and here."""
    wire = quantized_as(values.args[0])
    assert wire is not None
    taken = list(reached([wire.args[0]], _taken_from))
    read = min(order[node] for node in (wire, *filter(ops.is_move, taken)))
    for shard in taken:
        if shard.op != "placeholder" or input_role(shard).kind != "parameter":
            continue
        for writer in writers(shard):
            if read < order[writer] < order[values]:
                raise broken(
                    values,
                    f"is of {shard.name} as {wire.name} took it, and {writer.name} has written to "
                    "it since.",
                )


def _taken_from(node: fx.Node) -> list[fx.Node]:
    """The operands whose elements a shard is, moved or not."""
    return node.all_input_nodes if ops.is_move(node) else aliased_inputs(node)
