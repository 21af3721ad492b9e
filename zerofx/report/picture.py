"""A trace as one PNG: memory by kind above the lanes, measured lanes below the predicted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerofx.cost.traffic import size_text
from zerofx.report.folder import written_anew
from zerofx.report.memory import KINDS
from zerofx.report.timeline import LANES, MEASURED, PREDICTED, Event, duration, place_of

MISSING = (
    "no picture is drawn, for matplotlib is not installed (pip install 'zerofx[pictures]'); "
    "https://ui.perfetto.dev opens the trace"
)

MEMORY = {
    "parameters": "#0072b2",
    "optimizer states": "#56b4e9",
    "errors of wires": "#332288",
    "inputs": "#8c8c8c",
    "gathered parameters": "#e69f00",
    "gradients": "#d55e00",
    "activations": "#009e73",
    "temporaries": "#cc79a7",
    "staging": "#f0e442",
}
"""Colours that people with any colour vision tell apart (Okabe and Ito 2008)."""

WORK = {
    "forward": "#009e73",
    "backward": "#cc79a7",
    "recompute": "#7fcdb8",
    "update": "#0072b2",
    "waiting": "#d0d0d0",
    "gather": "#e69f00",
    "reduce": "#d55e00",
    "other collectives": "#8c8c8c",
    "to host": "#56b4e9",
    "to device": "#e69f00",
    "updates": "#0072b2",
    "files": "#f0e442",
    "host": "#8c8c8c",
}


def draw(trace: dict[str, Any], path: Path) -> None:
    """Draw a trace to a PNG file.  Raises: ImportError without matplotlib; OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    events = trace["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    there = {*map(_row, spans)} or {("compute", PREDICTED)}
    rows = sorted(there, key=lambda row: (place_of(row[0]), row))
    ends_us = [event["ts"] + event.get("dur", 0) for event in events if "ts" in event]
    end_us = max([*ends_us, trace["zerofx"]["step_s"] * 1e6, 1e-3])
    named = {place: f"{place} memory by kind" for place in KINDS}
    counted = {place: [e for e in events if e["name"] == named[place]] for place in KINDS}
    places = [place for place in KINDS if counted[place]]
    heights = [3.0 if place == "device" else 1.0 for place in places] + [0.3 * len(rows) + 0.2]
    figure = Figure(figsize=(11, sum(heights) + 1.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(
        len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    for place, axis in zip(places, axes, strict=False):
        _draw_memory(axis, counted[place], place, end_us)
    _draw_lanes(axes[-1], spans, rows)
    axes[-1].set_xlim(0, end_us)
    axes[-1].xaxis.set_major_formatter(lambda us, _: duration(us * 1e-6))
    ours = trace["zerofx"]
    words = ours["words"][0], ours.get("measured"), ours["hardware"]
    figure.suptitle(ours["title"], fontsize=11)
    figure.supxlabel("\n".join(filter(None, words)), fontsize=8)
    with written_anew(path) as part:
        figure.savefig(part, format="png", dpi=100)


def mark_bytes(axis: Any, most: int, ticks: int) -> None:
    """Put at most so many ticks on an axis of bytes, at multiples of a power of two."""
    from matplotlib.ticker import MultipleLocator

    axis.set_major_locator(MultipleLocator(2.0 ** math.ceil(math.log2(most / ticks))))
    axis.set_major_formatter(lambda nbytes, _: size_text(int(nbytes)).replace(".00", ""))


def _draw_memory(axis: Any, counted: Sequence[Event], place: str, end_us: float) -> None:
    kinds = [kind for kind in KINDS[place] if kind in counted[0]["args"]]
    times = [*(event["ts"] for event in counted), end_us]
    columns = [[event["args"][kind] for event in (*counted, counted[-1])] for kind in kinds]
    colours = [MEMORY[kind] for kind in kinds]
    for area in axis.stackplot(times, columns, step="post", labels=kinds, colors=colours):
        area.set_edgecolor("face")  # so that a peak of no duration can be seen
    totals = [sum(column) for column in zip(*columns, strict=True)]
    peak = max(range(len(totals)), key=totals.__getitem__)
    axis.plot(times[peak], totals[peak], "v", color="black", markersize=5)
    on_left = times[peak] < end_us / 2
    axis.annotate(
        f"{size_text(totals[peak])} at {duration(times[peak] * 1e-6)}",
        (times[peak], totals[peak]),
        xytext=(6 if on_left else -6, 6),
        textcoords="offset points",
        ha="left" if on_left else "right",
        fontsize=8,
    )
    room, ticks = (1.15, 6) if place == "device" else (1.4, 3)
    axis.set_ylim(0, room * max(totals))
    mark_bytes(axis.yaxis, max(totals), ticks)
    axis.set_ylabel(f"{place} memory", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, reverse=True)


def _row(span: Event) -> tuple[str, int]:
    """Return the lane and the process that a span is drawn on: waiting is drawn with compute."""
    lane = LANES[span["tid"] - 1]
    return "compute" if lane == "waiting" else lane, span["pid"]


def _draw_lanes(axis: Any, spans: Sequence[Event], rows: Sequence[tuple[str, int]]) -> None:
    for work, colour in WORK.items():
        label: str | None = work
        of_work = [span for span in spans if span["cat"] == work]
        for position, row in enumerate(rows):
            if bars := [(span["ts"], span["dur"]) for span in of_work if _row(span) == row]:
                axis.broken_barh(bars, (position - 0.4, 0.8), facecolors=colour, label=label)
                label = None
    names = [f"{lane}{', measured' if of == MEASURED else ''}" for lane, of in rows]
    axis.set_yticks(range(len(rows)), names, fontsize=8)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.tick_params(axis="x", labelsize=8)
    if spans:
        axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
