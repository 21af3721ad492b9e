"""Python functions in an update's graph, as the operations that they are made of."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from zerofx import compat

aten = torch.ops.aten

_LENGTH = 7919
"""How many elements a function is traced with: a prime, so that nothing else is as many."""


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


def trace_call(node: fx.Node, is_element: Callable[[fx.Node], bool]) -> Call | None:
    """Trace the function that a node calls, on flat tensors without memory.

    Its operands' ``meta["val"]`` say their dtypes; those that are not elements are 0-dim tensors.
    None if the result is not one tensor of as many elements, or depends on how many there are.
    """
    operands = node.all_input_nodes
    if not callable(node.target) or not all(_is_tensor(operand) for operand in operands):
        return None
    function = node.target
    examples = [
        torch.empty(
            _LENGTH if is_element(operand) else (), dtype=operand.meta["val"].dtype, device="meta"
        )
        for operand in operands
    ]

    def call(*tensors: Tensor) -> Any:
        of = dict(zip(operands, tensors, strict=True))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), of.__getitem__)
        return function(*args, **kwargs)

    traced = compat.trace_operations(call, examples)
    *nodes, output = traced.graph.nodes
    result = output.args[0]
    if not isinstance(result, fx.Node) or result.meta["val"].shape != (_LENGTH,):
        return None
    if any(_LENGTH in _constants(inner) and not _is_count(inner) for inner in nodes):
        return None
    inputs = [inner for inner in nodes if inner.op == "placeholder"]
    name = getattr(function, "__name__", str(function))
    summary, *_ = (inspect.getdoc(function) or "").split("\n")
    note = f"{name}: {summary}" if summary else name
    rest = [inner for inner in nodes if inner.op != "placeholder"]
    return Call(name, note, rest, dict(zip(inputs, operands, strict=True)), result)


def example(num_dims: int, dtype: torch.dtype) -> Tensor:
    """A tensor without memory that stands for elements, or with no dimensions for a number."""
    return torch.empty((2,) * num_dims, dtype=dtype, device="meta")


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _constants(node: fx.Node) -> list[Any]:
    """What is constant among a node's arguments, but for the size of a view."""
    if node.target in (aten.view.default, aten._unsafe_view.default, aten.expand.default):
        return []
    return [item for item in (*node.args, *node.kwargs.values()) if not isinstance(item, fx.Node)]


def _is_count(node: fx.Node) -> bool:
    """Whether a node counts the elements: ``arange(n)``."""
    return node.target is aten.arange.default and node.args == (_LENGTH,)
