"""Captures on a CPU for a device that this machine lacks.  torch 2.11 to 2.15.

Tensors without elements may be on any device, but a torch built without CUDA ends the process when
autograd meets one there.  So a step is traced on the CPU, and what it made is moved afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._dynamo import trace_rules
from torch._dynamo.variables import builder
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves


@contextlib.contextmanager
def answering(answers: Mapping[Any, Mapping[str, Callable]]) -> Iterator[None]:
    """Put functions in the place of those of torch's modules, where there are such.

    Dynamo has a table of torch's functions, which it makes of those that it finds: it is to make
    another one afterwards.
    """
    trace_rules.clear_lru_cache()
    try:
        with contextlib.ExitStack() as patches:
            for module, of in answers.items():
                for name, answer in of.items():
                    if hasattr(module, name):
                        patches.enter_context(mock.patch.object(module, name, answer))
            yield
    finally:
        trace_rules.clear_lru_cache()


@contextlib.contextmanager
def tracing_on_cpu(arguments_here: Callable[[Any, Any, Any], tuple[Any, Any]]) -> Iterator[None]:
    """Have Dynamo trace calls with arguments in place of those in the code.

    ``arguments_here`` gives them, of a function or a method's name, and of those in the code.
    """
    original = builder.get_fake_value

    def get_fake_value(node, *args, **kwargs):
        if node.op == "call_method" and node.target == "cuda":
            node.target, node.args, node.kwargs = "to", (node.args[0], "cpu"), {}
        node.args, node.kwargs = arguments_here(node.target, node.args, dict(node.kwargs))
        return original(node, *args, **kwargs)

    with mock.patch.object(builder, "get_fake_value", get_fake_value):
        yield


def move(gm: fx.GraphModule, device: torch.device) -> None:
    """Have a traced program's values, and what its operators make, be on another device."""
    for module in gm.modules():
        graph = getattr(module, "graph", None)
        for node in graph.nodes if isinstance(graph, fx.Graph) else ():
            for value in tree_leaves([node.meta.get("val"), node.meta.get("example_value")]):
                if isinstance(value, FakeTensor):
                    value.fake_device = device
            moved = lambda v: device if isinstance(v, torch.device) else v  # noqa: E731
            given = node.args, dict(node.kwargs)
            node.args, node.kwargs = fx.node.map_aggregate(given, moved)
