"""Functions that Dynamo traces in place of ``Optimizer.step``, ``zero_grad``, ``GradScaler``'s.

torch breaks the graph at an optimizer's step and skips the scaler's file.  These functions say
the same in plain Python: the update itself becomes one ``zerofx::optimizer_step``, which reads
the optimizer's hyperparameters when the program runs, so that none is baked in or guarded.
"""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.amp.grad_scaler import OptState

from zerofx import compat
from zerofx.codegen.rewrite.elementwise import UpdateError
from zerofx.codegen.trace.independence import check_ignores_loss, clears_gradients
from zerofx.errors import StepError
from zerofx.ir import ops
from zerofx.wrappers import refuse_for_scaler

_optimizers: weakref.WeakValueDictionary[int, torch.optim.Optimizer] = weakref.WeakValueDictionary()
_handles: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
_next_handle = itertools.count(1)


def handle_of(optimizer: torch.optim.Optimizer) -> int:
    """The number that stands for ``optimizer`` in a program."""
    return _handle_at(id(optimizer))


@torch.compiler.assume_constant_result
def _handle_at(address: int) -> int:
    optimizer = _object_at(address)
    refuse_for_scaler(optimizer)
    if optimizer not in _handles:
        handle = next(_next_handle)
        _handles[optimizer] = handle
        _optimizers[handle] = optimizer
    return _handles[optimizer]


def _object_at(address: int) -> Any:
    """The living object with this ``id``: torch 2.11 gives constant functions no objects."""
    return ctypes.cast(address, ctypes.py_object).value


def known_optimizers() -> list[torch.optim.Optimizer]:
    """Those that a compiled step has stepped, as long as they live."""
    return list(_optimizers.values())


def optimizer_of(handle: int) -> torch.optim.Optimizer:
    """The optimizer behind a handle.  Raises: KeyError once it has been deleted."""
    return _optimizers[handle]


# ``self.__dict__["param_groups"]``: the attribute itself makes Dynamo guard every
# hyperparameter and turn ``capturable`` on.
def _parameters_with_gradients(optimizer):
    parameters = []
    for group in optimizer.__dict__["param_groups"]:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameters.append(parameter)
    return parameters


@torch.compiler.assume_constant_result
def _clears_gradients_at(address: int) -> bool:
    """Return whether a step of the optimizer there clears its gradients itself."""
    with compat.tensors.real_tensors():
        return clears_gradients(_object_at(address))


def _update(optimizer, found_inf=None):
    parameters = _parameters_with_gradients(optimizer)
    gradients = [parameter.grad for parameter in parameters]
    with torch.no_grad():
        updated = ops.optimizer_step(parameters, gradients, handle_of(optimizer), found_inf)
        for parameter, value in zip(parameters, updated, strict=True):
            parameter.copy_(value)
    if found_inf is None and _clears_gradients_at(id(optimizer)):
        for parameter in parameters:
            parameter.grad = None


@torch.compiler.assume_constant_result
def _refuse_use_of_loss_at(address: int) -> bool:
    """Refuse the optimizer there, past Dynamo, if its step computes with its closure's loss."""
    try:
        with compat.tensors.real_tensors():
            check_ignores_loss(_object_at(address))
    except UpdateError as error:
        raise compat.dynamo.pass_through_dynamo(error) from error.__cause__
    return True


@torch.compiler.assume_constant_result
def _refuse_arguments_at(address: int) -> bool:
    """Refuse what the step of the optimizer there is given beside a closure, past Dynamo."""
    name = type(_object_at(address)).__name__
    raise compat.dynamo.pass_through_dynamo(
        StepError(
            f"{name}.step is called with more than a closure, and a compiled step calls it without "
            "arguments, when the gradients are averaged. Keep what it needs in its param_groups, "
            "which are read at every call, or as a default of step's."
        )
    )


def step(self, closure=None, *others, **named):
    """``Optimizer.step``."""
    loss = None
    if others or named:
        _refuse_arguments_at(id(self))
    if closure is not None:
        _refuse_use_of_loss_at(id(self))
        with torch.enable_grad():
            loss = closure()
    _update(self)
    return loss


def zero_grad(self, set_to_none=True):
    """``Optimizer.zero_grad``, of a wrapper too: its groups are another's."""
    own = self.__dict__
    for group in own["param_groups"] if "param_groups" in own else self.param_groups:
        for parameter in group["params"]:
            _clear_gradient(parameter, set_to_none)


def module_zero_grad(self, set_to_none=True):
    """``Module.zero_grad``."""
    for parameter in self.parameters():
        _clear_gradient(parameter, set_to_none)


