"""Everything that has to do with order in a run: accesses, waits, memory taken and given back.

A line is what does one thing after another: a host thread, a stream, a file operation.  The first
is ``MAIN``, the thread that began, the second its device's default stream.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto


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
class Site:
    """The place in the code that something comes from: frames, the innermost first."""

    frames: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " < ".join(self.frames)


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


@dataclass(frozen=True)
class Taken:
    """Memory taken: of the device's it may be what ``stream``'s operators have used until now."""

    block: Block
    thread: int
    stream: int
    site: Site


@dataclass(frozen=True)
class Given:
    """Memory given back: of the device's, ``stream``'s next operators may use it."""

    block: Block
    thread: int
    stream: int
    site: Site


@dataclass(frozen=True)
class Mark:
    """What a line has done until now, under a number: an event, the end of a job."""

    number: int
    line: int
    thread: int
    site: Site
    kind: str


@dataclass(frozen=True)
class After:
    """``line`` goes on after a mark; ``thread`` has told it to, if it is a stream.

    One that is ``given`` is the way of things, as that a job begins after it was handed over: it
    can't be left out.
    """

    line: int
    mark: int
    thread: int
    site: Site
    kind: str
    given: bool = False


Entry = Operator | Taken | Given | Mark | After

MAIN, DEFAULT_STREAM = 0, 1


class History:
    """The entries of a run in the order in which they came, of all threads.

    ``lines`` are the names of the lines, by number, and ``streams`` those that are streams.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.lines = ["main thread", "default stream"]
        self.streams = {DEFAULT_STREAM}
        self.lock = threading.RLock()
        self._marks = 0

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def line(self, name: str, is_stream: bool = False) -> int:
        """Return the number of a new line."""
        with self.lock:
            self.lines.append(name)
            number = len(self.lines) - 1
            if is_stream:
                self.streams.add(number)
            return number

    def add(self, entry: Entry) -> None:
        with self.lock:
            self.entries.append(entry)

    def mark(self, line: int, thread: int, site: Site, kind: str) -> int:
        """Note what a line has done until now; return its number for ``After``."""
        with self.lock:
            self._marks += 1
            self.entries.append(Mark(self._marks, line, thread, site, kind))
            return self._marks
