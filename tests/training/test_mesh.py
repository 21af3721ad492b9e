"""On a mesh of two axes a step trains as one process does that sees all ranks' batches."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grad_norm_

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
from tests.kit.ranks import ranks_fixture  # noqa: F401

AXES = ("node", "gpu")
STEPS = 4
ROWS = 2


@functools.cache
def mesh_of(nodes: int, gpus: int):
    return init_device_mesh("cpu", (nodes, gpus), mesh_dim_names=AXES)


class Tied(nn.Module):
    """A model with one weight twice; no layer's elements divide by 2 or 3."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 7)
        self.hidden = nn.Linear(7, 7)
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 13)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.norm(torch.tanh(self.hidden(self.embedding(tokens)))))


def loss_of(model, tokens):
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def clipped(model, optimizer, tokens):
    loss = loss_of(model, tokens)
    loss.backward()
    clip_grad_norm_(model.parameters(), 0.3)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def accumulating(model, optimizer, tokens):
    total = torch.zeros(())
    for rows in tokens.chunk(2):
        loss = loss_of(model, rows) / 2
        loss.backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    return total


STEP = {"clipped": clipped, "accumulating": accumulating}


def train(form: str, rank: int, world_size: int, of: int, options=None):
    """Return the losses, and the parameters at the end, of a rank's rows of batches for ``of``."""
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = STEP[form]
    if options is not None:
        step = torch.compile(step, backend="zero", options=options)
    losses = []
    for number in range(STEPS):
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(13, (ROWS * of, 6), generator=generator)
        rows = tokens.view(of, ROWS, 6)[rank::world_size].flatten(0, 1) if world_size == 1 else (
            tokens.view(of, ROWS, 6)[rank]
        )
        losses.append(step(model, optimizer, rows).double())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return torch.stack(losses), state


def train_on_mesh(form: str, shape, stage, **options):
    mesh = mesh_of(*shape)
    options = {"process_group": mesh, "stage": stage, "lowering": "eager", **options}
    losses, state = train(form, dist.get_rank(), dist.get_world_size(), dist.get_world_size(), options)
    dist.all_reduce(losses)
    return losses / dist.get_world_size(), state


@functools.cache
def train_alone(form: str, of: int):
    if form == "clipped":
        return train(form, 0, 1, of)
    return train(form, 0, 1, of)


@pytest.mark.nightly
@pytest.mark.parametrize("inner", (1, 2, 3))
@pytest.mark.parametrize("form", STEP)
def test_trains_as_one_process(ranks, inner, form):
    shape = (2, 2)
    alone, parameters = train_alone(form, 4)
    results = ranks(4).run(train_on_mesh, form, shape, {"gpu": inner, "node": 0})
    for losses, state in results:
        torch.testing.assert_close(losses, alone, rtol=0, atol=1e-6)
        for name, value in parameters.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-5)
        for name, value in results[0][1].items():
            assert torch.equal(state[name], value), name
