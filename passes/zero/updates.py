"""An optimizer's step as updates of single parameters, and what some of them need whole."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.graph import Builder
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
    of its gradient.  Each update is computed by one rank, to which all send their shards.  Without
    this, and with it::

        s = zerofx.update(p, g, 1, 0);  t = zerofx.update(q, h, 1, 1)

        d = zerofx.on_owners([p, q], [g, h], 1, [0, 1], [0, 1], 6912)
        s = zerofx.update(p, d[0], 1, 0);  t = zerofx.update(q, d[1], 1, 1)

    What is elementwise in an update stays on shards, and so do states: one tensor goes to the
    owner and one comes back.
    """
    _, _, optimizer, found_inf, parameters = step.args
    work = {
        position: ctx.whole_updates[optimizer, parameter]
        for position, parameter in enumerate(parameters)
        if (optimizer, parameter) in ctx.whole_updates
    }
    if not work:
        return {}
    owners, heaviest = balanced(list(work.values()), ctx.mesh.num_shards)
    share = heaviest / max(sum(work.values()), 1)
    reason = (
        f"{len(work)} tensors, owned by {len(set(owners))} of {ctx.mesh.num_shards} ranks; one has "
        f"{share:.0%} of the arithmetic"
    )
    with builder.before(step) as call:
        values, gradients = map(list, zip(*map(operands_at, work), strict=True))
        owned = [parameters[position] for position in work]
        given = (values, gradients, optimizer, owned, owners, heaviest, found_inf)
        directions = call(ops.on_owners, *given, role=Role.ON_OWNERS, reason=reason)
        found = {}
        for number, (position, index) in enumerate(zip(work, owned, strict=True)):
            origin = {"role": Role.DIRECTION, "parameter": index}
            found[position] = values[number], call(operator.getitem, directions, number, **origin)
        return found


def balanced(work: Sequence[int], num_ranks: int) -> tuple[list[int], int]:
    """Return a rank for each piece of work, and how much the rank has that has most.

    The heaviest first, each to the rank that has least so far: at most 4/3 of what the best
    choice would leave a rank with.
    Source: Graham 1969, "Bounds on Multiprocessing Timing Anomalies".
    """
    loads = [0] * num_ranks
    owners = [0] * len(work)
    for position in sorted(range(len(work)), key=lambda position: -work[position]):
        rank = min(range(num_ranks), key=loads.__getitem__)
        owners[position] = rank
        loads[rank] += work[position]
    return owners, max(loads)
