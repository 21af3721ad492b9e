"""Choose the offload targets that the device has room for: they stay on it."""

from __future__ import annotations

import math
from collections import Counter

from torch import fx

from zerofx.ir import ops
from zerofx.ir.graph import program_order
from zerofx.ir.parameters import Resident
from zerofx.ir.roles import Role, bucket_of, parameter_of, role
from zerofx.passes.base import PassContext


def stay_on_device(graph: fx.Graph, ctx: PassContext, room: int) -> Resident:
    """Choose the optimizer states that stay on the device, of at most ``room`` bytes.

    A bucket's stay together.  Those stay first whose gradients come last: the others' updates hide
    behind the rest of backward, theirs would be waited for.  States of which nobody knows how many
    bytes they will take never stay, nor do an optimizer's that updates a parameter twice in the
    program: its updates on the device would overtake those on the host.

    Counted as on the rank whose shard is largest, so that ranks choose alike.
    """
    updated = Counter(node.args[2:4] for node in graph.nodes if node.target is ops.update)
    steps_again = {optimizer for (optimizer, _), times in updated.items() if times > 1}
    pieces: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for optimizer, index in updated:
        pieces.setdefault((optimizer, ctx.table[index].place.bucket), []).append((optimizer, index))
    last_reduced = _last_reduced(graph, ctx)
    states: set[tuple[int, int]] = set()
    total = 0
    for piece in sorted(pieces, key=lambda piece: (-last_reduced.get(piece[1], 0), piece)):
        members = pieces[piece]
        if piece[0] in steps_again or any(member not in ctx.state_bytes for member in members):
            continue
        nbytes = sum(
            math.ceil(ctx.state_bytes[member] * ctx.table[member[1]].largest_shard_numel)
            for member in members
        )
        if total + nbytes <= room:
            states.update(members)
            total += nbytes
    return Resident(frozenset(states), total)


def _last_reduced(graph: fx.Graph, ctx: PassContext) -> dict[int, int]:
    """Return the place in the program where each bucket's last gradient is reduced."""
    places: dict[int, int] = {}
    for node, place in program_order(graph).items():
        if ops.is_collective(node) and role(node) == Role.REDUCE_GRADIENT:
            bucket = bucket_of(node)
            if bucket < 0:
                bucket = ctx.table[parameter_of(node)].place.bucket
            places[bucket] = place
    return places
