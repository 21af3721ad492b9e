"""Models constructed under deferred_init, and checkpoints: nothing is initialized in vain."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zerofx
from tests.kit.checkpoints import (
    Everything,
    assert_same,
    built,
    load_and_train,
    save_trained,
    states,
    step,
    train,
    zero,
)
from tests.kit.covering import exhaustive, first, only
from tests.kit.ranks import ranks_fixture  # noqa: F401
from zerofx.checkpoint.reading import Reader
from zerofx.checkpoint.safetensors import OpenFile
from zerofx.deferred.guards import DeferredParameter
from zerofx.deferred.ledger import LEDGER
from zerofx.deferred.tape import Draw

OFFLOAD = {"offload": "optimizer,params"}


def deferred(seed: int, inside: bool = True):
    """A model, and an optimizer that is made inside of the block or after it."""
    with zerofx.deferred_init(exact=True):
        model, optimizer = built(seed)
    if inside:
        return model, optimizer
    groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
    return model, torch.optim.AdamW(groups)


def is_deferred(model) -> bool:
    """All but the scale, whose value was given, and the one without elements."""
    large = [one for one in model.parameters() if one.numel() > 1]
    return all(isinstance(one, DeferredParameter) for one in large)


def drawing_is_an_error():
    return mock.patch.object(Draw, "by_default", side_effect=AssertionError("drawn in vain"))


def load_deferred(path, stage, inside, options):
    """As ``load_and_train`` does, but nothing may draw random numbers."""
    torch._dynamo.reset()
    pair, compiled = deferred(1, inside), zero(stage, **options)
    with drawing_is_an_error():
        zerofx.load(path, *pair)
        assert is_deferred(pair[0])
        losses = train(compiled, pair, range(3, 5))
    assert len(LEDGER) == 0
    return losses, states(pair)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("stage", "inside", "tier"),
    [(0, True, ""), (1, False, ""), (3, False, ""), (3, True, "cpu"), (3, True, "nvme")],
)
def test_training_goes_on_bitwise(stage, inside, tier, ranks, tmp_path):  # noqa: F811
    saved = ranks(2).run(save_trained, str(tmp_path / "a"), stage)
    options = {**OFFLOAD, "offload_tier": tier} if tier else {}
    if tier == "nvme":
        options["offload_dir"] = [str(tmp_path)]
    loaded = ranks(2).run(load_deferred, str(tmp_path / "a"), stage, inside, options)
    for (losses, _, after), (new_losses, new_after) in zip(saved, loaded, strict=True):
        assert new_losses == losses
        assert_same(new_after, after)


def train_from_safetensors(path, is_late):
    torch._dynamo.reset()
    pair = deferred(1) if is_late else built(1)
    with drawing_is_an_error():
        zerofx.load_safetensors(path, pair[0])
        losses = train(zero(3), pair, range(2))
    return losses, states(pair)


@pytest.mark.nightly
def test_safetensors_are_read_when_parameters_are_made(ranks, tmp_path):  # noqa: F811
    path = str(zerofx.export_safetensors(tmp_path / "a", Everything(3)))
    plain = ranks(2).run(train_from_safetensors, path, False)
    late = ranks(2).run(train_from_safetensors, path, True)
    for one, other in zip(plain, late, strict=True):
        assert_same(other, one)


def save_deferred(folder):
    """Both formats, by ranks whose models would differ: rank 0's count."""
    rank = torch.distributed.get_rank()
    pair = deferred(5 + rank)
    zerofx.save(f"{folder}/saved", *pair)
    zerofx.save(f"{folder}/behind", *pair, asynchronous=True).wait()
    zerofx.export_safetensors(f"{folder}/exported", pair[0])
    assert is_deferred(pair[0])


@pytest.mark.nightly
def test_what_is_not_made_yet_can_be_saved(ranks, tmp_path):  # noqa: F811
    ranks(2).run(save_deferred, str(tmp_path))
    expected = states(built(5))
    for name in ("saved", "behind"):
        pair = built(1)
        zerofx.load(tmp_path / name, *pair)
        assert_same(states(pair), expected)
    model = Everything(1)
    zerofx.load_safetensors(tmp_path / "exported", model)
    assert_same(dict(model.state_dict()), dict(expected[0]))


def test_materialize_and_state_dict_read_too(tmp_path):
    expected, pair = states(built(5)), deferred(1)
    zerofx.save(tmp_path / "a", *built(5))
    zerofx.load(tmp_path / "a", *pair)
    assert_same(dict(pair[0].state_dict()), dict(expected[0]))
    assert is_deferred(pair[0])
    zerofx.materialize(pair[0])
    assert_same(dict(pair[0].state_dict()), dict(expected[0]))


