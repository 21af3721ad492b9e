"""Ranks whose data is used up: they take part with zero weight, and nobody hangs."""

from __future__ import annotations

import copy
import random
import time
from collections import UserDict
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import nn
from torch.nn.utils import clip_grad_norm_

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
import zerofx
from tests.kit.covering import nightly
from tests.kit.ranks import ranks_fixture  # noqa: F401
from zerofx.backend import zero
from zerofx.errors import StepError
from zerofx.worker import Worker

WIDTH, CLASSES = 6, 5


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(x + self.body(x))


def rows_of(rank: int, number: int) -> int:
    return random.Random(100 * rank + number).randint(1, 4)


def batch_of(rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + number)
    rows = rows_of(rank, number)
    x = torch.randn(rows, WIDTH, generator=generator)
    return x, torch.randint(CLASSES, (rows,), generator=generator)


def has_batch(rank: int, number: int, dry_from: int) -> bool:
    """Rank 1 is dry from a step on, and the last rank at every fourth one."""
    if rank == 1:
        return number < dry_from
    return rank == 0 or number % 4 != 3


def train(calls: list[list | None], options: dict | None) -> tuple[list, list]:
    """Return losses (or how many ranks had data) and parameters; None is a call without data."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)

    def step(x, y):
        optimizer.zero_grad()
        penalty = 0.01 * model.head.weight.square().sum()
        loss = F.cross_entropy(model(x), y) + penalty
        loss.backward()
        clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        return loss

    if options is not None:
        step = torch.compile(step, backend="zero", options={"lowering": "eager", **options})
    found = [step(*call).item() if call is not None else zerofx.no_data(step) for call in calls]
    if options is not None:
        assert zerofx.no_data(step) == 0
        assert zerofx.no_data(step) == 0  # nothing has changed
    with zerofx.full_params(model):
        return found, [p.detach().clone() for p in model.parameters()]


def train_on_rank(steps: int, dry_from: int, options: dict):
    rank = dist.get_rank()
    calls = [batch_of(rank, n) if has_batch(rank, n, dry_from) else None for n in range(steps)]
    return train(calls, options)


def train_alone(world_size: int, steps: int, dry_from: int):
    calls = []
    for number in range(steps):
        having = [r for r in range(world_size) if has_batch(r, number, dry_from)]
        calls.append(list(map(torch.cat, zip(*(batch_of(r, number) for r in having), strict=True))))
    return train(calls, None)


def check(ranks, world_size, steps, dry_from, options):
    losses, parameters = train_alone(world_size, steps, dry_from)
    arguments = steps, dry_from, options
    for rank, found in enumerate(ranks(world_size).run(train_on_rank, *arguments, timeout_s=300)):
        for number, (mine, expected) in enumerate(zip(found[0], losses, strict=True)):
            if has_batch(rank, number, dry_from):
                assert mine == pytest.approx(expected, rel=2e-6, abs=1e-6)
            else:
                having = [r for r in range(world_size) if has_batch(r, number, dry_from)]
                assert mine == len(having)
        torch.testing.assert_close(found[1], parameters, rtol=1e-5, atol=1e-5)


OFFLOADED = {"offload": ["optimizer", "params"]}


@pytest.mark.slow(reason="ranks compile and train")
@pytest.mark.parametrize(
    "stage, world_size, steps, dry_from",
    [(3, 2, 3, 1), nightly(3, 2, 8, 5), nightly(3, 3, 12, 5), nightly(1, 3, 12, 5)],
)
def test_ranks_without_data_leave_the_training_as_it_is(  # noqa: F811
    ranks, stage, world_size, steps, dry_from
):
    check(ranks, world_size, steps, dry_from, {"loss": "global", "stage": stage})


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    (
        {"stage": 0},
        {"stage": 2},
        {"stage": 3, "lowering": "inductor"},
        {"stage": 3, "lowering": "inductor", "start": "at_once"},
        {"stage": 3, "start": "at_once"},
        {"stage": 3, **OFFLOADED},
        {"stage": 2, "offload": ["optimizer"], "delayed_update": False},
        {"stage": 3, "check_order": True},
        {"stage": 3, "validate": True},
    ),
    ids=str,
)
def test_whatever_the_options(ranks, options):  # noqa: F811
    check(ranks, 2, 10, 4, {"loss": "global", **options})


@pytest.mark.nightly
def test_a_thousand_steps_with_one_rank_dry_from_the_middle_on(ranks):  # noqa: F811
    check(ranks, 2, 1000, 500, {"loss": "global", "stage": 3})


def average_over_two(rows: int):
    """Two steps: with data on both ranks, then on rank 0 alone."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step(x):
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()

    step = torch.compile(step, backend="zero", options={"lowering": "eager", "uneven": True})
    x = torch.ones(rows, WIDTH)
    step(x)
    with zerofx.full_params(model):
        before = model.bias.detach().clone()
    having = 1
    if dist.get_rank() == 0:
        step(x)
    else:
        having = zerofx.no_data(step)
    with zerofx.full_params(model):
        return having, (before - model.bias.detach()).item()


