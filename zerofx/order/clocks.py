"""Find accesses that nothing orders, by vector clocks, as they are made.

A line is what does one thing after another: a host thread, a stream, a collective, an operation on
files.  The first is ``MAIN``, the thread that began, the second its device's default stream.  A
clock says of each line how far it has come, as far as its owner knows: an access happens before
another if the other's line knows of it by then.

Source: Mattern 1989, "Virtual Time and Global States of Distributed Systems"; for races, the
detector of Pozniansky and Schuster 2003 (DJIT+), here over ranges of bytes.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any
from weakref import WeakKeyDictionary

MAIN, DEFAULT_STREAM = 0, 1

FEW_ENDED = 100
"""Lines that have ended, of which it is not worth the time to look for those to forget."""

Clock = dict[int, int]

Site = tuple[str, ...]
"""The place in the code that something comes from: frames, the innermost first."""


class Where(Enum):
    """The memory that a block is of."""

    DEVICE = auto()
    HOST = auto()
    PINNED = auto()
    """Of the host, copied by the device beside the host; unmapped when it is given back."""
    PINNED_BY_TORCH = auto()
    """The same, from torch's allocator, which waits for copies before it gives it out again."""


@dataclass(eq=False)
class Block:
    """A range of addresses from when it is taken until it is given back.

    ``inside`` is a larger one that has turned out to hold it.
    """

    start: int
    stop: int
    name: str
    where: Where | None = None
    inside: Block | None = None

    def root(self) -> Block:
        return self if self.inside is None else self.inside.root()

    @property
    def is_on_device(self) -> bool:
        return self.root().where is Where.DEVICE


@dataclass(frozen=True)
class Range:
    """Addresses of a block that an operator reads or writes.

    ``is_number`` for a 0-dim tensor: of the host, its value is read when the operator is launched.
    """

    block: Block
    start: int
    stop: int
    writes: bool
    is_number: bool = False

    @property
    def is_read_at_launch(self) -> bool:
        return self.is_number and not self.block.is_on_device


@dataclass(frozen=True)
class Operator:
    """Accesses of an operator, which ``thread`` gives to ``stream``, or does itself on the host.

    ``line`` is given if that is decided already: a collective, a file operation.  ``waits`` if the
    host waits for it, where the device does it.  ``may_lag`` if the host does not wait for a copy
    between pinned memory and the device.
    """

    name: str
    thread: int
    stream: int
    ranges: tuple[Range, ...]
    site: Site
    line: int | None = None
    waits: bool = False
    copies: bool = False
    may_lag: bool = False

    @property
    def runs_on(self) -> int:
        """The line that does it: the device if it has something there, or makes something."""
        if self.line is not None:
            return self.line
        is_on_device = any(one.block.is_on_device for one in self.ranges)
        return self.stream if is_on_device else self.thread

    @property
    def is_waited_for(self) -> bool:
        """Return whether the host waits for it: for a number, or a copy to or from the device."""
        there = (one.block.root() for one in self.ranges if not one.is_number)
        on_host = {block.where for block in there if not block.is_on_device}
        is_pinned = on_host <= {Where.PINNED, Where.PINNED_BY_TORCH}
        lags = self.copies and self.may_lag and is_pinned
        return self.runs_on == self.stream and (self.waits or (bool(on_host) and not lags))


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
            verb, at = "writes" if access.writes else "reads", " < ".join(access.site)
            words.append(f"  {access.name} {verb} them on the {line}, at {at}")
        return "\n".join(words)


def join(clock: Clock, other: Clock) -> None:
    """Know what another knows too."""
    for line, count in other.items():
        if clock.get(line, 0) < count:
            clock[line] = count


