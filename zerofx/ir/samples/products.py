"""Products of matrices."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import fx

from zerofx.ir.samples.nodes import name_of
from zerofx.ir.samples.pointwise import added
from zerofx.ir.samples.values import (
    COMPARES,
    MIXES,
    NOT_LINEAR,
    ONE,
    Kind,
    MixedError,
    Value,
    check_parts,
    first_objection,
)

if TYPE_CHECKING:
    from zerofx.ir.samples.follow import Samples

_PRODUCTS = {
    "mm": "ik,kj->ij",
    "addmm": "ik,kj->ij",
    "bmm": "bik,bkj->bij",
    "baddbmm": "bik,bkj->bij",
    "mv": "ik,k->i",
    "dot": "k,k->",
    "linear": "ik,jk->ij",
}


def product(samples: Samples, node: fx.Node) -> Value:
    result = _product(samples, node)
    if not name_of(node).startswith(("add", "badd")) or result.kind == Kind.MIXED:
        return result
    term = samples.of(node.args[0])
    if term.kind == Kind.MIXED:
        return replace(term, dims=result.dims)
    if term.is_plain and result.is_plain:
        return result
    return added(samples, node, result.dims, [term, result], [node.args[0]])


def _product(samples: Samples, node: fx.Node) -> Value:
    equation = _PRODUCTS[name_of(node)]
    operands = node.args[1:3] if name_of(node).startswith(("add", "badd")) else node.args[:2]
    left, right = map(samples.of, operands)
    inputs, output = equation.split("->")
    names = inputs.split(",")
    held = [
        {name: span for name, span in zip(of, value.dims, strict=True) if span}
        for of, value in zip(names, (left, right), strict=True)
    ]
    dims = tuple(map((held[0] | held[1]).get, output))
    for value in (left, right):
        if value.kind == Kind.MIXED:
            return replace(value, dims=dims)
    check_parts(node, (left, right), dims)
    kept = [{name for name in one if name in output} for one in held]
    if kept[0] - kept[1] and kept[1] - kept[0]:
        raise MixedError(node, COMPARES, dims)
    linear = [value for value in (left, right) if value.is_linear]
    summed = [name for name in (held[0] | held[1]) if name not in output]
    if summed and (any(dims) or not all(name in one for name in summed for one in held)):
        raise MixedError(node, MIXES, dims)
    if summed and not linear:
        return Value(Kind.TOTAL, dims, ONE, objection=first_objection((left, right)))
    if linear and len(linear) == 1 and not summed:
        other = right if linear[0] is left else left
        if other.kind == Kind.SAME:
            return replace(linear[0], dims=dims)
    if linear:
        raise MixedError(node, NOT_LINEAR, dims)
    return Value(Kind.SAMPLES, dims)
