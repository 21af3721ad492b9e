"""Whatever is wrong with a checkpoint is an error in words, on all ranks, and nothing is lost."""

from __future__ import annotations

import contextlib
import enum
import io
import json
import logging
import os
import pickle
import struct
import time
import zipfile
from pathlib import Path
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import zerofx
from tests.kit.checkpoints import pair_of, refused
from tests.kit.models import features, squared_loss
from tests.kit.ranks import Ranks, ranks_fixture  # noqa: F401
from zerofx.checkpoint import barrier, saving
from zerofx.checkpoint.folders import NOTES
from zerofx.errors import CheckpointError, MismatchError
from zerofx.runtime.parameters.registry import REGISTRY


@pytest.fixture
def path(tmp_path):
    """A checkpoint of ``pair_of()``."""
    zerofx.save(tmp_path / "good", *pair_of())
    return tmp_path / "good"


# What does not fit


def test_all_that_does_not_fit_is_listed(path):
    model, _ = pair_of(1, outputs=2)
    model.added = nn.Linear(2, 2)
    model.body = nn.Linear(6, 11, dtype=torch.float64)
    del model.head.bias
    model.head.register_parameter("bias", None)
    pair = model, torch.optim.SGD(model.parameters(), lr=0.1)
    words = refused(MismatchError, path, pair)
    for part in (
        "not in the checkpoint",
        "added.weight, added.bias",
        "only in the checkpoint (2): head.bias, optimizer state of head.bias",
        "head.weight (shape (3, 11) in the checkpoint, (2, 11) here)",
        "body.weight (torch.float32 in the checkpoint, torch.float64 here)",
        "strict=False",
    ):
        assert part in words, words


def test_without_strict_what_fits_is_loaded_and_the_rest_named(path, caplog):
    model, optimizer = pair_of(1)
    model.head = nn.Linear(11, 2)
    head = model.head.weight.detach().clone()
    with caplog.at_level(logging.WARNING, "zerofx"):
        zerofx.load(path, model, None, strict=False)
    expected = pair_of()[0].body.weight
    assert torch.equal(model.body.weight, expected) and torch.equal(model.head.weight, head)
    assert "head.weight (shape (3, 11)" in caplog.text and "head.bias" in caplog.text


def test_other_groups_are_refused(path, tmp_path):
    model, _ = pair_of()
    groups = [{"params": model.body.parameters()}, {"params": model.head.parameters()}]
    optimizer = torch.optim.AdamW(groups)
    zerofx.save(tmp_path / "two", model, optimizer)
    words = refused(MismatchError, tmp_path / "two", pair_of(1))
    assert "param_groups[0] of AdamW (its parameters are of groups [0, 1]" in words


def in_two_groups(**of_head):
    model, _ = pair_of(1)
    groups = [
        {"params": model.body.parameters()},
        {"params": model.head.parameters(), **of_head},
    ]
    return model, torch.optim.AdamW(groups, lr=0.5)


def test_groups_that_were_one_are_refused_where_they_differ(path, caplog):
    model, optimizer = in_two_groups(weight_decay=0.0)
    words = refused(MismatchError, path, (model, optimizer))
    for part in ("param_groups[0] of AdamW (", "param_groups[1] of AdamW (", "weight_decay"):
        assert part in words, words
    zerofx.load(path, model, optimizer, strict=False)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]
    assert "weight_decay" in caplog.text
    saved, its = pair_of()
    expected = its.state[saved.head.weight]["exp_avg"]
    assert torch.equal(optimizer.state[model.head.weight]["exp_avg"], expected)


def test_groups_that_were_one_and_are_alike_take_its_hyperparameters(path):
    model, optimizer = in_two_groups()
    zerofx.load(path, model, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 1e-2]


def test_a_parameter_of_two_optimizers_is_refused(path, tmp_path):
    model, one = pair_of()
    both = one, torch.optim.SGD(model.head.parameters(), lr=0.1)
    for function in (zerofx.save, zerofx.load):
        with pytest.raises(ValueError, match="'head.weight' is in two of the optimizers, AdamW a"):
            function(path if function is zerofx.load else tmp_path / "new", model, both)
    assert os.listdir(tmp_path) == ["good"]


