"""``zerofx.explain(step)``: what was compiled, in tables that a newcomer can read."""

from __future__ import annotations

from collections.abc import Callable

from zerofx.backend import zero
from zerofx.report.explain import explanation


def explain(step: Callable) -> str:
    """Describe every program compiled for ``step``: shards, memory, traffic, passes.

    ``step`` is what ``torch.compile(step, backend="zero")`` returned; call it once before.
    Not collective.

    Raises: ValueError if ``step`` has not been compiled by this backend.
    """
    function = getattr(step, "_torchdynamo_orig_callable", None)
    code = getattr(function, "__code__", None)
    compiled = [known for known in zero.functions if known.code is code and known.programs]
    if code is None or not compiled:
        raise ValueError(
            f"{step!r} has no zero-compiled program yet: pass what "
            'torch.compile(step, backend="zero") returned, after its first call.'
        )
    parts = [
        explanation(program, with_seconds=True)
        for function in compiled
        for program in function.programs
    ]
    return "\n\n".join(parts)
