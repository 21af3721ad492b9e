"""Loading a state dict into shards is for all ranks to do: a mix of old and new is an error."""

from __future__ import annotations

import contextlib
import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
from tests.kit.covering import first
from tests.kit.models import Mlp, features, squared_loss
from tests.kit.ranks import Ranks, ranks_fixture  # noqa: F401
from zerofx.runtime.parameters.registry import REGISTRY


def step(model, optimizer, *batch):
    loss = squared_loss(model, *batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


class Trained:
    """A model after one step on this rank's own batch."""

    def __init__(self, stage: int):
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.rank = dist.get_rank()
        self.model = Mlp()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, eps=1e-3)
        options = {"stage": stage, "lowering": "eager"}
        self.compiled = torch.compile(step, backend="zero", options=options)
        self.train(0)

    def train(self, number: int) -> None:
        self.compiled(self.model, self.optimizer, *features(10 * self.rank + number, 4))

    def saved(self) -> tuple[dict, dict]:
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def load(self, of_model: dict, of_optimizer: dict) -> None:
        self.model.load_state_dict(of_model)
        self.optimizer.load_state_dict(copy.deepcopy(of_optimizer))  # torch keeps some of it


def load_everywhere(stage: int) -> list[dict]:
    """Go back to the first step's end and on from there, in several ways; the states after."""
    training = Trained(stage)
    saved = training.saved()
    outcomes = []
    for way in range(4):
        if way == 1:
            training.load(*saved)
        elif way == 2:  # each rank in an order of its own, and one of them twice
            for _ in range(1 + training.rank):
                training.optimizer.load_state_dict(copy.deepcopy(saved[1]))
                training.model.load_state_dict(saved[0])
        elif way == 3:
            training.load(*saved)
            training.saved()
            if training.rank:  # values of its own, and then what all ranks have
                training.model.load_state_dict(Mlp().state_dict())
            training.load(*saved)
        training.train(1)
        outcomes.append(training.saved()[0])
    return outcomes


@pytest.mark.nightly
@pytest.mark.parametrize("stage", (1, 3))
def test_what_all_ranks_load_is_trained_on(stage, ranks):  # noqa: F811
    for one, *others in ranks(2).run(load_everywhere, stage):
        for other in others:
            for name, value in one.items():
                assert torch.equal(other[name], value), name


def load_on_rank_0(stage: int, what: str, then: str) -> None:
    training = Trained(stage)
    of_model, of_optimizer = training.saved()
    training.train(1)
    with mock.patch.object(REGISTRY.barrier, "load_timeout_s", 1.0):
        if training.rank == 0 and what == "model":
            training.model.load_state_dict(of_model)
        elif training.rank == 0:
            training.optimizer.load_state_dict(of_optimizer)
        training.train(2) if then == "step" else training.saved()


@pytest.mark.slow(reason="ranks of its own compile and train")
@pytest.mark.parametrize(
    ("stage", "what", "then"),
    first(1, [(3, "model", "step"), (3, "model", "state_dict"), (1, "optimizer", "step")]),
)
def test_what_one_rank_loads_alone_is_an_error(stage, what, then):
    with contextlib.closing(Ranks(2, group_timeout_s=10.0)) as two:
        with pytest.raises(RuntimeError, match=r"load_state_dict\(\).*on all ranks") as caught:
            two.run(load_on_rank_0, stage, what, then, timeout_s=90)
        two.kill()
    assert "rank(s) [1] did not join within 1 s" in str(caught.value)
