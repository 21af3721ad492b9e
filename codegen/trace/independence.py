"""Check that an optimizer updates every parameter by itself, as a traced update does."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from zerofx import compat
from zerofx.accelerator import current, is_accelerator, module_of
from zerofx.codegen.rewrite.elementwise import UpdateError
from zerofx.codegen.trace.arguments import group_values, is_torchs
from zerofx.codegen.trace.nested import leaves
from zerofx.codegen.trace.shadow import Place, own_copy, shadow_of
from zerofx.codegen.trace.step import Elsewhere

_LENGTH = 4
_PER_GROUP = 2
_STEPS = 6
_STEPS_IN_PLACES = 2
_SCALES = (1.0, 1e-4, 1e4)
"""Of the other parameters' gradients: what adds up over all, to clip say, then does something."""


def check_independent(
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any] | None = None,
    num_steps: int = _STEPS,
) -> bool:
    """Refuse an update that depends on other parameters, on its place in a group, or on a draw.

    The optimizer's own step runs so many times on small tensors, each alone in its group, and then
    all in their groups with another random seed, beside gradients of several scales: the results
    must be the same bits.  So they must if each moves one place further in its whole group.
    Tensors are square, or if the step fails on those, like its own.  Parameters of classes of the
    user's must be updated as others.  torch's own optimizers are known.  Returns False,
    with a warning at first, if the step fails on both: it is left for tracing to judge.
    ``state`` is what a parameter has by now: a later step may take a branch that the first ones do
    not.

    Raises: UpdateError naming the optimizer.
    """
    name = type(optimizer).__name__
    if is_torchs(type(optimizer)):
        return True
    for draw in (_square, partial(_like_its_own, optimizer)):
        try:
            trial = _Trial(optimizer, state, draw)
            depends = _depends(trial, num_steps)
            break
        except UpdateError:
            raise
        except Exception as error:
            failure = f"{type(error).__name__}: {error}".rstrip(".")
    else:
        if state is None:
            warnings.warn(
                f"{name}.step fails on small tensors, with {failure}. So zerofx cannot try out "
                "that it updates every parameter by itself, and takes it that it does.",
                stacklevel=2,
            )
        return False
    if depends:
        raise UpdateError(
            f"{name}.step does not update each parameter by itself: the result depends on the "
            "other parameters, on their order or number, on another parameter group, or on random "
            "numbers. zerofx updates parameters one by one. Move what they share out of the "
            "optimizer, to between backward() and step()."
        )
    if state is None:
        _refuse_classes(trial)
    return True


def check_idle(optimizer: torch.optim.Optimizer) -> None:
    """Refuse a step that goes on changing parameters which have no gradients, or their states.

    It is tried on two parameters of each group, of which the second has none.  A step that fails
    without gradients is left alone.

    Raises: UpdateError naming the optimizer.
    """
    one, other = (_tried(optimizer, steps, idle=1) for steps in (1, 3))
    if one is None or other is None:
        return
    changes = any(one[at].numbers != other[at].numbers for at in one if at[1] == 1)
    if changes:
        raise UpdateError(
            f"{type(optimizer).__name__}.step changes parameters that have no gradient, or their "
            "states, and some of its parameters have none in the compiled step: zerofx updates "
            "those that do. Skip the others in the optimizer (`if p.grad is None: continue`), or "
            "give it only parameters that the step trains."
        )


def check_ignores_loss(optimizer: torch.optim.Optimizer) -> None:
    """Refuse a step that does more with the loss of its closure than return it.

    Raises: UpdateError naming the optimizer.
    """
    if _tried(optimizer, 1, closure=lambda: torch.zeros(())) is None:
        return
    if _tried(optimizer, 1, closure=lambda: Elsewhere("the loss")) is None:
        raise UpdateError(
            f"{type(optimizer).__name__}.step computes with the loss that its closure returns, and "
            "a compiled step calls the closure before the update, which it gives no loss. Call "
            "the closure yourself and step() without it, or use an optimizer that only returns "
            "the loss."
        )


