"""Operators that no rule is known of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import fx

from zerofx.ir.samples.nodes import argument_of, is_whole_number, shape_of, sizes_of, sources_of
from zerofx.ir.samples.values import NOT_LINEAR, Dims, Kind, MixedError, Value, first_of

if TYPE_CHECKING:
    from zerofx.ir.samples.follow import Samples


def unknown(samples: Samples, node: fx.Node) -> Value | list[Value]:
    """Dimensions stay where they are as long as before, or the first does."""
    outputs = node.meta.get("val")
    is_single = not isinstance(outputs, (tuple, list))
    inputs = [source for source in sources_of(node) if samples.of(source).kind != Kind.SAME]
    along = argument_of(node, "dim")
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
                raise MixedError(value.culprit, value.why, dims)
            if value.is_linear:
                raise MixedError(node, NOT_LINEAR, dims)
            kept = _kept(value.dims, shape_of(source), shape)
            dims = tuple(map(first_of, zip(dims, kept, strict=True)))
            if isinstance(along, int) and value.dims and value.dims[along % len(value.dims)]:
                raise MixedError(node, "mixes the samples of a batch", dims)
        results.append(Value(Kind.SAMPLES, dims) if shape else Value(Kind.SAME))
    if not any(any(value.dims) for value in results):
        first = next((s for s in inputs if any(samples.of(s).dims)), None)
        if first is not None:
            raise MixedError(node, "is an operator that the samples cannot be followed through")
    return results[0] if is_single else results


def _kept(dims: Dims, before: tuple[int, ...], after: tuple[int, ...]) -> Dims:
    if len(before) == len(after):
        pairs = zip(before, after, strict=True)
        return tuple(s if a == b else None for s, (a, b) in zip(dims, pairs, strict=True))
    is_first = bool(dims and after and before[0] == after[0])
    return (dims[0] if is_first else None, *(None,) * (len(after) - 1)) if after else ()
