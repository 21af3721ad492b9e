"""The traces of an optimizer's step that a compiled program has made, and which of them holds."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zerofx.codegen.rewrite.elementwise import UpdateError
from zerofx.codegen.trace.arguments import (
    Arguments,
    constant_attributes,
    group_values,
    read_arguments,
)
from zerofx.codegen.trace.independence import check_independent
from zerofx.codegen.trace.step import ChangingIntegers
from zerofx.codegen.trace.trace import Update, is_usual, trace_update
from zerofx.ir.parameters import ParameterInfo
from zerofx.runtime.optimizer.setup import UpdateSettings

# What a program's index of a parameter stands for.
Parameters = Mapping[int, tuple[weakref.ref[nn.Parameter], ParameterInfo]]

# A key that needs more traces than this has a line that makes constants of its inputs.
_MANY_SPECIALISATIONS = 8


class GroupOfStep:
    """A parameter group during one step: read once, changed at its end."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.arguments: Arguments | None = None
        self.key = -1
        self.changed: dict[str, Any] = {}


class Traces:
    """Finds the traced update of a parameter as its group and state are now, or makes it.

    An owned parameter's update is traced whole, to be divided later.  On the host, a group's
    tensors are read on the CPU.  ``layouts`` are what a trace depends on of each parameter: if it
    is for shards of any sizes, only its dtype and device.  ``count`` is how many have been made.
    """

    def __init__(
        self,
        optimizer_name: str,
        parameters: Parameters,
        settings: UpdateSettings,
    ) -> None:
        self._optimizer_name = optimizer_name
        self._parameters = parameters
        self.layouts = {
            index: (info.shape, info.stride, info.dtype, info.device)
            for index, (_, info) in parameters.items()
        }
        # One that is divided later is whole until then.
        self._sharded = {index for index in parameters if index not in settings.owned}
        if not settings.sharded:
            self._sharded.clear()
        # What traces of it are known by: for any size first, if there may be such; for its own.
        self._kinds: dict[int, list[tuple]] = {}
        for index, (_, info) in parameters.items():
            may_be_any = index in self._sharded and is_usual(info)
            self._kinds[index] = [(info.dtype, info.device)] * may_be_any + [self.layouts[index]]
        self._settings = settings
        self._known: dict[Hashable, list[Update]] = {}
        self._checked: set[Hashable] = set()
        self._shared_keys: dict[Hashable, int] = {}
        self._changing_integers: set[str] = set()
        self._attributes: tuple = ()
        self.count = 0

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Start one optimizer step: read what a trace depends on beside groups and states."""
        self._attributes = constant_attributes(optimizer)

    def find(
        self,
        optimizer: torch.optim.Optimizer,
        parameter: int,
        group: GroupOfStep,
        state: Arguments,
    ) -> tuple[Update, Arguments]:
        """Return the trace that holds for these arguments, and those of the group.

        Raises: UpdateError if there is none and none can be made.
        """
        arguments = self._read(group)
        info = self._parameters[parameter][1]
        scalars = (*arguments.scalars, *state.scalars)
        keys = [(kind, group.key, state.key) for kind in self._kinds[parameter]]
        for key in keys:
            for update in self._known.get(key, ()):
                if update.guard is None or update.guard(scalars):
                    self.check_gradient(update, parameter)
                    return update, arguments
        moment = (group.key, scalars)
        if state.values and moment not in self._checked:
            self._checked.add(moment)
            check_independent(optimizer, state.values)
        self.count += 1
        info = replace(info, dtype=self._settings.precision.compute_dtype(info.dtype))
        try:
            update = trace_update(
                optimizer, info, group=arguments, state=state, sharded=parameter in self._sharded
            )
        except ChangingIntegers as changing:
            self._changing_integers |= changing.names
            group.arguments = None
            return self.find(optimizer, parameter, group, state)
        self.check_gradient(update, parameter)
        known = self._known.setdefault(keys[0 if update.of_any_sizes else -1], [])
        known.append(update)
        if len(known) == _MANY_SPECIALISATIONS + 1:
            lines = sorted(set(update.conversions)) or ["its branches on hyperparameters"]
            warnings.warn(
                f"{self._optimizer_name}.step has been traced {len(known)} times for parameter "
                f"'{info.name}', because of {', '.join(lines)}: every new value of a "
                "hyperparameter costs a trace. Keep numbers out of int() and numpy.",
                stacklevel=2,
            )
        return update, arguments

    def _read(self, group: GroupOfStep) -> Arguments:
        """Return the arguments that a group gives to its parameters' updates in this step."""
        if group.arguments is None:
            given = group_values(group.values)
            if self._settings.host is not None:  # a tensor's learning rate is read once a step
                given = {
                    k: v.to("cpu", copy=True) if isinstance(v, Tensor) else v
                    for k, v in given.items()
                }
            group.arguments = read_arguments(
                given, shard_shape=None, inputs=self._changing_integers
            )
            # A number for the part of the key that all parameters of the group share.
            shared = (self._attributes, group.arguments.key)
            group.key = self._shared_keys.setdefault(shared, len(self._shared_keys))
        return group.arguments

    def check_gradient(self, update: Update, parameter: int) -> None:
        """Refuse an update that changes a gradient that is read after it."""
        if update.writes_gradient and parameter in self._settings.gradients_read_later:
            name = self._parameters[parameter][1].name
            raise UpdateError(
                f"{self._optimizer_name}.step writes to p.grad, and the gradient of '{name}' is "
                "read after it, in the step or as p.grad once the step is over: zerofx's update "
                "works on a copy. Write `grad = p.grad.clone()` in the optimizer, or call "
                "optimizer.zero_grad() right after optimizer.step()."
            )
