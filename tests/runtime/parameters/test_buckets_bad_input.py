"""Odd parameters and ranks that differ, with buckets and budgets: it works or says why not."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
from tests.kit import models
from tests.kit.covering import each_value, first, only
from tests.kit.ranks import Ranks, ranks_fixture  # noqa: F401
from tests.kit.traffic import traffic_of
from zerofx import backend
from zerofx.errors import BudgetError
from zerofx.runtime.comm.agreement import AgreementError
from zerofx.runtime.comm.communication import Communicator

STAGES = (1, 2, 3)
WIDTH = 33
DEEP = 6


def step(model, optimizer, *batch):
    loss = model(*batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def zero(function: Callable, stage: int, **options) -> Callable:
    return torch.compile(
        function, backend="zero", options={"stage": stage, "lowering": "eager", **options}
    )


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


# Parameters of unusual sizes.


class Odd(nn.Module):
    """In one layer: a matrix, a scalar, nothing, one element, and a row that no rank shares."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(models.FEATURES, 3))
        self.scale = nn.Parameter(torch.tensor(1.25))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.one = nn.Parameter(torch.ones(1))
        self.row = nn.Parameter(torch.randn(3))

    def forward(self, x, y):
        seen = torch.cat([x @ self.weight * self.scale + self.row, self.nothing])
        return F.mse_loss(seen * self.one, y)


def check_odd(stage: int, **options) -> None:
    torch._dynamo.reset()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Odd()
    torch.manual_seed(0)
    twin = Odd()
    optimizer, twins = adamw(model), adamw(twin)
    compiled = zero(step, stage, **options)
    for number in range(3):
        whole = models.features(number, 2 * world_size)
        compiled(model, optimizer, *(part.chunk(world_size)[rank] for part in whole))
        step(twin, twins, *whole)
    for name, value in twin.state_dict().items():
        mine = model.state_dict()[name]
        assert mine.shape == value.shape
        torch.testing.assert_close(mine, value, rtol=1e-5, atol=1e-6, msg=name)
    for number, state in twins.state_dict()["state"].items():
        mine = optimizer.state_dict()["state"][number]
        assert {key: value.shape for key, value in mine.items()} == {
            key: value.shape for key, value in state.items()
        }


@pytest.mark.nightly
@pytest.mark.parametrize("stage, world_size", each_value(STAGES, (2, 3)))
def test_scalars_and_parameters_of_no_elements_train_in_one_bucket(ranks, stage, world_size):
    ranks(world_size).run(check_odd, stage)


def check_larger_than_a_bucket(stage: int) -> list[int]:
    torch._dynamo.reset()
    communicator = Communicator.of(None)
    traffic_of(communicator)
    torch.manual_seed(0)
    found = []
    for bucket_bytes in (1, 10**6):
        model = models.Gpt(width=15)
        optimizer = adamw(model)
        compiled = zero(train_gpt, stage, bucket_bytes=bucket_bytes)
        compiled(model, optimizer, *models.tokens(0, 2))
        traffic_of(communicator).reset()
        compiled(model, optimizer, *models.tokens(1, 2))
        found.append(traffic_of(communicator).collectives["reduce_scatter"])
    return [*found, len(list(model.parameters()))]


def train_gpt(model, optimizer, *batch):
    loss = models.language_loss(model, *batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.nightly
@pytest.mark.parametrize("stage", only((3,), STAGES))
def test_a_parameter_larger_than_a_bucket_travels_alone(ranks, stage):
    for alone, together, parameters in ranks(2).run(check_larger_than_a_bucket, stage):
        assert alone == parameters > together


# Parameters that only some steps use.


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(models.FEATURES, 11)
        self.heads = nn.ModuleList([nn.Linear(11, 3), nn.Linear(11, 3)])

    def forward(self, x, y, use: tuple[int, ...]):
        hidden = F.gelu(self.body(x))
        return sum(F.mse_loss(self.heads[number](hidden), y) for number in use)


USES = ((0,), (1,), (0, 1), (0,), (1,), (0,))
ROWS = (4, 4, 6, 8, 6, 4)  # the shapes change too


@pytest.mark.nightly
@pytest.mark.parametrize("stage, bucket", each_value((0, *STAGES), (True, False)))
def test_state_of_parameters_that_some_steps_leave_out_survives_bit_for_bit(stage, bucket):
    """In a world of one, where nothing is summed in another order."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = TwoHeads()
    torch.manual_seed(0)
    twin = TwoHeads()
    optimizer, twins = adamw(model), adamw(twin)
    known = set(backend.zero.functions)
    compiled = zero(step, stage, bucket=bucket)
    for number, (use, rows) in enumerate(zip(USES, ROWS, strict=True)):
        batch = models.features(number, rows)
        loss = compiled(model, optimizer, *batch, use)
        assert torch.equal(loss, step(twin, twins, *batch, use))
        mine, other = optimizer.state_dict()["state"], twins.state_dict()["state"]
        assert mine.keys() == other.keys()
        for index, state in other.items():
            for key, value in state.items():
                assert torch.equal(mine[index][key], value), f"{key} {index}, step {number}"
    for name, value in twin.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    (function,) = [f for f in backend.zero.functions if f not in known]
    assert len(function.programs) >= 3, "nothing was traced again"


def heads_on_ranks(stage: int) -> list[torch.Tensor]:
    """The rank's losses and the states of both heads afterwards."""
    torch._dynamo.reset()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = TwoHeads()
    optimizer = adamw(model)
    compiled = zero(step, stage)
    for number, (use, rows) in enumerate(zip(USES, ROWS, strict=True)):
        batch = [part.chunk(world_size)[rank] for part in models.features(number, 2 * rows)]
        compiled(model, optimizer, *batch, use)
    state = optimizer.state_dict()["state"]
    return [state[index][key] for index in sorted(state) for key in sorted(state[index])]


@pytest.mark.nightly
@pytest.mark.parametrize("stage", only((3,), STAGES))
def test_on_two_ranks_that_state_is_that_of_one_process(ranks, stage):
    torch.manual_seed(0)
    twin = TwoHeads()
    twins = adamw(twin)
    for number, (use, rows) in enumerate(zip(USES, ROWS, strict=True)):
        step(twin, twins, *models.features(number, 2 * rows), use)
    state = twins.state_dict()["state"]
    expected = [state[index][key] for index in sorted(state) for key in sorted(state[index])]
    for mine in ranks(2).run(heads_on_ranks, stage):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-7)


