"""An optimizer's own step, run as it is on whole tensors that stand for its parameters."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from zerofx.codegen.rewrite.elementwise import UpdateError
from zerofx.codegen.trace.arguments import BY_PLACE, own_attributes
from zerofx.codegen.trace.independence import check_independent
from zerofx.codegen.trace.nested import leaves, map_leaves
from zerofx.runtime.optimizer.traces import TracedOptimizer

_IDLE_SHAPE = (4, 4)
_NUMBERS = (int, float)


def shares_states(states: Mapping[Any, Mapping[str, Any]]) -> bool:
    """Return whether one tensor is in the states of several parameters."""
    found = [
        {id(leaf) for leaf in leaves(dict(state)) if isinstance(leaf, Tensor)}
        for key, state in states.items()
        if isinstance(key, Tensor)
    ]
    return sum(map(len, found)) > len(set().union(*found))


class WholeParameter(NamedTuple):
    """A parameter's value and gradient, both of its shape."""

    value: Tensor
    gradient: Tensor


class _Cast:
    """Holds what stands for each of the user's parameters, and for a group that has none here."""

    def __init__(self) -> None:
        self.stand_ins = WeakIdKeyDictionary()
        self.idles: dict[int, tuple[nn.Parameter, dict[str, Any]]] = {}


_CASTS: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Cast] = weakref.WeakKeyDictionary()