def load_and_count(path, kind, changes_one):
    """The elements of parameters that this rank reads, and what the first steps make of them."""
    torch._dynamo.reset()
    pair, read = deferred(1), Counter()
    owner = Reader if kind == "saved" else OpenFile
    original = owner.read

    def counting(self, entry, wanted, into):
        read[entry] += into.numel()
        return original(self, entry, wanted, into)

    with mock.patch.object(owner, "read", counting), drawing_is_an_error():
        if kind == "saved":
            zerofx.load(path, pair[0])
        else:
            zerofx.load_safetensors(path, pair[0])
        read.clear()  # buffers, which are not deferred
        if changes_one and torch.distributed.get_rank() == 0:
            with torch.no_grad():
                pair[0].body.weight.copy_(torch.ones(5, 6))
        losses = train(zero(3), pair, range(2))
    return dict(read), losses, states(pair)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", only(("saved",), ["saved", "exported"]))
@pytest.mark.parametrize("changes_one", only((True,), [False, True]))
def test_each_rank_reads_its_part_or_takes_rank_0s(kind, changes_one, ranks, tmp_path):  # noqa: F811
    first = built(5)
    if kind == "saved":
        path = str(zerofx.save(tmp_path / "a", first[0]).wait())
    else:
        path = str(zerofx.export_safetensors(tmp_path / "a", first[0]))
    (read, losses, after), (other_read, *other) = ranks(2).run(
        load_and_count, path, kind, changes_one
    )
    if changes_one:
        with torch.no_grad():
            first[0].body.weight.fill_(1)
    expected = ranks(2).run(train_from, first[0].state_dict())
    assert (losses, other[0]) == (expected[0][0], expected[1][0])
    assert_same(after, expected[0][1])
    sizes = {name: one.numel() for name, one in first[0].named_parameters() if one.numel() > 1}
    total = sum(read.values()) + sum(other_read.values())
    if changes_one:  # rank 0 makes all, but the one that it has changed, and the other none
        assert total == sum(sizes.values()) - 30 and not sum(other_read.values())
    else:
        assert total == sum(sizes.values())
        assert all(sum(one.values()) < 0.6 * total for one in (read, other_read))


def train_from(state):
    torch._dynamo.reset()
    pair = built(1)
    pair[0].load_state_dict(state)
    losses = train(zero(3), pair, range(2))
    return losses, states(pair)


def load_and_save_in_a_block(folder: str) -> None:
    """A block may load, and save what it has made or loaded."""
    expected, root = states(built(5)), Path(folder)
    with zerofx.deferred_init(exact=True):
        pair = built(5)
        zerofx.save(root / "a" / "1", *pair, {"best": torch.ones(2)}).wait()
        zerofx.export_safetensors(root / "exported", pair[0])
    loads = {
        "load": lambda pair: zerofx.load(root / "a" / "1", *pair),
        "resume": lambda pair: zerofx.resume(root / "a", *pair),
        "load_safetensors": lambda pair: zerofx.load_safetensors(root / "exported", pair[0]),
    }
    for name, load in loads.items():
        with zerofx.deferred_init(exact=True):
            pair = built(1)
            extra = load(pair)
        assert is_deferred(pair[0])
        assert extra is None or torch.equal(extra["best"], torch.ones(2))
        zerofx.materialize(pair[0])
        assert_same(dict(pair[0].state_dict()), dict(expected[0]), name)


def load_a_state_in_a_block(path: str) -> None:
    with zerofx.deferred_init():
        pair = built(1)
        zerofx.load(path, *pair)
    zerofx.materialize(pair[0])
    assert_same(states(pair), states(trained_alone()))


def trained_alone():
    pair = built(5)
    step(*pair, torch.arange(6))
    return pair


@pytest.mark.parametrize("size", first(1, (1, 2)))
def test_a_block_loads_and_saves(size, ranks, tmp_path):  # noqa: F811
    path = zerofx.save(tmp_path / "trained", *trained_alone()).wait()
    ranks(size).run(load_and_save_in_a_block, str(tmp_path))
    ranks(size).run(load_a_state_in_a_block, str(path))


def test_what_does_not_fit_is_initialized(tmp_path):
    zerofx.save(tmp_path / "a", *built(5))
    with zerofx.deferred_init(exact=True):
        model = Everything(1)
        model.added = torch.nn.Linear(2, 2)
    zerofx.load(tmp_path / "a", model, strict=False)
    zerofx.materialize(model)
    assert_same(dict(model.body.state_dict()), dict(Everything(5).body.state_dict()))
    assert model.added.weight.abs().sum() > 0


