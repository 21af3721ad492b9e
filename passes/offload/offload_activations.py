"""Move what forward saves for backward to host memory, while nobody reads it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import fx

from zerofx.cost.program import seconds
from zerofx.errors import BudgetError
from zerofx.ir import ops
from zerofx.ir.aliases import aliased_inputs, aliases
from zerofx.ir.graph import Builder, erase_unused
from zerofx.ir.interface import mark_kept, note_decisions, recorded, why_kept
from zerofx.ir.offload import assign_slots, copies_activation, copies_to_device, is_staged
from zerofx.ir.roles import Role
from zerofx.ir.sizes import hinted_bytes
from zerofx.passes.base import Counts, PassContext
from zerofx.passes.memory.decisions import bytes_with_gathers
from zerofx.passes.offload.activations import Activation, saved_activations, where_to_cut
from zerofx.passes.offload.offload_schedule import Lanes, Trip, fit, worth_it
from zerofx.passes.schedule.start_times import MARGIN, explain_transfers

SMALLEST_BYTES = 2**18
"""The least bytes worth a copy: smaller ones take as long to begin as to copy, 10 us."""


def offload_activations(gm: fx.GraphModule, ctx: PassContext) -> Counts:
    """Start each value out behind its last reader of forward, and back before backward's first.

    Before::

        h = mm(x, w);  y = gelu(h);  ...  z = mm(...);  ...
        dz = ...;  ...;  dh = gelu_backward(dy, h)

    After::

        h = mm(x, w);  y = gelu(h);  h_to_host = zerofx.copy_start([h], [], "host", slot=0);  ...
        z = mm(...);  h_on_host = zerofx.wait(h_to_host);  ...
        dz = ...;  h_to_device = zerofx.copy_start([h_on_host], [], "cuda");  ...
        h_1 = zerofx.wait(h_to_device);  dh = gelu_backward(dy, h_1)

    With the first ``wait`` the value's memory on the device is free.  Each way is a lane that
    carries one copy at a time, and each copy is given ``MARGIN`` times the time that it takes.
    Without a ``memory_budget`` all leave that have at least ``SMALLEST_BYTES`` and travel hidden
    behind compute; with one as many as it takes, those first that lie idle longest.  What
    ``recompute`` computes again is not saved, and views are taken again of what comes back.
    With ``offload_tier="nvme"`` a copy takes as long as the slower of the two ways.
    Source: vDNN, Rhu et al. 2016; SSDTrain, Wu et al. 2024.

    Raises: BudgetError if the program does not fit its budget with all away that can be.
    """
    device = ctx.table.parameters[0].device if len(ctx.table) else None
    activations = [] if device is None else saved_activations(gm.graph, device)
    budget = ctx.options.memory_budget
    if budget is not None and (residency := recorded(gm.graph).decisions.residency):
        budget -= residency.state_bytes
    nodes = list(gm.graph.nodes)
    if ctx.decided.away is not None:
        trips = list(_decided(ctx.decided.away, nodes, activations))
    else:
        trips = _planned(gm.graph, nodes, activations, budget, ctx) if activations else []
    stops = [(trip.activation.value.name, [nodes[at].name for at in trip.stops]) for trip in trips]
    note_decisions(gm.graph, away=dict(stops))
    _place(gm, ctx, nodes, trips)
    if budget is not None:
        alive, _ = bytes_with_gathers(gm.graph, ctx)
        if max(alive) > budget:
            raise _does_not_fit(budget, max(alive), trips)
    num_slots = _assign_slots(gm.graph, of_one_size=ctx.options.offload_tier == "nvme")
    if ctx.options.stage == 0 or not ctx.options.prefetch:  # which does, and will not run
        explain_transfers(gm.graph, ctx, {}, copies_activation)
    return {
        "activations": len(trips),
        "bytes": sum(trip.nbytes for trip in trips),
        "staging buffers": num_slots,
    }


def _decided(
    away: Mapping[str, Sequence[str]], nodes: Sequence[fx.Node], activations: Sequence[Activation]
) -> Iterator[Trip]:
    by_name = {activation.value.name: activation for activation in activations}
    order = {node.name: position for position, node in enumerate(nodes)}
    for name, stops in away.items():
        leaves, gone, back, returns = map(order.__getitem__, stops)
        yield Trip(replace(by_name[name], leaves=leaves, returns=returns), gone, back)


def _planned(
    graph: fx.Graph,
    nodes: Sequence[fx.Node],
    activations: list[Activation],
    budget: int | None,
    ctx: PassContext,
) -> list[Trip]:
    """Choose the activations that leave, and where each is gone and comes back."""
    slowest = ctx.figures.copy_bytes_per_s
    if ctx.options.offload_tier == "nvme":
        slowest = min(slowest, ctx.figures.file_bytes_per_s)

    def copy_s(nbytes: int) -> float:
        return MARGIN * nbytes / slowest

    # If nothing ever waits: time that ranks wait is none to count on, ``prefetch`` may hide it.
    spent = (seconds(node, ctx.figures, ctx.table) for node in nodes)
    times = list(itertools.accumulate(spent, initial=0.0))
    cuts = list(range(len(nodes)))
    if ctx.options.lowering == "inductor":
        cuts, activations = where_to_cut(
            nodes, activations, times, lambda activation: copy_s(activation.nbytes)
        )
    large = [activation for activation in activations if activation.nbytes >= SMALLEST_BYTES]
    arriving = [
        (position, hinted_bytes(node))
        for position, node in enumerate(nodes)
        if ops.is_wait(node) and copies_to_device(node.args[0])
    ]
    lanes = Lanes(times, cuts, copy_s, arriving)
    if budget is None:
        return worth_it(lanes, large)
    alive, ahead = bytes_with_gathers(graph, ctx)
    if max(alive) <= budget:
        return []
    for candidates, target in ((large, budget - ahead), (large, budget), (activations, budget)):
        trips, peak = fit(lanes, candidates, alive, target)
        if peak <= target:
            return trips
    raise _does_not_fit(budget, peak, trips)


def _does_not_fit(budget: int, peak: int, trips: Sequence[Trip]) -> BudgetError:
    away = sum(trip.nbytes for trip in trips)
    return BudgetError(
        f"memory_budget is {budget} bytes, and this step allocates {peak} on this rank with "
        f"{len(trips)} activations of {away} bytes in host memory and nothing kept gathered: give "
        "it that much, or a smaller batch, torch.utils.checkpoint, or smaller bucket_bytes.",
        needed=peak,
    )


def _place(
    gm: fx.GraphModule, ctx: PassContext, nodes: Sequence[fx.Node], trips: Sequence[Trip]
) -> None:
    """Insert the moves: at one position first what starts, for its wait may stand there too."""
    builder = Builder(gm, "offload_activations", ctx.table)
    legs: list[tuple[int, int, int]] = []
    for number, trip in enumerate(trips):
        legs += [(position, leg, number) for leg, position in enumerate(trip.stops)]
    moved: dict[int, fx.Node] = {}
    for position, leg, number in sorted(legs):
        activation = trips[number].activation
        value, late = activation.value, activation.readers[0]
        last = moved.get(number, value)
        with builder.before(nodes[position], like=value if leg < 2 else late) as call:
            if leg == 0:
                why = {"role": Role.TO_HOST, "reason": f"{activation.nbytes / 1e6:.3g} MB"}
                node = call(ops.copy_start, [last], [], ops.HOST, -1, **why)
            elif leg == 2:
                device = str(value.meta["val"].device)
                node = call(ops.copy_start, [last], [], device, role=Role.TO_DEVICE)
            else:
                node = call(ops.wait, last, role=Role.ON_HOST if leg == 1 else Role.RELOADED)
        node._rename(f"{value.name}_{_NAMES[leg]}")
        moved[number] = node
    for number, trip in enumerate(trips):
        _read_what_came_back(builder, trip.activation, moved[number])
        if reason := why_kept(trip.activation.value):
            mark_kept(trip.activation.value, f"{reason}; in host memory")


_NAMES = ("to_host", "on_host", "to_device", "again")


def _read_what_came_back(builder: Builder, activation: Activation, reloaded: fx.Node) -> None:
    """Have backward's readers read the copy, and views of it where they read views."""
    again = {activation.value: reloaded}
    replaced: dict[fx.Node, None] = {}

    def renewed(source: fx.Node, reader: fx.Node) -> fx.Node:
        if source not in again:
            for base in aliased_inputs(source):
                renewed(base, reader)
            with builder.graph.inserting_before(reader):
                again[source] = builder.copy(source, again, role=Role.VIEW, parameter=-1)
            again[source].meta["autograd_backward"] = True
            replaced[source] = None
        return again[source]

    views = aliases(activation.value)
    for reader in activation.readers:
        for source in list(reader.all_input_nodes):
            if source in views:
                reader.replace_input_with(source, renewed(source, reader))
    erase_unused(builder.graph, replaced)


def _assign_slots(graph: fx.Graph, of_one_size: bool) -> int:
    """Number the staging buffers: each a value's until that is back; return how many.

    A free one as large as the value, or the one that has to grow least.  With ``of_one_size`` only
    values of equal sizes share one, which is written to a file and read as a whole.
    """
    starts = [node for node in filter(is_staged, graph.nodes) if copies_activation(node)]

    def choose(start: fx.Node, free: list[int], sizes: list[int]) -> int | None:
        nbytes = hinted_bytes(start)
        if of_one_size:
            return next((slot for slot in free if sizes[slot] == nbytes), None)
        fitting = [slot for slot in free if sizes[slot] >= nbytes]
        if fitting:
            return min(fitting, key=sizes.__getitem__)
        return max(free, key=sizes.__getitem__, default=None)

    return assign_slots(starts, choose)
