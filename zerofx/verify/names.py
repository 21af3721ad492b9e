"""Numbers in operators name what is there, and what they serve: parameters, parts of lists."""

from __future__ import annotations

import operator
from functools import cache
from typing import Any

from torch import fx

from zerofx.ir import ops
from zerofx.ir.parameters import ParameterTable
from zerofx.ir.roles import parameter_of
from zerofx.verify.broken import broken


def verify_names(graph: fx.Graph, table: ParameterTable) -> None:
    """Check every number in ``graph`` that stands for a parameter, or for a part of a list.

    Raises: GraphError naming the node and the rule.
    """
    for node in graph.nodes:
        if node.target is operator.getitem:
            _has_that_part(node)
        elif ops.is_ours(node.target):
            for index in _named(node):
                if not 0 <= index < len(table):
                    raise broken(node, f"names parameter {index} of {len(table)}.")
            if node.target in (ops.take_shard, ops.mask_padding):
                _is_of_its_parameter(node, table)


def _has_that_part(node: fx.Node) -> None:
    whole, index = node.args
    parts = whole.meta.get("val") if isinstance(whole, fx.Node) else None
    if isinstance(parts, (list, tuple)) and not -len(parts) <= index < len(parts):
        raise broken(node, f"takes part {index} of {whole.name}, which has {len(parts)}.")


def _named(node: fx.Node) -> list[int]:
    found: list[int] = []
    for position in _positions(node.target):
        if position < len(node.args):
            value = node.args[position]
            found += value if isinstance(value, (list, tuple)) else [value]
    return found


@cache
def _positions(target: Any) -> tuple[int, ...]:
    """Return the arguments of an operator that are indices into the parameter table."""
    arguments = target._schema.arguments
    return tuple(n for n, one in enumerate(arguments) if one.name in ("parameter", "parameters"))


def _is_of_its_parameter(node: fx.Node, table: ParameterTable) -> None:
    value, index = node.args[0].meta["val"], node.args[1]
    info = table.cut(index, ops.argument(node, "axis"))
    is_shard = node.target is ops.mask_padding
    shape = (info.shard_numel,) if is_shard else info.shape
    if index != parameter_of(node) or tuple(value.shape) != shape:
        what = "the shard of" if is_shard else "all of"
        raise broken(node, f"takes {node.args[0].name} for {what} {info.name!r}, which it is not.")