def test_without_strict_states_of_another_shape_are_left_out(path, caplog):
    model, _ = pair_of(1)
    model.head = nn.Linear(11, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zerofx.load(path, model, optimizer, strict=False)
    assert model.body.weight in optimizer.state and model.head.weight not in optimizer.state
    assert "optimizer state of head.weight (its parameter has another shape" in caplog.text
    inputs, targets = features(0, 4)
    squared_loss(model, inputs, targets[:, :2]).backward()
    optimizer.step()


def test_states_of_another_dtype_are_refused(tmp_path):
    pair = pair_of()
    for state in pair[1].state.values():
        state["exp_avg"] = state["exp_avg"].bfloat16()
    zerofx.save(tmp_path / "narrow", *pair)
    words = refused(MismatchError, tmp_path / "narrow", pair_of(1))
    assert "state exp_avg of body.weight (torch.bfloat16 in the checkpoint, torch.float32" in words


def test_a_checkpoint_without_an_optimizer_says_so(tmp_path):
    model, optimizer = pair_of()
    zerofx.save(tmp_path / "model", model)
    words = refused(CheckpointError, tmp_path / "model", (model, optimizer))
    assert "has no optimizer" in words and "zerofx.load(path, model, None)" in words


def test_a_checkpoint_of_something_else_says_what_it_has(tmp_path):
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"weights": {"a": torch.zeros(2)}}, checkpoint_id=tmp_path / "other")
    words = refused(MismatchError, tmp_path / "other", pair_of())
    assert "no tensors under 'model'" in words and "it has weights" in words


def test_an_optimizer_of_another_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"group 0 of AdamW has a parameter .* not the model's"):
        zerofx.save(tmp_path / "a", pair_of()[0], pair_of()[1])
    assert os.listdir(tmp_path) == []


# Damaged files


