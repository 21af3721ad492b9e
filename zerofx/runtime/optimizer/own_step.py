"""An optimizer's own step, run as it is on whole tensors that stand for its parameters."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zerofx.codegen.rewrite.elementwise import UpdateError
from zerofx.codegen.trace.arguments import own_attributes
from zerofx.codegen.trace.independence import check_independent
from zerofx.codegen.trace.nested import leaves
from zerofx.runtime.optimizer.traces import TracedOptimizer

_IDLE_SHAPE = (4, 4)


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


class OwnStep:
    """Runs an optimizer's step on some of its parameters, as if they were all that it has.

    The stand-ins stay the same objects, so that a step may know them by their ``id``.  A group of
    which this rank owns no parameter has an idle one: what counts the group's steps goes on.
    """

    def __init__(self, optimizer: TracedOptimizer) -> None:
        self._optimizer = optimizer
        self._stand_ins: dict[int, nn.Parameter] = {}
        self._idle: dict[int, tuple[nn.Parameter, dict[str, Any]]] = {}
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
        members = [group["params"] for group in groups]
        own: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        own.update((key, state) for key, state in states.items() if not isinstance(key, Tensor))
        for index in wholes:
            if users[index] in states:
                own[stand_ins[id(users[index])]] = states[users[index]]
        try:
            for number, group in enumerate(groups):
                mine = [stand_ins[id(p)] for p in members[number] if id(p) in stand_ins]
                if not mine and not updated.isdisjoint(map(id, members[number])):
                    idle, state = self._idle_in(number, group)
                    own[idle], mine = state, [idle]
                group["params"] = mine
            optimizer.state = own
            # What a step compiles for itself cannot be compiled while a compiled step runs.
            with torch.enable_grad(), torch.compiler.set_stance("force_eager"):
                type(optimizer).step(optimizer)
        finally:
            optimizer.state = states
            for group, its in zip(groups, members, strict=True):
                group["params"] = its
            for index in wholes:
                if made := own.get(self._stand_ins[index]):
                    states[users[index]] = made
            states.update((key, own[key]) for key in own if not isinstance(key, Tensor))
        if shares_states(states):
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

    def floats(self) -> int:
        """Return a checksum of the floats in groups and attributes, which ranks have alike.

        Integers may count what a rank owns.
        """
        optimizer = self._optimizer.live_optimizer()
        values = [own_attributes(optimizer)]
        values += [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        floats = [leaf for leaf in leaves(values) if isinstance(leaf, float)]
        return zlib.crc32(repr(floats).encode())

    def _stand_in(self, index: int, whole: WholeParameter) -> nn.Parameter:
        user = self._optimizer.parameters[index].user()
        stand_in = self._stand_ins.get(index)
        if stand_in is None:
            stand_in = self._stand_ins[index] = nn.Parameter(whole.value)
        stand_in.data = whole.value
        stand_in.grad = whole.gradient
        vars(stand_in).update(vars(user))
        return stand_in

    def _taken(self, index: int, gradient: Tensor) -> Tensor:
        """Return a parameter's new value, and hold it no longer."""
        parameter, stand_in = self._optimizer.parameters[index], self._stand_ins[index]
        value, written = stand_in.data, gradient._version > 0
        stand_in.data, stand_in.grad = value.new_empty(0), None
        vars(parameter.user()).update(vars(stand_in))
        if value.shape != parameter.info.shape or value.dtype != parameter.info.dtype:
            raise UpdateError(
                f"{self._optimizer.name}.step has made {value.dtype} of shape "
                f"{tuple(value.shape)} of parameter '{parameter.info.name}', which is "
                f"{parameter.info.dtype} of shape {parameter.info.shape}."
            )
        if written:
            self._optimizer.check_written_gradient(parameter)
        return value

    def _idle_in(
        self, number: int, group: Mapping[str, Any]
    ) -> tuple[nn.Parameter, dict[str, Any]]:
        """Return what a group has in place of parameters, and its state."""
        if number not in self._idle:
            like = group["params"][0]
            numel = _IDLE_SHAPE[0] * _IDLE_SHAPE[1]
            values = torch.linspace(-1, 1, numel, dtype=like.dtype, device=like.device)
            self._idle[number] = nn.Parameter(values.view(_IDLE_SHAPE)), {}
        parameter, state = self._idle[number]
        parameter.grad = parameter.detach().clone()
        return parameter, state
