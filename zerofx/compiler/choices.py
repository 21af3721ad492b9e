"""Options that suit each other: conflicts, steps that ``stop_after`` cuts, ``offload="auto"``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from zerofx.capture.step import CapturedStep
from zerofx.errors import BudgetError
from zerofx.ir.graph import copied_module
from zerofx.ir.mesh import Mesh
from zerofx.ir.parameters import ParameterTable
from zerofx.options import Options, resolve
from zerofx.passes.base import Conflict, PassContext
from zerofx.passes.manager import run_pipeline
from zerofx.passes.pipeline import PIPELINE, rewrites


def choose(
    options: Mapping[str, object] | None,
    environ: Mapping[str, str] | None = None,
    *,
    is_complete: bool = True,
) -> Options:
    """Resolve options, and check them together, by what each pass says.

    Options that are not ``is_complete`` may lack what the environment may still add.

    Raises: ValueError for values that are each allowed and make no sense together; what
    ``resolve`` does.
    """
    chosen = resolve(options, environ)
    refuse_conflicts(chosen, is_complete=is_complete)
    return chosen


def refuse_conflicts(options: Options, *, is_complete: bool = True) -> None:
    """Raise ValueError for options that make no sense together, by what each pass says."""
    for conflict in (*_OF_PLANS, *(each for step in PIPELINE for each in step.conflicts)):
        if (is_complete or not conflict.is_lack) and conflict.when(options):
            raise ValueError(conflict.words.format(**vars(options)))


_OF_PLANS = (
    Conflict(
        lambda options: options.plan and options.memory_budget is not None,
        "plan='auto' chooses memory_budget: drop it, and say with memory_limit how much of the "
        "device a rank's process may take in all",
    ),
    Conflict(
        lambda options: options.plan and "auto" in options.offload,
        "plan='auto' chooses what leaves the device too: drop offload='auto', or plan",
    ),
    Conflict(
        lambda options: options.plan and options.stop_after,
        "plan='auto' chooses a whole program, and stop_after={stop_after!r} ends it before that: "
        "drop one",
    ),
    Conflict(
        lambda options: options.memory_limit is not None and not options.plan,
        "memory_limit={memory_limit} is what plan='auto' chooses a program for: add that, or give "
        "memory_budget, which is what a step may allocate",
        is_lack=True,
    ),
)


def stopped(options: Options) -> Options:
    """Return options with which no pass behind ``stop_after`` runs.

    Later optional passes are off; tensors that later passes would shard or offload stay whole and
    on the device.

    Raises: ValueError if what else is chosen needs a later pass.
    """
    if options.stop_after is None:
        return options
    names = [step.name for step in rewrites(PIPELINE)]
    later = rewrites(PIPELINE)[names.index(options.stop_after) + 1 :]
    changed: dict[str, Any] = {step.name: False for step in later if step.optional}
    shards = [step for step in later if not (step.optional or step.offloads or step.quantizes)]
    changed["stage"] = min([options.stage, *(step.smallest_stage - 1 for step in shards)])
    if options.outer_stage is not None:
        changed["outer_stage"] = min(options.outer_stage, changed["stage"])
    movers = [step for step in later if step.offloads and not step.tiers]
    missing = {"auto", *(target for step in movers for target in step.offloads)} if movers else ()
    offload = tuple(target for target in options.offload if target not in missing)
    changed["offload"] = offload
    if any(step.tiers for step in later) or not offload:
        changed |= {"offload_tier": "cpu", "offload_dir": (), "offload_cache_bytes": None}
        changed["offload_checksums"] = False
    if options.delayed_update and (changed["stage"] < 3 or "optimizer" not in offload):
        changed["delayed_update"] = False
    changed |= {step.quantizes: None for step in later if step.quantizes}
    if "reduce_wire" in changed:
        changed |= {"outer_wire": None, "error_feedback": None, "outer_feedback": None}
    for name in ("master_weights", "moment_dtype"):
        if changed["stage"] == 0 and getattr(options, name):
            raise ValueError(
                f"stop_after={options.stop_after!r} leaves optimizer states whole, and {name} needs"
                f" them sharded: stop after 'shard_optimizer' or later, or drop {name}"
            )
    return replace(options, **changed)


def attempts(options: Options, table: ParameterTable, mesh: Mesh) -> list[Options]:
    """Return the options to try in turn, for the ``memory_budget`` of all that is on the device.

    What moves fewest bytes for those that it frees comes first: states, once a step there and back
    with what their update needs, and only as many as do not fit; then activations too, as few as
    it takes; at stage 3 parameters at last, which come for each of their gathers, unless second
    shards of them are kept on the device.
    """
    assert options.memory_budget is not None
    kept = sum(
        info.nbytes if options.stage < 3 else info.kept.largest_shard_numel * info.dtype.itemsize
        for info in table
    )
    if options.secondary_shard and mesh.outer:
        kept += kept * mesh.size(mesh.outer)
    besides = max(options.memory_budget - kept, 1)
    leaving = ("optimizer",), ("optimizer", "activations")
    found = [replace(options, offload=targets, memory_budget=besides) for targets in leaving]
    stays = options.secondary_shard or options.outer_stage in (1, 2)
    if options.stage == 3 and not stays:
        found.append(replace(options, offload=("optimizer", "params", "activations")))
    return found


def first_that_fits(step: CapturedStep, contexts: Sequence[PassContext]) -> int:
    """Return the number of the first of these that gives a program that fits.

    Raises: BudgetError if none does, with what the last one would need.
    """
    for number, ctx in enumerate(contexts):
        try:
            run_pipeline(copied_module(step.gm), ctx, rewrites(PIPELINE))
            return number
        except BudgetError:
            if ctx is contexts[-1]:
                raise
    raise AssertionError("there is something to try")
