"""A write to a tensor of a state dict, which is a copy here, gives a warning that it is lost."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch

import tests.conftest  # noqa: F401
import zerofx
from tests.kit.covering import first, nightly
from tests.kit.models import Mlp, features, squared_loss


def step(model, optimizer, *batch):
    squared_loss(model, *batch).backward()
    optimizer.step()
    optimizer.zero_grad()


class Trained:
    def __init__(self, stage: int, deferred: bool = False):
        torch._dynamo.reset()
        torch.manual_seed(0)
        with zerofx.deferred_init() if deferred else warnings.catch_warnings():
            self.model = Mlp()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        options = {"stage": stage, "lowering": "eager"}
        self.compiled = torch.compile(step, backend="zero", options=options)
        if not deferred:
            self.train()

    def train(self) -> None:
        self.compiled(self.model, self.optimizer, *features(0, 4))


def average(training: Trained) -> None:
    for value in training.model.state_dict().values():
        value.mul_(0.5)


def load_a_part(training: Trained) -> None:
    training.model.state_dict()["body.weight"].copy_(torch.zeros(11, 4)[:, :1])


def forget_moments(training: Trained) -> None:
    training.optimizer.state_dict()["state"][0]["exp_avg"].zero_()


@pytest.mark.parametrize(
    "stage, deferred, write, name",
    [
        (3, False, average, "body.weight"),
        nightly(3, False, load_a_part, "body.weight"),
        nightly(3, True, load_a_part, "a parameter that is still to be made"),
        nightly(1, False, forget_moments, "exp_avg of body.weight"),
    ],
)
def test_a_write_that_reaches_nothing_is_told_once(stage, deferred, write, name):
    training = Trained(stage, deferred)
    write(training)
    with pytest.warns(UserWarning, match=f"the first '{name}', which changes nothing"):
        training.train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training.train()


@pytest.mark.nightly
def test_where_warnings_are_errors_the_next_call_trains():
    training = Trained(3, False)
    average(training)
    with warnings.catch_warnings(), pytest.raises(UserWarning, match="changes nothing"):
        warnings.simplefilter("error")
        training.train()
    training.train()
    training.model.state_dict()


@pytest.mark.parametrize("stage", first(1, (3, 1)))
def test_what_is_read_or_loaded_afterwards_is_nobodys_loss(stage):
    training = Trained(stage)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        states = training.model.state_dict(), training.optimizer.state_dict()
        torch.save(states, io.BytesIO())
        for value in copy.deepcopy(states[0]).values():
            value.zero_()
        training.train()
        of_model, of_optimizer = training.model.state_dict(), training.optimizer.state_dict()
        for value in of_model.values():  # as torch.distributed.checkpoint reads a file into them
            value.mul_(0.5)
        of_optimizer["state"][0]["exp_avg"].zero_()
        training.model.load_state_dict(of_model)
        training.optimizer.load_state_dict(of_optimizer)
        training.train()
