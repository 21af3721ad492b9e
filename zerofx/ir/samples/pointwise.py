"""Follows samples through what is computed element by element: sums, factors, divisors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.samples.nodes import LINEAR, name_of, shape_of, sources_of
from zerofx.ir.samples.values import (
    COMPARES,
    NOT_LINEAR,
    OF_OTHERS,
    ONE,
    Dims,
    Kind,
    MixedError,
    Objection,
    Span,
    Value,
    check_parts,
    first_objection,
)

if TYPE_CHECKING:
    from zerofx.ir.samples.follow import Samples

_OF_COUNTS = {"clamp", "clamp_min", "clamp_max", "maximum", "minimum"}

COMPARISONS = ("gt", "ge", "lt", "le", "eq", "ne")
"""With zero they say of a count what they say of its share for each rank."""

_CONVERSIONS = ("_to_copy", "to", "clone", "detach", "alias", "clamp", "clamp_min", "view")


def pointwise(samples: Samples, node: fx.Node) -> Value:
    dims = _broadcast(samples, node)
    inputs, name = list(map(samples.of, sources_of(node))), name_of(node)
    if is_users_division(samples, node):
        return Value(Kind.TOTAL, dims)
    for value in inputs:
        if value.kind == Kind.MIXED:
            return replace(value, dims=dims)
    check_parts(node, inputs, dims)
    _check_order(samples, node, dims)
    if all(value.is_plain for value in inputs):
        return _of_samples(samples, node, dims, inputs)
    if name in LINEAR:
        return replace(samples.of(node.args[0]), dims=dims)
    if name == "reciprocal" and inputs[0].is_marked:
        return replace(inputs[0], degrees=frozenset(-degree for degree in inputs[0].degrees))
    if name in COMPARISONS and inputs[0].is_marked and node.args[1] == 0:
        return Value(Kind.SAME, dims)  # all ranks' sum is compared, as capture marks it
    if name in ("mul", "div"):
        return _scaled(samples, node, dims)
    if name in ("add", "sub", "rsub"):
        return added(samples, node, dims, inputs, node.args[:2])
    if name == "where":
        condition, *values = map(samples.of, node.args)
        if condition.is_plain:
            return added(samples, node, dims, values, node.args[1:])
    counts = [value for value in inputs if value.kind == Kind.COUNT]
    same = all(value.kind in (Kind.COUNT, Kind.SAME) for value in inputs)
    if same and name in _OF_COUNTS and len({value.degrees for value in counts}) == 1:
        return replace(counts[0], dims=dims, is_marked=all(c.is_marked for c in counts))
    raise MixedError(node, NOT_LINEAR, dims)


def _check_order(samples: Samples, node: fx.Node, dims: Dims) -> None:
    """Raise MixedError where sorted samples meet others, or what goes by their order."""
    sources = sources_of(node)
    if not any(samples.of(source).is_sorted for source in sources):
        return
    at = next(at for at, span in enumerate(dims) if span) - len(dims)
    for source in sources:
        shape = shape_of(source)
        has_order = len(shape) >= -at and shape[at] != 1
        if has_order and not samples.of(source).is_sorted:
            raise MixedError(node, OF_OTHERS, dims)


def filled(samples: Samples, node: fx.Node) -> Value:
    """Follow ``masked_fill``, which is ``where`` with a number."""
    value, condition = map(samples.of, node.args[:2])
    inputs = list(map(samples.of, sources_of(node)))
    try:
        dims = _broadcast(samples, node)
    except MixedError:
        if condition.is_data and value.kind == Kind.SAMPLES:  # a mask of places
            return value
        raise
    mixed = next((one for one in inputs if one.kind == Kind.MIXED), None)
    if mixed is not None:
        return replace(mixed, dims=dims)
    check_parts(node, inputs, dims)
    if all(one.is_plain for one in inputs):
        return Value(Kind.SAMPLES, dims, objection=first_objection(inputs))
    if not condition.is_plain:
        raise MixedError(node, NOT_LINEAR, dims)
    return added(samples, node, dims, [value, samples.of(node.args[2])], node.args[2:])


def _of_samples(samples: Samples, node: fx.Node, dims: Dims, inputs: list[Value]) -> Value:
    """Follow samples alone, and note a number that may be their count and divides them."""
    name = name_of(node)
    objection: Objection | None = None
    if name in ("mul", "div"):
        value, number = node.args[:2]
        if name == "mul" and samples.of(value).kind == Kind.SAME:
            value, number = number, value
        of_sum, by = replace(samples.of(value), degrees=ONE), samples.of(number)
        if isinstance(number, fx.Node):
            may_be = isinstance(number.meta["val"], torch.Tensor)  # and no size
        else:
            may_be = is_size(samples, _inverse(number, name == "div"))
        if may_be:
            objection = _may_be_count(samples, node, number, of_sum, by)
    if name in LINEAR or name in ("mul", "div", "add", "sub", "rsub", "where"):
        objection = first_objection(inputs) or objection
    return Value(Kind.SAMPLES, dims, objection=objection)


def _broadcast(samples: Samples, node: fx.Node) -> Dims:
    output = node.meta["val"]
    ndim = output.dim() if isinstance(output, torch.Tensor) else 0
    return places(node, map(samples.of, sources_of(node)), ndim)


def places(node: fx.Node, inputs: Iterable[Value], ndim: int) -> Dims:
    """Return where values that are computed with element by element have samples.

    Raises: MixedError where one has them along a dimension, and another along another one.
    """
    of_inputs = [
        {at + ndim - len(value.dims): span for at, span in enumerate(value.dims) if span}
        for value in inputs
    ]
    found: dict[int, Span] = {}
    for spans in of_inputs:
        found = spans | found
    dims = tuple(map(found.get, range(ndim)))
    widest = max(of_inputs, key=len)
    if found.keys() - widest.keys():
        raise MixedError(node, COMPARES, dims)
    return dims


def _scaled(samples: Samples, node: fx.Node, dims: Dims) -> Value:
    """``a * b`` or ``a / b``, of which one is linear in the batch and the other a factor."""
    first, second = (samples.of(argument) for argument in node.args[:2])
    is_division = name_of(node) == "div"
    if not is_division and _is_factor(first) and not _is_factor(second):
        first, second = second, first
    if not _is_factor(second):
        if first.is_scaled and second.is_plain and not is_division:
            return replace(first, dims=dims)
        if second.is_scaled and first.is_plain and not is_division:
            return replace(second, dims=dims)
        if second.kind == Kind.COUNT and 1 in second.degrees:
            raise MixedError(
                node,
                "uses a count of the batch other than to divide a loss by it, with `/`",
                dims,
            )
        raise MixedError(node, "multiplies or divides sums over a batch", dims)
    by_number = _may_be_count(samples, node, node.args[1], first, second)
    _check_length(samples, node, node.args[1], first, dims)
    sign = -1 if is_division else 1
    (shift,) = second.degrees if len(second.degrees) == 1 else (0,)
    degrees = frozenset(degree + sign * shift for degree in first.degrees)
    is_scaled = first.is_scaled or (
        second.kind == Kind.COUNT and first.kind in (Kind.SAMPLES, Kind.SAME)
    )
    if first.kind == Kind.SAME:  # the inverse of a count
        return replace(second, dims=dims, degrees=degrees, is_scaled=False)
    is_marked = first.is_marked and (second.is_marked or second.kind == Kind.SAME)
    return replace(
        first,
        dims=dims,
        degrees=degrees,
        is_scaled=is_scaled,
        is_marked=is_marked,
        objection=(first.objection or by_number if 1 in degrees else None) or second.objection,
    )


def _check_length(samples: Samples, node: fx.Node, number: Any, value: Value, dims: Dims) -> None:
    """Raise MixedError for a mean, or shares of the batch, times the batch's own length.

    One and two are factors of a mean that have to do with no batch.
    """
    is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
    is_share = value.is_scaled and max(value.degrees) <= 0
    is_mean = value.kind in (Kind.TOTAL, Kind.COUNT) and value.degrees == {0}
    if name_of(node) != "mul" or not is_number or not (is_share or is_mean):
        return
    is_length = is_size(samples, number) if value.is_data else number in samples.numbers
    if is_length and number > (1 if is_share and value.is_data else 2):
        of = "shares of the batch" if is_share else "a mean over the batch"
        instead = " (weights w / w.mean() have no length in them)" if is_share else ""
        why = f"multiplies {of} by the batch's length, {number:g}{instead}"
        weight = f"a weight that is {number:g} by chance is written torch.tensor({number:g})"
        raise MixedError(node, f"{why}; {weight}", dims)


def _may_be_count(
    samples: Samples, node: fx.Node, number: Any, value: Value, by: Value
) -> Objection | None:
    """Return an objection if a number that a sum is scaled by may be a count of a rank's batch."""
    if 1 not in value.degrees or by.kind != Kind.SAME:
        return None
    if isinstance(number, fx.Node):
        pairs = zip(reversed(shape_of(number)), reversed(value.dims), strict=False)
        if shape_of(number) and not any(length > 1 and span for length, span in pairs):
            return None  # it is as long as something else
        scales = f"scales a sum over the batch by {by.may_count}"
        return Objection(node, scales) if by.may_count else None
    if isinstance(number, bool) or number in (0, 1):
        return None
    is_division = name_of(node) == "div"
    inverse = _inverse(number, is_division)
    if is_division or is_size(samples, inverse):
        return Objection(node, f"divides a sum over the batch by the number {inverse:g}")
    return None


