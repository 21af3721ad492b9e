"""Run updates of one optimizer that follow one another as one."""

from __future__ import annotations

import operator

from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliases import aliased_inputs
from zerofx.passes.base import Counts, PassContext
from zerofx.passes.fuse.together import is_update_alone, run_together


def merge_updates(gm: fx.GraphModule, ctx: PassContext) -> Counts:
    """Replace updates of one optimizer that follow one another by one call.

    Before::

        s = update(p, g, 1, 0);  h = grads[8:16];  t = update(q, h, 1, 1);  use(s, t)

    After::

        h = grads[8:16];  updates = update_together([p, q], [g, h], 1, [0, 1])
        s, t = updates[0], updates[1];  use(s, t)

    Between them may stand what reads nothing that they write: views of gradients, and copies of
    shards yet to be updated.  An update that stands alone is one together with none: what runs it
    is the same.
    """
    pending: list[fx.Node] = []
    made: set[fx.Node] = set()  # by the updates that are pending
    counts = {"updates": 0, "calls": 0}

    def flush() -> None:
        if pending:
            counts["updates"] += len(pending)
            counts["calls"] += 1
            run_together(gm.graph, pending, "merge_updates")
        pending.clear()
        made.clear()

    for node in list(gm.graph.nodes):
        if is_update_alone(node):
            reads_new = not made.isdisjoint(node.all_input_nodes)
            if pending and (reads_new or _shared(node) != _shared(pending[0])):
                flush()
            pending.append(node)
            made.update({node}, (user for user in node.users if _is_part(user)))
        elif pending and node not in made and not _may_stand_between(node, made):
            flush()
    return counts


def _shared(update: fx.Node) -> tuple:
    """The key of updates that may merge: optimizer, overflow flag, work on the gradient, norm."""
    return (update.args[2], update.args[4:], tuple(update.kwargs.items()))


def _is_part(node: fx.Node) -> bool:
    return node.target is operator.getitem and node.args[0].target is ops.update_together


def _may_stand_between(node: fx.Node, made: set[fx.Node]) -> bool:
    if not made.isdisjoint(node.all_input_nodes):
        return False
    return node.target in (ops.take_shard, operator.getitem) or (
        node.op == "call_function" and not ops.is_ours(node.target) and bool(aliased_inputs(node))
    )
