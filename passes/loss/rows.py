"""What operators do with tokens: which dimensions of a value count them, and what a chunk computes.

The tokens of a value are the product of neighbouring dimensions, [batch, sequence] or their product
alone.  In a chunk they are one dimension, and shorter.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zerofx.ir.sizes import is_symbolic

aten = torch.ops.aten

Emit = Callable[[Callable[..., fx.Node], Callable[[Any], Any], int], fx.Node]
"""Inserts what a chunk computes: ``(call, what an operand is in it, its number of tokens)``."""


@dataclass(frozen=True)
class Rows:
    """Where the tokens of a value are: behind ``lead`` dimensions, and in front of ``trail``."""

    lead: int
    trail: int

    def merged(self, shape: Sequence[int], tokens: int) -> list[int]:
        """The shape with so many tokens, in one dimension."""
        return [*shape[: self.lead], tokens, *shape[len(shape) - self.trail :]]

    def of(self, shape: Sequence[int]) -> Sequence[int]:
        """The dimensions that count tokens."""
        return shape[self.lead : len(shape) - self.trail]


NONE, MEAN, SUM = 0, 1, 2
"""The reductions of losses."""

NARROW = (torch.float16, torch.bfloat16)

WHOLE = None
"""In the place of ``Rows``: an operand that every chunk reads as it is."""


@dataclass
class Step:
    """What a node is in a chunk: of which operands, and where its tokens are.

    With ``adds_up`` its result is the sum of the chunks', ``divided_by`` a number; with ``leaves``
    it is what they have, one behind the other, and nothing behind it is looked into.
    """

    operands: dict[fx.Node, Rows | None]
    rows: Rows | None
    emit: Emit
    adds_up: bool = False
    leaves: bool = False
    divided_by: int = 1


class NotByTokensError(Exception):
    """A node does not compute each token by itself, as far as is known."""


Known = Mapping[fx.Node, Rows]


def step_of(node: fx.Node, known: Known, tokens: int, wanted: Rows | None = None) -> Step:
    """Return what a node is in a chunk, of whose operands some have ``known`` tokens.

    ``wanted`` is where its result's tokens have to be, if a reader says so.

    Raises: NotByTokensError.
    """
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        raise NotByTokensError(f"{_name(node)} draws random numbers")
    if node.target is aten.view.dtype:
        raise NotByTokensError("it looks at the bits of numbers")
    if not {"dim", "index", "self"}.isdisjoint(node.kwargs):
        raise NotByTokensError("its dimension is an argument by name")
    if is_symbolic(node.meta.get("val")):
        raise NotByTokensError("its size varies from call to call")
    rule = _RULES.get(node.target) or _RULES.get(getattr(node.target, "overloadpacket", None))
    if rule is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
        rule = _pointwise
    if rule is None:
        raise NotByTokensError(f"{_name(node)} is not known to compute each token by itself")
    return rule(node, known, tokens, wanted)


def _name(node: fx.Node) -> str:
    return getattr(getattr(node.target, "overloadpacket", None), "__name__", str(node.target))


def shape_of(node: fx.Node) -> list[int]:
    return list(node.meta["val"].shape)


def placed(shape: Sequence[int], tokens: int, lead: int = 1) -> Rows:
    """Find the tokens of a shape: the first dimensions, behind as many elements as ``lead``.

    Raises: NotByTokensError.
    """
    first = 0
    while math.prod(shape[:first]) != lead:
        first += 1
        if first > len(shape):
            raise NotByTokensError("its dimensions are not those of tokens any more")
    for last in range(first + 1, len(shape) + 1):
        if math.prod(shape[first:last]) == tokens:
            return Rows(first, len(shape) - last)
    raise NotByTokensError("its dimensions are not those of tokens any more")


def _operand(operand: fx.Node, known: Known, rows: Rows, shape: Sequence[int]) -> Rows | None:
    """Where an operand has tokens that is broadcast to a result with these.

    Raises: NotByTokensError.
    """
    if not isinstance(operand.meta["val"], torch.Tensor):
        return WHOLE
    if operand in known:
        if known[operand].trail != rows.trail:
            raise NotByTokensError("tokens meet something else's dimension")
        return known[operand]
    own = shape_of(operand)
    if len(own) <= rows.trail:
        return WHOLE
    of_tokens = own[max(0, len(own) - len(shape) + rows.lead) : len(own) - rows.trail]
    if all(size == 1 for size in of_tokens):
        if len(own) - rows.trail > 1:
            raise NotByTokensError("an operand has dimensions of one token")
        return WHOLE
    if len(own) == len(shape) and own[rows.lead : len(own) - rows.trail] == list(rows.of(shape)):
        return rows
    raise NotByTokensError("an operand is broadcast over some tokens")


def _result_rows(node: fx.Node, known: Known, tokens: int, wanted: Rows | None) -> Rows:
    """Where the tokens of an elementwise result are: where those of an operand are."""
    shape = shape_of(node)
    for operand in node.all_input_nodes:
        if operand in known:
            trail = known[operand].trail
            own = shape_of(operand)
            if len(own) != len(shape):
                raise NotByTokensError("it has other dimensions than its operand")
            rows = Rows(known[operand].lead, trail)
            if math.prod(rows.of(shape)) != tokens:
                raise NotByTokensError("it has other tokens than its operand")
            return rows
    if wanted is None:
        raise NotByTokensError("none of its operands has tokens")
    return wanted


def _again(node: fx.Node, **changed: Any) -> Emit:
    """The same operator of the chunk's operands; ``changed`` are arguments by position."""

    def emit(call, of, size):
        args = [changed.get(f"_{at}", arg) for at, arg in enumerate(node.args)]
        return call(node.target, *fx.node.map_arg(args, of), **fx.node.map_arg(node.kwargs, of))

    return emit


