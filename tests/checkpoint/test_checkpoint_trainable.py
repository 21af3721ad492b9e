"""Checkpoints of only what is trainable, for models of which most is frozen."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
import zerofx
from tests.kit.checkpoints import assert_same, states
from tests.kit.models import features
from tests.kit.ranks import ranks_fixture  # noqa: F401
from zerofx.errors import MismatchError


class Adapted(nn.Module):
    """A large frozen layer, two small trainable ones beside it, and buffers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.base = nn.Linear(6, 301).requires_grad_(False)
        self.register_parameter("alias", self.base.bias)
        torch.manual_seed(seed)
        self.down = nn.Linear(6, 2, bias=False)
        self.up = nn.Linear(2, 301, bias=False)
        self.norm = nn.BatchNorm1d(301)

    def forward(self, x):
        return self.norm(self.base(x) + self.up(self.down(x)))


def adapted(seed: int = 0):
    model = Adapted(seed)
    trainable = [one for one in model.parameters() if one.requires_grad]
    return model, torch.optim.AdamW(trainable, lr=1e-2)


def step(model, optimizer, x):
    loss = (model(x) - 1).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def losses(run, pair, numbers):
    return [run(*pair, features(number, 4)[0]).item() for number in numbers]


def compiled():
    torch._dynamo.reset()
    return torch.compile(step, backend="zero", options={"stage": 3, "lowering": "eager"})


def saved_and_trained_on(path):
    pair, run = adapted(), compiled()
    before = losses(run, pair, range(2))
    zerofx.save(path, *pair, trainable_only=True)
    return before + losses(run, pair, range(2, 4)), states(pair)


def loaded_and_trained_on(path, is_bound, is_late):
    if is_late:
        with zerofx.deferred_init(exact=True):
            pair = adapted(1)
    else:
        pair = adapted(1)
    run = compiled()
    if is_bound:
        losses(run, pair, range(7, 8))
    zerofx.load(path, *pair)
    return losses(run, pair, range(2, 4)), states(pair)


@pytest.mark.nightly
@pytest.mark.parametrize(("is_bound", "is_late"), [(False, False), (True, False), (False, True)])
def test_training_goes_on_bitwise_with_the_frozen_values_that_are_there(
    is_bound,
    is_late,
    ranks,  # noqa: F811
    tmp_path,
):
    path = str(tmp_path / "a")
    first = ranks(2).run(saved_and_trained_on, path)
    second = ranks(2).run(loaded_and_trained_on, path, is_bound, is_late)
    for (before, after), (after_losses, again) in zip(first, second, strict=True):
        assert after_losses == before[2:]
        assert_same(again, after)


@pytest.mark.nightly
def test_frozen_training_is_that_of_plain_torch():
    assert losses(compiled(), adapted(), range(4)) == losses(step, adapted(), range(4))


def test_frozen_parameters_are_not_in_it_and_buffers_are(tmp_path):
    pair = adapted()
    zerofx.save(tmp_path / "all", *pair)
    zerofx.save(tmp_path / "some", *pair, trainable_only=True, asynchronous=True).wait()
    entries = dcp.FileSystemReader(tmp_path / "some").read_metadata().state_dict_metadata
    tensors = {name for name in entries if name.startswith("model.")}
    buffers = {f"model.norm.{name}" for name, _ in pair[0].norm.named_buffers()}
    trainable = {f"model.{name}" for name, one in pair[0].named_parameters() if one.requires_grad}
    assert tensors == buffers | trainable
    sizes = [
        sum(file.stat().st_size for file in (tmp_path / name).glob("*.distcp"))
        for name in ("all", "some")
    ]
    assert sizes[0] - sizes[1] > pair[0].base.weight.nbytes


def test_what_was_left_out_must_be_here_and_frozen(tmp_path):
    zerofx.save(tmp_path / "a", *adapted(), trainable_only=True)
    thawed = Adapted(1)
    thawed.base.weight.requires_grad_(True)
    with pytest.raises(MismatchError, match=r"different \(1\): base.weight \(left out as it was"):
        zerofx.load(tmp_path / "a", thawed)
    other = Adapted(1)
    del other.base, other.alias
    with pytest.raises(MismatchError, match=r"only in the checkpoint \(3\): .*alias"):
        zerofx.load(tmp_path / "a", other)
    more = Adapted(1)
    more.more = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(MismatchError, match=r"not in the checkpoint \(2\): more.weight, more.bias"):
        zerofx.load(tmp_path / "a", more)
    zerofx.load(tmp_path / "a", more, strict=False)
    assert torch.equal(more.up.weight, Adapted().up.weight)


def test_frozen_parameters_that_are_named_are_saved_too(tmp_path):
    model, optimizer = adapted()
    (name, value), *_ = [(n, p) for n, p in model.named_parameters() if not p.requires_grad]
    zerofx.save(tmp_path / "a", model, optimizer, trainable_only=True, and_frozen=[name])
    other, _ = adapted()
    with torch.no_grad():
        dict(other.named_parameters())[name].zero_()
    zerofx.load(tmp_path / "a", other)
    assert torch.equal(dict(other.named_parameters())[name], value)
    with pytest.raises(ValueError, match="and_frozen has 'none', which the model has not"):
        zerofx.save(tmp_path / "b", model, trainable_only=True, and_frozen=["none"])


def choose_differently(path):
    with pytest.raises(ValueError, match="different values of trainable_only"):
        zerofx.save(path, *adapted(), trainable_only=torch.distributed.get_rank() == 0)


def test_ranks_must_agree_to_leave_out(ranks, tmp_path):  # noqa: F811
    ranks(2).run(choose_differently, str(tmp_path / "a"))
    assert os.listdir(tmp_path) == []
