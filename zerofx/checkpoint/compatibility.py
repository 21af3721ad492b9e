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

from zerofx.codegen.rewrite.storage import ADDED
from zerofx.runtime.optimizer.states import states_after_a_step

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


def other_states(
    optimizer: Optimizer,
    place: int,
    saved: Mapping[str, tuple[torch.Tensor, Collection[str]]],
    values: Mapping[str, Any],
) -> dict[str, str]:
    """Return parameters of a group whose saved states are not those that it keeps, and how.

    ``saved`` are the parameters and the names of their states, ``values`` the group's saved
    hyperparameters.  Empty for optimizers that are not torch's: their states may depend on sizes.
    """
    found: dict[str, str] = {}
    if not type(optimizer).__module__.startswith("torch.optim."):
        return found

    @functools.cache
    def kept(num_dims: int, dtype: torch.dtype) -> Mapping[str, Any] | None:
        return states_after_a_step(optimizer, place, (2,) * num_dims, dtype, values)

    for name, (parameter, states) in saved.items():
        here, there = kept(parameter.dim(), parameter.dtype), set(states) - ADDED
        if here is not None and there and here.keys() != there:
            its, own = (", ".join(sorted(names)) or "none" for names in (there, here))
            found[name] = f"{its} in the checkpoint, {own} here"
    return found
