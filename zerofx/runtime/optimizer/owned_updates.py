"""Updates that need a parameter whole, which the rank that owns it computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerofx.codegen.rewrite.elementwise import UpdateError
from zerofx.codegen.rewrite.whole_tensors import DividedUpdate, divide
from zerofx.codegen.trace.arguments import read_arguments
from zerofx.codegen.trace.trace import Update
from zerofx.ir.parameters import ParameterInfo
from zerofx.runtime.comm.communication import Communicator
from zerofx.runtime.optimizer.context import UpdateContext
from zerofx.runtime.optimizer.whole_tensor_update import compute_on_owners


class OwnedUpdates:
    """Updates in three parts: of the shard, of the whole parameter on its owner, of the shard.

    ``begin`` runs the first two of several, ``finish`` the last of one.
    """

    def __init__(self, context: UpdateContext) -> None:
        self._context = context
        self._divided: dict[int, DividedUpdate] = {}  # by the id of what it is made of
        self._begun: dict[int, _BegunUpdate] = {}

    def forget(self) -> None:
        """Forget what has begun: a step that failed has left it."""
        self._begun.clear()

    def has_begun(self, parameter: int) -> bool:
        """Whether ``begin`` has begun this parameter's update."""
        return parameter in self._begun

    def begin(
        self,
        data: Sequence[Tensor],
        grads: Sequence[Tensor],
        parameters: Sequence[int],
        owners: Sequence[int],
        communicator: Communicator,
    ) -> list[Tensor]:
        """Begin these updates; return what ``finish`` takes for their gradients.  Collective.

        What of an update needs the parameter whole is computed by the rank that owns it.

        Shapes: flat ``[n]`` of each parameter's shard, in and out.
        """
        members = list(zip(data, grads, parameters, strict=True))
        with torch.no_grad():
            begun = [self._first_part(*member) for member in members]
            self._begun.update(zip(parameters, begun, strict=True))
            results = list(grads)
            divided = [place for place, one in enumerate(begun) if one.divided.core is not None]
            if not divided:
                return results
            found = compute_on_owners(
                [begun[place].taken for place in divided],
                [self._context.parameters[parameters[place]][1] for place in divided],
                [owners[place] for place in divided],
                [begun[place].divided.core_dtype for place in divided],
                lambda number, whole: begun[divided[number]].compute(whole),
                communicator,
            )
            for place, result in zip(divided, found, strict=True):
                results[place] = result
        return results

    def _first_part(self, data: Tensor, grad: Tensor, parameter: int) -> _BegunUpdate:
        """Run the part of an update that comes before what needs the parameter whole."""
        optimizer = self._context.live_optimizer()
        user_parameter, info, group = self._context.of_step(parameter)
        values = optimizer.state.get(user_parameter) or {}
        self._context.check_shards(values, data, info)
        state = read_arguments(values, shard_shape=tuple(data.shape), inputs=values)
        update, arguments = self._context.traces.find(optimizer, parameter, group, state)
        divided = self.divide(update, info)
        grad = grad.to(data.dtype)
        if update.clones_gradient:
            grad = grad.clone()
        inputs = [grad, *arguments.tensors, *state.tensors, *arguments.scalars, *state.scalars]
        taken, numbers, left = divided.run_first(data, inputs)
        return _BegunUpdate(divided, inputs, taken, numbers, left)

    def finish(self, data: Tensor, result: Tensor, parameter: int) -> Tensor:
        """Run the rest of an update that has begun."""
        begun = self._begun.pop(parameter)
        user_parameter, _, group = self._context.of_step(parameter)
        values = self._context.live_optimizer().state.get(user_parameter) or {}
        with torch.no_grad():
            new_state, new_group = begun.divided.run_last(data, begun.inputs, begun.left, result)
        self._context.keep(user_parameter, group, values, new_state, new_group)
        return data

    def divide(self, update: Update, info: ParameterInfo) -> DividedUpdate:
        """Cut an update into its parts.  Raises: UpdateError if it cannot be."""
        if id(update) not in self._divided:
            self._divided[id(update)] = divide(update, info.shape)
        return self._divided[id(update)]

    def check_precision(self, info: ParameterInfo) -> None:
        """Refuse a parameter that is kept otherwise than it is computed.  Raises: UpdateError."""
        name, precision = self._context.optimizer_name, self._context.storage.precision
        kept_in = precision.moment_storage(info.dtype, info.numel)
        if not precision.compute_dtype(info.dtype) is kept_in is info.dtype:
            raise UpdateError(
                f"parameter '{info.name}' is updated as a whole tensor, and {name} "
                "then keeps its states in the parameter's dtype: train it in float32, without "
                "master_weights, stochastic_rounding and moment_dtype."
            )


@dataclass(frozen=True)
class _BegunUpdate:
    """An update between its first part and its last."""

    divided: DividedUpdate
    inputs: Sequence[Any]
    taken: Tensor
    numbers: Sequence[Any]
    left: Sequence[Any]

    def compute(self, whole: Tensor) -> Tensor:
        """Run the part between the two, on the rank that owns the parameter."""
        assert self.divided.core is not None
        return self.divided.core(whole, *self.numbers)
