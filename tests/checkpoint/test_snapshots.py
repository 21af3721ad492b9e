"""Asynchronous saves copy shards while the training goes on, each before it changes."""

from __future__ import annotations

import threading
import weakref
from unittest import mock

import pytest
import torch

import zerofx
from tests.kit.checkpoints import assert_same, built, states, step, train, zero
from tests.kit.covering import first
from tests.kit.ranks import ranks_fixture  # noqa: F401
from zerofx.runtime.parameters import snapshots
from zerofx.runtime.parameters.snapshots import SNAPSHOTS, Snapshot


class Behind:
    """Keeps the thread that copies from it, until it is let go."""

    def __init__(self):
        self.may_run = threading.Event()
        self.made = []  # names, by who was about to change it

    def __enter__(self):
        run, make = Snapshot.run, snapshots._Copy.make

        def waiting(snapshot):
            self.may_run.wait(60)
            run(snapshot)

        def noted(copy):
            if copy._read is not None and not self.may_run.is_set():
                self.made.append(copy.name)
            make(copy)

        self._patches = [
            mock.patch.object(Snapshot, "run", waiting),
            mock.patch.object(snapshots._Copy, "make", noted),
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_error):
        self.may_run.set()
        for patch in self._patches:
            patch.stop()


def decayed(model, optimizer, tokens):
    """A step that changes a parameter by itself, before its update."""
    loss = model(tokens)
    loss.backward()
    with torch.no_grad():
        model.body.weight.mul_(0.9)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def nothing(_pair):
    """Between the save and the next step."""


def write_whole(pair):
    with zerofx.full_params(pair[0]), torch.no_grad():
        pair[0].body.weight.add_(1.0)


def load_others(pair):
    other = built(4)
    train(step, other, range(2))
    pair[0].load_state_dict(other[0].state_dict())
    pair[1].load_state_dict(other[1].state_dict())


def give_back(pair):
    zerofx.unshard(*pair)


def save_and_go_on(folder, stage, options, function=step, between=nothing):
    """The copies that were made because of the steps after; the states as loaded are checked."""
    torch._dynamo.reset()
    options = {"stage": stage, "lowering": "eager", **options}
    compiled = torch.compile(function, backend="zero", options=options)
    pair = built()
    train(compiled, pair, range(3))
    expected = states(pair)
    with Behind() as behind:
        saving = zerofx.save(f"{folder}/a", *pair, asynchronous=True)
        at_once = list(behind.made)
        between(pair)
        train(compiled, pair, range(3, 5))
        changed = list(behind.made)
        behind.may_run.set()
        saving.wait()
    other = built(1)
    zerofx.load(f"{folder}/a", *other)
    assert_same(states(other), expected)
    assert not at_once
    return changed


WAYS = {
    "stage 0": (0, {}, 0),
    "stage 1": (1, {}, 14),
    "stage 2": (2, {}, 14),
    "stage 3": (3, {}, 22),
    "one by one": (3, {"bucket_bytes": 1}, 22),
    "host": (3, {"offload": "optimizer"}, 22),
    "host, all": (3, {"offload": "optimizer,params"}, 22),
    "delayed": (3, {"offload": "optimizer", "delayed_update": True}, 22),
    "files": (3, {"offload": "optimizer,params", "offload_tier": "nvme"}, 0),
}


@pytest.mark.slow(reason="ranks compile and train")
@pytest.mark.parametrize("way", first(1, WAYS))
def test_what_is_saved_is_what_was_there(way, ranks, tmp_path):  # noqa: F811
    stage, options, num_copies = WAYS[way]
    if "files" in way:
        options = {**options, "offload_dir": [str(tmp_path)]}
    for changed in ranks(2).run(save_and_go_on, str(tmp_path), stage, options):
        # Two moments of seven parameters, and those at stage 3, one of them under two names.
        assert len(changed) == num_copies, changed


