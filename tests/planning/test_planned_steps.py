"""A plan made in one process has the programs that real ranks agree on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.kit.covering import first, nightly, only
from tests.kit.ranks import Ranks, ranks_fixture  # noqa: F401
from tests.kit.step_forms.form import FORMS, Training, step_with
from tests.kit.step_forms.training import STAGES, built, rank_and_world_size
from tests.kit.trainings import program_of
from zerofx import Plan, StepError, deferred_init, plan
from zerofx.deferred.block import is_block_open

FIGURES = {
    "lowering": "eager",
    "hardware": "latency_s=2e-5 bytes_per_s=1e9 flops_per_s=2e10 memory_bytes_per_s=1e10",
}
AXES = {"node": 2, "gpu": 2}
PAIRS = [(inner, outer) for inner in range(4) for outer in range(inner + 1)]

MODELS = (
    "plain",
    "tied_weights_autocast_and_clipping",
    "checkpointed",
    "frozen_parameters",
    "several_parameter_groups",
    "channels_last_weights",
    "recurrent",
    "batch_norm",
    "double_precision",
    "scaler_with_unscaled_clipping",
    "accumulation_in_a_loop",
    "optimizer_Lion",
)
OFFLOADED: list[dict[str, Any]] = [
    {"offload": "optimizer"},
    {"offload": "params"},
    {"offload": "optimizer,params,activations"},
    {"offload": "auto", "memory_budget": 44_000},
    {"memory_budget": 40_000},
]


def call(name: str, training: Training, ranks: int, rank: int = 0) -> Any:
    """Call a form with the rows of one rank."""
    of = FORMS[name]
    batch = of.batch(0, of.rows[0] * ranks)
    return training.step(*(tensor.chunk(ranks)[rank] for tensor in batch))


class Planned(Exception):
    """Ends a form's call behind its first plan."""

    def __init__(self, made: Plan) -> None:
        super().__init__()
        self.made = made


def planned(name: str, ranks: int, options: Mapping[str, Any], **arguments: Any) -> Plan:
    """Plan the first compiled call of a form."""

    def wrap(step, **given):
        its = {**options, **given.pop("options", {})}

        def planning(*args, **kwargs):
            raise Planned(plan(step, args, kwargs, ranks=ranks, options=its, **arguments))

        return planning

    with pytest.raises(Planned) as ended:
        call(name, built(name, wrap), ranks)
    return ended.value.made


def of_rank(name: str, options: Mapping[str, Any], stages: Mapping[str, int] | int) -> tuple:
    """The schedule of a form's first program on this rank, having run."""
    torch._dynamo.reset()
    rank, ranks = rank_and_world_size()
    group = None
    if isinstance(stages, Mapping):
        group = init_device_mesh("cpu", tuple(AXES.values()), mesh_dim_names=tuple(AXES))
    first: list[Any] = []

    def wrap(step, **given):
        its = {**options, "stage": stages, "process_group": group, **given.pop("options", {})}
        compiled = torch.compile(step, backend="zero", options=its, **given)

        def calling(*args, **kwargs):
            result = compiled(*args, **kwargs)
            first.append(program_of(compiled).rewritten.schedule)
            return result

        return calling

    call(name, built(name, wrap, rank), ranks, rank)
    return first[0]


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stage", STAGES)
def test_the_plan_for_one_rank_is_what_it_runs(name, stage):
    made = planned(name, 1, FIGURES, stages=[stage])
    assert made.forecasts[str(stage)].schedule == of_rank(name, FIGURES, stage)


@pytest.mark.parametrize("name", first(1, MODELS))
@pytest.mark.parametrize("stage", only([3], STAGES))
@pytest.mark.parametrize("num_ranks", only([2], (2, 4)))
def test_the_plan_is_what_ranks_run(ranks, name, stage, num_ranks):
    made = planned(name, num_ranks, FIGURES, stages=[stage])
    for schedule in ranks(num_ranks).run(of_rank, name, FIGURES, stage):
        assert made.forecasts[str(stage)].schedule == schedule


