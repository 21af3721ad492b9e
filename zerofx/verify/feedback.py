"""The invariants of what wires of gradients lose: it is kept, and added to what they send next."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from zerofx.ir import ops
from zerofx.ir.loss_scale import loss_scales_of
from zerofx.ir.reduction_hops import code_of, hops_into
from zerofx.ir.roles import parameter_of
from zerofx.verify.broken import broken


def verify_feedback(graph: fx.Graph) -> None:
    """Check that a gradient is corrected by what it has lost over its axis, once, and nothing else.

    Raises: GraphError.
    """
    for node in graph.nodes:
        if node.target is ops.correct:
            _is_of_its_gradients(node)
            _loses_once(node)
        elif node.target is ops.rounding_error:
            _is_of_a_wire(node)
            _is_kept(node)
        elif node.target is ops.keep_error:
            _keeps_what_was_lost(node)
        if node.target in (ops.correct, ops.rounding_error):
            _is_by_its_scale(node)


def _is_by_its_scale(node: fx.Node) -> None:
    exact = node.args[0]
    if node.target is ops.rounding_error and exact.target is ops.correct:
        exact = exact.args[0]
    if [ops.argument(node, "scale")] != (loss_scales_of(exact) or [None]):
        raise broken(node, "is not by the scale that gradients have been multiplied by.")


def _is_of_its_gradients(corrected: fx.Node) -> None:
    """Check that the errors are of the parameters whose gradients they are added to."""
    flat, indices = corrected.args[0], ops.argument(corrected, "parameters")
    hops = hops_into(flat)
    laid_out = hops[-1].source if hops else flat
    named = [parameter_of(flat)] if parameter_of(flat) >= 0 else None
    if laid_out.target in (ops.flatten_bucket, ops.pack):
        named = laid_out.args[1]
    if named is not None and sorted(named) != sorted(indices):
        raise broken(corrected, f"adds errors of other parameters than {flat.name} has.")
    rest = ops.argument(corrected, "rest")
    if rest is not None and rest.target is not ops.rounding_error:
        raise broken(corrected, f"adds {rest.name}, which nothing has lost.")


def _wires_of(corrected: fx.Node) -> list[fx.Node]:
    return [reader for reader in corrected.users if code_of(reader)]


def _start_of(corrected: fx.Node) -> fx.Node:
    """Return the start that sends the wire of a corrected gradient."""
    (wire,) = _wires_of(corrected)
    return next(filter(ops.is_collective, wire.users))


def _loses_once(corrected: fx.Node) -> None:
    """Check that one wire is made of it, over the axis of its errors, whose error is found."""
    wires = _wires_of(corrected)
    lost = [reader for reader in corrected.users if reader.target is ops.rounding_error]
    if len(wires) != 1 or len(lost) != 1 or len(corrected.users) != 2:
        raise broken(
            corrected,
            f"is sent by {len(wires)} wires, {len(lost)} of whose errors are found: each must be "
            "one, and nothing else reads it.",
        )
    axis, sent_over = (ops.argument(of, "axis") for of in (corrected, _start_of(corrected)))
    if sent_over != axis:
        raise broken(corrected, f"adds errors over {axis} to what is sent over {sent_over}.")


def _is_of_a_wire(lost: fx.Node) -> None:
    """Check that an error is that of a wire, of what it was made of and as it was made."""
    exact, wire, code, parts = lost.args[:4]
    if not code_of(wire) or wire.args[0] is not exact:
        raise broken(lost, f"is not of what {wire.name} was made of.")
    made = parts  # a cast has none
    if wire.target is ops.quantize:
        made = ops.argument(wire, "parts")
    if (code, parts) != (code_of(wire), made):
        raise broken(lost, f"reads {wire.name} as {code} in {parts} parts.")
    if exact.target not in (ops.correct, ops.dequantize_sum):
        raise broken(lost, f"is kept of {exact.name}, to which no error was added before.")


def _is_kept(lost: fx.Node) -> None:
    for reader in lost.users:
        if reader.target is ops.correct and ops.argument(reader, "rest") is lost:
            continue
        if reader.target is not ops.keep_error:
            raise broken(reader, f"reads {lost.name}, which is for the next gradient alone.")
    if not lost.users:
        raise broken(lost, "is lost for good: nothing keeps it.")
    corrected = lost.args[0]
    if corrected.target is not ops.correct:
        return
    goes_on = [reader for reader in lost.users if reader.target is ops.correct]
    kept = [index for reader in lost.users if reader not in goes_on for index in reader.args[2]]
    indices = ops.argument(corrected, "parameters")
    if goes_on:
        same = _same_errors(goes_on[0], corrected)
        if len(goes_on) > 1 or kept or not same:
            raise broken(lost, "is added more than once, or to what is none of its parameters'.")
    elif sorted(kept) != sorted(indices):
        raise broken(lost, "is kept of other parameters than it was lost of, or not once of each.")


def _same_errors(one: fx.Node, other: fx.Node) -> bool:
    return all(
        ops.argument(one, name) == ops.argument(other, name)
        for name in ("parameters", "numel", "axis")
    )


def _keeps_what_was_lost(keep: fx.Node) -> None:
    rest, sums = keep.args[:2]
    axis = ops.argument(keep, "axis")
    if rest.target is not ops.rounding_error or rest.args[0].target is not ops.correct:
        raise broken(keep, f"keeps {rest.name}, which no wire of corrected gradients has lost.")
    corrected = _first(rest)
    if ops.argument(corrected[0], "axis") != axis:
        raise broken(keep, f"keeps over {axis} what is corrected over another axis.")
    expected = [total for one in corrected if (total := _sum_that_comes_back(one)) is not None]
    found = [lost.args[0] for lost in sums]
    if sorted(found) != sorted(expected):
        raise broken(keep, "does not keep what sums have lost on their way back to all ranks.")


def _first(rest: fx.Node) -> Sequence[fx.Node]:
    """The corrected gradients that an error is of: the last, and those whose errors it had."""
    found = []
    while rest is not None:
        found.append(rest.args[0])
        rest = ops.argument(rest.args[0], "rest")
    return found


def _sum_that_comes_back(corrected: fx.Node) -> fx.Node | None:
    """The sum that this rank sends back to others, of what they have sent it."""
    total = next(iter(ops.wait_of(_start_of(corrected)).users))
    readers = [reader for wire in total.users if code_of(wire) for reader in wire.users]
    return total if any(ops.rules(reader).gathers for reader in readers) else None
