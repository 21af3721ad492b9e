"""Functions that read a tensor's memory without an operator that could be recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from zerofx.deferred.ledger import LEDGER
from zerofx.errors import StepError


class Reads(TorchFunctionMode):
    """While it is active, ``numpy()`` and the like of a deferred tensor see what it holds now."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _READS and args and _is_deferred(args[0]):
            return _READS[name](func, *args, **kwargs)
        return func(*args, **kwargs)


def _is_deferred(value: Any) -> bool:
    return isinstance(value, Tensor) and LEDGER.memory_of(value) is not None


def _on_value(func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    return func(LEDGER.value_of(tensor), *args, **kwargs)


def _as_array(func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """An array that refuses to be written to, for the tensor would not see it."""
    array = func(LEDGER.value_of(tensor.detach()), *args, **kwargs)
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
    "tolist": _on_value,
    "__deepcopy__": _copied,
    **dict.fromkeys(
        "data_ptr share_memory_ storage untyped_storage __dlpack__".split(),
        _refused,
    ),
}