def clears_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step leaves no gradients, which it does of small tensors then."""
    found = _tried(optimizer, 1)
    return found is not None and not any(one.has_gradient for one in found.values())


def counts_in_groups(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step changes numbers of its parameter groups, as it does in a trial."""
    one, other = (_tried(optimizer, steps) for steps in (1, 2))
    if one is None or other is None:
        return False
    return any(one[at].group != other[at].group for at in one)


def _tried(
    optimizer: torch.optim.Optimizer, num_steps: int, **given: Any
) -> dict[Place, _Trained] | None:
    """Return what steps make of two small parameters of each group.

    None for torch's own optimizers, which are known, and for a step that fails.
    """
    if is_torchs(type(optimizer)):
        return None
    trial = _Trial(optimizer, None, _square)
    try:
        return trial.train(trial.pairs, num_steps, seed=0, **given)
    except Exception:
        return None


def _depends(trial: _Trial, num_steps: int) -> bool:
    """Return whether parameters that are updated together end up otherwise than each alone."""
    alone: dict[Place, _Trained] = {}
    for one in trial.pairs:
        alone |= trial.train([one], num_steps, seed=1)
    return any(
        not _are_equal(found, alone[member])
        for place in range(_PER_GROUP)
        for scale in _SCALES
        for member, found in trial.train(trial.pairs, num_steps, 0, place, scale).items()
        if member[1] == place
    ) or (trial.state is None and _depends_on_places(trial))


def _depends_on_places(trial: _Trial) -> bool:
    """Return whether updates differ when each parameter moves one place further in its group."""
    sizes = [len(group["params"]) for group in trial.optimizer.param_groups]
    if max(sizes) <= _PER_GROUP:
        return False
    one, other = (
        trial.train(
            [(group, (place + by) % n) for group, n in enumerate(sizes) for place in range(n)],
            _STEPS_IN_PLACES,
            seed=0,
        )
        for by in (0, 1)
    )
    return any(not _are_equal(found, one[member]) for member, found in other.items())


def _refuse_classes(trial: _Trial) -> None:
    """Refuse a step that looks at a parameter's class: what it updates instead has none."""
    kinds = {type(p) for group in trial.optimizer.param_groups for p in group["params"]}
    for kind in kinds - {torch.nn.Parameter}:
        if kind.__torch_function__ is not torch.nn.Parameter.__torch_function__:
            continue  # it is guarded by now, or no ordinary tensor
        try:
            usual, found = (
                replace(trial, kind=one).train(trial.pairs, _STEPS, seed=0)
                for one in (torch.nn.Parameter, kind)
            )
        except Exception:  # its class needs more than a tensor
            continue
        if not all(_are_equal(usual[member], found[member]) for member in found):
            raise UpdateError(
                f"{type(trial.optimizer).__name__}.step updates parameters of class "
                f"{kind.__name__} otherwise than others, but zerofx gives it plain tensors in "
                "their place. Have them in a parameter group of their own, with other numbers."
            )


class _Trained(NamedTuple):
    """Holds what some steps have made of a parameter."""

    value: torch.Tensor
    state: Mapping[str, Any]
    group: str
    has_gradient: bool

    @property
    def numbers(self) -> str:
        """Return all numbers of the parameter and its state, as text."""
        return _numbers([self.value, dict(self.state)])


def _numbers(nested: Any) -> str:
    """Return all numbers in there as text: NaN is not equal to itself."""
    found = list(leaves(nested))
    tensors = [one.tolist() for one in found if isinstance(one, torch.Tensor)]
    return repr([*tensors, *(one for one in found if isinstance(one, (int, float)))])


def _are_equal(one: _Trained, other: _Trained) -> bool:
    """Return whether two values are the same bits."""
    return torch.equal(one.value.nan_to_num(), other.value.nan_to_num())


