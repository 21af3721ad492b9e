"""From a captured step to the program that runs: ``CapturedStep``, ``Rewritten``, ``Lowered``.

Each is a value: the passes that make the next one work on a copy.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import fx

from zerofx import compat
from zerofx.capture import substitutes
from zerofx.capture.step import CapturedStep
from zerofx.codegen.rewrite.storage import Precision
from zerofx.compiler.facts import bytes_kept
from zerofx.cost.program import live_bytes
from zerofx.cost.timeline import predict
from zerofx.ir import ops
from zerofx.ir.collectives import schedule
from zerofx.ir.graph import Copies, copied_module
from zerofx.ir.interface import META, recorded
from zerofx.ir.key import NoKeyError, described, key_of
from zerofx.ir.packing import packed, unpacked
from zerofx.passes.base import PassContext
from zerofx.passes.manager import Established, PassReport, run_pipeline, why_skipped
from zerofx.passes.pipeline import PIPELINE, lowerings, rewrites
from zerofx.replay.validate import Validator
from zerofx.report.optimizers import describe
from zerofx.report.write import ProgramDump

logger = logging.getLogger("zerofx")


@dataclass(frozen=True)
class Rewritten:
    """The program that is predicted, and that ranks agree on.

    ``ctx`` is what the passes were given, ``captured_peak`` the most that the captured program has
    allocated at once, in bytes, if somebody logs it.  One that ``was_kept`` was made by an earlier
    start.
    """

    gm: fx.GraphModule
    ctx: PassContext
    reports: tuple[PassReport, ...]
    captured_peak: int | None
    was_kept: bool = False

    @property
    def peak_bytes(self) -> int:
        """The most that it has allocated at once on its device."""
        return _peak_bytes(self.gm, self.ctx)

    @cached_property
    def schedule(self) -> tuple[str, ...]:
        """The lines that all ranks must have alike: collectives, and what decides on them."""
        options = self.ctx.options
        return (
            *schedule(self.gm, self.ctx.table, options.stage),
            *Precision.of(options).description,
            *([f"offload {', '.join(options.offload)}"] if options.offload else []),
            *([f"offload_tier {options.offload_tier}"] if options.offload else []),
            *(["delayed_update"] if options.delayed_update else []),
        )

    @cached_property
    def digest(self) -> int:
        """A number that tells schedules apart: 56 bits, for it travels as a signed integer."""
        digest = hashlib.sha256("\n".join(self.schedule).encode()).digest()
        return int.from_bytes(digest[:7], "big")


@dataclass(frozen=True)
class Lowered:
    """The program that runs, in a form that nothing is predicted from."""

    gm: fx.GraphModule
    reports: tuple[PassReport, ...]

    def has_run(self, name: str) -> bool:
        """Return whether the lowering pass of this name has not been skipped."""
        return any(report.name == name and not report.skipped for report in self.reports)


def rewritten(gm: fx.GraphModule, ctx: PassContext) -> Rewritten:
    """Run the passes that make what is predicted, and none that lower it, on the program itself.

    Raises: what ``run_pipeline`` does.
    """
    reports = run_pipeline(gm, ctx, rewrites(PIPELINE), to_run=False)
    return Rewritten(gm, ctx, tuple(reports), None)


def in_parameters(made: Rewritten) -> set[fx.Node]:
    """Return the nodes whose results lie in whole parameters, from the second step on.

    The program that runs updates a bucket there, and gathers it, where it has a ``write_back``.
    """
    graph = made.gm.graph
    (step,) = (one for one in PIPELINE if one.name == "write_back")
    if why_skipped(step, made.ctx):
        return set()
    lowered = copied_module(made.gm)
    step.run(lowered, made.ctx)
    names, written = set(), set()
    for write in lowered.graph.find_nodes(op="call_function", target=ops.write_back):
        written.update(write.args[2])
        node = write.args[0]
        while ops.is_wait(node) or ops.is_collective(node):
            names.add(node.name)
            node = node.args[0]
        if node.target is ops.pack:
            names.add(node.name)
    shards = graph.find_nodes(op="call_function", target=ops.take_shard)
    taken = {of for of in shards if of.args[0].op == "placeholder" and of.args[1] in written}
    return taken | {node for node in graph.nodes if node.name in names}


def rewrite(
    step: CapturedStep, ctx: PassContext, dump: ProgramDump | None
) -> tuple[Rewritten, Lowered]:
    """Run all passes; dump, validate and time what they make.

    Without a dump, and without validation, an earlier start's programs are taken that were made of
    the same step by the same passes, for the same facts.

    Raises: what ``run_pipeline`` does; ValidationError.
    """
    key = "" if dump or ctx.options.validate else _key(step, ctx)
    found = compat.compile_cache.kept(key) if key else None
    if found is not None:
        return _unpacked(found, step, ctx)
    observers = _Observers(step, ctx, dump)
    hooks, established = (observers.on_program, observers.on_rejected), Established()
    gm = copied_module(step.gm)
    reports = run_pipeline(gm, ctx, rewrites(PIPELINE), *hooks, established)
    rewritten = Rewritten(gm, ctx, tuple(reports), observers.captured_peak)
    observers.kept = None  # times are not predicted behind it
    copies: Copies = {}
    gm = copied_module(gm, copies)
    established.metadata.follow(copies)
    lowered = Lowered(gm, tuple(run_pipeline(gm, ctx, lowerings(PIPELINE), *hooks, established)))
    if dump:
        timeline = predict(rewritten.gm.graph, ctx.figures, ctx.table, ctx.world_size)
        dump.write_summary((*rewritten.reports, *lowered.reports), str(timeline))
    of_passes = recorded(rewritten.gm.graph).warnings[len(recorded(step.gm.graph).warnings) :]
    if key and (programs := _packed(rewritten, lowered, of_passes)):
        compat.compile_cache.keep(key, programs)
    return rewritten, lowered


def _key(step: CapturedStep, ctx: PassContext) -> str:
    """Return what stands for all that the passes' programs depend on; empty for no such text."""
    if not step.key:
        return ""
    plain = replace(ctx, options=replace(ctx.options, process_group=None))
    pipeline = [(each.name, each.lowers, _place(each.run)) for each in PIPELINE]
    try:
        if not all(place.startswith("zerofx.passes.") for _, _, place in pipeline):
            raise NoKeyError("a pass from elsewhere")
        return key_of(step.key, described(plain), described(pipeline))
    except NoKeyError as reason:
        logger.info("a start after this one runs the passes anew: there is %s", reason)
        return ""


