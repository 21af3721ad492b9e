"""Runs the pipeline: checks what each pass requires, verifies, counts, times and dumps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import fx

from zerofx.errors import GraphError
from zerofx.passes.base import Counts, Pass, PassContext
from zerofx.verify.verifier import CheckedMetadata, verify

TURNED_OFF = "turned off"
"""Why an optional pass did not run that could have."""


@dataclass(frozen=True)
class PassReport:
    """The report of one pass: its counts, or why it did not run.

    ``option`` is the one that turns it off.
    """

    name: str
    counts: Counts
    seconds: float = 0.0
    skipped: str = ""
    option: str = ""


@dataclass
class Established:
    """The knowledge of a program from the passes that have run: facts, checked metadata."""

    facts: set[str] = field(default_factory=set)
    metadata: CheckedMetadata = field(default_factory=CheckedMetadata)


def run_pipeline(
    gm: fx.GraphModule,
    ctx: PassContext,
    pipeline: Sequence[Pass],
    on_program: Callable[[str, fx.GraphModule, PassReport | None], None] | None = None,
    on_rejected: Callable[[str, fx.GraphModule, Exception], None] | None = None,
    established: Established | None = None,
    *,
    to_run: bool = True,
) -> list[PassReport]:
    """Run the passes that the stage and the options call for, in order, on ``gm`` in place.

    ``on_program`` is given the captured program and the one after every pass: its graph, for the
    code of ``gm`` is made when all have run.  ``on_rejected`` is given the one that an error has
    left, which may be half of one.  With what earlier passes have ``established``, the program is
    the one that they have left, and the passes go on from there.  One that is not ``to_run``, but
    made for what it would take, is verified once, behind the last pass.

    Raises: GraphError if a pass lacks what it requires or leaves a broken program; whatever a
    pass raises, with a note that names it.
    """
    established = Established() if established is None else established
    facts = established.facts
    if not facts and to_run:
        with _showing(gm, "captured", on_rejected):
            verify(gm, ctx.table, facts, established.metadata)
        if on_program:
            on_program("captured", gm, None)
    reports = []
    for step in pipeline:
        reason = why_skipped(step, ctx)
        if reason:
            reports.append(PassReport(step.name, {}, skipped=reason, option=step.option))
            continue
        missing = step.requires - facts
        if missing:
            raise GraphError(
                f"pass {step.name!r} requires {', '.join(sorted(missing))}, which no pass before "
                "it provides: the pipeline's order is wrong."
            )
        started = time.perf_counter()
        with _showing(gm, step.name, on_rejected, f"in pass {step.name!r} of zerofx"):
            counts = step.run(gm, ctx)
            facts |= step.provides
            if to_run:
                gm.graph.lint()
                verify(gm, ctx.table, facts, established.metadata)
        report = PassReport(step.name, counts, time.perf_counter() - started)
        reports.append(report)
        if on_program:
            on_program(step.name, gm, report)
    if not to_run:
        verify(gm, ctx.table, facts, established.metadata)
        return reports
    gm.recompile()  # once: nothing calls a program between passes, and this took a third of them
    return reports


@contextmanager
def _showing(
    gm: fx.GraphModule,
    name: str,
    on_rejected: Callable[[str, fx.GraphModule, Exception], None] | None,
    *notes: str,
) -> Iterator[None]:
    """Add these notes to an error, and show ``on_rejected`` the program that it has left."""
    try:
        yield
    except Exception as error:
        for note in notes:
            error.add_note(note)
        if on_rejected:
            on_rejected(name, gm, error)
        raise


def why_skipped(step: Pass, ctx: PassContext) -> str:
    """Return why a pass does not run with these options; empty if it does."""
    if ctx.options.stage < step.smallest_stage:
        return f"stage {ctx.options.stage} (needs {step.smallest_stage})"
    if step.offloads and step.offloads.isdisjoint(ctx.offloads):
        return "no offload"
    if step.tiers and step.tiers.isdisjoint(ctx.tiers):
        return f"offload_tier {ctx.options.offload_tier}"
    if step.optional and not ctx.options.enabled(step.option):
        return TURNED_OFF
    return step.why_not(ctx)