@dataclass(frozen=True)
class _Trial:
    """A copy of the optimizer, whose parameters ``draw`` gives, by place, and their gradients.

    They begin with ``state``, or with none, and are of class ``kind``.
    """

    optimizer: torch.optim.Optimizer
    state: Mapping[str, Any] | None
    draw: Callable[[Place, torch.Generator], torch.Tensor]
    kind: type = torch.nn.Parameter

    @property
    def pairs(self) -> list[Place]:
        """Return two places in each group."""
        groups = range(len(self.optimizer.param_groups))
        return [(group, place) for group in groups for place in range(_PER_GROUP)]

    def train(
        self,
        members: Sequence[Place],
        num_steps: int,
        seed: int,
        place: int | None = None,
        scale: float = 1.0,
        idle: int | None = None,
        closure: Callable[[], Any] | None = None,
    ) -> dict[Place, _Trained]:
        """Train these parameters alone for some steps.

        Gradients of those at another ``place`` than this are multiplied by ``scale``; those at
        ``idle`` have none.  The step is given a ``closure``, if there is one.
        """
        parameters = {}
        for group, number in members:
            generator = torch.Generator().manual_seed(10 * group + number)
            parameter = torch.nn.Parameter(self.draw((group, number), generator))
            parameter.__class__ = self.kind
            parameters[group, number] = parameter
        with _seeded(seed, parameters.values()), torch.inference_mode(False):
            shadow = shadow_of(self.optimizer, parameters)
            for parameter in parameters.values() if self.state else ():
                shadow.state[parameter] = {
                    name: _like(value, parameter) for name, value in (self.state or {}).items()
                }
            for step in range(num_steps):
                for (group, number), parameter in parameters.items():
                    if number == idle:
                        continue
                    its_seed = 1000 + 100 * step + 10 * group + number
                    generator = torch.Generator().manual_seed(its_seed)
                    parameter.grad = self.draw((group, number), generator)
                    if place not in (None, number):
                        parameter.grad *= scale
                eager = torch.compiler.set_stance("force_eager")  # nothing compiles under a mode
                with torch.enable_grad(), eager, _Alone(type(self.optimizer).__name__):
                    type(shadow).step(shadow, *([closure] if closure else ()))
        group_of = {
            p: _numbers(group_values(group))
            for group in shadow.param_groups
            for p in group["params"]
        }
        return {
            member: _Trained(p.detach(), shadow.state.get(p, {}), group_of[p], p.grad is not None)
            for member, p in parameters.items()
        }


@contextmanager
def _seeded(seed: int, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Seed the generators of the CPU and of where tensors are, and put them back at the end.

    ``torch.manual_seed`` would seed those of all accelerators, and leave them so.
    """
    devices = list({one.device for one in tensors if is_accelerator(one.device)})
    kind = devices[0].type if devices else "cpu"  # for 2.11, which has no default
    with torch.random.fork_rng(devices, device_type=kind):
        torch.default_generator.manual_seed(seed)
        for device in devices:
            with current(device):
                module_of(device).manual_seed(seed)
        yield


def _square(_place: Place, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(_LENGTH, _LENGTH, generator=generator, device="cpu")


def _like_its_own(
    optimizer: torch.optim.Optimizer, place: Place, generator: torch.Generator
) -> torch.Tensor:
    """Draw numbers with the dimensions of a parameter, in its dtype and on its device."""
    group, number = place
    own = optimizer.param_groups[group]["params"]
    like = own[number % len(own)]
    shape = [min(size, _LENGTH) for size in like.shape]
    return torch.randn(shape, generator=generator, device="cpu").to(like.device, like.dtype)


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


def _like(value: Any, parameter: torch.Tensor) -> Any:
    """A small state for a large one; a number is kept."""
    if isinstance(value, torch.Tensor) and value.dim():
        return torch.full_like(parameter, 0.5, dtype=value.dtype)
    return own_copy(value)
