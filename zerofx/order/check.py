"""The option ``check_order``: what is in no order in a call of a compiled step is raised."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import fx

from zerofx.errors import OrderError
from zerofx.ir.roles import provenance
from zerofx.options import OPTIONAL_PASSES, turned_off
from zerofx.order.history import History
from zerofx.order.hooks import hooks
from zerofx.order.judge import Judge, Race
from zerofx.order.notes import Notes
from zerofx.order.operators import Watch
from zerofx.runtime.step import StepRuntime


class OrderCheck:
    """Watches the checked steps of this process, together: they share memory and streams.

    From the first call on until ``end``, this process's streams, collectives, jobs and operations
    on files take note of their waits, and calls note their operators.
    """

    def __init__(
        self,
        make_notes: Callable[[History], Notes] = Notes,
        hooks: Callable[[Notes], Iterable[Any]] = hooks,
    ) -> None:
        self._make_notes, self._hooks = make_notes, hooks
        self._stack: contextlib.ExitStack | None = None

    def begin(self) -> None:
        """Take note from here on, if that is not so already."""
        if self._stack is None:
            self.history = History()
            self.notes = self._make_notes(self.history)
            self._judge, self._judged = Judge(self.history), 0
            self._stack = contextlib.ExitStack()
            for hook in self._hooks(self.notes):
                self._stack.enter_context(hook)

    def end(self) -> None:
        """Take no more note, and forget what was noted."""
        if self._stack is not None:
            self.notes.is_on = False
            self._stack.close()
            self._stack = None

    @contextlib.contextmanager
    def watching(self, runtime: StepRuntime, graph: fx.Graph) -> Iterator[None]:
        """Note one call of a program; raise OrderError if anything in it is in no order."""
        self.begin()
        for bound, info in zip(runtime.bound, runtime.table, strict=True):
            self.notes.block(bound.shard, f"the parameter {info.name}")
        try:
            with Watch(self.notes):
                yield
        except BaseException:
            self.end()  # what it has left under way is waited for in ways of its own
            raise
        races = self._new_races()
        if races:
            self.end()
            raise OrderError(_words(races, graph))

    def _new_races(self) -> list[Race]:
        with self.history.lock:
            entries, self.history.entries = self.history.entries, []
        for entry in entries:
            self._judge.take(entry)
        return self._judge.races


CHECK = OrderCheck()


def _words(races: list[Race], graph: fx.Graph) -> str:
    race = races[0]
    first, second = race.lines
    others = f" ({len(races) - 1} more such pairs in this call.)" if len(races) > 1 else ""
    return (
        f"{race}\n"
        f"What is missing is a wait: the {second} has to wait for what the {first} has done before "
        f"{race.second.name}. As it is, either may come first, and what was computed may be "
        f"wrong.{others} This is a fault of zerofx and not of your step: please report it, with "
        f"this message. {_remedy(race, graph)}"
    )


def _remedy(race: Race, graph: fx.Graph) -> str:
    """Return how to go on without the passes that have placed what is not in order."""
    made_by = {node.name: provenance(node) for node in graph.nodes}
    found: list[str] = []
    for access in (race.first, race.second):
        for name in re.findall(r"<program> (\w+)", str(access.site)):
            reason = made_by.get(name)
            if reason is not None and reason.inserted_by not in found:
                found.append(reason.inserted_by)
    off = turned_off(name for name in found or OPTIONAL_PASSES if name in OPTIONAL_PASSES)
    placed = f"{' and '.join(found)} placed the operators. " if found else ""
    switches = " ".join(f"{name}={value}" for name, value in off.items())
    until = f"Until it is mended, try {switches}" if off else "Until it is mended, try stop_after"
    return f"{placed}{until}, with check_order on."
