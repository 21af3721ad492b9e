"""A copy of an optimizer over other parameters, on which its own step can be tried."""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from zerofx.codegen.trace.arguments import group_values, is_torchs
from zerofx.codegen.trace.nested import map_leaves

Place = tuple[int, int]
"""A parameter group's number, and a place in it."""


def shadow_of(
    optimizer: torch.optim.Optimizer, parameters: Mapping[Place, torch.nn.Parameter]
) -> Any:
    """A copy with these parameters and no states, of only the groups that have members.

    A group's floats are made to differ from another's, so that a step which reads that group's
    shows itself.
    """
    shadow = copy_of(optimizer, type(optimizer), lambda _name, value: own_copy(value))
    shadow.param_groups = []
    for number, group in enumerate(optimizer.param_groups):
        members = {place: p for (owner, place), p in parameters.items() if owner == number}
        if members:
            values = {name: own_copy(value) for name, value in group_values(group).items()}
            apart = partial(_divided, by=1 + number / 8)
            values = {name: map_leaves(apart, value) for name, value in values.items()}
            if names := group.get("param_names"):
                values["param_names"] = [names[place % len(names)] for place in members]
            shadow.param_groups.append({"params": list(members.values()), **values})
    return shadow


def _divided(leaf: Any, by: float) -> Any:
    return leaf / by if type(leaf) is float else leaf


def count_step(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> None:
    """Have a step change the numbers of these groups as where no parameter has a gradient.

    torch's own optimizers change none.  A step that fails without gradients leaves them alone.
    """
    if is_torchs(type(optimizer)):
        return
    shadow = copy_of(optimizer, type(optimizer), lambda _name, value: value)
    shadow.param_groups = [
        {**group, "params": [torch.nn.Parameter(torch.zeros(1))]} for group in groups
    ]
    with contextlib.suppress(Exception), torch.compiler.set_stance("force_eager"):
        type(shadow).step(shadow)
        for group, made in zip(groups, shadow.param_groups, strict=True):
            group.update((k, v) for k, v in made.items() if isinstance(v, (int, float)))


def copy_of(
    optimizer: torch.optim.Optimizer, kind: type, attribute: Callable[[str, Any], Any]
) -> Any:
    """An object of a class with an optimizer's attributes, each as ``attribute`` gives it.

    Without parameters' states, groups, hooks, and what is not the class's: the ``step`` that LR
    schedulers wrap on the instance, and the refusal to be copied.
    """
    result: Any = object.__new__(kind)
    for name, value in optimizer.__dict__.items():
        if name not in ("state", "param_groups", "step", "__getstate__"):
            is_hooks = name.startswith("_optimizer_") and name.endswith("_hooks")
            result.__dict__[name] = {} if is_hooks else attribute(name, value)
    result.state = defaultdict(dict)
    own = {key: kept for key, kept in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    result.state.update((key, own_copy(kept)) for key, kept in own.items())
    return result


def own_copy(value: Any) -> Any:
    """A deep copy, or the value itself where it has none."""
    try:
        return copy.deepcopy(value)
    except Exception:
        return value