# A look at the gradient would be a guard, and compile a step that begins with this twice: there is
# none before the first call.
def _clear_gradient(parameter, set_to_none):
    if set_to_none:
        parameter.grad = None
    elif parameter.grad is not None:
        parameter.grad = torch.zeros_like(parameter.grad)


def accelerated_zero_grad(self, set_to_none=None):
    """``AcceleratedOptimizer.zero_grad``, which looks at a signature, as Dynamo cannot."""
    if self.gradient_state.sync_gradients:
        self.optimizer.zero_grad(set_to_none=True if set_to_none is None else set_to_none)


@torch.compiler.assume_constant_result
def _prepare_scale_at(address: int) -> bool:
    """Make the scale tensor that the ``GradScaler`` there would make at its first ``scale``."""
    scaler = _object_at(address)
    if scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(torch.device(scaler._device))
    _scalers.add(scaler)
    return True


_scalers: weakref.WeakSet[torch.amp.GradScaler] = weakref.WeakSet()
"""Those that some compiled step scales with."""


def is_loss_scale(value: torch.Tensor) -> bool:
    return any(value is scaler._scale for scaler in _scalers)


@torch.compiler.assume_constant_result
def _refuse(words: str) -> NoReturn:
    raise compat.dynamo.pass_through_dynamo(StepError(words))


def _stage(self, optimizer):
    state = self._per_optimizer_states.get(id(optimizer))
    return OptState.READY if state is None else state["stage"]


def scale(self, outputs):
    """``GradScaler.scale``."""
    if not self._enabled:
        return outputs
    _prepare_scale_at(id(self))
    if isinstance(outputs, torch.Tensor):
        return outputs * self._scale.to(outputs.device)
    return type(outputs)(scale(self, output) for output in outputs)


def unscale_(self, optimizer):
    """``GradScaler.unscale_``: gradients are averages already, so found-inf agrees over ranks."""
    if not self._enabled:
        return
    _prepare_scale_at(id(self))
    handle_of(optimizer)  # which refuses some
    stage = _stage(self, optimizer)
    if stage is OptState.UNSCALED:
        _refuse("unscale_() has already been called on this optimizer since the last update().")
    if stage is OptState.STEPPED:
        _refuse("unscale_() is being called after step().")
    parameters = _parameters_with_gradients(optimizer)
    with torch.no_grad():
        inverse = self._scale.double().reciprocal().float()
        finite = []
        for parameter in parameters:
            finite.append(parameter.grad.isfinite().all())
            parameter.grad.mul_(inverse.to(parameter.grad.device))
        found_inf = torch.stack(finite).all().logical_not().float().reshape(1)
    self._per_optimizer_states[id(optimizer)] = {
        "stage": OptState.UNSCALED,
        "found_inf_per_device": {found_inf.device: found_inf},
    }


def scaler_step(self, optimizer, *args, **kwargs):
    """``GradScaler.step``: the update is skipped where a gradient is not finite."""
    if not self._enabled:
        return optimizer.step(*args, **kwargs)
    if "closure" in kwargs or args:
        raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
    _prepare_scale_at(id(self))
    stage = _stage(self, optimizer)
    if stage is OptState.STEPPED:
        _refuse("step() has already been called since the last update().")
    if stage is OptState.READY:
        unscale_(self, optimizer)
    state = self._per_optimizer_states[id(optimizer)]
    (found_inf,) = state["found_inf_per_device"].values()
    _update(optimizer, found_inf)
    state["stage"] = OptState.STEPPED
    return None


def update(self, new_scale=None):
    """``GradScaler.update``."""
    if not self._enabled:
        return
    with torch.no_grad():
        if new_scale is not None:
            if isinstance(new_scale, torch.Tensor):
                self._scale.copy_(new_scale)
            else:
                self._scale.fill_(new_scale)
        else:
            found_inf = torch.zeros_like(self._scale).reshape(1)
            for state in self._per_optimizer_states.values():
                for found in state["found_inf_per_device"].values():
                    found_inf = found_inf + found.to(found_inf.device)
            torch.ops.aten._amp_update_scale_(
                self._scale,
                self._growth_tracker,
                found_inf,
                self._growth_factor,
                self._backoff_factor,
                self._growth_interval,
            )
    self._per_optimizer_states.clear()


SUBSTITUTES: dict[type | str, dict[str, Callable[..., Any]]] = {
    "accelerate.optimizer.AcceleratedOptimizer": {"zero_grad": accelerated_zero_grad},
    torch.optim.Optimizer: {"step": step, "zero_grad": zero_grad},
    torch.nn.Module: {"zero_grad": module_zero_grad},
    torch.amp.GradScaler: {
        "scale": scale,
        "unscale_": unscale_,
        "step": scaler_step,
        "update": update,
    },
}
