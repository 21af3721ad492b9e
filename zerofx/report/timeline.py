"""One predicted step as a Chrome trace: lanes, memory by kind, and its peak in words.

``10_prefetch.trace.json`` lies next to ``10_prefetch.py``; https://ui.perfetto.dev opens it.
"""

from __future__ import annotations

import itertools
import json
import operator
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import fx

from zerofx.cost.program import journeys, owned_bytes
from zerofx.cost.timeline import Timeline, predict
from zerofx.cost.traffic import size_text
from zerofx.errors import CommandError
from zerofx.ir import ops
from zerofx.ir.roles import Role, bucket_of, provenance, role
from zerofx.ir.source import source_of
from zerofx.passes.base import PassContext
from zerofx.report.memory import LOWERED_BY, Piece, alive, parameters_of, phases_of, pieces_of
from zerofx.report.python_text import value_text

SUFFIX = ".trace.json"
VERSION = 1
"""Of the part of a trace that is ours, under the key ``zerofx``."""

PREDICTED, MEASURED = 1, 2
"""Process numbers in a trace."""

LANES = (
    *("compute", "waiting", "link", "to host", "to device", "updates", "files", "host"),
    "outer link",
)
"""Threads of a trace; ``host`` is there when a device's own times are measured."""

LINKS = ("link", "outer link")
"""Those of collectives, which are drawn one below the other."""

_LARGEST, _LONGEST, _NAMES = 10, 5, 3
"""The words list so many tensors at the peak, so many waits, and so many parameters of each."""

Event = dict[str, Any]
"""One entry of a trace, as JSON has it."""

StateBytes = Mapping[tuple[int, int], float]
"""The bytes per element that optimizers keep, by (optimizer, parameter)."""


def trace_of(
    graph: fx.Graph, ctx: PassContext, *, title: str = "step", state_bytes: StateBytes | None = None
) -> dict[str, Any]:
    """Predict one step of a program; return it as a Chrome trace.

    Lanes are threads and memory is in counters.  ``state_bytes`` is as in ``pieces_of``.  Under
    ``zerofx`` lie the words of the command ``timeline``, the nodes' names and, by the name of a
    wait, the node that started what it waits for.
    """
    timeline = predict(graph, ctx.figures, ctx.table, ctx.world_size)
    nodes, sockets = list(graph.nodes), not ctx.options.peer_memory
    pieces = pieces_of(graph, ctx.table, ctx.world_size, sockets=sockets, state_bytes=state_bytes)
    writer = _Writer(nodes, ctx, timeline)
    lanes = {span.lane for span in timeline.spans}
    return {
        "displayTimeUnit": "ms",
        "traceEvents": [
            *process_events(PREDICTED, f"predicted: {title}", lanes),
            *writer.spans(),
            *writer.arrows(),
            *_counters(pieces, timeline.issued_s, "device"),
            *_counters(pieces, timeline.issued_s, "host"),
        ],
        "zerofx": {
            "version": VERSION,
            "title": title,
            "step_s": timeline.step_s,
            "hardware": f"{ctx.figures} ({ctx.figures.source})",
            "words": _words(writer, pieces),
            "nodes": [node.name for node in nodes],
            "waits_for": {n.name: n.args[0].name for n in filter(ops.is_wait, nodes)},
        },
    }


def text_of(trace: Mapping[str, Any]) -> str:
    """Return a trace as JSON; the same trace gives the same bytes."""
    return json.dumps(trace, ensure_ascii=False, separators=(",", ":"))


def read(path: Path) -> dict[str, Any]:
    """Read a dumped trace.

    Raises: CommandError if it is none, or of another version; OSError.
    """
    try:
        trace = json.loads(path.read_bytes())
        version, _ = trace["zerofx"]["version"], trace["traceEvents"]
    except (ValueError, LookupError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CommandError(f"{path} is no timeline of zerofx ({reason}). {REMEDY}") from None
    if version != VERSION:
        raise CommandError(
            f"{path} is of version {version!r}, and this zerofx reads version {VERSION}. {REMEDY}"
        )
    return trace


REMEDY = "Dump the program again, with the option dump or with ZEROFX_DUMP."


def process_events(process: int, title: str, lanes: Collection[str]) -> Iterator[Event]:
    """Name a process and its lanes."""
    yield {"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": title}}
    for number, lane in enumerate(LANES, 1):
        if lane in lanes:
            where = {"ph": "M", "pid": process, "tid": number}
            yield {**where, "name": "thread_name", "args": {"name": lane}}
            yield {**where, "name": "thread_sort_index", "args": {"sort_index": 1 + place_of(lane)}}


