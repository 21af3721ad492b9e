"""The default dtype of what a compiled step makes, which ``torch.set_default_dtype`` is not.

Dynamo does not see that function's effect inside of what it traces, and outside of it the backend's
own tensors would have the dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

DTYPES = {"bf16-true": torch.bfloat16, "64-true": torch.float64}
"""The default dtypes of Lightning's precisions, where they are others than float32."""

_FLOATS = (
    *(torch.zeros, torch.ones, torch.empty, torch.rand, torch.randn),
    *(torch.eye, torch.linspace, torch.logspace),
)
_BY_VALUE = (torch.tensor, torch.as_tensor, torch.scalar_tensor, torch.full, torch.arange)


class DefaultDtype(TorchFunctionMode):
    """Give a dtype to tensors that are made without one, where that would be float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        given = kwargs or {}
        if given.get("dtype") is not None or any(isinstance(one, torch.Tensor) for one in args):
            return func(*args, **given)
        if func in _FLOATS:
            return func(*args, **{**given, "dtype": self.dtype})
        made = func(*args, **given)
        if func in _BY_VALUE and made.dtype == torch.float32:
            return func(*args, **{**given, "dtype": self.dtype})
        return made
