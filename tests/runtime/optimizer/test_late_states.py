"""States that are loaded before the first step: each rank reads what it keeps, and when."""

from __future__ import annotations

import copy
import gc
import io
import os
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zerofx
from tests.kit.checkpoints import (
    assert_same,
    built,
    save_trained,
    states,
    step,
    train,
    zero,
)
from tests.kit.covering import only
from tests.kit.ranks import ranks_fixture  # noqa: F401
from zerofx.checkpoint.reading import Reader, in_use
from zerofx.runtime.optimizer.lazy_states import LazyState, unread

CPU = {"offload": "optimizer"}
FILES = {**CPU, "offload_tier": "nvme"}


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Saved by one process after three steps: the path, the losses of two more, what was saved."""
    path = tmp_path_factory.mktemp("late") / "a"
    losses, saved, _ = save_trained(str(path), 3)
    return path, losses, saved


@pytest.fixture
def path(trained):
    return trained[0]


def loaded(path, seed=1):
    pair = built(seed)
    zerofx.load(path, *pair)
    return pair


def late_states(pair):
    return [
        value
        for state in pair[1].state.values()
        for value in state.values()
        if isinstance(value, LazyState)
    ]


def load_and_count(path, stage, options):
    """What is read, in elements: at the load, in the first step, and after it."""
    torch._dynamo.reset()
    read: list[tuple[str, int]] = []
    original = Reader.read

    def counting(self, entry, wanted, into):
        read.append((entry, into.numel()))
        return original(self, entry, wanted, into)

    with mock.patch.object(Reader, "read", counting):
        pair, compiled = loaded(path), zero(stage, **options)
        num_at_load = max(numel for name, numel in read if "exp_avg" in name)
        assert all(late.untyped_storage().nbytes() == 0 for late in late_states(pair))
        losses = train(compiled, pair, range(3, 4))
        in_step = {name: numel for name, numel in read if "exp_avg" in name and numel > 1}
        assert not late_states(pair) and not unread()
        before = len(read)
        losses += train(compiled, pair, range(4, 5))
        assert len(read) == before
    trained = [one for one in pair[0].parameters() if one.requires_grad and one.numel() > 1]
    whole = sum(one.numel() for one in trained)
    return num_at_load, in_step, whole, losses, states(pair)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("stage", "tier"),
    only(((3, "nvme"),), [(0, None), (1, None), (2, "cpu"), (3, None), (3, "cpu"), (3, "nvme")]),
)
def test_a_rank_reads_the_shards_that_it_keeps(stage, tier, ranks, tmp_path):  # noqa: F811
    expected = ranks(2).run(save_trained, str(tmp_path / "a"), stage)
    options = {} if tier is None else {**CPU, "offload_tier": tier}
    if tier == "nvme":
        options["offload_dir"] = [str(tmp_path)]
    results = ranks(2).run(load_and_count, str(tmp_path / "a"), stage, options)
    for (at_load, in_step, whole, losses, after), saved in zip(results, expected, strict=True):
        assert at_load == 1  # of a parameter that is one number
        assert losses == saved[0]
        assert_same(after, saved[2])
        assert sum(in_step.values()) <= (2 if stage == 0 else 1.1) * whole  # of two moments
    total = sum(sum(in_step.values()) for _, in_step, *_ in results)
    assert total == (4 if stage == 0 else 2) * results[0][2]


def test_plain_torch_reads_them_by_using_them(trained):
    path, losses, _ = trained
    pair = loaded(path)
    assert late_states(pair)
    assert train(step, pair, range(3, 5)) == losses
    assert not late_states(pair) and not unread()
    assert all(type(v) is torch.Tensor for s in pair[1].state.values() for v in s.values())


def as_saved(pair):
    buffer = io.BytesIO()
    torch.save(pair[1].state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer)


def as_loaded_elsewhere(pair):
    other = built(2)
    other[1].load_state_dict(pair[1].state_dict())
    return other[1].state_dict()


@pytest.mark.parametrize(
    "look",
    [
        lambda pair: copy.deepcopy(pair[1].state_dict()),
        lambda pair: copy.deepcopy(pair[1]).state_dict(),
        as_saved,
        as_loaded_elsewhere,
    ],
)
def test_whoever_looks_sees_values(look, trained):
    path, _, (_, expected) = trained
    assert_same(dict(look(loaded(path))), dict(expected))


def test_printing_one_and_asking_for_its_shape_reads_nothing(path):
    pair = loaded(path)
    late = next(late for late in late_states(pair) if late.dim() == 2)
    assert late.shape == (11, 6) and late.dtype is torch.float32 and late.numel() == 66
    assert "LazyState" in repr(late) and type(late) is LazyState
    assert (late + 0).shape == (11, 6)
    assert type(late) is torch.Tensor


def test_what_nobody_has_read_is_saved_again(path, ranks, tmp_path):  # noqa: F811
    ranks(2).run(load_and_save, str(path), str(tmp_path))
    expected = states(loaded(path))
    for name in ("saved", "behind"):
        assert_same(states(loaded(tmp_path / name, seed=4)), expected)


def load_and_save(path, folder):
    pair = loaded(path, seed=2 + dist.get_rank())
    zerofx.save(f"{folder}/saved", *pair)
    zerofx.save(f"{folder}/behind", *pair, asynchronous=True).wait()
    assert len(late_states(pair)) > 3


@pytest.mark.nightly
def test_other_states_take_their_place(path, tmp_path):
    pair = loaded(path)
    train(compiled := zero(3), pair, range(3, 4))
    zerofx.save(tmp_path / "b", *pair)
    expected = train(compiled, pair, range(4, 6))
    torch._dynamo.reset()
    again = loaded(path, seed=3)
    zerofx.load(tmp_path / "b", *again)
    assert train(zero(3), again, range(4, 6)) == expected
    torch._dynamo.reset()
    other = loaded(path, seed=3)
    other[0].load_state_dict(again[0].state_dict())
    other[1].load_state_dict(again[1].state_dict())
    assert not late_states(other)
    assert train(compiled, pair, range(6, 8)) == train(zero(3), other, range(6, 8))


@pytest.mark.nightly
def test_a_step_that_reads_states_itself_says_what_to_do(path):
    def reading(model, optimizer, tokens):
        loss = step(model, optimizer, tokens)
        return loss + optimizer.state[model.body.weight]["exp_avg"].sum()

    options = {"stage": 0, "lowering": "eager"}
    pair, other = loaded(path), loaded(path, seed=4)
    compiled = torch.compile(reading, backend="zero", options=options)
    with pytest.raises(Exception, match="has not been read yet.*optimizer.state_dict()"):
        train(compiled, pair, range(3, 5))
    copy.deepcopy(pair[1].state_dict())
    assert train(compiled, pair, range(3, 5)) == train(reading, other, range(3, 5))


@pytest.mark.nightly
def test_files_of_another_load_are_read_a_bucket_at_a_time(path, tmp_path):
    """States that are in files already do not come to memory all at once."""
    options = {**FILES, "offload_dir": [str(tmp_path)]}
    pair, compiled = built(1), zero(3, **options)
    train(compiled, pair, range(2))
    zerofx.load(path, *pair)
    assert late_states(pair)
    expected = loaded(path, seed=4)
    assert train(compiled, pair, range(3, 5)) == train(zero(3), expected, range(3, 5))
    assert_same(states(pair), states(expected))


# What happens to a checkpoint in the meantime


@pytest.mark.nightly
def test_one_that_has_gone_is_an_error_before_anything_changes(path, tmp_path):
    shutil.copytree(path, tmp_path / "a")
    pair = loaded(tmp_path / "a")
    before = copy.deepcopy(pair[0].state_dict())
    shutil.rmtree(tmp_path / "a")
    compiled = zero(3)
    with pytest.raises(zerofx.StepError, match="is gone, and .* was to be made from it"):
        train(compiled, pair, range(3, 4))
    assert_same(dict(pair[0].state_dict()), dict(before))
    zerofx.load(path, *pair)
    assert train(compiled, pair, range(3, 5)) == train(zero(3), loaded(path), range(3, 5))


def damage(folder: Path, how: str) -> None:
    (file,) = folder.glob("*.distcp")
    if how == "cut":
        os.truncate(file, file.stat().st_size // 2)
    else:
        data = bytearray(file.read_bytes())
        for place in range(0, len(data), 64):  # some of it is padding
            data[place] ^= 1
        file.write_bytes(data)


@pytest.mark.parametrize("how", ["cut", "flipped"])
def test_damage_is_found_when_it_is_read(how, path, tmp_path):
    shutil.copytree(path, tmp_path / "a")
    pair = loaded(tmp_path / "a")
    damage(tmp_path / "a", how)
    with pytest.raises(zerofx.StepError, match="written to, or replaced, since zerofx.load"):
        copy.deepcopy(pair[1].state_dict())
    assert late_states(pair)


@pytest.mark.nightly
def test_what_has_been_read_or_replaced_is_in_use_no_longer(path, tmp_path):
    for name in ("a", "b"):
        shutil.copytree(path, tmp_path / name)
    gc.collect()
    gc.disable()  # at once, by its references
    try:
        pair = loaded(tmp_path / "a")
        zerofx.load(tmp_path / "b", *pair)
        assert in_use() == {tmp_path / "b"}
        train(zero(3), pair, range(3, 4))
        assert not in_use()
    finally:
        gc.enable()


@pytest.mark.nightly
def test_one_that_is_still_to_be_read_is_kept(tmp_path):
    first = built(0)
    train(zero(3), first, range(2))
    zerofx.save(tmp_path / "1", *first, keep=1)
    torch._dynamo.reset()
    pair = loaded(tmp_path / "1")
    zerofx.save(tmp_path / "2", *pair, keep=1)
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]
    assert train(zero(3), pair, range(2, 4)) == train(zero(3), first, range(2, 4))
    zerofx.save(tmp_path / "3", *pair, keep=1)
    assert os.listdir(tmp_path) == ["3"]


@pytest.mark.nightly
def test_one_loaded_by_a_link_is_kept_wherever_the_link_goes(tmp_path):
    first = built(0)
    train(zero(3), first, range(2))
    zerofx.save(tmp_path / "1", *first, keep=1)
    (tmp_path / "current").symlink_to("1")
    torch._dynamo.reset()
    pair = loaded(tmp_path / "current")
    zerofx.save(tmp_path / "2", *pair, keep=1)
    (tmp_path / "current").unlink()
    (tmp_path / "current").symlink_to("2")
    assert sorted(os.listdir(tmp_path)) == ["1", "2", "current"]
    assert train(zero(3), pair, range(2, 4)) == train(zero(3), first, range(2, 4))


@pytest.mark.nightly
def test_memory_is_asked_for_by_its_device(path):
    """Whatever the default is: a user's may be the GPU."""
    expected = states(loaded(path))
    for is_bound in (False, True):
        torch._dynamo.reset()
        pair = built(1)
        if is_bound:
            train(zero(3), pair, range(2))
        torch.set_default_device("meta")
        try:
            zerofx.load(path, *pair)
        finally:
            torch.set_default_device(None)
        assert_same(states(pair), expected)
