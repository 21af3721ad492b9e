"""Updates on the device: one, several as one, and those that some ranks begin for all."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zerofx.codegen.rewrite.gradient_norm import squares_of
from zerofx.codegen.rewrite.gradient_work import GradientWork
from zerofx.runtime.comm.communication import Communicator
from zerofx.runtime.optimizer.steps import OptimizerSteps


class DeviceUpdates:
    """What runs a program's updates on the device, in its optimizers' steps."""

    def __init__(self, steps: OptimizerSteps, communicator: Communicator) -> None:
        self.steps = steps
        self.communicator = communicator

    def update(
        self,
        values: torch.Tensor,
        grad: torch.Tensor,
        optimizer: int,
        parameter: int,
        found_inf: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self.steps.is_skipped(found_inf):
            return values
        runner = self.steps.runner_with_states(optimizer, [parameter])
        return runner.run(values.detach(), grad, parameter)

    def update_together(
        self,
        values: list[torch.Tensor],
        grads: list[torch.Tensor],
        optimizer: int,
        parameters: list[int],
        found_inf: torch.Tensor | None = None,
        work: GradientWork | None = None,
        coefficients: Sequence[torch.Tensor] = (),
        norm: int | None = None,
    ) -> list[torch.Tensor]:
        """Several updates of one optimizer that follow one another, as one.

        Each with ``work`` of these coefficients done to its gradient first.  For a ``norm``,
        numbers follow the new values, as many: the gradients' squares, divided among them.
        """
        if self.steps.is_skipped(found_inf):
            if norm is None:
                return values
            done = grads if work is None else [work(grad, *coefficients) for grad in grads]
            return [*values, *map(squares_of, done)]
        data = [value.detach() for value in values]
        runner = self.steps.runner_with_states(optimizer, parameters)
        if norm is None:
            return runner.run_together(data, grads, parameters, work, coefficients)
        squares = runner.run_together_and_sum(data, grads, parameters, work, coefficients)
        nothing = torch.zeros_like(squares)
        return [*data, squares, *[nothing] * (len(data) - 1)]

    def on_owners(
        self,
        values: list[torch.Tensor],
        grads: list[torch.Tensor],
        optimizer: int,
        parameters: list[int],
        owners: list[int],
        flops: int,
        found_inf: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """Begin these updates, as far as what needs whole tensors; ``update`` goes on with it."""
        if self.steps.is_skipped(found_inf):
            return grads
        runner = self.steps.runner_with_states(optimizer, parameters)
        shards = [value.detach() for value in values]
        return runner.run_on_owners(shards, grads, parameters, owners, self.communicator)
