"""An optimizer's step, run on a copy that knows one parameter, and what it has changed."""

from __future__ import annotations

import types
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zerofx import compat
from zerofx.codegen.rewrite.elementwise import UpdateError
from zerofx.codegen.trace.arguments import Arguments, not_carried, own_attributes
from zerofx.codegen.trace.nested import contents, copied, is_same, leaves, reaches, store
from zerofx.codegen.trace.shadow import copy_of
from zerofx.codegen.trace.symbolic import (
    Follower,
    TensorsOfNumbers,
    class_with_copies,
    copying_functions,
)


class ChangingIntegers(Exception):  # noqa: N818 - a request to trace again, not an error
    """The step changes these integers of the group, so they must be inputs."""

    def __init__(self, names: set[str]) -> None:
        self.names = names


class TracedStep:
    """Runs the optimizer's step on a copy of it that knows one parameter only."""

    __name__ = "update"

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        env: compat.scalars.ScalarEnvironment,
        group: Arguments,
        state: Arguments,
        attributes: Mapping[str, Any],
    ) -> None:
        self.optimizer, self.env = optimizer, env
        self.group, self.state, self.attributes = group, state, attributes
        self.follower = Follower()
        self.new_state: tuple[tuple[str, Any], ...] = ()
        self.new_group: tuple[tuple[str, Any], ...] = ()
        self.nested: list[str] = []  # states that are lists or dictionaries of tensors
        self.uses_up_gradient = self.writes_gradient = False
        self.asks_for_shapes = True
        self.changing: set[Any] = set()

    def __call__(self, parameter: Tensor, gradient: Tensor, *inputs: Any) -> list[Any]:
        num_tensors = len(self.group.tensors) + len(self.state.tensors)
        # Now: a branch `x == 0` replaces the symbol of x by the number.
        symbols = {id(number): compat.scalars.expression(number) for number in inputs[num_tensors:]}
        tensors, scalars = iter(inputs[:num_tensors]), iter(inputs[num_tensors:])
        group = self.group.rebuild(tensors, scalars, self.follower.know)
        state = self.state.rebuild(tensors, scalars, self.follower.know)
        if "param_names" in self.optimizer.param_groups[0]:
            group["param_names"] = Elsewhere(
                f"{type(self.optimizer).__name__}.step reads the names of its parameters, but an "
                "update is traced for one parameter, and holds for others. Have those that are "
                "updated otherwise in a parameter group of their own."
            )
        given = {name: copied(value) for name, value in group.items()}
        objects = {name: contents(value) for name, value in group.items()}
        numbers = dict(self.follower.values)
        keys = (compat.tensors.storage_key(parameter), compat.tensors.storage_key(gradient))
        parameter.grad = gradient
        others = set(vars(parameter))  # a stand-in's own
        vars(parameter).update(self.attributes)
        users = {name: contents(value) for name, value in self.attributes.items()}
        self._check_carried(dict(self.state.values))
        self._check_own(dict(self.state.values))

        shadow = self._shadow(parameter, {"params": [parameter], **group}, state)
        attributes, looked_at = dict(shadow.__dict__), {*own_attributes(shadow), "defaults"}
        inside = {name: contents(value) for name, value in attributes.items() if name in looked_at}
        with TensorsOfNumbers() as numbers_mode, self.follower:
            type(shadow).step(shadow)
        self.asks_for_shapes = numbers_mode.asks_for_shapes
        if compat.tensors.storage_key(parameter) != keys[0]:
            raise self._error("assigns `p.data`", "write into it: `p.data.copy_(value)`")
        self._check_attributes(shadow, attributes, inside, parameter)
        for name in vars(parameter).keys() - others:
            if users.get(name) != contents(vars(parameter)[name]):
                raise self._error(f"changes `p.{name}`", "keep it in `self.state[p]`")

        results: list[Any] = []
        new_state = shadow.state.get(parameter, {})
        self._check_carried(new_state)
        self.nested = [
            name
            for name, value in new_state.items()
            if type(value) in (list, tuple, dict)
            and any(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves(value))
        ]
        self._check_apart(new_state, keys[0])
        self.new_state = tuple((name, store(value, results)) for name, value in new_state.items())
        kept = {compat.tensors.storage_key(item) for item in results if isinstance(item, Tensor)}
        writes_into = keys[1] in self.follower.mutated
        self.writes_gradient = writes_into or parameter.grad is not gradient
        self.uses_up_gradient = writes_into or keys[1] in kept
        changed = {
            name: value
            for name, value in shadow.param_groups[0].items()
            if name != "params" and not (name in given and is_same(given[name], value))
        }
        self._check_group(group, changed)
        for name in objects.keys() - changed.keys():
            if objects[name] != contents(group[name]):
                raise self._error(
                    f"changes the {type(group[name]).__name__} in its parameter group's `{name}`",
                    "keep what it changes as numbers of the group, or in `self.state[p]`",
                )
        self.new_group = tuple((name, store(value, results)) for name, value in changed.items())

        unchanged = {id(item) for item in results} | {
            id(number)
            for key, (number, _) in numbers.items()
            if key in kept and key not in self.follower.mutated
        }
        mine = inputs[num_tensors + len(self.group.scalars) :]
        changing = [number for number in mine if id(number) not in unchanged]
        for name in changed.keys() & given.keys():
            changing += leaves(given[name])
        self.changing = {symbols[id(number)] for number in changing if id(number) in symbols}
        return results

    def _shadow(self, parameter: Tensor, group: dict, state: dict) -> torch.optim.Optimizer:
        theirs = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        own = own_attributes(self.optimizer)

        copied_function = copying_functions(self.env)

        def attribute(name: str, value: Any) -> Any:
            if isinstance(value, types.FunctionType):
                return copied_function(value)
            if name not in own:
                return value
            stand_in = Elsewhere(
                f"{type(self.optimizer).__name__}.step looks into its attribute `{name}`, where "
                "parameters, a module or another optimizer are, but an update is traced for one "
                "parameter at a time, which is in `self.param_groups` and nowhere else. Go through "
                "these, and keep what a parameter has of its own in its group or in "
                "`self.state[p]`. If it wraps another optimizer, give the step that one."
            )
            return _without_parameters(copied(value), theirs, stand_in)  # which a trace may change

        kind = class_with_copies(type(self.optimizer), copied_function)
        shadow = copy_of(self.optimizer, kind, attribute)
        if state:
            shadow.state[parameter] = state
        shadow.param_groups = [group]
        return shadow

    def _check_attributes(
        self,
        shadow: Any,
        before: dict[str, Any],
        inside: dict[str, Any],
        parameter: Tensor,
    ) -> None:
        for name, value in shadow.__dict__.items():
            is_other = name not in before or before[name] is not value
            written = isinstance(value, Tensor) and (
                compat.tensors.storage_key(value) in self.follower.mutated
            )
            if is_other or written or (name in inside and inside[name] != contents(value)):
                raise self._error(
                    f"changes its attribute `{name}`, a {type(value).__name__}",
                    "keep it in `self.state[p]`, or in the parameter group",
                )
        if any(key is not parameter for key in shadow.state):
            raise self._error(
                "keeps state that belongs to no parameter", "keep it in the parameter group"
            )

    def _check_carried(self, state: Any) -> None:
        """Refuse a state that holds what the trace would take for a constant."""
        found = not_carried(state)
        if found is not None:
            path, what = found
            raise self._error(
                f"keeps {what} as state `{path}`"
                if path
                else f"has {what} for its `self.state[p]`",
                "keep what it holds as states of their own, `self.state[p][name] = value`, each a "
                "tensor, a number, a string, a boolean or None, or a list, tuple or dict of these",
            )

    def _check_own(self, state: Mapping[str, Any]) -> None:
        """Refuse states that are another parameter's too, or nobody's."""
        entries = self.optimizer.state
        if others := [key for key in entries if not isinstance(key, Tensor)]:
            raise self._error(
                f"may read `self.state[{others[0]!r}]`, which belongs to no parameter",
                "keep it in the parameter group",
            )
        for name, value in state.items():
            holders = [e for e in entries.values() if e.get(name) is value]
            if isinstance(value, (Tensor, list)) and len(holders) > 1:
                raise self._error(
                    f"has one {type(value).__name__} for state `{name}` of several parameters",
                    "give each its own",
                )

    def _check_apart(self, state: dict[str, Any], parameter: Any) -> None:
        """Refuse states in each other's memory: they are kept, and loaded, one by one."""
        names = {parameter: "p"}
        for name, value in state.items():
            if not isinstance(value, Tensor) or not value.dim():
                continue
            other = names.setdefault(compat.tensors.storage_key(value), name)
            if other != name:
                raise self._error(
                    f"keeps one memory as state `{name}` and as `{other}`",
                    "`.clone()` it, or keep it under one name",
                )

    def _check_group(self, group: dict[str, Any], changed: dict[str, Any]) -> None:
        tensors = [item for item in leaves(list(group.values())) if isinstance(item, Tensor)]
        tensors = [t for t in tensors if compat.tensors.storage_key(t) in self.follower.mutated]
        if tensors or any(isinstance(item, Tensor) for item in leaves(list(changed.values()))):
            raise self._error(
                "changes a tensor of its parameter group, which every parameter would repeat",
                "keep it in `self.state[p]`, or make it a Python number",
            )
        integers = {name for name in changed if type(self.group.values.get(name)) is int}
        if integers & self.group.constants:
            raise ChangingIntegers(integers & self.group.constants)

    def _error(self, what: str, remedy: str) -> UpdateError:
        return UpdateError(
            f"{type(self.optimizer).__name__}.step {what}, which a traced update cannot carry "
            f"from one step to the next: {remedy}."
        )


