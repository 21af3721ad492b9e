"""Check that an optimizer updates every parameter by itself, as a traced update does."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zerofx.codegen.arguments import group_values
from zerofx.codegen.elementwise import UpdateError

_SHAPE = (4, 4)
_PER_GROUP = 2
_STEPS = 2


def check_independent(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any] | None = None
) -> None:
    """Refuse an update that depends on other parameters, their order, or a random draw.

    The optimizer's own step runs twice on a few small tensors, first all in their groups, then
    each alone in its group and with another random seed: the results must be the same bits.
    torch's own optimizers are known.  A step that fails on the small tensors is left for
    tracing to judge.  ``state`` is what a parameter has by now: a later step may take a branch that
    the first ones do not.

    Raises: UpdateError naming the optimizer.
    """
    if type(optimizer).__module__.startswith("torch.optim."):
        return
    groups = len(optimizer.param_groups)
    everything = [(group, place) for group in range(groups) for place in range(_PER_GROUP)]
    try:
        together = _train(optimizer, everything, state, seed=0)
        apart: dict[tuple[int, int], torch.Tensor] = {}
        for one in everything:
            apart |= _train(optimizer, [one], state, seed=1)
    except Exception:
        return
    for (group, place), expected in together.items():
        if not torch.equal(expected.nan_to_num(), apart[group, place].nan_to_num()):
            raise UpdateError(
                f"{type(optimizer).__name__}.step does not update each parameter by itself: the "
                "result depends on the other parameters, on their order or number, on another "
                "parameter group, or on random numbers. zerofx updates parameters one by one. Move "
                "what they share out of the optimizer, to between backward() and step()."
            )


def _train(
    optimizer: torch.optim.Optimizer,
    members: Sequence[tuple[int, int]],
    state: Mapping[str, Any] | None,
    seed: int,
) -> dict[tuple[int, int], torch.Tensor]:
    """The values of some (group, place) after a few steps of a copy of the optimizer."""
    parameters = {}
    for group, place in members:
        generator = torch.Generator().manual_seed(10 * group + place)
        parameters[group, place] = torch.nn.Parameter(torch.randn(_SHAPE, generator=generator))
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        torch.manual_seed(seed)
        shadow = _copy_over(optimizer, parameters)
        for parameter in parameters.values() if state else ():
            shadow.state[parameter] = {name: _like(value) for name, value in (state or {}).items()}
        for number in range(_STEPS):
            for (group, place), parameter in parameters.items():
                generator = torch.Generator().manual_seed(1000 + 100 * number + 10 * group + place)
                parameter.grad = torch.randn(_SHAPE, generator=generator)
            with torch.enable_grad():
                type(shadow).step(shadow)
    return {member: parameter.detach() for member, parameter in parameters.items()}


def _copy_over(
    optimizer: torch.optim.Optimizer, parameters: dict[tuple[int, int], torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """A copy without state, of only the groups that have members."""
    shadow: Any = object.__new__(type(optimizer))
    for name, value in optimizer.__dict__.items():
        if name in ("state", "param_groups", "step"):
            continue
        is_hooks = name.startswith("_optimizer_") and name.endswith("_hooks")
        shadow.__dict__[name] = {} if is_hooks else _own_copy(value)
    shadow.state = defaultdict(dict)
    shadow.param_groups = []
    for number, group in enumerate(optimizer.param_groups):
        members = [p for (owner, _), p in parameters.items() if owner == number]
        if members:
            values = {name: _own_copy(value) for name, value in group_values(group).items()}
            # Groups must differ for a step that reads another's to show itself.
            if isinstance(values.get("lr"), float):
                values["lr"] *= 1 + number / 8
            shadow.param_groups.append({"params": members, **values})
    return shadow


def _like(value: Any) -> Any:
    """A small state for a large one; a number is kept."""
    if isinstance(value, torch.Tensor) and value.dim():
        return torch.full(_SHAPE, 0.5).to(value.dtype)
    return _own_copy(value)


def _own_copy(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:
        return value