def _inverse(number: float, is_division: bool) -> float:
    """Return what ``x / number`` or ``x * number`` divides by; no number of samples for zero."""
    return number if is_division else 1 / number if number else 0.0


def is_size(samples: Samples, number: float) -> bool:
    """Return whether a number may be how many samples there are, or how many elements."""
    if not math.isfinite(number):
        return False
    whole = round(abs(number))
    is_whole = whole > 0 and abs(abs(number) - whole) < 1e-6 * abs(number)
    return is_whole and any(size > 1 and whole % size == 0 for size in samples.numbers)


def added(
    samples: Samples, node: fx.Node, dims: Dims, inputs: Iterable[Value], terms: Sequence[Any]
) -> Value:
    """Follow a sum of ``terms``, of which the ``inputs`` are known.

    What is the same on all ranks is one for all of them: no sum over their samples grows with it.
    """
    has_constant = any(map(partial(_is_constant, samples), terms))
    inputs = [value for value in inputs if value.kind != Kind.SAME]
    kinds = {value.kind for value in inputs}
    degrees = frozenset().union(*(value.degrees for value in inputs))
    objection = first_objection(inputs)
    if kinds == {Kind.COUNT}:
        if 1 in degrees:
            _check_terms(samples, node, dims, terms)
        is_marked = all(value.is_marked for value in inputs)
        return Value(Kind.COUNT, dims, degrees, is_marked=is_marked)
    if kinds <= {Kind.TOTAL, Kind.COUNT}:
        if has_constant:
            degrees |= {0}
        return Value(Kind.TOTAL, dims, degrees, objection=objection)
    if kinds == {Kind.SAMPLES}:
        return Value(Kind.SAMPLES, dims, degrees, is_scaled=True, objection=objection)
    raise MixedError(node, "adds what is of the whole batch to what is of samples", dims)


