"""A record as one SVG picture: for papers and pages, and for who reads without scripts."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Sequence
from html import escape as escape_html

from zerofx.report.timeline import colours
from zerofx.report.timeline.record import KINDS, LANES, Busy, StepRecord
from zerofx.report.timeline.words import duration, peak_of, size, step_sentence

WIDTH = 1000
LEFT, RIGHT = 122, 14
PLOT = WIDTH - LEFT - RIGHT
MEMORY = {"device": 210, "host": 56}
LANE, MEASURED_LANE = 20, 15
NAMED = 4
"""How many pixels wide a bar is that says which node it is."""

_STYLE = """
.ground { fill: #ffffff } .track { fill: #eceff2 } text { fill: #1c2024 } .muted { fill: #5c656e }
.grid { stroke: #d8dce1 } .seam { stroke: #ffffff } .peak { fill: #b3261e } .at { stroke: #b3261e }
@media (prefers-color-scheme: dark) {
.ground { fill: #14171a } .track { fill: #22272c } text { fill: #e3e6e9 } .muted { fill: #9aa4ae }
.grid { stroke: #363c43 } .seam { stroke: #14171a } .peak { fill: #ff8a80 } .at { stroke: #ff8a80 }
}
text { font: 11px system-ui, "Segoe UI", "DejaVu Sans", sans-serif } .bold { font-weight: 650 }
.title { font-size: 14px; font-weight: 650 }
"""


def svg_of(record: StepRecord, *, measured: Sequence[Busy] = ()) -> str:
    """The picture, of a size that depends on its pixels and not on the program's nodes.

    ``measured`` are spans that were measured of the same nodes, to be drawn below the predicted.
    """
    end_s = max([record.end_s, *(span.end_s for span in measured)])
    parts = [
        f'<text class="title" x="10" y="20">{escape(f"{record.title}: {record.program}")}</text>',
        f'<text class="muted" x="10" y="37">rank {record.rank} of {record.world_size}. '
        f"{escape(step_sentence(record))}</text>",
    ]
    y = 50
    for place, height in MEMORY.items():
        if place == "device" or any(record.alive(place)):
            parts += _memory(record, place, y, height, end_s)
            y += height + 14
    lanes = {span.lane for span in measured} | set(record.lanes)
    for lane in LANES:
        if lane not in lanes or lane == "waiting":
            continue
        parts += _lane(record, lane, record.spans, y, LANE, end_s)
        parts.append(f'<text class="bold" x="10" y="{y + 14}">{lane}</text>')
        y += LANE + 5
        below = [span for span in measured if _row(span.lane) == lane]
        if below:
            parts += _lane(record, lane, below, y - 3, MEASURED_LANE, end_s)
            parts.append(f'<text class="muted" x="20" y="{y + 8}">measured</text>')
            y += MEASURED_LANE + 4
    parts += _axis(y, end_s)
    y += 36
    keys, y = _legend(record, measured, y)
    parts += keys
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img">\n'
        f"<title>{escape(f'{record.title}: {record.program}')}</title>\n"
        f"<style>{_STYLE}</style>\n{_HATCH}\n"
        f'<rect class="ground" width="{WIDTH}" height="{y}"/>\n{body}\n</svg>\n'
    )


_HATCH = (
    '<defs><pattern id="waiting" width="5" height="5" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="1.6" height="5" '
    f'fill="{colours.WAITING}"/></pattern></defs>'
)


def _row(lane: str) -> str:
    """The row that a lane is drawn in."""
    return "compute" if lane == "waiting" else lane


def _fill(work: str) -> str:
    return "url(#waiting)" if work == "waiting" else colours.WORK[work]


def _memory(record: StepRecord, place: str, y: int, height: int, end_s: float) -> list[str]:
    """The stack of a place's kinds, for each pixel where most is in memory."""
    total = record.total(place)
    most = max(total, default=0) * 1.08 or 1.0
    bottom = y + height
    parts = [
        f'<rect class="track" x="{LEFT}" y="{y}" width="{PLOT}" height="{height}"/>',
        f'<text class="bold" x="10" y="{y + 10}">{place}</text>',
        f'<text class="bold" x="10" y="{y + 23}">memory</text>',
    ]
    step = 2.0  # of nothing, more than there is
    if any(total):
        step = 2.0 ** math.ceil(math.log2(most / (6 if height > 100 else 2)))
    for number in range(int(most / step) + 1):
        at = bottom - number * step / most * height
        words = round_size(number * step) if number else "0"
        parts.append(f'<path class="grid" d="M{LEFT} {at:.1f}h{PLOT}"/>')
        parts.append(
            f'<text class="muted" text-anchor="end" x="{LEFT - 6}" y="{at + 4:.1f}">{words}</text>'
        )
    columns = _highest(record, total, end_s)
    below = [0.0] * len(columns)
    for kind, alive in record.alive(place).items():
        above = [low + alive[at] for low, at in zip(below, columns, strict=True)]
        upper = [bottom - value / most * height for value in above]
        lower = [bottom - value / most * height for value in below]
        path = f"M{LEFT} {lower[0]:.1f}{_steps(upper)}{_steps(lower, backwards=True)}Z"
        parts.append(f'<path class="seam" stroke-width=".5" fill="{colours.KINDS[kind]}" '
                     f'd="{path}"><title>{kind}</title></path>')  # fmt: skip
        below = above
    peak = peak_of(record)
    if place == "device" and peak is not None:
        x = LEFT + (peak.at_s / end_s * PLOT if end_s else 0)
        at = bottom - peak.nbytes / most * height
        words = f"peak {size(peak.nbytes)} at {duration(peak.at_s)}"
        side, by = ("end", -7) if x > WIDTH - 200 else ("start", 7)
        parts += [
            f'<path class="at" stroke-dasharray="4 3" d="M{LEFT} {at:.1f}h{PLOT}"/>',
            f'<circle class="peak" cx="{x:.1f}" cy="{at:.1f}" r="3"/>',
            f'<text class="peak bold" text-anchor="{side}" x="{x + by:.1f}" y="{at - 4:.1f}">'
            f"{words}</text>",
        ]
    return parts


def _steps(heights: Sequence[float], backwards: bool = False) -> str:
    """A path along columns one pixel wide, with a point only where the height changes."""
    order = range(len(heights) - 1, -1, -1) if backwards else range(len(heights))
    path, last = [], None
    for x in order:
        here = f"{heights[x]:.1f}"
        if here != last:
            path.append(f"H{LEFT + x + (1 if backwards else 0)}V{here}")
            last = here
    return "".join(path) + f"H{LEFT if backwards else LEFT + len(heights)}"


def _highest(record: StepRecord, total: Sequence[int], end_s: float) -> list[int]:
    """For each pixel, the node at which most is in memory; nothing for an empty program."""
    begins = [node.issued_s for node in record.nodes]
    if not begins:
        return []
    columns = []
    position = 0
    for x in range(PLOT):
        until = bisect_right(begins, (x + 1) / PLOT * end_s) if x + 1 < PLOT else len(begins)
        until = max(until, position + 1)
        columns.append(max(range(position, until), key=total.__getitem__))
        position = until - 1
    return columns


def _lane(
    record: StepRecord, lane: str, spans: Sequence[Busy], y: int, height: int, end_s: float
) -> list[str]:
    """A lane's bars; where they are narrower than a pixel, how much of it they fill."""
    parts = [f'<rect class="track" x="{LEFT}" y="{y}" width="{PLOT}" height="{height}"/>']
    shapes: dict[tuple[str, float], list[tuple[float, float]]] = {}  # by what, and how densely
    filled: dict[int, dict[str, float]] = {}  # pixel -> what is done there, and in how much of it
    for span in spans:
        if _row(span.lane) != lane:
            continue
        node = record.nodes[span.node]
        work = colours.work_of(span, node)
        begin, end = (seconds / end_s * PLOT for seconds in (span.begin_s, span.end_s))
        if end - begin < 1:
            pixel = filled.setdefault(int(begin), {})
            pixel[work] = pixel.get(work, 0.0) + end - begin
            continue
        if end - begin < NAMED:
            shapes.setdefault((work, 1.0), []).append((begin, end - begin))
            continue
        words = f"{node.name}: {duration(span.end_s - span.begin_s)}"
        parts.append(
            f'<rect x="{LEFT + begin:.1f}" y="{y}" width="{end - begin - 0.4:.1f}" '
            f'height="{height}" fill="{_fill(work)}"><title>{escape(words)}</title></rect>'
        )
    for x, works in filled.items():
        share = round(min(0.3 + 0.7 * sum(works.values()), 1.0), 1)
        shapes.setdefault((max(works, key=works.__getitem__), share), []).append((x, 1))
    for (work, share), bars in shapes.items():
        path = "".join(f"M{LEFT + x:.1f} {y}h{wide:.1f}v{height}h-{wide:.1f}z" for x, wide in bars)
        parts.append(f'<path fill="{_fill(work)}" fill-opacity="{share}" d="{path}"/>')
    return parts


def _axis(y: int, end_s: float) -> list[str]:
    if not end_s:
        return [f'<text class="muted" x="{LEFT}" y="{y + 12}">Nothing takes any time.</text>']
    least = end_s / 8
    power = 10.0 ** math.floor(math.log10(least))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= least * 0.999)
    parts = []
    for number in range(int(end_s / step + 1e-9) + 1):
        x = LEFT + number * step / end_s * PLOT
        side = "end" if x > WIDTH - RIGHT - 8 else "middle"
        parts.append(f'<path class="grid" d="M{x:.1f} {y}v5"/>')
        parts.append(
            f'<text class="muted" text-anchor="{side}" x="{x:.1f}" y="{y + 17}">'
            f"{duration(number * step)}</text>"
        )
    return parts


def _legend(record: StepRecord, measured: Sequence[Busy], y: int) -> tuple[list[str], int]:
    """Rows for kinds of memory and for what lanes do, of those that there are; where they end."""
    there = {kind for place in KINDS for kind in record.alive(place)}
    done = {colours.work_of(span, record.nodes[span.node]) for span in (*record.spans, *measured)}
    kinds = [(kind, colour) for kind, colour in colours.KINDS.items() if kind in there]
    works = [(work, _fill(work)) for work in colours.WORK if work in done]
    parts = []
    for name, keys in (("memory", kinds), ("lanes", works)):
        parts.append(f'<text class="muted" x="10" y="{y + 9}">{name}</text>')
        x = 70.0
        for words, colour in keys:
            wide = 30 + 6.3 * len(words)
            if x + wide > WIDTH:
                x, y = 70.0, y + 17
            parts.append(f'<rect x="{x:.0f}" y="{y}" width="10" height="10" fill="{colour}"/>')
            parts.append(f'<text x="{x + 14:.0f}" y="{y + 9}">{words}</text>')
            x += wide
        y += 19
    return parts, y + 4


def escape(words: str) -> str:
    """Words as XML takes them, which has no character at all for some."""
    return escape_html(_NOT_XML.sub("\ufffd", words))


_NOT_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def round_size(nbytes: float) -> str:
    """``2.5 GiB``, as people write round numbers."""
    number, unit = size(nbytes).split(" ")
    return f"{float(number):g} {unit}"