class Clocks:
    """The clocks of a run, told what its threads do, by any of them.

    ``races`` are those found so far.  ``lines`` are the names of the lines, by number, and
    ``streams`` those that are streams.

    Accesses are compared with those to come, of which each is by a line that has not ended.  So a
    line that has ``end``-ed matters as long as one of its accesses is kept, and ``prune`` forgets
    those that matter no more.  What is kept is bounded by the memory that is there, the lines under
    way and the ranges that each operator uses, and not by how long it has gone on.
    """

    def __init__(self) -> None:
        self.races: list[Race] = []
        self.lines = {MAIN: "main thread", DEFAULT_STREAM: "default stream"}
        self.streams = {DEFAULT_STREAM}
        self.lock = threading.RLock()
        self.clocks: defaultdict[int, Clock] = defaultdict(dict)
        # A block that nothing holds is in no range to come, so that its accesses go with it.
        self._accesses: WeakKeyDictionary[Block, list[Access]] = WeakKeyDictionary()
        self._numbers = itertools.count(len(self.lines))
        self._ended: set[int] = set()
        self._prune_at = FEW_ENDED

    def line(self, name: str, is_stream: bool = False) -> int:
        """Return the number of a new line."""
        with self.lock:
            number = next(self._numbers)
            self.lines[number] = name
            if is_stream:
                self.streams.add(number)
            return number

    def end(self, line: int) -> None:
        """Note that a line does nothing more; its marks still count.

        Takes no lock: a thread's end may come while another thing is noted, by the same thread.
        """
        self._ended.add(line)

    def prune(self) -> None:
        """Forget the lines that have ended and of which no access is kept.

        A clock is asked about a line for one thing alone: whether it knows of an access of that
        line, which is kept.  Of such a line none is kept now, and none can come: only its owner
        makes accesses, and has ended.  So the answer about it is never used again, by whichever
        program, and its count can go from all clocks: what they say of other lines is counted
        beside it.  Numbers are not given out again, and ``after`` takes no count of such a line
        from an old mark.
        """
        with self.lock:
            blocks = self._accesses.keyrefs()  # in one go: memory may be given back meanwhile
            kept = {
                access.line
                for block in (reference() for reference in blocks)
                if block is not None
                for access in self._accesses.get(block, ())
            }
            gone = self._ended - kept
            for line in gone:
                del self.lines[line]
                self.clocks.pop(line, None)
            for clock in list(self.clocks.values()):
                for line in gone & clock.keys():
                    del clock[line]
            self._ended -= gone
            self._prune_at = 2 * len(self._ended) + FEW_ENDED

    def prune_if_due(self) -> None:
        """Forget them if there may be many, which takes little time for each that has ended."""
        if len(self._ended) > self._prune_at:
            self.prune()

    def mark(self, line: int, thread: int, site: Site, kind: str) -> Any:
        """Return what a line has done until now: an event, the end of a job.

        ``site`` and ``kind``, here and of ``after``, are for those who keep a history.
        """
        with self.lock:
            self._told(line, thread)
            return dict(self.clocks[line])

    def after(
        self, line: int, mark: Any, thread: int, site: Site, kind: str, given: bool = False
    ) -> None:
        """Have ``line`` go on after a mark; ``thread`` has told it to, if it is a stream.

        What is ``given`` is the way of things, as that a job begins after it was handed over: it
        can't be left out.
        """
        with self.lock:
            self._told(line, thread)
            known = {line: count for line, count in mark.items() if line in self.lines}
            join(self.clocks[line], known)

    def operator(self, operator: Operator) -> None:
        """Note an operator's accesses."""
        with self.lock:
            thread, line, rest = operator.thread, operator.runs_on, operator.ranges
            if line != thread and operator.line is None:
                self._access(operator, thread, [one for one in rest if one.is_read_at_launch])
                rest = tuple(one for one in rest if not one.is_read_at_launch)
            self._told(line, thread)
            self._access(operator, line, rest)
            if operator.is_waited_for:
                join(self.clocks[thread], self.clocks[line])

    def taken(self, block: Block, thread: int, stream: int, site: Site) -> None:
        """Note memory that is taken: of the device's what ``stream`` may have used until now."""
        with self.lock:
            if block.root() is block and block.is_on_device:
                self._told(stream, thread)
                access = (stream, self._next(stream), block.start, block.stop, True, site)
                self._accesses[block] = [Access("the memory's user before", *access)]

    def given(self, block: Block, thread: int, stream: int, site: Site) -> None:
        """Note memory that is given back: of the device's ``stream`` may go on to use it."""
        with self.lock:
            if block.root() is not block or block.where is Where.PINNED_BY_TORCH:
                return
            line = stream if block.is_on_device else thread
            # Whoever is given it next has the allocator's lock after the thread that gives it back.
            knows = dict(self.clocks[line])
            join(knows, self.clocks[thread])
            name = "its next user, as it is given back," if block.is_on_device else "giving it back"
            for other in self._accesses.pop(block, ()):
                # Threads and operations on files hold what they use.
                if other.line in self.streams and other.count > knows.get(other.line, 0):
                    access = Access(name, line, 0, block.start, block.stop, True, site)
                    self._found(block, other, access)

    def forget(self) -> None:
        """Compare nothing with the accesses that there have been until now."""
        with self.lock:
            self.races, self._accesses = [], WeakKeyDictionary()

    def _told(self, line: int, thread: int) -> None:
        """Have a line know what the thread knew that gave it something to do."""
        if line != thread:
            join(self.clocks[line], self.clocks[thread])

    def _next(self, line: int) -> int:
        clock = self.clocks[line]
        clock[line] = clock.get(line, 0) + 1
        return clock[line]

    def _access(self, operator: Operator, line: int, ranges: Iterable[Range]) -> None:
        count = self._next(line)
        for one in ranges:
            facts = (line, count, one.start, one.stop, one.writes, operator.site)
            self._check(one.block.root(), Access(operator.name, *facts))

    def _check(self, block: Block, access: Access) -> None:
        """Compare an access with those before it that it overlaps, and keep what it needs of all.

        What a later write covers is left out: whatever is after the write is after that too.  So is
        a read that a later read covers: what is in no order with it, and is a write, is in none
        with the later one.  But a stream's use of memory is also compared with the memory's end,
        which is not compared with that of others: it stands for it only if it is a stream's too.
        """
        knows, left = self.clocks[access.line], []
        for other in self._accesses.get(block, ()):
            overlaps = other.start < access.stop and access.start < other.stop
            is_before = other.count <= knows.get(other.line, 0)
            if overlaps and not is_before and (access.writes or other.writes):
                self._found(block, other, access)
            covers = access.start <= other.start and other.stop <= access.stop
            serves = other.line not in self.streams or access.line in self.streams
            if not (covers and is_before and (access.writes or (not other.writes and serves))):
                left.append(other)
        left.append(access)
        self._accesses[block] = left

    def _found(self, block: Block, first: Access, second: Access) -> None:
        lines = (self.lines[first.line], self.lines[second.line])
        self.races.append(Race(block.name, first, second, lines))
