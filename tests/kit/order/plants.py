"""Ordering bugs, planted one by one: a wait, or an event's record, that does nothing.

A bug is left out of a history that was noted with it: results stay right, and one run shows all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from zerofx.order.history import After, Entry, History, Mark, Site
from zerofx.order.judge import Judge, Race

Place = tuple[str, tuple[str, ...]]
"""A kind of wait or mark, and where it stands in the code."""


def code(site: Site) -> tuple[str, ...]:
    """The frames of source files: without the programs that are generated."""
    return tuple(frame for frame in site.frames if not frame.startswith("<"))


class Planter(Judge):
    """Judges without the waits and marks that are ``left_out``.

    ``telling`` are the waits of which a line has learned of accesses that it did not know of, and
    the marks of which such a wait has.
    """

    def __init__(self, history: History, left_out: Collection[Place] = ()) -> None:
        super().__init__(history)
        self.telling: set[Place] = set()
        self._left_out = left_out
        self._places: dict[int, Place] = {}

    def take(self, entry: Entry) -> None:
        if isinstance(entry, (Mark, After)):
            place = entry.kind, code(entry.site)
            is_given = isinstance(entry, After) and entry.given
            if place in self._left_out and not is_given:
                return
            if isinstance(entry, Mark):
                self._places[entry.number] = place
            else:
                knows, told = self.clock(entry.line), self.marks.get(entry.mark, {})
                self._told(entry.line, entry.thread)
                if any(count > knows.get(line, 0) for line, count in told.items()):
                    self.telling |= {place, self._places[entry.mark]}
        super().take(entry)


def races_in(history: History, left_out: Collection[Place] = ()) -> list[Race]:
    """Return what nothing orders, once for each pair of places, if some waits do not count."""
    judge = Planter(history, left_out)
    for entry in history:
        judge.take(entry)
    return list({_key(race): race for race in reversed(judge.races)}.values())[::-1]


def _key(race: Race) -> tuple[str, ...]:
    accesses = (race.first, race.second)
    return tuple(word for one in accesses for word in (one.name, *code(one.site)))


MARKS = ("record",)
"""The marks that a program makes itself; others are in the nature of what is marked."""


def places(history: History) -> Counter[Place]:
    """Return the waits and marks of the product in a run, and how often each was met."""
    found: Counter[Place] = Counter()
    for entry in history:
        is_mark = isinstance(entry, Mark) and entry.kind in MARKS
        is_wait = isinstance(entry, After) and not entry.given
        if (is_mark or is_wait) and any(map(_is_of_product, code(entry.site))):
            found[entry.kind, code(entry.site)] += 1
    return found


def _is_of_product(frame: str) -> bool:
    return frame.startswith("zerofx/")


def planted(history: History) -> dict[Place, Race | None]:
    """Leave out each wait and mark in turn; return the first race that comes of it, if any.

    Not those that order nothing: of which no line learns of an access that it did not know of,
    such as a wait for a thread that compiles.  They are there for the host.
    """
    judge = Planter(history)
    for entry in history:
        judge.take(entry)
    found = {}
    for place in places(history):
        if place in judge.telling:
            races = races_in(history, [place])
            found[place] = races[0] if races else None
    return found
