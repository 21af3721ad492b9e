"""From the passes' program to something that runs: operators bound to one step's runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import fx

from zerofx import compat, ops


def lower(gm: fx.GraphModule, kernels: Mapping[object, Callable], lowering: str) -> Callable:
    """Return a function of the program's inputs.

    ``kernels`` holds the function that runs each ``zerofx::`` operator.  ``eager`` runs every
    operator by itself; ``inductor`` compiles what stands between zerofx operators.
    Communication keeps the program's order in both.
    """
    if lowering == "inductor":
        gm = _compile_regions(gm)
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}), None)
    for node in graph.nodes:
        if node.op == "call_function" and node.target in kernels:
            node.target = kernels[node.target]
    return fx.GraphModule(gm, graph, "ZeroProgram")


def _compile_regions(gm: fx.GraphModule) -> fx.GraphModule:
    """Split at zerofx operators and writes to inputs; compile each part with Inductor."""
    region = 0
    regions: dict[fx.Node, int] = {}
    in_region = False
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        outside = ops.is_ours(node.target) or node.target is torch.ops.aten.copy_.default
        if outside == in_region or (outside and not in_region):
            region += 1
        in_region = not outside
        regions[node] = region
    split = fx.passes.split_module.split_module(
        gm, gm, lambda node: regions[node], keep_original_order=True
    )
    return compat.compile_parts(split, is_outside=lambda node: ops.is_ours(node.target))
