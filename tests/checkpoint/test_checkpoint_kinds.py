"""States and hyperparameters of one kind of optimizer are not loaded into another."""

from __future__ import annotations

import re

import pytest
import torch

import zerofx
from tests.kit.checkpoints import assert_same, pair_of, refused, states
from tests.kit.models import features, squared_loss
from zerofx.errors import MismatchError


@pytest.fixture
def path(tmp_path):
    """A checkpoint of ``pair_of()``."""
    zerofx.save(tmp_path / "good", *pair_of())
    return tmp_path / "good"


def test_another_optimizers_states_are_refused(path):
    words = refused(MismatchError, path, pair_of(1, lambda p, lr: torch.optim.SGD(p, lr, 0.9)))
    assert "state momentum_buffer of body.weight" in words and "state exp_avg of body" in words


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("saved", "other", "names"),
    [
        (torch.optim.AdamW, torch.optim.SGD, "dampening, momentum, nesterov"),
        (torch.optim.SGD, torch.optim.AdamW, "amsgrad, betas, eps"),
        (torch.optim.Adam, torch.optim.RMSprop, "alpha, centered, momentum"),
        (torch.optim.AdamW, torch.optim.Adamax, "amsgrad, decoupled_weight_decay"),
        (torch.optim.NAdam, torch.optim.RAdam, "momentum_decay"),
        (torch.optim.AdamW, torch.optim.Adam, "decoupled_weight_decay=True"),
        (torch.optim.Adam, torch.optim.AdamW, "decoupled_weight_decay=False"),
    ],
)
def test_another_optimizer_without_states_takes_none(saved, other, names, strict, tmp_path):
    zerofx.save(tmp_path / "a", *pair_of(make=saved))
    model, _ = pair_of(1)
    pair = model, other(model.parameters(), lr=0.5)
    if strict:
        words = refused(MismatchError, tmp_path / "a", pair)
        assert f"param_groups[0] of {other.__name__} (saved by another kind" in words
        assert re.search(f"kind of optimizer, (without .*, )?with(out)? {re.escape(names)}", words)
    else:
        before = states(pair)[1]
        zerofx.load(tmp_path / "a", *pair, strict=False)
        assert_same(states(pair)[1], before)


@pytest.mark.parametrize("strict", [True, False])
def test_states_of_other_names_are_refused_before_there_are_any(strict, tmp_path):
    """Adamax and RAdam of older versions of torch have the same hyperparameters."""
    zerofx.save(tmp_path / "a", *pair_of(make=torch.optim.Adamax))
    model, _ = pair_of(1)
    pair = model, torch.optim.RAdam(model.parameters())
    if strict:
        words = refused(MismatchError, tmp_path / "a", pair)
        there, here = "exp_avg, exp_inf, step", "exp_avg, exp_avg_sq, step"
        assert f"states of body.weight ({there} in the checkpoint, {here} here)" in words
    else:
        zerofx.load(tmp_path / "a", *pair, strict=False)
        assert not pair[1].state
        squared_loss(model, *features(0, 4)).backward()
        pair[1].step()


def test_hyperparameters_decide_which_states_there_are(tmp_path):
    """What is loaded is what was saved, though this one was made otherwise."""
    makes = [
        lambda p, lr: torch.optim.AdamW(p, lr, amsgrad=True),
        lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9),
        lambda p, lr: torch.optim.RMSprop(p, lr, centered=True, momentum=0.5),
    ]
    for number, make in enumerate(makes):
        saved = pair_of(make=make)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(saved[1], 0.1, 10)  # has names of its own
        zerofx.save(tmp_path / str(number), *saved)
        model, _ = pair_of(1)
        pair = model, type(saved[1])(model.parameters(), lr=0.5)
        zerofx.load(tmp_path / str(number), *pair)
        assert_same(states(pair), states(saved))
        assert scheduler.get_last_lr() == [pair[1].param_groups[0]["lr"]]