@pytest.mark.nightly
def test_a_checkpoint_that_has_gone_is_an_error_before_anything_changes(tmp_path):
    zerofx.save(tmp_path / "a", *built(5))
    pair = deferred(1)
    zerofx.load(tmp_path / "a", *pair)
    shutil.rmtree(tmp_path / "a")
    compiled = zero(3)
    with pytest.raises(zerofx.StepError, match="is gone, and .* was to be made from it"):
        train(compiled, pair, range(1))
    assert is_deferred(pair[0])
    zerofx.save(tmp_path / "b", *built(5))
    zerofx.load(tmp_path / "b", *pair)
    assert train(compiled, pair, range(2)) == train(zero(3), built(5), range(2))


def flip_a_bit(file: Path) -> None:
    """In the middle of the largest tensor's numbers."""
    data = file.read_bytes()
    at = data.index(states(built(5))[0]["deep"].numpy().tobytes()) + 9
    file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


def rot(file: Path) -> None:
    """Have the disk flip one, which leaves the file's times as they were."""
    before = file.stat()
    flip_a_bit(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace_by_another(file: Path) -> None:
    shutil.rmtree(file.parent)
    zerofx.save(file.parent, *built(6), process_group=dist.new_group([0]))


HARMS = {
    "cut short": lambda file: os.truncate(file, file.stat().st_size - 3000),
    "flipped": flip_a_bit,
    "rotten": rot,
    "deleted": Path.unlink,
    "replaced": replace_by_another,
}


def train_from_harmed(root: str, harm: str) -> str:
    """What the first step says after a checkpoint was harmed that had been loaded; then go on."""
    torch._dynamo.reset()
    pair, compiled, good = deferred(1), zero(3), Path(root) / "good"
    zerofx.load(Path(root) / "a", *pair)
    dist.barrier()
    if dist.get_rank() == 0:
        (file,) = (Path(root) / "a").glob("*.distcp")
        HARMS[harm](file)
    dist.barrier()
    with pytest.raises((zerofx.StepError, zerofx.GraphError)) as caught:
        train(compiled, pair, range(1))
    assert is_deferred(pair[0])
    zerofx.load(good, *pair)
    expected = built(1)
    zerofx.load(good, *expected)
    assert train(compiled, pair, range(2)) == train(zero(3), expected, range(2))
    return str(caught.value)


CHANGED = "written to, or replaced, since zerofx.load checked it, and model."
HARMED = [("cut short", CHANGED), ("flipped", CHANGED), ("replaced", CHANGED)]
HARMED += [("deleted", "is gone, and model."), ("rotten", "is damaged where model.deep is")]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("harm", "words", "size"),
    first(
        1,
        [
            *((*one, 2) for one in HARMED),
            (*HARMED[-1], 1),
            *(exhaustive(*one, 1) for one in HARMED[:-1]),
        ],
    ),
)
def test_what_is_harmed_after_it_was_loaded_is_an_error_on_all_ranks(
    harm,
    words,
    size,
    ranks,  # noqa: F811
    tmp_path,
):
    for name in ("a", "good"):
        zerofx.save(tmp_path / name, *built(5))
    for said in ranks(size).run(train_from_harmed, str(tmp_path), harm):
        assert words in said


@pytest.mark.nightly
def test_one_that_is_still_to_be_read_outlives_a_later_save(tmp_path):
    zerofx.save(tmp_path / "a", *built(5), keep=1)
    pair = deferred(1)
    zerofx.load(tmp_path / "a", *pair)
    zerofx.save(tmp_path / "b", *pair, keep=1)
    assert train(zero(3), pair, range(2)) == train(zero(3), built(5), range(2))
    zerofx.save(tmp_path / "c", *pair, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("harm", ("cut short", "gone"))
def test_safetensors_that_are_written_to_are_an_error_and_removed_ones_are_read(harm, tmp_path):
    for name in ("a", "good"):
        zerofx.export_safetensors(tmp_path / name, Everything(5))
    model = deferred(1)[0]
    zerofx.load_safetensors(tmp_path / "a", model)
    if harm == "gone":
        shutil.rmtree(tmp_path / "a")
    else:
        os.truncate(tmp_path / "a" / "model.safetensors", 100)
        with pytest.raises(zerofx.StepError, match="written to since zerofx.load_safetensors"):
            zerofx.materialize(model)
        zerofx.load_safetensors(tmp_path / "good", model)
    zerofx.materialize(model)
    assert_same(dict(model.state_dict()), dict(Everything(5).state_dict()))


@pytest.mark.nightly
def test_two_ranks_and_one_agree(ranks, tmp_path):  # noqa: F811
    """Loaded into whatever is deferred, by others than those that saved."""
    ranks(2).run(save_trained, str(tmp_path / "a"), 3)
    plain = load_and_train(str(tmp_path / "a"), 3, False)
    losses, after = load_deferred(str(tmp_path / "a"), 3, True, {})
    assert losses == plain[0]
    assert_same(after, plain[2])
