"""Start each gather while the one before it is being used."""

from __future__ import annotations

import itertools

from torch import fx

from zerofx import ops
from zerofx.graph import role
from zerofx.passes.base import Counts, PassContext


def prefetch(gm: fx.GraphModule, ctx: PassContext) -> Counts:
    """Move the start of each all-gather to just after the previous one's wait.

    Before::

        a = zerofx.wait(zerofx.all_gather_start(p, 2));  y = mm(x, a)
        b = zerofx.wait(zerofx.all_gather_start(q, 2));  z = mm(y, b)

    After::

        a = zerofx.wait(zerofx.all_gather_start(p, 2));  start = zerofx.all_gather_start(q, 2)
        y = mm(x, a)
        b = zerofx.wait(start);  z = mm(y, b)

    At most one gather is in flight ahead of the parameter in use.
    """
    moved = 0
    waits = [
        node
        for node in gm.graph.nodes
        if node.target is ops.wait and node.args[0].target is ops.all_gather_start
    ]
    for previous, wait in itertools.pairwise(waits):
        chain = [wait.args[0]]
        while role(chain[-1].all_input_nodes[0]) in ("gather_cast", "pack"):
            chain.append(chain[-1].all_input_nodes[0])
        anchor = max(previous, *chain[-1].all_input_nodes)
        if not anchor < chain[-1]:
            continue
        for node in chain:
            anchor.append(node)
        moved += 1
    return {"prefetched": moved}
