"""Follows samples through views and what moves elements: they are where these put them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import fx

from zerofx import compat
from zerofx.ir.samples.nodes import (
    argument_of,
    is_whole_number,
    name_of,
    shape_of,
    sizes_of,
    sources_of,
)
from zerofx.ir.samples.pointwise import added
from zerofx.ir.samples.unknown import unknown
from zerofx.ir.samples.values import (
    COMPARES,
    NOT_LINEAR,
    OF_OTHERS,
    WHOLE,
    Dims,
    Kind,
    MixedError,
    Span,
    Value,
    at_the_right,
    first_objection,
    first_of,
    no_dims,
)

if TYPE_CHECKING:
    from zerofx.ir.samples.follow import Samples


def viewed(samples: Samples, node: fx.Node) -> Value:
    value = samples.of(node.args[0])
    return replace(value, dims=reshaped(value.dims, shape_of(node.args[0]), shape_of(node)))


def permuted(samples: Samples, node: fx.Node) -> Value:
    value, ndim = samples.of(node.args[0]), len(shape_of(node))
    name = name_of(node)
    order = list(range(ndim))
    if name == "permute":
        order = [dim % ndim for dim in node.args[1]]
    elif name == "transpose":
        one, other = (dim % ndim for dim in node.args[1:3])
        order[one], order[other] = other, one
    else:
        order.reverse()
    return replace(value, dims=tuple(value.dims[at] for at in order))


def expanded(samples: Samples, node: fx.Node) -> Value:
    value = samples.of(node.args[0])
    return replace(value, dims=at_the_right(value.dims, len(shape_of(node))))


def unsqueezed(samples: Samples, node: fx.Node) -> Value:
    value = samples.of(node.args[0])
    at = node.args[1] % len(shape_of(node))
    return replace(value, dims=(*value.dims[:at], None, *value.dims[at:]))


def squeezed(samples: Samples, node: fx.Node) -> Value:
    value, shape = samples.of(node.args[0]), shape_of(node.args[0])
    wanted = node.args[1] if len(node.args) > 1 else range(len(shape))
    wanted = [wanted] if isinstance(wanted, int) else wanted
    gone = {dim % len(shape) for dim in wanted if shape[dim] == 1}
    dims = tuple(span for at, span in enumerate(value.dims) if at not in gone)
    if value.kind == Kind.SAMPLES and not any(dims):
        kind = Kind.COUNT if value.is_data and not value.is_scaled else Kind.TOTAL
        degrees = frozenset(degree + 1 for degree in value.degrees)
        return Value(kind, dims, degrees)  # the sum over the one sample that there is
    return replace(value, dims=dims)


def selected(samples: Samples, node: fx.Node) -> Value:
    value = samples.of(node.args[0])
    at = node.args[1] % len(value.dims)
    return replace(value, dims=(*value.dims[:at], *value.dims[at + 1 :]))


def cut(samples: Samples, node: fx.Node) -> Value | list[Value]:
    """Follow ``slice``, ``split`` and ``split_with_sizes``, which take a part of the batch."""
    value = samples.of(node.args[0])
    at = (argument_of(node, "dim") or 0) % max(len(value.dims), 1)
    if value.kind != Kind.SAMPLES or not value.dims[at]:
        return value
    if value.is_sorted:
        raise MixedError(node, OF_OTHERS, value.dims)
    (source, *_), size = node.args, shape_of(node.args[0])[at]
    if name_of(node) == "slice":
        step = argument_of(node, "step")
        if step not in (1, None):
            return value
        start = min(max(_within_size(argument_of(node, "start") or 0, size), 0), size)
        return _part(value, source, start, start + shape_of(node)[at], size)
    found, start = [], 0
    for part in node.meta["val"]:
        length = sizes_of(part)[at]
        found.append(_part(value, source, start, start + length, size))
        start += length
    return found


def _within_size(place: Any, size: int) -> int:
    place = compat.aot.size_hint(place.meta["val"] if isinstance(place, fx.Node) else place)
    return place + size if place < 0 else place


def _part(value: Value, source: fx.Node, start: int, end: int, size: int) -> Value:
    whole = value.part if value.part != WHOLE else WHOLE._replace(origin=source, size=size)
    length = (whole.end - whole.begin) / max(size, 1)
    part = whole._replace(begin=whole.begin + length * start, end=whole.begin + length * end)
    return replace(value, part=part)


def written(samples: Samples, node: fx.Node) -> Value:
    """Follow ``slice_scatter`` and ``select_scatter``, which write one tensor into another."""
    into, source = map(samples.of, node.args[:2])
    at = (argument_of(node, "dim") or 0) % max(len(into.dims), 1)
    given = source.dims
    if name_of(node) == "select_scatter":
        given = (*given[:at], None, *given[at:])
    dims = tuple(map(first_of, zip(into.dims, given, strict=True)))
    for value in (into, source):
        if value.kind == Kind.MIXED:
            return replace(value, dims=dims)
    if dims[at] and shape_of(node.args[1])[at : at + 1] != shape_of(node)[at : at + 1]:
        raise MixedError(node, "writes to a part of the batch by itself", dims)
    if into.is_plain and source.is_plain:
        return Value(Kind.SAMPLES, dims)
    return added(samples, node, dims, [into, source], node.args[:2])


def unbound(samples: Samples, node: fx.Node) -> Value:
    at = (node.args[1] if len(node.args) > 1 else 0) % len(shape_of(node.args[0]))
    value = samples.of(node.args[0])
    return replace(value, dims=(*value.dims[:at], *value.dims[at + 1 :]))


def joined(samples: Samples, node: fx.Node) -> Value:
    """``cat`` and ``stack``."""
    # torch lets an empty list of numbers be joined to anything
    sources = [source for source in node.args[0] if shape_of(source) != (0,)]
    values = [samples.of(source) for source in sources]
    mixed = next((value for value in values if value.kind == Kind.MIXED), None)
    ndim = len(shape_of(node))
    at = (node.args[1] if len(node.args) > 1 else 0) % ndim
    dims = tuple(map(first_of, zip(*(value.dims for value in values), strict=True)))
    if name_of(node) == "stack":
        dims = (*dims[:at], None, *dims[at:])
    elif dims[at] and all(
        value.dims[at] == (1, size)
        for value, size in zip(values, (shape_of(one)[at] for one in sources), strict=True)
    ):
        dims = (*dims[:at], (1, shape_of(node)[at]), *dims[at + 1 :])
    if mixed is not None:
        return replace(mixed, dims=dims)
    if dims[at] and not all(_is_of_samples(samples, source, at) for source in sources):
        raise MixedError(node, "joins what all ranks have alike to the samples of a batch", dims)
    if all(value.is_plain for value in values):
        return Value(Kind.SAMPLES, dims, objection=first_objection(values))
    return added(samples, node, dims, values, sources)


def _is_of_samples(samples: Samples, source: fx.Node, at: int) -> bool:
    """Return whether what is joined along samples is of some, or made as long as they are."""
    value, length = samples.of(source), shape_of(source)[at]
    is_made = bool(value.may_count) or name_of(source) == "expand"
    return value.kind != Kind.SAME or not length or (is_made and length in samples.sizes)


def embedded(samples: Samples, node: fx.Node) -> Value:
    weight, indices = map(samples.of, node.args[:2])
    dims = (*indices.dims, None)
    if weight.kind != Kind.SAME:
        raise MixedError(node, "looks up what the batch has made", dims)
    return replace(indices, dims=dims)


def gathered(samples: Samples, node: fx.Node) -> Value:
    value, at, indices = samples.of(node.args[0]), node.args[1], samples.of(node.args[2])
    at = at % max(len(value.dims), 1)
    dims = tuple(map(first_of, zip(value.dims, indices.dims, strict=True)))
    if value.kind == Kind.MIXED:
        return replace(value, dims=dims)
    if value.is_linear:
        raise MixedError(node, NOT_LINEAR, dims)
    if indices.dims[at] and any(value.dims):
        raise MixedError(node, COMPARES, dims)
    if value.dims[at] or indices.kind not in (Kind.SAME, Kind.SAMPLES):
        raise MixedError(node, "looks up other samples", dims)
    return replace(value, kind=Kind.SAMPLES, dims=dims)


def index_selected(samples: Samples, node: fx.Node) -> Value | list[Value]:
    """Follow what is looked up; of samples, none are taken by their places."""
    value, index = samples.of(node.args[0]), node.args[2]
    at = node.args[1] % max(len(value.dims), 1)
    if value.dims[at : at + 1] != (None,):
        return unknown(samples, node)
    return _indexed(samples, node, [*(None,) * at, index])


def indexed(samples: Samples, node: fx.Node) -> Value:
    """``x[i, :, j]``: indices side by side take one dimension's place, else the first."""
    return _indexed(samples, node, node.args[1])