# Ranks that differ.


class Layers(nn.Module):
    """Equal layers, registered and used in any order."""

    def __init__(self, registered=range(DEEP), used=range(DEEP)):
        super().__init__()
        for number in registered:
            self.add_module(f"layer{number}", nn.Linear(WIDTH, WIDTH))
        self.used = tuple(used)

    def forward(self, x):
        for number in self.used:
            x = F.gelu(getattr(self, f"layer{number}")(x))
        return x.square().mean()


REVERSED = tuple(reversed(range(DEEP)))


def outcome(difference: str, stage: int) -> tuple[str, str, int]:
    """Train where rank 1 differs: the error's type and words, and what had been communicated."""
    torch._dynamo.reset()
    rank = dist.get_rank()
    mine = difference if rank == 1 else ""
    torch.manual_seed(0)
    model = Layers(
        registered=REVERSED if mine == "registered" else range(DEEP),
        used=REVERSED if mine == "used" else range(DEEP),
    )
    optimizer = adamw(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    layer = 4 * WIDTH * (WIDTH + 1)
    options = {"bucket_bytes": layer - 1 if mine == "bucket_bytes" else 2 * layer}
    options |= {"bucket": False} if mine == "bucket" else {}
    communicator = Communicator.of(None)
    traffic_of(communicator).reset()
    try:
        zero(step, stage, **options)(model, optimizer, torch.ones(2, WIDTH))
    except Exception as error:
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name])
        sent = traffic_of(communicator).collectives
        words = "\n".join([str(error), *getattr(error, "__notes__", ())])
        return type(error).__name__, words, sum(sent.values()) - sent["agreement"]
    return "", "trained", 0


TOGETHER, ALONE = r"layer\d\.weight, layer\d\.bias ", r"layer\d\.(weight|bias) "


@pytest.mark.slow(reason="ranks compile and train")
@pytest.mark.parametrize(
    "difference, of_rank_0, of_rank_1",
    first(
        1,
        [
            ("used", r"parameter layer0\.weight ", r"parameter layer5\.weight "),
            ("bucket", TOGETHER, ALONE),
            ("bucket_bytes", TOGETHER, ALONE),
        ],
    ),
)
@pytest.mark.parametrize("stage", only((3,), STAGES))
def test_other_buckets_on_one_rank_are_named_before_anything_is_sent(
    ranks, difference, of_rank_0, of_rank_1, stage
):
    first_line = rf"is `(\w+ )?{of_rank_0}.*` on rank 0 and `(\w+ )?{of_rank_1}.*` on rank 1"
    for kind, text, collectives in ranks(2).run(outcome, difference, stage, timeout_s=60):
        assert kind == AgreementError.__name__, text
        assert "ranks 0 and 1 compiled different programs" in text
        assert re.search(first_line, text), text
        assert "remove from the step, the model and the options whatever differs" in text
        assert collectives == 0


@pytest.mark.nightly
@pytest.mark.parametrize("stage", STAGES)
def test_modules_registered_in_another_order_on_one_rank_train_all_the_same(ranks, stage):
    """Parameters count in the order of their use."""
    assert ranks(2).run(outcome, "registered", stage, timeout_s=60) == [("", "trained", 0)] * 2


# Batches that differ, with a budget: what is kept gathered depends on what is left of it.

FEW, MANY = 2, 400


