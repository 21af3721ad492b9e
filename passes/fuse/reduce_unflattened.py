"""Reduce buckets of gradients from where these lie, instead of from one buffer."""

from __future__ import annotations

from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliases import memory_of, writers
from zerofx.passes.base import Counts, PassContext


def reduce_unflattened(gm: fx.GraphModule, ctx: PassContext) -> Counts:
    """Leave the copy into a bucket's buffer to the reduction, if it alone reads the buffer.

    Before::

        flat = flatten_bucket([g, h], [0, 1], 16);  r = reduce_scatter_start(flat, "mean", 2)

    After::

        r = reduce_bucket_start([g, h], [0, 1], 16, "mean", 2)

    A transport that reads gradients where they are needs no copy.  Under a ``memory_budget`` the
    buffer counts, and the gradients as gone once they are in it: the pass is off then.  A copy
    stays if what it reads is freed or written to before the reduction starts.
    """
    reduced = 0
    for start in gm.graph.nodes:
        if start.target is not ops.reduce_scatter_start:
            continue
        flat, *others = start.args
        if flat.target is not ops.flatten_bucket or list(flat.users) != [start]:
            continue
        changes = {change for piece in flat.args[0] for change in _changes(piece)}
        if not any(flat < change < start for change in changes):
            start.target, start.args = ops.reduce_bucket_start, (*flat.args, *others)
            gm.graph.erase_node(flat)
            reduced += 1
    return {"buckets": reduced}


def _changes(value: fx.Node) -> set[fx.Node]:
    """Return the nodes that free or write to a value's memory."""
    frees = {u for node in memory_of(value) for u in node.users if u.target is ops.free}
    return frees | writers(value).union(*map(writers, memory_of(value)))
