"""``plan="auto"``: any choice trains as the defaults do, within the limit, alike on all ranks."""

from __future__ import annotations

import gc
import re
import sys

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
import zerofx
from tests.kit.covering import nightly
from tests.kit.models import features
from tests.kit.ranks import ranks_fixture  # noqa: F401
from tests.kit.trainings import assert_same, clipped, plain, program_of, run
from zerofx import backend
from zerofx.compiler.forecast import Forecast, Ranks
from zerofx.errors import BudgetError, StepError
from zerofx.inspecting import explain
from zerofx.options import Options

FIGURES = "latency_s=2e-5 bytes_per_s=1e9 flops_per_s=2e10 memory_bytes_per_s=1e10"
LIMITS = (10**9, 30_000_000, 24_000_000, 20_000_000, 16_000_000, 12_000_000, 8_000_000)
"""Bytes: all that there is, and less and less."""


def built():
    """A model of 6 MiB, and its optimizer; far more than a process takes beside it."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(512, 512) for _ in range(5)]
    model = torch.nn.Sequential(torch.nn.Linear(6, 512), *layers, torch.nn.Linear(512, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()


def auto(step, limit, **options):
    """A step whose options are chosen."""
    given = {"lowering": "eager", "hardware": FIGURES, "plan": "auto", "memory_limit": limit}
    return torch.compile(step, backend="zero", options={**given, **options})


def function_of(compiled):
    program = program_of(compiled)
    return next(each for each in backend.zero.functions if program in each.programs)


def trained(step, limit, options=None):
    """Losses, states, and what was chosen; None for the limit trains by default."""
    torch._dynamo.reset()
    gc.collect()
    pair = built()
    options = {"lowering": "eager", "hardware": FIGURES, **(options or {})}
    if limit is not None:
        options |= {"plan": "auto", "memory_limit": limit}
    compiled = torch.compile(step, backend="zero", options=options)
    losses = run(compiled, pair, range(3))
    choice = function_of(compiled).choice
    facts = choice and {**choice.facts, "reasons": choice.reasons}
    return losses, pair[0].state_dict(), pair[1].state_dict(), facts


def within(step, limits, options=None):
    """Train by default, and within each limit for as long as anything fits."""
    found = [trained(step, None, options)]
    for limit in limits:
        try:
            found.append(trained(step, limit, options))
        except BudgetError as error:
            found.append(str(error))
    return found


def check(found, limits, same=assert_same):
    """The same bits throughout, and as many bytes as there are."""
    expected, *chosen = found
    fitting = [each for each in chosen if not isinstance(each, str)]
    for each in fitting:
        same(each[:3], expected[:3])
    for each, limit in zip(chosen, limits, strict=True):
        if isinstance(each, str):
            assert f"memory_limit is {limit} bytes" in each
            least = int(re.search(r"rank's device is (\d+)", each)[1])
            assert least > limit
        else:
            assert each[3]["needs"] <= limit
    return [each[3] for each in fitting]


def nearly(one, other):
    """The same but for the order of sums, over ranks and over the shards of a norm."""
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("step", (plain, clipped))
def test_alone(step):
    chosen = check(within(step, LIMITS), LIMITS)
    assert len({(one["stage"], tuple(one["offload"])) for one in chosen}) > 1


@pytest.mark.nightly
@pytest.mark.parametrize("step", (plain, clipped))
def test_on_two_ranks(ranks, step):
    both = ranks(2).run(within, step, LIMITS, timeout_s=600)
    # Norms are summed shard by shard from stage 1 on, and whole at stage 0.
    same = nearly if step is clipped else assert_same
    chosen = [check(found, LIMITS, same) for found in both]
    assert chosen[0] == chosen[1]
    assert len({(one["stage"], tuple(one["offload"])) for one in chosen[0]}) > 1


def on_a_mesh(step, limits):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "gpu"))
    return within(step, limits, {"process_group": mesh})


@pytest.mark.nightly
def test_on_a_mesh(ranks):
    limits = (10**9, 16_000_000)
    every = ranks(4).run(on_a_mesh, plain, limits, timeout_s=600)
    chosen = [check(found, limits, nearly) for found in every]
    assert chosen[0] and all(each == chosen[0] for each in chosen)


def other_rows():
    """The second rank has a batch that is four times as large."""
    pair, rank = built(), torch.distributed.get_rank()
    batch = [part[: 2 if rank == 0 else 8] for part in features(rank, 8)]
    found = []
    for limit in (10**9, 20_000_000, 14_000_000):
        torch._dynamo.reset()
        pair, compiled = built(), auto(plain, limit)
        try:
            losses = [compiled(*pair, *batch).item() for _ in range(2)]
            found.append((losses, function_of(compiled).options.stage, pair[0].state_dict()))
        except BudgetError as error:
            found.append(str(error))
    return found


@pytest.mark.nightly
def test_ranks_with_batches_of_other_shapes_agree(ranks):
    one, other = ranks(2).run(other_rows)
    assert not isinstance(one[0], str)
    for mine, its in zip(one, other, strict=True):
        if isinstance(mine, str):
            assert "memory_limit is" in mine and "memory_limit is" in its
        else:
            assert mine[1] == its[1]
            assert_same(mine[2], its[2])


@pytest.mark.nightly
def test_options_that_are_given_stay():
    pair, compiled = built(), auto(plain, 10**9, stage=1, bucket_bytes=400)
    run(compiled, pair, [0])
    chosen = function_of(compiled).options
    assert (chosen.stage, chosen.bucket_bytes, chosen.offload) == (1, 400, ())


def evaluate(model, x):
    return model(x).sum()


def predict(model, x):
    return model(x)


@pytest.mark.slow(reason="a step is planned and compiled")
def test_a_later_function_takes_over_the_plan():
    pair = built()
    training = auto(plain, 10**9, stage=2)
    run(training, pair, [0])
    evaluating = auto(evaluate, 10**9)
    with torch.no_grad():
        evaluating(pair[0], features(0, 8)[0])
    assert function_of(evaluating).options.stage == 2
    run(training, pair, [1])


def evaluated_before(limit, **options):
    """Return what an evaluation, training after it and an evaluation after that choose."""
    pair = built()
    x = features(0, 8)[0]
    steps = [auto(evaluate, limit, **options), auto(plain, limit), auto(predict, limit)]
    for step in steps:
        if step is steps[1]:
            run(step, pair, [0])
        else:
            with torch.no_grad():
                step(pair[0], x)
    return [function_of(step).options for step in steps]


@pytest.mark.nightly
def test_an_evaluation_leaves_to_training_what_that_needs(ranks):
    """It would be fastest whole, and with all on the device."""
    for chosen in ranks(2).run(evaluated_before, 8_000_000):
        assert [one.stage for one in chosen] == [3, 3, 3]
        assert not chosen[0].offload and chosen[1].offload
        assert chosen[2].offload == chosen[1].offload


def accumulating(model, optimizer, x, y, is_last):
    loss = (model(x) - y).square().mean()
    loss.backward()
    if is_last:
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


@pytest.mark.slow(reason="a step is planned twice and compiled")
def test_a_call_that_updates_chooses_with_the_states_that_it_will_have():
    limit = 20_000_000
    pair, other, step = built(), built(), auto(accumulating, limit)
    chosen = []
    for number in range(4):
        arguments = *features(number, 8), number % 2 == 1
        assert step(*pair, *arguments) == accumulating(*other, *arguments)
        function = function_of(step)
        chosen.append((function.options, function.choice.form))
    assert_same(*([each.state_dict() for each in parts] for parts in (pair, other)))
    (first, form), (then, with_states), *later = chosen
    assert not first.offload and form.needs <= limit
    assert "optimizer" in then.offload and with_states.needs <= limit
    assert first.stage == then.stage and all(options is then for options, _ in later)


@pytest.mark.slow(reason="a step is planned and compiled")
@pytest.mark.parametrize("has_room", (True, nightly(False)))
def test_a_step_without_updates_leaves_room_for_states_if_there_is_any(has_room):
    pair, x = built(), features(0, 8)[0]
    states = 2 * sum(parameter.nbytes for parameter in pair[0].parameters())
    limit = 10**9 if has_room else states
    step = auto(evaluate, limit)
    with torch.no_grad():
        step(pair[0], x)
    assert function_of(step).choice.limit == limit - states * has_room


@pytest.mark.slow(reason="a step is compiled")
def test_a_program_is_of_no_parameters_that_have_gone():
    """A new model's may have their ids, and would take over a plan that the other ranks do not."""
    pair, compiled = built(), torch.compile(plain, backend="zero", options={"lowering": "eager"})
    run(compiled, pair, [0])
    program = program_of(compiled)
    assert program.parameters == {id(parameter) for parameter in pair[0].parameters()}
    del pair
    gc.collect()
    assert not program.parameters


