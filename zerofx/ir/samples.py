"""Which values of a program are of one sample each, and which are sums over a batch's samples.

The first dimension of a batch's tensors counts samples, and this follows it through the program: a
value that no such dimension is left of has been reduced over the batch.  What it then takes part in
is followed for as long as it is linear, with the powers of a batch's size that it grows with.  An
operator that is not known keeps dimensions that stay where they are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import torch
from torch import fx

from zerofx import compat
from zerofx.ir import ops
from zerofx.ir.graph import is_backward, is_random
from zerofx.ir.interface import input_role

aten = torch.ops.aten

Span = tuple[int, int]
"""Says where in a dimension samples are counted: how much lies outside of them, how many."""

Dims = tuple[Span | None, ...]
"""Of each dimension how it counts samples; None if it does not."""


class Kind(StrEnum):
    """The kinds of values."""

    SAME = "same"
    """Made of nothing that a batch has to do with."""
    SAMPLES = "samples"
    """Of one sample each, along some dimension."""
    COUNT = "count"
    """Made of sums over samples of what the batch has: no parameter has to do with it."""
    TOTAL = "total"
    """Linear in sums over samples."""
    MIXED = "mixed"
    """None of these: it depends on a whole batch in some other way."""


@dataclass(frozen=True)
class Value:
    """Says how a value depends on the batch.

    ``degrees`` are the powers of a batch's size that its terms grow with: 1 for a sum, 0 for a sum
    that has been divided by a count.  ``is_scaled``: of one sample each, but for a count of all.
    ``is_data``: no parameter has to do with it.  ``is_marked``: a count that capture knows to be
    divided by.  ``is_given``: a number that the step is called with is in it.  ``culprit``
    is the node that made a ``MIXED`` one, and ``why`` what is wrong; of a sum that is divided by
    nothing yet, the node that scales it by a number which may be a count.
    """

    kind: Kind
    dims: Dims = ()
    degrees: frozenset[int] = frozenset({0})
    is_scaled: bool = False
    is_data: bool = True
    is_marked: bool = False
    is_given: bool = False
    culprit: fx.Node | None = None
    why: str = ""

    @property
    def is_plain(self) -> bool:
        """Return whether no number of the whole batch has to do with it."""
        return self.kind == Kind.SAME or (self.kind == Kind.SAMPLES and not self.is_scaled)

    @property
    def is_linear(self) -> bool:
        """Return whether it is followed by what is linear alone."""
        return self.kind in (Kind.TOTAL, Kind.COUNT) or self.is_scaled


@dataclass
class Samples:
    """The values of a captured program's forward passes."""

    graph: fx.Graph
    values: dict[fx.Node, Any] = field(default_factory=dict)
    """Each a ``Value``, or a list of them for an operator with several results."""
    sizes: set[int] = field(default_factory=set)
    """Lengths of dimensions that count samples."""

    def follow(self) -> Samples:
        """Find the values of all nodes before the last loss; return itself."""
        nodes = list(self.graph.nodes)
        losses = [node for node in nodes if node.target is ops.loss_part]
        self._inputs([node for node in nodes if node.op == "placeholder"])
        for node in nodes[: nodes.index(losses[-1]) + 1] if losses else ():
            if node.op == "call_function" and not is_backward(node):
                self.values[node] = self._value(node)
            elif node.op == "call_function":  # followed no further, but for what is averaged
                self.values[node] = Value(
                    Kind.MIXED, _none(node), culprit=node, why="is computed of a gradient"
                )
            elif node.op == "get_attr":
                self.values[node] = Value(Kind.SAME, _none(node))
        return self

    def of(self, node: Any) -> Value:
        """Return what is known of a node's value; of what is no node, that it is the same."""
        found = self.values.get(node) if isinstance(node, fx.Node) else None
        if isinstance(found, list):
            return found[0]
        return found or Value(Kind.SAME, _none(node) if isinstance(node, fx.Node) else ())

    def _inputs(self, nodes: Sequence[fx.Node]) -> None:
        """Tensors that the step is called with are of samples, and others that are as long."""
        tensors = [node for node in nodes if _shape(node) and input_role(node).kind == "other"]
        given = [node for node in tensors if input_role(node).is_argument]
        lengths = {_shape(node)[0] for node in given}
        symbols = {str(size) for node in given if _is_symbol(size := node.meta["val"].shape[0])}
        for node in nodes:
            role, value = input_role(node), node.meta.get("val")
            if node in tensors and (role.is_argument or _shape(node)[0] in lengths):
                self.values[node] = self._noted(node, Value(Kind.SAMPLES, _first(node)))
            elif role.kind == "other" and _is_symbol(value) and str(value) in symbols:
                self.values[node] = Value(Kind.COUNT, degrees=frozenset({1}))
            else:
                is_data = role.kind not in ("parameter", "gradient")
                is_given = role.kind == "number" or (role.kind == "other" and not _shape(node))
                is_given = is_given and not role.is_loss_scale
                value = Value(Kind.SAME, _none(node), is_data=is_data, is_given=is_given)
                self.values[node] = value

    def _noted(self, node: fx.Node, value: Value) -> Value:
        self.sizes |= {n for n, span in zip(_shape(node), value.dims, strict=True) if span}
        return value

    def _value(self, node: fx.Node) -> Any:
        if node.target is operator.getitem:
            whole, position = node.args
            found = self.values.get(whole)
            return found[position] if isinstance(found, list) else self.of(whole)
        sources = list(map(self.of, _sources(node)))
        result = self._result(node, sources)
        is_data = all(source.is_data for source in sources)
        is_given = any(source.is_given for source in sources)
        values = [replace(value, is_data=is_data, is_given=is_given) for value in result]
        outputs = node.meta.get("val")
        if not isinstance(outputs, (tuple, list)):
            return values[0]
        return values * len(outputs) if len(values) == 1 else values

    def _result(self, node: fx.Node, sources: list[Value]) -> list[Value]:
        """Return the values of a node's results, one for all if they are alike."""
        if node.target is ops.loss_part:
            return [self._of_part(node)]
        if node.target is ops.count:
            return [self._of_count(node)]
        if node.target in (ops.over_ranks, ops.gradient):  # of all ranks, or averaged over them
            return [Value(Kind.SAME, _none(node))]
        if all(source.kind == Kind.SAME for source in sources):
            return self._made_of_nothing(node)
        rule = _RULES.get(node.target) or _RULES.get(getattr(node.target, "overloadpacket", None))
        try:
            if rule is not None:
                result = rule(self, node)
            elif _is_pointwise(node):
                result = self._pointwise(node)
            elif _reduces(node):
                result = self._reduction(node)
            else:
                result = self._unknown(node)
        except _MixedError as mixed:
            result = Value(Kind.MIXED, mixed.dims, culprit=mixed.node, why=mixed.why)
        results = result if isinstance(result, list) else [result]
        return [self._laid_out(node, at, value) for at, value in enumerate(results)]

    def _laid_out(self, node: fx.Node, at: int, value: Value) -> Value:
        """Give a value as many dimensions as the result has, and note how long they are."""
        output = node.meta.get("val")
        output = output[at] if isinstance(output, (tuple, list)) else output
        ndim = output.dim() if isinstance(output, torch.Tensor) else 0
        if len(value.dims) != ndim:
            value = replace(value, dims=(None,) * ndim)
        if value.kind == Kind.SAMPLES and not any(value.dims):
            return Value(
                Kind.MIXED, value.dims, culprit=node, why="takes a part of the batch by itself"
            )
        if isinstance(output, torch.Tensor):
            shape = list(map(compat.aot.size_hint, output.shape))
            dims = tuple(  # a part of the batch has as many samples as it is long
                (span[0], min(span[1], size // span[0])) if span and size >= span[0] else span
                for span, size in zip(value.dims, shape, strict=True)
            )
            value = replace(value, dims=dims)
            self.sizes |= {n for n, span in zip(shape, value.dims, strict=True) if span}
        return value

    def _made_of_nothing(self, node: fx.Node) -> list[Value]:
        """Of random draws those are of samples that are as long as something that is."""
        outputs = node.meta.get("val")
        found = []
        for output in outputs if isinstance(outputs, (tuple, list)) else [outputs]:
            shape = _sizes(output)
            is_drawn = bool(shape) and is_random(node) and shape[0] in self.sizes
            rest = (None,) * (len(shape) - 1)
            dims = ((1, shape[0]) if is_drawn else None, *rest) if shape else ()
            found.append(Value(Kind.SAMPLES if is_drawn else Kind.SAME, dims))
        return found or [Value(Kind.SAME)]

    def _of_part(self, node: fx.Node) -> Value:
        value = self.of(node.args[0])
        if node.args[1] != "per_rank":
            return value
        return Value(Kind.TOTAL, (None,) * len(value.dims), is_data=value.is_data)

    def _of_count(self, node: fx.Node) -> Value:
        number, of = self.of(node.args[0]), node.args[1]
        if of in ("local", "global"):
            return Value(Kind.COUNT, number.dims, frozenset({1}), is_marked=True)
        if of == "mean":
            if not self._is_over_samples(node.args[2]):
                return Value(Kind.SAME, number.dims)
            return Value(Kind.COUNT, number.dims, frozenset({1}), is_marked=True)
        return replace(number, is_marked=number.kind == Kind.COUNT)

    def _is_over_samples(self, total: fx.Node) -> bool:
        """Return whether the sum of a mean is over samples, and not of what has been summed up."""
        if self.of(total).kind not in (Kind.TOTAL, Kind.COUNT):
            return False
        while _name(total) in ("detach", "alias", "_to_copy"):
            (total,) = total.all_input_nodes
        return _name(total) != "sum" or self.of(total.args[0]).kind == Kind.SAMPLES

    # What is computed element by element.

    def _pointwise(self, node: fx.Node) -> Value:
        dims = self._broadcast(node)
        inputs, name = list(map(self.of, _sources(node))), _name(node)
        if name == "div" and _is_users(node.args[1]) and self.of(node.args[1]).degrees == _ONE:
            return Value(Kind.TOTAL, dims)  # the user says what it is divided by
        for value in inputs:
            if value.kind == Kind.MIXED:
                return replace(value, dims=dims)
        if all(value.is_plain for value in inputs):
            return Value(Kind.SAMPLES, dims)
        if name in _LINEAR:
            return replace(self.of(node.args[0]), dims=dims)
        if name == "reciprocal" and inputs[0].is_marked:
            return replace(inputs[0], degrees=frozenset(-degree for degree in inputs[0].degrees))
        if name in ("mul", "div"):
            return self._scaled(node, dims)
        if name in ("add", "sub", "rsub"):
            return self._added(node, dims, inputs)
        if name == "where":
            condition, *values = map(self.of, node.args)
            if condition.is_plain:
                return self._added(node, dims, values)
        counts = [value for value in inputs if value.kind == Kind.COUNT]
        same = all(value.kind in (Kind.COUNT, Kind.SAME) for value in inputs)
        if same and name in _OF_COUNTS and len({value.degrees for value in counts}) == 1:
            return replace(counts[0], dims=dims, is_marked=all(c.is_marked for c in counts))
        raise _MixedError(node, "computes something that is not linear of a batch's sums", dims)

    def _broadcast(self, node: fx.Node) -> Dims:
        output = node.meta["val"]
        ndim = output.dim() if isinstance(output, torch.Tensor) else 0
        places = [
            {at + ndim - len(value.dims): span for at, span in enumerate(value.dims) if span}
            for value in map(self.of, _sources(node))
        ]
        found: dict[int, Span] = {}
        for spans in places:
            found = spans | found
        dims = tuple(map(found.get, range(ndim)))
        widest = max(places, key=len)
        if found.keys() - widest.keys():
            raise _MixedError(node, "compares samples with one another", dims)
        return dims

    def _scaled(self, node: fx.Node, dims: Dims) -> Value:
        """``a * b`` or ``a / b``, of which one is linear in the batch and the other a factor."""
        first, second = (self.of(argument) for argument in node.args[:2])
        is_division = _name(node) == "div"
        if not is_division and _is_factor(first) and not _is_factor(second):
            first, second = second, first
        if not _is_factor(second):
            if first.is_scaled and second.is_plain and not is_division:
                return replace(first, dims=dims)
            if second.is_scaled and first.is_plain and not is_division:
                return replace(second, dims=dims)
            if second.kind == Kind.COUNT:
                raise _MixedError(
                    node,
                    "uses a count of the batch other than to divide a loss by it, with `/`",
                    dims,
                )
            raise _MixedError(node, "multiplies or divides sums over a batch", dims)
        why = first.why or self._may_be_count(node, first, second, is_division)
        sign = -1 if is_division else 1
        (shift,) = second.degrees if len(second.degrees) == 1 else (0,)
        degrees = frozenset(degree + sign * shift for degree in first.degrees)
        is_scaled = first.is_scaled or (
            second.kind == Kind.COUNT and first.kind in (Kind.SAMPLES, Kind.SAME)
        )
        if first.kind == Kind.SAME:  # the inverse of a count
            return replace(second, dims=dims, degrees=degrees, is_scaled=False)
        is_marked = first.is_marked and (second.is_marked or second.kind == Kind.SAME)
        why = why if 1 in degrees else ""
        return replace(
            first,
            dims=dims,
            degrees=degrees,
            is_scaled=is_scaled,
            is_marked=is_marked,
            why=why,
            culprit=(first.culprit or node) if why else None,
        )

    def _may_be_count(self, node: fx.Node, value: Value, by: Value, is_division: bool) -> str:
        """Say why a number that a sum is scaled by may be a count of this rank's batch."""
        number = node.args[1]
        if 1 not in value.degrees or by.kind != Kind.SAME:
            return ""
        if isinstance(number, fx.Node):
            given = "scales a sum over the batch by a number that the step is called with"
            return given if by.is_given else ""
        if isinstance(number, bool) or number in (0, 1):
            return ""
        inverse = number if is_division else 1 / number
        whole = round(abs(inverse))
        is_whole = abs(abs(inverse) - whole) < 1e-6 * abs(inverse)
        is_size = is_whole and any(size > 1 and whole % size == 0 for size in self.sizes)
        if is_division or is_size:
            return f"divides a sum over the batch by the number {inverse:g}"
        return ""

    def _added(self, node: fx.Node, dims: Dims, inputs: Iterable[Value]) -> Value:
        inputs = [value for value in inputs if value.kind != Kind.SAME]
        kinds = {value.kind for value in inputs}
        degrees = frozenset().union(*(value.degrees for value in inputs))
        if kinds == {Kind.COUNT}:
            is_marked = all(value.is_marked for value in inputs)
            return Value(Kind.COUNT, dims, degrees, is_marked=is_marked)
        if kinds <= {Kind.TOTAL, Kind.COUNT}:
            doubtful = next((value for value in inputs if value.why), None)
            total = Value(Kind.TOTAL, dims, degrees)
            return replace(doubtful, dims=dims, degrees=degrees) if doubtful else total
        if kinds == {Kind.SAMPLES}:
            return Value(Kind.SAMPLES, dims, degrees, is_scaled=True)
        raise _MixedError(node, "adds what is of the whole batch to what is of samples", dims)

    # Reductions.

    def _reduction(self, node: fx.Node) -> Value:
        value = self.of(node.args[0])
        reduced = _reduced_dims(node, len(value.dims))
        keeps = bool(_argument(node, "keepdim"))
        dims = tuple(
            None if at in reduced else span
            for at, span in enumerate(value.dims)
            if keeps or at not in reduced
        )
        return self._reduced(node, value, dims, any(value.dims[at] for at in reduced))

    def _reduced(self, node: fx.Node, value: Value, dims: Dims, is_over_samples: bool) -> Value:
        if value.kind == Kind.MIXED:
            return replace(value, dims=dims)
        name = _name(node)
        if value.kind == Kind.SAMPLES and is_over_samples and not any(dims):
            if name != "sum":
                raise _MixedError(node, f"takes the {name} over the samples of a batch", dims)
            is_count = value.is_data and not value.is_scaled
            degrees = frozenset(degree + 1 for degree in value.degrees)
            return Value(Kind.COUNT if is_count else Kind.TOTAL, dims, degrees)
        if value.is_linear and name not in ("sum", "mean"):
            raise _MixedError(node, "computes something that is not linear of a batch's sums", dims)
        return replace(value, dims=dims)

    def _fused_loss(self, node: fx.Node) -> Value | list[Value]:
        """A loss with a ``reduction``: 0 for none, 1 for a mean, 2 for a sum."""
        reduction = _argument(node, "reduction")
        inputs = list(map(self.of, _sources(node)))
        if reduction == 0:
            return self._unknown(node)
        for value in inputs:
            if value.kind == Kind.MIXED:
                return replace(value, dims=())
            if not value.is_plain:
                raise _MixedError(node, "computes something that is not linear of a batch's sums")
        if reduction == 1:
            raise _MixedError(node, "takes the mean over the samples of a batch")
        return Value(Kind.TOTAL, degrees=_ONE)

    # Views, and what moves elements.

    def _view(self, node: fx.Node) -> Value:
        value = self.of(node.args[0])
        return replace(value, dims=_reshaped(value.dims, _shape(node.args[0]), _shape(node)))

    def _permuted(self, node: fx.Node) -> Value:
        value, ndim = self.of(node.args[0]), len(_shape(node))
        name = _name(node)
        order = list(range(ndim))
        if name == "permute":
            order = [dim % ndim for dim in node.args[1]]
        elif name == "transpose":
            one, other = (dim % ndim for dim in node.args[1:3])
            order[one], order[other] = other, one
        else:
            order.reverse()
        return replace(value, dims=tuple(value.dims[at] for at in order))

    def _expanded(self, node: fx.Node) -> Value:
        value = self.of(node.args[0])
        return replace(value, dims=_at_the_right(value.dims, len(_shape(node))))

    def _unsqueezed(self, node: fx.Node) -> Value:
        value = self.of(node.args[0])
        at = node.args[1] % len(_shape(node))
        return replace(value, dims=(*value.dims[:at], None, *value.dims[at:]))

    def _squeezed(self, node: fx.Node) -> Value:
        value, shape = self.of(node.args[0]), _shape(node.args[0])
        wanted = node.args[1] if len(node.args) > 1 else range(len(shape))
        wanted = [wanted] if isinstance(wanted, int) else wanted
        gone = {dim % len(shape) for dim in wanted if shape[dim] == 1}
        dims = tuple(span for at, span in enumerate(value.dims) if at not in gone)
        if value.kind == Kind.SAMPLES and not any(dims):
            kind = Kind.COUNT if value.is_data and not value.is_scaled else Kind.TOTAL
            degrees = frozenset(degree + 1 for degree in value.degrees)
            return Value(kind, dims, degrees)  # the sum over the one sample that there is
        return replace(value, dims=dims)

    def _selected(self, node: fx.Node) -> Value:
        value = self.of(node.args[0])
        at = node.args[1] % len(value.dims)
        return replace(value, dims=(*value.dims[:at], *value.dims[at + 1 :]))

    def _same_dims(self, node: fx.Node) -> Value:
        value = self.of(node.args[0])
        others = list(map(self.of, _sources(node)))
        mixed = next((other for other in others if other.kind == Kind.MIXED), None)
        if mixed is not None:
            return replace(mixed, dims=value.dims)
        return value

    def _unbound(self, node: fx.Node) -> Value:
        at = (node.args[1] if len(node.args) > 1 else 0) % len(_shape(node.args[0]))
        value = self.of(node.args[0])
        return replace(value, dims=(*value.dims[:at], *value.dims[at + 1 :]))

    def _joined(self, node: fx.Node) -> Value:
        """``cat`` and ``stack``."""
        # torch lets an empty list of numbers be joined to anything
        sources = [source for source in node.args[0] if _shape(source) != (0,)]
        values = [self.of(source) for source in sources]
        mixed = next((value for value in values if value.kind == Kind.MIXED), None)
        ndim = len(_shape(node))
        at = (node.args[1] if len(node.args) > 1 else 0) % ndim
        dims = tuple(map(_first_of, zip(*(value.dims for value in values), strict=True)))
        if _name(node) == "stack":
            dims = (*dims[:at], None, *dims[at:])
        elif dims[at] and all(
            value.dims[at] == (1, size)
            for value, size in zip(values, (_shape(one)[at] for one in sources), strict=True)
        ):
            dims = (*dims[:at], (1, _shape(node)[at]), *dims[at + 1 :])
        if mixed is not None:
            return replace(mixed, dims=dims)
        if all(value.is_plain for value in values):
            return Value(Kind.SAMPLES, dims)
        return self._added(node, dims, values)

    def _embedded(self, node: fx.Node) -> Value:
        weight, indices = map(self.of, node.args[:2])
        dims = (*indices.dims, None)
        if weight.kind != Kind.SAME:
            raise _MixedError(node, "looks up what the batch has made", dims)
        return replace(indices, dims=dims)

    def _gathered(self, node: fx.Node) -> Value:
        value, at, indices = self.of(node.args[0]), node.args[1], self.of(node.args[2])
        at = at % max(len(value.dims), 1)
        dims = tuple(map(_first_of, zip(value.dims, indices.dims, strict=True)))
        if value.kind == Kind.MIXED:
            return replace(value, dims=dims)
        if value.is_linear:
            raise _MixedError(node, "computes something that is not linear of a batch's sums", dims)
        if value.dims[at] or indices.kind not in (Kind.SAME, Kind.SAMPLES):
            raise _MixedError(node, "looks up other samples", dims)
        return replace(value, kind=Kind.SAMPLES, dims=dims)

    def _indexed(self, node: fx.Node) -> Value:
        """``x[i, :, j]``: indices side by side take one dimension's place, else the first."""
        value, indices = self.of(node.args[0]), node.args[1]
        used = [at for at, index in enumerate(indices) if index is not None]
        found = [self.of(indices[at]).dims for at in used]
        length = max(map(len, found))
        aligned = [_at_the_right(dims, length) for dims in found]
        picked = list(map(_first_of, zip(*aligned, strict=True)))
        is_reordered = any(value.dims[at] for at in used)
        rest = [span for at, span in enumerate(value.dims) if at not in used]
        is_together = used == list(range(used[0], used[-1] + 1))
        begin = sum(at not in used for at in range(used[0])) if is_together else 0
        if is_reordered and picked:  # samples in another order
            picked[0] = picked[0] or (1, _shape(node)[begin])
        dims = (*rest[:begin], *picked, *rest[begin:])
        if value.is_linear and any(picked):
            raise _MixedError(node, "computes something that is not linear of a batch's sums", dims)
        if value.kind == Kind.SAME:
            return Value(Kind.SAMPLES, dims)
        return replace(value, dims=dims)

    def _scattered(self, node: fx.Node) -> Value:
        """Follow what is written by place: among samples, or to places that are none."""
        into = self.of(node.args[0])
        at = node.args[1] if isinstance(node.args[1], int) else 0
        shape = _shape(node.args[0])
        at = at % max(len(shape), 1)
        if into.kind == Kind.MIXED:
            return into
        given = list(map(self.of, _sources(node)[1:]))
        bad = next((v for v in given if v.kind == Kind.MIXED and not _is_whole_number(v)), None)
        if bad is not None:
            return replace(bad, dims=into.dims)
        if any(value.is_linear for value in (into, *given)):
            raise _MixedError(node, "computes something that is not linear of a batch's sums")
        dims = into.dims
        if not any(dims) and shape:
            if shape[at] not in self.sizes:
                raise _MixedError(node, "adds up samples by their values", dims)
            dims = tuple((1, n) if place == at else None for place, n in enumerate(shape))
        return Value(Kind.SAMPLES, dims)

    # Products of matrices.

    def _product(self, node: fx.Node) -> Value:
        equation = _PRODUCTS[_name(node)]
        operands = node.args[1:3] if _name(node).startswith(("add", "badd")) else node.args[:2]
        left, right = map(self.of, operands)
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
        kept = [{name for name in one if name in output} for one in held]
        if kept[0] - kept[1] and kept[1] - kept[0]:
            raise _MixedError(node, "compares samples with one another", dims)
        linear = [value for value in (left, right) if value.is_linear]
        summed = [name for name in (held[0] | held[1]) if name not in output]
        if summed and (any(dims) or not all(name in one for name in summed for one in held)):
            raise _MixedError(node, "mixes the samples of a batch", dims)
        if summed and not linear:
            return Value(Kind.TOTAL, dims, _ONE)
        if linear and len(linear) == 1 and not summed:
            other = right if linear[0] is left else left
            if other.kind == Kind.SAME:
                return replace(linear[0], dims=dims)
        if linear:
            raise _MixedError(node, "computes something that is not linear of a batch's sums", dims)
        return Value(Kind.SAMPLES, dims)

    # All others.

    def _unknown(self, node: fx.Node) -> Value | list[Value]:
        """Dimensions stay where they are as long as before, or the first does."""
        outputs = node.meta.get("val")
        is_single = not isinstance(outputs, (tuple, list))
        inputs = [source for source in _sources(node) if self.of(source).kind != Kind.SAME]
        along = _argument(node, "dim")
        results = []
        for output in [outputs] if is_single else outputs:
            shape = _sizes(output)
            dims: Dims = (None,) * len(shape)
            for source in inputs:
                value = self.of(source)
                if value.kind == Kind.MIXED:
                    # Whole numbers say which elements, and not what is computed of them.
                    if _is_whole_number_node(source) and len(inputs) > 1:
                        continue
                    raise _MixedError(value.culprit, value.why, dims)
                if value.is_linear:
                    raise _MixedError(
                        node, "computes something that is not linear of a batch's sums", dims
                    )
                kept = _kept(value.dims, _shape(source), shape)
                dims = tuple(map(_first_of, zip(dims, kept, strict=True)))
                if isinstance(along, int) and value.dims and value.dims[along % len(value.dims)]:
                    raise _MixedError(node, "mixes the samples of a batch", dims)
            results.append(Value(Kind.SAMPLES, dims) if shape else Value(Kind.SAME))
        if not any(any(value.dims) for value in results):
            first = next((s for s in inputs if any(self.of(s).dims)), None)
            if first is not None:
                raise _MixedError(
                    node, "is an operator that the samples cannot be followed through"
                )
        return results[0] if is_single else results


_ONE = frozenset({1})


class _MixedError(Exception):
    def __init__(self, node: fx.Node | None, why: str, dims: Dims = ()):
        super().__init__(why)
        self.node, self.why, self.dims = node, why, dims


_LINEAR = {
    "_to_copy",
    "alias",
    "clone",
    "convert_element_type",
    "detach",
    "lift_fresh_copy",
    "neg",
    "scalar_tensor",
    "sym_float",
}
_OF_COUNTS = {"clamp", "clamp_min", "clamp_max", "maximum", "minimum"}

_PRODUCTS = {
    "mm": "ik,kj->ij",
    "addmm": "ik,kj->ij",
    "bmm": "bik,bkj->bij",
    "baddbmm": "bik,bkj->bij",
    "mv": "ik,k->i",
    "dot": "k,k->",
    "linear": "ik,jk->ij",
}

_RULES: dict[Any, Callable[[Samples, fx.Node], Any]] = {
    **dict.fromkeys((aten.view, aten._unsafe_view, aten.reshape), Samples._view),
    **dict.fromkeys((aten.permute, aten.transpose, aten.t), Samples._permuted),
    **dict.fromkeys((aten.expand,), Samples._expanded),
    **dict.fromkeys((aten.unsqueeze,), Samples._unsqueezed),
    **dict.fromkeys((aten.squeeze,), Samples._squeezed),
    **dict.fromkeys((aten.select,), Samples._selected),
    **dict.fromkeys(
        (
            aten.slice,
            aten.split,
            aten.split_with_sizes,
            aten.masked_fill,
            aten.slice_scatter,
            aten.select_scatter,
        ),
        Samples._same_dims,
    ),
    **dict.fromkeys((aten.unbind,), Samples._unbound),
    **dict.fromkeys((aten.cat, aten.stack), Samples._joined),
    **dict.fromkeys((aten.embedding,), Samples._embedded),
    **dict.fromkeys((aten.gather,), Samples._gathered),
    **dict.fromkeys((aten.index,), Samples._indexed),
    **dict.fromkeys(
        (
            aten.index_add,
            aten.index_copy,
            aten.index_put,
            aten.scatter,
            aten.scatter_add,
            aten.scatter_reduce,
        ),
        Samples._scattered,
    ),
    **dict.fromkeys(
        (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.mv, aten.dot), Samples._product
    ),
    **dict.fromkeys(
        (
            aten.nll_loss_forward,
            aten.nll_loss2d_forward,
            aten.mse_loss,
            aten.smooth_l1_loss,
            aten.huber_loss,
            aten.binary_cross_entropy,
            aten.binary_cross_entropy_with_logits,
            aten.soft_margin_loss,
            aten.multi_margin_loss,
            aten.multilabel_margin_loss_forward,
        ),
        Samples._fused_loss,
    ),
}


def _name(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", node.target)
    return getattr(packet, "__name__", str(packet))


def _sources(node: fx.Node) -> list[fx.Node]:
    """The nodes that a value is computed of; a size, as how long it is to be, is none of them."""
    is_arithmetic = _is_pointwise(node) or not isinstance(node.meta.get("val"), torch.Tensor)
    sources = node.all_input_nodes
    if is_arithmetic and not isinstance(node.meta.get("val"), (tuple, list)):
        return sources
    return [source for source in sources if not _is_symbol(source.meta.get("val"))]


def _argument(node: fx.Node, name: str) -> Any:
    """One argument of an operator's call; None if it has none of this name."""
    schema = getattr(node.target, "_schema", None)
    for position, one in enumerate(schema.arguments if schema is not None else ()):
        if one.name == name:
            given = node.args[position] if position < len(node.args) else one.default_value
            return node.kwargs.get(name, given)
    return None


def _is_pointwise(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        # arithmetic with sizes
        return getattr(target, "__module__", "") in ("_operator", "torch")
    return torch.Tag.pointwise in target.tags or _name(node) in _LINEAR


def _reduces(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if any(one.name == "keepdim" for one in schema.arguments):
        return True
    return _name(node) in ("sum", "mean", "max", "min", "prod", "any", "all", "amax", "amin")


def _reduced_dims(node: fx.Node, ndim: int) -> set[int]:
    dims = _argument(node, "dim")
    if dims is None or dims == []:
        return set(range(ndim))
    return {dim % max(ndim, 1) for dim in ([dims] if isinstance(dims, int) else dims)}


def _is_factor(value: Value) -> bool:
    return value.kind == Kind.SAME or (value.kind == Kind.COUNT and value.is_marked)


def _is_users(node: Any) -> bool:
    """Return whether a divisor is a count that the user gives, converted or bounded maybe."""
    while isinstance(node, fx.Node) and node.args:
        if node.target is ops.count and node.args[1] in ("local", "global"):
            return True
        if node.target is not ops.count and _name(node) not in _CONVERSIONS:
            break
        node = node.args[0]
    return False


_CONVERSIONS = ("_to_copy", "to", "clone", "detach", "alias", "clamp", "clamp_min", "view")


def _is_whole_number(value: Value) -> bool:
    return value.culprit is not None and _is_whole_number_node(value.culprit)


def _is_whole_number_node(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not value.dtype.is_floating_point


def _is_symbol(value: Any) -> bool:
    return isinstance(value, torch.SymInt)


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, torch.Tensor):
        return ()
    return tuple(map(compat.aot.size_hint, value.shape))


def _shape(node: Any) -> tuple[int, ...]:
    """Return the sizes of a node's tensor as they were when captured."""
    return _sizes(node.meta.get("val"))


def _none(node: fx.Node) -> Dims:
    return (None,) * len(_shape(node))


def _first(node: fx.Node) -> Dims:
    shape = _shape(node)
    return ((1, shape[0]), *(None,) * (len(shape) - 1))


def _first_of(spans: Iterable[Span | None]) -> Span | None:
    return next(filter(None, spans), None)


def _at_the_right(dims: Dims, ndim: int) -> Dims:
    return (*(None,) * (ndim - len(dims)), *dims)


def _kept(dims: Dims, before: tuple[int, ...], after: tuple[int, ...]) -> Dims:
    if len(before) == len(after):
        pairs = zip(before, after, strict=True)
        return tuple(s if a == b else None for s, (a, b) in zip(dims, pairs, strict=True))
    is_first = bool(dims and after and before[0] == after[0])
    return (dims[0] if is_first else None, *(None,) * (len(after) - 1)) if after else ()


def _reshaped(dims: Dims, before: tuple[int, ...], after: tuple[int, ...]) -> Dims:
    """The dimensions behind a view: samples are where they were among all elements."""
    found: dict[int, Span] = {}
    outside = 1
    for length, span in zip(before, dims, strict=True):
        if span is not None and after:
            begin = outside * span[0]
            found |= _within(begin, begin * span[1], after)
        outside *= length
    return tuple(map(found.get, range(len(after))))


def _within(begin: int, end: int, sizes: tuple[int, ...]) -> dict[int, Span]:
    """The dimensions that a factor of all elements is in, which begins and ends there.

    A single sample is no factor: it is where its dimension is, or in what that was put behind.
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
        at = next((at for at in (single, left, right) if at is not None), len(sizes) - 1)
        found[at] = (sizes[at] if at == left else 1), 1
    return found
