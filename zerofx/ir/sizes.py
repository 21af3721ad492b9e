"""Bytes of the tensors that a program's nodes make."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from zerofx import compat


def is_symbolic(value: Any) -> bool:
    """Return whether a value is a number that calls may differ in, or a tensor of such sizes."""
    if isinstance(value, torch.Tensor):
        return any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride()))
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def tensor_bytes(value: Any) -> int:
    """Bytes of a tensor; 0 for anything else.  A size that is a symbol gets a guard.

    For a plan that fits a budget with these sizes may not with others.
    """
    return int(value.numel()) * value.dtype.itemsize if isinstance(value, torch.Tensor) else 0


def hinted_tensor_bytes(value: Any) -> int:
    """Bytes of a tensor as it was when captured: no guard is made of a symbolic size."""
    if not isinstance(value, torch.Tensor):
        return 0
    return math.prod(map(compat.aot.size_hint, value.shape)) * value.dtype.itemsize


def value_bytes(node: fx.Node) -> int:
    """Bytes of a node's tensor, with guards on symbolic sizes; 0 for what is not a tensor."""
    return tensor_bytes(node.meta.get("val"))


def hinted_bytes(node: fx.Node) -> int:
    """Bytes of all tensors of a node's result as they were when captured, without guards."""
    value = node.meta.get("val")
    return sum(map(hinted_tensor_bytes, value if isinstance(value, (tuple, list)) else [value]))
