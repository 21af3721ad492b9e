"""What a record says, in words: its peak of memory, what it waits for, sizes and times."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from zerofx.report.timeline.record import Busy, Memory, StepRecord

LARGEST = 10
"""How many tensors a table of the peak names."""

_REMEDIES = {
    "parameters": "stage 3 keeps a shard of them, and offload=params keeps that in host memory",
    "optimizer states": "stage 1 keeps a shard of them, and offload=optimizer keeps that in host "
    "memory",
    "inputs": "a smaller batch lowers them",
    "gathered parameters": "a memory_budget or smaller bucket_bytes gathers less at once",
    "gradients": "stage 2 keeps a shard of them, and update_in_backward frees each one early",
    "activations": "recompute with a memory_budget, offload=activations or a smaller batch lowers "
    "them",
    "temporaries": "a smaller batch lowers them, or a loss that is computed in pieces",
    "staging": "smaller bucket_bytes lower it",
}


@dataclass(frozen=True)
class Peak:
    """The moment when most is in memory on the device.

    ``position`` is the node that runs then; ``kinds`` are bytes by kind, most first; ``largest``
    are the tensors that take most, of ``count`` in all.
    """

    position: int
    at_s: float
    nbytes: int
    kinds: tuple[tuple[str, int], ...]
    largest: tuple[Memory, ...]
    count: int


@dataclass(frozen=True)
class Row:
    """One tensor of a peak's table, ready to print."""

    size: str
    kind: str
    value: str
    made_by: str
    serves: str
    alive: str
    source: str


def peak_of(record: StepRecord) -> Peak | None:
    """The first moment when most is in memory on the device; None if nothing ever is."""
    total = record.total()
    if not any(total):
        return None
    position = max(range(len(total)), key=total.__getitem__)
    kinds = ((kind, alive[position]) for kind, alive in record.alive().items())
    there = record.alive_at(position)
    return Peak(
        position,
        record.nodes[position].issued_s,
        total[position],
        tuple(sorted(((k, n) for k, n in kinds if n), key=lambda entry: -entry[1])),
        tuple(there[:LARGEST]),
        len(there),
    )


def peak_sentences(record: StepRecord) -> list[str]:
    """When the peak is, what runs then, what it consists of, and what would lower it."""
    peak = peak_of(record)
    if peak is None:
        return ["Nothing is in memory on the device at any time."]
    node = record.nodes[peak.position]
    share = f", {peak.at_s / record.step_s:.0%} into the step" if record.step_s else ""
    where = f" ({short_source(node.source)})" if node.source else ""
    parts = [f"{share_of(n, peak.nbytes)} {kind} ({size(n)})" for kind, n in peak.kinds]
    most, _ = peak.kinds[0]
    largest = sum(piece.nbytes for piece in peak.largest)
    shown = "The largest tensor holds" if len(peak.largest) == 1 else (
        f"The {len(peak.largest)} largest of {peak.count} tensors hold"
    )  # fmt: skip
    return [
        f"The peak is {size(peak.nbytes)} at {duration(peak.at_s)}{share}, while {node.name} runs "
        f"in {node.phase}{where}.",
        f"It is {listed(parts)}.",
        f"{shown} {share_of(largest, peak.nbytes)} of it.",
        f"Most of it is {most}: {_REMEDIES[most]}.",
    ]


def rows_of(record: StepRecord, pieces: Sequence[Memory]) -> list[Row]:
    """One row for each of these tensors."""
    rows = []
    for piece in pieces:
        node = record.nodes[piece.node]
        rows.append(
            Row(
                size(piece.nbytes),
                piece.kind,
                piece.value,
                node.name,
                record.for_whom(node),
                _alive(record, piece),
                node.source,
            )
        )
    return rows


def _alive(record: StepRecord, piece: Memory) -> str:
    last = len(record.nodes) - 1
    if piece.begin == 0 and piece.end == last:
        return "always"
    begin_s = record.nodes[piece.begin].issued_s
    end_s = record.nodes[piece.end].issued_s
    return f"{duration(begin_s)} – {duration(end_s)}"


@dataclass(frozen=True)
class Wait:
    """A node at which compute has nothing to do but to wait.  Units: seconds."""

    seconds: float
    node: int


def longest_waits(record: StepRecord, most: int = LARGEST) -> list[Wait]:
    """The nodes that compute waits at, the longest first."""
    waits: dict[int, float] = {}
    for span in record.spans:
        if span.lane == "waiting":
            waits[span.node] = waits.get(span.node, 0.0) + span.end_s - span.begin_s
    ordered = sorted(waits.items(), key=lambda entry: (-entry[1], entry[0]))
    return [Wait(seconds, node) for node, seconds in ordered[:most]]


def step_sentence(record: StepRecord) -> str:
    """How long the step takes, how much of that it waits, and what no schedule beats."""
    words = f"A step is predicted to take {duration(record.step_s)}"
    if not record.exposed_s:
        words += ", all of it compute"
    else:
        words += (
            f": {duration(record.compute_s)} of compute and {duration(record.exposed_s)} "
            f"({record.exposed_s / record.step_s:.0%}) of waiting"
        )
    return f"{words}. No schedule of its nodes beats {duration(record.bound_s)}."


def measured_sentence(record: StepRecord, measured: Sequence[Busy]) -> str:
    """How long the step took, and how that compares with what was predicted."""
    step_s = max(span.end_s for span in measured)
    words = f"Measured, it took {duration(step_s)}"
    waited_s = _busy_s(measured, "waiting")
    compute_s = _busy_s(measured, "compute")
    words += f": {duration(compute_s)} of compute and {duration(waited_s)} of waiting"
    if record.step_s:
        words += f", {step_s / record.step_s:.3g} times what was predicted"
    return words + "."


def _busy_s(spans: Sequence[Busy], lane: str) -> float:
    return sum(span.end_s - span.begin_s for span in spans if span.lane == lane)


def size(nbytes: float) -> str:
    """``1.23 GiB``."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= scale:
            value = nbytes / scale
            return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f} {unit}"
    return f"{nbytes:.0f} B"


def duration(seconds: float) -> str:
    """``12.3 ms``."""
    if seconds <= 0:
        return "0"
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def share_of(part: float, whole: float) -> str:
    """``37%``, and ``under 1%`` for what is there but is less."""
    if 0 < part < 0.01 * whole:
        return "under 1%"
    return f"{part / whole:.0%}" if whole else "0%"


def short_source(source: str) -> str:
    """``train.py:12 loss.backward()``: a line of source with its file's name alone."""
    place = re.match(r".*?:\d+(?=[: ]|$)", source)
    end = place.end() if place else 0
    return f"{source[:end].replace(chr(92), '/').rpartition('/')[2]}{source[end:]}"


def listed(parts: Sequence[str]) -> str:
    """``a, b and c``."""
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} and {parts[-1]}"
