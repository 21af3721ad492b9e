"""The traces of an optimizer's step that a compiled program has made, and which of them holds."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Collection, Hashable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zerofx.codegen.rewrite.elementwise import UpdateError
from zerofx.codegen.rewrite.storage import Precision
from zerofx.codegen.trace.arguments import (
    Arguments,
    constant_attributes,
    group_values,
    read_arguments,
)
from zerofx.codegen.trace.independence import check_independent
from zerofx.codegen.trace.trace import ChangingIntegers, Update, trace_update
from zerofx.ir.parameters import ParameterInfo
from zerofx.runtime.optimizer.trace_cache import SHARED_TRACES, NotedDefaults

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

    ``owned`` are the parameters whose update is traced whole, to be divided later;
    ``gradients_read_later`` are those whose gradient somebody reads after the update.  With
    ``on_host``, a group's tensors are read on the CPU.  ``layouts`` are what a trace depends on of
    each parameter, ``count`` is how many have been made, or found among those of other programs.
    """

    def __init__(
        self,
        optimizer_name: str,
        parameters: Parameters,
        *,
        sharded: bool,
        owned: Collection[int],
        gradients_read_later: Collection[int],
        precision: Precision,
        on_host: bool,
    ) -> None:
        self._optimizer_name = optimizer_name
        self._parameters = parameters
        self.layouts = {
            index: (info.shape, info.stride, info.dtype, info.device)
            for index, (_, info) in parameters.items()
        }
        self._sharded, self._owned = sharded, owned
        self._gradients_read_later = gradients_read_later
        self._precision = precision
        self._on_host = on_host
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
        key = (self.layouts[parameter], group.key, state.key)
        known = self._known.setdefault(key, [])
        scalars = (*arguments.scalars, *state.scalars)
        for update in known:
            if update.guard is None or update.guard(scalars):
                self.check_gradient(update, parameter)
                return update, arguments
        moment = (group.key, scalars)
        if state.values and moment not in self._checked:
            self._checked.add(moment)
            check_independent(optimizer, state.values)
        self.count += 1
        info = self._parameters[parameter][1]
        info = replace(info, dtype=self._precision.compute_dtype(info.dtype))
        # One that is divided later is whole until then.
        sharded = self._sharded and parameter not in self._owned
        try:
            update = self._shared_or_traced(optimizer, info, arguments, state, sharded)
        except ChangingIntegers as changing:
            self._changing_integers |= changing.names
            group.arguments = None
            return self.find(optimizer, parameter, group, state)
        self.check_gradient(update, parameter)
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

    def _shared_or_traced(
        self,
        optimizer: torch.optim.Optimizer,
        info: ParameterInfo,
        group: Arguments,
        state: Arguments,
        sharded: bool,
    ) -> Update:
        key = SHARED_TRACES.key(optimizer, info, group=group, state=state, sharded=sharded)
        if key is None:
            return trace_update(optimizer, info, group=group, state=state, sharded=sharded)
        known = SHARED_TRACES.find(key, optimizer, (*group.scalars, *state.scalars))
        if known is not None:
            return known
        noted = NotedDefaults(optimizer.defaults)
        update = trace_update(
            optimizer, info, group=group, state=state, sharded=sharded, defaults=noted
        )
        SHARED_TRACES.keep(key, optimizer, noted, update)
        return update

    def _read(self, group: GroupOfStep) -> Arguments:
        """What a group gives to its parameters' updates in this step."""
        if group.arguments is None:
            given = group_values(group.values)
            if self._on_host:  # a learning rate that is a tensor is read once a step
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
        """Refuse an update that changes a gradient which somebody reads after it."""
        if update.writes_gradient and parameter in self._gradients_read_later:
            name = self._parameters[parameter][1].name
            raise UpdateError(
                f"{self._optimizer_name}.step writes to p.grad, and the gradient of '{name}' is "
                "read after it, in the step or as p.grad once the step is over: zerofx's update "
                "works on a copy. Write `grad = p.grad.clone()` in the optimizer, or call "
                "optimizer.zero_grad() right after optimizer.step()."
            )
