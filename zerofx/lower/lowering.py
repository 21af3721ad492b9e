"""From the last pass's program to something that runs: operators bound to one step's runtime."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

import torch
from torch import fx, nn

from zerofx.ir import ops
from zerofx.ir.interface import gradient_work
from zerofx.ir.rules import LINK
from zerofx.lower.regions import with_compiled_regions

aten = torch.ops.aten


def lower(gm: fx.GraphModule, kernels: Mapping[object, Callable]) -> fx.GraphModule:
    """Return a function of the program's inputs.

    ``kernels`` holds the function that runs each ``zerofx::`` operator, and for waits, as
    ``(wait, lane)``, the one for what is on that lane.  Each region that the passes have formed is
    compiled when it first runs; without regions every operator runs by itself.  Communication keeps
    the program's order.
    """
    root = nn.Module()
    graph = with_compiled_regions(gm, root)
    for node in reversed(list(graph.nodes)):  # waits first: their starts say which they are
        if node.op == "get_attr" and not hasattr(root, node.target):
            setattr(root, node.target, getattr(gm, node.target))
        work = gradient_work(node)
        if work is not None:  # of which the program says in words what it does
            name = f"work_of_{node.name}"
            setattr(root, name, work)
            with graph.inserting_before(node):
                node.update_kwarg("work", graph.get_attr(name))
        of = (ops.wait, ops.waits_on(node) or LINK) if ops.is_wait(node) else node.target
        if node.op == "call_function" and of in kernels:
            node.target = kernels[of]
        elif node.target is aten.slice.Tensor and len(node.args) == 4 and node.args[1] == 0:
            source, _, *bounds = node.args  # the same view, in half of the dispatcher's time
            node.target, node.args = operator.getitem, (source, slice(*bounds))
    return fx.GraphModule(root, graph, "ZeroProgram")
