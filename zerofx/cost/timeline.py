"""The predicted timeline of a program: compute on one stream, each link on another."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from torch import fx

from zerofx.calibration import AS_ADDED_UP, CONFIDENCE, Cost
from zerofx.cost.program import journeys, name_of, owned_bytes, seconds
from zerofx.hardware import Hardware, Link
from zerofx.ir import ops
from zerofx.ir.interface import recorded
from zerofx.ir.mesh import DATA, axes_in
from zerofx.ir.parameters import ParameterTable
from zerofx.ir.rules import FILES, LINK, OUTER_LINK, TO_DEVICE, TO_HOST, UPDATES


@dataclass(frozen=True)
class Transfer:
    """One collective or move: how long it travels, and for how long its wait makes ranks idle."""

    seconds: float
    exposed_s: float

    @property
    def is_hidden(self) -> bool:
        return self.exposed_s <= 0.01 * self.seconds

    def __str__(self) -> str:
        if not self.seconds:
            return "no transfer"
        words = f"{milliseconds(self.seconds)} of transfer"
        if self.is_hidden:
            return f"{words}, hidden behind compute"
        if self.exposed_s >= 0.99 * self.seconds:
            return f"{words}, exposed"
        return f"{words}, {milliseconds(self.exposed_s)} of it exposed"


class Span(NamedTuple):
    """A time in which a node keeps a lane busy, from the program's start.  Units: seconds."""

    node: fx.Node
    lane: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """A program's predicted seconds.  ``transfers`` are by the node that starts each.

    ``exposed_s`` is how long a rank has nothing to do but to wait.  ``lanes`` is what each lane
    has to do in all: ``compute``, the ``link`` and on a mesh the ``outer link``, copies ``to host``
    and ``to device``, ``updates`` on the host, and ``files``.  ``bound_s`` is what no schedule of
    nodes with these ``works`` can beat: it reads their graph when it is asked for.  ``issued_s`` is
    when each node's turn comes, and ``spans`` when it keeps a lane busy: whoever takes no time has
    none, and a ``wait`` for what is late has one on the lane ``waiting``.
    """

    compute_s: float
    exposed_s: float
    transfers: Mapping[fx.Node, Transfer]
    lanes: Mapping[str, float] = field(default_factory=dict)
    works: Mapping[fx.Node, Work] = field(default_factory=dict)
    issued_s: Sequence[float] = ()
    spans: Sequence[Span] = ()

    @cached_property
    def bound_s(self) -> float:
        return least_s(self.works)

    @property
    def step_s(self) -> float:
        return self.compute_s + self.exposed_s

    @property
    def busiest(self) -> str:
        """The lane that has most to do: no step takes less than that."""
        return max(self.lanes, key=self.lanes.__getitem__)

    @property
    def transfer_s(self) -> float:
        return sum(transfer.seconds for transfer in self.transfers.values())

    def __str__(self) -> str:
        return (
            f"{milliseconds(self.compute_s)} of compute, {milliseconds(self.transfer_s)} of "
            f"transfers, {milliseconds(self.exposed_s)} of them exposed"
        )


@dataclass(frozen=True)
class Work:
    """The work of a node, and its lanes.  A lane does one thing after the other.

    Only what travels along both axes of a mesh has two.
    """

    lanes: tuple[str, ...]
    seconds: float

    @property
    def lane(self) -> str:
        return self.lanes[0]

    def slower(self, times: Mapping[str, float]) -> Work:
        """Return the same, so many times as long on some lanes; on two, the slower one counts."""
        factor = max(times.get(lane, 1.0) for lane in self.lanes)
        return self if factor == 1.0 else Work(self.lanes, factor * self.seconds)


NOTHING: Mapping[str, float] = {}


def works_of(
    graph: fx.Graph, figures: Hardware, table: ParameterTable, world_size: int
) -> dict[fx.Node, Work]:
    """Return the work of each of a program's nodes, in their order."""
    return {node: work_of(node, figures, table, world_size) for node in graph.nodes}


def call_s(figures: Hardware, table: ParameterTable) -> float:
    """Return what a step takes beside its program, where that has been measured."""
    return figures.calibration.step.seconds(len(table)) if figures.calibration else 0.0


