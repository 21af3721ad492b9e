"""Ordering bugs, planted one by one: a wait, an event's record or a settle that does nothing.

A bug is left out of a history that was noted with it: results stay right, and one run shows all.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.kit.order.history import After, History, Mark, Site
from tests.kit.order.judge import Race, races_in

MARKS = ("record",)
"""The marks that a program makes itself; others are in the nature of what is marked."""


@dataclass(frozen=True)
class Planted:
    """A kind of wait or mark at one place in the code, and the first race without it."""

    kind: str
    site: Site
    count: int
    race: Race | None

    def __str__(self) -> str:
        found = f"reported: {self.race}" if self.race else "not reported"
        return f"{self.kind} ({self.count} times) at {self.site}\n  {found}"


def places(history: History) -> dict[tuple[str, Site], int]:
    """Return the waits and marks of a program, and how often each was met."""
    found: dict[tuple[str, Site], int] = {}
    for entry in history:
        is_mark = isinstance(entry, Mark) and entry.kind in MARKS
        if is_mark or (isinstance(entry, After) and not entry.given):
            key = (entry.kind, entry.site)
            found[key] = found.get(key, 0) + 1
    return found


def planted(history: History) -> list[Planted]:
    """Leave out each wait and mark in turn."""
    found = []
    for (kind, site), count in places(history).items():
        races = races_in(history, [(kind, site)])
        found.append(Planted(kind, site, count, races[0] if races else None))
    return found
