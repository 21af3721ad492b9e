"""Decide what stays gathered, and on the device, within ``memory_budget``, on all ranks.

The rewrites have run by then, and what passes to come will have on the device is counted here.  How
many bytes are left of the budget depends on the batch, which may have another shape on each rank,
and what is gathered and updated when must not.  So every rank finds what it could keep, and what
all of them could is kept: ``KeptGathered`` is what they compare.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from torch import fx

from zerofx.cost.program import live_bytes
from zerofx.cost.timeline import work_of
from zerofx.errors import BudgetError
from zerofx.ir import ops
from zerofx.ir.graph import program_order
from zerofx.ir.parameters import KeptGathered, Residency
from zerofx.ir.roles import Role, bucket_of, parameter_of, role
from zerofx.ir.rules import LINK, OUTER_LINK, TO_DEVICE, TO_HOST, UPDATES
from zerofx.ir.sizes import value_bytes
from zerofx.passes.base import PassContext
from zerofx.passes.memory.exact import Stay, choose_stays

if TYPE_CHECKING:  # which imports this module
    from zerofx.passes.zero.gathers import GatherSpan, GatherUnit

    Planned = dict[GatherUnit, list[GatherSpan]]

Cuts = tuple[frozenset[int], ...]
"""For each unit of planned gathers, the numbers of those that remain."""


def bytes_alive(graph: fx.Graph, ctx: PassContext, ignored: Collection[fx.Node] = ()) -> list[int]:
    """Bytes on the device at each node, as on the rank whose shard is largest: ranks plan alike."""
    sockets = not ctx.options.peer_memory
    return live_bytes(graph, ctx.world_size, ignored, sockets=sockets, table=ctx.table)


def decide(
    graph: fx.Graph, ctx: PassContext, planned: Planned, ignored: Collection[fx.Node] = ()
) -> Residency:
    """Decide what stays on the device of what could leave it, then what stays gathered.

    ``planned`` are the gathers that there are with nothing kept; ``ignored`` nodes go with them.
    What the ranks have agreed on for programs with these gathers and states is taken over, if it
    fits.

    Raises: BudgetError if the program allocates more than the budget with as little as can be on
    the device, unless activations can still leave.
    """
    budget = ctx.options.memory_budget
    if budget is None:
        return Residency()
    alive = _with_moves(graph, bytes_alive(graph, ctx, ignored), ctx)
    wires = sum(unit.own_wire_bytes for unit in planned)
    alive = [nbytes + wires for nbytes in alive]
    least = _peak(planned, alive, False)
    if least > budget and "activations" not in ctx.options.offload:
        raise BudgetError(
            f"memory_budget is {budget} bytes, and this step allocates {least} on this rank "
            "with nothing kept gathered: give it that much (the most that any rank says), or a "
            "smaller batch, torch.utils.checkpoint, or smaller bucket_bytes.",
            needed=least,
        )
    pieces = _states(graph, ctx)
    choices = (
        *(f"{unit.name}: {len(spans)} gathers" for unit, spans in planned.items()),
        *(f"states of {piece.name}" for piece in pieces),
    )
    if not choices:
        return Residency()
    kept = _kept(choices, planned, pieces, budget, alive, ctx)
    if ctx.options.plan and least <= budget and kept != ctx.kept_gathered.get(choices):
        return _best(graph, ctx, planned, alive, pieces, kept)
    return _residency(kept, pieces)


def _kept(
    choices: tuple[str, ...],
    planned: Planned,
    pieces: Sequence[_States],
    budget: int,
    alive: list[int],
    ctx: PassContext,
) -> KeptGathered:
    """Choose states first, then gathers; what ranks have agreed on of either stays if it fits."""
    agreed, least = ctx.kept_gathered.get(choices), _peak(planned, alive, False)
    states = _stay_on_device(pieces, budget - least)
    if agreed is not None and _bytes_of(pieces, agreed.states) <= max(budget - least, 0):
        states = agreed.states
    room = budget - _bytes_of(pieces, states)
    ahead = ctx.options.prefetch and ctx.gathers_overlap
    if agreed is not None and _peak(with_cuts(planned, agreed.cuts), alive, ahead) <= room:
        cuts = agreed.cuts
    elif least <= room:
        transfer_s = partial(ctx.travels_s, reduces=False)
        if ctx.mesh.num_shards == 1:  # nothing travels, and all is as good as kept
            transfer_s = partial(ctx.figures.transfer_s, world_size=2)
        cuts = keep_gathered(planned, alive, room, ahead, transfer_s)
    else:  # as little as can be is kept: for the rest activations make room, or are refused
        cuts = _all_cuts(planned)
    return KeptGathered(choices, cuts, states)


def _residency(
    kept: KeptGathered, pieces: Sequence[_States], gap: float | None = None
) -> Residency:
    """Return what is kept, with its states as updates."""
    states = frozenset(itertools.chain(*(pieces[number].updates for number in kept.states)))
    return Residency(kept, states, _bytes_of(pieces, kept.states), gap)


def _best(
    graph: fx.Graph,
    ctx: PassContext,
    planned: Planned,
    alive: list[int],
    pieces: Sequence[_States],
    known: KeptGathered,
) -> Residency:
    """Return what an integer program chooses; it begins with what is ``known`` to fit."""
    budget = ctx.options.memory_budget
    assert budget is not None
    ahead = ctx.options.prefetch and ctx.gathers_overlap
    cuts = _all_cuts(planned)
    gaps = [
        (index, number)
        for index, (unit, spans) in enumerate(planned.items())
        for number in range(1, len(spans))
        if unit.regather
    ]
    begins = _begins(planned, ahead)
    stays = [_gap(planned, index, number, begins, ctx) for index, number in gaps]
    last = len(alive) - 1
    stays += [Stay(each.nbytes, 0, last, _saves(each, ctx), None) for each in pieces]

    def with_kept(chosen: Collection[int]) -> Cuts:
        spared = {gaps[number] for number in chosen if number < len(gaps)}
        return tuple(
            frozenset(n for n in cut if (index, n) not in spared) for index, cut in enumerate(cuts)
        )

    def states_of(chosen: Collection[int]) -> frozenset[int]:
        return frozenset(number - len(gaps) for number in chosen if number >= len(gaps))

    def peak(chosen: Collection[int]) -> int:
        gathered = _peak(with_cuts(planned, with_kept(chosen)), alive, ahead)
        return gathered + _bytes_of(pieces, states_of(chosen))

    spared = [gap for gap in gaps if gap[1] not in known.cuts[gap[0]]]
    start = frozenset([*map(gaps.index, spared), *(len(gaps) + number for number in known.states)])
    lanes = _lanes(graph, ctx, planned, pieces)
    used = _held(planned, alive, ahead)
    chosen = choose_stays(stays, used, budget, lanes, peak, start)
    kept = replace(known, cuts=with_kept(chosen.numbers), states=states_of(chosen.numbers))
    return _residency(kept, pieces, chosen.gap)


def _begins(planned: Planned, ahead: bool) -> dict[tuple[int, int], int]:
    """Return where each gather's memory is taken, by its unit's number and its own."""
    spans = sorted(
        (span.first, span.last, index, number)
        for index, of in enumerate(planned.values())
        for number, span in enumerate(of)
    )
    return {
        (index, number): spans[at - 1][0] if ahead and at else first
        for at, (first, _, index, number) in enumerate(spans)
    }


def _gap(
    planned: Planned,
    index: int,
    number: int,
    begins: Mapping[tuple[int, int], int],
    ctx: PassContext,
) -> Stay:
    """Return what it takes to keep a unit until its gather of this number, and spares."""
    unit, spans = list(planned.items())[index]
    saves = _gather_s(unit.nbytes, ctx)
    begin, end = spans[number - 1].last + 1, begins[index, number] - 1
    return Stay(unit.held_bytes, begin, end, saves, number)


def _gather_s(nbytes: int, ctx: PassContext) -> dict[str, float]:
    """Return the seconds of a gather on each link that it takes."""
    mesh = ctx.mesh
    return {
        LINK if axis == mesh.inner else OUTER_LINK: ctx.figures.along(axis).transfer_s(
            times * nbytes, mesh.size(axis)
        )
        for axis, times in mesh.carried(reduces=False)
    }


def _saves(piece: _States, ctx: PassContext) -> dict[str, float]:
    """Return the seconds that an update on the device spares: its values' ways, and the host's."""
    copy_s = piece.moved_bytes / ctx.figures.copy_bytes_per_s
    host_s = (2 * piece.nbytes + 3 * piece.moved_bytes) / ctx.figures.host_bytes_per_s
    return {TO_HOST: copy_s, TO_DEVICE: copy_s, UPDATES: host_s}


def _lanes(
    graph: fx.Graph, ctx: PassContext, planned: Planned, pieces: Sequence[_States]
) -> dict[str, float]:
    """Return what each lane has to do with these gathers, and all updates on the host."""
    works = (work_of(node, ctx.figures, ctx.table, ctx.world_size) for node in graph.nodes)
    lanes: dict[str, float] = defaultdict(float)
    for work in works:
        for lane in work.lanes:
            lanes[lane] += work.seconds
    gathers = (_gather_s(unit.nbytes, ctx) for unit, spans in planned.items() for _ in spans)
    for saved in (*gathers, *(_saves(each, ctx) for each in pieces)):
        for lane, seconds in saved.items():
            lanes[lane] += seconds
    return dict(lanes)


def _with_moves(graph: fx.Graph, alive: list[int], ctx: PassContext) -> list[int]:
    """Return the bytes that ``place_offload`` will have on the device too.

    From the first reduction on, new values on their way back, and gradients that leave while the
    next ones are made; or two buckets' values that are updated on the device, and what they become;
    at stages 1 and 2 one bucket more that is being gathered.
    Of parameters that are kept on the host, always a shard that is about to be gathered.
    """
    largest = max((i.kept.place.shard_numel * i.dtype.itemsize for i in ctx.table), default=0)
    scatters = (ops.reduce_scatter_start, ops.all_to_all_start)
    reduces = (node.target in scatters for node in graph.nodes)
    first = next((at for at, does in enumerate(reduces) if does), len(alive))
    updates = 0
    if "optimizer" in ctx.options.offload:
        updates = 2 if ctx.options.stage == 3 else 2 + ctx.mesh.num_shards
    if ctx.host_parameters and ("optimizer" not in ctx.options.offload or ctx.state_bytes):
        updates = 3
    always = largest if ctx.host_parameters else 0
    return [
        nbytes + always + (updates * largest if position >= first else 0)
        for position, nbytes in enumerate(alive)
    ]


def bytes_with_gathers(graph: fx.Graph, ctx: PassContext) -> tuple[list[int], int]:
    """Bytes on the device at each node with what ``prefetch`` will have there behind updates.

    And what it would have there besides, of a gather that starts while another one is in use.
    """
    alive = bytes_alive(graph, ctx)
    nodes = list(graph.nodes)
    largest = max((value_bytes(node) for node in nodes if ops.rules(node).gathers), default=0)
    if not ctx.options.prefetch:
        return alive, 0
    if ctx.options.stage == 3:
        return alive, largest
    updates = [at for at, node in enumerate(nodes) if node.target is ops.update]
    if updates and ctx.mesh.num_shards > 1:  # new values, gathered behind each update
        alive[updates[0] :] = [nbytes + 2 * largest for nbytes in alive[updates[0] :]]
    return alive, 0


def _all_cuts(planned: Planned) -> Cuts:
    return tuple(frozenset(range(len(spans))) for spans in planned.values())


def with_cuts(planned: Planned, cuts: Cuts) -> Planned:
    """The gathers that remain, each for the readers of those that are spared behind it too."""
    remaining: Planned = {}
    for (unit, spans), cut in zip(planned.items(), cuts, strict=True):
        merged = remaining[unit] = spans[:1]
        for index, span in enumerate(spans[1:], 1):
            if index in cut:
                merged.append(span)
            else:
                merged[-1] = merged[-1].joined(span)
    return remaining


def keep_gathered(
    planned: Planned, alive: list[int], budget: int, ahead: bool, transfer_s: Callable[[int], float]
) -> Cuts:
    """Keep parameters from forward to backward as far as ``budget`` bytes go.

    ``alive`` is what the program holds at each position without gathered buffers; ``ahead``
    leaves room for each gather to start as early as the one before it.  Spared are those first
    that hold fewest bytes, for the shortest time, for each second of ``transfer_s(bytes)`` that
    they save: what is small, and the last layers of forward.
    Source: DeepCompile, Tanaka et al. 2025, "selective unsharding".
    """
    cuts = _all_cuts(planned)
    gaps = [
        ((after.first - before.last) * unit.nbytes / transfer_s(unit.nbytes), index)
        for index, (unit, spans) in enumerate(planned.items())
        for before, after in itertools.pairwise(spans)
        if unit.regather
    ]
    for _, index in sorted(gaps):
        for cut in sorted(cuts[index])[1:]:
            trial = (*cuts[:index], cuts[index] - {cut}, *cuts[index + 1 :])
            if _peak(with_cuts(planned, trial), alive, ahead) <= budget:
                cuts = trial
                break
    return cuts


def _peak(planned: Planned, alive: list[int], ahead: bool) -> int:
    return max(_held(planned, alive, ahead))


def _held(planned: Planned, alive: list[int], ahead: bool) -> list[int]:
    """Return the bytes at each position with these gathers."""
    spans = sorted(
        (span.first, span.last, unit.held_bytes)
        for unit, spans in planned.items()
        for span in spans
    )
    changes = [0] * (len(alive) + 1)
    for index, (first, last, nbytes) in enumerate(spans):
        changes[spans[index - 1][0] if ahead and index else first] += nbytes
        changes[last + 1] -= nbytes
    return list(map(operator.add, alive, itertools.accumulate(changes)))


class _States(NamedTuple):
    """The states of a bucket's updates, which stay together or leave together.

    ``name`` is the same on all ranks.  ``moved_bytes`` are those of the values, which go there and
    back with their gradients.
    """

    name: str
    updates: tuple[tuple[int, int], ...]
    nbytes: int
    moved_bytes: int


def _states(graph: fx.Graph, ctx: PassContext) -> list[_States]:
    """Return the states that may stay on the device, in the order in which they should.

    Those come first whose gradients come last: the others' updates hide behind the rest of
    backward, theirs would be waited for.  States of which nobody knows how many bytes they will
    take never stay, nor do an optimizer's that updates a parameter twice in the program: its
    updates on the device would overtake those on the host.

    Counted as on the rank whose shard is largest, so that ranks choose alike.
    """
    updated = Counter(node.args[2:4] for node in graph.nodes if node.target is ops.update)
    steps_again = {optimizer for (optimizer, _), times in updated.items() if times > 1}
    buckets: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for optimizer, index in updated:
        bucket = ctx.table[index].place.bucket
        buckets.setdefault((optimizer, bucket), []).append((optimizer, index))
    last_reduced = _last_reduced(graph, ctx)
    found = []
    for piece in sorted(buckets, key=lambda piece: (-last_reduced.get(piece[1], 0), piece)):
        members = buckets[piece]
        if piece[0] in steps_again or any(member not in ctx.state_bytes for member in members):
            continue
        infos = [ctx.table[index] for _, index in members]
        nbytes = sum(
            math.ceil(ctx.state_bytes[member] * info.largest_shard_numel)
            for member, info in zip(members, infos, strict=True)
        )
        moved = sum(info.largest_shard_numel * info.dtype.itemsize for info in infos)
        name = ", ".join(info.name for info in infos)
        found.append(_States(name, tuple(members), nbytes, moved))
    return found


def _stay_on_device(pieces: Sequence[_States], room: int) -> frozenset[int]:
    """Choose the states that stay on the device, by their numbers, of at most ``room`` bytes."""
    staying: set[int] = set()
    for number, piece in enumerate(pieces):
        if piece.nbytes <= room:
            staying.add(number)
            room -= piece.nbytes
    return frozenset(staying)


def _bytes_of(pieces: Sequence[_States], numbers: Collection[int]) -> int:
    return sum(pieces[number].nbytes for number in numbers)


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
