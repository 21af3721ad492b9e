"""States that are kept otherwise than the optimizer makes them, and draws for random rounding."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerofx.codegen.rewrite.elementwise import UpdateError
from zerofx.codegen.rewrite.rounding import random_bits, step_key
from zerofx.codegen.rewrite.storage import (
    MASTER,
    NATIVE,
    SCALE,
    UPDATES,
    Precision,
    Stored,
    is_scale,
    narrow,
    rewritten,
)
from zerofx.codegen.trace.trace import Update
from zerofx.ir.parameters import ParameterInfo
from zerofx.ir.wires import num_blocks
from zerofx.runtime.optimizer.piece import Traced


class Draw(NamedTuple):
    """The inputs of one update's random numbers, as a kernel takes them: 0-dim tensors.

    ``offset`` is the number of its first element, ``step`` how many updates were before it.
    """

    step: int
    offset: Tensor
    key: Tensor


class StateStorage:
    """Keeps one optimizer's states in the precision that a step's options ask for."""

    def __init__(self, precision: Precision, optimizer_name: str) -> None:
        self.precision = precision
        self._optimizer_name = optimizer_name
        self._rewritten: dict[tuple[Update, Stored], Update] = {}

    def check(self, info: ParameterInfo) -> None:
        """Refuse a parameter that these options are not for.  Raises: UpdateError."""
        if self.precision.stochastic_rounding and info.dtype is torch.float16:
            raise UpdateError(
                f"stochastic_rounding rounds to bfloat16, and parameter '{info.name}' is float16, "
                "whose range a step soon leaves. Use bfloat16 parameters, or "
                'options={"master_weights": True}.'
            )

    def adopt(self, state: dict[str, Any], data: Tensor, info: ParameterInfo) -> None:
        """Bring one parameter's state into the form in which this optimizer's are kept.

        States that come from ``load_state_dict``, or from steps without these options, are as the
        optimizer makes them.

        Raises: UpdateError for what another function's options have stored.
        """
        if self.precision.is_plain and NATIVE not in state:
            return
        native = dict(state.get(NATIVE, {}))
        storage = self.precision.moment_storage(info.dtype, info.numel)
        compute = self.precision.compute_dtype(info.dtype)
        for name in native:
            if self.precision.is_plain or state[name].dtype is not storage:
                raise UpdateError(
                    f"the state '{name}' of parameter '{info.name}' is kept in "
                    f"{state[name].dtype} by another compiled function's options. Give all "
                    f"functions that use this {self._optimizer_name} the same moment_dtype, "
                    "stochastic_rounding and master_weights."
                )
        for name, value in list(state.items()):
            if name in native or is_scale(name, native) or not _is_moment(name, value, data):
                continue
            if name == MASTER:
                if value.dtype is not torch.float32:
                    raise UpdateError(
                        f"the master of parameter '{info.name}' has been cast to {value.dtype}: "
                        "optimizer.load_state_dict does so to an optimizer that no compiled step "
                        "has used yet. Call the step once, then load the model's and the "
                        "optimizer's state dicts."
                    )
            elif storage is value.dtype is not compute:
                native[name] = self.precision.native_dtype(info.dtype)
            elif value.dtype is not compute:
                state[name] = value.to(compute)
        if native:
            state[NATIVE] = native

    def kept(
        self, there: Mapping[str, Tensor], data: Tensor, numel: int, info: ParameterInfo
    ) -> dict[str, tuple[torch.dtype, int]]:
        """Return the states that a shard of ``numel`` has per element: dtype and length, by name.

        ``there`` are states like ``data``, as the optimizer makes them or as they are kept.
        """
        storage = self.precision.moment_storage(info.dtype, info.numel)
        native = there.get(NATIVE, {})
        found: dict[str, tuple[torch.dtype, int]] = {}
        for name, value in there.items():
            if not isinstance(value, Tensor) or is_scale(name, native):
                continue
            if name == MASTER or value.shape != data.shape:
                continue
            is_stored = name in native or value.is_floating_point()
            is_moment = not self.precision.is_plain and is_stored
            found[name] = (storage if is_moment else value.dtype, numel)
            if is_moment and storage is torch.int8:
                found[name + SCALE] = (torch.float32, num_blocks(numel))
        if self.precision.keeps_master(info.dtype):
            found[MASTER] = (torch.float32, numel)
        return found

    def logical(self, state: Mapping[str, Any], info: ParameterInfo) -> Mapping[str, Any]:
        """The state as the optimizer's code sees it: stand-ins for what is stored otherwise."""
        if self.precision.is_plain:
            return state
        native = state.get(NATIVE, {})
        compute = self.precision.compute_dtype(info.dtype)
        return {
            name: _stand_in(value, compute) if name in native else value
            for name, value in state.items()
            if name not in (MASTER, NATIVE, UPDATES) and not is_scale(name, native)
        }

    def draw(
        self, info: ParameterInfo, first_element: int, values: Mapping[str, Any]
    ) -> Draw | None:
        """Return the inputs of random numbers for the update of ``values``, if it draws any."""
        if not self.precision.draws_for(info.dtype, info.numel):
            return None
        step = int(values.get("step", values.get(UPDATES, 0)))
        key = step_key(self.precision.rounding_seed, step)
        offset = torch.tensor(first_element, dtype=torch.int64, device="cpu")
        return Draw(step, offset, torch.tensor(key, dtype=torch.int32, device="cpu"))

    def rewrite(
        self,
        traced: Traced,
        values: Mapping[str, Any],
        parameter: torch.dtype,
        gradient: torch.dtype,
        draw: Draw | None,
    ) -> tuple[Update, list[Any]]:
        """Return the update of what is stored, and its inputs after the gradient.

        The trace is one of ``logical(values)``; the dtypes are those of what it will be given.
        """
        precision, update = self.precision, traced.update
        if precision.is_plain:
            return update, traced.inputs
        native = values.get(NATIVE, {})
        keeps_master = precision.keeps_master(parameter)
        stored = Stored(
            parameter=parameter,
            gradient=gradient,
            compute=precision.compute_dtype(parameter),
            keeps_master=keeps_master,
            has_master=keeps_master and MASTER in values,
            rounds_parameter=precision.rounds_parameter(parameter),
            moments=tuple((name, values[name].dtype) for name in native),
        )
        inputs, positions = traced.inputs, {}
        for name in native:
            stand_in = traced.state.values[name]
            (index,) = (i for i, value in enumerate(inputs) if value is stand_in)
            inputs[index] = values[name]
            positions[name] = 2 + index
        extras = dict(values)
        if draw is not None:
            extras |= {"offset": draw.offset, "key": draw.key}
        inputs += [extras[name] for name in stored.extras]
        key = (update, stored)
        if key not in self._rewritten:
            self._rewritten[key] = rewritten(update, stored, positions)
        return self._rewritten[key], inputs

    def settle(
        self,
        new: dict[str, Any],
        values: Mapping[str, Any],
        data: Tensor,
        info: ParameterInfo,
        draw: Draw | None,
    ) -> None:
        """Bring what an update has just made into the form in which it is kept."""
        if UPDATES in values:
            new[UPDATES] = values[UPDATES]
        if draw is None:
            return
        native = {name: dtype for name, dtype in values.get(NATIVE, {}).items() if name in new}
        storage = self.precision.moment_storage(info.dtype, info.numel)
        compute = self.precision.compute_dtype(info.dtype)
        for name, value in list(new.items()):
            if name in native or name == MASTER or is_scale(name, native):
                continue
            if (
                storage is compute
                or not _is_moment(name, value, data)
                or value.dtype is not compute
            ):
                continue
            bits = random_bits(value, draw.offset, draw.key, zlib.crc32(name.encode()))
            new[name], scale = narrow(value, storage, bits)
            if scale is not None:
                new[name + SCALE] = scale
            native[name] = self.precision.native_dtype(info.dtype)
        if native:
            new[NATIVE] = native
        has_drawn = native or self.precision.rounds_parameter(info.dtype)
        if has_drawn and "step" not in new:
            new[UPDATES] = draw.step + 1


def _is_moment(name: str, value: Any, data: Tensor) -> bool:
    """Return whether a state has a parameter's shape, and is no count of its steps."""
    has_its_shape = isinstance(value, Tensor) and value.shape == data.shape
    return name != "step" and has_its_shape and value.is_floating_point()


def _stand_in(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of the same shape and another dtype that has no memory to speak of.

    An update may read what is 0-dim as a number: that is the value itself.
    """
    if not stored.dim():
        return stored.to(dtype)
    return torch.empty((), dtype=dtype, device=stored.device).expand(stored.shape)
