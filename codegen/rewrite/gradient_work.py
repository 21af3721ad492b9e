"""Fold a step's arithmetic on a gradient into the update's own kernel.

Clipping by a norm multiplies every gradient by one number, unscaling by another; both are element
by element, as the update is.  Here such work is a small graph of its own, which a kernel does in
front of the update: the gradient is then read once, and never written.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, fx

from zerofx.codegen.operations import operator_names, rule_of
from zerofx.codegen.rewrite.rounding import LOW
from zerofx.codegen.trace.functions import example

# Elements: what fits into a cache, and what float32 sums without losing what is added last.
_SUMMED_AT_ONCE = 1 << 16

# These take a number in the precision that they compute in, whatever the elements' dtype is.
_ARITHMETIC = {"mul", "div", "add", "sub"}
# These round it to the elements' dtype first.
_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}
_OTHERS = {
    *("neg", "abs", "sign", "clamp", "clamp_min", "clamp_max", "maximum", "minimum"),
    *("isnan", "isinf", "isfinite", "logical_not", "logical_and", "logical_or"),
    *("where", "masked_fill", "_to_copy", "clone"),
}


# What an operation says about its result's memory, which it has none of in a kernel.
_OF_MEMORY = ("layout", "device", "pin_memory", "non_blocking", "memory_format")


def may_be_work(node: fx.Node) -> bool:
    """Return whether an operation on a gradient, 0-dim tensors and constants may be such work.

    Every operand that is not 0-dim has the result's shape and device, and every tensor is known
    by its ``meta["val"]``.
    """
    target, value = node.target, node.meta.get("val")
    if not isinstance(target, torch._ops.OpOverload) or not isinstance(value, Tensor):
        return False
    name, _ = operator_names(target)
    if name not in _ARITHMETIC | _COMPARISONS | _OTHERS or rule_of(target) is None:
        return False
    if node.kwargs.get("rounding_mode") is not None or not value.dim():
        return False
    operands = [operand.meta.get("val") for operand in node.all_input_nodes]
    if not all(isinstance(operand, Tensor) for operand in operands):
        return False
    if any(operand.device != value.device for operand in operands):
        return False
    elements = [operand for operand in operands if operand.dim()]
    if not elements or any(tuple(item.shape) != tuple(value.shape) for item in elements):
        return False
    if not any(item.dtype in LOW for item in (value, *elements)) or name in _ARITHMETIC:
        return True
    same = all(item.dtype in (elements[0].dtype, torch.bool) for item in operands)
    return same and name not in _COMPARISONS


@dataclass(frozen=True, eq=False)
class GradientWork:
    """Elementwise work on a gradient: call it with the gradient and its 0-dim coefficients.

    ``graph_module`` has these as inputs, in that order, and returns the new gradient, which is in
    ``dtype``.  Each node says in ``meta["val"]`` which dtype it has.
    """

    graph_module: fx.GraphModule
    dtype: torch.dtype

    @classmethod
    def of(cls, nodes: list[fx.Node], gradient: fx.Node) -> tuple[GradientWork, list[fx.Node]]:
        """The work that a program's nodes do, and the program's coefficients for it.

        ``nodes`` are in the program's order, and ``may_be_work``; the last one gives the result.
        """
        graph = fx.Graph()
        copies = {gradient: graph.placeholder("gradient")}
        inputs = (operand for node in nodes for operand in node.all_input_nodes)
        inside = {gradient, *nodes}
        coefficients = list(dict.fromkeys(item for item in inputs if item not in inside))
        for place, node in enumerate(coefficients):
            copies[node] = graph.placeholder(f"coefficient_{place}" if place else "coefficient")
        for node in (gradient, *coefficients):
            copies[node].meta["val"] = _example_of(node)
        for node in nodes:
            kept = {name: node.kwargs[name] for name in node.kwargs if name not in _OF_MEMORY}
            args, kwargs = fx.node.map_arg((node.args, kept), copies.__getitem__)
            copies[node] = graph.call_function(node.target, args, kwargs)
            trace = node.meta.get("stack_trace")
            copies[node].meta = {"val": _example_of(node), "stack_trace": trace}
        graph.output(copies[nodes[-1]])
        return cls(fx.GraphModule({}, graph), nodes[-1].meta["val"].dtype), coefficients

    def __reduce__(self) -> tuple:
        """Return what pickles it: a graph module's own way leaves its nodes' metadata out."""
        kinds = [
            (node.meta["val"].dim(), node.meta["val"].dtype, node.meta.get("stack_trace"))
            for node in (*self.inputs, *self.operations)
        ]
        return _unpickled, (self.graph_module, self.dtype, kinds)

    def __call__(self, gradient: Tensor, *coefficients: Tensor) -> Tensor:
        """Run it operator by operator.  Shapes: any, in kernels flat [n]; each 0-dim."""
        return self.graph_module(gradient, *coefficients)

    @cached_property
    def text(self) -> str:
        """The work as Python statements, for a reader: from its inputs' names to the result."""
        code = self.graph_module.code.partition(":\n")[2].replace("torch.ops.aten.", "aten.")
        lines = (line.partition(";  ")[0].strip() for line in code.splitlines())
        return "; ".join(filter(None, lines))

    @cached_property
    def computation(self) -> tuple:
        """All that it does: equal work is the same."""
        return (
            self.graph_module.code,
            *(node.meta["val"].dtype for node in self.graph_module.graph.nodes if node.meta),
        )

    @property
    def inputs(self) -> list[fx.Node]:
        """The gradient and the coefficients."""
        return self.graph_module.graph.find_nodes(op="placeholder")

    @property
    def operations(self) -> list[fx.Node]:
        return [node for node in self.graph_module.graph.nodes if node.op == "call_function"]


def _unpickled(graph_module: fx.GraphModule, dtype: torch.dtype, kinds: list) -> GradientWork:
    work = GradientWork(graph_module, dtype)
    for node, (dim, of, trace) in zip((*work.inputs, *work.operations), kinds, strict=True):
        node.meta = {"val": example(dim, of), "stack_trace": trace}
    return work


def _example_of(node: fx.Node) -> Tensor:
    value = node.meta["val"]
    return example(min(value.dim(), 1), value.dtype)


# The gradient's part of a norm.  A kernel has every element at hand, and sums their squares.


def sum_of_squares(gradient: Tensor) -> Tensor:
    """The gradient's squares, summed in float32."""
    wide = gradient.to(torch.float32)
    return (wide * wide).sum()


def squares_of(gradient: Tensor) -> Tensor:
    """``sum_of_squares`` without a kernel, and without memory of the gradient's size."""
    parts = gradient.split(_SUMMED_AT_ONCE)  # one without elements, if it has none
    norms = [torch.linalg.vector_norm(part, dtype=torch.float32) for part in parts]
    return norms[0].square() if len(norms) == 1 else torch.stack(norms).square().sum()
