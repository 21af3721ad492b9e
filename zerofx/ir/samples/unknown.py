"""Operators that no rule is known of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import fx

from zerofx.ir.samples.nodes import (
    argument_of,
    is_whole_number,
    name_of,
    shape_of,
    sizes_of,
    sources_of,
)
from zerofx.ir.samples.values import (
    MIXES,
    NOT_LINEAR,
    Dims,
    Kind,
    MixedError,
    Value,
    check_parts,
    first_of,
)

if TYPE_CHECKING:
    from zerofx.ir.samples.follow import Samples


_MIXING = ("_cdist_forward", "_euclidean_dist", "_pdist_forward", "cdist", "rot90", "as_strided")
"""Operators that have samples meet others, and no argument that says along which dimension."""


def attended(samples: Samples, node: fx.Node) -> Value | list[Value]:
    """Attention, along the last dimension but one."""
    for source in node.args[:3]:
        value = samples.of(source)
        if len(value.dims) > 1 and _counts(value, shape_of(source), -2):
            raise MixedError(node, MIXES, (None,) * len(value.dims))
    return unknown(samples, node)


def _counts(value: Value, shape: tuple[int, ...], dim: int) -> bool:
    """Return whether samples are along a dimension; of a single one that is not always known."""
    span = value.dims[dim]
    return span is not None and (span[1] > 1 or shape[dim] == 1)


def _along(node: fx.Node, value: Value) -> list[int]:
    """Return the dimensions that an operator computes along."""
    ndim = len(value.dims)
    name = name_of(node)
    if name in _MIXING:
        return list(range(ndim))
    if name.startswith(("linalg_", "_linalg_", "cholesky", "triangular_solve")):
        return list(range(max(ndim - 2, 0), ndim))
    if name in ("convolution", "native_group_norm"):
        return list(range(1, ndim))
    if name in ("native_layer_norm", "_fused_rms_norm"):
        return list(range(ndim - len(node.args[1]), ndim))
    found: list[int] = []
    for argument in ("dim", "dims"):
        given = argument_of(node, argument)
        if isinstance(given, int):
            found.append(given)
        elif isinstance(given, (list, tuple)):
            found += given or range(ndim)  # of roll
    return [dim % ndim for dim in found] if ndim else []


def made(samples: Samples, node: fx.Node) -> Value:
    """Follow ``x.new_zeros(...)``, which reads no values: of samples if it begins as x does."""
    dims = _kept(samples.of(node.args[0]).dims, shape_of(node.args[0]), shape_of(node))
    return Value(Kind.SAMPLES if any(dims) else Kind.SAME, dims)


def unknown(samples: Samples, node: fx.Node) -> Value | list[Value]:
    """Dimensions stay where they are as long as before, or the first does."""
    outputs = node.meta.get("val")
    is_single = not isinstance(outputs, (tuple, list))
    inputs = [source for source in sources_of(node) if samples.of(source).kind != Kind.SAME]
    lost = MixedError(node, "is an operator that the samples cannot be followed through")
    results = []
    for output in [outputs] if is_single else outputs:
        shape = sizes_of(output)
        dims: Dims = (None,) * len(shape)
        for source in inputs:
            value = samples.of(source)
            if value.kind == Kind.MIXED:
                # Whole numbers say which elements, and not what is computed of them.
                if is_whole_number(source) and len(inputs) > 1:
                    continue
                assert value.objection is not None
                raise MixedError(*value.objection, dims)
            if value.is_linear:
                raise MixedError(node, NOT_LINEAR, dims)
            kept = _kept(value.dims, shape_of(source), shape)
            dims = tuple(map(first_of, zip(dims, kept, strict=True)))
            if any(_counts(value, shape_of(source), dim) for dim in _along(node, value)):
                raise MixedError(node, MIXES, dims)
        check_parts(node, map(samples.of, inputs), dims)
        of_all = Value(Kind.MIXED, objection=lost.objection)
        results.append(Value(Kind.SAMPLES, dims) if shape else of_all)
    if not any(any(value.dims) for value in results):
        first = next((s for s in inputs if any(samples.of(s).dims)), None)
        if first is not None:
            raise lost
    return results[0] if is_single else results


def _kept(dims: Dims, before: tuple[int, ...], after: tuple[int, ...]) -> Dims:
    if len(before) == len(after):
        pairs = zip(before, after, strict=True)
        return tuple(s if a == b else None for s, (a, b) in zip(dims, pairs, strict=True))
    is_first = bool(dims and after and before[0] == after[0])
    return (dims[0] if is_first else None, *(None,) * (len(after) - 1)) if after else ()
