"""A forecast's peak is what torch's allocator counts in a later step."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.cost.test_cost import MODELS
from tests.kit.allocations import Allocations
from tests.planning.test_planned_steps import FIGURES
from zerofx import plan

SCALARS = 64
"""Bytes that are no tensor of the program: an update's counts and rates."""


@pytest.mark.nightly
def test_a_later_step_allocates_what_the_plan_says():
    build, loss_of, batch = MODELS["MLP"]

    def step(model, optimizer, *batch):
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    torch._dynamo.reset()
    gc.collect()
    model = build()
    given = model, torch.optim.AdamW(model.parameters()), *batch()
    (forecast,) = plan(step, given, ranks=1, stages=[3], options=FIGURES).forecasts.values()
    compiled = torch.compile(step, backend="zero", options={"stage": 3, **FIGURES})
    for _ in range(3):
        compiled(*given)
    with Allocations() as allocations:
        compiled(*given)
    between = sum(forecast.kept.values()) + forecast.peak["inputs"]
    assert abs(sum(forecast.peak.values()) - between - allocations.peak_nbytes) <= SCALARS
