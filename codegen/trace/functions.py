"""Python functions in an update's graph, as the operations that they are made of."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from zerofx import compat


def trace_call(node: fx.Node) -> fx.Graph:
    """Trace the function that a node calls, on tensors without memory, as its operands' examples.

    It returns one tensor, and does the same for any number of elements.
    """

    def call(*tensors: Tensor) -> Any:
        of = dict(zip(node.all_input_nodes, tensors, strict=True))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), of.__getitem__)
        return node.target(*args, **kwargs)

    examples = [operand.meta["val"] for operand in node.all_input_nodes]
    return compat.scalars.trace_operations(call, examples).graph


def note_of(function: Callable) -> str:
    """A function's name and what it says that it does."""
    name = getattr(function, "__name__", str(function))
    summary, *_ = (inspect.getdoc(function) or "").split("\n")
    return f"{name}: {summary}" if summary else name


def example(num_dims: int, dtype: torch.dtype) -> Tensor:
    """A tensor without memory that stands for elements, or with no dimensions for a number."""
    return torch.empty((2,) * num_dims, dtype=dtype, device="meta")


def add_call(graph: fx.Graph, target: Callable, *args: Any, **kwargs: Any) -> fx.Node:
    """Add a call to a graph whose nodes all have examples, and give it one."""
    node = graph.call_function(target, args, kwargs)
    args, kwargs = fx.node.map_arg((args, kwargs), lambda operand: operand.meta["val"])
    node.meta["val"] = target(*args, **kwargs)
    return node