def _indexed(samples: Samples, node: fx.Node, indices: Sequence[fx.Node | None]) -> Value:
    value = samples.of(node.args[0])
    used = [at for at, index in enumerate(indices) if index is not None]
    found = [samples.of(indices[at]).dims for at in used]
    length = max(map(len, found))
    aligned = [at_the_right(dims, length) for dims in found]
    picked = list(map(first_of, zip(*aligned, strict=True)))
    is_reordered = any(value.dims[at] for at in used)
    rest = [span for at, span in enumerate(value.dims) if at not in used]
    is_together = used == list(range(used[0], used[-1] + 1))
    begin = sum(at not in used for at in range(used[0])) if is_together else 0
    if any(value.dims[at] and _is_selection(samples, node.args[0], at, indices[at]) for at in used):
        raise MixedError(node, OF_OTHERS, (None,) * len(shape_of(node)))
    if any(rest) and any(picked):
        raise MixedError(node, COMPARES, (*rest[:begin], *picked, *rest[begin:]))
    if is_reordered and picked:  # samples in another order
        # Sorted by their experts, tokens are put back: a sample's lie where they did.
        own = first_of(value.dims[at] for at in used)
        is_outermost = own is not None and own[0] == 1
        picked[0] = picked[0] or (own if is_outermost else (1, shape_of(node)[begin]))
    dims = (*rest[:begin], *picked, *rest[begin:])
    if value.is_linear and any(picked):
        raise MixedError(node, NOT_LINEAR, dims)
    by = [samples.of(indices[at]) for at in used]
    is_sorted = any(one.kind == Kind.MIXED or one.is_sorted for one in by)
    if value.kind == Kind.SAME:
        return Value(Kind.SAMPLES, dims, is_sorted=is_sorted)
    if value.is_sorted:  # until an index that the batch has made puts it back
        is_sorted = not any(
            value.dims[at] and samples.of(indices[at]).kind == Kind.MIXED for at in used
        )
    return replace(value, dims=dims, is_sorted=is_sorted)