class Elsewhere:
    """Stands for what a step must not look into; says so in these words if it does."""

    def __init__(self, words: str) -> None:
        self._words = words

    def _refuse(self, *_: Any) -> Any:
        raise UpdateError(self._words)

    __getattr__ = __iter__ = __len__ = __contains__ = __getitem__ = _refuse


def holds_parameters(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step may go through parameters, a module or an optimizer by an attribute."""
    theirs = {id(p) for group in optimizer.param_groups for p in group["params"]}
    stand_in = Elsewhere("")
    return any(
        any(leaf is stand_in for leaf in leaves(_without_parameters(value, theirs, stand_in)))
        for value in own_attributes(optimizer).values()
    )


def _without_parameters(value: Any, parameters: Collection[int], stand_in: Any) -> Any:
    """An attribute's value with a stand-in wherever there are parameters, or their ``id``.

    That is for all of an object, or of what is no plain container, that has any inside.

    While tracing, these are others than those in the groups, and have no gradients: a step that
    went through them would do nothing.
    """

    def is_theirs(item: Any) -> bool:
        is_id = type(item) is int and item in parameters
        return isinstance(item, (torch.optim.Optimizer, nn.Module)) or (
            is_id or id(item) in parameters
        )

    if type(value) not in (list, tuple, set, dict):
        return stand_in if is_theirs(value) or reaches(value, parameters) else value
    if any(map(is_theirs, (*value, *value.values()) if type(value) is dict else value)):
        return stand_in
    if type(value) is dict:
        return {key: _without_parameters(item, parameters, stand_in) for key, item in value.items()}
    return type(value)(_without_parameters(item, parameters, stand_in) for item in value)
