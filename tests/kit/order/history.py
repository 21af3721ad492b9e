"""Everything that has to do with order in a run, to be judged when all its memory has its place."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from zerofx.order.clocks import Block, Clocks, Operator, Race, Site

Place = tuple[str, tuple[str, ...]]
"""A kind of wait or mark, and where it stands in the code."""


def code(site: Site) -> tuple[str, ...]:
    """The frames of source files: without the programs that are generated."""
    return tuple(frame for frame in site if not frame.startswith("<"))


@dataclass(frozen=True)
class Taken:
    block: Block
    thread: int
    stream: int
    site: Site


@dataclass(frozen=True)
class Given(Taken):
    pass


@dataclass(frozen=True, eq=False)
class Mark:
    line: int
    thread: int
    site: Site
    kind: str


@dataclass(frozen=True)
class After:
    line: int
    mark: Mark
    thread: int
    site: Site
    kind: str
    given: bool = False


FORGET = object()


class History(Clocks):
    """The ``entries`` of a run in the order in which they came, of all threads."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Any] = []

    @property  # type: ignore[override]
    def races(self) -> list[Race]:
        return self.judged()[0]

    @races.setter
    def races(self, races: list[Race]) -> None:
        """As they are found when they are asked for, none is kept."""

    def mark(self, *facts: Any) -> Mark:
        return self._added(Mark(*facts))

    def after(self, *facts: Any) -> None:
        self._added(After(*facts))

    def operator(self, operator: Operator) -> None:
        self._added(operator)

    def taken(self, *facts: Any) -> None:
        self._added(Taken(*facts))

    def given(self, *facts: Any) -> None:
        self._added(Given(*facts))

    def prune(self) -> None:
        """Forget nothing: it is all judged anew, with other waits each time."""

    def forget(self) -> None:
        self._added(FORGET)

    def _added(self, entry: Any) -> Any:
        with self.lock:
            self.entries.append(entry)
        return entry

    def judged(self, left_out: Collection[Place] = ()) -> tuple[list[Race], set[Place]]:
        """Return what nothing orders if some waits and marks do not count, and those that tell.

        A wait does of which a line learns of accesses that it did not know of, and its mark.
        """
        clocks, marks, telling = Clocks(), {}, set()
        clocks.lines, clocks.streams = self.lines, self.streams
        for entry in self.entries:
            if isinstance(entry, Operator):
                clocks.operator(entry)
            elif isinstance(entry, Taken):
                facts = (entry.block, entry.thread, entry.stream, entry.site)
                (clocks.given if isinstance(entry, Given) else clocks.taken)(*facts)
            elif entry is FORGET:
                clocks.forget()
            elif isinstance(entry, Mark):
                if (entry.kind, code(entry.site)) not in left_out:
                    marks[entry] = clocks.mark(entry.line, entry.thread, entry.site, entry.kind)
            elif entry.given or (entry.kind, code(entry.site)) not in left_out:
                told, facts = marks.get(entry.mark, {}), (entry.thread, entry.site, entry.kind)
                clocks.after(entry.line, {}, *facts)
                knows = clocks.clocks[entry.line]
                if any(count > knows.get(line, 0) for line, count in told.items()):
                    telling |= {(one.kind, code(one.site)) for one in (entry, entry.mark)}
                clocks.after(entry.line, told, *facts)
        return clocks.races, telling
