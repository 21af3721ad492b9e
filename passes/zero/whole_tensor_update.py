"""Updates that need whole tensors: each is computed by one rank, to which all send their shards."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

from torch import fx

from zerofx.ir import ops
from zerofx.ir.graph import Builder
from zerofx.ir.roles import Role
from zerofx.passes.base import PassContext


def compute_on_owners(
    builder: Builder,
    ctx: PassContext,
    step: fx.Node,
    shards_at: Callable[[int], tuple[fx.Node, fx.Node]],
) -> dict[int, tuple[fx.Node, fx.Node]]:
    """Return what ``update`` takes, for those parameters that an optimizer may need whole.

    ``shards_at`` inserts the shards of the parameter at a position of an ``optimizer_step``, and of
    its gradient.  Without this, and with it::

        s = zerofx.update(p, g, 1, 0);  t = zerofx.update(q, h, 1, 1)

        d = zerofx.on_owners([p, q], [g, h], 1, [0, 1], [0, 1], 6912)
        s = zerofx.update(p, d[0], 1, 0);  t = zerofx.update(q, d[1], 1, 1)

    What is elementwise in an update stays on shards, and so do states: one tensor goes to the
    owner and one comes back.  Inserts at the graph's insertion point.
    """
    _, _, optimizer, found_inf, parameters = step.args
    work = {
        position: ctx.whole_updates[optimizer, parameter]
        for position, parameter in enumerate(parameters)
        if (optimizer, parameter) in ctx.whole_updates
    }
    if not work:
        return {}
    owners, heaviest = balanced(list(work.values()), ctx.world_size)
    share = heaviest / max(sum(work.values()), 1)
    values, gradients = zip(*map(shards_at, work), strict=True)
    directions = builder.call(
        ops.on_owners,
        list(values),
        list(gradients),
        optimizer,
        [parameters[position] for position in work],
        owners,
        heaviest,
        found_inf,
        role=Role.ON_OWNERS,
        like=step,
        reason=f"{len(work)} tensors, owned by {len(set(owners))} of {ctx.world_size} ranks; one "
        f"has {share:.0%} of the arithmetic",
    )
    return {
        position: (
            values[number],
            builder.call(
                operator.getitem,
                directions,
                number,
                role=Role.DIRECTION,
                parameter=parameters[position],
                like=step,
            ),
        )
        for number, position in enumerate(work)
    }


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