@pytest.mark.slow(reason="ranks compile and train")
def test_by_rank_the_mean_stays_one_over_all_ranks(ranks):  # noqa: F811
    assert ranks(2).run(average_over_two, 3) == [(1, 0.5), (1, 0.5)]


def write_statistics():
    """What a dry rank's step has written: running statistics, a metric, an average of weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen, average = torch.zeros(1), torch.zeros(WIDTH)

    def step(x, seen, average):
        optimizer.zero_grad()
        out = model(x)
        out.square().mean().backward()
        optimizer.step()
        seen.add_(out.detach().sum())
        average.lerp_(model[2].bias.detach().expand(WIDTH), 0.5)

    step = torch.compile(
        step, backend="zero", options={"lowering": "eager", "stage": 1, "loss": "global"}
    )
    x = torch.randn(3 + dist.get_rank(), WIDTH)
    step(x, seen, average)
    before = copy.deepcopy((model[1].running_mean, seen, average))
    if dist.get_rank() == 0:
        step(x, seen, average)
    else:
        assert zerofx.no_data(step) == 1
    after = model[1].running_mean, seen, average
    return [torch.equal(one, other) for one, other in zip(before, after, strict=True)], average


@pytest.mark.slow(reason="ranks compile and train")
def test_what_is_written_of_a_batch_stays_as_it_is(ranks):  # noqa: F811
    (with_data, one), (without, other) = ranks(2).run(write_statistics)
    assert with_data == [False, False, False]
    assert without == [True, True, False]
    assert torch.equal(one, other)


def compiled(**options):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    return torch.compile(step, backend="zero", options={"lowering": "eager", **options})


def test_before_the_first_call_there_is_nothing_to_go_through():
    with pytest.raises(StepError, match="has none before its first call"):
        zerofx.no_data(compiled(uneven=True))


def test_it_has_to_be_expected():
    step = compiled()
    step(torch.ones(1, 2))
    with pytest.raises(StepError, match="uneven=True"):
        zerofx.no_data(step)


def test_one_rank_alone_may_stop():
    step = compiled(uneven=True)
    step(torch.ones(1, 2))
    assert zerofx.no_data(step) == 0


def test_what_no_backend_of_ours_has_compiled_is_refused():
    with pytest.raises(StepError, match="not a step of this backend"):
        zerofx.no_data(print)


def test_a_function_that_is_compiled_anew_may_stop_too():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def compiled_anew():
        def step(x):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

        options = {"lowering": "eager", "uneven": True, "stage": 0}
        return torch.compile(step, backend="zero", options=options)

    x = torch.ones(1, 2)
    for _ in range(2):  # torch has the second run the first one's program
        step = compiled_anew()
        step(x)
        before = model.bias.tolist()
        assert zerofx.no_data(step) == zerofx.no_data(step, x) == 0
        assert model.bias.tolist() == before


def test_a_compiled_method_may_stop():
    class Trainer:
        def __init__(self):
            self.model = nn.Linear(2, 1)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

        @torch.compile(backend="zero", options={"lowering": "eager", "uneven": True})
        def step(self, x):
            self.optimizer.zero_grad()
            self.model(x).sum().backward()
            self.optimizer.step()

    trainer, x = Trainer(), torch.ones(1, 2)
    trainer.step(x)
    assert zerofx.no_data(trainer.step) == zerofx.no_data(trainer.step, x) == 0

    def programs():
        return [program for function in zero.functions for program in function.programs]

    before = programs()
    assert zerofx.no_data(Trainer().step) == 0
    made = [program for program in programs() if all(program is not other for other in before)]
    assert len(made) == 1, "the program is the other trainer's"


@pytest.mark.nightly
def test_of_two_steps_from_one_function_it_is_the_right_one(ranks):  # noqa: F811
    assert ranks(2).run(step_two_models) == [(True, True)] * 2


def step_two_models():
    """Rank 1 has no data for the first of two models whose steps are one function's."""
    torch.manual_seed(0)
    models = [nn.Linear(WIDTH, 1) for _ in range(2)]

    def make(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

        def step(x):
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()

        return torch.compile(
            step, backend="zero", options={"lowering": "eager", "uneven": True, "stage": 0}
        )

    steps = list(map(make, models))
    x = torch.ones(2, WIDTH)
    for step in steps:
        step(x)
    before = [model.bias.detach().clone() for model in models]
    if dist.get_rank() == 0:
        steps[0](x)
    else:
        assert zerofx.no_data(steps[0]) == 1
    moved = [(one - model.bias.detach()).item() for one, model in zip(before, models, strict=True)]
    return moved[0] == pytest.approx(0.5), moved[1] == 0


def end_with_delayed_updates(last: bool):
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    options = {"lowering": "eager", "offload": ["optimizer"], "delayed_update": True}
    options["bucket_bytes"] = 1  # two updates, of which one has not begun when the end comes
    step = torch.compile(step, backend="zero", options={**options, "loss": "global"})
    for number in range(2):
        step(torch.ones(2, WIDTH) + number)
    start = Worker.start

    def start_late(self, job):
        return start(self, lambda: (time.sleep(0.1), job())[1])

    with mock.patch.object(Worker, "start", start_late):
        step(torch.ones(2, WIDTH))
        if last:
            assert zerofx.no_data(step) == 0
    with zerofx.full_params(model):
        return model.weight.detach().clone()


@pytest.mark.nightly
def test_the_end_keeps_delayed_updates(ranks):  # noqa: F811
    (expected, *_), (found, *_) = (ranks(2).run(end_with_delayed_updates, e) for e in (False, True))
    assert torch.equal(found, expected)


def end_with_files(directory: str) -> tuple[list[int], bool]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    files = {"offload": ["params"], "offload_tier": "nvme", "offload_dir": directory}
    options = {"lowering": "eager", "stage": 3, "bucket_bytes": 4 * WIDTH, "loss": "global"}
    step = torch.compile(step, backend="zero", options={**options, **files})
    before = step(torch.ones(1, WIDTH))
    ends = [zerofx.no_data(step) for _ in range(2)]
    return ends, bool(step(torch.ones(1, WIDTH)) < before)


@pytest.mark.nightly
def test_the_end_lets_go_of_what_was_read_of_files(ranks, tmp_path):  # noqa: F811
    assert ranks(2).run(end_with_files, str(tmp_path)) == [([0, 0], True)] * 2


def train_with_a_rate(gives: bool):
    """The rate is an argument, and smaller in the call in which rank 1 has no data."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step(x, scale):
        optimizer.zero_grad()
        (model(x).mean() * scale).backward()
        optimizer.step()

    options = {"lowering": "eager", "loss": "global", "stage": 0}
    step = torch.compile(step, backend="zero", options=options)
    x = torch.ones(2, WIDTH)
    if not gives:
        step(x, torch.tensor(1.0))
    before = model.bias.detach().clone()
    if dist.get_rank() == 0:
        step(x, torch.tensor(0.25))
    else:
        assert zerofx.no_data(step, x, torch.tensor(0.25)) == 1
    return (before - model.bias.detach()).item()


@pytest.mark.slow(reason="ranks compile and train")
@pytest.mark.parametrize("is_first", (nightly(False), True))
def test_it_may_be_given_arguments_even_before_the_first_call(ranks, is_first):  # noqa: F811
    assert ranks(2).run(train_with_a_rate, is_first) == pytest.approx([0.25, 0.25])


def take_arguments_apart():
    """Containers that the step, or its caller, empties; and a call that fails before."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step(batch, parts):
        optimizer.zero_grad()
        (model(batch.pop("x")).mean() + model(parts[0]).mean()).backward()
        optimizer.step()

    options = {"lowering": "eager", "uneven": True, "stage": 0}
    step = torch.compile(step, backend="zero", options=options)
    x = torch.ones(2, WIDTH)
    for _ in range(2):
        parts = [x]
        step(UserDict(x=x), parts)
        parts.clear()
    if dist.get_rank() == 0:
        step(UserDict(x=x), [x])
        step(UserDict(x=x), [x])
    else:
        with pytest.raises(Exception, match="same reduction dim|cannot be multiplied"):
            step(UserDict(x=torch.ones(2, WIDTH + 1)), [x])
        assert zerofx.no_data(step) == 1
        assert zerofx.no_data(step) == 1
    return model.bias.item()


@pytest.mark.slow(reason="ranks compile and train")
def test_what_the_last_call_had_is_kept_as_it_was_given(ranks):  # noqa: F811
    one, other = ranks(2).run(take_arguments_apart)
    assert one == other


def test_an_evaluation_is_refused():
    model = nn.Linear(2, 2)

    @torch.no_grad()
    def evaluate(x):
        return model(x).sum()

    options = {"lowering": "eager", "uneven": True, "stage": 0}
    evaluate = torch.compile(evaluate, backend="zero", options=options)
    evaluate(torch.ones(1, 2))
    with pytest.raises(StepError, match="has no backward"):
        zerofx.no_data(evaluate)


def accumulating(x, n):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def accumulate(x, n):
        (model(x).sum() / zerofx.local_count(n)).backward()

    def update():
        optimizer.step()
        optimizer.zero_grad()

    options = {"lowering": "eager", "loss": "global", "stage": 0}
    compiled = [torch.compile(f, backend="zero", options=options) for f in (accumulate, update)]
    compiled[0](x, n)
    compiled[1]()
    return compiled


@pytest.mark.parametrize("n", (2, nightly(torch.tensor(2.0))))
def test_a_count_of_several_calls_cannot_be_partly_without_data(n):
    accumulate, update = accumulating(torch.ones(1, 2), n)
    with pytest.raises(StepError, match="zerofx.global_count"):
        zerofx.no_data(accumulate)
    accumulate(torch.ones(1, 2), n)
    with pytest.raises(StepError, match="an update alone as it is"):
        zerofx.no_data(update)


def test_modules_that_are_compiled_in_place_are_found():
    class Step(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = nn.Linear(2, 1)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

        def forward(self, x):
            self.optimizer.zero_grad()
            self.model(x).sum().backward()
            self.optimizer.step()

    step = Step()
    step.compile(backend="zero", options={"lowering": "eager", "uneven": True})
    step(torch.ones(1, 2))
    assert zerofx.no_data(step) == 0
