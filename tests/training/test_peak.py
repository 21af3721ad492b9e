"""A step allocates no more at its peak than plain ``torch.compile`` does for the same step.

Counted for both by torch's own allocator, in a world of one: what is left of ZeRO there is the
program and its order.
"""

from __future__ import annotations

import functools
import gc
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tests.conftest  # noqa: F401
from tests.cost.test_cost import llama_loss, tiny_llama
from tests.kit.allocations import Allocations
from tests.kit.covering import each_value, only
from tests.kit.models import Gpt, language_loss, tokens

WIDTH = 48
TOLERANCE = 1.01
"""Numbers, and what the profiler itself allocates."""


class SwiGlu(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Gelu(nn.Module):
    """With GELU written out: eight pointwise operators of one matrix product."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.up(self.norm(x))
        return x + self.down(0.5 * y * (1 + torch.tanh(0.8 * (y + 0.04 * y.pow(3)))))


def squares(model, x):
    return model(x).square().mean()


def rows():
    return (torch.ones(1024, WIDTH),)


MODELS = {
    "SwiGLU": (lambda: nn.Sequential(SwiGlu(), SwiGlu(), SwiGlu()), squares, rows),
    "GELU": (lambda: nn.Sequential(Gelu(), Gelu(), Gelu()), squares, rows),
    "GPT": (lambda: Gpt(layers=3, width=WIDTH), language_loss, lambda: tokens(0, 128)),
    "Llama": (tiny_llama, llama_loss, lambda: tokens(0, 128)),
}
"""How to build a model, its loss, and a batch of which activations outweigh the parameters."""


@functools.cache
def peak(name: str, stage: int | None) -> int:
    """Bytes that a later step has allocated at its peak; without a stage, plain torch's."""
    build, loss_of, batch = MODELS[name]
    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    forward = loss_of if stage is not None else torch.compile(loss_of)

    def step(model, optimizer, *batch):
        loss = forward(model, *batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if stage is not None:
        step = torch.compile(step, backend="zero", options={"stage": stage})
    inputs = batch()
    for _ in range(3):
        step(model, optimizer, *inputs)
    with Allocations() as allocations:
        step(model, optimizer, *inputs)
    return allocations.peak_nbytes


@pytest.mark.nightly
@pytest.mark.parametrize("name, stage", each_value(MODELS, (0, 3)))
def test_the_peak_is_not_above_plain_torch_compiles(name, stage):
    if name == "Llama" and find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    assert peak(name, stage) <= TOLERANCE * peak(name, None)


@pytest.mark.parametrize("stage", only((3,), (0, 3)))
def test_a_step_that_clears_gradients_first_has_none_of_the_call_before(stage):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nbytes = sum(p.nbytes for p in model.parameters())

    @torch.compile(backend="zero", options={"stage": stage, "lowering": "eager"})
    def step(x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    step(torch.ones(2, 256))
    with Allocations() as allocations:
        step(torch.ones(2, 256))  # what it leaves is the allocator's, who is told of its end
        step(torch.ones(2, 256))
    assert allocations.peak_nbytes < 1.5 * nbytes
