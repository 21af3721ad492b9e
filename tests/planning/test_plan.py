"""A plan made in one process has the programs that real ranks agree on."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.kit.covering import first, only
from tests.kit.models import Gpt, language_loss, tokens
from tests.kit.ranks import Ranks, ranks_fixture  # noqa: F401
from tests.kit.step_forms.form import FORMS, Training, adamw
from tests.kit.step_forms.training import STAGES, built, rank_and_world_size
from tests.kit.trainings import program_of
from zerofx import Plan, StepError, deferred_init, plan

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


@pytest.mark.parametrize("name", first(1, MODELS))
@pytest.mark.parametrize("stage", only([3], STAGES))
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
