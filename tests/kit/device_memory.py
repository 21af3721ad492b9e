"""What the device holds at most: as planned, and as torch's allocator counts it.

Where there is no GPU, what torch's CPU allocator gives stands for the device.
"""

from __future__ import annotations

import gc
from typing import NamedTuple

import pytest
import torch
from torch import nn

from tests.kit.allocations import Allocations
from tests.kit.trainings import program_of
from zerofx.cost.program import live_bytes
from zerofx.cost.traffic import moved_bytes
from zerofx.runtime.parameters.registry import REGISTRY


class Deep(nn.Module):
    """Activations outweigh the parameters, so that a step peaks in between the two."""

    def __init__(self, width=96, layers=6):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def squares(model, optimizer, x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


class Footprint(NamedTuple):
    """Bytes of a training."""

    life: int  # on the device at most, from before the model was made
    step: int  # on the device at most, in a step that is not the first
    predicted: int  # what the program says of such a step
    on_host: int  # states and shards that live in host memory
    staging: int  # of buffers there for what travels
    activations: int  # that a step has away from the device


def measured(layers=6, **options) -> Footprint:
    """Train ``Deep`` for a few steps with these options."""
    torch._dynamo.reset()
    gc.collect()
    x = torch.ones(1500, 96)
    compiled = torch.compile(squares, backend="zero", options={"lowering": "eager", **options})
    with Allocations() as life:
        torch.manual_seed(0)
        model = Deep(layers=layers)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            compiled(model, optimizer, x)
    with Allocations() as step:
        compiled(model, optimizer, x)
    program = program_of(compiled)
    ranks = program.function.communicator.world_size
    sockets = not program.options.peer_memory
    predicted = max(live_bytes(program.gm.graph, ranks, sockets=sockets, table=program.table))
    bound = [REGISTRY.lookup(parameter) for parameter in model.parameters()]
    shards = [b.shard for b in bound if b is not None and b.shard is not None]
    on_host = sum(shard.nbytes for shard in shards if REGISTRY.host.holds(shard))
    runtime, moved = program.runtime, moved_bytes(program.gm)
    states = runtime.files.tier.cache.held_bytes if runtime.files else runtime.steps.host_bytes()
    return Footprint(
        life.peak_nbytes,
        step.peak_nbytes,
        predicted,
        on_host + states,
        moved.staging,
        moved.activations,
    )


def assert_falls_as_planned(without: Footprint, offloaded: Footprint) -> None:
    """What lives on the host is missing on the device, but for what a step brings back of it."""
    assert offloaded.on_host > 0 and without.on_host == 0
    plan = offloaded.on_host - (offloaded.predicted - without.predicted)
    assert plan > 0
    assert without.life - offloaded.life == pytest.approx(plan, rel=0.05)
    assert offloaded.step == pytest.approx(offloaded.predicted, rel=0.05)
