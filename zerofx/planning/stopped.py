"""A compiled function's first call, stopped where its passes would begin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from zerofx import compat
from zerofx.backend import CompiledFunction, ZeroBackend
from zerofx.capture import substitutes
from zerofx.capture.step import CapturedStep
from zerofx.deferred.block import is_block_open
from zerofx.deferred.ledger import LEDGER
from zerofx.errors import StepError
from zerofx.ir.parameters import ParameterTable
from zerofx.options import environment


@dataclass(frozen=True)
class StoppedCall:
    """A step as it was captured, and the options that its user gave, there and in ``environ``.

    ``why_not_sharded`` says why stages from 1 on refuse it; empty if they do not.  ``optimizers``
    keeps them alive for as long as somebody plans.  ``makes_whole`` says that the script makes
    parameters whole, out of ``deferred_init``.
    """

    name: str
    step: CapturedStep
    options: Mapping[str, Any]
    why_not_sharded: str
    environ: Mapping[str, str]
    optimizers: tuple[Any, ...]
    makes_whole: bool

    def on_device(self, kind: str) -> StoppedCall:
        """Return the call as if it were made on another kind of device: it is moved there."""
        device = torch.device(kind, 0) if kind != "cpu" else torch.device(kind)
        compat.other_device.move(self.step.gm, device)
        table = ParameterTable(tuple(replace(info, device=device) for info in self.step.table))
        return replace(self, step=replace(self.step, table=table))


class Stopped(BaseException):
    """Ends a program at its first compiled call; no ``except Exception`` holds it up."""

    def __init__(self, call: StoppedCall) -> None:
        super().__init__(f"{call.name} has been captured, and is not to run")
        self.call = call


def stop(function: CompiledFunction, step: CapturedStep) -> NoReturn:
    """End a call whose step has been captured.

    Raises: Stopped.
    """
    optimizers = tuple(map(substitutes.optimizer_of, step.optimizers))
    options = dict(function.user_options or {})
    whole = all(LEDGER.memory_of(tensor) is None for tensor in step.tensors)
    raise Stopped(
        StoppedCall(
            function.name,
            step,
            options,
            function.why_not_sharded,
            dict(environment()),
            optimizers,
            whole,
        )
    )


def capture(step: Callable, args: tuple, kwargs: Mapping[str, Any], options: Any) -> StoppedCall:
    """Capture ``step(*args, **kwargs)`` as the zero backend does; nothing of it runs.

    Raises: what the backend does for a step that it refuses; StepError within ``deferred_init``.
    """
    if is_block_open():
        raise StepError(
            "zerofx.plan was called inside of deferred_init, where the batch and the step would be "
            "recorded too. Call it after the block: a deferred model stays one."
        )
    plain = getattr(step, "_torchdynamo_orig_callable", step)
    try:
        torch.compile(plain, backend=ZeroBackend(stop), options=options)(*args, **kwargs)
    except Stopped as stopped:
        return stopped.call
    raise AssertionError("the backend captures what it compiles, or raises")
