"""Round a bfloat16 or float16 parameter where an update reads what it has written to it.

Kernels compute in float32 and round what they store.  An update that looks at its own rounding, to
make up for it at the next step (Kahan summation), has to find it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, fx

from zerofx.codegen.numbers import roots_of
from zerofx.codegen.rewrite.rounding import round_to
from zerofx.codegen.trace.functions import add_call
from zerofx.codegen.trace.trace import Update
from zerofx.ir.aliases import mutated_inputs

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
    written = [
        node for node in nodes if any(root[item] is nodes[0] for item in mutated_inputs(node))
    ]
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
            env[node] = _round(graph, env[node], parameter.dtype)
        elif node is last and rounded is None:
            made = _round(graph, env[nodes[0]], parameter.dtype)
            add_call(graph, made, aten.copy_.default, env[nodes[0]], made)
    return replace(update, graph_module=fx.GraphModule(update.graph_module, graph))


def _is_another(source: fx.Node, dtype: torch.dtype, copy: fx.Node) -> bool:
    """Return whether the copied value is a result of the parameter's dtype with another reader."""
    value = source.meta.get("val")
    is_result = source.op == "call_function" and isinstance(value, Tensor) and value.dtype == dtype
    return is_result and any(user is not copy for user in source.users)


def _round(graph: fx.Graph, value: fx.Node, dtype: torch.dtype) -> fx.Node:
    wide = add_call(graph, value, aten._to_copy.default, value, dtype=torch.float32)
    rounded = add_call(graph, value, round_to, wide, dtype)
    return add_call(graph, value, aten._to_copy.default, rounded, dtype=dtype)
