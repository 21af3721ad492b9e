"""Put a captured program into the form that passes expect, without changing what it computes.

Functionalisation leaves ``copy`` where the user wrote in place, reads parameters only for
their shape, and keeps ``_foreach_*`` lists whole.  Passes would have to see through each.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from zerofx.graph import Builder, erase_unused, input_role, placeholders

aten = torch.ops.aten


def normalize(gm: fx.GraphModule) -> None:
    """Rewrite in place: split foreach operators, drop copies into fresh memory and no-ops."""
    _split_foreach(gm)
    _detach_shapes_from_parameters(gm)
    _drop_copies(gm)
    gm.graph.lint()
    gm.recompile()


def _split_foreach(gm: fx.GraphModule) -> None:
    """``_foreach_mul([a, b], s)[0]`` -> ``mul(a, s)``, from the operator's own decomposition."""
    for node in list(gm.graph.nodes):
        name = getattr(getattr(node.target, "_schema", None), "name", "")
        if not name.startswith("aten::_foreach_"):
            continue
        single = _single_tensor_overload(node.target)
        builder = Builder(gm, "capture")
        for item in list(node.users):
            with gm.graph.inserting_before(node):
                replacement = gm.graph.call_function(
                    single,
                    tuple(_pick(argument, item.args[1]) for argument in node.args),
                    {key: _pick(value, item.args[1]) for key, value in node.kwargs.items()},
                )
            replacement.meta = dict(item.meta)
            builder.refresh(replacement)
            item.replace_all_uses_with(replacement)
            gm.graph.erase_node(item)
        gm.graph.erase_node(node)


def _pick(argument, position: int):
    return argument[position] if isinstance(argument, (list, tuple)) else argument


# foreach overloads whose single-tensor operator has another name or overload.
_FOREACH = {
    "norm.Scalar": aten.linalg_vector_norm.default,
    "clamp_max.Scalar": aten.clamp_max.default,
    "clamp_min.Scalar": aten.clamp_min.default,
    "pow.Scalar": aten.pow.Tensor_Scalar,
    "pow.ScalarList": aten.pow.Tensor_Scalar,
    "zero.default": aten.zeros_like.default,
}


def _single_tensor_overload(target) -> torch._ops.OpOverload:
    name = target._schema.name.removeprefix("aten::_foreach_")
    overload = target._overloadname
    if (known := _FOREACH.get(f"{name}.{overload}")) is not None:
        return known
    packet = getattr(aten, name)
    for candidate in (overload, "Tensor" if overload in ("Scalar", "ScalarList", "List") else ""):
        if candidate in packet.overloads():
            return getattr(packet, candidate)
    return packet.default


def _detach_shapes_from_parameters(gm: fx.GraphModule) -> None:
    """``empty_like(parameter)`` -> ``empty_strided(...)``: it reads no values."""
    fills = {aten.zeros_like.default: 0, aten.ones_like.default: 1}
    builder = Builder(gm, "capture")
    for parameter in placeholders(gm.graph, "parameter"):
        for node in list(parameter.users):
            if node.target not in (aten.empty_like.default, *fills):
                continue
            value = node.meta["val"]
            options = {"dtype": value.dtype, "device": value.device}
            with gm.graph.inserting_before(node):
                if node.target is aten.empty_like.default:
                    replacement = gm.graph.call_function(
                        aten.empty_strided.default,
                        (list(value.shape), list(value.stride())),
                        options,
                    )
                else:
                    replacement = gm.graph.call_function(
                        aten.full.default, (list(value.shape), fills[node.target]), options
                    )
            replacement.meta = dict(node.meta)
            builder.refresh(replacement)
            node.replace_all_uses_with(replacement)
            gm.graph.erase_node(node)


def _drop_copies(gm: fx.GraphModule) -> None:
    """``copy(x, y)`` -> ``y`` where both have one dtype, shape and layout and x is unread."""
    for node in list(gm.graph.nodes):
        if node.target is not aten.copy.default:
            continue
        into, source = node.args[0], node.args[1]
        if not _same_layout(into.meta["val"], source.meta["val"]):
            continue
        if source.op == "placeholder" and input_role(source).kind != "other":
            continue  # a copy of a parameter or gradient must not become its alias
        node.replace_all_uses_with(source)
        gm.graph.erase_node(node)
        erase_unused(gm.graph, [into])
    _drop_identity_writes(gm)


def _drop_identity_writes(gm: fx.GraphModule) -> None:
    for node in list(gm.graph.nodes):
        if node.target is aten.copy_.default and node.args[0] is node.args[1]:
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
        elif node.target is operator.getitem and not node.users:
            gm.graph.erase_node(node)


def _same_layout(left: torch.Tensor, right: torch.Tensor) -> bool:
    return (
        left.dtype == right.dtype
        and left.device == right.device
        and left.shape == right.shape
        and left.stride() == right.stride()
    )
