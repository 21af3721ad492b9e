"""A record as one HTML page that needs nothing else: no network, no other file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

from zerofx.report.timeline import colours
from zerofx.report.timeline.record import KINDS, LANES, Busy, StepRecord, columns_of
from zerofx.report.timeline.words import (
    LARGEST,
    duration,
    longest_waits,
    measured_sentence,
    peak_of,
    peak_sentences,
    rows_of,
    short_source,
    size,
    step_sentence,
)

SCRIPTS = ("data.js", "draw.js", "page.js")


def page_of(
    record: StepRecord,
    *,
    measured: Sequence[Busy] = (),
    before: str = "",
    after: str = "",
) -> str:
    """The page, with links to the pages of the programs before and after this one if there are.

    ``measured`` are spans that were measured of the same nodes, to be drawn below the predicted.
    """
    assets = files("zerofx.report.timeline") / "assets"
    style = (assets / "page.css").read_text(encoding="utf-8")
    script = "\n".join((assets / name).read_text(encoding="utf-8") for name in SCRIPTS)
    title = f"{record.title}: {record.program}"
    rank = f"rank {record.rank} of {record.world_size}"
    sentences = [step_sentence(record)]
    if measured:
        sentences.append(measured_sentence(record, measured))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<header><h1>{escape(title)}</h1><span class="under">{escape(rank)}</span>
<nav>{_link(before, "‹ before")}{_link(after, "after ›")}</nav></header>
<p class="under">{escape(" ".join(sentences))} Predicted with {escape(record.figures)}.</p>
<div class="tiles">{_tiles(record, measured)}</div>
{_BAR}
<canvas id="chart" role="img" aria-label="Memory by kind, and what each lane does, over one step">
</canvas>
{_legend(record, measured)}
{_HINT}
<div id="tip" role="tooltip"></div>
<div id="pinned" class="pinned" aria-live="polite"></div>
<noscript><p>The chart needs JavaScript; the SVG file next to this page does not.</p></noscript>
<h2>What is in memory</h2>
{"".join(f"<p>{escape(sentence)}</p>" for sentence in peak_sentences(record))}
{_tensors(record)}
<h2>What the step waits for</h2>
{_waits(record)}
<script type="application/json" id="record">{_data(record, measured)}</script>
<script>
(function () {{
"use strict";
{script}
}})();
</script>
</body>
</html>
"""


_BAR = """<div class="bar">
<input type="search" id="search" aria-label="find nodes"
 placeholder="find a node, parameter, file or line">
<button id="in" title="zoom in (+)">+</button><button id="out" title="zoom out (-)">−</button>
<button id="all" title="the whole step (0)">whole step</button>
<button id="to-peak" title="zoom to the peak (p)">peak</button>
<button id="by-time" aria-pressed="true" title="the axis is time">by time</button>
<button id="by-order" aria-pressed="false" title="the axis is the program: every node as wide"
>by node</button>
<span id="found"></span>
</div>"""

_HINT = """<p class="hint">Drag to zoom in, double-click for the whole step; <kbd>ctrl</kbd> + wheel
zooms, <kbd>shift</kbd> + wheel or <kbd>←</kbd> <kbd>→</kbd> pan. Hover for a node and your line,
click to keep it; a click on memory lists what is there. Press a kind of memory to leave it
out.</p>"""


def _link(address: str, words: str) -> str:
    return f'<a href="{escape(address)}">{words}</a>' if address else ""


def _tiles(record: StepRecord, measured: Sequence[Busy]) -> str:
    peak = peak_of(record)
    tiles = [
        (duration(record.step_s), "step, predicted"),
        (duration(record.compute_s), "compute"),
        (duration(record.exposed_s), "waiting for transfers"),
        (duration(record.bound_s), "no schedule beats"),
        (size(peak.nbytes if peak else 0), "peak of device memory"),
    ]
    if measured:
        tiles.insert(1, (duration(max(span.end_s for span in measured)), "step, measured"))
    return "".join(
        f'<div class="tile"><b>{value}</b><span>{of}</span></div>' for value, of in tiles
    )


def _swatch(colour: str) -> str:
    if colour == colours.WAITING:
        return '<span class="swatch waiting"></span>'
    return f'<span class="swatch" style="background:{colour}"></span>'