def place_of(lane: str) -> int:
    """Return the place of a lane among those of a trace, from above."""
    return LANES.index("link" if lane in LINKS else lane)


def span_event(
    process: int, lane: str, name: str, kind: str, begin_s: float, end_s: float, **args: Any
) -> Event:
    """Return a bar on a lane, in whole nanoseconds, so that no viewer rounds bars together."""
    return {
        "ph": "X",
        "pid": process,
        "tid": 1 + LANES.index(lane),
        "name": name,
        "cat": kind,
        "ts": _microseconds(begin_s),
        "dur": round(_microseconds(end_s) - _microseconds(begin_s), 3),
        "args": args,
    }


class _Writer:
    """Writes what nodes do on lanes."""

    def __init__(self, nodes: Sequence[fx.Node], ctx: PassContext, timeline: Timeline):
        self.nodes, self.ctx, self.timeline = nodes, ctx, timeline
        self.phases = phases_of(nodes)
        self.parameters = parameters_of(nodes, ctx.table)

    def spans(self) -> Iterator[Event]:
        for node, lane, begin_s, end_s in self.timeline.spans:
            kind, facts = self._kind(node, lane), self._facts(node, lane)
            yield span_event(PREDICTED, lane, node.name, kind, begin_s, end_s, **facts)

    def arrows(self) -> Iterator[Event]:
        """Lead an arrow from each transfer to the wait that it holds up."""
        order = {node: position for position, node in enumerate(self.nodes)}
        begins = {s.node: s for s in self.timeline.spans if s.lane not in ("compute", "waiting")}
        for span in self.timeline.spans:
            source = begins.get(span.node.args[0]) if ops.is_wait(span.node) else None
            if source is None or span.lane != "waiting":
                continue
            arrow = {"bp": "e", "id": order[span.node], "pid": PREDICTED}
            arrow |= {"name": "awaited", "cat": "awaited"}
            ends = [("s", source.lane, source.begin_s), ("f", "waiting", span.end_s - 1e-9)]
            for phase, lane, at_s in ends:
                where = {"tid": 1 + LANES.index(lane), "ts": _microseconds(max(at_s, 0.0))}
                yield {"ph": phase, **arrow, **where}

    def serves(self, node: fx.Node, most: int | None = None) -> str:
        """``bucket 2: a, b``: the parameters that a node serves, is a gradient of or reads."""
        bucket = f"bucket {bucket_of(node)}" if bucket_of(node) >= 0 else ""
        names = [self.ctx.table[index].name for index in sorted(self.parameters[node])]
        if most is not None and len(names) > most:
            names[most:] = [f"{len(names) - most} more"]
        return ": ".join(filter(None, (bucket, ", ".join(names))))

    def _facts(self, node: fx.Node, lane: str) -> dict[str, Any]:
        origin = provenance(node)
        facts = {
            "operator": _operator(node),
            "value": value_text(node.meta.get("val")),
            "parameters": self.serves(node),
            "bytes": self._carried(node, lane),
            "pass": origin.inserted_by if origin else "",
            "why": origin.reason if origin else "",
            "source": " ".join(filter(None, source_of(node))),
        }
        return {name: value for name, value in facts.items() if value}

    def _kind(self, node: fx.Node, lane: str) -> str:
        if lane == "compute":
            return self.phases[node]
        if lane not in LINKS:
            return lane
        if role(node) == Role.REDUCE_GRADIENT:
            return "reduce"
        return "gather" if ops.rules(node).gathers else "other collectives"

    def _carried(self, node: fx.Node, lane: str) -> int:
        """Return the bytes that a node puts on a lane; 0 where it moves none."""
        if node.target is ops.on_owners:
            ranks, table = self.ctx.world_size, self.ctx.table
            is_sent = lane in LINKS and journeys(node)
            return owned_bytes(node, ranks, table) if is_sent else 0
        rules = ops.rules(node)
        if lane in LINKS:
            return rules.sends(node)
        if lane != ops.lane(node) or ops.updates_on_host(node):
            return 0
        return int(rules.carries(node, self.ctx.table))


