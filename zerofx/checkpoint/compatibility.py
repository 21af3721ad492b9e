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

from zerofx import compat
from zerofx.codegen.rewrite.storage import ADDED
from zerofx.codegen.trace.shadow import shadow_of

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
    kept: dict[tuple[int, torch.dtype], set[str] | None] = {}
    for name, (parameter, states) in saved.items():
        key = parameter.dim(), parameter.dtype
        if key not in kept:
            kept[key] = _kept_after_a_step(optimizer, place, *key, values)
        here, there = kept[key], set(states) - ADDED
        if here is not None and there and here != there:
            its, own = (", ".join(sorted(names)) or "none" for names in (there, here))
            found[name] = f"{its} in the checkpoint, {own} here"
    return found


def _kept_after_a_step(
    optimizer: Optimizer, place: int, num_dims: int, dtype: torch.dtype, values: Mapping[str, Any]
) -> set[str] | None:
    """Return the names of states that a copy's own step makes; None if the step fails."""
    with (
        compat.real_tensors(),
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        parameter = torch.nn.Parameter(torch.ones((2,) * num_dims, dtype=dtype))
        parameter.grad = torch.ones_like(parameter)
        try:
            shadow = shadow_of(optimizer, {(place, 0): parameter})
            shadow.param_groups[0].update(values)
            type(shadow).step(shadow)
        except Exception:
            return None
        return set(shadow.state[parameter])
