"""Choose what stays gathered, and on the device, within ``memory_budget``, on all ranks.

How many bytes are left of the budget depends on the batch, which may have another shape on each
rank, and what is gathered when must not.  So every rank finds what it could keep, and what all
of them could is kept: ``KeptGathered`` is what they compare.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import fx

from zerofx.cost.program import live_bytes
from zerofx.errors import BudgetError
from zerofx.ir import ops
from zerofx.ir.graph import program_order
from zerofx.ir.interface import set_kept_gathered, set_resident
from zerofx.ir.parameters import KeptGathered, Resident
from zerofx.ir.roles import Role, bucket_of, parameter_of, role
from zerofx.passes.base import PassContext

if TYPE_CHECKING:  # which imports this module
    from zerofx.passes.zero.gathers import GatherSource, GatherSpan, GatherUnit

    Planned = dict[GatherUnit, list[GatherSpan]]


def bytes_alive(graph: fx.Graph, ctx: PassContext, **counted: Any) -> list[int]:
    """Bytes on the device at each node, as on the rank whose shard is largest: ranks plan alike."""
    sockets = not ctx.options.peer_memory
    return live_bytes(graph, ctx.world_size, sockets=sockets, table=ctx.table, **counted)


def keep_within_budget(
    graph: fx.Graph, sources: Sequence[GatherSource], planned: Planned, ctx: PassContext
) -> int:
    """Merge the spans of ``planned`` in place as far as the budget goes; return how many.

    What the ranks have agreed on for programs with these gathers is taken over, if it fits.

    Raises: BudgetError if the program does not fit with nothing kept.
    """
    budget = ctx.options.memory_budget
    assert budget is not None
    rebuilt = {node for source in sources for node in (source.node, *source.chain)}
    early_updates = ctx.options.update_in_backward
    alive = bytes_alive(graph, ctx, ignored=rebuilt, early_updates=early_updates)
    alive = settle_offload(graph, ctx, alive, planned)
    ahead = ctx.options.prefetch and ctx.figures.overlaps
    before = {unit: list(spans) for unit, spans in planned.items()}
    gathers = tuple(f"{unit.name}: {len(spans)} gathers" for unit, spans in before.items())
    agreed = ctx.kept_gathered.get(gathers)
    cuts = () if agreed is None else agreed.cuts
    kept = {unit: _merged(before[unit], cut) for unit, cut in zip(before, cuts, strict=False)}
    if kept and _peak(kept, alive, ahead) <= budget:
        planned.update(kept)
    elif _peak(before, alive, False) <= budget:
        ranks = max(ctx.world_size, 2)  # alone, nothing travels, and all is as good as kept
        transfer_s = partial(ctx.figures.transfer_s, world_size=ranks)
        keep_gathered(planned, alive, budget, ahead, transfer_s)
    # Else as little as can be is kept: for the rest activations make room, or are refused.
    remain = tuple(_cuts(spans, planned[unit]) for unit, spans in before.items())
    set_kept_gathered(graph, KeptGathered(gathers, remain))
    return _count(before) - _count(planned)


def settle_offload(
    graph: fx.Graph, ctx: PassContext, alive: list[int], planned: Planned
) -> list[int]:
    """Choose what stays on the device of what could leave it; return the bytes with that.

    ``alive`` are the bytes without what ``planned`` will gather.

    Raises: BudgetError if the program allocates more than the budget with as little there as can
    be, unless activations can still leave.
    """
    budget = ctx.options.memory_budget
    assert budget is not None
    if ctx.offloads:
        alive = _with_moves(graph, alive, ctx)
    least = _peak(planned, alive, False)
    if least > budget and "activations" not in ctx.options.offload:
        raise BudgetError(
            f"memory_budget is {budget} bytes, and this step allocates {least} on this rank "
            "with nothing kept gathered: give it that much (the most that any rank says), or a "
            "smaller batch, torch.utils.checkpoint, or smaller bucket_bytes."
        )
    if not ctx.offloads:
        return alive
    there = _stay_on_device(graph, ctx, budget - least)
    set_resident(graph, there)
    return [nbytes + there.nbytes for nbytes in alive]


def _with_moves(graph: fx.Graph, alive: list[int], ctx: PassContext) -> list[int]:
    """Return the bytes that ``place_offload`` will have on the device too.

    From the first reduction on, new values on their way back, and gradients that leave while the
    next ones are made; or two buckets' values that are updated on the device, and what they become;
    at stages 1 and 2 one bucket more that is being gathered.
    Of parameters that are kept on the host, always a shard that is about to be gathered.
    """
    largest = max((i.place.shard_numel * i.dtype.itemsize for i in ctx.table), default=0)
    reduces = (node.target is ops.reduce_scatter_start for node in graph.nodes)
    first = next((at for at, does in enumerate(reduces) if does), len(alive))
    updates = 0
    if "optimizer" in ctx.options.offload:
        updates = 2 if ctx.options.stage == 3 else 2 + ctx.world_size
    if ctx.host_parameters and ("optimizer" not in ctx.options.offload or ctx.state_bytes):
        updates = 3
    always = largest if ctx.host_parameters else 0
    return [
        nbytes + always + (updates * largest if position >= first else 0)
        for position, nbytes in enumerate(alive)
    ]


def _count(planned: Planned) -> int:
    return sum(map(len, planned.values()))


def _cuts(before: list[GatherSpan], after: list[GatherSpan]) -> frozenset[int]:
    """Return those of the earlier spans that are still gathered anew."""
    starts = {span.first for span in after}
    return frozenset(index for index, span in enumerate(before) if span.first in starts)


def _merged(spans: list[GatherSpan], cuts: frozenset[int]) -> list[GatherSpan]:
    merged: list[GatherSpan] = []
    for index, span in enumerate(spans):
        if index in cuts or not merged:
            merged.append(span)
        else:
            merged[-1] = merged[-1].joined(span)
    return merged


def keep_gathered(
    planned: Planned,
    alive: list[int],
    budget: int,
    ahead: bool,
    transfer_s: Callable[[int], float],
) -> int:
    """Keep parameters from forward to backward as far as ``budget`` bytes go; return how many.

    ``alive`` is what the program holds at each position without gathered buffers; ``ahead``
    leaves room for each gather to start as early as the one before it.  Merges the
    spans of ``planned`` in place, those first that hold fewest bytes, for the shortest time, for
    each second of ``transfer_s(bytes)`` that they save: what is small, and the last layers of
    forward.
    Source: DeepCompile, Tanaka et al. 2025, "selective unsharding".
    """
    gaps = [
        ((after.first - before.last) * unit.nbytes / transfer_s(unit.nbytes), index, unit)
        for index, unit in enumerate(planned)
        for before, after in itertools.pairwise(planned[unit])
        if unit.regather
    ]
    kept = 0
    for _, _, unit in sorted(gaps, key=lambda gap: gap[:2]):
        spans = planned[unit]
        for before, after in itertools.pairwise(spans):
            merged = before.joined(after)
            trial = [merged if span is before else span for span in spans if span is not after]
            if _peak({**planned, unit: trial}, alive, ahead) <= budget:
                planned[unit] = trial
                kept += 1
                break
    return kept


def _peak(
    planned: Planned,
    alive: list[int],
    ahead: bool,
) -> int:
    spans = sorted(
        ((span.first, span.last, unit.nbytes) for unit, spans in planned.items() for span in spans),
    )
    changes = [0] * (len(alive) + 1)
    for index, (first, last, nbytes) in enumerate(spans):
        changes[spans[index - 1][0] if ahead and index else first] += nbytes
        changes[last + 1] -= nbytes
    gathered = itertools.accumulate(changes)
    return max(map(operator.add, alive, gathered))


def _stay_on_device(graph: fx.Graph, ctx: PassContext, room: int) -> Resident:
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
