"""What the random numbers of updates are drawn by: places of elements, and counts of updates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zerofx.codegen.rewrite.rounding import step_key
from zerofx.codegen.rewrite.storage import UPDATES, Precision
from zerofx.runtime.optimizer.traces import Parameters


class Draw:
    """What the random numbers of one update depend on, as a kernel takes it: 0-dim tensors.

    ``step`` is how many updates were before it.
    """

    def __init__(self, first_element: int, seed: int, step: int) -> None:
        self.step = step
        self.offset = torch.tensor(first_element, dtype=torch.int64)
        self.key = torch.tensor(step_key(seed, step), dtype=torch.int32)


class Draws:
    """Numbers the elements of an optimizer's parameters, which random numbers are drawn by.

    An element has the same number on any number of ranks: its place among all of the optimizer's.
    """

    def __init__(
        self, precision: Precision, parameters: Parameters, *, rank: int, sharded: bool
    ) -> None:
        self._precision, self._parameters = precision, parameters
        self._rank, self._sharded = rank, sharded
        self._first_elements: dict[int, int] = {}  # by the id of the user's parameter

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Start one optimizer step: number its parameters as they are now."""
        if not self._precision.draws:
            return
        first = 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._first_elements[id(parameter)] = first
                first += parameter.numel()

    def number_of_first(self, parameter: int) -> int:
        """Of this rank's first element of a parameter."""
        reference, info = self._parameters[parameter]
        start = info.owned_by(self._rank)[0] if self._sharded else 0
        return self._first_elements[id(reference())] + start

    def of(self, parameter: int, values: Mapping[str, Any]) -> Draw | None:
        """What random numbers are drawn by in the update of ``values``, if any are."""
        info = self._parameters[parameter][1]
        if not self._precision.draws_for(info.dtype, info.numel):
            return None
        step = int(values.get("step", values.get(UPDATES, 0)))
        return Draw(self.number_of_first(parameter), self._precision.rounding_seed, step)