def _pointwise(node: fx.Node, known: Known, tokens: int, wanted: Rows | None) -> Step:
    rows, shape = _result_rows(node, known, tokens, wanted), shape_of(node)
    operands = {one: _operand(one, known, rows, shape) for one in node.all_input_nodes}
    return Step(operands, rows, _again(node))


def _elements_loss(node: fx.Node, known: Known, tokens: int, wanted: Rows | None) -> Step:
    """A loss of each element, or of all the sum or mean."""
    values = [*node.args, *(None, None, MEAN)[len(node.args) - 2 :]]
    given, reduction = values[:4], values[4]
    if reduction == NONE:
        return _pointwise(node, known, tokens, wanted)
    source = node.args[0]
    if source not in known:
        raise NotByTokensError("none of its operands has tokens")
    rows, shape = known[source], shape_of(source)
    operands = {one: _operand(one, known, rows, shape) for one in node.all_input_nodes}

    def emit(call, of, size):
        each = call(node.target, *fx.node.map_arg(given, of), NONE)
        return call(aten.sum.default, each, **_wide(each.meta["val"].dtype))

    divided_by = math.prod(shape) if reduction == MEAN else 1
    return Step(operands, None, emit, adds_up=True, divided_by=divided_by)


def _same(node: fx.Node, known: Known, tokens: int, wanted: Rows | None) -> Step:
    """What looks at a value, copies it, or makes one like it."""
    source = _only_operand(node)
    rows = known.get(source, wanted)
    assert rows is not None
    if node.target in (aten.detach.default, aten.alias.default):
        return Step({source: rows}, rows, lambda call, of, size: of(source))
    if node.target is aten.clone.default:

        def emit(call, of, size):
            value = of(source)
            return value if value.meta["val"].is_contiguous() else call(node.target, value)

        return Step({source: rows}, rows, emit)
    return Step({source: rows}, rows, _again(node))


def _only_operand(node: fx.Node) -> fx.Node:
    """The one operand of a node.  Raises: NotByTokensError if numbers are computed too."""
    if len(node.all_input_nodes) != 1:
        raise NotByTokensError("a number that it is given varies from call to call")
    return node.all_input_nodes[0]


