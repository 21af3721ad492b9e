"""A compiled function's first call, stopped where its passes would begin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from zerofx.backend import CompiledFunction, ZeroBackend
from zerofx.capture import substitutes
from zerofx.capture.step import CapturedStep


@dataclass(frozen=True)
class StoppedCall:
    """A step as it was captured, and the options that its user gave.

    ``optimizers`` keeps them alive for as long as somebody plans.
    """

    name: str
    step: CapturedStep
    options: Mapping[str, Any]
    optimizers: tuple[Any, ...]


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
    raise Stopped(StoppedCall(function.name, step, dict(function.user_options or {}), optimizers))


def capture(step: Callable, args: tuple, kwargs: Mapping[str, Any], options: Any) -> StoppedCall:
    """Capture ``step(*args, **kwargs)`` as the zero backend does; nothing of it runs.

    Raises: what the backend does for a step that it refuses.
    """
    plain = getattr(step, "_torchdynamo_orig_callable", step)
    try:
        torch.compile(plain, backend=ZeroBackend(stop), options=options)(*args, **kwargs)
    except Stopped as stopped:
        return stopped.call
    raise AssertionError("the backend captures what it compiles, or raises")
