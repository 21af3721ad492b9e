"""Shards in another library's folder: killed at any time, a save leaves them of one save."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil

import pytest
import torch
from torch import nn

import zerofx
from tests.kit.ranks import ranks_fixture  # noqa: F401
from zerofx.errors import RankError
from zerofx.integrations import checkpoints, models

REST = "rest.json"


def of(value: float) -> nn.Module:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, value)
    return model


def save(folder, value, rest=True):
    """Save a model of this value, and beside it the value, as a library would."""
    saved = checkpoints.save_beside(folder, [of(value)], [])

    def write():
        text = json.dumps({"value": value, checkpoints.TOKEN: saved.token})
        (folder / "new").write_text(text)
        os.replace(folder / "new", folder / REST)

    if rest:
        saved.ranks.on_first(write)
    saved.replace_old()


def load(folder):
    """Return the value of the model, and the one beside it."""
    rest, model = json.loads((folder / REST).read_text()), of(0)
    zerofx.load(checkpoints.shards_in(folder, rest[checkpoints.TOKEN], model), model)
    return model.weight.mean().item(), rest["value"]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_save_takes_the_place_of_the_one_before(tmp_path):
    assert not checkpoints.is_saved_in(tmp_path)
    for value in (1.0, 2.0):
        save(tmp_path, value)
        assert load(tmp_path) == (value, value)
    assert names(tmp_path) == [REST, checkpoints.CHECKPOINT]


def test_a_save_leaves_folders_of_others(tmp_path):
    (tmp_path / "zero.bak").mkdir()
    assert not checkpoints.is_saved_in(tmp_path)
    save(tmp_path, 1.0)
    assert names(tmp_path) == [REST, checkpoints.CHECKPOINT, "zero.bak"]


class Killed(BaseException):
    """As a signal: nothing tidies up behind it but what hears of every exception."""


@pytest.fixture
def killed_at(monkeypatch):
    """Have the n-th removal or renaming of a folder kill; a removal has begun then."""
    calls = itertools.count()

    def arm(number):
        for module, name in ((os, "rename"), (os, "replace"), (shutil, "rmtree")):
            monkeypatch.setattr(module, name, wrapped(getattr(module, name), number))

    def wrapped(real, number):
        def call(path, *others, **named):
            if next(calls) != number:
                return real(path, *others, **named)
            if real.__name__ == "rmtree" and os.path.isdir(path):
                os.unlink(next(os.scandir(path)).path)
            raise Killed

        return call

    return arm


@pytest.mark.parametrize("number", range(7))
def test_a_save_that_is_killed_leaves_the_old_or_the_new(number, killed_at, monkeypatch, tmp_path):
    save(tmp_path, 1.0)
    killed_at(number)
    with pytest.raises(Killed) if number < 6 else contextlib.nullcontext():
        save(tmp_path, 2.0)
    monkeypatch.undo()
    value, beside = load(tmp_path)
    assert value == beside
    save(tmp_path, 3.0)
    assert load(tmp_path) == (3.0, 3.0)
    assert set(names(tmp_path)) - {"new"} == {REST, checkpoints.CHECKPOINT}


def test_what_has_no_token_is_of_older_versions(tmp_path):
    zerofx.save(tmp_path / "zero", of(1.0)).wait()
    model = of(0)
    zerofx.load(checkpoints.shards_in(tmp_path, checkpoints.token_in(tmp_path), model), model)
    assert model.weight.mean() == 1
    (tmp_path / "zero").rename(tmp_path / "zero.next")  # they were killed before it had its name
    assert checkpoints.is_saved_in(tmp_path)
    assert checkpoints.shards_in(tmp_path, None, model) == tmp_path / "zero.next"


def test_older_versions_half_removed_the_old_shards_before_the_new_had_their_name(tmp_path):
    zerofx.save(tmp_path / "zero", of(1.0)).wait()
    zerofx.save(tmp_path / "zero.next", of(2.0)).wait()
    for lost in ("__0_0.distcp", ".metadata"):
        (tmp_path / "zero" / lost).unlink()
        assert checkpoints.shards_in(tmp_path, None, of(0)) == tmp_path / "zero.next"
    (tmp_path / "zero.next" / "__0_0.distcp").unlink()
    with pytest.raises(FileNotFoundError, match="zero"):
        checkpoints.shards_in(tmp_path, None, of(0))


def test_shards_of_another_save_than_the_rest_are_refused(tmp_path):
    save(tmp_path, 1.0)
    save(tmp_path, 2.0, rest=False)
    with pytest.raises(
        zerofx.CheckpointError, match="was not saved to the end: the shards in zero "
    ):
        load(tmp_path)


def test_a_rest_of_several_files_has_a_token_when_all_are_written(tmp_path):
    zerofx.save(tmp_path / "zero", of(0.0)).wait()  # of an older version, which has no token
    for _ in range(2):
        saved = checkpoints.save_beside(tmp_path, [of(1.0)], [])
        saved.begin_rest(tmp_path)
        with pytest.raises(zerofx.CheckpointError, match="was not saved to the end"):
            checkpoints.shards_in(tmp_path, checkpoints.token_in(tmp_path), of(0))
        saved.write_token(tmp_path)
        checkpoints.shards_in(tmp_path, checkpoints.token_in(tmp_path), of(0))
        saved.replace_old()
        place = checkpoints.shards_in(tmp_path, checkpoints.token_in(tmp_path), of(0))
        assert place == tmp_path / checkpoints.CHECKPOINT


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = of(1.0)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_shards_that_are_still_to_be_read_stay_until_the_next_save(tmp_path):
    model, optimizer = trained()
    folder = tmp_path / checkpoints.CHECKPOINT
    zerofx.save(folder, model, optimizer).wait()
    expected = optimizer.state[model.weight]["exp_avg"].clone()
    zerofx.load(folder, model, optimizer)  # reads no states
    saved = checkpoints.save_beside(tmp_path, [model], [optimizer])
    saved.replace_old()
    assert len(names(tmp_path)) == 2
    assert torch.equal(optimizer.state[model.weight]["exp_avg"] + 0, expected)
    other, of_other = trained()
    zerofx.load(checkpoints.shards_in(tmp_path, saved.token, other), other, of_other)
    assert torch.equal(of_other.state[other.weight]["exp_avg"] + 0, expected)


def obstructed(folder, where):
    """Return what is raised where rank 0 alone finds something in its way."""
    if where == "a file":
        return repr(pytest.raises(FileExistsError, checkpoints.save_beside, folder, [of(1.0)], []))
    real = os.rename

    def refuse(old, new):
        if os.path.basename(new) == "zero":
            raise OSError("Directory not empty")
        real(old, new)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        return repr(pytest.raises((OSError, RankError), save, folder, 1.0))


@pytest.mark.parametrize("where", ("a file", "a name"))
def test_what_is_in_the_way_of_rank_0_is_told_to_all(where, ranks, tmp_path):  # noqa: F811
    folder = tmp_path / "made"
    if where == "a file":
        folder.touch()
    message = "is a file, and ranks write" if where == "a file" else "Directory not empty"
    assert all(message in found for found in ranks(2).run(obstructed, folder, where))


def export_obstructed(folder):
    return repr(pytest.raises((OSError, RankError), models.export_into, folder, of(1.0)))


def test_an_export_that_finds_a_file_in_its_way_fails_on_all_ranks(ranks, tmp_path):  # noqa: F811
    (tmp_path / "made").touch()
    found = ranks(2).run(export_obstructed, tmp_path / "made")
    assert all("File exists" in each for each in found)


def test_each_model_has_its_optimizers_and_a_folder(tmp_path):
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    of_one, of_two = (torch.optim.SGD(model.parameters()) for model in (one, two))
    found = checkpoints.each_with_optimizers(tmp_path, [one, two], [of_two, of_one])
    assert found == [(tmp_path, one, [of_one]), (tmp_path / "model_1", two, [of_two])]


def test_an_optimizer_of_no_model_is_refused_and_not_left_out(tmp_path):
    stranger = torch.optim.SGD(nn.Linear(2, 2).parameters())
    with pytest.raises(ValueError, match="SGD has parameters of no model that was given"):
        checkpoints.each_with_optimizers(tmp_path, [nn.Linear(2, 2)], [stranger])
