"""Captured steps for the passes of offload, and what the verifier says of a broken program."""

import functools

import pytest
import torch
from torch import nn

from tests.kit.programs import Captured, capture, mlp_step, smallest_step
from zerofx import GraphError
from zerofx.verify.verifier import verify

FACTS = frozenset({"averaged_gradients", "sharded_updates"})

OFFLOADED = {"offload": "optimizer", "update_in_backward": True, "bucket": True}


@functools.cache
def tied_step():
    """A weight used twice, a frozen one, two groups, and a parameter read after its update."""
    torch.manual_seed(0)
    tied, other, frozen = (nn.Parameter(torch.randn(5, 5)) for _ in range(3))
    bias = nn.Parameter(torch.zeros(5))
    frozen.requires_grad_(False)
    groups = [{"params": [tied, other]}, {"params": [bias], "lr": 0.5}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)

    def step(x):
        y = ((x @ tied).relu() @ other @ frozen + bias) @ tied
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return tied.detach().sum()

    return capture(step, torch.randn(3, 5), world_size=2)


@functools.cache
def twice_step():
    """One parameter is updated twice in a step."""
    torch.manual_seed(0)
    model = nn.Linear(5, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x):
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return capture(step, torch.randn(3, 5), world_size=2)


STEPS = {
    "smallest": smallest_step,
    "layers": mlp_step,
    "clipped": lambda: mlp_step(clip=True),
    "tied": tied_step,
    "twice": twice_step,
}


def refused(program: Captured, match: str, facts: frozenset[str] = FACTS) -> None:
    """The graph is well formed, and the verifier refuses the program with these words."""
    program.gm.graph.lint()
    with pytest.raises(GraphError, match=match):
        verify(program.gm, program.table, facts)
