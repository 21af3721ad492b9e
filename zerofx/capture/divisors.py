"""Marks what a step's losses are divided by, in Dynamo's graph, where functions have their names.

A mean becomes a sum and its division by a count, so that autograd uses the count in backward too.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import fx

from zerofx.capture.checks import argument, is_backward_call, is_own_function
from zerofx.errors import StepError
from zerofx.ir import ops
from zerofx.ir.reach import reached
from zerofx.ir.samples.pointwise import COMPARISONS
from zerofx.ir.source import source_line


def backward_to(graph: fx.Graph, parameters: Collection[fx.Node]) -> list[fx.Node]:
    """Return the calls of backward that make gradients of these, to be used as they are.

    What they start from is made their first argument, and is given by no name.
    """
    found = []
    for node in graph.nodes:
        if not is_backward_call(node) or argument(node, 4, "create_graph"):
            continue
        if not node.args:
            named = dict(node.kwargs)
            node.args, node.kwargs = (named.pop("outputs"),), named
        wanted = node.args[1] if len(node.args) > 1 else node.kwargs["inputs"]
        wanted = wanted if isinstance(wanted, (tuple, list)) else [wanted]
        if any(map(parameters.__contains__, wanted)):
            found.append(node)
    return found


def mark_losses(gm: fx.GraphModule, parameters: Collection[fx.Node]) -> None:
    """Mark every loss that backward starts from, and all divisors that it may depend on.

    Raises: StepError for a loss that is not one number, or has gradients that are not a loss's.
    """
    graph = gm.graph
    calls = backward_to(graph, parameters)
    for call in calls:
        _multiply_with_gradient(graph, call)
    roots = [_loss_of(call) for call in calls]
    wanted = set(reached(roots, read_by))
    _check_functions(gm, wanted)
    _mark_divisors(graph, wanted)
    for body in _checkpointed(gm, wanted):
        _mark_divisors(body.graph, set(reached([body.graph.output_node()], read_by)))
        body.recompile()
    for number, (call, root) in enumerate(zip(calls, roots, strict=True)):
        with graph.inserting_before(call):
            # What stood for the loss may be another node now.
            loss = _loss_of(call)
            marker = _like(root, graph.call_function(ops.loss_part, (loss, "loss", number)))
        call.args = ([marker] if isinstance(call.args[0], list) else marker, *call.args[1:])


def read_by(node: fx.Node) -> list[fx.Node]:
    """Return what a node of a loss reads; nothing of what is meant for each rank by itself."""
    return [] if is_per_rank(node) else node.all_input_nodes


def is_per_rank(node: fx.Node) -> bool:
    return node.target is ops.loss_part and node.args[1] == "per_rank"


def _mark_divisors(graph: fx.Graph, wanted: Collection[fx.Node]) -> None:
    """Mark those of wanted nodes; what is meant for each rank reads no marked count."""
    by_rank = set(reached(filter(is_per_rank, wanted), lambda node: node.all_input_nodes))
    for node in by_rank.difference(wanted):
        for source in node.all_input_nodes:
            if source.target is ops.count:
                node.replace_input_with(source, source.args[0])
    for node in list(graph.nodes):
        if node in wanted:
            _mark(graph, node)


def _checkpointed(gm: fx.GraphModule, nodes: Collection[fx.Node]) -> list[fx.GraphModule]:
    """Return the functions that some nodes call, as ``torch.utils.checkpoint`` does.

    Not those of a ``torch.autograd.Function``: its backward would divide by what it did.
    """
    named = dict(gm.named_modules())
    targets = {
        node.target
        for node in nodes
        if node.op == "get_attr" and not any(map(is_own_function, node.users))
    }
    found = [named[target] for target in targets if target in named]
    return [module for module in found if isinstance(module, fx.GraphModule)]


def _check_functions(gm: fx.GraphModule, nodes: Collection[fx.Node]) -> None:
    """Refuse a ``torch.autograd.Function`` whose backward adds gradients of nothing that it got.

    A loss that is added to the gradients so is none that could be averaged over ranks.
    """
    named = dict(gm.named_modules())
    for call in filter(is_own_function, nodes):
        forward, backward = (named[str(body.target)] for body in call.args[:2])
        results = forward.graph.output_node().args[0]
        saved = results[1] if isinstance(results, tuple) and len(results) == 2 else ()
        gradients = backward.graph.output_node()
        inputs = backward.graph.find_nodes(op="placeholder")
        given = set(inputs[: len(inputs) - len(saved)])
        for gradient in gradients.all_input_nodes:
            made_of = reached([gradient], lambda node: node.all_input_nodes)
            if given.isdisjoint(made_of):
                raise StepError(
                    "a torch.autograd.Function in the model has a backward that returns a gradient "
                    "whatever gradient it is given, as to add a loss: with loss='global' it would "
                    "stay the rank's own. Add that loss to the step's loss instead, or use "
                    f"loss='rank'.\n  at {source_line(call)}"
                )


def _multiply_with_gradient(graph: fx.Graph, call: fx.Node) -> None:
    """``loss.backward(gradient)`` -> ``(loss * gradient).backward()``: it scales the loss."""
    loss, given = _loss_of(call), argument(call, 2, "grad_outputs")
    (gradient,) = given if isinstance(given, (tuple, list)) else (given,)
    if gradient is None:
        return
    with graph.inserting_before(call):
        scale = graph.call_method("detach", (gradient,))
        product = _like(loss, graph.call_function(operator.mul, (loss, scale)))
    call.args = (product, argument(call, 1, "inputs"), None, *call.args[3:])
    call.kwargs = {k: v for k, v in call.kwargs.items() if k not in ("inputs", "grad_outputs")}


def weigh_losses(gm: fx.GraphModule, parameters: Collection[fx.Node]) -> None:
    """Have gradients of these be zero that a rank computes without data: ``loss * has_data``."""
    graph = gm.graph
    for call in backward_to(graph, parameters):
        several = isinstance(call.args[0], (list, tuple))
        weighed = []
        for loss in call.args[0] if several else [call.args[0]]:
            value = loss.meta["example_value"]
            with graph.inserting_before(call):
                data = graph.call_function(ops.has_data, (value.dtype, value.device))
                product = graph.call_function(operator.mul, (loss, data))
            weighed.append(_like(loss, product))
        call.args = (weighed if several else weighed[0], *call.args[1:])


def without_marks(gm: fx.GraphModule) -> None:
    """Leave what users say of a loss out of a step for which it changes nothing."""
    for part in filter(lambda module: isinstance(module, fx.GraphModule), gm.modules()):
        for node in list(part.graph.nodes):
            if node.target in (ops.count, ops.loss_part):
                node.replace_all_uses_with(node.args[0])
                part.graph.erase_node(node)
        part.recompile()


def _loss_of(call: fx.Node) -> fx.Node:
    losses = call.args[0]
    loss = losses[0] if isinstance(losses, (list, tuple)) else losses
    value = loss.meta.get("example_value")
    if (isinstance(losses, (list, tuple)) and len(losses) > 1) or (
        isinstance(value, torch.Tensor) and value.numel() != 1
    ):
        raise StepError(
            "loss=global needs a loss that is one number to start backward() from. "
            f"Sum it up first, or use loss=rank.{_at(call)}"
        )
    return loss


def _mark(graph: fx.Graph, node: fx.Node) -> None:
    """Mark the divisor that a node divides by, be it a mean."""
    name = _name(node)
    with graph.inserting_before(node):
        if name == "mean" and node.args:
            instead = _mean(graph, node)
        elif name == "sub" and len(node.args) > 1:
            instead = _complement(graph, node)
        elif name in COMPARISONS and len(node.args) > 1 and type(node.args[1]) in (int, float):
            _mark_compared(graph, node)
            return
        elif name in ("div", "div_", "true_divide", "truediv", "itruediv") and len(node.args) > 1:
            _mark_divisor(graph, node)
            return
        elif getattr(node.target, "__module__", "") == F.__name__:
            instead = _loss_function(graph, node)
        else:
            return
    if instead is not None:
        node.replace_all_uses_with(instead)
        graph.erase_node(node)


def _name(node: fx.Node) -> str:
    return node.target if node.op == "call_method" else getattr(node.target, "__name__", "")


def _mark_divisor(graph: fx.Graph, node: fx.Node) -> None:
    divisor = node.args[1]
    value = divisor.meta.get("example_value") if isinstance(divisor, fx.Node) else None
    if isinstance(value, torch.SymInt | torch.SymFloat):
        divisor = graph.call_function(torch.scalar_tensor, (divisor,), {"dtype": torch.float32})
    elif not isinstance(value, torch.Tensor) or value.requires_grad:
        return
    if divisor.target is not ops.count:
        marker = _like(node, graph.call_function(ops.count, (divisor, "found")))
        node.args = (node.args[0], marker, *node.args[2:])


def _mark_compared(graph: fx.Graph, node: fx.Node) -> None:
    """Mark a number that ``torch.where(number > 0, ...)`` compares with zero."""
    number = node.args[0]
    if not any(_name(user) in ("where", "masked_fill") for user in node.users):
        return
    value = number.meta.get("example_value") if isinstance(number, fx.Node) else None
    is_number = isinstance(value, torch.Tensor) and not value.dim() and not value.requires_grad
    if is_number and node.args[1] == 0 and number.target is not ops.count:
        marker = _like(number, graph.call_function(ops.count, (number, "found")))
        node.args = (marker, *node.args[1:])


def _complement(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """``x.numel() - x.sum()`` -> ``count - x.sum()``: what the sum leaves is of the batch too.

    Dynamo may have made a plain number of the size.  Of others it is not known what they are of.
    """
    number, rest = node.args[:2]
    total = rest
    while isinstance(total, fx.Node) and total.target in ("to", "long", "int", "float", "detach"):
        total = total.args[0]
    if getattr(total, "target", None) not in ("sum", torch.sum):
        return None
    summed = argument(total, 0, "input")
    source, value = (one.meta.get("example_value") for one in (summed, total))
    size = number.meta.get("example_value") if isinstance(number, fx.Node) else number
    if value.dim() or value.requires_grad or str(size) != str(source.numel()):  # without a guard
        return None
    build = _Builder(graph, node, value.device)
    difference = build.call(operator.sub, build.count(number, total), rest)
    return _like(node, build.method("to", difference, node.meta["example_value"].dtype))


def _mean(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """``x.mean(...)`` -> ``x.sum(...) / count``, if it is over the first dimension."""
    source = node.args[0]
    value = source.meta.get("example_value") if isinstance(source, fx.Node) else None
    if not isinstance(value, torch.Tensor) or not value.dim():
        return None
    dims = argument(node, 1, "dim")
    if isinstance(dims, torch.dtype) or set(node.kwargs) - {"dim", "keepdim", "dtype"}:
        return None
    keepdim = argument(node, 2, "keepdim") or False
    wanted = range(value.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    wanted = sorted({dim % value.dim() for dim in wanted}) or list(range(value.dim()))
    dtype = node.kwargs.get("dtype") or value.dtype
    if wanted[0] != 0:
        return None
    build = _Builder(graph, node, value.device)
    total = build.total(source, dtype, dim=wanted, keepdim=keepdim)
    return build.mean(total, build.numel(source, wanted), dtype)


def _loss_function(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """``F.some_loss(..., reduction="mean")`` -> a sum and a count."""
    function = node.target
    try:
        bound = inspect.signature(function).bind(*node.args, **node.kwargs)
    except (TypeError, ValueError):
        return None
    bound.apply_defaults()
    given = bound.arguments
    reduction = given.get("reduction")
    if reduction not in ("mean", "batchmean"):
        return None
    if given.get("size_average") is not None or given.get("reduce") is not None:
        return None
    source = given.get("input", next(iter(given.values())))
    value = source.meta.get("example_value")
    if not isinstance(value, torch.Tensor):
        return None
    build = _Builder(graph, node, value.device)

    def call(reduction: str) -> fx.Node:
        given["reduction"] = reduction
        return build.call(function, *bound.args, **bound.kwargs)

    result = node.meta.get("example_value")
    dtype = result.dtype if isinstance(result, torch.Tensor) else value.dtype
    if given.get("ignore_index") is not None:
        is_small = dtype == torch.float16  # a mean fits where its sum may not
        total = build.total(call("none"), dtype) if is_small else call("sum")
        number, of = _number_of_targets(build, given)
        return build.mean(total, number, dtype, of)
    if function is F.ctc_loss:
        lengths = given["target_lengths"]
        if not isinstance(lengths, fx.Node):
            lengths = build.call(torch.tensor, list(lengths), device=value.device)
        each = build.call(operator.truediv, call("none"), build.method("clamp", lengths, min=1))
    elif reduction == "batchmean":
        return build.mean(build.total(call("none"), dtype), build.numel(source, [0]), dtype)
    elif function in (F.mse_loss, F.l1_loss) and isinstance(given.get("weight"), fx.Node):
        weight = build.total(given["weight"], dtype)
        return build.mean(build.total(call("none"), dtype), weight, dtype, "found")
    else:
        each = call("none")
    return build.mean(build.total(each, dtype), build.call(torch.numel, each), dtype)


def _number_of_targets(build: _Builder, given: Any) -> tuple[fx.Node, str]:
    """Return what a cross entropy's mean divides by: the weight of all targets that count."""
    target, weight = given["target"], given.get("weight")
    value, source = target.meta["example_value"], given["input"].meta["example_value"]
    if value.dtype.is_floating_point:  # probabilities of classes: each sample counts as one
        numel = build.call(torch.numel, target)
        classes = source.shape[1] if source.dim() > 1 else source.shape[0]
        return build.call(operator.floordiv, numel, classes), "mean"
    counts = build.call(torch.ne, target, given["ignore_index"])
    if weight is not None:
        index = build.call(torch.where, counts, target, 0)
        weights = build.call(operator.getitem, weight, index)
        counts = build.call(operator.mul, weights, counts)
    return build.method("sum", counts), "found"