def work_of(node: fx.Node, figures: Hardware, table: ParameterTable, world_size: int) -> Work:
    """Return one node's work by these figures; a wait's work is its start's."""
    lane = ops.lane(node)
    if not lane:
        return Work((COMPUTE,), seconds(node, figures, table))
    if lane == LINK:
        return Work(link_lanes(node), transfer_s(node, figures, world_size))
    speed = {
        TO_HOST: figures.copy_bytes_per_s,
        TO_DEVICE: figures.copy_bytes_per_s,
        UPDATES: figures.host_bytes_per_s,
        FILES: figures.file_bytes_per_s,
    }
    return Work((lane,), ops.rules(node).carries(node, table) / speed[lane])


def predict(
    graph: fx.Graph,
    figures: Hardware,
    table: ParameterTable,
    world_size: int,
    *,
    works: Mapping[fx.Node, Work] | None = None,
    times: Mapping[str, float] = NOTHING,
) -> Timeline:
    """Run the program on clocks: a collective waits for the link, a ``wait`` for it.

    The link carries one collective at a time, in the order of starts.  Without overlap it begins
    at the wait.  On a mesh each axis has a link and a communicator of its own, NCCL's streams or
    gloo's threads, and both carry something at once; a collective between all ranks takes both.
    Copies to and from the host have a lane of their own each way, and so have updates
    on the host, and reads and writes of files together: states count as if none stayed in host
    memory from step to step.  ``works`` are the nodes' if they are known, and what is on a lane
    takes so many ``times`` as long.
    """
    compute_s = call_s(figures, table) * times.get(COMPUTE, 1.0)
    idle_s = 0.0
    free_s = dict.fromkeys(LANES, 0.0)
    done: dict[fx.Node, float] = {}
    transfers: dict[fx.Node, Transfer] = {}
    if works is None:
        works = works_of(graph, figures, table, world_size)
    works = {node: work.slower(times) for node, work in works.items()} if times else works
    lanes = dict.fromkeys(LANES, 0.0)
    issued_s: list[float] = []
    spans: list[Span] = []

    def busy(node: fx.Node, on: Sequence[str], begin_s: float, seconds: float) -> None:
        if seconds > 0:
            spans.extend(Span(node, lane, begin_s, begin_s + seconds) for lane in on)

    for node, work in works.items():
        for lane in work.lanes:
            lanes[lane] += work.seconds
        now = compute_s + idle_s
        issued_s.append(now)
        if work.lane != COMPUTE:
            transfers[node] = Transfer(work.seconds, 0.0)
            if not ops.is_collective(node) or _link(node, figures).overlaps:
                begin_s = max(now, *(free_s[lane] for lane in work.lanes))
                done[node] = begin_s + work.seconds
                free_s |= dict.fromkeys(work.lanes, done[node])
                busy(node, work.lanes, begin_s, work.seconds)
        elif ops.is_wait(node):
            start = node.args[0]
            travels_s = transfers[start].seconds
            late_s = max(done[start] - now, 0.0) if start in done else travels_s
            # The rest is spent on transfers before it, which nobody has waited for yet.
            transfers[start] = Transfer(travels_s, min(late_s, travels_s))
            if start not in done:
                busy(start, works[start].lanes, now, travels_s)
            busy(node, [WAITING], now, late_s)
            idle_s += late_s
        elif node.target is ops.on_owners:
            num_shards = ops.num_shards(graph, world_size)
            share = owned_bytes(node, num_shards, table)
            travels_s = journeys(node) * _link(node, figures).transfer_s(share, num_shards)
            travels_s *= times.get(link_lanes(node)[0], 1.0)
            transfers[node] = Transfer(travels_s, travels_s)
            for lane in link_lanes(node):
                lanes[lane] += travels_s
            for begin_s in (now, now + travels_s / 2 + work.seconds):  # there, and back
                busy(node, [*link_lanes(node), WAITING], begin_s, travels_s / 2)
            busy(node, [COMPUTE], now + travels_s / 2, work.seconds)
            compute_s += work.seconds
            idle_s += travels_s
        else:
            busy(node, [COMPUTE], now, work.seconds)
            compute_s += work.seconds
    return Timeline(compute_s, idle_s, transfers, lanes, works, issued_s, spans)


WAITING = "waiting"
"""The lane of what a rank does while it does nothing but wait."""

COMPUTE = "compute"