@pytest.mark.parametrize("options", first(0, OFFLOADED), ids=str)
def test_so_is_one_with_offload(ranks, options):
    options = {**FIGURES, **options}
    made = planned("tied_weights", 2, options, stages=[3])
    for schedule in ranks(2).run(of_rank, "tied_weights", options, 3):
        assert made.forecasts["3"].schedule == schedule


@pytest.mark.parametrize("inner, outer", first(0, PAIRS))
@pytest.mark.parametrize("name", ("tied_weights", "accumulation_in_a_loop"))
def test_so_is_one_on_a_mesh(ranks, name, inner, outer):
    stages = {"node": outer, "gpu": inner}
    made = planned(name, 4, FIGURES, mesh=AXES, stages=[stages])
    (forecast,) = made.forecasts.values()
    for schedule in ranks(4).run(of_rank, name, FIGURES, stages):
        assert forecast.schedule == schedule


@pytest.mark.nightly
def test_the_peak_is_what_is_kept_and_what_a_step_allocates():
    made = planned("tied_weights", 4, FIGURES)
    for stage, forecast in made.forecasts.items():
        inputs = forecast.peak["inputs"]
        allocated = sum(forecast.peak.values()) - sum(forecast.kept.values()) - inputs
        program = forecast.rewritten.peak_bytes
        # At 1 and 2, shards are updated where whole parameters lie.
        assert allocated <= program if stage in ("1", "2") else allocated == program