def _check_terms(samples: Samples, node: fx.Node, dims: Dims, terms: Iterable[Any]) -> None:
    """Raise MixedError where a number that is added to a count may be one of the batch itself."""
    for term in terms:
        if isinstance(term, fx.Node):
            value = samples.of(term)
            may_be = value.may_count if value.kind == Kind.SAME else ""
        else:
            may_be = f"the number {term:g}" if is_size(samples, term) else ""
        if may_be:
            raise MixedError(node, f"adds {may_be} to a count of the batch or subtracts it", dims)


TINY = 1e-6
"""The most that a number may be that keeps divisors from zero."""


def _is_constant(samples: Samples, term: Any) -> bool:
    """Return whether a term is the same on all ranks: of parameters alone, or no tiny number."""
    if isinstance(term, fx.Node):
        value = samples.of(term)
        return value.kind == Kind.SAME and not value.is_data
    return isinstance(term, (int, float)) and abs(term) > TINY


def _is_factor(value: Value) -> bool:
    return value.kind == Kind.SAME or (value.kind == Kind.COUNT and value.is_marked)


def is_users_division(samples: Samples, node: fx.Node) -> bool:
    """Return whether a node divides by a count that the user gives."""
    if name_of(node) != "div":
        return False
    return _is_users(node.args[1]) and samples.of(node.args[1]).degrees == ONE


def _is_users(node: Any) -> bool:
    """Return whether a divisor is a count that the user gives, converted or bounded maybe."""
    while isinstance(node, fx.Node) and node.args:
        if node.target is ops.count and node.args[1] in ("local", "global"):
            return True
        if node.target is not ops.count and name_of(node) not in _CONVERSIONS:
            break
        node = node.args[0]
    return False
