"""Where an optimizer's states are, and how much of them is to come: device, host memory, files."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from zerofx.codegen.trace.arguments import read_arguments
from zerofx.runtime.optimizer.context import UpdateContext
from zerofx.runtime.optimizer.file_states import Group, Parts, bring_back, parts_of
from zerofx.runtime.storage.host import HostMemory


class StatePlaces:
    """The states of one optimizer's parameters; with ``host``, updates keep them there."""

    def __init__(self, context: UpdateContext, host: HostMemory | None) -> None:
        self._context, self._host = context, host

    def bytes_to_come(self, parameters: Iterable[int]) -> int:
        """Bytes that the states of these parameters will take in host memory and do not yet.

        Before the first step; those that there are may be whole still.
        """
        assert self._host is not None
        optimizer = self._context.live_optimizer()
        total = 0
        for parameter, kept in self._kept(parameters):
            reference, info = self._context.parameters[parameter]
            state = optimizer.state.get(reference()) or {}
            there = [value for value in state.values() if isinstance(value, Tensor) and value.dim()]
            if not state:
                total += sum(dtype.itemsize * numel for dtype, numel in kept.values())
            for value in there:
                if not self._host.holds(value):
                    is_whole = value.shape == info.shape
                    numel = info.shard_numel if is_whole else value.numel()
                    total += numel * value.itemsize
        return total

    def parts_to_come(self, parameters: Sequence[int]) -> Parts:
        """How the states of these parameters will be laid out in files, after their next update."""
        return parts_of([kept for _, kept in self._kept(parameters)])

    def _kept(
        self, parameters: Iterable[int]
    ) -> list[tuple[int, dict[str, tuple[torch.dtype, int]]]]:
        """What will be kept per element of each parameter's shard; outside of a step."""
        optimizer, traces = self._context.live_optimizer(), self._context.traces
        storage = self._context.storage
        found = []
        nothing = read_arguments({}, shard_shape=None, inputs=())
        with self._context.outside_of_a_step():
            for parameter in parameters:
                reference, info = self._context.parameters[parameter]
                group = self._context.group_of(parameter)
                few = torch.zeros(2, dtype=storage.precision.compute_dtype(info.dtype))
                made = optimizer.state.get(reference()) or {}
                if made:
                    shapes = (info.shape, (info.shard_numel,))
                    made = {
                        name: few.to(value.dtype) if _has_shape(value, shapes) else value
                        for name, value in made.items()
                    }
                elif group is not None:
                    update, arguments = traces.find(optimizer, parameter, group, nothing)
                    made, _ = update(few, few.clone(), arguments.tensors, arguments.scalars)
                found.append((parameter, storage.kept(made, few, info.shard_numel, info)))
        return found

    def group_of(self, parameters: Sequence[int]) -> Group:
        """What ``state_buckets`` takes for the states of these parameters."""
        optimizer = self._context.live_optimizer()
        users, names = [], []
        for parameter in parameters:
            reference, info = self._context.parameters[parameter]
            users.append(reference())
            names.append(info.name)
        span = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        words = f"{self._context.optimizer_name} of {span}"
        return optimizer, users, words, self.parts_to_come(parameters)

    def nbytes(self) -> int:
        """Bytes of these parameters' states that are in host memory now."""
        optimizer = self._context.optimizer()
        if self._host is None or optimizer is None:
            return 0
        users = [reference() for reference, _ in self._context.parameters.values()]
        values = [v for user in users for v in optimizer.state.get(user, {}).values()]
        tensors = [value for value in values if isinstance(value, Tensor) and value.dim()]
        return sum(value.nbytes for value in tensors if self._host.holds(value))

    def place(self, parameters: Sequence[int], memory: HostMemory) -> None:
        """Have these parameters' states in host memory, side by side, or on the device.

        In the one where they are updated.
        """
        optimizer = self._context.live_optimizer()
        users = [self._context.parameters[parameter][0]() for parameter in parameters]
        states = [optimizer.state[user] for user in users if user in optimizer.state]
        bring_back(states)  # from files, where another function has put them
        if self._host is not None:
            memory.take_in(states)
        else:
            memory.give_back(states, self._context.parameters[parameters[0]][1].device)


def _has_shape(value: Any, shapes: Collection[tuple[int, ...]]) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and tuple(value.shape) in shapes
