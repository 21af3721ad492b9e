"""What a save takes of memory: one tensor's part at a time, and of an asynchronous one a copy."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import zerofx
from tests.kit.checkpoints import built, pair_of, train, zero
from zerofx.checkpoint import saving
from zerofx.checkpoint.contents import Contents
from zerofx.checkpoint.reading import Reader
from zerofx.checkpoint.targets import into_state
from zerofx.runtime.optimizer.lazy_states import LazyState
from zerofx.runtime.parameters.snapshots import Snapshot
from zerofx.runtime.storage.memory import HostMemory


@pytest.fixture
def pair():
    model = torch.nn.Sequential(*(torch.nn.Linear(160, 160) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 160)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_save_has_one_tensor_in_memory(pair, tmp_path):
    given: list[weakref.ref[torch.Tensor]] = []
    most, write = 0, torch.save

    def watched(value, *arguments):
        nonlocal most
        if isinstance(value, torch.Tensor) and value.dim() == 2:
            given.append(weakref.ref(value))
            most = max(most, sum(reference() is not None for reference in given))
        write(value, *arguments)

    with mock.patch.object(torch, "save", watched):
        zerofx.save(tmp_path / "a", *pair)
    assert most == 1 and len(given) == 12


def test_a_save_behind_that_has_failed_keeps_no_copies(pair, tmp_path):
    copies = []

    def failing(contents, *_arguments):
        copies.extend(map(weakref.ref, contents["model"].values()))
        raise OSError("no room")

    with mock.patch.object(saving, "_write", failing):
        save = zerofx.save(tmp_path / "a", *pair, asynchronous=True)
        with pytest.raises(zerofx.CheckpointError, match="no room"):
            save.wait()
    assert copies and not any(copy() is not None for copy in copies)


def test_a_rank_that_saves_nothing_of_a_state_does_not_read_it(tmp_path):
    zerofx.save(tmp_path / "a", *pair_of())
    model, optimizer = pair_of(1)
    optimizer.state.clear()
    zerofx.load(tmp_path / "a", model, optimizer)
    with mock.patch.object(LazyState, "read", side_effect=AssertionError("reads")):
        Contents(1, 2, Snapshot()).collect(model, [optimizer], None)


@pytest.mark.nightly
def test_a_save_behind_of_more_than_there_is_room_for_is_refused(tmp_path):
    torch._dynamo.reset()
    (tmp_path / "files").mkdir()
    options = {"offload": "optimizer,params", "offload_tier": "nvme"}
    pair, compiled = built(), zero(3, **options, offload_dir=[str(tmp_path / "files")])
    train(compiled, pair, range(1))
    with mock.patch.object(HostMemory, "available_bytes", return_value=100):
        with pytest.raises(zerofx.CheckpointError, match="and 100 are available.*asynchronous"):
            zerofx.save(tmp_path / "a", *pair, asynchronous=True)
        zerofx.save(tmp_path / "b", *pair)
    zerofx.save(tmp_path / "c", *pair, asynchronous=True).wait()


@pytest.mark.nightly
def test_an_old_state_is_gone_when_the_new_one_is_read(tmp_path):
    torch._dynamo.reset()
    pair = built()
    train(zero(1), pair, range(1))
    zerofx.save(tmp_path / "a", *pair)
    old = [weakref.ref(state["exp_avg"]) for state in pair[1].state.values()]
    alive, read = [], Reader.read

    def watched(self, entry, wanted, into):
        if entry.endswith("exp_avg"):
            alive.append(sum(reference() is not None for reference in old))
        return read(self, entry, wanted, into)

    with mock.patch.object(Reader, "read", watched):
        zerofx.load(tmp_path / "a", *pair)
    assert alive == list(reversed(range(len(old))))


def test_a_shard_of_a_state_is_read_where_the_whole_has_no_room():
    whole, owned = torch.empty(2**48, device="meta"), (8, 10)
    info = SimpleNamespace(
        shape=whole.shape, storage_order=(0,), shard_numel=3, owned_by=lambda rank: owned, rank=4
    )
    bound = SimpleNamespace(info=info)
    kept = []
    target = into_state(
        "state", whole, torch.device("cpu"), kept.append, bound=bound, is_late=False
    )
    files = SimpleNamespace(
        name="a", check=lambda entry: None, read=lambda entry, part, into: into.fill_(part.start)
    )
    target.fill(files)
    assert kept[0].tolist() == [8, 8, 0]
