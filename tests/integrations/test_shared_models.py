"""The ways in check their libraries, and have a model's values whole."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

from tests.kit.ranks import ranks_fixture  # noqa: F401
from zerofx.integrations import models
from zerofx.runtime.parameters.registry import REGISTRY


def test_a_library_without_what_is_replaced_is_refused_with_the_versions():
    with pytest.raises(ImportError) as caught:
        models.check_library("accelerate", ">=1.12,<2", Accelerator, "prepare", "_prepare_it")
    message = str(caught.value)
    assert "has no Accelerator._prepare_it, which zerofx needs" in message
    assert "pip install 'accelerate>=1.12,<2'" in message


class Counts(nn.Linear):
    """Has a state of its own that is no tensor."""

    def __init__(self):
        super().__init__(2, 2)
        self.seen = [3]

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


def test_values_that_are_no_tensors_are_among_them():
    model, other = Counts(), Counts()
    values = models.whole_values(model)
    model.seen.append(4)
    other.load_state_dict(values)
    assert other.seen == [3] and torch.equal(other.weight, model.weight)


def meet_late():
    if dist.get_rank():
        time.sleep(2)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError) as caught:
        patch.setattr(REGISTRY.barrier, "load_timeout_s", 0.5)
        models.meet(nn.Linear(2, 2))
    return str(caught.value)


def test_a_rank_that_does_not_come_is_named(ranks):  # noqa: F811
    first, _ = ranks(2).run(meet_late, timeout_s=60)
    assert "call it on all ranks; rank(s) [1] did not join" in first


def test_an_export_takes_the_place_of_other_files(tmp_path):
    folder = tmp_path / "made"
    folder.mkdir()
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "notes.txt"):
        (folder / name).touch()
    (folder / f"weights.{0:016x}").mkdir()  # of a training that was killed
    models.export_into(folder, nn.Linear(2, 2))
    assert sorted(path.name for path in folder.iterdir()) == ["model.safetensors", "notes.txt"]


def test_an_export_leaves_what_others_have_written_into_the_folder(tmp_path):
    others = {"adapter_model.safetensors", "ema.safetensors", "model.safetensors.bak"}
    for name in others:
        (tmp_path / name).touch()
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "mine.pt").touch()
    models.export_into(tmp_path, nn.Linear(2, 2))
    found = {path.name for path in tmp_path.iterdir()}
    assert found == {*others, "weights", "model.safetensors"}
    assert (tmp_path / "weights" / "mine.pt").exists()