def _place(run: Any) -> str:
    return f"{getattr(run, '__module__', '')}.{getattr(run, '__qualname__', '')}"


def _packed(made: Rewritten, lowered: Lowered, warnings: list[str]) -> bytes | None:
    """Return both programs as bytes, with what the passes have settled in the table, and said."""
    reports = [[replace(report, seconds=0.0) for report in of.reports] for of in (made, lowered)]
    layout = {info.index: info.assigned for info in made.ctx.table if info.assigned is not None}
    beside = reports, made.captured_peak, layout, warnings
    return packed([made.gm.graph, lowered.gm.graph], META, beside)


def _unpacked(found: bytes, step: CapturedStep, ctx: PassContext) -> tuple[Rewritten, Lowered]:
    (gm, to_run), ((reports, of_lowering), captured_peak, layout, warnings) = unpacked(found)
    for warning in warnings:
        logger.warning(warning)
    ctx.table.assign(layout)
    if captured_peak is None and logger.isEnabledFor(logging.INFO):
        captured_peak = _peak_bytes(step.gm, ctx)
    made = Rewritten(gm, ctx, tuple(reports), captured_peak, was_kept=True)
    return made, Lowered(to_run, tuple(of_lowering))


class _Observers:
    """Shows each program to what looks at programs: dump, timelines, validation."""

    def __init__(self, step: CapturedStep, ctx: PassContext, dump: ProgramDump | None):
        self.ctx, self.dump = ctx, dump
        self.captured_peak: int | None = None
        has_timelines = dump is not None and dump.folder is not None
        self.kept = bytes_kept(step, ctx.options) if has_timelines else None
        self.validator = None
        if ctx.options.validate:
            write_minimal = dump.write_minimal if dump else None
            described = described_optimizers(step)
            self.validator = Validator(step.gm, ctx, PIPELINE, described, write_minimal)

    def on_program(self, name: str, gm: fx.GraphModule, report: PassReport | None) -> None:
        if report is None and logger.isEnabledFor(logging.INFO):
            self.captured_peak = _peak_bytes(gm, self.ctx)
        path = self.dump.write(name, gm, report) if self.dump else None
        if self.dump and self.kept is not None:
            self.dump.write_timeline(gm, self.kept)
        if self.validator:  # which may reject what has been written
            self.validator(name, gm, report, path)

    def on_rejected(self, name: str, gm: fx.GraphModule, error: Exception) -> None:
        with contextlib.suppress(Exception):  # the first error is the one to hear of
            if self.dump and (path := self.dump.write_rejected(name, gm, error)):
                error.add_note(f"what it has left is in {path}")


def described_optimizers(step: CapturedStep) -> dict[int, dict[str, Any]]:
    """Describe a step's optimizers as plain data, by handle."""
    names = {id(t): info.name for t, info in zip(step.tensors, step.table, strict=True)}
    return {h: describe(substitutes.optimizer_of(h), names) for h in step.optimizers}


def _peak_bytes(gm: fx.GraphModule, ctx: PassContext) -> int:
    sockets = not ctx.options.peer_memory
    return max(live_bytes(gm.graph, ctx.world_size, sockets=sockets, hinted=True), default=0)
