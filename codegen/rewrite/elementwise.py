"""Decide whether an update may run on flat shards, and make its graph fit them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import fx

from zerofx.codegen.operations import ALIASES, operator_names, rule_of
from zerofx.errors import StepError
from zerofx.ir.aliases import mutated_inputs

aten = torch.ops.aten


class UpdateError(StepError):
    """An optimizer's update cannot be traced, or cannot run on shards."""


def check_elementwise(
    gm: fx.GraphModule, *, shape: Sequence[int], whole: Sequence[fx.Node], optimizer: str
) -> set[fx.Node]:
    """Return the nodes that hold one element per parameter element, or refuse the update.

    ``whole`` are the placeholders of the parameter's ``shape``: parameter, gradient, moments.
    Every operation that reads such a tensor must compute each element of its result from the
    same element of its operands and from 0-dim tensors and numbers, so that running it on a
    flat piece gives that piece of the result.

    Raises: UpdateError naming the operation and the line of the optimizer that uses it.
    """
    shape = tuple(shape)
    found = set(whole)
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        reason = why_not_elementwise(node, shape, found)
        if reason is not None:
            raise UpdateError(
                f"{optimizer} cannot run on shards: `{node.target}`{operation_line(node)} "
                f"{reason}. A shard is a flat piece of the parameter, so every operation of the "
                'update must be elementwise. Use options={"stage": 0}, which updates whole '
                "parameters, or an elementwise optimizer."
            )
        reads_whole = any(operand in found for operand in node.all_input_nodes)
        if (reads_whole and is_tensor(node)) or is_whole_factory(node, shape):
            found.add(node)
    return found


def fit_to_shards(gm: fx.GraphModule, *, shape: Sequence[int], whole: set[fx.Node]) -> None:
    """Make a checked graph run on flat shards of any length.

    Before, for f32[4, 3]: ``zeros([4, 3])``.  After: ``zeros([sym_size(parameter, 0)])``.
    """
    shape = list(shape)
    placeholders = gm.graph.find_nodes(op="placeholder")
    length: fx.Node | None = None
    for node in [n for n in gm.graph.nodes if n in whole and n.op == "call_function"]:
        if node.kwargs.get("memory_format") in (torch.channels_last, torch.channels_last_3d):
            node.update_kwarg("memory_format", torch.contiguous_format)
        for position in _positions(node, "stride") if shape else ():
            node.update_arg(position, [1])
        for position in _positions(node, "size") if shape else ():
            if list(node.args[position]) != shape:
                continue
            if length is None:
                with gm.graph.inserting_after(placeholders[-1]):
                    length = gm.graph.call_function(aten.sym_size.int, (placeholders[0], 0))
            node.update_arg(position, [length])


def _positions(node: fx.Node, name: str) -> list[int]:
    """Return the position of an operator's argument of this name, if it is passed by position."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    return [place for place in range(len(node.args)) if names[place : place + 1] == [name]]


def why_not_elementwise(node: fx.Node, shape: tuple, whole: set[fx.Node]) -> str | None:
    """Return the reason why an operation may not run on shards, or None."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return None  # scalar arithmetic
    if torch.Tag.nondeterministic_seeded in target.tags:
        return "draws random numbers, which would differ from those of the whole parameter"
    operands = [operand for operand in node.all_input_nodes if is_tensor(operand)]
    if not any(operand in whole for operand in operands):
        return None
    is_known = rule_of(target) is not None or operator_names(target)[0] in ALIASES
    if not (is_known or _is_pointwise(target)):
        return "is not elementwise"
    if operator_names(target)[1] == "index_put" and not _writes_one_value_by_mask(node, whole):
        return "is not elementwise"
    for operand in operands:
        size = tuple(operand.meta["val"].shape)
        if operand not in whole and size:
            return f"combines the parameter's elements with another tensor, of shape {size}"
    if any(written not in whole for written in mutated_inputs(node)):
        return "writes the parameter's elements into a scalar"
    size = tuple(node.meta["val"].shape) if is_tensor(node) else shape
    return None if size == shape else f"gives shape {size} where the parameter's is {shape}"


def _is_pointwise(target: torch._ops.OpOverload) -> bool:
    if torch.Tag.pointwise in target.tags:
        return True
    # abs_ is not tagged; its functional form is.
    packet = getattr(aten, operator_names(target)[1], None) if target.namespace == "aten" else None
    overloads = packet.overloads() if packet is not None else ()
    for name in ("Tensor", "Tensor_Scalar", "default"):
        if name in overloads:
            return torch.Tag.pointwise in getattr(packet, name).tags
    return False


def _writes_one_value_by_mask(node: fx.Node, whole: set[fx.Node]) -> bool:
    """Return whether this is ``x[mask] = number``, with a mask of the whole shape."""
    indices, value = node.args[1], node.args[2]
    if len(indices) != 1 or indices[0] not in whole or node.args[3:] not in ((), (False,)):
        return False
    return indices[0].meta["val"].dtype is torch.bool and value.meta["val"].ndim == 0


def is_whole_factory(node: fx.Node, shape: tuple) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or not shape:
        return False
    if rule_of(node.target) is None:
        return False
    return any(tuple(node.args[position]) == shape for position in _positions(node, "size"))


def is_tensor(node: fx.Node) -> bool:
    """Return whether a node's result is known to be a tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def operation_line(node: fx.Node) -> str:
    """Return the line of the optimizer that calls the operation, as `` at file:line``."""
    line = source_line(node)
    return f" at {line}" if line else ""


def source_line(node: fx.Node) -> str:
    """``file:line`` of the optimizer's source that a node was traced from, or nothing."""
    found = re.search(r'File "(.+?)", line (\d+)', node.meta.get("stack_trace") or "")
    return f"{found[1]}:{found[2]}" if found else ""