@pytest.mark.slow(reason="ranks compile and train")
@pytest.mark.parametrize("between", first(1, [write_whole, load_others, give_back]))
def test_changes_between_steps_come_after_the_copy(between, ranks, tmp_path):  # noqa: F811
    ranks(2).run(save_and_go_on, str(tmp_path), 3, {}, step, between)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", first(1, [2, 3]))
def test_changes_in_the_step_come_after_the_copy(stage, ranks, tmp_path):  # noqa: F811
    ranks(2).run(save_and_go_on, str(tmp_path), stage, {}, decayed)


def test_a_change_behind_its_back_is_an_error(tmp_path):
    torch._dynamo.reset()
    pair, compiled = built(), zero(3)
    train(compiled, pair, range(2))
    with Behind():
        saving = zerofx.save(tmp_path / "a", *pair, asynchronous=True)
        pair[1].state[pair[0].body.weight]["exp_avg"].zero_()
    with pytest.raises(zerofx.CheckpointError, match="'exp_avg' of 'body.weight' has been written"):
        saving.wait()
    assert not list(tmp_path.iterdir())
    train(compiled, pair, range(2, 3))


def test_a_copy_that_fails_ends_the_save_and_not_the_training(tmp_path):
    torch._dynamo.reset()
    pair, other, compiled = built(), built(), zero(3)
    train(compiled, pair, range(2))
    with (
        Behind() as behind,
        mock.patch.object(snapshots, "_on_host", side_effect=MemoryError("no")),
    ):
        saving = zerofx.save(tmp_path / "a", *pair, asynchronous=True)
        losses = train(compiled, pair, range(2, 4))
        assert behind.made
    with pytest.raises(zerofx.CheckpointError, match="MemoryError: no"):
        saving.wait()
    assert train(zero(3), other, range(4))[2:] == losses


def test_no_copy_outlives_its_save(tmp_path):
    torch._dynamo.reset()
    pair, compiled = built(), zero(3)
    train(compiled, pair, range(2))
    zerofx.save(tmp_path / "a", *pair, asynchronous=True).wait()
    assert not snapshots.SNAPSHOTS.active


def test_a_copy_may_end_while_a_step_looks_for_it():
    """No error from a set that changes size, which a step would end with."""
    is_looking, has_ended = threading.Event(), threading.Event()

    class Slow(weakref.WeakSet):
        def __iter__(self):
            for one in super().__iter__():
                is_looking.set()
                has_ended.wait(0.2)
                yield one

    def end():
        is_looking.wait(60)
        copies.discard(first)
        has_ended.set()

    copies, first, second = snapshots.Snapshots(), Snapshot(), Snapshot()
    copies.active = Slow()
    copies.add(first)
    copies.add(second)
    ending = threading.Thread(target=end)
    ending.start()
    copies.before_change([])
    ending.join()
    assert set(copies.active) == {second}


def test_a_stream_that_copies_is_waited_for_before_anything_is_forgotten(monkeypatch):
    """On an accelerator ``begin`` only queues the copies: until they are made, updates wait."""
    device, made = mock.MagicMock(), threading.Event()
    event = device.Stream.return_value.record_event.return_value
    event.synchronize = lambda: made.wait(60)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
    monkeypatch.setattr(snapshots, "is_accelerator", lambda device: True)
    monkeypatch.setattr(snapshots, "module_of", lambda of: device)
    monkeypatch.setattr(snapshots, "_streams", {})
    parameter, source = torch.nn.Parameter(torch.ones(3)), torch.ones(3)
    alive, snapshot = weakref.ref(source), Snapshot()
    copy = snapshot.add(parameter, [source], source.clone, "a state")
    snapshot.begin()
    del source
    running = threading.Thread(target=snapshot.run)
    running.start()
    running.join(0.2)
    assert running.is_alive() and snapshot in SNAPSHOTS.active and alive() is not None
    SNAPSHOTS.before_change([parameter])
    assert event.wait.called
    made.set()
    running.join(60)
    assert snapshot not in SNAPSHOTS.active and alive() is None
    assert torch.equal(copy(), torch.ones(3))
