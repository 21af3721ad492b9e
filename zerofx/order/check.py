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
from zerofx.order.clocks import Clocks, Race
from zerofx.order.hooks import hooks
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
        make_notes: Callable[[], Notes] = lambda: Notes(Clocks()),
        hooks: Callable[[Notes], Iterable[Any]] = hooks,
    ) -> None:
        self._make_notes, self._hooks = make_notes, hooks
        self._stack: contextlib.ExitStack | None = None

    def begin(self) -> None:
        """Take note from here on, if that is not so already."""
        if self._stack is None:
            self.notes = self._make_notes()
            self._stack = contextlib.ExitStack()
            for hook in self._hooks(self.notes):
                self._stack.enter_context(hook)

    def end(self) -> None:
        """Take no more note."""
        if self._stack is not None:
            self.notes.is_on = False
            self._stack.close()
            self._stack = None

    @contextlib.contextmanager
    def watching(self, runtime: StepRuntime, graph: fx.Graph) -> Iterator[None]:
        """Note one call of a program; raise OrderError if anything in it is in no order.

        It comes after the calls that have ended by then: if they were in other threads, it is the
        user's own threads that wait for each other, of which nothing is noted.
        """
        self.begin()
        self.notes.begin_call()
        for bound, info in zip(runtime.bound, runtime.table, strict=True):
            memory = bound.shard if bound.shard is not None else bound.parameter
            self.notes.block(memory, f"the parameter {info.name}")
        clocks = self.notes.clocks
        try:
            with Watch(self.notes):
                yield
            if clocks.races:
                raise OrderError(_words(clocks.races, graph))
            self.notes.end_call()
            clocks.prune()
        except BaseException:
            clocks.forget()  # what a call that failed has begun is not waited for as it was to be
            raise


CHECK = OrderCheck()


def _words(races: list[Race], graph: fx.Graph) -> str:
    race = races[0]
    first, second = race.lines
    others = f"; {len(races) - 1} more pairs in this call" if len(races) > 1 else ""
    return (
        f"{race}\n"
        f"A wait is missing: {race.second.name} on the {second} has to come after what the {first} "
        f"has done. Either may come first{others}, so this call may have computed something wrong. "
        "It is a fault of zerofx and not of your step: please report it, with "
        f"this message.{_placed_by(race, graph)} 'ZEROFX_CHECK_ORDER=1 python -m zerofx bisect -- "
        "COMMAND' looks for a pass to turn off until then."
    )


def _placed_by(race: Race, graph: fx.Graph) -> str:
    """Return which passes have placed the operators, and what turns them off."""
    names = re.findall(r"<program> (\w+)", f"{race.first.site} {race.second.site}")
    reasons = (provenance(node) for node in graph.nodes if node.name in names)
    passes = dict.fromkeys(reason.inserted_by for reason in reasons if reason is not None)
    off = turned_off(name for name in passes if name in OPTIONAL_PASSES)
    switches = ", ".join(f"{name}={value}" for name, value in off.items())
    return "".join(f" {name} placed one of the two." for name in passes) + (
        f" Without that: {switches}." if off else ""
    )
