"""A form trained, as a rank or alone, and compared with one eager process.

The reference is that process on the concatenated batch of all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
import torch.utils.checkpoint

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
from tests.kit.step_forms import (  # noqa: F401
    accumulation,
    calls,
    gradients,
    layers,
    objects,
    parameters,
    scalers,
)
from tests.kit.step_forms.form import FORMS, STEPS, Training

STAGES = (0, 1, 2, 3)


def zero(stage: int, **options):
    """What a form wraps its functions in to have them compiled, and validated."""

    def compiled(step, **arguments):
        always = {"stage": stage, "lowering": "eager", "validate": True}
        chosen = {**always, **options, **arguments.pop("options", {})}
        return torch.compile(step, backend="zero", options=chosen, **arguments)

    return compiled


def eager(step, **_arguments):
    return step


def rank_and_world_size() -> tuple[int, int]:
    if not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def built(name: str, wrap: Callable, rank: int = 0) -> Training:
    """A form with values of the rank's own: those of rank 0 must win."""
    torch.manual_seed(rank)
    return FORMS[name].build(wrap)


def run(name: str, training: Training, steps: range, world_size: int, rank: int | None) -> list:
    """Every step's results, on the rows of ``rank``, or of all ranks if that is None."""
    this = FORMS[name]
    results = []
    for number in steps:
        if not training.scheduled:
            change_lr(training, number)
        ranks = 1 if this.same_batch else world_size
        batch = this.batch(number, this.rows[number % len(this.rows)] * ranks)
        if rank is not None and not this.same_batch:
            batch = [tensor.chunk(world_size)[rank] for tensor in batch]
        torch.manual_seed(number)
        leaves = pytree.tree_leaves(training.step(*batch))
        results.append([torch.as_tensor(leaf).detach().clone() for leaf in leaves])
    return results


def change_lr(training: Training, number: int) -> None:
    for optimizer in training.optimizers:
        for group in optimizer.param_groups:
            lr = group.setdefault("initial_lr", float(group["lr"])) * (1 - number / 20)
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr


def state_of(training: Training) -> dict[str, Any]:
    """All that checkpoints would hold, by readable names."""
    found = {}
    for number, model in enumerate(training.models):
        found |= {f"model {number} {name}": value for name, value in model.state_dict().items()}
    for number, optimizer in enumerate(training.optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            found |= {f"optimizer {number} {index} {name}": state[name] for name in state}
    for number, value in enumerate(pytree.tree_leaves(training.extra())):
        found[f"extra {number}"] = value
    return {name: torch.as_tensor(value).clone() for name, value in found.items()}


def programs_compiled() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def trained(name: str, stage: int, steps: int = STEPS, options: dict | None = None) -> tuple:
    """Train a form as a rank or alone: results, final state, number of programs compiled."""
    torch._dynamo.reset()
    rank, world_size = rank_and_world_size()
    training = built(name, zero(stage, **(options or {})), rank)
    before = programs_compiled()
    results = run(name, training, range(steps), world_size, rank)
    return results, state_of(training), programs_compiled() - before


@functools.cache
def reference(name: str, world_size: int, steps: int = STEPS) -> tuple:
    """The same in one eager process on the batches of all ranks."""
    training = built(name, eager)
    if FORMS[name].functional_rounding:
        for model in training.models:
            model.compile(backend="aot_eager")
    with torch._dynamo.config.patch(allow_rnn=True):
        return run(name, training, range(steps), world_size, None), state_of(training)


def labelled(what: str) -> Callable[[str], str]:
    return lambda message: f"{what}: {message}"


def assert_same(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True, msg=labelled(what))


def assert_close(actual: torch.Tensor, expected: torch.Tensor, what: str, rounding=1e-5) -> None:
    tolerance = {"rtol": rounding, "atol": rounding / 10}
    torch.testing.assert_close(actual, expected, **tolerance, equal_nan=True, msg=labelled(what))


def assert_results(name: str, of_ranks: list[list], expected: list, *, exact: bool) -> None:
    """Compare the mean of the ranks' results with the reference's."""
    for number, leaves in enumerate(expected):
        for position, leaf in enumerate(leaves):
            what = f"result {position} of step {number}"
            each = [results[number][position] for results in of_ranks]
            if exact:
                assert_same(each[0], leaf, what)
                continue
            if leaf.dim() == 0:
                mean, whole = torch.stack(each).double().mean(0), leaf.double()
                tolerance = {"rtol": FORMS[name].rounding, "atol": 0}
                torch.testing.assert_close(
                    mean, whole, **tolerance, equal_nan=True, msg=labelled(what)
                )
            else:
                assert_close(torch.stack(each).mean(0), leaf, what)


def assert_states(states: list[dict], expected: dict, *, exact: bool, rounding=1e-5) -> None:
    for rank, state in enumerate(states):
        assert state.keys() == expected.keys()
        for key, value in expected.items():
            what = f"{key} on rank {rank}"
            if exact:
                assert_same(state[key], value, what)
            else:
                assert_close(state[key], value, what, rounding)


def assert_trains_alike(name: str, stage: int, of_ranks: list[tuple]) -> None:
    """Compare what every rank returned from ``trained`` with the reference."""
    results, states, compiled = zip(*of_ranks, strict=True)
    expected, expected_state = reference(name, len(of_ranks))
    exact = len(of_ranks) == 1 and (stage == 0 or not FORMS[name].sums_over_shards)
    assert_results(name, results, expected, exact=exact)
    rounding = max(1e-5, FORMS[name].rounding)
    assert_states(states, expected_state, exact=exact, rounding=rounding)
    assert compiled == (FORMS[name].graphs,) * len(of_ranks)