def _is_selection(samples: Samples, of: fx.Node, at: int, index: fx.Node) -> bool:
    """Return whether an index picks fewer samples than there are, by what all of them have made.

    Sorted by their experts, tokens are all there.
    """
    found = samples.of(index)
    if found.kind != Kind.MIXED or not found.objection:
        return False
    is_of_best = name_of(found.objection.node) in (
        "topk",
        "kthvalue",
        "max",
        "min",
        "argmax",
        "argmin",
    )
    return is_of_best or math.prod(shape_of(index)) < shape_of(of)[at]


def scattered(samples: Samples, node: fx.Node) -> Value:
    """Follow what is written by place: among samples, or to places that are none."""
    into = samples.of(node.args[0])
    at = node.args[1] if isinstance(node.args[1], int) else 0
    shape = shape_of(node.args[0])
    at = at % max(len(shape), 1)
    if into.kind == Kind.MIXED:
        return into
    given = list(map(samples.of, sources_of(node)[1:]))
    bad = next((v for v in given if v.kind == Kind.MIXED and not _is_whole_number(v)), None)
    if bad is not None:
        return replace(bad, dims=into.dims)
    if any(value.is_linear for value in (into, *given)):
        raise MixedError(node, NOT_LINEAR)
    dims = into.dims
    given_by = node.args[1] if isinstance(node.args[1], (list, tuple)) else node.args[1:]
    by = next((one for one in given_by if isinstance(one, fx.Node)), None)
    adds = name_of(node) in ("index_add", "scatter_add", "scatter_reduce")
    own = samples.of(by).dims if by is not None and is_whole_number(by) else ()
    order = samples.of(by)
    if len(own) == len(shape) and any(own) and not own[at]:  # each sample into its own place
        dims = tuple(map(first_of, zip(dims, own, strict=True)))
        return Value(Kind.SAMPLES, dims, is_sorted=order.is_sorted)
    if order.kind == Kind.MIXED and is_whole_number(node):  # the inverse of an order
        return replace(order, dims=no_dims(node))
    is_by_value = adds and any(own) and order.kind == Kind.SAMPLES and not order.is_sorted
    if shape and (not any(dims) or dims[at]) and (shape[at] not in samples.sizes or is_by_value):
        raise MixedError(node, "adds up samples by their values", dims)
    if shape and not any(dims):
        dims = tuple((1, n) if place == at else None for place, n in enumerate(shape))
    return Value(Kind.SAMPLES, dims)


def _is_whole_number(value: Value) -> bool:
    return value.objection is not None and is_whole_number(value.objection.node)


def reshaped(dims: Dims, before: tuple[int, ...], after: tuple[int, ...]) -> Dims:
    """The dimensions behind a view: samples are where they were among all elements."""
    found: dict[int, Span] = {}
    outside = 1
    for length, span in zip(before, dims, strict=True):
        if span is not None and after:
            begin, is_folded = outside * span[0], len(after) < len(before) or span[0] != 1
            found |= _within(begin, begin * span[1], after, is_folded)
        outside *= length
    return tuple(map(found.get, range(len(after))))


def _within(begin: int, end: int, sizes: tuple[int, ...], is_folded: bool) -> dict[int, Span]:
    """The dimensions that a factor of all elements is in, which begins and ends there.

    A single sample is no factor: it is where its dimension is, or in what that was put behind; in
    what was put behind it, if it had a dimension and there are no fewer than before.
    """
    found: dict[int, Span] = {}
    passed, single, left, right = 1, None, None, None
    for at, size in enumerate(sizes):
        low, high = max(begin, passed), min(end, passed * size)
        if low < high:
            found[at] = low // passed, high // low
        if passed == begin and size == 1 and single is None:
            single = at
        if passed < begin <= passed * size:
            left = at
        if passed >= begin and right is None:
            right = at
        passed *= size
    if not found:
        order = (single, left, right) if is_folded else (single, right, left)
        at = next((at for at in order if at is not None), len(sizes) - 1)
        found[at] = (sizes[at] if at == left else 1), 1
    return found
