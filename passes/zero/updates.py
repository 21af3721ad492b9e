"""An optimizer's step as updates of single parameters, and what some of them need whole."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.graph import Builder
from zerofx.ir.mesh import balanced
from zerofx.ir.roles import Role
from zerofx.passes.base import PassContext

aten = torch.ops.aten


def update_one_by_one(
    builder: Builder, step: fx.Node, operands_at: Callable[[int], tuple[fx.Node, fx.Node]]
) -> Iterator[tuple[fx.Node | None, int, fx.Node]]:
    """Insert an in-place ``update`` for each parameter of an ``optimizer_step``, in front of it.

    ``operands_at`` gives, or inserts, the value and the gradient at a position.  Yields the node
    that reads the step's result, if one does, the parameter, and its update.
    """
    optimizer, found_inf, indices = step.args[2:5]
    results = {user.args[1]: user for user in step.users if user.target is operator.getitem}
    for position, index in enumerate(indices):
        with builder.before(step, role=Role.UPDATE, parameter=index) as call:
            updated = call(ops.update, *operands_at(position), optimizer, index, found_inf)
        yield results.get(position), index, updated


def updated_in_place(node: fx.Node) -> fx.Node:
    """The value that a chain of updates and copies writes to in place."""
    while node.target in (ops.update, aten.copy_.default):
        node = node.args[0]
    return node


def compute_on_owners(
    builder: Builder,
    ctx: PassContext,
    step: fx.Node,
    operands_at: Callable[[int], tuple[fx.Node, fx.Node]],
) -> dict[int, tuple[fx.Node, fx.Node]]:
    """Return what ``update`` takes, for those parameters that an optimizer may need whole.

    ``operands_at`` inserts the shards of the parameter at a position of an ``optimizer_step``, and
    of its gradient; at stage 0 both whole.  Each update is computed by one rank, to which all send
    their shards.  Without this, and with it::

        s = zerofx.update(p, g, 1, 0);  t = zerofx.update(q, h, 1, 1)

        d = zerofx.on_owners([p, q], [g, h], 1, [0, 1], [0, 1], 6912)
        s = zerofx.update(p, d[0], 1, 0);  t = zerofx.update(q, d[1], 1, 1)

    What is elementwise in an update stays on shards, and so do states: one tensor goes to the
    owner and one comes back.  Of an ``own_step`` nothing does: both go there, and the new value
    comes back.  At stage 0 each rank does all of it.
    """
    _, _, optimizer, found_inf, parameters = step.args
    whole = {
        position: ctx.whole_updates[optimizer, parameter]
        for position, parameter in enumerate(parameters)
        if (optimizer, parameter) in ctx.whole_updates
    }
    if not whole:
        return {}
    work = [one.flops for one in whole.values()]
    owners, heaviest = balanced(work, ctx.mesh.num_shards)
    own_step = {"own_step": True} if any(one.own_step for one in whole.values()) else {}
    if own_step:
        owners = [one.owner for one in whole.values()]
        loads: Counter[int] = Counter()
        for owner, flops in zip(owners, work, strict=True):
            loads[owner] += flops
        heaviest = max(loads.values())
    reason = f"{len(whole)} tensors, by each rank"
    if ctx.options.stage > 0:
        share = heaviest / max(sum(work), 1)
        reason = (
            f"{len(whole)} tensors, owned by {len(set(owners))} of {ctx.mesh.num_shards} ranks; "
            f"one has {share:.0%} of the arithmetic"
        )
    reason += "".join({f": {one.own_step}": None for one in whole.values() if one.own_step})
    with builder.before(step) as call:
        values, gradients = map(list, zip(*map(operands_at, whole), strict=True))
        owned = [parameters[position] for position in whole]
        given = (values, gradients, optimizer, owned, owners, heaviest, found_inf)
        directions = call(ops.on_owners, *given, **own_step, role=Role.ON_OWNERS, reason=reason)
        found = {}
        for number, (position, index) in enumerate(zip(whole, owned, strict=True)):
            origin = {"role": Role.DIRECTION, "parameter": index}
            found[position] = values[number], call(operator.getitem, directions, number, **origin)
        return found
