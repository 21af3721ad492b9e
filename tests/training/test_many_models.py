"""One compiled function, several models: each call works on the objects it is given."""

from __future__ import annotations

import copy
import gc
import inspect
import weakref

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit

from tests.kit import models
from tests.kit.covering import exhaustive, nightly, only
from tests.kit.models import Mlp, squared_loss
from zerofx import backend
from zerofx.errors import StepError

BATCH = models.features(0, 4)
STAGES = (0, exhaustive(1), exhaustive(2), 3)


@pytest.fixture(autouse=True, scope="module")
def quick_collections():
    """Spare the collections here what importing torch has made."""
    gc.collect()
    gc.freeze()


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


@pytest.mark.nightly
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


LIMIT = torch._dynamo.config.recompile_limit


def adam_step(model, optimizer, x, y):
    loss = squared_loss(model, x, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def built(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Mlp()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def entries(code) -> list:
    return torch._C._dynamo.eval_frame._debug_get_cache_entry_list(code)


@pytest.mark.nightly
def test_twelve_models_are_evaluated_one_after_the_other():
    compiled = zero(evaluate)
    for _ in range(12):
        model = nn.Linear(6, 3)
        expected = evaluate(model, *BATCH)
        assert compiled(model, *BATCH).item() == expected.item()
        references = [weakref.ref(held) for held in (model, *model.parameters())]
        del model
        gc.collect()
        assert [reference() for reference in references] == [None] * 3
        assert len(entries(evaluate.__code__)) == 1
    (function,) = [known for known in backend.zero.functions if known.code is evaluate.__code__]
    (program,) = function.programs
    assert program.number == 11 and not program.is_in_use


def assert_train_in_turn(number_of_models: int, stage: int) -> None:
    """Models that come and go, each with a step of its own: one code object, which torch limits."""

    def train(number: int, compiled):
        model, optimizer = built(number)

        def step(x, y):
            return adam_step(model, optimizer, x, y)

        run = compiled(step)
        losses = [run(*models.features(i, 4)).item() for i in range(2)]
        return losses, [weakref.ref(held) for held in (run, model, optimizer, *model.parameters())]

    (code,) = [one for one in train.__code__.co_consts if getattr(one, "co_name", "") == "step"]
    for number in range(number_of_models):
        losses, references = train(number, lambda step: zero(step, stage))
        assert losses == train(number, lambda step: step)[0]
        gc.collect()
        assert [reference() for reference in references] == [None] * len(references)
        assert len(entries(code)) == 1
    programs = [program for f in backend.zero.functions for program in f.programs]
    assert sum(program.is_in_use and program.code is code for program in programs) == 0


@pytest.mark.slow(reason="as many models as show what Dynamo forgets")
@pytest.mark.parametrize("stage", (nightly(0), 3))
def test_models_train_one_after_the_other_each_with_a_step_of_its_own(stage):
    with torch._dynamo.config.patch(recompile_limit=1):
        assert_train_in_turn(3, stage)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", (0, 3))
def test_fifty_models_train_one_after_the_other_each_with_a_step_of_its_own(stage):
    assert_train_in_turn(50, stage)


def assert_train_beside_one_that_stays(number_of_models: int, stage: int) -> None:
    """One compiled function for them all; what is in use is not compiled again."""
    run, kept, reference = zero(adam_step, stage), built(1000), built(1000)
    for number in range(number_of_models):
        batch = models.features(number, 4)
        assert run(*kept, *batch).item() == adam_step(*reference, *batch).item()
        training, same = built(number), built(number)
        assert run(*training, *batch).item() == adam_step(*same, *batch).item()
        del training
        gc.collect()
    (function,) = [known for known in backend.zero.functions if known.code is adam_step.__code__]
    assert [program.is_in_use for program in function.programs] == [True, False]
    assert [program.number for program in function.programs] == [0, number_of_models]
    del kept
    gc.collect()
    assert run(*built(0), *batch).item() == adam_step(*built(0), *batch).item()
    assert len(entries(adam_step.__code__)) == 1
    assert len(function.programs) == 1


@pytest.mark.nightly
@pytest.mark.parametrize("stage", (0, 3))
def test_fifty_models_come_and_go_beside_one_that_stays(stage):
    assert_train_beside_one_that_stays(50, stage)


@pytest.mark.nightly
def test_a_model_gets_a_new_optimizer_for_every_fold():
    def folds(run):
        torch.manual_seed(0)
        model = Mlp()
        first = copy.deepcopy(model.state_dict())
        for number in range(3):
            model.load_state_dict(first)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (1 + number))
            for i in range(2):
                yield run(model, optimizer, *models.features(i, 4)).item()

    with torch._dynamo.config.patch(recompile_limit=1):
        assert list(folds(zero(adam_step, 0))) == list(folds(adam_step))


@pytest.mark.nightly
def test_more_models_than_torch_compiles_for_are_held_at_once():
    compiled = zero(evaluate)
    held = [nn.Linear(6, 3) for _ in range(LIMIT + 2)]
    expected = [evaluate(model, *BATCH).item() for model in held]
    for _ in range(2):
        assert [compiled(model, *BATCH).item() for model in held] == expected
    assert len(entries(evaluate.__code__)) == len(held)


@pytest.mark.slow(reason="as many programs as torch compiles")
def test_a_string_that_changes_at_every_call_is_refused_with_a_remedy():
    def step(model, x, y, name):
        loss = squared_loss(model, x, y)
        loss.backward()
        return {name: loss}

    model, compiled = Mlp(), zero(step, stage=1)
    with torch._dynamo.config.patch(recompile_limit=2):
        for number in range(2):
            compiled(model, *BATCH, f"loss{number}")
            model.zero_grad()
        for _ in range(2):
            with pytest.raises(StepError) as caught:
                compiled(model, *BATCH, "another")
        message = str(caught.value)
        assert "step has 2 program(s) for the same parameters" in message
        assert "keep other values out of the step" in message
        assert 'TORCH_LOGS="recompiles"' in message
        assert all(parameter.grad is None for parameter in model.parameters())
        assert list(compiled(model, *BATCH, "loss1")) == ["loss1"]  # what there is goes on
        compiled(Mlp(), *BATCH, "another")  # as does another model
    compiled(model, *BATCH, "another")


@pytest.mark.nightly
def test_optimizers_made_in_every_turn_of_a_loop_and_held_are_refused_and_nothing_runs_eagerly():
    """Each ``torch.compile`` call is new to torch, which then forgets that breaks are errors."""
    model = Mlp()

    def turn():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x, y):
            return adam_step(model, optimizer, x, y)

        zero(step, stage=1)(*BATCH)
        return optimizer

    with torch._dynamo.config.patch(recompile_limit=2):
        held = [turn(), turn()]
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(StepError, match="make objects once, before the loop"):
            turn()
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), name
        held.clear()
        turn()


