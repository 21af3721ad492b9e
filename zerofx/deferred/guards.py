"""Tensors whose making is deferred, as others see them: metadata, and errors with words."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zerofx import compat
from zerofx.deferred.ledger import LEDGER
from zerofx.deferred.mapped import MAPPED
from zerofx.deferred.recorder import Recorder
from zerofx.errors import StepError
from zerofx.runtime.memory.copies import GIVEN_COPIES
from zerofx.runtime.memory.guard import Guarded, is_saving


class _Deferred(Guarded):
    """The part that the two classes share."""

    def _refusal(self, touched: str) -> str:
        return (
            f"{touched!r} needs the values of a tensor of shape {tuple(self.shape)} "  # type: ignore[attr-defined]
            "whose making zerofx.deferred_init has put off. Call zerofx.materialize(model) first, "
            "or do it in the step, or in `with zerofx.deferred_init():`, where it is recorded."
        )


class DeferredParameter(_Deferred, nn.Parameter):
    """A parameter whose making has been recorded, and not done."""


class DeferredTensor(_Deferred, torch.Tensor):
    """A tensor in the memory of such a parameter."""


@functools.cache
def deferred_class(own: type) -> type:
    """The class that guards a tensor of class ``own``."""
    base = DeferredParameter if issubclass(own, nn.Parameter) else DeferredTensor
    if own in (nn.Parameter, torch.Tensor):
        return base
    return type(f"Deferred{own.__name__}", (base, own), {"__module__": own.__module__})


def _detach(frame: FrameType, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """``parameter.detach()`` as ``Module.state_dict`` calls it: the value, on the CPU.

    Any other caller would take the result for a live view.
    """
    if not is_saving(frame):
        return NotImplemented
    return GIVEN_COPIES.give("a parameter that is still to be made", LEDGER.value_of(args[0]).cpu())


def _copy(_frame: FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``parameter.copy_(source)``, as ``load_state_dict`` calls it: recorded, as in a block."""
    if not isinstance(args[0], _Deferred) or LEDGER.memory_of(args[0]) is None:
        return NotImplemented
    GIVEN_COPIES.forget()
    with compat.tensors.without_torch_function(), Recorder(exact=False):
        return torch.Tensor.copy_(*args, **kwargs)


def _like(
    name: str, _frame: FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    """A tensor of the same shape: an optimizer may make its states when it is made."""
    with compat.tensors.without_torch_function():
        return getattr(torch, name)(*args, **kwargs)


_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like")
_Deferred._special = {
    "detach": _detach,
    "copy_": _copy,
    **{name: functools.partial(_like, name) for name in _LIKE},
}


# In a block, where tensors are of their own classes


class Reads(TorchFunctionMode):
    """While it is active, ``numpy()`` and the like of a deferred tensor see what it holds now."""

    def __init__(self) -> None:
        super().__init__()
        self._process = os.getpid()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _READS and args and os.getpid() != self._process:
            LEDGER.make(args[0])
        if name in _READS and args and (_is_deferred(args[0]) or _is_of_file(name, args[0])):
            return _READS[name](func, *args, **kwargs)
        return func(*args, **kwargs)


def _is_deferred(value: Any) -> bool:
    return isinstance(value, Tensor) and LEDGER.memory_of(value) is not None


def _is_of_file(name: str, value: Any) -> bool:
    """Return whether it copies a tensor of a mapped file, or looks at its memory as an array."""
    if name not in ("__deepcopy__", "numpy", "__array__"):
        return False
    return isinstance(value, Tensor) and MAPPED.hold(value)


def _on_value(func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    return func(LEDGER.value_of(tensor), *args, **kwargs)


def _as_array(func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """An array that refuses to be written to, for the tensor would not see it."""
    tensor = tensor.detach()
    array = func(LEDGER.value_of(tensor) if _is_deferred(tensor) else tensor, *args, **kwargs)
    array.flags.writeable = False
    return array


def _copied(_func: Any, tensor: Tensor, memo: dict[int, Any]) -> Any:
    """``copy.deepcopy``, which would copy the storage."""
    if id(tensor) not in memo:
        with torch.no_grad():
            copy = tensor.detach().clone(memory_format=torch.preserve_format)
        memo[id(tensor)] = copy.requires_grad_(tensor.requires_grad)
    return memo[id(tensor)]


def _refused(func: Any, tensor: Tensor, *_args: Any, **_kwargs: Any) -> Any:
    raise StepError(
        f"{func.__name__!r} needs the memory of a tensor of shape {tuple(tensor.shape)}, which "
        "deferred_init has only recorded. Do it after the block, when zerofx.materialize(model) "
        "has made it."
    )


_READS: dict[str, Callable[..., Any]] = {
    "numpy": _as_array,
    "__array__": _as_array,
    **dict.fromkeys("tolist __repr__ __format__".split(), _on_value),
    "__deepcopy__": _copied,
    **dict.fromkeys(
        "data_ptr share_memory_ storage untyped_storage __dlpack__".split(),
        _refused,
    ),
}
