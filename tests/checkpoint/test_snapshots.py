"""Asynchronous saves copy shards while the training goes on, each before it changes."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import weakref
from unittest import mock

import pytest
import torch

import zerofx
from tests.kit.checkpoints import assert_same, built, states, step, train, zero
from tests.kit.ranks import ranks_fixture  # noqa: F401
from zerofx.runtime.parameters import snapshots
from zerofx.runtime.parameters.snapshots import SNAPSHOTS, Snapshot
from zerofx.runtime.storage import memory, ring


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
        assert not SNAPSHOTS.active
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


@pytest.mark.slow(reason="steps are compiled and run")
def test_what_is_saved_is_what_was_there(tmp_path):
    stage, options, num_copies = WAYS["stage 3"]
    assert len(save_and_go_on(str(tmp_path), stage, options)) == num_copies


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
def test_so_it_is_on_ranks(way, ranks, tmp_path):  # noqa: F811
    stage, options, num_copies = WAYS[way]
    if "files" in way:
        options = {**options, "offload_dir": [str(tmp_path)]}
    for changed in ranks(2).run(save_and_go_on, str(tmp_path), stage, options):
        # Two moments of seven parameters, and those at stage 3, one of them under two names.
        assert len(changed) == num_copies, changed


def test_a_change_between_steps_comes_after_the_copy(tmp_path):
    save_and_go_on(str(tmp_path), 3, {}, step, write_whole)


@pytest.mark.nightly
@pytest.mark.parametrize("between", [write_whole, load_others, give_back])
def test_changes_between_steps_come_after_the_copy(between, ranks, tmp_path):  # noqa: F811
    ranks(2).run(save_and_go_on, str(tmp_path), 3, {}, step, between)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [2, 3])
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


@pytest.mark.nightly
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


@pytest.fixture
def device(monkeypatch):
    """Stands for ``torch.cuda``: CPU tensors lie on that device, and ``pinned`` has what is."""
    device = mock.MagicMock(pinned={})

    def pin(address, nbytes, _flags):
        device.pinned[address] = nbytes
        return 0

    cudart = mock.MagicMock(cudaHostRegister=pin, cudaHostUnregister=device.pinned.pop)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(memory, "kind", lambda: "cuda")
    monkeypatch.setattr(snapshots, "is_accelerator", lambda device: True)
    monkeypatch.setattr(ring, "check_copies_beside", lambda device: None)
    monkeypatch.setattr(ring, "module_of", lambda of: device)
    monkeypatch.setattr(ring, "_streams", {})
    monkeypatch.setattr(ring, "RING_BYTES", 4096)
    monkeypatch.setattr(ring, "CHUNK_BYTES", 1024)
    device.event = device.Stream.return_value.record_event.return_value
    device.goes_on_after = device.current_stream.return_value.wait_event
    return device


def on_device(numel=3):
    """A snapshot that has begun of one state, its parameter, the state, and the copy."""
    parameter, source, snapshot = torch.nn.Parameter(torch.ones(1)), torch.randn(numel), Snapshot()
    copy = snapshot.add(parameter, [source], lambda: source, "a state")
    snapshot.begin()
    return snapshot, parameter, source, copy


def test_a_stream_that_copies_is_waited_for_before_anything_is_forgotten(device):
    """Until copies are made, updates wait for them on their stream, and the host does not."""
    made, parameter, source = threading.Event(), torch.nn.Parameter(torch.ones(3)), torch.ones(3)
    device.event.synchronize = lambda: made.wait(60)
    alive, snapshot = weakref.ref(source), Snapshot()
    copy = snapshot.add(parameter, [source], source.clone, "a state")
    snapshot.begin()
    del source
    assert not device.pinned  # the training pins nothing, nor copies
    running = threading.Thread(target=snapshot.run)
    running.start()
    running.join(0.2)
    assert running.is_alive() and snapshot in SNAPSHOTS.active and alive() is not None
    SNAPSHOTS.before_change([parameter])
    device.goes_on_after.assert_called_once_with(device.event)
    made.set()
    running.join(60)
    assert snapshot not in SNAPSHOTS.active and alive() is None
    assert torch.equal(copy(), torch.ones(3))


def test_pinned_memory_is_bounded_and_given_back(device):
    """However much is copied: what is longer than a chunk, what is not, and nothing."""
    held, snapshot, expected, copies = [], Snapshot(), [], []
    for number, numel in enumerate((5000, 0, 1, 255, 256, 257, 3, 1030, 70)):
        source = torch.randn(numel).to((torch.float32, torch.bfloat16, torch.float64)[number % 3])
        held.append(torch.nn.Parameter(torch.ones(1)))
        expected.append(source.clone())
        copies.append(snapshot.add(held[-1], [source], lambda source=source: source, "a state"))
    sent = []
    send = ring.Ring._send

    def noted(one, values, into):
        sent.append(send(one, values, into))
        assert sum(device.pinned.values()) == 4096
        ends = sorted((chunk.start, chunk.stop) for chunk in one._under_way)
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(ends))
        return sent[-1]

    with mock.patch.object(ring.Ring, "_send", noted):
        snapshot.begin()
        SNAPSHOTS.before_change(held[:1])  # more than fits: what is in the way has landed
        assert len(sent) == 20 and all(chunk.room is None for chunk in sent[:16])
        snapshot.run()
    assert not device.pinned and all(chunk.room is None for chunk in sent)
    for copy, values in zip(copies, expected, strict=True):
        assert torch.equal(copy(), values)


def test_threads_share_the_ring(device):
    """Updates of half of the parameters come while the thread copies."""
    snapshot, sources, copies = Snapshot(), [torch.randn(n) for n in range(1, 400, 3)], []
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in sources]
    expected = [source.clone() for source in sources]
    for parameter, source in zip(parameters, sources, strict=True):
        copies.append(snapshot.add(parameter, [source], lambda of=source: of, "a state"))
    snapshot.begin()
    running = threading.Thread(target=snapshot.run)
    running.start()
    for parameter, source in list(zip(parameters, sources, strict=True))[::2]:
        SNAPSHOTS.before_change([parameter])
        source.zero_()
    running.join(60)
    assert not device.pinned
    for copy, values in zip(copies, expected, strict=True):
        assert torch.equal(copy(), values)


def test_memory_that_cannot_be_pinned_is_copied_through_all_the_same(device, caplog):
    torch.cuda.cudart().cudaHostRegister = lambda *_: 2
    snapshot, _, source, copy = on_device(3000)
    snapshot.run()
    assert torch.equal(copy(), source)
    assert "through unpinned memory, slower: CUDA refused to pin 4096 bytes" in caplog.text


def test_a_device_that_fails_ends_the_save_and_not_the_training(device):
    device.event.synchronize = mock.Mock(side_effect=[None, RuntimeError("the link is down"), None])
    snapshot, parameter, _, copy = on_device(512)
    SNAPSHOTS.before_change([parameter])
    snapshot.run()
    assert snapshot not in SNAPSHOTS.active and not device.pinned
    with pytest.raises(RuntimeError, match="the link is down"):
        copy()


def test_a_copy_that_is_interrupted_is_none(device):
    device.event.synchronize = mock.Mock(side_effect=KeyboardInterrupt)
    snapshot, parameter, _, copy = on_device(2000)
    with pytest.raises(KeyboardInterrupt):  # in the training: there is no room without waiting
        SNAPSHOTS.before_change([parameter])
    device.event.synchronize = mock.Mock()
    snapshot.run()
    with pytest.raises(snapshots.SnapshotError, match="the copy of a state was interrupted"):
        copy()


def test_a_change_behind_the_back_of_a_stream_is_an_error(device):
    """Also of one that has been told to copy: it may not have."""
    snapshot, parameter, source, copy = on_device()
    (of_one,) = snapshot._copies.values()
    of_one[0].make()
    source.zero_()
    snapshot.run()
    with pytest.raises(snapshots.SnapshotError, match="a state has been written to"):
        copy()
    snapshot, parameter, source, copy = on_device()
    expected = source.clone()
    SNAPSHOTS.before_change([parameter])
    source.zero_()
    snapshot.run()
    assert torch.equal(copy(), expected)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_that_is_forked_off_copies_nothing_of_the_other():
    parameter, source, snapshot = torch.nn.Parameter(torch.ones(1)), torch.ones(3), Snapshot()
    snapshot.add(parameter, [source], lambda: source, "a state")
    snapshot.begin()
    with SNAPSHOTS._lock:  # as the other's thread may have it
        process = os.fork()
        if process == 0:
            signal.alarm(20)
            SNAPSHOTS.before_change([parameter])
            snapshot.begin()
            SNAPSHOTS.before_change([parameter])
            os._exit(len(SNAPSHOTS.active))
    _, status = os.waitpid(process, 0)
    snapshot.run()
    assert os.waitstatus_to_exitcode(status) == 1