def _operator(node: fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target).removesuffix(".default")
    return getattr(node.target, "__name__", str(node.target))


def _counters(pieces: Iterable[Piece], issued_s: Sequence[float], place: str) -> Iterator[Event]:
    """Yield memory over time: in all, and by kind.

    Several nodes may run at one time, if they take none: the highest and the last are shown.
    """
    kinds = alive(pieces, len(issued_s), place)
    columns = zip(map(_microseconds, issued_s), zip(*kinds.values(), strict=True), strict=False)
    shown = None
    for at_us, group in itertools.groupby(columns, operator.itemgetter(0)):
        there = [column for _, column in group]
        for column in (max(there, key=sum), there[-1]):
            if column == shown:
                continue
            shown = column
            event = {"ph": "C", "pid": PREDICTED, "tid": 0, "ts": at_us}
            yield {**event, "name": f"{place} memory", "args": {"bytes": sum(shown)}}
            by_kind = dict(zip(kinds, shown, strict=True))
            yield {**event, "name": f"{place} memory by kind", "args": by_kind}


def _words(writer: _Writer, pieces: Sequence[Piece]) -> list[str]:
    """Describe the step, its peak with its largest tensors, and its longest waits."""
    timeline = writer.timeline
    lines = [f"A step is predicted to take {duration(timeline.step_s)}, {_waiting(timeline)}."]
    kinds = alive(pieces, len(writer.nodes))
    totals = [sum(column) for column in zip(*kinds.values(), strict=True)]
    if not any(totals):
        return [*lines, "Nothing is in memory on the device at any time."]
    peak = max(range(len(totals)), key=totals.__getitem__)
    at_s, node = timeline.issued_s[peak], writer.nodes[peak]
    share = f", {at_s / timeline.step_s:.0%} into the step" if timeline.step_s else ""
    place = f" ({_short_source(node)})" if _short_source(node) else ""
    parts = sorted(((column[peak], kind) for kind, column in kinds.items()), reverse=True)
    shares = (f"{n / totals[peak]:.1%} {kind} ({size_text(n)})" for n, kind in parts if n)
    there = [p for p in pieces if p.place == "device" and p.begin <= peak <= p.end]
    there.sort(key=lambda piece: (-piece.nbytes, piece.begin))
    rows = [
        (size_text(p.nbytes), p.kind, value_text(p.value), p.node.name,
         writer.serves(p.node, _NAMES), _short_source(p.node))
        for p in there[:_LARGEST]
    ]  # fmt: skip
    headers = ("at the peak", "kind", "tensor", "made by", "parameter", "your line")
    return [
        *lines,
        f"The peak is {size_text(totals[peak])} at {duration(at_s)}{share}, while {node.name} runs "
        f"in {writer.phases[node]}{place}.",
        f"It is {', '.join(shares)}.",
        f"Most of it is {parts[0][1]}: {LOWERED_BY[parts[0][1]]}.",
        "",
        *tabulate(rows, headers=headers, disable_numparse=True).splitlines(),
        *_longest_waits(writer),
    ]


def _waiting(timeline: Timeline) -> str:
    if not timeline.exposed_s:
        return "all of it compute"
    share = timeline.exposed_s / timeline.step_s
    return f"{duration(timeline.exposed_s)} of it ({share:.0%}) waiting"


def _longest_waits(writer: _Writer) -> list[str]:
    waits: dict[fx.Node, float] = defaultdict(float)
    for span in writer.timeline.spans:
        if span.lane == "waiting":
            waits[span.node] += span.end_s - span.begin_s
    longest = sorted(waits, key=lambda node: -waits[node])[:_LONGEST]
    if not longest:
        return []
    rows = [(duration(waits[node]), node.name, writer.serves(node, _NAMES)) for node in longest]
    return ["", *tabulate(rows, headers=("waits", "at", "for"), disable_numparse=True).splitlines()]


def _short_source(node: fx.Node) -> str:
    place, text = source_of(node)
    return " ".join(filter(None, (re.sub(r".*[\\/]", "", place), text)))


def duration(seconds: float) -> str:
    """``12.3 ms``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def _microseconds(seconds: float) -> float:
    """Microseconds, in whole nanoseconds."""
    return round(seconds * 1e6, 3)
