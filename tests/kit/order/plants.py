"""Ordering bugs, planted one by one: a wait, or an event's record, that does nothing.

A bug is left out of a history that was noted with it: results stay right, and one run shows all.
"""

from __future__ import annotations

from collections import Counter

from tests.kit.order.history import After, History, Mark
from tests.kit.order.judge import Place, Race, races_in

MARKS = ("record",)
"""The marks that a program makes itself; others are in the nature of what is marked."""


def places(history: History) -> Counter[Place]:
    """Return the waits and marks of a run, and how often each was met."""
    found: Counter[Place] = Counter()
    for entry in history:
        is_mark = isinstance(entry, Mark) and entry.kind in MARKS
        if is_mark or (isinstance(entry, After) and not entry.given):
            found[entry.kind, entry.site.code] += 1
    return found


def planted(history: History) -> dict[Place, Race | None]:
    """Leave out each wait and mark in turn; return the first race that comes of it, if any."""
    found = {}
    for place in places(history):
        races = races_in(history, [place])
        found[place] = races[0] if races else None
    return found
