"""What a profiler has measured of a step, as spans of its record's nodes."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from zerofx.errors import CommandError
from zerofx.report.timeline.record import Busy, StepRecord

RANGE = "zerofx::"
"""What the names of nodes' ranges begin with."""

STEP_RANGE = "zerofx step"

LEAST_KNOWN = 0.9
"""The share of a trace's ranges that must be nodes of a program for it to be the trace's."""

TRACE = "trace.json"
"""What a run has measured of a program, beside its dump."""

HOW = "run the step within zerofx.profile(step), or zerofx.named_ranges(step) and your own profiler"


class _Range(NamedTuple):
    """A named range, of the thread that runs the step or of what a device did for it."""

    name: str
    begin_us: float
    end_us: float
    is_on_device: bool


def measured_spans(record: StepRecord, path: Path) -> list[Busy]:
    """The last step of a trace that ``torch.profiler`` has exported, as spans of these nodes.

    Of a node that a device works for, what the device took counts; else the thread that runs the
    step.  Nobody measures when a transfer on the host arrives: it is drawn from its start to where
    its wait is over, and is there at the latest then.

    Raises: CommandError if it is no such trace, or of another program; OSError.
    """
    ranges = _ranges(path)
    own = _last_step([found for found in ranges if not found.is_on_device])
    on_device = _last_step([found for found in ranges if found.is_on_device])
    if not own:
        raise CommandError(f"{path} has no range of a zerofx step: {HOW}, and export that.")
    position = {node.name: number for number, node in enumerate(record.nodes)}
    unknown = [found.name for found in own if found.name not in position]
    if len(unknown) > (1 - LEAST_KNOWN) * len(own):
        raise CommandError(
            f"{path} is of another program than {record.program}: {len(unknown)} of its {len(own)} "
            f"ranges are no nodes of that, {unknown[0]} for one. Dump and profile the same run."
        )
    # Host and device have one clock in a trace; a device is busy later than it is told to be.
    zero_us = min(found.begin_us for found in own)

    def seconds(us: float) -> float:
        return max(us - zero_us, 0.0) * 1e-6

    lanes = {span.node: span for span in record.spans if span.lane not in ("compute", "waiting")}
    arrived_us = {
        record.nodes[position[found.name]].waits_for: found.end_us
        for found in own
        if found.name in position
    }
    worked_for = {found.name for found in on_device}
    spans = []
    for found in (*own, *on_device):
        node = position.get(found.name)
        if node is None or (not found.is_on_device and found.name in worked_for):
            continue
        begin_s, end_s = seconds(found.begin_us), seconds(found.end_us)
        transfer = lanes.get(node)
        if found.is_on_device and transfer is not None:
            spans.append(Busy(node, transfer.lane, begin_s, end_s, transfer.nbytes))
            continue
        lane = "waiting" if record.nodes[node].waits_for >= 0 else "compute"
        spans.append(Busy(node, lane, begin_s, end_s, 0))
        if transfer is not None:
            arrived_s = seconds(arrived_us.get(node, found.end_us))
            spans.append(Busy(node, transfer.lane, begin_s, arrived_s, transfer.nbytes))
    return spans


def _ranges(path: Path) -> list[_Range]:
    """The ranges of zerofx in a trace, in order of time."""
    try:
        data = path.read_bytes()
        text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        document = json.loads(text)
    except (ValueError, EOFError, gzip.BadGzipFile) as error:
        raise CommandError(f"{path} is no trace ({error}): {HOW}, and export that.") from None
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise CommandError(f"{path} is no trace (it has no traceEvents): {HOW}, and export that.")
    return sorted(_found(events), key=lambda found: (found.begin_us, -found.end_us))


def _found(events: Iterable[Any]) -> Iterable[_Range]:
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        name, begin_us, took_us = event.get("name"), event.get("ts"), event.get("dur")
        if not isinstance(name, str) or not name.startswith((RANGE, STEP_RANGE)):
            continue
        if not isinstance(begin_us, (int, float)) or not isinstance(took_us, (int, float)):
            continue
        is_on_device = event.get("cat") == "gpu_user_annotation"
        yield _Range(name.removeprefix(RANGE), begin_us, begin_us + took_us, is_on_device)


def _last_step(ranges: list[_Range]) -> list[_Range]:
    """The ranges within the last range of a step."""
    steps = [found for found in ranges if found.name == STEP_RANGE]
    if not steps:
        return []
    last = steps[-1]
    return [
        found
        for found in ranges
        if found.name != STEP_RANGE
        and last.begin_us <= found.begin_us
        and found.end_us <= last.end_us
    ]