def uneven(
    share: float, rows: tuple[tuple[int, int], ...], agreement_timeout_s: float = 60.0
) -> tuple[str, str, int]:
    """Train with these rows, step by step, on the two ranks; return the error's type and words.

    And how many gathers the last step took, on both.  ``share`` is of the smallest budget for
    ``MANY`` rows; ranks wait for each other for as long in the last step.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Layers()
    optimizer = adamw(model)
    try:
        zero(step, 3, memory_budget=1)(model, optimizer, torch.ones(MANY, WIDTH))
    except Exception as error:
        smallest = int(str(error).split("allocates ")[1].split()[0])
    compiled = zero(step, 3, memory_budget=int(share * smallest))
    communicator = Communicator.of(None)
    own_timeout = backend.AGREEMENT_TIMEOUT_S
    try:
        for number, of_ranks in enumerate(rows, 1):
            if number == len(rows):
                backend.AGREEMENT_TIMEOUT_S = agreement_timeout_s
            traffic_of(communicator).reset()
            batch = torch.linspace(0, 1, of_ranks[dist.get_rank()])[:, None].expand(-1, WIDTH)
            compiled(model, optimizer, batch)
    except Exception as error:
        words = "\n".join((str(error), *getattr(error, "__notes__", ())))
        return type(error).__name__, words, 0
    finally:
        backend.AGREEMENT_TIMEOUT_S = own_timeout
    gathers = traffic_of(communicator).collectives["all_gather"]
    values = torch.cat([value.flatten() for value in model.state_dict().values()])
    assert values.isfinite().all()
    return "", f"{values.double().sum():.12g}", gathers


@pytest.mark.nightly
def test_ranks_with_uneven_batches_keep_what_all_of_them_can(ranks):
    few, many, other = (FEW, FEW), (MANY, MANY), (FEW, MANY)
    (_, _, with_room), _ = ranks(2).run(uneven, 1.0, (few,), timeout_s=60)
    (_, _, without), _ = ranks(2).run(uneven, 1.0, (many,), timeout_s=60)
    assert with_room < without
    for share, gathers in ((1.0, without), (10.0, with_room)):
        (kind, values, found), on_other = ranks(2).run(uneven, share, (other, other), timeout_s=60)
        assert (kind, found) == ("", gathers), values
        assert on_other == (kind, values, found)
    assert ranks(2).run(uneven, 1.0, (other, other), timeout_s=60)[0][1] == values


@pytest.mark.nightly
def test_what_is_kept_stays_so_while_it_fits_and_is_agreed_on_anew_when_not(ranks):
    few, many, mixed = (FEW, FEW), (MANY, MANY), (MANY, FEW)
    (_, _, with_room), _ = ranks(2).run(uneven, 1.0, (few,), timeout_s=60)
    (_, _, without), _ = ranks(2).run(uneven, 1.0, (many,), timeout_s=60)
    for rows, gathers in (
        ((few, many), without),
        ((many, few), without),
        ((mixed, few), without),
        ((few, (FEW, FEW + 1)), with_room),
        ((many, mixed, (FEW, MANY - 1)), without),
    ):
        one, other = ranks(2).run(uneven, 1.0, rows, timeout_s=60)
        assert one == other and one[0] == "" and one[2] == gathers, (rows, one)


@pytest.mark.nightly
def test_a_budget_that_is_too_small_on_one_rank_ends_both(ranks):
    rows = ((FEW, MANY),)
    (kind, text, _), (other_kind, other, _) = ranks(2).run(uneven, 0.9, rows, timeout_s=60)
    assert (kind, other_kind) == (AgreementError.__name__, BudgetError.__name__)
    assert "rank 1 could not compile" in text
    assert "memory_budget is" in other and "give it that much" in other and other[:40] in text


@pytest.mark.nightly
def test_a_larger_batch_later_on_one_rank_ends_in_words_and_not_in_a_hang():
    with contextlib.closing(Ranks(2, group_timeout_s=10.0)) as two:
        rows = ((FEW, FEW), (FEW, MANY))
        (_, text, _), (kind, other, _) = two.run(uneven, 1.0, rows, 3.0, timeout_s=90)
        two.kill()
    assert kind == AgreementError.__name__, other
    assert "rank(s) [0] posted no schedule" in other and "begin with the largest" in other
    assert "rank 1 has compiled another program" in text and "`within memory_budget`" in text


@pytest.mark.parametrize("stage", (0, 2))
def test_a_budget_where_nothing_is_gathered_is_said_to_have_no_effect(stage, caplog):
    model = torch.nn.Linear(4, 2)
    options = {"stage": stage, "memory_budget": 10, "lowering": "eager"}
    step = torch.compile(lambda x: model(x).detach(), backend="zero", options=options)
    with caplog.at_level("WARNING", "zerofx"):
        step(torch.ones(3, 4))
    assert (
        f"memory_budget decides what stays gathered at stage 3; stage {stage} ignores it"
        in caplog.text
    )
