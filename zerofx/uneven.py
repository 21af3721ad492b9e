"""Ranks that have no batch while others do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zerofx.backend import zero
from zerofx.errors import StepError


def no_data(step: Callable, *arguments: Any, **by_name: Any) -> int:
    """Take part in the others' call of ``step`` without a batch; return how many ranks have one.

    Call it in place of the step once this rank has used up its data::

        for batch in loader:
            step(batch)
        while zerofx.no_data(step):
            pass

    The rank goes through its last call again, with weight zero: it adds nothing to gradients, and
    updates its shards as the others do.  With ``loss="global"`` gradients are means over the ranks
    that have data; with ``loss="rank"`` over all, as ``torch.distributed.algorithms.join.Join`` has
    it.  What the step writes in place of a batch (running means and variances, metrics) stays as
    it is; what it assigns anew does not.

    What it is called with is what it was called with last, whose tensors have to hold finite
    numbers still.  Give ``arguments`` where that is not right: a rate that the step is called with,
    a flag, another model; or a rank that never had a batch, which may take any of the right form.

    Returns 0 on all ranks once none has data: nothing was updated, and all may stop.

    Collective: the other ranks call ``step``, or this.

    Raises: StepError if ``step`` was not called before on this rank and there are no ``arguments``,
    if neither ``uneven`` nor ``loss="global"`` is set, if the step has no backward, or is not
    compiled by this backend.
    """
    function = zero.function_called_by(step)
    if function is None:
        raise StepError(
            f"{step!r} is not a step of this backend: give what torch.compile(step, "
            'backend="zero") has returned.'
        )
    return function.without_data(step, (arguments, by_name) if arguments or by_name else None)
