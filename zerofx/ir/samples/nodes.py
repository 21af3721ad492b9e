"""Questions about one node: its operator's name, its arguments, its sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from zerofx import compat

LINEAR = {
    "_to_copy",
    "alias",
    "clone",
    "convert_element_type",
    "detach",
    "lift_fresh_copy",
    "neg",
    "scalar_tensor",
    "sym_float",
}
"""The operators of one value whose result is linear in it, element by element."""


def name_of(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", node.target)
    return getattr(packet, "__name__", str(packet))


def sources_of(node: fx.Node) -> list[fx.Node]:
    """The nodes that a value is computed of; a size, as how long it is to be, is none of them."""
    is_arithmetic = is_pointwise(node) or not isinstance(node.meta.get("val"), torch.Tensor)
    sources = node.all_input_nodes
    if is_arithmetic and not isinstance(node.meta.get("val"), (tuple, list)):
        return sources
    return [source for source in sources if not is_symbol(source.meta.get("val"))]


def argument_of(node: fx.Node, name: str) -> Any:
    """Return one argument of an operator's call; None if it has none of this name."""
    schema = getattr(node.target, "_schema", None)
    for position, one in enumerate(schema.arguments if schema is not None else ()):
        if one.name == name:
            given = node.args[position] if position < len(node.args) else one.default_value
            return node.kwargs.get(name, given)
    return None


def is_pointwise(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        # arithmetic with sizes
        return getattr(target, "__module__", "") in ("_operator", "torch")
    return torch.Tag.pointwise in target.tags or name_of(node) in LINEAR


def is_whole_number(node: fx.Node) -> bool:
    return holds_whole_numbers(node.meta.get("val"))


def holds_whole_numbers(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    return not (value.dtype.is_floating_point or value.dtype.is_complex)


def is_symbol(value: Any) -> bool:
    return isinstance(value, torch.SymInt)


def sizes_of(value: Any) -> tuple[int, ...]:
    if not isinstance(value, torch.Tensor):
        return ()
    return tuple(map(compat.aot.size_hint, value.shape))


def shape_of(node: Any) -> tuple[int, ...]:
    """Return the sizes of a node's tensor as they were when captured."""
    return sizes_of(node.meta.get("val"))


def is_reduction(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if any(one.name == "keepdim" for one in schema.arguments):
        return True
    return name_of(node) in ("sum", "mean", "max", "min", "prod", "any", "all", "amax", "amin")
