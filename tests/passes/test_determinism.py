"""Ranks rewrite alike: no order in a program comes from memory addresses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.programs import capture, clone, run_passes
from zerofx.schedule import schedule


def leaving_gradients():
    """Ten gradients leave the step as zeros, computed from shards and gathered at stage 1."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss

    return capture(step, torch.randn(2, 4), world_size=2)


@pytest.mark.parametrize("stage", (1, 2, 3))
@pytest.mark.parametrize("bucket", (False, True))
def test_the_schedule_is_the_same_every_time(stage, bucket):
    captured = leaving_gradients()
    seen, held = set(), []
    for number in range(12):
        held.append([object() for _ in range(17 * number)])  # other addresses for the next nodes
        program = clone(captured)
        run_passes(program, stage=stage, bucket=bucket, update_in_backward=True)
        seen.add(schedule(program.gm, program.table, stage))
        held.append(program)
    assert len(seen) == 1
