"""A training that is killed at any moment, and started again, goes on as if it had not been."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import random
import signal
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
import zerofx
from tests.kit.checkpoints import pair_of
from tests.kit.covering import exhaustive
from tests.kit.models import Mlp, features, squared_loss
from tests.kit.ranks import Ranks, ranks_fixture  # noqa: F401
from zerofx.checkpoint import reading
from zerofx.checkpoint.folders import NOTES


def step(model, optimizer, inputs, targets):
    loss = squared_loss(model, inputs, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def train(root: str, num_steps: int, stage: int = 3, saves: bool = True, dropout: float = 0.1):
    """Go on with a training until a step; this rank's losses, by the step's number."""
    torch._dynamo.reset()
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # dropout differs between ranks
    model = Mlp(dropout=dropout)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 6, 9])
    compiled = torch.compile(step, backend="zero", options={"stage": stage, "lowering": "eager"})
    folder = Path(root) / "checkpoints"
    extra = zerofx.resume(folder, model, optimizer)
    if extra:
        scheduler.load_state_dict(extra["scheduler"])
    losses = {}
    for number in range(extra.get("step", 0), num_steps):
        inputs, targets = (part.chunk(size)[rank] for part in features(number, 12))
        losses[number] = compiled(model, optimizer, inputs, targets).item()
        with open(Path(root) / f"losses-{rank}", "a") as log:
            log.write(f"{number} {losses[number].hex()}\n")
        scheduler.step()
        if saves:
            extra = {"step": number + 1, "scheduler": scheduler.state_dict()}
            path = folder / f"step-{number + 1}"
            behind = number % 3 == 1
            saving = zerofx.save(path, model, optimizer, extra, keep=2, asynchronous=behind)
    if saves:
        saving.wait()
    return losses


def train_until_killed(root: str, victim: int, from_start: bool, delay_s: float) -> None:
    if dist.get_rank() == victim:

        def kill():
            log = Path(root) / f"losses-{victim}"
            size = log.stat().st_size if log.exists() else 0
            while not from_start and not (log.exists() and log.stat().st_size > size):
                time.sleep(1e-3)
            time.sleep(delay_s)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()
    train(root, 100_000)


@pytest.mark.nightly
@pytest.mark.parametrize(("num_kills", "seed"), [(3, 0), exhaustive(50, 1)])
def test_kills_at_random_moments_lose_nothing(num_kills, seed, tmp_path, ranks):  # noqa: F811
    choose = random.Random(seed)
    for _ in range(num_kills):
        from_start = choose.random() < 0.3
        delay_s = choose.uniform(0, 2.5 if from_start else 0.6)
        with contextlib.closing(Ranks(2)) as two:
            with pytest.raises(RuntimeError):  # one is gone, or the other that noticed it
                two.run(train_until_killed, str(tmp_path), choose.randrange(2), from_start, delay_s)
    (tmp_path / "undisturbed").mkdir()
    last = zerofx.latest(tmp_path / "checkpoints")
    num_steps = (int(last.name.partition("-")[2]) if last else 0) + 3
    ranks(2).run(train, str(tmp_path), num_steps)
    assert zerofx.latest(tmp_path / "checkpoints").name == f"step-{num_steps}"
    expected = ranks(2).run(train, str(tmp_path / "undisturbed"), num_steps, 3, False)
    for rank, losses in enumerate(expected):
        lines = (tmp_path / f"losses-{rank}").read_text().splitlines()
        seen = [(int(number), float.fromhex(loss)) for number, loss in map(str.split, lines)]
        assert {number for number, _ in seen} == set(range(num_steps))
        assert all(losses[number] == loss for number, loss in seen)
    kept = {f"step-{number}" for number in (num_steps - 1, num_steps)}
    assert set(os.listdir(tmp_path / "checkpoints")) == kept


@pytest.mark.nightly
def test_more_ranks_and_fewer_go_on_to_rounding(tmp_path, ranks):  # noqa: F811
    (tmp_path / "undisturbed").mkdir()
    found = {}
    for number, (size, stage) in enumerate([(2, 3), (3, 1), (1, 3)]):
        each = ranks(size).run(train, str(tmp_path), 3 * number + 3, stage, True, 0.0)
        found |= {n: sum(losses[n] for losses in each) / size for n in each[0]}
    (expected,) = ranks(1).run(train, str(tmp_path / "undisturbed"), 9, 3, False, 0.0)
    assert sorted(found) == list(range(9))
    assert [found[n] for n in range(9)] == pytest.approx([expected[n] for n in range(9)], rel=1e-5)


def test_a_damaged_checkpoint_is_logged_and_the_one_before_it_loaded(tmp_path, caplog):
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert zerofx.resume(tmp_path / "none", model, optimizer) == {}
    for number in (1, 2):
        zerofx.save(tmp_path / f"step-{number}", model, optimizer, {"step": number})
    (data,) = (tmp_path / "step-2").glob("*.distcp")
    os.truncate(data, 1000)
    assert zerofx.resume(tmp_path, model, optimizer) == {"step": 1}
    assert "step-2" in caplog.text and "cut short" in caplog.text
    (data,) = (tmp_path / "step-1").glob("*.distcp")
    os.truncate(data, 1000)
    with caplog.at_level(logging.ERROR), pytest.raises(zerofx.CheckpointError, match="step-1"):
        zerofx.resume(tmp_path, model, optimizer)


def test_a_training_saves_again_what_it_has_skipped(tmp_path, caplog):
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in (1, 2):
        zerofx.save(tmp_path / f"step-{number}", model, optimizer, {"step": number})
    for _ in range(2):
        (data,) = (tmp_path / "step-2").glob("*.distcp")
        os.truncate(data, 1000)
        assert zerofx.resume(tmp_path, model, optimizer) == {"step": 1}
        zerofx.save(tmp_path / "step-2", model, optimizer, {"step": 2})
        assert zerofx.resume(tmp_path, model, optimizer) == {"step": 2}
    aside = {".step-2.damaged", ".step-2.damaged-1"}
    assert set(os.listdir(tmp_path)) == {"step-1", "step-2"} | aside
    assert "is saved anew" in caplog.text
    with pytest.raises(FileExistsError):  # that one is whole
        zerofx.save(tmp_path / "step-2", model, optimizer)


def errors_in(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("what", ["empty notes", "no text", "no metadata"])
def test_one_whose_place_in_the_order_is_lost_is_damaged_too(what, tmp_path, caplog):
    pair = pair_of()
    for number in (1, 2):
        zerofx.save(tmp_path / f"step-{number}", *pair, {"step": number})

    def damage(folder):
        if what == "no metadata":
            (folder / ".metadata").unlink()
        else:
            (folder / NOTES).write_bytes(b"" if what == "empty notes" else b"\xff\xfe")

    damage(tmp_path / "step-2")
    assert zerofx.resume(tmp_path, *pair) == {"step": 1}
    (words,) = errors_in(caplog)
    assert f"{tmp_path / 'step-2'}" in words and "The last of the others is loaded" in words
    zerofx.save(tmp_path / "step-2", *pair, {"step": 2})
    assert zerofx.resume(tmp_path, *pair) == {"step": 2}
    for number in (1, 2):
        damage(tmp_path / f"step-{number}")
    with pytest.raises(zerofx.CheckpointError, match="step-1.*damaged"):
        zerofx.resume(tmp_path, *pair)


def test_an_export_is_no_damaged_checkpoint(tmp_path, caplog):
    pair = pair_of()
    zerofx.export_safetensors(tmp_path / "exported", pair[0])
    assert zerofx.resume(tmp_path, *pair) == {}
    zerofx.save(tmp_path / "step-1", *pair, {"step": 1})
    assert zerofx.resume(tmp_path, *pair) == {"step": 1}
    assert not errors_in(caplog)


def test_one_of_a_newer_format_is_not_passed_over(tmp_path):
    pair = pair_of()
    for number in (1, 2):
        zerofx.save(tmp_path / f"step-{number}", *pair, {"step": number})
    notes = json.loads((tmp_path / "step-2" / NOTES).read_text())
    (tmp_path / "step-2" / NOTES).write_text(json.dumps(notes | {"format": 2}))
    with pytest.raises(zerofx.CheckpointError, match="step-2 is of format 2"):
        zerofx.resume(tmp_path, *pair)


def test_one_that_cannot_be_read_at_the_moment_is_not_passed_over(tmp_path):
    pair = pair_of()
    for number in (1, 2):
        zerofx.save(tmp_path / f"step-{number}", *pair, {"step": number})
    failing = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    with mock.patch.object(reading, "open", create=True, side_effect=failing):
        with pytest.raises(zerofx.CheckpointError, match="step-2.*cannot be read.*Too many open"):
            zerofx.resume(tmp_path, *pair)
    with pytest.raises(FileExistsError):
        zerofx.save(tmp_path / "step-2", *pair)
    assert zerofx.resume(tmp_path, *pair) == {"step": 2}


def test_one_that_is_whole_and_has_no_optimizer_is_not_passed_over(tmp_path):
    model, optimizer = pair_of()
    zerofx.save(tmp_path / "step-1", model, optimizer)
    zerofx.save(tmp_path / "step-2", model)
    with pytest.raises(zerofx.CheckpointError, match="has no optimizer"):
        zerofx.resume(tmp_path, model, optimizer)
    with pytest.raises(FileExistsError):
        zerofx.save(tmp_path / "step-2", model)


def test_keep_does_not_count_a_damaged_one(tmp_path):
    model, _ = pair_of()
    for number in (1, 2, 3):
        zerofx.save(tmp_path / f"step-{number}", model, extra={"step": number}, keep=2)
    (data,) = (tmp_path / "step-3").glob("*.distcp")
    os.truncate(data, 1000)
    assert zerofx.resume(tmp_path, model) == {"step": 2}
    zerofx.save(tmp_path / "step-4", model, keep=2)
    assert set(os.listdir(tmp_path)) == {"step-2", "step-3", "step-4"}


def test_a_checkpoint_is_no_folder_of_checkpoints(tmp_path):
    pair = pair_of()
    zerofx.save(tmp_path / "step-1", *pair)
    with pytest.raises(ValueError, match=f"step-1 is a checkpoint.*Give {tmp_path}"):
        zerofx.resume(tmp_path / "step-1", *pair)


def test_one_without_notes_is_named(tmp_path, caplog):
    pair = pair_of()
    for number in (1, 2):
        zerofx.save(tmp_path / f"step-{number}", *pair, {"step": number})
    (tmp_path / "step-2" / NOTES).unlink()
    assert zerofx.resume(tmp_path, *pair) == {"step": 1}
    (words,) = (r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
    assert f"{tmp_path / 'step-2'} has no {NOTES}" in words
    assert zerofx.load(tmp_path / "step-2", *pair) == {"step": 2}


def test_each_rank_may_add_what_is_its_own(ranks, tmp_path):  # noqa: F811
    for found in ranks(2).run(add_own, str(tmp_path)):
        assert found == {"common": 0, "of-0": [0], "of-1": [1]}


def add_own(root: str) -> dict:
    model, rank = Mlp(), dist.get_rank()
    zerofx.save(Path(root) / "a", model, extra={"common": rank, f"of-{rank}": [rank]})
    return zerofx.load(Path(root) / "a", model)
