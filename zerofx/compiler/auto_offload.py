"""``offload="auto"``: as little as leaves the device for a step to fit its budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from zerofx.errors import BudgetError
from zerofx.ir.parameters import ParameterTable
from zerofx.options import Options


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


def first_that_fits(options: list[Options], try_passes: Callable[[Options], None]) -> int:
    """The number of the first attempt whose program fits.

    Raises: BudgetError if none does, with what the last one would need.
    """
    for number, attempt in enumerate(options):
        try:
            try_passes(attempt)
            return number
        except BudgetError:
            if attempt is options[-1]:
                raise
    raise AssertionError("there is something to try")
