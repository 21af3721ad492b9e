"""Update parameters as soon as their gradients are there, while backward goes on."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliases import aliased_inputs, mutated_inputs
from zerofx.ir.graph import is_owned, is_random
from zerofx.ir.interface import input_role, placeholders
from zerofx.ir.roles import Role, role
from zerofx.passes.base import Counts, PassContext
from zerofx.passes.schedule.placement import hoist


def update_in_backward(gm: fx.GraphModule, ctx: PassContext) -> Counts:
    """Move each update up to where its gradient and all readers of the old value allow.

    Before::

        g = zerofx.wait(...);  relu_backward = ...;  h = zerofx.wait(...)
        zerofx.update(p, g, 1, 0);  zerofx.update(q, h, 1, 1)

    After::

        g = zerofx.wait(...);  zerofx.update(p, g, 1, 0);  relu_backward = ...
        h = zerofx.wait(...);  zerofx.update(q, h, 1, 1)

    The gradient is gone after it, so gradients never all exist at once.  Where something global
    stands between, such as clipping by the norm of all gradients, updates stay behind it.
    Source: LOMO, Lv et al. 2023.
    """
    moved = 0
    hoisted: set[fx.Node] = set()  # all updates read one norm, of all gradients
    wholes = {input_role(node).parameter: node for node in placeholders(gm.graph, "parameter")}
    for update in [node for node in gm.graph.nodes if node.target is ops.update]:
        if is_owned(update):
            continue  # it follows what all ranks compute together
        operands = [operand for operand in update.all_input_nodes if operand.op != "placeholder"]
        cuts = [update.args[0]] if update.args[0].target is ops.take_shard else []
        for operand in filter(_comes_along, operands):
            hoist(operand, _comes_along, hoisted)
        before = {operand for operand in operands if operand not in cuts}
        before |= {value for cut in cuts for value in cut.all_input_nodes}  # what a step decays
        before = {node for node in before if node.op != "placeholder"}
        values, info = [update.args[0], *cuts], ctx.table[update.args[3]]
        if cuts:  # whose memory it may turn out to be: passes/fuse/write_back.py
            values += cuts[0].all_input_nodes
        if ctx.options.stage == 3 and info.shares_bucket:  # what is gathered is all of the bucket
            mates = [mate.index for mate in ctx.table.bucket(info.place.bucket)]
            values += [wholes[mate] for mate in mates if mate in wholes]
        # Now that these have moved:
        anchor = max(before | _readers(values, {update, *cuts}), default=None)
        if anchor is None or not anchor < update:
            continue
        if anchor.next not in (update, *cuts):
            moved += 1
        for node in (*cuts, update):
            anchor.append(node)
            anchor = node
    return {"moved": moved}


def _comes_along(node: fx.Node) -> bool:
    """Return whether an operand can be computed earlier.

    Communication, writes and random draws stay where they are, and what reads no tensor too.
    """
    if node.op != "call_function" or not node.all_input_nodes or node.target is ops.on_owners:
        return False
    stays = ops.starts(node) or ops.is_wait(node) or ops.acts(node)
    return not (stays or mutated_inputs(node) or is_random(node))


def _readers(values: Iterable[fx.Node], besides: Collection[fx.Node]) -> set[fx.Node]:
    """The nodes that read these values before the update, whole or as a shard.

    In a world of one, what has been gathered is the shard's own memory.
    """
    readers: set[fx.Node] = set()
    pending = list(values)
    while pending:
        node = pending.pop()
        for user in node.users:
            if user in besides or user in readers or user.op == "output":
                continue
            if mutated_inputs(user) or _is_updated(user):
                continue  # a write, which follows the update, or what another one updates
            readers.add(user)
            if _holds(user, node):
                pending.append(user)
    return readers


def _is_updated(cut: fx.Node) -> bool:
    """Return whether a range of a parameter is taken for its update alone."""
    return cut.target is ops.take_shard and all(one.target is ops.update for one in cut.users)


def _holds(user: fx.Node, node: fx.Node) -> bool:
    """Return whether a reader's result is the old value: a view, a cast or a gathered copy."""
    if ops.starts(user) or ops.is_wait(user) or node in aliased_inputs(user):
        return True
    return role(user) in (Role.GATHER_CAST, Role.HOISTED_CAST, Role.PACK)
