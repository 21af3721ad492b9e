"""Honour ``torch.utils.checkpoint``: compute again in backward what forward was told to drop."""

from __future__ import annotations

from torch import fx

from zerofx import compat
from zerofx.graph import Builder, is_backward
from zerofx.passes.base import Counts, PassContext


def recompute(gm: fx.GraphModule, ctx: PassContext) -> Counts:
    """Repeat checkpointed nodes where backward reads them, just before their first reader.

    Before (``gelu`` inside a checkpointed block)::

        gelu = gelu(mm);  y = mm(gelu, w2);  ...;  d_w2 = mm(dy.t(), gelu)

    After::

        gelu = gelu(mm);  y = mm(gelu, w2);  ...
        gelu_1 = gelu(mm_1);  d_w2 = mm(dy.t(), gelu_1)

    In one flat graph the values saved for backward are plain edges, so without this pass a
    checkpoint saves nothing.  Each call of backward recomputes anew.  Random draws are never
    repeated: their results are kept, as the second draw would differ.
    """
    builder = Builder(gm, "recompute")
    dropped = compat.checkpointed_nodes(gm)
    repeated: dict[fx.Node, fx.Node] = {}
    in_backward = False
    count = 0

    def repeat(node: fx.Node, before: fx.Node) -> fx.Node:
        nonlocal count
        pending = [node]
        while pending:
            current = pending[-1]
            if current in repeated:
                pending.pop()
                continue
            missing = [
                source
                for source in current.all_input_nodes
                if source in dropped and source not in repeated
            ]
            if missing:
                pending.extend(missing)
                continue
            with gm.graph.inserting_before(before):
                duplicate = builder.copy(
                    current,
                    lambda source: repeated.get(source, source),
                    role="recompute",
                    parameter=-1,
                )
            duplicate.meta["autograd_backward"] = True
            repeated[current] = duplicate
            count += 1
            pending.pop()
        return repeated[node]

    for node in list(gm.graph.nodes):
        if node.op in ("placeholder", "output"):
            continue
        if is_backward(node) and not in_backward:
            repeated = {}
        in_backward = is_backward(node)
        if in_backward:
            for source in list(node.all_input_nodes):
                if source in dropped:
                    node.replace_input_with(source, repeat(source, node))
    return {"checkpointed": len(dropped), "recomputed": count}
