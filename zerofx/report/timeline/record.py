"""One step in plain data: when each node runs, which lanes it keeps busy, what is in memory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from zerofx.errors import CommandError

FORMAT = "zerofx timeline"
VERSION = 1
SUFFIX = ".timeline.json"

PHASES = ("forward", "backward", "recompute", "update")

LANES = ("compute", "waiting", "link", "to host", "to device", "updates", "files")
"""What can be busy, in the order in which it is drawn; ``waiting`` is compute's with no work."""

DEVICE = (
    "parameters",
    "optimizer states",
    "inputs",
    "gathered parameters",
    "gradients",
    "activations",
    "temporaries",
    "staging",
)
"""Kinds of memory on the device, from the bottom of the stack to its top."""

HOST = ("parameters", "optimizer states", "staging")
"""Kinds of memory on the host that programs use for what leaves the device."""

KINDS = {"device": DEVICE, "host": HOST}


class Node(NamedTuple):
    """One node of the program, and why it is there.

    ``parameters`` are positions in the record's, of those that it serves or reads; ``bucket`` is
    -1 for none.  ``issued_s`` is when its turn comes, in seconds from the step's start.  ``source``
    is the user's own line, as ``file:line text``; ``waits_for`` the node whose start a wait is for,
    -1 for others.
    """

    name: str
    operator: str
    value: str
    phase: str
    issued_s: float
    bucket: int
    parameters: tuple[int, ...]
    role: str
    why: str
    source: str
    waits_for: int


class Busy(NamedTuple):
    """A node keeps a lane busy.  Units: seconds from the step's start; bytes that it carries."""

    node: int
    lane: str
    begin_s: float
    end_s: float
    nbytes: int


class Memory(NamedTuple):
    """Bytes that are in memory while the nodes from ``begin`` to ``end`` run, both included.

    ``node`` is the one that makes them, ``place`` is ``device`` or ``host``.
    """

    node: int
    place: str
    kind: str
    begin: int
    end: int
    nbytes: int
    value: str


_ROWS: dict[str, Any] = {"nodes": Node, "spans": Busy, "memory": Memory}


@dataclass(frozen=True)
class StepRecord:
    """One step of one rank, as predicted.  Units: bytes and seconds."""

    title: str
    program: str
    rank: int
    world_size: int
    figures: str = ""
    compute_s: float = 0.0
    exposed_s: float = 0.0
    bound_s: float = 0.0
    parameters: tuple[str, ...] = ()
    nodes: Sequence[Node] = field(default=(), repr=False)
    spans: Sequence[Busy] = field(default=(), repr=False)
    memory: Sequence[Memory] = field(default=(), repr=False)

    @property
    def step_s(self) -> float:
        return self.compute_s + self.exposed_s

    @cached_property
    def end_s(self) -> float:
        """When the last lane is done, which may be after the step: what it has left is waited for
        by the next."""
        return max([self.step_s, *(span.end_s for span in self.spans)])

    @cached_property
    def lanes(self) -> tuple[str, ...]:
        """The lanes that have anything to do; compute in any case."""
        busy = {span.lane for span in self.spans}
        return tuple(lane for lane in LANES if lane == "compute" or lane in busy)

    def alive(self, place: str = "device") -> dict[str, list[int]]:
        """Bytes of each kind in memory while each node runs; kinds that there are none of left out.

        Shapes: for each kind, as many numbers as there are nodes.
        """
        count = len(self.nodes)
        changes = {kind: [0] * (count + 1) for kind in KINDS[place]}
        for piece in self.memory:
            if piece.place == place:
                changes[piece.kind][piece.begin] += piece.nbytes
                changes[piece.kind][piece.end + 1] -= piece.nbytes
        found = {}
        for kind, steps in changes.items():
            total, alive = 0, []
            for step in steps[:count]:
                total += step
                alive.append(total)
            if any(alive):
                found[kind] = alive
        return found

    def total(self, place: str = "device") -> list[int]:
        """Bytes in memory while each node runs."""
        kinds = self.alive(place).values()
        return [sum(column) for column in zip(*kinds, strict=True)] or [0] * len(self.nodes)

    def alive_at(self, position: int, place: str = "device") -> list[Memory]:
        """What is in memory while a node runs, the largest first."""
        there = (m for m in self.memory if m.place == place and m.begin <= position <= m.end)
        return sorted(there, key=lambda piece: (-piece.nbytes, piece.begin, piece.node))

    def for_whom(self, node: Node, most: int = 3) -> str:
        """``bucket 2: a, b, c and 4 more``: what parameters a node is about."""
        names = [self.parameters[index] for index in node.parameters]
        words = ", ".join(names[:most])
        if len(names) > most:
            words += f" and {len(names) - most} more"
        if node.bucket < 0:
            return words
        return f"bucket {node.bucket}: {words}" if words else f"bucket {node.bucket}"

    def to_json(self) -> str:
        """As JSON, each distinct string of the tables once; the same bytes for the same record."""
        document, _ = columns_of(self)
        return json.dumps(document, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, name: str = "the record") -> StepRecord:
        """Read what ``to_json`` has written; ``name`` is what errors call it.

        Raises: CommandError for what is no record of this version, or contradicts itself.
        """
        try:
            document = json.loads(text)
        except ValueError as error:
            raise CommandError(f"{name} is no JSON ({error}). {REMEDY}") from None
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise CommandError(f"{name} is no {FORMAT}. {REMEDY}")
        if document.get("version") != VERSION:
            raise CommandError(
                f"{name} is of version {document.get('version')!r}, and this zerofx reads version "
                f"{VERSION}. {REMEDY}"
            )
        try:
            record = cls(**_columns(document))
            _check(record)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            what = f"{type(error).__name__}: {error}"
            raise CommandError(f"{name} is damaged ({what}). {REMEDY}") from None
        return record


