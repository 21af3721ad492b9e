"""Find in a history the accesses that nothing orders, by vector clocks.

A clock says of each line how far it has come, as far as its owner knows: an access happens before
another if the other's line knows of it by then.

Source: Mattern 1989, "Virtual Time and Global States of Distributed Systems"; for races, the
detector of Pozniansky and Schuster 2003 (DJIT+), here over ranges of bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from zerofx.order.history import (
    After,
    Block,
    Entry,
    Given,
    History,
    Mark,
    Operator,
    Range,
    Site,
    Taken,
    Where,
)

Clock = dict[int, int]


def join(clock: Clock, other: Clock) -> None:
    """Know what another knows too."""
    for line, count in other.items():
        if clock.get(line, 0) < count:
            clock[line] = count


@dataclass(frozen=True)
class Access:
    """One access: the ``count``-th thing that a line has done."""

    name: str
    line: int
    count: int
    start: int
    stop: int
    writes: bool
    site: Site


@dataclass(frozen=True)
class Race:
    """Two accesses, one of them a write, that may come in either order."""

    block: str
    first: Access
    second: Access
    lines: tuple[str, str]

    def __str__(self) -> str:
        nbytes = min(self.first.stop, self.second.stop) - max(self.first.start, self.second.start)
        words = [f"{nbytes} bytes of {self.block} are used in no order:"]
        for access, line in zip((self.first, self.second), self.lines, strict=True):
            verb = "writes" if access.writes else "reads"
            words.append(f"  {access.name} {verb} them on the {line}, at {access.site}")
        return "\n".join(words)


class Judge:
    """Takes the entries of a history one by one; ``races`` are those found so far."""

    def __init__(self, history: History) -> None:
        self.races: list[Race] = []
        self.marks: dict[int, Clock] = {}
        self._history = history
        self._clocks: dict[int, Clock] = {}
        self._accesses: dict[Block, list[Access]] = {}

    def clock(self, line: int) -> Clock:
        return self._clocks.setdefault(line, {})

    def take(self, entry: Entry) -> None:
        if isinstance(entry, Operator):
            self._operator(entry)
        elif isinstance(entry, Mark):
            self._told(entry.line, entry.thread)
            self.marks[entry.number] = dict(self.clock(entry.line))
        elif isinstance(entry, After):
            self._told(entry.line, entry.thread)
            join(self.clock(entry.line), self.marks.get(entry.mark, {}))
        elif isinstance(entry, Taken):
            self._taken(entry)
        else:
            self._given(entry)

    def _told(self, line: int, thread: int) -> None:
        """Have a line know what the thread knew that gave it something to do."""
        if line != thread:
            join(self.clock(line), self.clock(thread))

    def _next(self, line: int) -> int:
        clock = self.clock(line)
        clock[line] = clock.get(line, 0) + 1
        return clock[line]

    def _operator(self, entry: Operator) -> None:
        line = entry.line
        if line is None:
            line = entry.stream if _runs_on_device(entry) else entry.thread
        at_launch = []
        if line != entry.thread and entry.line is None:
            at_launch = [
                one for one in entry.ranges if one.is_number and not one.block.is_on_device
            ]
        if at_launch:
            self._access(entry, entry.thread, at_launch)
        self._told(line, entry.thread)
        self._access(entry, line, [one for one in entry.ranges if one not in at_launch])
        if line == entry.stream and (entry.waits or _host_waits_for(entry)):
            join(self.clock(entry.thread), self.clock(line))

    def _access(self, entry: Operator, line: int, ranges: Iterable[Range]) -> None:
        count = self._next(line)
        for one in ranges:
            access = Access(entry.name, line, count, one.start, one.stop, one.writes, entry.site)
            self._check(one.block.root(), access)

    def _check(self, block: Block, access: Access) -> None:
        """Compare an access with those before it that it overlaps, and keep what it needs of all.

        What a later write covers is left out: whatever is after the write is after that too.
        """
        knows, left = self.clock(access.line), []
        for other in self._accesses.get(block, ()):
            overlaps = other.start < access.stop and access.start < other.stop
            is_before = other.count <= knows.get(other.line, 0)
            if overlaps and not is_before and (access.writes or other.writes):
                self._found(block, other, access)
            covers = access.start <= other.start and other.stop <= access.stop
            same = not other.writes and other.line == access.line
            if not (covers and is_before and (access.writes or same)):
                left.append(other)
        left.append(access)
        self._accesses[block] = left

    def _found(self, block: Block, first: Access, second: Access) -> None:
        names = self._history.lines
        lines = (names[first.line], names[second.line])
        self.races.append(Race(block.name, first, second, lines))

    def _taken(self, entry: Taken) -> None:
        block = entry.block.root()
        if block is entry.block and block.is_on_device:
            self._told(entry.stream, entry.thread)
            count = self._next(entry.stream)
            # As if its former user, on this stream, had just written to it.
            access = Access(
                "the memory's user before",
                entry.stream,
                count,
                block.start,
                block.stop,
                True,
                entry.site,
            )
            self._accesses[block] = [access]

    def _given(self, entry: Given) -> None:
        block = entry.block.root()
        if block is not entry.block or block.where is Where.PINNED_BY_TORCH:
            return
        line = entry.stream if block.is_on_device else entry.thread
        # Whoever is given it next has the allocator's lock after the thread that gives it back.
        knows = dict(self.clock(line))
        join(knows, self.clock(entry.thread))
        name = "its next user, as it is given back," if block.is_on_device else "giving it back"
        for other in self._accesses.pop(block, ()):
            if other.line not in self._history.streams:
                continue  # a thread, an operation on files: they hold what they use
            if other.count > knows.get(other.line, 0):
                access = Access(name, line, 0, block.start, block.stop, True, entry.site)
                self._found(block, other, access)


def _runs_on_device(entry: Operator) -> bool:
    """Return whether the device runs an operator: it has something there, or makes something."""
    return any(one.block.is_on_device for one in entry.ranges)


def _host_waits_for(entry: Operator) -> bool:
    """Return whether a copy between host and device is one that the host waits for."""
    on_host = [
        one.block for one in entry.ranges if not one.is_number and not one.block.is_on_device
    ]
    if not on_host:
        return False
    is_pinned = all(block.where in (Where.PINNED, Where.PINNED_BY_TORCH) for block in on_host)
    return not (entry.copies and entry.may_lag and is_pinned)
