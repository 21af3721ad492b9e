"""The state that the updates of one optimizer share, and the step of it that is under way."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zerofx.codegen.kernels import Kernels
from zerofx.codegen.rewrite.elementwise import UpdateError
from zerofx.codegen.rewrite.storage import NATIVE
from zerofx.codegen.trace.arguments import Arguments, read_arguments
from zerofx.codegen.trace.trace import Update
from zerofx.ir.parameters import ParameterInfo
from zerofx.runtime.optimizer.joined_states import keep_state
from zerofx.runtime.optimizer.precision import Draws, StateStorage, is_scale
from zerofx.runtime.optimizer.setup import UpdateSettings
from zerofx.runtime.optimizer.traces import GroupOfStep, Traces


class UpdateContext:
    """One optimizer with its traces, kernels and parameters, and its groups during a step.

    The arguments are those of ``OptimizerRunner``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[int, tuple[nn.Parameter, ParameterInfo]],
        settings: UpdateSettings,
    ) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.optimizer_name = type(optimizer).__name__
        self.parameters = {
            index: (weakref.ref(parameter), info) for index, (parameter, info) in parameters.items()
        }
        if settings.host is not None:
            cpu = torch.device("cpu")
            self.parameters = {
                index: (reference, replace(info, device=cpu))
                for index, (reference, info) in self.parameters.items()
            }
        self.settings = settings
        self.traces = Traces(self.optimizer_name, self.parameters, settings)
        self.storage = StateStorage(settings.precision, self.optimizer_name)
        self.draws = Draws(self.parameters, settings)
        self.kernels = Kernels(settings.keep_source)
        self._groups: dict[int, GroupOfStep] | None = None  # by the id of the parameter

    def begin(self) -> None:
        """Start one step of the optimizer: look up every parameter's group as it is now."""
        optimizer = self.live_optimizer()
        self.traces.begin(optimizer)
        self._groups = {}
        for values in optimizer.param_groups:
            group = GroupOfStep(values)
            for parameter in values["params"]:
                self._groups[id(parameter)] = group
        self.draws.begin(optimizer)

    def end(self) -> list[GroupOfStep]:
        """Forget the groups, and return them."""
        groups, self._groups = list((self._groups or {}).values()), None
        return groups

    def group_of(self, parameter: int) -> GroupOfStep | None:
        """The group of a parameter in the step under way; None if it is in none any more."""
        assert self._groups is not None, "begin() has been called"
        return self._groups.get(id(self.parameters[parameter][0]()))

    def of_step(self, parameter: int) -> tuple[nn.Parameter, ParameterInfo, GroupOfStep]:
        """The user's parameter, its layout, and its group in the step under way."""
        if self._groups is None:
            raise RuntimeError(
                f"{self.optimizer_name}: an update ran outside of a step; call begin() before "
                "the step's first run() and end() after its last"
            )
        reference, info = self.parameters[parameter]
        user_parameter = reference()
        group = self._groups.get(id(user_parameter))
        if user_parameter is None or group is None:
            raise UpdateError(
                f"{self.optimizer_name} no longer has parameter '{info.name}' in any parameter "
                "group, but the compiled step updates it. Add it with add_param_group."
            )
        return user_parameter, info, group

    def traced(
        self,
        parameter: int,
        group: GroupOfStep,
        values: Mapping[str, Any],
        shape: tuple[int, ...],
    ) -> tuple[Update, Arguments, Arguments]:
        """The traced update of a parameter whose state is ``values``; its group's and its state's.

        ``shape`` is that of what is updated.
        """
        info = self.parameters[parameter][1]
        logical = self.storage.logical(values, info)
        shard_shape = shape if self.settings.sharded else None
        state = read_arguments(logical, shard_shape=shard_shape, inputs=logical)
        return *self.traces.find(self.live_optimizer(), parameter, group, state), state

    def keep_state(
        self,
        users: Sequence[Any],
        lengths: Sequence[int],
        values: Mapping[str, Any],
        new_state: Mapping[str, Any],
    ) -> None:
        """Keep what an update of neighbours, or of one parameter, has made of their states."""
        if new_state or values:
            live = self.live_optimizer().state
            keep_state(new_state, values, [live[user] for user in users], lengths)

    def live_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer.  Raises: RuntimeError if it is gone."""
        optimizer = self.optimizer()
        if optimizer is None:
            raise RuntimeError(
                f"the {self.optimizer_name} of a compiled step is gone: keep a reference to it "
                "for as long as the step is called"
            )
        return optimizer

    def check_shards(self, values: Mapping[str, Any], data: Tensor, info: ParameterInfo) -> None:
        """Refuse a state that is neither this rank's shard nor a number."""
        native = values.get(NATIVE, {})
        for name, value in values.items():
            if is_scale(name, native):
                continue
            if isinstance(value, Tensor) and value.ndim > 0 and value.shape != data.shape:
                raise ValueError(
                    f"state '{name}' of parameter '{info.name}' has shape {tuple(value.shape)} on "
                    f"rank {self.settings.rank}; expected that rank's shard, {tuple(data.shape)}, "
                    "or a scalar. Set states with optimizer.load_state_dict, which takes them "
                    f"whole, of the parameter's shape {info.shape}."
                )
