"""Plants bugs behind every pass of a step's pipeline, and asks who finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from tests.kit.planted.bugs import Bug, bugs
from tests.kit.planted.equivalents import why_equivalent
from tests.kit.programs import Captured, clone, context_of
from zerofx import GraphError
from zerofx.capture import substitutes
from zerofx.ir.graph import copied
from zerofx.passes.manager import run_pipeline
from zerofx.passes.pipeline import PIPELINE
from zerofx.replay.replayed import ObservedProgram
from zerofx.replay.validate import Observation, Validator
from zerofx.report.optimizers import describe
from zerofx.verify.verifier import verify

LAST = "earlier ones, at the end"
"""What bugs are planted in that earlier passes' nodes have in the last program."""

KILLED = ("lint", "verifier", "validation")


@dataclass(frozen=True)
class Verdict:
    """Who has found a bug of a pass: one of ``KILLED``, or nobody.

    Of one that ``survived``, ``why`` is why that is right, empty if nobody knows.
    """

    inserted_by: str
    bug: Bug
    found_by: str
    why: str

    @property
    def survived(self) -> bool:
        return self.found_by not in KILLED

    def __str__(self) -> str:
        return f"{self.inserted_by}: {self.bug}: {self.found_by} {self.why}".rstrip()


def verdicts(
    step: Captured, is_chosen: Callable[[int], bool] = lambda number: True, **options: Any
) -> Iterator[Verdict]:
    """Plant the chosen ones of all bugs, numbered in order, behind the pass each is of.

    Then in the last program too, where later passes have moved what earlier ones have inserted.
    Every rank's program gets the same bug, as if the pass had it.
    """
    program = clone(step)
    names = {id(t): info.name for t, info in zip(step.tensors, program.table, strict=True)}
    described = {h: describe(substitutes.optimizer_of(h), names) for h in step.optimizers}
    ctx = context_of(program, **options)
    planter = _Planter(Validator(program.gm, ctx, PIPELINE, described))
    run_pipeline(program.gm, ctx, PIPELINE, planter.keep)
    last = planter.programs[-1]
    own = {bug.node for bug in bugs(last.ranks[0].graph, last.name)}
    planted = [(after, bug) for after in planter.programs for bug in after.bugs()]
    planted += [
        (replace(last, title=LAST), bug) for bug in bugs(last.ranks[0].graph) if bug.node not in own
    ]
    for number, (after, bug) in enumerate(planted):
        if is_chosen(number):
            yield after.verdict(bug, planter.validator)


@dataclass(frozen=True)
class _After:
    """The ranks' programs behind a pass, and what those before it compute."""

    name: str
    title: str
    facts: frozenset[str]
    ranks: Sequence[ObservedProgram]
    before: Observation

    def bugs(self) -> Iterator[Bug]:
        return bugs(self.ranks[0].graph, self.name)

    def verdict(self, bug: Bug, validator: Validator) -> Verdict:
        found_by = self._found_by(bug, validator)
        program = self.ranks[0]
        why = None
        if found_by not in KILLED:
            why = why_equivalent(bug, program.graph, program.table())
        return Verdict(self.title, bug, found_by, why or "")

    def _found_by(self, bug: Bug, validator: Validator) -> str:
        broken = []
        for program in self.ranks:
            graph = copied(program.graph)
            bug.plant(graph)
            broken.append(replace(program, graph=graph))
        try:
            for program in broken:
                program.graph.lint()
        except RuntimeError:
            return "lint"
        try:
            for program in broken:
                verify(program.module(), program.table(), self.facts)
        except GraphError:
            return "verifier"
        try:
            after = Observation.of(broken)
        except Exception:  # whatever torch says of operands that do not fit
            return "validation"
        return "validation" if validator.difference(self.name, self.before, after) else "nobody"


class _Planter:
    """Keeps what the validator has seen behind every pass."""

    def __init__(self, validator: Validator) -> None:
        self.validator = validator
        self.programs: list[_After] = []
        self._facts: frozenset[str] = frozenset()
        self._provided = {step.name: step.provides for step in PIPELINE}

    def keep(self, name: str, gm: fx.GraphModule, report: Any) -> None:
        self.validator(name, gm, report)
        if report is not None:
            assert self.validator.before and self.validator.after
            self._facts |= self._provided[name]
            ranks = self.validator.after.programs
            self.programs.append(_After(name, name, self._facts, ranks, self.validator.before))
