"""Ranks that have no batch while others do."""

from __future__ import annotations

from collections.abc import Callable

from zerofx.backend import NO_CALL, zero
from zerofx.errors import StepError


def no_data(step: Callable) -> int:
    """Take part in the others' call of ``step`` without a batch; return how many ranks have one.

    Call it in place of the step once this rank has used up its data::

        for batch in loader:
            step(batch)
        while zerofx.no_data(step):
            pass

    The rank goes through its last call again, with weight zero: it adds nothing to gradients, and
    updates its shards as the others do.  With ``loss="global"`` gradients are means over the ranks
    that have data; with ``loss="rank"`` over all, as ``torch.distributed.algorithms.join.Join`` has
    it.  What the step writes of a batch (running statistics, metrics) stays as it is.

    Returns 0 on all ranks once none has data: nothing was updated, and all may stop.

    Collective: the other ranks call ``step``, or this.

    Raises: StepError if ``step`` was not called before on this rank, or neither ``uneven`` nor
    ``loss="global"`` is set; ValueError if ``step`` is not compiled by this backend.
    """
    code = getattr(getattr(step, "_torchdynamo_orig_callable", None), "__code__", None)
    functions = [one for one in zero.functions if code is not None and one.code is code]
    if not functions:
        raise StepError(f"{step!r} has not been called on this rank: {NO_CALL}")
    return max(functions, key=lambda one: one.called_s).without_data(step)
