"""A forecast's peak is what torch's allocator counts in a later step."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.cost.test_cost import MODELS
from tests.kit.allocations import Allocations
from tests.kit.step_forms.training import STAGES
from tests.planning.test_planned_steps import FIGURES
from zerofx import plan

SCALARS = 64
"""Bytes that are no tensor of the program: an update's counts and rates."""


def training(name: str) -> tuple:
    """A step of a model, and what it is called with."""
    build, loss_of, batch = MODELS[name]

    def step(model, optimizer, *batch):
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    torch._dynamo.reset()
    gc.collect()
    model = build()
    return step, (model, torch.optim.AdamW(model.parameters()), *batch())


def predicted(name: str, stage: int, ranks: int) -> int:
    """The bytes that a plan says a step allocates at its peak."""
    step, given = training(name)
    (forecast,) = plan(step, given, ranks=ranks, stages=[stage], options=FIGURES).forecasts.values()
    return sum(forecast.peak.values()) - sum(forecast.kept.values()) - forecast.peak["inputs"]


def allocated(name: str, stage: int) -> int:
    """The bytes that the fourth step allocates at its peak on this rank."""
    step, given = training(name)
    compiled = torch.compile(step, backend="zero", options={"stage": stage, **FIGURES})
    for _ in range(3):
        compiled(*given)
    with Allocations() as allocations:
        compiled(*given)
    return allocations.peak_nbytes


@pytest.mark.nightly
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ("MLP", "GPT"))
def test_a_later_step_allocates_what_the_plan_says(name, stage):
    assert abs(predicted(name, stage, 1) - allocated(name, stage)) <= SCALARS
