"""Operators that compute each element from the same element of their operands."""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten

CASTS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)

# Same shape in and out, element by element, though not tagged pointwise.
_SAME_SHAPE = {
    aten._to_copy.default,
    aten.alias.default,
    aten.clone.default,
    aten.copy.default,
    aten.detach.default,
    aten.empty_like.default,
    aten.full_like.default,
    aten.lift_fresh_copy.default,
    aten.ones_like.default,
    aten.zeros_like.default,
}


def is_elementwise(node: fx.Node) -> bool:
    """Return whether a node may run on flat shards of its operands if their shapes agree."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return target in _SAME_SHAPE or torch.Tag.pointwise in target.tags


def is_scalar(value) -> bool:
    """Return whether a node's value broadcasts to any shard: a number or a 0-dim tensor."""
    return not isinstance(value, torch.Tensor) or value.dim() == 0


def is_reshape(node: fx.Node) -> bool:
    """Return whether a node only renames the dimensions of a contiguous tensor."""
    return node.target in (
        aten.view.default,
        aten._unsafe_view.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
    )
