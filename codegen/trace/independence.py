"""Check that an optimizer updates every parameter by itself, as a traced update does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zerofx.codegen.rewrite.elementwise import UpdateError
from zerofx.codegen.trace.shadow import own_copy, shadow_of

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
        shadow = shadow_of(optimizer, parameters)
        for parameter in parameters.values() if state else ():
            shadow.state[parameter] = {name: _like(value) for name, value in (state or {}).items()}
        for number in range(_STEPS):
            for (group, place), parameter in parameters.items():
                generator = torch.Generator().manual_seed(1000 + 100 * number + 10 * group + place)
                parameter.grad = torch.randn(_SHAPE, generator=generator)
            with torch.enable_grad():
                type(shadow).step(shadow)
    return {member: parameter.detach() for member, parameter in parameters.items()}


def _like(value: Any) -> Any:
    """A small state for a large one; a number is kept."""
    if isinstance(value, torch.Tensor) and value.dim():
        return torch.full(_SHAPE, 0.5).to(value.dtype)
    return own_copy(value)
