"""A forecast's peak is what torch's allocator counts in a later step, and a limit is kept."""

from __future__ import annotations

import gc
import random
import re
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import nn

from tests.cost.test_cost import MODELS as OTHERS
from tests.kit.allocations import Allocations
from tests.kit.models import (
    ConvNet,
    Recurrent,
    features,
    images,
    language_loss,
    squared_loss,
    tokens,
)
from tests.kit.ranks import ranks_fixture  # noqa: F401
from tests.kit.step_forms.form import step_with
from tests.kit.step_forms.training import STAGES
from tests.planning.test_planned_steps import FIGURES
from zerofx import plan
from zerofx.compiler.forecast import Forecast
from zerofx.errors import BudgetError
from zerofx.runtime.memory.pages import BufferPool

SCALARS = 64
"""Bytes that are no tensor of the program: an update's counts and rates."""


class Encoder(nn.Module):
    """Draws masks, which a CPU makes in a wider dtype."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.embedding, self.head = nn.Embedding(33, 32), nn.Linear(32, 33)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens):
        return self.head(self.layers(self.embedding(tokens)))


class Head(nn.Module):
    """With so many classes that the loss is computed in chunks."""

    def __init__(self, tied=False):
        super().__init__()
        self.embedding, self.head = nn.Embedding(3000, 16), nn.Linear(16, 3000, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.embedding(tokens)))


class Convolutions(nn.Module):
    """One behind the other, so that what a layout costs is paid where their inputs are made."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.second, self.head = nn.Conv2d(8, 16, 3, stride=2), nn.Linear(16, 3)

    def forward(self, images):
        x = torch.relu(self.norm(self.first(images)))
        return self.head(torch.relu(self.second(x)).mean((2, 3)))


def narrow(model, *batch):
    with torch.autocast("cpu", torch.bfloat16):
        return squared_loss(model, *batch)


MODELS = {
    **OTHERS,
    "narrow convolution": (ConvNet, narrow, lambda: images(0, 64)),
    "convolutions": (Convolutions, squared_loss, lambda: images(0, 64)),
    "narrow convolutions": (Convolutions, narrow, lambda: images(0, 64)),
    "recurrent": (lambda: Recurrent(nn.GRU), squared_loss, lambda: features(0, 256)),
    "dropout": (Encoder, language_loss, lambda: tokens(0, 16)),
    "many classes": (Head, language_loss, lambda: tokens(0, 256)),
    "many classes, tied": (lambda: Head(tied=True), language_loss, lambda: tokens(0, 256)),
}


def step_of(name: str) -> Callable:
    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(0)
    return step_with(MODELS[name][1])


def given_to(name: str) -> tuple:
    build, _, batch = MODELS[name]
    model = build()
    return model, torch.optim.AdamW(model.parameters()), *batch()


def training(name: str) -> tuple[Callable, tuple]:
    """A step of a model, and what it is called with."""
    return step_of(name), given_to(name)


def forecast(name: str, stage: int, ranks: int, lowering: str) -> Forecast:
    """Plan a step, in a process that computes with one thread as ranks do."""
    step, given = training(name)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        options = {**FIGURES, "lowering": lowering}
        made = plan(step, given, ranks=ranks, stages=[stage], options=options)
        (found,) = made.forecasts.values()
        assert found.peak
        return found
    finally:
        torch.set_num_threads(before)


def predicted(name: str, stage: int, ranks: int, lowering: str = "eager") -> int:
    """The bytes that a plan says a step allocates at its peak, on the rank that takes most."""
    of = forecast(name, stage, ranks, lowering)
    return sum(of.peak.values()) - sum(of.kept.values()) - of.peak["inputs"]


def allocated(name: str, stage: int, lowering: str = "eager") -> int:
    """The bytes that the fourth step allocates at its peak on this rank, none of them idle."""
    step, given = training(name)
    options = {**FIGURES, "stage": stage, "lowering": lowering}
    compiled = torch.compile(step, backend="zero", options=options)
    fresh = mock.patch.object(BufferPool, "empty", lambda self, numel, like: like.new_empty(numel))
    with fresh:
        for _ in range(3):
            compiled(*given)
        with Allocations() as allocations:
            compiled(*given)
    return allocations.peak_nbytes


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", (1, 2))
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("lowering", ("eager", "inductor"))
def test_a_later_step_allocates_what_the_plan_says(ranks, lowering, name, stage, world_size):  # noqa: F811
    most = max(ranks(world_size).run(allocated, name, stage, lowering))
    assert abs(predicted(name, stage, world_size, lowering) - most) <= SCALARS


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_kept_is_the_same_however_the_step_is_compiled(stage):
    eager, compiled = (forecast("MLP", stage, 2, lowering) for lowering in ("eager", "inductor"))
    assert eager.kept == compiled.kept and eager.on_host == compiled.on_host


def held_within(name: str, limit: int) -> tuple[int, int]:
    """Return the most that a process holds in a step, and 0; or 0, and what it says it needs."""
    ranks = torch.distributed.get_world_size()
    known = plan(*training(name), ranks=ranks, options=FIGURES)
    assert known.facts  # for which operators are tried, as they are not in a profiler's time
    del known
    options = {**FIGURES, "plan": "auto", "memory_limit": limit, "offload": ()}
    compiled = torch.compile(step_of(name), backend="zero", options=options)
    try:
        with Allocations() as life:
            given = given_to(name)
            for _ in range(3):
                compiled(*given)
            gc.collect()
    except BudgetError as error:
        return 0, int(re.search(r"rank's device is (\d+)", str(error))[1])
    held = sum(change for _, change in life.changes)
    with Allocations() as allocations:
        compiled(*given)
    return held + allocations.peak_nbytes, 0


def within(name: str, limits: list[int]) -> list[tuple[int, int]]:
    return [held_within(name, limit) for limit in limits]


@pytest.mark.parametrize(
    "count",
    (pytest.param(4, marks=pytest.mark.nightly), pytest.param(34, marks=pytest.mark.exhaustive)),
)
@pytest.mark.parametrize("world_size", (1, 2))
@pytest.mark.parametrize("name", ("MLP", "GPT", "narrow convolution"))
def test_a_limit_is_kept_and_refused_only_below_what_is_needed(ranks, name, world_size, count):  # noqa: F811
    """Without offload, for host memory is the same allocator's here."""

    def run(*limits: int) -> list[list[tuple[int, int]]]:
        return ranks(world_size).run(within, name, list(limits), timeout_s=60 * len(limits))

    least = max(needed for ((_, needed),) in run(1000))
    most = max(held for ((held, _),) in run(10**9))
    draw = random.Random(name)
    limits = [least, *(int(draw.uniform(0.9 * least, 1.1 * most)) for _ in range(count))]
    every = run(*limits)
    for limit, *of in zip(limits, *every, strict=True):
        for held, needed in of:
            assert held <= limit if not needed else limit < least
    assert max(held for (held, _), *_ in every) >= 0.95 * least