def damage(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def data_file(path: Path) -> Path:
    (found,) = path.glob("*.distcp")
    return found


def test_a_file_cut_short_is_found_first(path):
    file = data_file(path)
    os.truncate(file, file.stat().st_size - 100)
    words = refused(CheckpointError, path, pair_of(1))
    assert "has been cut short" in words and str(file) in words and "another checkpoint" in words


def test_a_missing_file_is_found_first(path):
    data_file(path).unlink()
    words = refused(CheckpointError, path, pair_of(1))
    assert "cannot be read" in words and "No such file" in words


def test_every_flipped_bit_of_a_tensor_is_found(path):
    """torch's own reader takes them as they are."""
    file = data_file(path)
    with open(path / ".metadata", "rb") as metadata:
        storage = pickle.load(metadata).storage_data
    for index, info in storage.items():
        if index.fqn.endswith("exp_avg") or index.fqn == "model.body.weight":
            data = file.read_bytes()[info.offset : info.offset + info.length]
            inside = info.offset + middle_of_numbers(data)
            damage(file, inside)
            words = refused(CheckpointError, path, pair_of(1))
            assert "is damaged where" in words and index.fqn in words
            damage(file, inside)
    zerofx.load(path, *pair_of(1))


def middle_of_numbers(archive: bytes) -> int:
    """Where in what ``torch.save`` wrote the middle of the tensor's own bytes is."""
    records = zipfile.ZipFile(io.BytesIO(archive)).infolist()
    (record,) = (record for record in records if record.filename.endswith("data/0"))
    name, padding = struct.unpack_from("<HH", archive, record.header_offset + 26)
    return record.header_offset + 30 + name + padding + record.file_size // 2


@pytest.mark.parametrize("at", (10, 200, 2000))
def test_damaged_metadata_is_found(path, at):
    damage(path / ".metadata", at)
    words = refused(CheckpointError, path, pair_of(1))
    assert "CRC-32" in words
    (path / NOTES).unlink()  # as one that others have written
    before = pair_of(1)
    try:
        zerofx.load(path, *before)
    except (CheckpointError, FileNotFoundError) as error:
        assert str(path) in str(error)


def test_damaged_notes_are_found(path):
    (path / NOTES).write_text("{")
    assert "damaged" in refused(CheckpointError, path, pair_of(1))


@pytest.mark.parametrize("whose", ("torch", "zerofx"))
def test_a_newer_format_is_refused(path, whose):
    if whose == "zerofx":
        notes = json.loads((path / NOTES).read_text())
        (path / NOTES).write_text(json.dumps(notes | {"format": 2, "zerofx": "9.9"}))
        words = refused(CheckpointError, path, pair_of(1))
        assert "format 2, written by zerofx 9.9" in words
        return
    (path / NOTES).unlink()
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.version = "2.0.0"
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    words = refused(CheckpointError, path, pair_of(1))
    assert "is of format 2.0.0, and formats up to 1.0 are known here" in words


def test_holes_between_shards_are_found(path):
    (path / NOTES).unlink()
    metadata = pickle.loads((path / ".metadata").read_bytes())
    tensor = metadata.state_dict_metadata["model.body.weight"]
    tensor.chunks[0].sizes = torch.Size([10, 6])
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    words = refused(CheckpointError, path, pair_of(1))
    assert "each element of model.body.weight once (60 elements for 66)" in words


# What would run code


class Runs:
    """Unpickling it makes a folder."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def test_metadata_that_would_run_code_does_not(path, tmp_path):
    (path / NOTES).unlink()
    (path / ".metadata").write_bytes(pickle.dumps(Runs(tmp_path / "ran")))
    words = refused(CheckpointError, path, pair_of(1))
    assert "mkdir, which is no part of metadata" in words
    assert not (tmp_path / "ran").exists()


def test_values_that_would_run_code_do_not(tmp_path):
    model, optimizer = pair_of()
    optimizer.param_groups[0]["surprise"] = Runs(tmp_path / "ran")
    state = get_state_dict(model, optimizer)
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"model": state[0], "optimizer": state[1]}, checkpoint_id=tmp_path / "untrusted")
    words = refused(CheckpointError, tmp_path / "untrusted", pair_of(1))
    assert "runs no code from files" in words and "surprise" in words
    assert not (tmp_path / "ran").exists()


def test_files_elsewhere_are_not_read(path):
    (path / NOTES).unlink()
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../" + info.relative_path
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "points out of the checkpoint" in refused(CheckpointError, path, pair_of(1))


def test_checksums_are_written_where_a_script_has_switched_them_off(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        zerofx.save(tmp_path / "a", *pair_of(), extra={"it": [torch.ones(2)]})
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)
    zerofx.load(tmp_path / "a", *pair_of(1))


def test_what_could_not_be_read_again_is_not_saved(tmp_path):
    with pytest.raises(ValueError, match=r"extra\['it'\] is a Runs that cannot be read again"):
        zerofx.save(tmp_path / "a", *pair_of(), extra={"it": Runs(tmp_path / "ran")})
    assert os.listdir(tmp_path) == []


class Level(enum.IntEnum):
    HIGH = 1


def test_values_that_are_equal_are_not_the_same(tmp_path):
    extra = {"values": [0.0, -0.0, 1, True, 1.0, "1", None], "nothing": ""}
    alone = {f"{number}": value for number, value in enumerate(extra["values"])}
    zerofx.save(tmp_path / "a", *pair_of(), extra=extra | alone)
    found = zerofx.load(tmp_path / "a", *pair_of(1))
    assert [repr(found[name]) for name in alone] == [repr(value) for value in alone.values()]
    assert repr(found["values"]) == repr(extra["values"]) and found["nothing"] == ""
    for value, kind in ((Level.HIGH, "Level"), (1 << 3000, "int")):  # torch reads no longer ones
        with pytest.raises(ValueError, match=f"is a {kind} that cannot be read again"):
            zerofx.save(tmp_path / "b", *pair_of(), extra={"it": value})


def test_numbers_of_numpy_are_saved_as_those_of_python(tmp_path):
    model, optimizer = pair_of()
    optimizer.param_groups[0]["lr"] = numpy.float64(0.5)
    values = {"best": numpy.mean([1.0, 2.0]), "all": {numpy.int64(3): [numpy.bool_(True), 2]}}
    zerofx.save(tmp_path / "a", model, optimizer, extra=values)
    model, optimizer = pair_of(1)
    found = zerofx.load(tmp_path / "a", model, optimizer)
    assert repr(found) == "{'best': 1.5, 'all': {3: [True, 2]}}"
    assert repr(optimizer.param_groups[0]["lr"]) == "0.5"
    with pytest.raises(ValueError, match=r"extra\['it'\] is a ndarray that cannot be read again"):
        zerofx.save(tmp_path / "b", *pair_of(), extra={"it": numpy.ones(2)})


# Paths


@pytest.mark.parametrize("asynchronous", [False, True])
def test_tensors_of_other_kinds_are_read_again_as_they_were(asynchronous, tmp_path):
    extra = {
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.empty(2, device="meta"),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8),
        "strided": torch.arange(8)[::2],
        "conjugated": torch.tensor([1 + 2j]).conj(),
    }
    zerofx.save(tmp_path / "a", *pair_of(), extra, asynchronous=asynchronous)
    found = zerofx.load(tmp_path / "a", *pair_of(1))
    assert {name: repr(value) for name, value in found.items()} == {
        name: repr(value) for name, value in extra.items()
    }


def test_a_checkpoint_is_never_written_over(path):
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(FileExistsError, match="exists, and a checkpoint is never written over"):
        zerofx.save(path, *pair_of(1))
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("name", ("", "/", ".hidden", "s3://bucket/a"))
def test_what_is_no_path_is_refused(name):
    for function in (zerofx.save, zerofx.load):
        with pytest.raises(ValueError, match="cannot be a checkpoint's name|is no path"):
            function(name, *pair_of())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": None}, "model is None; expected a torch.nn.Module"),
        ({"model": [nn.Linear(1, 1)]}, "model is of type list; expected"),
        ({"optimizer": 5}, "optimizer is a int; expected a torch.optim.Optimizer"),
        ({"optimizer": [nn.Linear(1, 1)]}, "optimizer is a Linear"),
        ({"extra": [1]}, "extra is of type list; expected values by name"),
    ],
)
def test_arguments_of_other_types_are_refused(change, words, tmp_path):
    model, optimizer = pair_of()
    with pytest.raises(TypeError, match=words):
        zerofx.save(tmp_path / "a", **{"model": model, "optimizer": optimizer, **change})
    if "extra" not in change:
        for load in (zerofx.load, zerofx.resume):
            with pytest.raises(TypeError, match=words):
                load(tmp_path / "a", **{"model": model, "optimizer": optimizer, **change})
    assert os.listdir(tmp_path) == []


def test_where_there_is_no_checkpoint_the_words_help(path, tmp_path):
    assert "zerofx.latest" in refused(FileNotFoundError, tmp_path / "none", pair_of())
    assert "holds some: good" in refused(FileNotFoundError, tmp_path, pair_of())
    (tmp_path / "half").mkdir()
    assert "left half written" in refused(FileNotFoundError, tmp_path / "half", pair_of())


@pytest.mark.parametrize("keep", (0, -1, 2.5))
def test_keeping_none_is_refused(keep, tmp_path):
    with pytest.raises(ValueError, match="expected how many checkpoints to keep"):
        zerofx.save(tmp_path / "a", *pair_of(), keep=keep)


# Ranks that do not agree


def save_late(root: str) -> str:
    model = pair_of()[0]
    with mock.patch.object(REGISTRY.barrier, "join_timeout_s", 0.2):
        if dist.get_rank() == 1:
            time.sleep(0.6)
        return zerofx.save(Path(root) / "a", model).wait().name


def test_ranks_have_more_time_to_come_to_a_save_than_to_a_step(ranks, tmp_path):  # noqa: F811
    assert ranks(2).run(save_late, str(tmp_path)) == ["a", "a"]


def interrupt_and_save(root: str, where: str) -> str:
    """Rank 1 is interrupted in one save; then a connection is lost, and rank 0 has not noticed."""
    model, rank = pair_of()[0], dist.get_rank()
    zerofx.save(Path(root) / "first", model)
    owner = {"write_items": saving, "_receive": barrier.Ranks}[where]
    patched = mock.patch.object(owner, where, side_effect=KeyboardInterrupt)
    with patched if rank == 1 else contextlib.nullcontext():
        with pytest.raises(KeyboardInterrupt if rank == 1 else CheckpointError):
            zerofx.save(Path(root) / "interrupted", model)
    dist.barrier()
    zerofx.save(Path(root) / "again", model)
    if rank == 1:
        for _, known in barrier.Ranks._known.values():
            known._group = None
    zerofx.save(Path(root) / "last", model)
    dist.barrier()
    return zerofx.latest(root).name


@pytest.mark.parametrize("where", ("_receive", "write_items"))
def test_ranks_connect_anew_when_they_have_lost_each_other(where, ranks, tmp_path):  # noqa: F811
    assert ranks(2).run(interrupt_and_save, str(tmp_path), where) == ["last", "last"]
    assert set(os.listdir(tmp_path)) == {"first", "again", "last"}


def disagree(root: str, what: str) -> str:
    rank = dist.get_rank()
    pair = pair_of()
    shared = Path(root) / "shared"
    if what == "save":
        with pytest.raises(ValueError) as caught:
            zerofx.save(Path(root) / f"of-{rank}", *pair)
    elif what == "load":
        zerofx.save(shared, *pair)
        with pytest.raises(ValueError) as caught:
            zerofx.load(shared if rank else Path(root) / "other", *pair)
    else:
        with pytest.raises(ValueError) as caught:
            zerofx.save(shared, *pair, extra={"it": Runs("") if rank else 1})
    return str(caught.value)


@pytest.mark.parametrize("what", ("save", "load", "extra"))
def test_what_one_rank_gives_alone_is_an_error_on_all(what, ranks, tmp_path):  # noqa: F811
    first, second = ranks(2).run(disagree, str(tmp_path), what)
    if what == "extra":
        assert first == f"on rank 1: {second}"
        assert os.listdir(tmp_path) == []
    else:
        assert first == second and "different values of path (rank 0: " in first
