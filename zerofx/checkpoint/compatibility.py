"""Telling whether a checkpoint is of the same kind of optimizer as the one it is loaded into.

A checkpoint has no classes in it, only the names of hyperparameters and states.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

HOW_NOT_WHAT = frozenset("foreach fused capturable differentiable maximize".split())
"""Hyperparameters of how an update is computed: another version of torch may lack or have them."""

DECOUPLED = "decoupled_weight_decay"
"""The hyperparameter that tells Adam from AdamW; older versions of torch have none."""


def why_another_kind(
    optimizer: Optimizer, group: Mapping[str, Any], saved: Collection[str], values: Mapping
) -> str:
    """Return in words how a saved group's hyperparameters differ from an optimizer's, or "".

    ``saved`` are their names, ``values`` those that are no tensors.  Names that no optimizer of
    torch's has, such as a schedule's, are ignored.
    """
    absent = set(optimizer.defaults) - set(saved) - HOW_NOT_WHAT - {DECOUPLED}
    unknown = (set(saved) & _hyperparameters()) - set(group) - HOW_NOT_WHAT
    words = [
        f"{what} {', '.join(sorted(names))}"
        for what, names in (("without", absent), ("with", unknown))
        if names
    ]
    if DECOUPLED in values and values[DECOUPLED] != group.get(DECOUPLED, values[DECOUPLED]):
        words.append(f"with {DECOUPLED}={values[DECOUPLED]}")
    return ", ".join(words)


@functools.cache
def _hyperparameters() -> frozenset[str]:
    """Return the names of hyperparameters of torch's own optimizers."""
    kinds = [one for one in vars(torch.optim).values() if inspect.isclass(one)]
    return frozenset(
        name
        for kind in kinds
        if issubclass(kind, Optimizer) and kind is not Optimizer
        for name in inspect.signature(kind).parameters
        if name != "params"
    )
