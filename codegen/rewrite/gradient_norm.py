"""The gradient's part of a norm, taken by the update's own kernel.

A step that looks at the norm of its gradients, and does not let it decide the update, would read
each of them twice.  The kernel has every element of the gradient at hand: it sums their squares.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, fx

from zerofx.codegen.trace.trace import Update

# Elements: what fits into a cache, and what float32 sums without losing what is added last.
_SUMMED_AT_ONCE = 1 << 16


def sum_of_squares(gradient: Tensor) -> Tensor:
    """The gradient's squares, summed in float32."""
    wide = gradient.to(torch.float32)
    return (wide * wide).sum()


def with_squares(update: Update) -> Update:
    """Let an update also return the sum of its gradient's squares, behind its other results.

    Before::

        lerp_ = lerp_(exp_avg, grad, a);  ...;  return [exp_avg]

    After::

        squares = sum_of_squares(grad);  lerp_ = lerp_(exp_avg, grad, a);  ...
        return [exp_avg, squares]

    It is of the gradient as the update gets it: with ``GradientWork`` put in front of this, of the
    result of the work.  What is run in parts returns a sum for each of them.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    results = graph.graph_copy(update.graph_module.graph, copies)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    with graph.inserting_after(inputs[-1]):
        squares = graph.call_function(sum_of_squares, (inputs[1],))
    squares.meta["val"] = torch.empty((), dtype=torch.float32, device="meta")
    graph.output([*results, squares])
    graph_module = fx.GraphModule(update.graph_module, graph)
    return replace(update, graph_module=graph_module)


def squares_of(gradient: Tensor) -> Tensor:
    """``sum_of_squares`` without a kernel, and without memory of the gradient's size."""
    parts = gradient.split(_SUMMED_AT_ONCE)  # one without elements, if it has none
    norms = [torch.linalg.vector_norm(part, dtype=torch.float32) for part in parts]
    return norms[0].square() if len(norms) == 1 else torch.stack(norms).square().sum()