@pytest.mark.nightly
def test_training_that_fits_no_stage_taken_over_is_told_whose_that_is():
    with pytest.raises(BudgetError) as raised:
        evaluated_before(1_000_000, stage=0, memory_limit=10**9)
    words = "\n".join((str(raised.value), *raised.value.__notes__))
    assert re.search(r"Its stage is that of evaluate\d+, .* give the option stage", words), words


@pytest.mark.slow(reason="a step is planned and compiled")
def test_within_what_is_free_it_says_what_it_has_chosen_and_why():
    def num_forecasts():
        gc.collect()
        return sum(isinstance(one, Forecast) for one in gc.get_objects())

    before = num_forecasts()
    pair, compiled = built(), auto(plain, None)
    run(compiled, pair, [0])
    assert num_forecasts() <= before  # the choice keeps figures alone of the forms it has tried
    assert function_of(compiled).choice.limit > 2**20
    table = explain(compiled)
    assert re.search(r"chosen by plan=auto +stage \d", table), table
    assert "its matrix products alone take" in table


@pytest.mark.slow(reason="every stage is tried, and on more ranks")
@pytest.mark.parametrize("options", ({"offload": ()}, nightly({})), ids=str)
def test_nothing_fits(options):
    model = torch.nn.Linear(6, 3)
    with pytest.raises(
        BudgetError, match="memory_limit is 10 bytes, and the least.* with a smaller batch"
    ):
        run(auto(plain, 10, **options), (model, torch.optim.AdamW(model.parameters())), [0])


