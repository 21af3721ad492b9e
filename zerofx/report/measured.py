"""A measured step beside the predicted one: torch's profile as a second process of a trace."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from zerofx.errors import CommandError
from zerofx.report.timeline import LANES, MEASURED, PREDICTED, duration, process_events, span_event

RANGE = "zerofx::"
"""The names of nodes' ranges begin with it."""

STEP_RANGE = "zerofx step"

PROFILE = "profile.json"
"""The file beside a dumped program to which ``zerofx.profile`` writes what it has measured."""

_LEAST_KNOWN = 0.9
"""The share of a profile's ranges that must be nodes of a program for it to be the program's."""

_HOW = (
    "run the step within zerofx.profile(step), or zerofx.named_ranges(step) and your own profiler"
)


class _Range(NamedTuple):
    """A named range of the thread that runs the step, or of what a device did for it."""

    name: str
    begin_us: float
    end_us: float
    is_on_device: bool


def add_measured(trace: dict[str, Any], path: Path) -> None:
    """Add the last step of a profile to a program's trace, in place of an earlier one.

    The profile is what ``torch.profiler`` has exported.  If it has a device's own times, these are
    drawn on the device's lanes, and the thread that runs the step on the lane ``host``.  The end of
    a transfer on the host is not measured: it is drawn to where its wait ends, and was there at the
    latest then.

    Raises: CommandError if it is no such profile, or of another program; OSError.
    """
    ranges = _ranges(path)
    host = _last_step([found for found in ranges if not found.is_on_device])
    device = _last_step([found for found in ranges if found.is_on_device])
    _check(trace, path, host)
    predicted = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == PREDICTED]
    facts = {(LANES[event["tid"] - 1], event["name"]): event for event in predicted}
    zero_us = min(found.begin_us for found in host)  # the device has the same clock
    ours = trace["zerofx"]
    ranges_of = _by_lane(ours, host, device, facts)
    lanes = {lane: list(_in_turn(ranges_of[lane], zero_us)) for lane in LANES if lane in ranges_of}
    events = []
    for lane, spans in lanes.items():
        for name, begin_s, end_s in spans:
            known = facts.get((lane, name), {"cat": lane, "args": {}})
            event = span_event(MEASURED, lane, name, known["cat"], begin_s, end_s, **known["args"])
            events.append(event)
    trace["traceEvents"] = [
        *(event for event in trace["traceEvents"] if event["pid"] != MEASURED),
        *process_events(MEASURED, f"measured: {ours['title']}", lanes),
        *events,
    ]
    took_s = max(end_s for spans in lanes.values() for _, _, end_s in spans)
    waited_s = sum(end_s - begin_s for _, begin_s, end_s in lanes.get("waiting", ()))
    words = f"Measured, it took {duration(took_s)}, {duration(waited_s)} of it waiting"
    if ours["step_s"]:
        words += f": {took_s / ours['step_s']:.3g} times what was predicted"
    ours["measured"] = f"{words}."


def _check(trace: dict[str, Any], path: Path, host: list[_Range]) -> None:
    if not host:
        raise CommandError(f"{path} has no range of a zerofx step: {_HOW}, and export that.")
    nodes = set(trace["zerofx"]["nodes"])
    unknown = [found.name for found in host if found.name not in nodes]
    if len(unknown) > (1 - _LEAST_KNOWN) * len(host):
        raise CommandError(
            f"{path} is of another program than {trace['zerofx']['title']}: {len(unknown)} of its "
            f"{len(host)} ranges are no nodes of that, {unknown[0]} for one. Dump and profile the "
            "same run."
        )


def _by_lane(
    ours: dict[str, Any], host: list[_Range], device: list[_Range], facts: Iterable[tuple]
) -> dict[str, list[_Range]]:
    """Put each range of a node on its lane."""
    nodes, waits_for = set(ours["nodes"]), ours["waits_for"]
    lane_of = {name: lane for lane, name in facts if lane not in ("compute", "waiting")}
    arrived_us = {waits_for[f.name]: f.end_us for f in host if f.name in waits_for}
    on_device = {found.name for found in device}
    lanes: dict[str, list[_Range]] = defaultdict(list)
    for found in (each for each in (*host, *device) if each.name in nodes):
        if found.is_on_device:
            lanes[lane_of.get(found.name, "compute")].append(found)
            continue
        own = "waiting" if found.name in waits_for else "host" if device else "compute"
        lanes[own].append(found)
        if found.name in lane_of and found.name not in on_device:
            end_us = arrived_us.get(found.name, found.end_us)
            lanes[lane_of[found.name]].append(found._replace(end_us=end_us))
    return lanes


def _in_turn(ranges: list[_Range], zero_us: float) -> Iterator[tuple[str, float, float]]:
    """Cut what overlaps on a lane: it does one thing after the other, and begins the next then.

    Yield names, and seconds from the first range of the step.
    """
    free_us = zero_us
    for found in sorted(ranges, key=lambda found: (found.begin_us, found.end_us)):
        begin_us = max(found.begin_us, free_us)
        if begin_us < found.end_us:
            free_us = found.end_us
            yield found.name, (begin_us - zero_us) * 1e-6, (free_us - zero_us) * 1e-6


def _ranges(path: Path) -> list[_Range]:
    """Read the ranges of zerofx in a profile, in order of time."""
    try:
        data = path.read_bytes()
        document = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (ValueError, EOFError, gzip.BadGzipFile) as error:
        raise CommandError(f"{path} is no trace ({error}): {_HOW}, and export that.") from None
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise CommandError(f"{path} is no trace (it has no traceEvents): {_HOW}, and export that.")
    return sorted(_found(events), key=lambda found: (found.begin_us, -found.end_us))


def _found(events: Iterable[Any]) -> Iterable[_Range]:
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        name, begin_us, took_us = event.get("name"), event.get("ts"), event.get("dur")
        if not isinstance(name, str) or not name.startswith((RANGE, STEP_RANGE)):
            continue
        if isinstance(begin_us, int | float) and isinstance(took_us, int | float):
            is_on_device = event.get("cat") == "gpu_user_annotation"
            yield _Range(name.removeprefix(RANGE), begin_us, begin_us + took_us, is_on_device)


def _last_step(ranges: list[_Range]) -> list[_Range]:
    """Return the ranges within the last range of a step."""
    steps = [found for found in ranges if found.name == STEP_RANGE]
    if not steps:
        return []
    last = steps[-1]
    inside = (f for f in ranges if last.begin_us <= f.begin_us and f.end_us <= last.end_us)
    return [found for found in inside if found.name != STEP_RANGE]