def test_programs_that_torch_has_forgotten_do_not_count():
    model, compiled = Mlp(), zero(evaluate)
    expected = evaluate(model, *BATCH).item()
    with torch._dynamo.config.patch(recompile_limit=1):
        for _ in range(3):
            assert compiled(model, *BATCH).item() == expected
            torch._dynamo.reset()


def test_functions_without_parameters_have_the_limit_too():
    def named(x, name):
        return {name: x + 1}

    compiled = zero(named)
    with torch._dynamo.config.patch(recompile_limit=1):
        compiled(BATCH[0], "one")
        with pytest.raises(StepError, match="named has 1 program"):
            compiled(BATCH[0], "another")


@pytest.mark.skipif(
    "recompile_limit" not in inspect.signature(torch.compile).parameters,
    reason="this torch.compile takes no limit",
)
def test_a_limit_given_to_torch_compile_is_explained():
    run = torch.compile(evaluate, backend="zero", options={"lowering": "eager"}, recompile_limit=1)
    first, second = two_models()
    run(first, *BATCH)
    with pytest.raises(FailOnRecompileLimitHit) as caught:
        run(second, *BATCH)
    assert "Leave it out" in "".join(caught.value.__notes__)


def forward(model, x):
    with torch.no_grad():
        return model(x).sum()


@pytest.mark.nightly
def test_another_backend_keeps_torchs_limit_and_what_torch_has_compiled():
    """Of the same function too, though models of this backend come and go."""
    model, counter = Mlp(), torch._dynamo.testing.CompileCounter()
    other, mine = torch.compile(forward, backend=counter, dynamic=False), zero(forward)
    rows = [torch.ones(number + 1, 6) for number in range(LIMIT + 3)]
    for x in rows[:4]:
        other(model, x)
    for _ in range(3):
        mine(Mlp(), BATCH[0])
        gc.collect()
    assert counter.frame_count == 4
    for x in rows[:4]:
        other(model, x)
    assert counter.frame_count == 4
    for x in rows:
        other(model, x)
    assert counter.frame_count <= LIMIT


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
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = zero(adam_step, stage)
    for _ in range(2):
        compiled(model, optimizer, *BATCH)
    references = [weakref.ref(p) for p in model.parameters()] + [weakref.ref(optimizer)]
    del model, optimizer
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)
