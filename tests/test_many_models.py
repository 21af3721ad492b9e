"""One compiled function, several models: each call works on the objects it is given."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit

from tests import models
from tests.covering import exhaustive, only
from tests.models import Mlp, squared_loss
from zerofx.errors import StepError

BATCH = models.features(0, 4)
STAGES = (0, exhaustive(1), exhaustive(2), 3)


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()


def zero(step, stage: int = 3):
    return torch.compile(step, backend="zero", options={"stage": stage, "lowering": "eager"})


def two_models() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Mlp(), Mlp()]


def assert_same_values(actual: nn.Module, expected: nn.Module) -> None:
    values = actual.state_dict()
    for name, value in expected.state_dict().items():
        assert torch.equal(values[name], value), name


def evaluate(model, x, y):
    with torch.no_grad():
        return squared_loss(model, x, y)


@pytest.mark.parametrize("stage", only((3,), STAGES))
def test_an_evaluation_answers_for_the_model_it_is_called_with(stage):
    both = two_models()
    expected = [evaluate(model, *BATCH) for model in both]
    compiled = zero(evaluate, stage)
    for _ in range(2):
        assert [compiled(model, *BATCH).item() for model in both] == [e.item() for e in expected]


def test_an_evaluation_sees_a_layer_that_was_replaced():
    def total(model, x):
        with torch.no_grad():
            return model(x).sum()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 11), nn.ReLU(), nn.Linear(11, 3))
    reference = copy.deepcopy(model)
    x = torch.ones(2, 6)
    compiled = zero(total)
    assert compiled(model, x).item() == total(reference, x).item()
    model[2] = nn.Linear(11, 3)
    reference[2] = copy.deepcopy(model[2])
    assert compiled(model, x).item() == total(reference, x).item()


def by_hand(model, x, y):
    loss = squared_loss(model, x, y)
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.1 * parameter.grad)
            parameter.grad = None
    return loss


@pytest.mark.parametrize("stage", only((3,), STAGES))
def test_two_models_train_each_by_themselves(stage):
    both = two_models()
    expected = copy.deepcopy(both)
    compiled = zero(by_hand, stage)
    for _ in range(3):
        for model, reference in zip(both, expected, strict=True):
            assert compiled(model, *BATCH).item() == by_hand(reference, *BATCH).item()
    for model, reference in zip(both, expected, strict=True):
        assert_same_values(model, reference)


@pytest.mark.parametrize("stage", only((3,), STAGES))
def test_one_optimizer_over_two_models_updates_the_one_that_has_gradients(stage):
    def step(model, x, y):
        loss = squared_loss(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    both = two_models()
    expected = copy.deepcopy(both)
    losses = []
    for group in (expected, both):
        optimizer = torch.optim.AdamW([p for model in group for p in model.parameters()], lr=1e-2)
        run = zero(step, stage) if group is both else step
        losses.append([run(group[number % 2], *BATCH).item() for number in range(5)])
    assert losses[0] == losses[1]
    for model, reference in zip(both, expected, strict=True):
        assert_same_values(model, reference)


@pytest.mark.slow(reason="more models than torch compiles for")
def test_more_models_than_torch_compiles_for_are_refused_with_a_remedy():
    compiled = zero(evaluate)
    held = [Mlp() for _ in range(torch._dynamo.config.recompile_limit + 1)]
    for model in held[:-1]:
        compiled(model, *BATCH)
    with pytest.raises(FailOnRecompileLimitHit) as caught:
        compiled(held[-1], *BATCH)
    assert "once per model" in "".join(caught.value.__notes__)


@pytest.mark.slow(reason="more functions than torch compiles")
def test_more_functions_of_one_code_than_torch_compiles_are_refused_and_not_run_eagerly():
    """Each ``torch.compile`` call is new to torch, which then forgets that breaks are errors."""

    def compiled():
        model = Mlp()

        def step(x, y):
            loss = squared_loss(model, x, y)
            loss.backward()
            return loss

        return model, zero(step, stage=1)

    held = [compiled() for _ in range(torch._dynamo.config.recompile_limit + 1)]
    for _, run in held[:-1]:
        run(*BATCH)
    model, run = held[-1]
    with pytest.raises(FailOnRecompileLimitHit) as caught:
        run(*BATCH)
    assert "once per model" in "".join(caught.value.__notes__)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_function_of_which_torch_compiles_nothing_is_an_error():
    with pytest.raises(StepError, match="compiled nothing of this function"):
        zero(lambda x: 3)(*BATCH[:1])
    try:
        raise ValueError("that somebody handles")
    except ValueError:
        with pytest.raises(StepError, match="compiled nothing of this function"):
            zero(lambda x: 3)(*BATCH[:1])


@pytest.mark.parametrize("stage", only((3,), (0, 3)))
def test_a_model_that_nobody_holds_is_freed(stage):
    def step(model, optimizer, x, y):
        loss = squared_loss(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = zero(step, stage)
    for _ in range(2):
        compiled(model, optimizer, *BATCH)
    references = [weakref.ref(p) for p in model.parameters()] + [weakref.ref(optimizer)]
    del model, optimizer
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)
