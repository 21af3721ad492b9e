"""Ordering bugs, planted one by one: a wait, or an event's record, that does nothing.

A bug is left out of a history that was noted with it: results stay right, and one run shows all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from tests.kit.order.history import After, History, Mark, Place, code
from zerofx.order.clocks import Race

MARKS = ("record",)
"""The marks that a program makes itself; others are in the nature of what is marked."""


def races_in(history: History, left_out: Collection[Place] = ()) -> list[Race]:
    """Return what nothing orders, once for each pair of places, if some waits do not count."""
    races, _ = history.judged(left_out)
    return list({_key(race): race for race in reversed(races)}.values())[::-1]


def _key(race: Race) -> tuple[str, ...]:
    accesses = (race.first, race.second)
    return tuple(word for one in accesses for word in (one.name, *code(one.site)))


def places(history: History) -> Counter[Place]:
    """Return the waits and marks of the product in a run, and how often each was met."""
    found: Counter[Place] = Counter()
    for entry in history.entries:
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
    _, telling = history.judged()
    found = {}
    for place in places(history):
        if place in telling:
            races = races_in(history, [place])
            found[place] = races[0] if races else None
    return found
