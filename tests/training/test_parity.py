"""Each ZeRO stage trains as one eager process does that sees all ranks' batches.

Every rank takes the same rows of the same batches as under DistributedDataParallel, in the same
processes, and both are compared with that one process.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
from tests.kit import models
from tests.kit.covering import exhaustive, only
from tests.kit.models import Gpt, language_loss
from tests.kit.ranks import ranks_fixture  # noqa: F401

STAGES = (0, 1, 2, 3)
STEPS = 20
ROWS = 4  # of one rank's batch
LR = 1e-3
CLIPPED = 0.5  # under the norm of every step's gradients (1.4 to 2.3)
NEVER_CLIPPED = 1e9  # a coefficient of exactly 1

EPSILON = torch.finfo(torch.float32).eps


@dataclass
class Trained:
    """What one process saw: its losses, and the parameters and Adam's moments afterwards."""

    losses: torch.Tensor
    norms: torch.Tensor
    parameters: dict[str, torch.Tensor]
    moments: list[dict[str, torch.Tensor]]


def train(wrap, max_norm: float | None, lr: float, rank: int, world_size: int, of: int) -> Trained:
    """20 steps on the rows of ``rank`` among ``world_size``, of batches for ``of`` ranks.

    ``wrap`` turns (step, model) into the step and the model to call.
    """

    def step(model, optimizer, inputs, targets):
        loss = language_loss(model, inputs, targets)
        loss.backward()
        norm = torch.zeros(())
        if max_norm is not None:
            norm = clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss, norm

    torch.manual_seed(0)
    # 33 elements in a row: nothing divides by 2 or 4, so every parameter is padded on some world.
    model = Gpt(layers=2, width=33)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    called, wrapped = wrap(step, model)
    results = []
    for number in range(STEPS):
        batch = [part.chunk(world_size)[rank] for part in models.tokens(number, ROWS * of)]
        results.append([value.detach().double() for value in called(wrapped, optimizer, *batch)])
    losses, norms = torch.tensor(results, dtype=torch.float64).T
    state = optimizer.state_dict()["state"]
    return Trained(
        losses,
        norms,
        {name: value.detach().clone() for name, value in model.state_dict().items()},
        [{key: value.clone() for key, value in moments.items()} for moments in state.values()],
    )


# What the ranks run.


def trained_by_one(max_norm: float | None, lr: float) -> Trained:
    return train(lambda step, model: (step, model), max_norm, lr, 0, 1, dist.get_world_size())


def trained_by_ddp(max_norm: float | None, lr: float, lowering: str) -> Trained:
    """The yardstick.  Compiled kernels round otherwise, so theirs is a model compiled likewise."""
    torch._dynamo.reset()
    world_size = dist.get_world_size()

    def wrap(step, model):
        called = torch.compile(model) if lowering == "inductor" else model
        return step, DistributedDataParallel(called)

    return train(wrap, max_norm, lr, dist.get_rank(), world_size, world_size)


def trained_by_zero(stage: int, max_norm: float | None, lr: float, lowering: str) -> Trained:
    torch._dynamo.reset()
    world_size = dist.get_world_size()
    options = {"stage": stage, "lowering": lowering}

    def wrap(step, model):
        return torch.compile(step, backend="zero", options={"lowering": "eager", **options}), model

    return train(wrap, max_norm, lr, dist.get_rank(), world_size, world_size)


# A rank's first compilations take seconds on a quiet machine and minutes on a busy one.
TIMEOUT_S = 600.0


@pytest.fixture(name="trained", scope="module")
def trained_fixture(ranks):
    """``trained(world_size, by, *arguments)``: every rank's result, each computed once."""

    @functools.cache
    def of(world_size: int, by, *arguments) -> list[Trained]:
        return ranks(world_size).run(by, *arguments, timeout_s=TIMEOUT_S)

    return of


# Comparing.


def distance(mine: torch.Tensor, other: torch.Tensor) -> float:
    """The root mean square of the differences."""
    return (mine.double() - other.double()).square().mean().sqrt().item()


def rounding_of(value: torch.Tensor) -> float:
    """Four units in the last place of the largest element.

    The parameter itself is stored rounded, 20 times over.  Where DDP happens to round as the one
    process does, its distance is zero or a fraction of a unit and twice that says nothing: alone
    it does the very same arithmetic, and on 3 ranks it adds g0/3 + g1/3 + g2/3 where zerofx
    divides the sum.
    """
    return 4 * EPSILON * value.abs().max().item()