def _view(node: fx.Node, known: Known, tokens: int, wanted: Rows | None) -> Step:
    source, shape = _only_operand(node), shape_of(node)
    own = shape_of(source)
    if source in known:
        before = known[source]
        rows = placed(shape, tokens, math.prod(own[: before.lead]))
    else:
        assert wanted is not None
        rows = wanted
        before = placed(own, tokens, math.prod(shape[: rows.lead]))

    def emit(call, of, size):
        value, merged = of(source), rows.merged(shape, size)
        return value if shape_of(value) == merged else call(aten.view.default, value, merged)

    return Step({source: before}, rows, emit)


def _expand(node: fx.Node, known: Known, tokens: int, wanted: Rows | None) -> Step:
    shape, source = shape_of(node), node.args[0]
    rows = _result_rows(node, known, tokens, wanted)
    operand = _operand(source, known, rows, shape)
    return Step(
        {source: operand},
        rows,
        lambda call, of, size: call(node.target, of(source), rows.merged(shape, size)),
    )


def _transpose(node: fx.Node, known: Known, tokens: int, wanted: Rows | None) -> Step:
    source = node.args[0]
    known_rows = known.get(source, wanted)
    is_matrix = len(shape_of(node)) == 2 and known_rows in (Rows(0, 1), Rows(1, 0))
    if not is_matrix or not _swaps(node):
        raise NotByTokensError(
            "it puts tokens behind something else, as in cross_entropy(logits.transpose(1, 2), y): "
            "write cross_entropy(logits.flatten(0, 1), y.flatten())"
        )
    before = known[source] if source in known else Rows(wanted.trail, wanted.lead)  # type: ignore[union-attr]
    return Step({source: before}, Rows(before.trail, before.lead), _again(node))


def _swaps(node: fx.Node) -> bool:
    """Return whether the two dimensions of a matrix change places."""
    name = _name(node)
    if name == "permute":
        return [dim % 2 for dim in node.args[1]] == [1, 0]
    return name == "t" or {dim % 2 for dim in node.args[1:]} == {0, 1}


def _product(node: fx.Node, known: Known, tokens: int, wanted: Rows | None) -> Step:
    """A matrix product: of tokens, from which they leave, or over tokens, of which it is a sum."""
    *bias, one, other = node.args[-3:] if node.target is aten.addmm.default else node.args
    if wanted is not None:
        if wanted != Rows(0, 1) or any(len(shape_of(each)) > 1 for each in bias):
            raise NotByTokensError("a matrix product is of other dimensions")
        operands = {one: Rows(0, 1), other: WHOLE, **dict.fromkeys(bias, WHOLE)}
        return Step(operands, wanted, _again(node))
    if bias:
        raise NotByTokensError("a second layer follows")
    if known.get(one) == Rows(0, 1) and other not in known:
        return Step({one: Rows(0, 1), other: WHOLE}, Rows(0, 1), _again(node), leaves=True)
    is_sum = known.get(one, Rows(1, 0)) == Rows(1, 0) and known.get(other, Rows(0, 1)) == Rows(0, 1)
    if is_sum and shape_of(one)[1] == tokens:
        return Step({one: Rows(1, 0), other: Rows(0, 1)}, None, _again(node), adds_up=True)
    raise NotByTokensError("a matrix product is of other dimensions")


def _behind(node: fx.Node, rows: Rows, dims: Any) -> list[int]:
    """Dimensions behind the tokens, counted from the last.

    Raises: NotByTokensError if some are others.
    """
    number = len(shape_of(node))
    found = sorted({dim % number for dim in ([dims] if isinstance(dims, int) else dims)})
    if any(dim < number - rows.trail for dim in found):
        raise NotByTokensError("it looks along tokens")
    return [dim - number for dim in found]


