"""``offload="auto"``: as little as leaves the device for a step to fit its budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zerofx.capture.step import CapturedStep
from zerofx.errors import BudgetError
from zerofx.ir.graph import copied_module
from zerofx.ir.parameters import ParameterTable
from zerofx.options import Options
from zerofx.passes.base import PassContext
from zerofx.passes.manager import run_pipeline
from zerofx.passes.pipeline import PIPELINE, rewrites


def attempts(options: Options, table: ParameterTable) -> list[Options]:
    """Return the options to try in turn, for the ``memory_budget`` of all that is on the device.

    What moves fewest bytes for those that it frees comes first: states, once a step there and back
    with what their update needs, and only as many as do not fit; then activations too, as few as
    it takes; at stage 3 parameters at last, which come for each of their gathers.
    """
    assert options.memory_budget is not None
    kept = sum(
        info.nbytes if options.stage < 3 else info.largest_shard_numel * info.dtype.itemsize
        for info in table
    )
    besides = max(options.memory_budget - kept, 1)
    found = [
        replace(options, offload=targets, memory_budget=besides)
        for targets in (("optimizer",), ("optimizer", "activations"))
    ]
    if options.stage == 3:
        found.append(replace(options, offload=("optimizer", "params", "activations")))
    return found


def first_that_fits(step: CapturedStep, contexts: Sequence[PassContext]) -> int:
    """Return the number of the first of these that gives a program that fits.

    Raises: BudgetError if none does, with what the last one would need.
    """
    for number, ctx in enumerate(contexts):
        gm = copied_module(step.gm)
        try:
            run_pipeline(gm, ctx, rewrites(PIPELINE))
            return number
        except BudgetError:
            if ctx is contexts[-1]:
                raise
    raise AssertionError("there is something to try")
