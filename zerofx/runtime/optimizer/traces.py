"""The traces of an optimizer's step that a compiled program has made, and which of them holds."""

from __future__ import annotations

import operator
import sys
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zerofx import compat
from zerofx.codegen.rewrite.elementwise import UpdateError
from zerofx.codegen.trace.arguments import (
    Arguments,
    constant_attributes,
    group_values,
    plain_key,
    read_arguments,
)
from zerofx.codegen.trace.independence import check_independent
from zerofx.codegen.trace.trace import ChangingIntegers, Update, is_usual, trace_update
from zerofx.ir.parameters import ParameterInfo
from zerofx.runtime.optimizer.setup import UpdateSettings

# What a program's index of a parameter stands for.
Parameters = Mapping[int, tuple[weakref.ref[nn.Parameter], ParameterInfo]]

# A key that needs more traces than this has a line that makes constants of its inputs.
_MANY_SPECIALISATIONS = 8


class SharedTraces:
    """The traces that programs of a process share; those not used for long are dropped.

    A trace is shared where all that it depends on can be told, and is in its key.  That is so for
    the classes of ``torch.optim`` themselves.  What a user's class reads cannot be told, nor a
    subclass's: each program traces these for itself.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, list[Update]] = OrderedDict()
        self._code: dict[type, tuple[list[Any], int]] = {}
        self._lock = threading.Lock()

    def keys(
        self,
        optimizer: torch.optim.Optimizer,
        info: ParameterInfo,
        *,
        group: Arguments,
        state: Arguments,
        sharded: bool,
    ) -> list[Hashable]:
        """Return all that ``trace_update`` of these depends on, then the same without sizes.

        The second is left out if sizes count; both are if not all can be told.
        """
        kind = type(optimizer)
        is_torchs = kind.__module__.startswith("torch.optim.")
        if not is_torchs or getattr(torch.optim, kind.__name__, None) is not kind:
            return []
        parts = (
            plain_key({k: v for k, v in vars(optimizer).items() if not _is_apart(k)}),
            plain_key(group.key),
            plain_key(state.key),
            compat.settings_of_traces(),
        )
        if None in parts:
            return []
        numbers = tuple(map(type, (*group.scalars, *state.scalars)))
        shared = (kind, self._version(kind), *parts, numbers, info.dtype, info.device, sharded)
        exact = (*shared, info.shape, info.stride)
        return [exact, shared] if sharded and is_usual(info) else [exact]

    def find(self, keys: Sequence[Hashable], scalars: Sequence[float | int]) -> Update | None:
        """Return a trace with one of these keys that holds for these numbers, if one is known."""
        with self._lock:
            for key in keys:
                for update in self._known.get(key, ()):
                    if update.guard is None or update.guard(scalars):
                        self._known.move_to_end(key)
                        return update
        return None

    def keep(self, keys: Sequence[Hashable], update: Update) -> None:
        """Let others have a trace that has been made for these keys."""
        # What has conversions was made for these numbers alone, and knows the lines that made them.
        if not keys or update.conversions:
            return
        key = keys[-1] if update.of_any_sizes else keys[0]
        with self._lock:
            self._known.setdefault(key, []).append(update)
            self._known.move_to_end(key)
            while len(self._known) > _MOST_KEYS:
                self._known.popitem(last=False)

    def _version(self, kind: type) -> int:
        """A number for an optimizer's code as it is now: something may have replaced some of it.

        That is torch.optim's own; what it calls of the rest of torch is taken to stay.
        """
        bases = [base for base in kind.__mro__ if base is not object]
        tables = (*map(vars, bases), *(vars(sys.modules[base.__module__]) for base in bases))
        members = (member for table in tables for member in table.values())
        code = [part for one in members for part in (one, getattr(one, "__code__", None))]
        with self._lock:
            known, version = self._code.get(kind, ([], 0))
            if len(code) != len(known) or not all(map(operator.is_, code, known)):
                version += 1
                self._code[kind] = code, version
        return version


def _is_apart(name: str) -> bool:
    """Return whether an attribute of an optimizer has no part in a trace, or is given apart."""
    return name in _APART or (name.startswith("_optimizer_") and name.endswith("_hooks"))


_APART = {"param_groups", "state", "step", "_opt_called", "_step_count"}
_MOST_KEYS = 256

SHARED_TRACES = SharedTraces()
"""Those of this process: they hold nothing of a program's."""


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
    tensors are read on the CPU.  ``layouts`` are what a trace depends on of
    each parameter, ``count`` is how many have been made, or found among
    those of other programs.
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
        # One that is divided later is whole until then.
        sharded = self._settings.sharded and parameter not in self._settings.owned
        known = self._known.setdefault((self.layouts[parameter], group.key, state.key), [])
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
        info = replace(info, dtype=self._settings.precision.compute_dtype(info.dtype))
        given: dict[str, Any] = {"group": arguments, "state": state, "sharded": sharded}
        keys = SHARED_TRACES.keys(optimizer, info, **given)
        shared = SHARED_TRACES.find(keys, scalars)
        try:
            update = shared or trace_update(optimizer, info, **given)
        except ChangingIntegers as changing:
            self._changing_integers |= changing.names
            group.arguments = None
            return self.find(optimizer, parameter, group, state)
        if shared is None:
            SHARED_TRACES.keep(keys, update)
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
