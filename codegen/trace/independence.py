"""Check that an optimizer updates every parameter by itself, as a traced update does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zerofx import compat
from zerofx.codegen.rewrite.elementwise import UpdateError
from zerofx.codegen.trace.shadow import own_copy, shadow_of

_SHAPE = (4, 4)
_PER_GROUP = 2
_STEPS = 6
_STEPS_IN_PLACES = 2
_SCALES = (1.0, 1e-4, 1e4)
"""Of the other parameters' gradients: what adds up over all, to clip say, then does something."""

_Members = Sequence[tuple[int, int]]


def check_independent(
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any] | None = None,
    num_steps: int = _STEPS,
) -> bool:
    """Refuse an update that depends on other parameters, their order, or a random draw.

    The optimizer's own step runs so many times on small tensors, each alone in its group, and then
    all in their groups with another random seed, beside gradients of several scales: the results
    must be the same bits.  So they must if each moves one place further in its whole group.
    torch's own optimizers are known.  Returns False if the step fails on the small tensors: it is
    left for tracing to judge.  ``state`` is what a parameter has by now: a later step may take a
    branch that the first ones do not.

    Raises: UpdateError naming the optimizer.
    """
    if type(optimizer).__module__.startswith("torch.optim."):
        return True
    groups = len(optimizer.param_groups)
    everything = [(group, place) for group in range(groups) for place in range(_PER_GROUP)]
    try:
        alone: dict[tuple[int, int], torch.Tensor] = {}
        for one in everything:
            alone |= _train(optimizer, [one], state, num_steps, seed=1)
        differ = any(
            not _are_equal(found, alone[member])
            for place in range(_PER_GROUP)
            for scale in _SCALES
            for member, found in _train(
                optimizer, everything, state, num_steps, 0, place, scale
            ).items()
            if member[1] == place
        ) or (state is None and _depends_on_places(optimizer))
    except UpdateError:
        raise
    except Exception:
        return False
    if differ:
        raise UpdateError(
            f"{type(optimizer).__name__}.step does not update each parameter by itself: the "
            "result depends on the other parameters, on their order or number, on another "
            "parameter group, or on random numbers. zerofx updates parameters one by one. Move "
            "what they share out of the optimizer, to between backward() and step()."
        )
    return True


def _depends_on_places(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether updates differ when each parameter moves one place further in its group."""
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if max(sizes) <= _PER_GROUP:
        return False
    one, other = (
        _train(
            optimizer,
            [(group, (place + by) % n) for group, n in enumerate(sizes) for place in range(n)],
            None,
            _STEPS_IN_PLACES,
            seed=0,
        )
        for by in (0, 1)
    )
    return any(not _are_equal(found, one[member]) for member, found in other.items())


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def _train(
    optimizer: torch.optim.Optimizer,
    members: _Members,
    state: Mapping[str, Any] | None,
    num_steps: int,
    seed: int,
    place: int | None = None,
    scale: float = 1.0,
) -> dict[tuple[int, int], torch.Tensor]:
    """Return the values of some (group, place) after these steps of a copy of the optimizer.

    Gradients of those at another ``place`` than this are multiplied by ``scale``.
    """
    parameters = {}
    for group, number in members:
        generator = torch.Generator().manual_seed(10 * group + number)
        parameters[group, number] = torch.nn.Parameter(torch.randn(_SHAPE, generator=generator))
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        torch.manual_seed(seed)
        shadow = shadow_of(optimizer, parameters)
        for parameter in parameters.values() if state else ():
            shadow.state[parameter] = {name: _like(value) for name, value in (state or {}).items()}
        for step in range(num_steps):
            for (group, number), parameter in parameters.items():
                generator = torch.Generator().manual_seed(1000 + 100 * step + 10 * group + number)
                parameter.grad = torch.randn(_SHAPE, generator=generator)
                if place not in (None, number):
                    parameter.grad *= scale
            eager = torch.compiler.set_stance("force_eager")  # nothing compiles under a mode
            with torch.enable_grad(), eager, _Alone(type(optimizer).__name__):
                type(shadow).step(shadow)
    return {member: parameter.detach() for member, parameter in parameters.items()}


class _Alone(compat.scalars.DispatchMode):
    """Lets a step send nothing: ranks would not do so alike."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self._optimizer = optimizer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise UpdateError(
                f"{self._optimizer}.step sends tensors to other ranks itself, by `{func}`, and "
                "zerofx updates parameters one at a time, each on one rank. Use a form of it "
                "for a single device."
            )
        return func(*args, **(kwargs or {}))


def _like(value: Any) -> Any:
    """A small state for a large one; a number is kept."""
    if isinstance(value, torch.Tensor) and value.dim():
        return torch.full(_SHAPE, 0.5).to(value.dtype)
    return own_copy(value)