LANES = (COMPUTE, LINK, OUTER_LINK, TO_HOST, TO_DEVICE, UPDATES, FILES)


@dataclass(frozen=True)
class StepTime:
    """The seconds that a step is predicted to take: those expected, and an interval around them."""

    low_s: float
    expected_s: float
    high_s: float
    confidence: float = CONFIDENCE


def step_time(
    graph: fx.Graph,
    figures: Hardware,
    table: ParameterTable,
    world_size: int,
    *,
    works: Mapping[fx.Node, Work] | None = None,
    whole: Cost = AS_ADDED_UP,
) -> StepTime:
    """Return a step's time with an interval: each lane may be wrong by the figures' ``spread``.

    The lanes' errors are taken to be independent: of the schedule, run once with each lane slower
    and once with it faster, the differences add up as squares.  ``whole`` is what a step takes by
    its collectives and by these seconds.
    """
    if works is None:
        works = works_of(graph, figures, table, world_size)

    def seconds(times: Mapping[str, float] = NOTHING) -> float:
        return predict(graph, figures, table, world_size, works=works, times=times).step_s

    expected_s = seconds()
    used = [lane for lane in LANES if any(lane in w.lanes and w.seconds for w in works.values())]
    above = [seconds({lane: figures.spread}) - expected_s for lane in used]
    below = [expected_s - seconds({lane: 1 / figures.spread}) for lane in used]
    interval = expected_s - math.hypot(*below), expected_s, expected_s + math.hypot(*above)
    num_collectives = count_collectives(works, world_size)
    return StepTime(*(whole.seconds(num_collectives, each_s) for each_s in interval))


def count_collectives(nodes: Iterable[fx.Node], world_size: int) -> int:
    """Return at how many of a program's nodes ranks wait for each other."""
    return sum(ops.is_collective(one) and ops.num_ranks(one, world_size) > 1 for one in nodes)


def least_s(works: Mapping[fx.Node, Work]) -> float:
    """Return the time that no schedule of a program's nodes can beat.

    A lane begins when the first of its nodes has what it reads, and when the last of them is done
    there is still to do what follows from it; in between is at least all that the lane has to do.
    """
    begins: dict[fx.Node, float] = {}
    for node in works:
        ends = (begins[source] + works[source].seconds for source in node.all_input_nodes)
        begins[node] = max(ends, default=0.0)
    rest: dict[fx.Node, float] = {}
    for node in reversed(list(works)):
        rest[node] = max((works[user].seconds + rest[user] for user in node.users), default=0.0)
    bounds = [0.0]
    for lane in LANES:
        busy = [node for node, work in works.items() if lane in work.lanes and work.seconds]
        if busy:
            first, last = min(map(begins.__getitem__, busy)), min(map(rest.__getitem__, busy))
            bounds.append(first + sum(works[node].seconds for node in busy) + last)
    bounds += [begins[node] + works[node].seconds + rest[node] for node in works]
    return max(bounds)


def transfer_s(start: fx.Node, figures: Hardware, world_size: int) -> float:
    """Return the time that a collective travels, by the buffer that its ranks make of it."""
    nbytes = ops.rules(start).rounds(start) * ops.rules(start).sends(start)
    ranks = ops.num_ranks(start, world_size)
    cost = figures.calibration and figures.calibration.collectives.get(name_of(start))
    if cost and ranks > 1:
        return cost.seconds(nbytes * (ranks - 1) / ranks)
    return _link(start, figures).transfer_s(nbytes, ranks)


def link_lanes(node: fx.Node) -> tuple[str, ...]:
    """Return the lanes of the links that a node's values travel over."""
    mesh = recorded(node.graph).mesh
    if mesh is None:
        return (LINK,)
    axes = axes_in(_axis(node))
    return (LINK,) * (mesh.inner in axes) + (OUTER_LINK,) * (mesh.outer in axes)


def _link(node: fx.Node, figures: Hardware) -> Link:
    """Return the link that a node's values travel over."""
    return figures.along(_axis(node))


def _axis(node: fx.Node) -> str:
    if node.target is not ops.on_owners:
        return ops.argument(node, "axis")
    mesh = recorded(node.graph).mesh
    return DATA if mesh is None else mesh.across


def milliseconds(value: float) -> str:
    return f"{value * 1e3:.3g} ms"
