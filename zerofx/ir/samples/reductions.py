"""Sums and means over dimensions, and losses that have one."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import fx

from zerofx.ir.samples.nodes import argument_of, name_of, sources_of
from zerofx.ir.samples.pointwise import places
from zerofx.ir.samples.unknown import unknown
from zerofx.ir.samples.values import NOT_LINEAR, ONE, Dims, Kind, MixedError, Value, check_parts

if TYPE_CHECKING:
    from zerofx.ir.samples.follow import Samples


def reduced(samples: Samples, node: fx.Node) -> Value:
    value = samples.of(node.args[0])
    gone = reduced_dims(node, value)
    keeps = bool(argument_of(node, "keepdim"))
    dims = tuple(
        None if at in gone else span
        for at, span in enumerate(value.dims)
        if keeps or at not in gone
    )
    _check_part(node, value, gone)
    return _reduced_by(samples, node, value, dims, any(value.dims[at] for at in gone))


def _check_part(node: fx.Node, value: Value, gone: set[int]) -> None:
    """Refuse all but a sum over one part of a split dimension, if it has as many as are left.

    It may be the part whose length the batch decides, as in ``view(2, -1).mean(1)``; the other,
    of a number that is the same for all ranks, is the shorter one of batches worth the name.
    """
    if name_of(node) != "sum" and reduces_longer_part(value, gone):
        raise MixedError(node, f"takes the {name_of(node)} over a part of the samples of a batch")


def reduces_longer_part(value: Value, gone: set[int]) -> bool:
    """Return whether dimensions that are reduced have at least as many samples as those left."""
    if value.kind != Kind.SAMPLES:
        return False
    counts = [
        math.prod(span[1] for at, span in enumerate(value.dims) if span and (at in gone) == is_gone)
        for is_gone in (True, False)
    ]
    has_both = {at in gone for at, span in enumerate(value.dims) if span} == {True, False}
    return has_both and counts[0] > 1 and counts[0] >= counts[1]


def _reduced_by(
    samples: Samples, node: fx.Node, value: Value, dims: Dims, is_over_samples: bool
) -> Value:
    if value.kind == Kind.MIXED:
        return replace(value, dims=dims)
    name = name_of(node)
    if value.kind == Kind.SAMPLES and is_over_samples and not any(dims):
        if name != "sum":
            raise MixedError(node, f"takes the {name} over the samples of a batch", dims)
        is_count = value.is_data and not value.is_scaled
        degrees = frozenset(degree + 1 for degree in value.degrees)
        kind = Kind.COUNT if is_count else Kind.TOTAL
        return Value(kind, dims, degrees, objection=value.objection)
    if value.is_linear and name not in ("sum", "mean"):
        raise MixedError(node, NOT_LINEAR, dims)
    return replace(value, dims=dims)


def fused_loss(samples: Samples, node: fx.Node) -> Value | list[Value]:
    """A loss with a ``reduction``: 0 for none, 1 for a mean, 2 for a sum."""
    reduction = argument_of(node, "reduction")
    inputs = list(map(samples.of, sources_of(node)))
    if len({len(value.dims) for value in inputs}) == 1:  # element by element
        dims = places(node, inputs, len(inputs[0].dims))
        check_parts(node, inputs, dims)
    if reduction == 0:
        return unknown(samples, node)
    for value in inputs:
        if value.kind == Kind.MIXED:
            return replace(value, dims=())
        if not value.is_plain:
            raise MixedError(node, NOT_LINEAR)
    if reduction == 1:
        raise MixedError(node, "takes the mean over the samples of a batch")
    return Value(Kind.TOTAL, degrees=ONE)


def reduced_dims(node: fx.Node, value: Value) -> set[int]:
    """Return the dimensions of ``value`` that a sum, a mean or the like of it is over."""
    ndim = len(value.dims)
    dims = argument_of(node, "dim")
    if dims is None or dims == []:
        return set(range(ndim))
    return {dim % max(ndim, 1) for dim in ([dims] if isinstance(dims, int) else dims)}