def _along(position: int):
    """The rule of what looks along one dimension, an argument, and keeps it."""

    def rule(node: fx.Node, known: Known, tokens: int, wanted: Rows | None) -> Step:
        first = node.args[0]
        rows = _result_rows(node, known, tokens, wanted)
        operands = {
            one: known[one] if one in known else rows_like(one, rows)
            for one in node.all_input_nodes
        }
        (dim,) = _behind(first, rows, node.args[position])
        return Step(operands, rows, _again(node, **{f"_{position}": dim}))

    def rows_like(operand: fx.Node, rows: Rows) -> Rows | None:
        return WHOLE if not shape_of(operand) else rows

    return rule


def _wide(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The ``dtype`` that a chunk's sum is made in: of narrow values the sum is no such value."""
    return {"dtype": torch.float32 if dtype in NARROW else dtype}


def _reduction(node: fx.Node, known: Known, tokens: int, wanted: Rows | None) -> Step:
    """A reduction behind the tokens, or a sum or mean over all of them."""
    source, at = node.args[0], 2 if node.target is aten.linalg_vector_norm.default else 1
    if source not in known:
        raise NotByTokensError("none of its operands has tokens")
    rows, shape = known[source], shape_of(source)
    number = len(shape)
    dims = _at(node, at, None)
    if isinstance(dims, (bool, fx.Node)):
        raise NotByTokensError("it is no reduction over dimensions")
    wanted_dims = range(number) if dims in (None, []) else [dims] if isinstance(dims, int) else dims
    found = sorted({dim % number for dim in wanted_dims})
    of_tokens = list(range(rows.lead, number - rows.trail))
    keepdim = bool(_at(node, at + 1, node.kwargs.get("keepdim")))
    if not set(of_tokens) & set(found):
        behind = _behind(source, rows, found)
        single = isinstance(dims, int)
        after = Rows(rows.lead, rows.trail - (0 if keepdim else len(behind)))
        changed = behind[0] if single else behind
        return Step({source: rows}, after, _again(node, **{f"_{at}": changed}))
    name = _name(node)
    if rows.lead or not set(of_tokens) <= set(found) or name not in ("sum", "mean"):
        raise NotByTokensError("it looks along some tokens")
    behind = [dim - number for dim in found if dim not in of_tokens]
    kwargs = _wide(node.kwargs.get("dtype") or node.meta["val"].dtype)

    def emit(call, of, size):
        over = [0, *(dim for dim in behind)]
        return call(aten.sum.dim_IntList, of(source), over, keepdim, **kwargs)

    divided_by = math.prod(shape[dim] for dim in found) if name == "mean" else 1
    return Step({source: rows}, None, emit, adds_up=True, divided_by=divided_by)


def _made(node: fx.Node, known: Known, tokens: int, wanted: Rows | None) -> Step:
    """What is filled with one value, in the shape that an argument says."""
    shape = shape_of(node)
    position = 1 if node.target is aten.new_zeros.default else 0
    rows = wanted or placed(shape, tokens)

    def emit(call, of, size):
        args = [
            rows.merged(shape, size) if at == position else arg for at, arg in enumerate(node.args)
        ]
        return call(node.target, *fx.node.map_arg(args, of), **node.kwargs)

    return Step({one: known.get(one, WHOLE) for one in node.all_input_nodes}, rows, emit)


def _slice(node: fx.Node, known: Known, tokens: int, wanted: Rows | None) -> Step:
    source = _only_operand(node)
    dim = node.args[2] if node.target is aten.slice_backward.default else _at(node, 1, 0)
    rows = known.get(source) or wanted
    assert rows is not None
    (dim,) = _behind(source, rows, dim)
    if node.target is aten.slice_backward.default:
        shape = shape_of(node)

        def emit(call, of, size):
            return call(node.target, of(source), rows.merged(shape, size), dim, *node.args[3:])

        return Step({source: rows}, rows, emit)
    return Step({source: rows}, rows, _again(node, _1=dim))


def _at(node: fx.Node, position: int, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else default


def _nll_loss(node: fx.Node, known: Known, tokens: int, wanted: Rows | None) -> Step:
    values, targets, weight, reduction, ignored = node.args
    if isinstance(ignored, fx.Node):
        raise NotByTokensError("the index that it ignores varies from call to call")
    if known.get(values) != Rows(0, 1):
        raise NotByTokensError("its classes are not the last dimension")
    operands: dict[fx.Node, Rows | None] = {
        values: Rows(0, 1),
        targets: known.get(targets, Rows(0, 0)),
    }
    if isinstance(weight, fx.Node):
        operands[weight] = WHOLE
    if reduction == MEAN and targets in known:
        raise NotByTokensError("its targets are computed of the logits")
    is_narrow = values.meta["val"].dtype in NARROW
    reduction = NONE if reduction == NONE or is_narrow else SUM
    return Step(operands, Rows(0, 0), _again(node, _3=reduction))


def _part_of_result(node: fx.Node, known: Known, tokens: int, wanted: Rows | None) -> Step:
    source, index = node.args
    if source not in known:
        raise NotByTokensError("none of its operands has tokens")
    if source.target is aten.nll_loss_forward.default:
        if index == 1:  # known before: it is counted in the targets
            raise NotByTokensError("the weight of all tokens")
        is_sum = source.args[3] != NONE

        def emit(call, of, size):
            part = call(operator.getitem, of(source), index)
            if is_sum and part.meta["val"].dtype in NARROW:
                part = call(aten.sum.default, part, dtype=torch.float32)
            return part

        rows = None if is_sum else Rows(0, 0)
        return Step({source: Rows(0, 0)}, rows, emit, adds_up=is_sum)
    rows = known[source]
    return Step({source: rows}, rows, lambda call, of, size: call(node.target, of(source), index))


def _nll_loss_backward(node: fx.Node, known: Known, tokens: int, wanted: Rows | None) -> Step:
    grad, values, targets, weight, reduction, _, total = node.args
    if known.get(values) != Rows(0, 1):
        raise NotByTokensError("its classes are not the last dimension")
    operands: dict[fx.Node, Rows | None] = {
        grad: known.get(grad, Rows(0, 0)) if reduction == NONE else WHOLE,
        values: Rows(0, 1),
        targets: known.get(targets, Rows(0, 0)),
        total: WHOLE,
    }
    if isinstance(weight, fx.Node):
        operands[weight] = WHOLE
    reduction = NONE if reduction == NONE else SUM
    return Step(operands, Rows(0, 1), _again(node, _4=reduction))


_RULES: dict[Any, Callable[[fx.Node, Known, int, Rows | None], Step]] = {
    **dict.fromkeys(
        (
            aten.detach,
            aten.alias,
            aten.clone,
            aten._to_copy,
            aten.full_like,
            aten.zeros_like,
            aten.ones_like,
            aten.empty_like,
        ),
        _same,
    ),
    **dict.fromkeys(
        (aten.view, aten._unsafe_view, aten.reshape, aten.unsqueeze, aten.squeeze), _view
    ),
    aten.expand: _expand,
    aten.binary_cross_entropy_with_logits: _elements_loss,
    **dict.fromkeys((aten.t, aten.transpose, aten.permute), _transpose),
    **dict.fromkeys((aten.mm, aten.addmm), _product),
    **dict.fromkeys(
        (aten._softmax, aten._log_softmax, aten.gather, aten.scatter, aten.scatter_add), _along(1)
    ),
    **dict.fromkeys((aten._softmax_backward_data, aten._log_softmax_backward_data), _along(2)),
    **dict.fromkeys(
        (
            aten.sum,
            aten.mean,
            aten.amax,
            aten.amin,
            aten.logsumexp,
            aten.argmax,
            aten.argmin,
            aten.any,
            aten.all,
            aten.max,
            aten.min,
            aten.var,
            aten.linalg_vector_norm,
        ),
        _reduction,
    ),
    **dict.fromkeys((aten.new_zeros, aten.full, aten.zeros, aten.ones), _made),
    **dict.fromkeys((aten.slice, aten.slice_backward), _slice),
    aten.nll_loss_forward: _nll_loss,
    aten.nll_loss_backward: _nll_loss_backward,
    operator.getitem: _part_of_result,
}
