"""Python functions in an update's graph, as the operations that they are made of."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from zerofx import compat

aten = torch.ops.aten

Shape = tuple[int, ...]

# What functions are traced with.  Sizes are primes, so that nothing else is as many.
FLAT: Shape = (7919,)
"""Elements one after the other, as a kernel has them."""
IN_BLOCKS: Shape = (7907, 5003)
"""Elements in blocks that have a scale each, where an update has such."""
PER_BLOCK: Shape = (7907,)
"""One number per block."""

_COUNTS = {math.prod(shape) for shape in (FLAT, IN_BLOCKS)}
_SIZES = {*_COUNTS, *IN_BLOCKS}


@dataclass(frozen=True)
class Call:
    """One call of a function: its nodes, what its inputs stand for, and what it returns.

    ``note`` says what the function does.
    """

    name: str
    note: str
    nodes: Sequence[fx.Node]
    operands: dict[fx.Node, fx.Node]
    result: fx.Node


def trace_call(node: fx.Node, shape_of: Callable[[fx.Node], Shape]) -> Call | None:
    """Trace the function that a node calls, on tensors without memory.

    Its operands' ``meta["val"]`` say their dtypes, and ``shape_of`` says what they hold: one of
    the shapes above, or () for a number.  None if the result is not one tensor of such a shape
    too, or depends on how many elements there are.
    """
    operands = node.all_input_nodes
    if not callable(node.target) or not all(_is_tensor(operand) for operand in operands):
        return None
    function = node.target
    examples = [
        torch.empty(shape_of(operand), dtype=operand.meta["val"].dtype, device="meta")
        for operand in operands
    ]

    def call(*tensors: Tensor) -> Any:
        of = dict(zip(operands, tensors, strict=True))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), of.__getitem__)
        return function(*args, **kwargs)

    traced = compat.trace_operations(call, examples)
    *nodes, output = traced.graph.nodes
    result = output.args[0]
    shapes = (FLAT, IN_BLOCKS, PER_BLOCK)
    if not isinstance(result, fx.Node) or result.meta["val"].shape not in shapes:
        return None
    if any(_SIZES.intersection(_constants(inner)) and not _is_count(inner) for inner in nodes):
        return None
    inputs = [inner for inner in nodes if inner.op == "placeholder"]
    name = getattr(function, "__name__", str(function))
    note = note_of(function)
    rest = [inner for inner in nodes if inner.op != "placeholder"]
    return Call(name, note, rest, dict(zip(inputs, operands, strict=True)), result)


def note_of(function: Callable) -> str:
    """A function's name and what it says that it does."""
    name = getattr(function, "__name__", str(function))
    summary, *_ = (inspect.getdoc(function) or "").split("\n")
    return f"{name}: {summary}" if summary else name


def example(num_dims: int, dtype: torch.dtype) -> Tensor:
    """A tensor without memory that stands for elements, or with no dimensions for a number."""
    return torch.empty((2,) * num_dims, dtype=dtype, device="meta")


def add_call(
    graph: fx.Graph, like: fx.Node | None, target: Callable, *args: Any, **kwargs: Any
) -> fx.Node:
    """Add a call to a graph whose nodes all have examples, and give it one.

    The rest of what it says of itself is what ``like`` says.
    """
    node = graph.call_function(target, args, kwargs)
    examples = fx.node.map_arg((args, kwargs), lambda operand: operand.meta["val"])
    meta = like.meta if like is not None else {}
    node.meta = {**meta, "val": target(*examples[0], **examples[1])}
    return node


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _constants(node: fx.Node) -> list[Any]:
    """Return the constants among a node's arguments, except the size of a view."""
    if node.target in (aten.view.default, aten._unsafe_view.default, aten.expand.default):
        return []
    constants = (*node.args, *node.kwargs.values())
    return [item for item in constants if isinstance(item, (int, float))]


def _is_count(node: fx.Node) -> bool:
    """Return whether a node counts the elements: ``arange(n)``."""
    return node.target is aten.arange.default and node.args[0] in _COUNTS