def test_shards_and_bytes_on_the_wire_are_those_of_the_formulas():
    made = planned("plain", 4096, {**FIGURES, "bucket": False}, mesh={"node": 512, "gpu": 8})
    parameters = sum(info.nbytes for info in made.table)
    padded = sum(4 * 8 * -(-info.numel // 8) for info in made.table)
    whole, inside = made.forecasts["gpu:0,node:0"], made.forecasts["gpu:3,node:0"]
    assert whole.kept == {"parameters": parameters, "optimizer states": 2 * parameters}
    assert inside.kept == {"parameters": padded // 8, "optimizer states": 2 * padded // 8}
    # Forward gathers all, backward what it reads, and gradients are reduced: at least two of three.
    assert 2 * padded * 7 / 8 <= inside.sent["gpu"] <= 3 * padded * 7 / 8
    assert whole.sent == {"data": sum(2 * info.nbytes * 4095 // 4096 for info in made.table)}


def test_second_shards_and_errors_of_wires_are_kept():
    model = torch.nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"secondary_shard": "gpu", "reduce_wire": {"node": "int4"}, **FIGURES}
    arguments = {"mesh": AXES, "stages": [{"gpu": 3, "node": 3}], "options": options}
    given = model, optimizer, torch.ones(2, 64), torch.zeros(2, 64)
    (forecast,) = plan(step_with(), given, ranks=4, **arguments).forecasts.values()
    shard, second, lost = 4096, 2 * 4096, 2 * 4096  # bytes of a quarter, and twice of a half
    assert forecast.kept == {"parameters": shard + second, "errors of wires": lost}


@pytest.mark.slow(reason="a step is planned for every stage")
def test_a_limit_says_what_fits():
    free = planned("plain", 4, FIGURES, stages=[0, 3]).forecasts
    limit = free["3"].device_bytes
    assert sum(free["3"].peak.values()) < limit < free["0"].device_bytes
    made = planned("plain", 4, FIGURES, stages=[0, 3], memory_limit=limit)
    words = {
        line.split()[0]: line
        for line in str(made).splitlines()
        if ", fits" in line or ", too" in line
    }
    assert {stage: "fits" in words[stage] for stage in words} == {
        stage: one.device_bytes <= limit for stage, one in made.forecasts.items()
    }
    assert "allocator (simulated)" in str(made)
    assert "fits" in words["3"] and "too much" in words["0"]


def test_a_call_that_updates_nothing_says_that_states_are_missing():
    model = torch.nn.Linear(8, 8)
    arguments = {"ranks": 2, "stages": [3], "options": FIGURES}

    def backward(x):
        model(x).square().mean().backward()

    made = plan(backward, [torch.ones(2, 8)], **arguments)
    assert "this call updates nothing: what an optimizer keeps is in none" in str(made)
    assert made.facts["updates"] is False
    given = model, torch.optim.SGD(model.parameters()), torch.ones(2, 8), torch.zeros(2, 8)
    made = plan(step_with(), given, **arguments)
    assert "updates nothing" not in str(made) and made.facts["updates"] is True


class Normed(torch.optim.Optimizer):
    """Reads a number of the whole gradient: its own step runs, on owners."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["sum"] = torch.zeros_like(parameter)
            state["sum"] += parameter.grad
            parameter.sub_(state["sum"], alpha=0.1 / max(parameter.grad.norm().item(), 1.0))


def test_owners_count_as_the_one_that_has_most():
    """Of 10, 9 and 9 the second rank owns 18, and both send what they own."""
    model = torch.nn.ParameterList(torch.ones(size, 64) for size in (10, 9, 9))
    optimizer = Normed(model.parameters())

    def step(x):
        sum((parameter * x).square().sum() for parameter in model).backward()
        optimizer.step()
        optimizer.zero_grad()

    made = plan(step, [torch.ones(64)], ranks=2, stages=[1], options=FIGURES)
    (forecast,) = made.forecasts.values()
    owned, all_of_it = 18 * 64 * 4, 28 * 64 * 4
    assert forecast.kept["optimizer states"] == owned
    assert sum(forecast.peak.values()) >= all_of_it + owned + 6 * owned
    assert forecast.sent["data"] > all_of_it


@pytest.mark.nightly
def test_a_limit_that_nothing_fits_names_the_least_and_ranks_on_which_it_would():
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(2)))
    given = model, torch.optim.SGD(model.parameters()), torch.ones(2, 512), torch.zeros(2, 512)
    arguments = {"stages": [0, 3], "options": FIGURES}
    fitting = plan(step_with(), given, ranks=8, **arguments).forecasts["3"].device_bytes
    one = plan(step_with(), given, ranks=2, memory_limit=fitting, **arguments)
    assert one.least == ("3", one.forecasts["3"].device_bytes, 8, "3")
    assert one.forecasts["0"].device_bytes > one.least.device_bytes > fitting
    assert "stage 3 takes least" in str(one) and "stage 3 fits on 8 ranks" in str(one)
    never = plan(step_with(), given, ranks=2, memory_limit=1, **arguments)
    assert never.least.on_ranks is None
    whole, cut = (one.forecasts[stage].at_least(more_ranks=True) for stage in ("0", "3"))
    assert fitting > cut > 0 and whole > sum(p.nbytes for p in model.parameters())
    assert "more ranks do not make it fit" in str(never)
    assert plan(step_with(), given, ranks=8, memory_limit=fitting, **arguments).least is None


@pytest.mark.slow(reason="plans twelve programs")
@pytest.mark.parametrize(
    "own",
    [
        {"bucket": False},
        {"accumulate": "sharded"},
        nightly({}),
        nightly({"recompute": False}),
        nightly({"offload": "optimizer"}),
        nightly({"offload": "activations"}),
    ],
)
@pytest.mark.parametrize("name", [nightly(name) for name in MODELS[:6]] + ["clipped_sums"])
def test_more_ranks_have_what_they_do_not_divide(name, own):
    def of(ranks: int) -> Plan:
        options = {**FIGURES, **own}
        if name in FORMS:
            return planned(name, ranks, options)
        return plan(clipped_sums, clipped_sums_of(256), ranks=ranks, options=options)

    one, two, more = map(of, (1, 2, 16))
    for fewer, other in ((one, two), (one, more), (two, more)):
        for stage in fewer.forecasts:
            stays = fewer.forecasts[stage].at_least(more_ranks=True)
            assert 0 < stays <= other.forecasts[stage].device_bytes


def clipped_sums_of(width: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.Tensor]:
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(64, width)


def clipped_sums(model, optimizer, x):
    for part in x.chunk(2):
        model(part).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.nightly
def test_what_cannot_be_is_said():
    made = planned("tied_weights", 2, {**FIGURES, "memory_budget": 10}, stages=[0, 3])
    assert list(made.forecasts) == ["0"]
    assert "memory_budget is 10 bytes" in made.refused["3"]
    assert "stage 3 cannot be: memory_budget is 10 bytes" in str(made)
    made = planned("plain", 2, {**FIGURES, "gather_dtype": "int8"})
    assert list(made.forecasts) == ["3"] and set(made.refused) == set("012")
    assert "stage 3" in made.refused["1"]


@pytest.mark.parametrize(
    "ranks, mesh, words",
    [
        (0, None, "ranks is how many there are"),
        (True, None, "ranks is how many there are"),
        (8, {"node": 3, "gpu": 2}, "whose sizes multiply to the ranks"),
        (8, {"gpu": 8}, "give two axes"),
        (8, {"pod": 2, "node": 2, "gpu": 2}, "give two axes"),
        (0, {"node": 0, "gpu": 8}, "ranks is how many there are"),
        (8, {"node": -2, "gpu": -4}, "give two axes"),
    ],
)
def test_ranks_and_meshes_that_do_not_match(ranks, mesh, words):
    with pytest.raises(ValueError, match=words):
        plan(lambda: None, ranks=ranks, mesh=mesh)


def test_a_step_that_is_refused_is_refused_here():
    model = torch.nn.Linear(2, 2, dtype=torch.complex64)

    def step(x):
        return model(x).abs().sum().detach()

    with pytest.raises(StepError, match="complex parameters are not supported"):
        plan(step, (torch.zeros(1, 2, dtype=torch.complex64),), ranks=2)


@pytest.mark.nightly
def test_planning_leaves_a_compiled_step_as_it_was():
    model = torch.nn.Linear(6, 3)
    given = model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, 6), torch.zeros(2, 3)
    compiled = torch.compile(step_with(), backend="zero", options={"lowering": "eager"})
    new = plan(compiled, given, ranks=2)
    first = compiled(*given)
    before = model.state_dict()
    made = plan(compiled, given, ranks=2)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    for stage, forecast in made.forecasts.items():
        assert forecast.schedule == new.forecasts[stage].schedule
    assert compiled(*given) < first
    assert len(program_of(compiled).function.programs) == 1


def test_a_step_that_reads_states_is_refused_where_they_are_shards():
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    given = model, optimizer, torch.ones(2, 6), torch.zeros(2, 3)
    step_with()(*given)  # so that there are some

    def reading(model, optimizer, *batch):
        return step_with()(model, optimizer, *batch), optimizer.state[model.weight][
            "momentum_buffer"
        ].sum()

    made = plan(reading, given, ranks=2)
    assert list(made.forecasts) == ["0"] and set(made.refused) == set("123")
    assert "optimizer.state" in made.refused["3"]


def test_a_block_is_left_first():
    with deferred_init():
        model = torch.nn.Linear(6, 3)
        given = model, torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(StepError, match="Call it after the block"):
            plan(step_with(), (*given, torch.ones(2, 6), torch.zeros(2, 3)), ranks=2)
        assert is_block_open()
    batch = torch.ones(2, 6), torch.zeros(2, 3)
    assert len(plan(step_with(), (*given, *batch), ranks=2).forecasts) == 4
    with pytest.raises(RuntimeError, match="materialize"):
        model.weight.sum()
