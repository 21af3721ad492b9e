"""Round a bfloat16 or float16 parameter where an update reads what it has written to it.

Kernels compute in float32 and round what they store.  An update that looks at its own rounding, to
make up for it at the next step (Kahan summation), has to find it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, fx

from zerofx.codegen.numbers import is_write, roots_of
from zerofx.codegen.rewrite.rounding import round_to
from zerofx.codegen.trace.functions import example
from zerofx.codegen.trace.trace import Update

aten = torch.ops.aten


def round_what_is_read_again(update: Update) -> Update:
    """Return the update with its parameter rounded between the last write and reads after it.

    Before::

        add_ = add_(p, correction);  left = sub(before, p)

    After::

        add_ = add_(p, correction);  rounded = round_to(cast(p, float32), bfloat16)
        copy_ = copy_(p, rounded);  left = sub(before, p)

    What is written by ``copy_(p, value)`` is rounded where it is made, if somebody else reads it.
    """
    nodes = list(update.graph_module.graph.nodes)
    parameter = nodes[0].meta.get("val")
    if not isinstance(parameter, Tensor) or parameter.dtype not in (torch.bfloat16, torch.float16):
        return update
    root = roots_of(update.graph_module.graph)
    written = [node for node in nodes if is_write(node) and root[node] is nodes[0]]
    if not written:
        return update
    last = written[-1]
    place = {node: number for number, node in enumerate(nodes)}
    after = [node for node in nodes[place[last] + 1 :] if node.op == "call_function"]
    if last.target is aten.copy_.default and _is_another(last.args[1], parameter.dtype, last):
        rounded = last.args[1]
    elif any(root[operand] is nodes[0] for node in after for operand in node.all_input_nodes):
        rounded = None
    else:
        return update
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
        if node is rounded:
            env[node] = _round(graph, env[node], parameter)
        elif node is last and rounded is None:
            made = _round(graph, env[nodes[0]], parameter)
            copied = graph.call_function(aten.copy_.default, (env[nodes[0]], made))
            copied.meta = dict(made.meta)
    return replace(update, graph_module=fx.GraphModule(update.graph_module, graph))


def _is_another(source: fx.Node, dtype: torch.dtype, copy: fx.Node) -> bool:
    """Return whether the copied value is a result of the parameter's dtype with another reader."""
    value = source.meta.get("val")
    is_result = source.op == "call_function" and isinstance(value, Tensor) and value.dtype == dtype
    return is_result and any(user is not copy for user in source.users)


def _round(graph: fx.Graph, value: fx.Node, like: Tensor) -> fx.Node:
    trace = value.meta.get("stack_trace")
    for target, args, kwargs, result in (
        (aten._to_copy.default, (), {"dtype": torch.float32}, torch.float32),
        (round_to, (like.dtype,), {}, torch.float32),
        (aten._to_copy.default, (), {"dtype": like.dtype}, like.dtype),
    ):
        value = graph.call_function(target, (value, *args), kwargs)
        value.meta = {"val": example(like.dim(), result), "stack_trace": trace}
    return value