REMEDY = "Dump the program again, with the option dump or with ZEROFX_DUMP."


def read(path: Path) -> StepRecord:
    """Read a record from its file.

    Raises: CommandError as ``from_json`` does, or if the file is not text; OSError.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CommandError(f"{path} is not text ({error}). {REMEDY}") from None
    return StepRecord.from_json(text, str(path))


def columns_of(
    record: StepRecord, measured: Sequence[Busy] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A record as JSON takes it, and other spans of its nodes as it has its own."""
    texts: dict[str, int] = {}
    document: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    for entry in fields(record):
        value = getattr(record, entry.name)
        if entry.name in _ROWS:
            value = _table(_ROWS[entry.name], value, texts)
        document[entry.name] = value
    others = _table(Busy, measured, texts)
    document["texts"] = list(texts)
    return document, others


def _table(row: Any, rows: Iterable[tuple], texts: dict[str, int]) -> dict[str, Any]:
    """A table as its columns' names and, of each, the values; strings as positions in ``texts``."""
    table: dict[str, Any] = {name: [] for name in row._fields}
    for name, kind, column in zip(row._fields, _types(row), zip(*rows, strict=True), strict=False):
        if kind is str:
            table[name] = [texts.setdefault(text, len(texts)) for text in column]
        elif kind is float:
            table[name] = [round(value, 12) for value in column]
        else:
            table[name] = list(column)
    return table


@cache
def _types(row: Any) -> list[Any]:
    """The types of a table's columns."""
    hints = get_type_hints(row)
    return [hints[name] for name in row._fields]


def _columns(document: dict[str, Any]) -> dict[str, Any]:
    """A record's fields from what ``to_json`` makes of them."""
    texts = document["texts"]
    values = {entry.name: document[entry.name] for entry in fields(StepRecord)}
    values["parameters"] = tuple(values["parameters"])
    for name, row in _ROWS.items():
        columns = []
        for column, kind in zip(row._fields, _types(row), strict=True):
            entries = values[name][column]
            if kind is str:
                entries = [texts[_position(entry, len(texts))] for entry in entries]
            elif kind is not int and kind is not float:
                entries = list(map(tuple, entries))
            columns.append(entries)
        values[name] = tuple(map(row._make, zip(*columns, strict=True)))
    return values


def _check(record: StepRecord) -> None:
    """Refuse what cannot be drawn: places, kinds, positions and times that there are not."""
    count = len(record.nodes)
    for node in record.nodes:
        _number(node.issued_s)
        if node.waits_for != -1:
            _position(node.waits_for, count)
        for index in node.parameters:
            record.parameters[_position(index, len(record.parameters))]
    for span in record.spans:
        _position(span.node, count)
        _number(span.begin_s)
        _number(span.end_s)
        if span.lane not in LANES:
            raise ValueError(f"no lane is called {span.lane!r}")
    for piece in record.memory:
        for position in (piece.node, piece.begin, piece.end):
            _position(position, count)
        if piece.kind not in KINDS[piece.place]:
            raise ValueError(f"no memory of the {piece.place} is called {piece.kind!r}")
    for seconds in (record.compute_s, record.exposed_s, record.bound_s):
        _number(seconds)


def _position(value: Any, count: int) -> int:
    if not isinstance(value, int) or not 0 <= value < count:
        raise ValueError(f"{value!r} is no position among {count}")
    return value


def _number(value: Any) -> None:
    if not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{value!r} is no time")
