"""The ways in check their libraries, and save a model over what was there."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from zerofx.integrations import models


def test_a_library_without_what_is_replaced_is_refused_with_the_versions():
    with pytest.raises(ImportError) as caught:
        models.check_library("accelerate", ">=1.12,<2", Accelerator, "prepare", "_prepare_it")
    message = str(caught.value)
    assert "has no Accelerator._prepare_it, which zerofx needs" in message
    assert "pip install 'accelerate>=1.12,<2'" in message


def test_a_save_takes_the_place_of_the_one_before(tmp_path):
    model = nn.Linear(2, 2)
    assert not models.is_saved_in(tmp_path)
    models.save_into(tmp_path, model, [])
    with torch.no_grad():
        model.weight.zero_()
    models.save_into(tmp_path, model, [])
    other = nn.Linear(2, 2)
    models.load_from(tmp_path, other)
    assert not other.weight.any() and torch.equal(other.bias, model.bias)
    assert [path.name for path in tmp_path.iterdir()] == [models.CHECKPOINT]


def test_a_save_that_was_killed_before_it_had_its_name_is_found(tmp_path):
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    models.save_into(tmp_path, model, [])
    (tmp_path / models.CHECKPOINT).rename(tmp_path / f"{models.CHECKPOINT}.next")
    assert models.is_saved_in(tmp_path)
    models.load_from(tmp_path, other)
    assert torch.equal(other.weight, model.weight)


def test_each_model_has_its_optimizers_and_a_folder(tmp_path):
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    of_one, of_two = (torch.optim.SGD(model.parameters()) for model in (one, two))
    found = models.each_with_optimizers(tmp_path, [one, two], [of_two, of_one])
    assert found == [(tmp_path, one, [of_one]), (tmp_path / "model_1", two, [of_two])]


def test_an_optimizer_of_no_model_is_refused_and_not_left_out(tmp_path):
    stranger = torch.optim.SGD(nn.Linear(2, 2).parameters())
    with pytest.raises(ValueError, match="SGD has parameters of no model that was given"):
        models.each_with_optimizers(tmp_path, [nn.Linear(2, 2)], [stranger])