def assert_parity(mine: list[Trained], one: Trained, ddp: Trained) -> None:
    mean_losses = torch.stack([rank.losses for rank in mine]).mean(0)
    torch.testing.assert_close(mean_losses, one.losses, rtol=1e-6, atol=0)
    for rank in mine:
        torch.testing.assert_close(rank.norms, one.norms, rtol=1e-5, atol=0)
        assert rank.parameters.keys() == one.parameters.keys()
        for name, value in rank.parameters.items():
            assert torch.equal(value, mine[0].parameters[name]), f"ranks differ in {name}"
    # Adam divides by the root of the second moment, so where the true gradient is zero (keys'
    # biases) it makes full steps of rounding errors.  DDP shows how far these lead.
    for name, expected in one.parameters.items():
        mine_to_one = distance(mine[0].parameters[name], expected)
        ddp_to_one = distance(ddp.parameters[name], expected)
        allowed = max(2 * ddp_to_one, rounding_of(expected))
        assert mine_to_one <= allowed, (
            f"{name} is {mine_to_one:.2e} from one process, DDP {ddp_to_one:.2e}, "
            f"four units in the last place {rounding_of(expected):.2e}"
        )


def check(trained, world_size, stage, max_norm, *, lr=LR, lowering="eager") -> None:
    mine = trained(world_size, trained_by_zero, stage, max_norm, lr, lowering)
    one = trained(world_size, trained_by_one, max_norm, lr)[0]
    ddp = trained(world_size, trained_by_ddp, max_norm, lr, lowering)[0]
    if max_norm == CLIPPED:
        assert (one.norms > CLIPPED).all(), "nothing was clipped"
    assert one.losses[-1] != one.losses[0]
    assert_parity(mine, one, ddp)


# Stages on two and three ranks.


@pytest.mark.nightly
@pytest.mark.parametrize(
    "stage, max_norm",
    only(
        ((3, CLIPPED),),
        [
            *((stage, None) for stage in STAGES),
            *((stage, CLIPPED) for stage in (1, 3)),
            *(exhaustive(stage, CLIPPED) for stage in (0, 2)),
        ],
    ),
)
def test_two_ranks_train_as_one_process_does(trained, stage, max_norm):
    check(trained, 2, stage, max_norm)


@pytest.mark.nightly
def test_three_ranks_train_as_one_process_does_at_stage_3(trained):
    check(trained, 3, 3, CLIPPED)


def assert_bitwise(mine: list[Trained], other: list[Trained]) -> None:
    for rank, (one, two) in enumerate(zip(mine, other, strict=True)):
        assert torch.equal(one.losses, two.losses), f"losses on rank {rank}"
        for name, value in two.parameters.items():
            assert torch.equal(one.parameters[name], value), f"{name} on rank {rank}"
        for index, moments in enumerate(two.moments):
            for key, value in moments.items():
                assert torch.equal(one.moments[index][key], value), f"{key} {index} on rank {rank}"


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_on_two_ranks_the_stages_agree_bitwise(trained, stage):
    """Nothing is summed in another order: two terms commute, and no norm is read."""
    first = trained(2, trained_by_zero, 0, None, LR, "eager")
    assert_bitwise(trained(2, trained_by_zero, stage, None, LR, "eager"), first)


@pytest.mark.nightly
def test_a_clip_coefficient_of_one_changes_nothing_on_two_ranks(trained):
    """The norm itself is summed shard by shard, and multiplies nothing."""
    first = trained(2, trained_by_zero, 0, None, LR, "eager")
    assert_bitwise(trained(2, trained_by_zero, 3, NEVER_CLIPPED, LR, "eager"), first)


# The rest of the matrix.


@pytest.mark.exhaustive
@pytest.mark.parametrize("max_norm", [None, CLIPPED], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_any_ranks_train_as_one_process_does(trained, world_size, stage, max_norm):
    check(trained, world_size, stage, max_norm)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_small_learning_rate_trains_as_one_process_does(trained, world_size, stage):
    check(trained, world_size, stage, CLIPPED, lr=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_clip_coefficient_of_one_keeps_the_stages_bitwise_equal(trained, stage):
    first = trained(2, trained_by_zero, 0, NEVER_CLIPPED, LR, "eager")
    assert_bitwise(trained(2, trained_by_zero, stage, NEVER_CLIPPED, LR, "eager"), first)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_compiled_lowering_trains_as_one_process_does(trained, world_size, stage):
    check(trained, world_size, stage, CLIPPED, lowering="inductor")
