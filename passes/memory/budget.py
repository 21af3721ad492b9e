"""Choose what stays gathered from forward to backward within ``memory_budget``, on all ranks.

How many bytes are left of the budget depends on the batch, which may have another shape on each
rank, and what is gathered when must not.  So every rank finds what it could keep, and what all
of them could is kept: ``KeptGathered`` is what they compare.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import fx

from zerofx.cost.program import live_bytes
from zerofx.errors import BudgetError
from zerofx.ir import ops
from zerofx.ir.graph import program_order
from zerofx.ir.interface import set_kept_gathered, set_resident
from zerofx.ir.parameters import KeptGathered
from zerofx.passes.base import PassContext
from zerofx.passes.memory.residency import stay_on_device

if TYPE_CHECKING:  # which imports this module
    from zerofx.passes.zero.gathers import GatherSource, GatherSpan, GatherUnit

    Planned = dict[GatherUnit, list[GatherSpan]]


def keep_within_budget(
    graph: fx.Graph, sources: Sequence[GatherSource], planned: Planned, ctx: PassContext
) -> int:
    """Merge the spans of ``planned`` in place as far as the budget goes; return how many.

    What the ranks have agreed on for programs with these gathers is taken over, if it fits.

    Raises: BudgetError if the program does not fit with nothing kept.
    """
    budget = ctx.options.memory_budget
    assert budget is not None
    order = program_order(graph)
    rebuilt = {node for source in sources for node in (source.node, *source.chain)}
    alive = live_bytes(
        graph,
        ctx.world_size,
        ignored=rebuilt,
        early_updates=ctx.options.update_in_backward,
        sockets=not ctx.options.peer_memory,
        table=ctx.table,
    )
    if ctx.offloads:
        alive = with_moves(graph, order, alive, ctx)
        least = check_fits(_peak(planned, alive, False), ctx)
        there = stay_on_device(graph, ctx, budget - least)
        set_resident(graph, there)
        alive = [nbytes + there.nbytes for nbytes in alive]
    ahead = ctx.options.prefetch and ctx.figures.overlaps
    before = {unit: list(spans) for unit, spans in planned.items()}
    gathers = tuple(f"{unit.name}: {len(spans)} gathers" for unit, spans in before.items())
    agreed = ctx.kept_gathered.get(gathers)
    if agreed is not None:
        kept = {
            unit: _merged(before[unit], cuts)
            for unit, cuts in zip(before, agreed.cuts, strict=True)
        }
        if _peak(kept, alive, ahead) <= budget:
            planned.update(kept)
            set_kept_gathered(graph, agreed)
            return _count(before) - _count(planned)
    if "activations" in ctx.options.offload and _peak(before, alive, False) > budget:
        # As little as can be: what is still too much, activations make room for, or are refused.
        cuts = tuple(_cuts(spans, spans) for spans in before.values())
        set_kept_gathered(graph, KeptGathered(gathers, cuts))
        return 0
    ranks = max(ctx.world_size, 2)  # alone, nothing travels, and all is as good as kept

    def transfer_s(nbytes: int) -> float:
        return ctx.figures.transfer_s(nbytes, ranks)

    keep_gathered(planned, alive, budget, ahead, transfer_s)
    cuts = tuple(_cuts(before[unit], planned[unit]) for unit in before)
    set_kept_gathered(graph, KeptGathered(gathers, cuts))
    return _count(before) - _count(planned)


def check_fits(least: int, ctx: PassContext) -> int:
    """Return what a step allocates at least, but for activations that can leave.

    Raises: BudgetError if that is more than the budget.
    """
    budget = ctx.options.memory_budget
    assert budget is not None
    if least > budget and "activations" not in ctx.options.offload:
        raise _does_not_fit(least, budget)
    return least


def _does_not_fit(least: int, budget: int) -> BudgetError:
    return BudgetError(
        f"memory_budget is {budget} bytes, and this step allocates {least} on this rank "
        "with nothing kept gathered: give it that much (the most that any rank says), or a "
        "smaller batch, torch.utils.checkpoint, or smaller bucket_bytes."
    )


def with_moves(
    graph: fx.Graph, order: dict[fx.Node, int], alive: list[int], ctx: PassContext
) -> list[int]:
    """Return the bytes that ``place_offload`` will have on the device too.

    From the first reduction on, new values on their way back, and gradients that leave while the
    next ones are made; or two buckets' values that are updated on the device, and what they become;
    at stages 1 and 2 one bucket more that is being gathered.
    Of parameters that are kept on the host, always a shard that is about to be gathered.
    """
    reductions = [order[node] for node in graph.nodes if node.target is ops.reduce_scatter_start]
    shards = (info.place.shard_numel * info.dtype.itemsize for info in ctx.table)
    largest, first = max(shards, default=0), min(reductions, default=len(alive))
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
            merged[-1] = _joined(merged[-1], span)
    return merged


def _joined(before: GatherSpan, after: GatherSpan) -> GatherSpan:
    return replace(before, last=after.last, uses=before.uses + after.uses)


def keep_gathered(
    planned: Planned,
    alive: list[int],
    budget: int,
    ahead: bool,
    transfer_s: Callable[[int], float] = float,
) -> int:
    """Keep parameters from forward to backward as far as ``budget`` bytes go; return how many.

    ``alive`` is what the program holds at each position without gathered buffers; ``ahead``
    leaves room for each gather to start as early as the one before it.  Merges the
    spans of ``planned`` in place, those first that hold fewest bytes, for the shortest time, for
    each second of ``transfer_s(bytes)`` that they save: what is small, and the last layers of
    forward.
    Source: DeepCompile, Tanaka et al. 2025, "selective unsharding".

    Raises: BudgetError if the program does not fit with nothing kept.
    """
    least = _peak(planned, alive, False)
    if least > budget:
        raise _does_not_fit(least, budget)
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
            merged = _joined(before, after)
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