def _legend(record: StepRecord, measured: Sequence[Busy]) -> str:
    """The kinds of memory, to be pressed, and what the lanes do."""
    there = {kind for place in KINDS for kind in record.alive(place)}
    kinds = "".join(
        f'<button data-kind="{kind}" aria-pressed="true">{_swatch(colour)}{kind}</button>'
        for kind, colour in colours.KINDS.items()
        if kind in there
    )
    done = {colours.work_of(span, record.nodes[span.node]) for span in (*record.spans, *measured)}
    works = "".join(
        f'<span class="key">{_swatch(colour)}{work}</span>'
        for work, colour in colours.WORK.items()
        if work in done
    )
    return (
        f'<div class="legend"><span class="of">memory</span>{kinds}</div>'
        f'<div class="legend"><span class="of">lanes</span>{works}</div>'
    )


def _tensors(record: StepRecord) -> str:
    peak = peak_of(record)
    rows = []
    for row in rows_of(record, peak.largest if peak else ()):
        kind = f"{_swatch(colours.KINDS[row.kind])}{row.kind}"
        rows.append(
            f'<tr><td class="size">{row.size}</td><td class="nowrap">{kind}</td>'
            f'<td class="nowrap"><code>{escape(row.value)}</code></td>'
            f"<td><code>{escape(row.made_by)}</code></td>"
            f'<td>{escape(row.serves)}</td><td class="nowrap">{row.alive}</td>'
            f"<td><code>{escape(short_source(row.source))}</code></td></tr>"
        )
    heads = ("size", "kind", "tensor", "made by", "parameter", "alive", "your line")
    return (
        '<p><span id="moment">At the peak</span> <button id="back" hidden>back to the peak</button>'
        f'</p><div class="scroll"><table>{_heads(heads)}<tbody id="tensors">{"".join(rows)}</tbody>'
        "</table></div>"
    )


def _waits(record: StepRecord) -> str:
    waits = longest_waits(record)
    if not waits:
        return "<p>For nothing: all that travels does so while it computes.</p>"
    rows = []
    for wait in waits:
        node = record.nodes[wait.node]
        start = record.nodes[node.waits_for].name if node.waits_for >= 0 else ""
        rows.append(
            f'<tr><td class="size">{duration(wait.seconds)}</td>'
            f'<td class="nowrap">{duration(node.issued_s)}</td>'
            f"<td><code>{escape(node.name)}</code></td><td><code>{escape(start)}</code></td>"
            f"<td>{escape(record.for_whom(node))}</td><td>{escape(node.why)}</td></tr>"
        )
    heads = ("waits", "at", "node", "for what it starts at", "parameter", "by pass")
    return f'<div class="scroll"><table>{_heads(heads)}<tbody>{"".join(rows)}</tbody></table></div>'


def _heads(names: Iterable[str]) -> str:
    cells = "".join(
        f'<th class="size">{name}</th>' if name in ("size", "waits") else f"<th>{name}</th>"
        for name in names
    )
    return f"<thead><tr>{cells}</tr></thead>"


def _data(record: StepRecord, measured: Sequence[Busy]) -> str:
    """What the script reads, as JSON that cannot end its element whatever a name contains."""
    works = list(colours.WORK)

    def done_by(spans: Iterable[Busy]) -> list[int]:
        return [works.index(colours.work_of(span, record.nodes[span.node])) for span in spans]

    peak = peak_of(record)
    lanes = set(record.lanes) | {span.lane for span in measured}
    document, measured_columns = columns_of(record, measured)
    given = {
        "record": document,
        "kinds": KINDS,
        "colours": {"kinds": colours.KINDS, "work": colours.WORK},
        "works": works,
        "work": done_by(record.spans),
        "lanes": [lane for lane in LANES if lane in lanes and lane != "waiting"],
        "measured": {**measured_columns, "work": done_by(measured)} if measured else None,
        "end_s": max([record.end_s, *(span.end_s for span in measured)]),
        "peak": peak.position if peak else -1,
        "largest": LARGEST,
    }
    text = json.dumps(given, ensure_ascii=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