class OwnStep:
    """Runs an optimizer's step on some of its parameters, as if they were all that it has.

    The stand-ins stay the same objects in all programs, so that a step may know them by their
    ``id``.  A group of which this rank owns no parameter has an idle one, without a gradient if
    none of the group's has one: what counts the group's steps goes on.
    """

    def __init__(self, optimizer: TracedOptimizer) -> None:
        self._optimizer = optimizer
        self._cast: _Cast = _CASTS.setdefault(optimizer.live_optimizer(), _Cast())
        self._gradients: dict[int, Tensor] = {}  # as they were, where they are read later
        self._count = 0

    def run(
        self, wholes: Mapping[int, WholeParameter], parameters: Collection[int]
    ) -> dict[int, Tensor]:
        """Run the step once on what this rank owns of ``parameters``; return the new values.

        All are by the parameters' numbers.  States stay with the user's parameters.

        Raises: UpdateError if an update turns out to depend on other parameters, as far as the
        states that it has by now show.
        """
        optimizer = self._optimizer.live_optimizer()
        self._count += 1
        if self._count.bit_count() == 1:  # now and then, for steps may branch on their number
            self._check_again(optimizer, next(iter(wholes), None))
        known = self._optimizer.parameters
        users = {index: known[index].user() for index in parameters}
        updated = {id(user) for user in users.values()}
        stand_ins = {id(users[index]): self._stand_in(index, wholes[index]) for index in wholes}
        groups, states = optimizer.param_groups, optimizer.state
        by_place = [{key: group[key] for key in BY_PLACE & group.keys()} for group in groups]
        own: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        own.update((key, state) for key, state in states.items() if not isinstance(key, Tensor))
        for index in wholes:
            if users[index] in states:
                own[stand_ins[id(users[index])]] = states[users[index]]
        try:
            for number, (group, its) in enumerate(zip(groups, by_place, strict=True)):
                members = its["params"]
                mine = {at: stand_ins[id(p)] for at, p in enumerate(members) if id(p) in stand_ins}
                if members and not mine:
                    elsewhere = (at for at, p in enumerate(members) if id(p) in updated)
                    at = next(elsewhere, None)
                    idle, state = self._idle_in(number, members[at or 0], at is not None)
                    own[idle], mine = state, {at or 0: idle}
                group["params"] = list(mine.values())
                if "param_names" in its:
                    group["param_names"] = [its["param_names"][at] for at in mine]
            optimizer.state = own
            # What a step compiles for itself cannot be compiled while a compiled step runs.
            with torch.enable_grad(), torch.compiler.set_stance("force_eager"):
                type(optimizer).step(optimizer)
        finally:
            optimizer.state = states
            for group, its in zip(groups, by_place, strict=True):
                group.update(its)
            for index in wholes:
                states.pop(users[index], None)
                if (stand_in := stand_ins[id(users[index])]) in own:
                    states[users[index]] = own[stand_in]
            states.update((key, own[key]) for key in own if not isinstance(key, Tensor))
        if len(wholes) < len(parameters) and shares_states(states):
            raise UpdateError(
                f"{self._optimizer.name}.step has one tensor in the states of several parameters: "
                "each parameter's are on the rank that owns it. Give each its own."
            )
        return {index: self._taken(index, whole.gradient) for index, whole in wholes.items()}

    def _check_again(self, optimizer: torch.optim.Optimizer, index: int | None) -> None:
        """Check that updates are independent with the state that a parameter has by now.

        If it is of numbers and of tensors of the parameter's shape, which small ones stand for.
        """
        if index is None:
            return
        parameter = self._optimizer.parameters[index]
        state = optimizer.state.get(parameter.user())
        shapes = ((), parameter.info.shape)
        plain = (*(int, float, bool, str), type(None))
        if state and all(
            tuple(v.shape) in shapes if isinstance(v, Tensor) else isinstance(v, plain)
            for v in state.values()
        ):
            check_independent(optimizer, state)

    def numbers(self) -> list[tuple[int, int | float]]:
        """Return the numbers in groups, by the group's, and floats in attributes, by -1."""
        optimizer = self._optimizer.live_optimizer()
        found: list[tuple[int, int | float]] = []
        for number, group in enumerate(optimizer.param_groups):
            for key in sorted(group.keys() - BY_PLACE):
                found += [(number, leaf) for leaf in leaves(group[key]) if type(leaf) in _NUMBERS]
        attributes = leaves(own_attributes(optimizer))
        return found + [(-1, leaf) for leaf in attributes if type(leaf) is float]

    def take_numbers(self, number: int, values: Iterator[float]) -> None:
        """Have these for a group's numbers, in the order of ``numbers``."""

        def taken(leaf: Any) -> Any:
            return type(leaf)(next(values)) if type(leaf) in _NUMBERS else leaf

        group = self._optimizer.live_optimizer().param_groups[number]
        for key in sorted(group.keys() - BY_PLACE):
            if any(type(leaf) in _NUMBERS for leaf in leaves(group[key])):
                group[key] = map_leaves(taken, group[key])

    def _stand_in(self, index: int, whole: WholeParameter) -> nn.Parameter:
        user, stand_ins = self._optimizer.parameters[index].user(), self._cast.stand_ins
        if user not in stand_ins:
            stand_ins[user] = nn.Parameter(whole.value)
        stand_in = stand_ins[user]
        stand_in.data = whole.value
        stand_in.grad = whole.gradient
        if index in self._optimizer.settings.gradients_read_later:
            self._gradients[index] = whole.gradient.clone()
        vars(stand_in).update(vars(user))
        return stand_in

    def _taken(self, index: int, gradient: Tensor) -> Tensor:
        """Return a parameter's new value, and hold it no longer."""
        parameter = self._optimizer.parameters[index]
        stand_in = self._cast.stand_ins[parameter.user()]
        value, before = stand_in.data, self._gradients.pop(index, None)
        is_replaced = stand_in.grad is not gradient
        stand_in.data, stand_in.grad = value.new_empty(0), None
        vars(parameter.user()).update(vars(stand_in))
        if value.shape != parameter.info.shape or value.dtype != parameter.info.dtype:
            raise UpdateError(
                f"{self._optimizer.name}.step has made {value.dtype} of shape "
                f"{tuple(value.shape)} of parameter '{parameter.info.name}', which is "
                f"{parameter.info.dtype} of shape {parameter.info.shape}."
            )
        if before is not None and (
            is_replaced or not torch.equal(before.nan_to_num(), gradient.nan_to_num())
        ):
            self._optimizer.check_written_gradient(parameter)
        return value

    def _idle_in(
        self, number: int, like: Tensor, has_gradient: bool
    ) -> tuple[nn.Parameter, dict[str, Any]]:
        """Return what a group has in place of parameters, and its state."""
        idles = self._cast.idles
        if number not in idles:
            numel = _IDLE_SHAPE[0] * _IDLE_SHAPE[1]
            values = torch.linspace(-1, 1, numel, device=like.device).to(like.dtype)
            trains = like.is_floating_point()
            idles[number] = nn.Parameter(values.view(_IDLE_SHAPE), requires_grad=trains), {}
        parameter, state = idles[number]
        parameter.grad = parameter.detach().clone() if has_gradient else None
        return parameter, state
