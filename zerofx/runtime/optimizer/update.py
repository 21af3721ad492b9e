"""Run an optimizer's update on what this rank holds of each parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zerofx.codegen.rewrite.gradient_work import GradientWork
from zerofx.codegen.trace.arguments import read_arguments
from zerofx.codegen.trace.independence import check_independent
from zerofx.ir.parameters import ParameterInfo
from zerofx.runtime.optimizer.context import ReadyUpdate, UpdateContext
from zerofx.runtime.optimizer.fused import FusedUpdates
from zerofx.runtime.optimizer.setup import UpdateSettings
from zerofx.runtime.optimizer.states import StatePlaces
from zerofx.runtime.optimizer.whole_tensors import OwnedUpdates


class OptimizerRunner:
    """Updates parameters as an optimizer's ``step`` would, one at a time.

    Between steps ``optimizer.state`` holds this rank's states: flat shards if ``sharded``, laid
    out like the parameter's shard, and 0-dim tensors and numbers as they are.  Whole states from
    elsewhere have been cut by ``attach_optimizer``.  Hyperparameters are read from the live
    ``optimizer.param_groups`` once per step and group.

    ``parameters`` maps the index that the program uses to the user's parameter and its layout.
    ``owned.begin`` begins the update of ``settings.owned`` parameters, and ``run`` ends it.

    A step is ``begin()``, one ``run()`` per parameter in any order, ``end()``.  For ``run``,
    ``ready`` may do all but the elements, which another thread can do, and ``finish`` the rest.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[int, tuple[nn.Parameter, ParameterInfo]],
        settings: UpdateSettings,
    ) -> None:
        self._context = UpdateContext(optimizer, parameters, settings)
        self.owned = OwnedUpdates(self._context)
        self._fused = FusedUpdates(self._context)
        self.states = StatePlaces(self._context)

    @property
    def trace_count(self) -> int:
        """The number of traces of the optimizer's Python."""
        return self._context.traces.count

    def begin(self) -> None:
        """Start one optimizer step: look up every parameter's group as it is now."""
        self._context.begin()
        self.owned.forget()

    def prepare(self, parameters: Iterable[int]) -> None:
        """Trace the first update of these parameters without running it.

        An optimizer that cannot be compiled is refused here, before anything has changed.
        Parameters that have states already are left for their first run.

        Raises: UpdateError if an update cannot be traced, or not run on shards.
        """
        context, optimizer = self._context, self._context.live_optimizer()
        check_independent(optimizer)
        nothing = read_arguments({}, shard_shape=None, inputs=())
        with context.outside_of_a_step():
            for parameter in parameters:
                reference, info = context.parameters[parameter]
                group, is_owned = context.group_of(parameter), parameter in context.settings.owned
                context.storage.check(info)
                if is_owned:
                    self.owned.check_precision(info)
                if group is not None and not optimizer.state.get(reference()):
                    update, _ = context.traces.find(optimizer, parameter, group, nothing)
                    if is_owned:
                        self.owned.divide(update, info)

    def run(self, data: Tensor, grad: Tensor, parameter: int) -> Tensor:
        """Update ``data`` in place with ``grad``, and this parameter's state; return ``data``.

        Shapes: both flat [n] of the parameter's shard if sharded (n may be 0), else both of the
        parameter's shape.

        Raises: UpdateError if the update cannot be traced, or not run on shards; ValueError if
        a state is neither a shard like ``data`` nor a scalar (if sharded).
        """
        if self.owned.has_begun(parameter):
            return self.owned.finish(data, grad, parameter)
        self.ready(data, grad, parameter).run()
        return data

    def ready(self, data: Tensor, grad: Tensor, parameter: int) -> ReadyUpdate:
        """Do of ``run`` what only the step's thread may: trace, compile and read numbers."""
        context, optimizer = self._context, self._context.live_optimizer()
        user_parameter, info, group = context.of_step(parameter)
        with torch.no_grad():
            values = optimizer.state.get(user_parameter) or {}
            context.storage.adopt(values, data, info)
            if context.settings.sharded:
                context.check_shards(values, data, info)
            shard_shape = tuple(data.shape) if context.settings.sharded else None
            logical = context.storage.logical(values, info)
            state = read_arguments(logical, shard_shape=shard_shape, inputs=logical)
            traced, arguments = context.traces.find(optimizer, parameter, group, state)
            draw = context.draws.of(parameter, values)
            update, tensors, numbers = context.storage.rewrite(
                traced, values, arguments, state, data, grad.dtype, draw
            )
            run = context.in_blocks(update, data, grad) if update.scales else None

        def compute() -> Any:
            converted = grad.to(update.gradient_dtype or data.dtype)  # eager's is the parameter's
            return update(data, converted, tensors, numbers, run)

        def finish(found: Any) -> None:
            new_state, new_group = found
            context.storage.settle(new_state, values, data, info, draw)
            context.keep(user_parameter, group, values, new_state, new_group)

        return ReadyUpdate(compute, finish)

    def run_together(
        self,
        data: Sequence[Tensor],
        grads: Sequence[Tensor],
        parameters: Sequence[int],
        work: GradientWork | None = None,
        coefficients: Sequence[Tensor] = (),
    ) -> list[Tensor]:
        """Do as ``run`` does to each of several sharded parameters, in one kernel where it can.

        That is where shards, gradients and states lie next to each other and the same update
        holds for all.  States are laid out so when they are first met.  ``work``, if given, is
        done to each gradient first, in the same kernel.
        """
        members = list(zip(data, grads, parameters, strict=True))
        if any(map(self.owned.has_begun, parameters)):
            assert work is None, "what began an update has read its gradient, so that it is there"
            return [self.run(*member) for member in members]
        self._fused.run(members, self.run, work, coefficients, None)
        return list(data)

    def ready_together(
        self, data: Sequence[Tensor], grads: Sequence[Tensor], parameters: Sequence[int]
    ) -> list[ReadyUpdate]:
        """Do of ``run_together``, on a CPU, what only the step's thread may."""
        return self._fused.ready(list(zip(data, grads, parameters, strict=True)), self.ready)

    def run_together_and_sum(
        self,
        data: Sequence[Tensor],
        grads: Sequence[Tensor],
        parameters: Sequence[int],
        work: GradientWork | None = None,
        coefficients: Sequence[Tensor] = (),
    ) -> Tensor:
        """Do as ``run_together`` does, and return the sum of all gradients' squares.

        It is of the gradients after ``work``, 0-dim, in float32.
        """
        squares: list[Tensor] = []
        members = list(zip(data, grads, parameters, strict=True))
        self._fused.run(members, self.run, work, coefficients, squares)
        return squares[0] if len(squares) == 1 else torch.stack(squares).sum()

    def end(self) -> Callable[[], None]:
        """Finish the step: write changed group entries back, and let LR schedulers know.

        What it returns writes back what updates change that finish later.
        """
        groups = self._context.end()

        def keep_groups() -> None:
            for group in groups:
                group.values.update(group.changed)

        keep_groups()
        self.live_optimizer()._opt_called = True
        return keep_groups

    def live_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer.  Raises: RuntimeError if it is gone."""
        return self._context.live_optimizer()