@pytest.mark.nightly
def test_what_fits_on_more_ranks_says_on_how_many():
    with pytest.raises(BudgetError, match="train on 4 ranks, where stage 3 fits"):
        run(auto(plain, 8_000_000, offload=()), built(), [0])


@pytest.mark.parametrize(
    "options, words",
    [
        ({"memory_budget": 1}, "plan='auto' chooses memory_budget: drop it"),
        ({"offload": "auto", "memory_budget": None}, "drop offload='auto', or plan"),
        ({"stop_after": "bucket"}, "stop_after='bucket' ends it before that"),
        ({"plan": "best"}, "plan must be one of auto"),
    ],
)
def test_what_makes_no_sense_with_it(options, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        run(auto(plain, 10**9, **options), built(), [0])


def test_a_limit_needs_the_plan():
    compiled = torch.compile(plain, backend="zero", options={"memory_limit": 10})
    with pytest.raises(ValueError, match="memory_limit=10 is what plan='auto' chooses"):
        run(compiled, built(), [0])


def test_it_needs_a_solver(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(StepError, match=r"pip install 'zerofx\[plan\]'"):
        run(auto(plain, 10**9), built(), [0])


def reads_states(model, optimizer, x, y):
    loss = plain(model, optimizer, x, y)
    return loss, optimizer.state[next(model.parameters())]["exp_avg"].clone()


def test_what_reads_whole_states_has_stage_0():
    pair = built()
    plain(*pair, *features(0, 8))  # eagerly: now there are states
    compiled = auto(reads_states, 10**9)
    compiled(*pair, *features(1, 8))
    assert function_of(compiled).options.stage == 0


@pytest.mark.nightly
def test_it_is_refused_at_a_stage_that_is_given_or_taken_over():
    pair = built()
    plain(*pair, *features(0, 8))
    with pytest.raises(StepError, match="exp_avg|state"):
        auto(reads_states, 10**9, stage=3)(*pair, *features(1, 8))
    run(auto(plain, 10**9, stage=3), pair, [1])
    with pytest.raises(StepError, match="exp_avg|state"):
        auto(reads_states, 10**9)(*pair, *features(2, 8))


def planned(limit, **options):
    """The plan of what two ranks train."""
    given = *built(), *[part[:4] for part in features(0, 8)]
    options = {"lowering": "eager", "hardware": FIGURES, **options}
    return zerofx.plan(plain, given, ranks=2, options=options, memory_limit=limit)


@pytest.mark.nightly
def test_it_is_never_predicted_slower_than_the_greedy_choice():
    choice = planned(17_500_000).choice  # stage 3 alone fits, and has room
    options = choice.options
    greedy = [
        form
        for form in choice.tried
        if form.options.plan is None and form.options.memory_budget == options.memory_budget
    ]
    assert options.memory_budget is not None and greedy
    assert choice.form.step_s <= 1.002 * greedy[0].step_s
    assert any("is within 0." in line for line in choice.reasons)


@pytest.mark.slow(reason="a step is planned for each form, twice")
@pytest.mark.parametrize(
    "rows, share, options",
    [
        (4096, 0.6, {}),
        (8, 0.001, {"optimizer": "Muon"}),
        *(nightly(rows, share, {}) for rows in (4096, 8) for share in (1.0, 0.95, 0.8, 0.3, 0.001)),
        nightly(8, 0.6, {"optimizer": "Muon"}),
        nightly(8, 0.001, {"secondary_shard": "gpu"}),
        nightly(8, 0.5, {"secondary_shard": "gpu"}),
        nightly(4096, 0.6, {"offload": "optimizer"}),
        *(nightly(4096, share, {"lowering": "inductor"}) for share in (0.8, 0.3, 0.001)),
    ],
    ids=str,
)
def test_forms_are_left_out_that_cannot_fit_and_no_others(monkeypatch, rows, share, options):
    """The search chooses, or asks for at the least, what it would if it tried all forms."""
    torch.set_num_threads(1)
    options = {"lowering": "eager", "hardware": FIGURES, **options}
    given, on = (*built(), *features(0, rows)), {"ranks": 2}
    if options.pop("optimizer", None):  # whose updates owners make, whole
        model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(4)))
        given = model, torch.optim.Muon(model.parameters()), *torch.ones(2, rows, 512)
    if "secondary_shard" in options:
        on = {"ranks": 4, "mesh": {"node": 2, "gpu": 2}}
    most = zerofx.plan(plain, given, options=options, **on).forecasts.values()
    limit = int(share * min(of.device_bytes for of in most if of.options.stage == 3))

    def found():
        made: list[Options] = []
        forecast = Ranks.forecast

        def noted(ranks, step, options, known=None):
            made.append(options)
            return forecast(ranks, step, options, known)

        with monkeypatch.context() as patch:
            patch.setattr(Ranks, "forecast", noted)
            plan = zerofx.plan(plain, given, options=options, memory_limit=limit, **on)
        if isinstance(plan.choice, str):
            return made, plan.choice
        return made, (plan.choice.options, plan.choice.form.needs)

    made, chosen = found()
    monkeypatch.setattr(Forecast, "at_least", lambda *_, **__: 0)
    every, among_all = found()
    assert chosen == among_all
    assert len(made) <= len(every) or isinstance(chosen, str)


@pytest.mark.nightly
def test_the_scripts_own_limit_is_the_plans():
    options = {"plan": "auto", "memory_limit": 24_000_000, "offload": None}
    assert planned(None, **options).choice.limit == 24_000_000


@pytest.mark.nightly
@pytest.mark.parametrize("limit", LIMITS[:4])
def test_the_command_chooses_what_ranks_do(ranks, limit):
    (mine, _) = ranks(2).run(trained, plain, limit)
    made = planned(limit)
    assert not isinstance(made.choice, str), made.choice
    assert made.choice.options.stage == mine[3]["stage"]
    assert made.choice.facts["needs"] == mine[3]["needs"]
