"""Follows the samples through a program, operator by operator, by a table of rules."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from zerofx import compat
from zerofx.ir import ops
from zerofx.ir.graph import is_backward, is_random
from zerofx.ir.interface import input_role
from zerofx.ir.samples import pointwise, products, reductions, unknown, views
from zerofx.ir.samples.nodes import (
    argument_of,
    holds_whole_numbers,
    is_pointwise,
    is_reduction,
    is_symbol,
    name_of,
    shape_of,
    sizes_of,
    sources_of,
)
from zerofx.ir.samples.values import (
    WHOLE,
    Dims,
    Kind,
    MixedError,
    Objection,
    Value,
    first_dim,
    no_dims,
    parts_of,
)

aten = torch.ops.aten


@dataclass
class Samples:
    """The values of a captured program's forward passes."""

    graph: fx.Graph
    values: dict[fx.Node, Any] = field(default_factory=dict)
    """Each a ``Value``, or a list of them for an operator with several results."""
    sizes: set[int] = field(default_factory=set)
    """Lengths of dimensions that count samples."""
    given: set[int] = field(default_factory=set)
    """The numbers of samples, of their tokens, and so on, that the step is called with."""
    numbers: set[int] = field(default_factory=set)
    """Those of them that a program has as a number, and not as a symbol."""

    def follow(self) -> Samples:
        """Find the values of all nodes before the last loss; return itself."""
        nodes = list(self.graph.nodes)
        losses = [node for node in nodes if node.target is ops.loss_part]
        self._inputs([node for node in nodes if node.op == "placeholder"])
        for node in nodes[: nodes.index(losses[-1]) + 1] if losses else ():
            if node.op == "call_function" and not is_backward(node):
                self.values[node] = self._value(node)
            elif node.op == "call_function":  # followed no further, but for what is averaged
                of_gradient = Objection(node, "is computed of a gradient")
                self.values[node] = Value(Kind.MIXED, no_dims(node), objection=of_gradient)
            elif node.op == "get_attr":
                may_count = self._made_like_batch(node)
                self.values[node] = Value(Kind.SAME, no_dims(node), may_count=may_count)
        return self

    def of(self, node: Any) -> Value:
        """Return what is known of a node's value; of what is no node, that it is the same."""
        found = self.values.get(node) if isinstance(node, fx.Node) else None
        if isinstance(found, list):
            return found[0]
        return found or Value(Kind.SAME, no_dims(node) if isinstance(node, fx.Node) else ())

    def _inputs(self, nodes: Sequence[fx.Node]) -> None:
        """Tensors that the step is called with are of samples, and others that are as long."""
        tensors = [node for node in nodes if shape_of(node) and input_role(node).kind == "other"]
        given = [node for node in tensors if input_role(node).is_argument]
        lengths = {shape_of(node)[0] for node in given}
        shapes = map(shape_of, given)
        self.given = {n for shape in shapes for n in itertools.accumulate(shape, operator.mul)}
        symbols = {str(size) for node in given if is_symbol(size := node.meta["val"].shape[0])}
        for node in nodes:
            role, value = input_role(node), node.meta.get("val")
            if node in tensors and (role.is_argument or shape_of(node)[0] in lengths):
                self.values[node] = self._noted(node, Value(Kind.SAMPLES, first_dim(node)))
            elif role.kind == "other" and is_symbol(value) and str(value) in symbols:
                self.values[node] = Value(Kind.COUNT, degrees=frozenset({1}))
            else:
                is_data = role.kind not in ("parameter", "gradient")
                is_given = role.kind == "number" or (role.kind == "other" and not shape_of(node))
                may_count = GIVEN if is_given and not role.is_loss_scale else ""
                value = Value(Kind.SAME, no_dims(node), is_data=is_data, may_count=may_count)
                self.values[node] = value

    def _noted(self, node: fx.Node, value: Value) -> Value:
        if any(value.dims):
            self._note_sizes(node.meta["val"].shape, value.dims)
        return value

    def _note_sizes(self, shape: Sequence[Any], dims: Dims) -> None:
        lengths = [length for length, span in zip(shape, dims, strict=True) if span]
        self.sizes |= set(map(compat.aot.size_hint, lengths))
        self.numbers |= {length for length in lengths if not is_symbol(length)}

    def _value(self, node: fx.Node) -> Any:
        if node.target is operator.getitem:
            whole, position = node.args
            found = self.values.get(whole)
            return found[position] if isinstance(found, list) else self.of(whole)
        packet = getattr(node.target, "overloadpacket", None)
        sources = list(map(self.of, sources_of(node)))
        result = self._result(node, sources)
        is_data = packet in _MAKERS or all(source.is_data for source in sources)
        may_count = next((one.may_count for one in sources if one.may_count), "")
        if not may_count and all(one.kind == Kind.SAME for one in result):
            may_count = self._made_like_batch(node)
        parts = parts_of(sources)
        if packet not in _CUTS:
            part = parts[0] if len(parts) == 1 else WHOLE  # two make pairs
            result = [replace(value, part=part) for value in result]
        keeps_order = packet not in (aten.index, *_WRITES)
        is_sorted = keeps_order and any(source.is_sorted for source in sources)
        result = [
            replace(one, is_sorted=(one.is_sorted or is_sorted) and any(one.dims)) for one in result
        ]
        outputs = node.meta.get("val")
        is_single = not isinstance(outputs, (tuple, list))
        outputs = [outputs] if is_single else outputs
        values = []
        for one, output in zip(result * (len(outputs) // len(result)), outputs, strict=True):
            is_whole = any(one.dims) and holds_whole_numbers(output)  # which have no gradient
            values.append(replace(one, is_data=is_data or is_whole, may_count=may_count))
        return values[0] if is_single else values

    def _result(self, node: fx.Node, sources: list[Value]) -> list[Value]:
        """Return the values of a node's results, one for all if they are alike."""
        if node.target is ops.loss_part:
            return [self._of_part(node)]
        if node.target in (ops.over_ranks, ops.gradient):  # of all ranks, or averaged over them
            return [Value(Kind.SAME, no_dims(node))]
        if node.target is not ops.count and all(source.kind == Kind.SAME for source in sources):
            return self._made_of_nothing(node)
        rule = _RULES.get(node.target) or _RULES.get(getattr(node.target, "overloadpacket", None))
        try:
            if node.target is ops.count:
                return [self._of_count(node)]
            if rule is not None:
                result = rule(self, node)
            elif is_pointwise(node):
                result = pointwise.pointwise(self, node)
            elif is_reduction(node):
                result = reductions.reduced(self, node)
            else:
                result = unknown.unknown(self, node)
        except MixedError as mixed:
            result = Value(Kind.MIXED, mixed.dims, objection=mixed.objection)
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
            by_itself = Objection(node, "takes a part of the batch by itself")
            return Value(Kind.MIXED, value.dims, objection=by_itself)
        if isinstance(output, torch.Tensor):
            shape = list(map(compat.aot.size_hint, output.shape))
            dims = tuple(  # a part of the batch has as many samples as it is long
                (span[0], min(span[1], size // span[0])) if span and size >= span[0] else span
                for span, size in zip(value.dims, shape, strict=True)
            )
            value = replace(value, dims=dims)
            self._note_sizes(output.shape, dims)
        return value

    def _made_of_nothing(self, node: fx.Node) -> list[Value]:
        """Of random draws those are of samples that are as long as something that is."""
        found = []
        for output in _outputs_of(node):
            shape = sizes_of(output)
            is_drawn = bool(shape) and is_random(node) and shape[0] in self.sizes
            rest = (None,) * (len(shape) - 1)
            dims = ((1, shape[0]) if is_drawn else None, *rest) if shape else ()
            found.append(Value(Kind.SAMPLES if is_drawn else Kind.SAME, dims))
        return found or [Value(Kind.SAME)]

    def _made_like_batch(self, node: fx.Node) -> str:
        """Say that what is made of nothing is as long as some samples, or holds their number."""
        shapes = list(map(sizes_of, _outputs_of(node)))
        if is_random(node):  # before a model makes tokens of samples
            is_like = any(n > 1 and n in self.given for shape in shapes for n in shape)
            return "what is drawn as long as the batch, and not of it" if is_like else ""
        if sources_of(node) and getattr(node.target, "overloadpacket", None) not in _MAKERS:
            return ""
        if any(n > 1 and n in self.sizes for shape in shapes for n in shape):
            return "what is made as long as the batch, and not of it"
        number = argument_of(node, "fill_value") or argument_of(node, "s")
        if self.of(number).kind == Kind.COUNT:  # a symbol
            return "a number that is made of the batch's length"
        if node.op == "get_attr":
            constant = operator.attrgetter(node.target)(self.graph.owning_module)
            if isinstance(constant, torch.Tensor) and constant.numel() == 1:  # and no function
                with compat.tensors.real_tensors():
                    number = constant.item()
        if not isinstance(number, (int, float)) or not number:
            return ""
        is_length = any(pointwise.is_size(self, one) for one in (number, 1 / number))
        return "a number that is made of the batch's length" if is_length else ""

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
        """Return whether the sum of a mean is over samples, and not of what has been summed up.

        Raises: MixedError for one over the part of a split dimension that the batch may decide.
        """
        summed = total
        while name_of(summed) in ("detach", "alias", "_to_copy"):
            (summed,) = summed.all_input_nodes
        if name_of(summed) == "sum":
            value = self.of(summed.args[0])
            if reductions.reduces_longer_part(value, reductions.reduced_dims(summed, value)):
                raise MixedError(total, "takes the mean over a part of the samples of a batch")
        if self.of(total).kind not in (Kind.TOTAL, Kind.COUNT):
            return False
        return name_of(summed) != "sum" or self.of(summed.args[0]).kind == Kind.SAMPLES


def _outputs_of(node: fx.Node) -> Sequence[Any]:
    outputs = node.meta.get("val")
    return outputs if isinstance(outputs, (tuple, list)) else [outputs]


GIVEN = "a number that the step is called with"

_CUTS = (aten.slice, aten.split, aten.split_with_sizes)

_WRITES = (
    *(aten.index_add, aten.index_copy, aten.index_put),
    *(aten.scatter, aten.scatter_add, aten.scatter_reduce),
)

_MAKERS = (aten.new_empty, aten.new_full, aten.new_ones, aten.new_zeros)

_RULES: dict[Any, Callable[[Samples, fx.Node], Any]] = {
    **dict.fromkeys((aten.view, aten._unsafe_view, aten.reshape), views.viewed),
    **dict.fromkeys((aten.permute, aten.transpose, aten.t), views.permuted),
    **dict.fromkeys((aten.expand,), views.expanded),
    **dict.fromkeys((aten.unsqueeze,), views.unsqueezed),
    **dict.fromkeys((aten.squeeze,), views.squeezed),
    **dict.fromkeys((aten.select,), views.selected),
    **dict.fromkeys(
        (
            aten._scaled_dot_product_efficient_attention,
            aten._scaled_dot_product_flash_attention,
            aten._scaled_dot_product_flash_attention_for_cpu,
            aten._scaled_dot_product_cudnn_attention,
            aten._scaled_dot_product_attention_math,
            aten._scaled_dot_product_attention_math_for_mps,
            aten.scaled_dot_product_attention,
        ),
        unknown.attended,
    ),
    **dict.fromkeys(_CUTS, views.cut),
    **dict.fromkeys((aten.masked_fill,), pointwise.filled),
    **dict.fromkeys((aten.slice_scatter, aten.select_scatter), views.written),
    **dict.fromkeys((aten.unbind,), views.unbound),
    **dict.fromkeys((aten.cat, aten.stack), views.joined),
    **dict.fromkeys((aten.embedding,), views.embedded),
    **dict.fromkeys((aten.gather,), views.gathered),
    **dict.fromkeys((aten.index,), views.indexed),
    **dict.fromkeys((aten.index_select,), views.index_selected),
    **dict.fromkeys(_WRITES, views.scattered),
    **dict.fromkeys(_MAKERS, unknown.made),
    **dict.fromkeys(
        (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.mv, aten.dot), products.product
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
        reductions.fused_loss,
    ),
}