class _Builder:
    """Inserts nodes in place of one, on its device and with its line."""

    def __init__(self, graph: fx.Graph, like: fx.Node, device: torch.device):
        self.graph, self.like, self.device = graph, like, device

    def call(self, function: Callable, *args: Any, **kwargs: Any) -> fx.Node:
        return _like(self.like, self.graph.call_function(function, args, kwargs), is_new=True)

    def method(self, name: str, *args: Any, **kwargs: Any) -> fx.Node:
        return _like(self.like, self.graph.call_method(name, args, kwargs), is_new=True)

    def total(self, source: fx.Node, dtype: torch.dtype, **kwargs: Any) -> fx.Node:
        """A sum, in float32 of what has fewer bits: a mean fits where its sum may not."""
        is_narrow = dtype in (torch.float16, torch.bfloat16)
        return self.method("sum", source, dtype=torch.float32 if is_narrow else dtype, **kwargs)

    def numel(self, source: fx.Node, dims: list[int]) -> fx.Node:
        sizes = [self.method("size", source, dim) for dim in dims]
        product = sizes[0]
        for size in sizes[1:]:
            product = self.call(operator.mul, product, size)
        return product

    def count(self, number: fx.Node | int, total: fx.Node) -> fx.Node:
        """Mark how many elements there are, of which ``total`` is the sum."""
        options = {"dtype": torch.float32, "device": self.device}
        number = self.call(torch.scalar_tensor, number, **options)
        return self.call(ops.count, number, "mean", self.method("detach", total))

    def mean(
        self, total: fx.Node, number: fx.Node, dtype: torch.dtype, of: str = "mean"
    ) -> fx.Node:
        """``total / count(number)``: of the elements of a mean, or of what the batch says."""
        if of == "mean":
            marker = self.count(number, total)
        else:
            marker = self.call(ops.count, self.method("to", number, torch.float32), of)
        quotient = self.call(operator.truediv, total, marker)
        return _like(self.like, self.method("to", quotient, dtype))


def _like(node: fx.Node, made: fx.Node, is_new: bool = False) -> fx.Node:
    made.meta = {key: value for key, value in node.meta.items() if key != "example_value"}
    if not is_new and "example_value" in node.meta:
        made.meta["example_value"] = node.meta["example_value"]
    return made


def _at(node: fx.Node) -> str:
    line = source_line(node)
    return f"\n  at {line}" if line else ""
