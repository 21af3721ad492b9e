"""Exports are what Hugging Face reads, and its files are read here, each rank its own bytes."""

from __future__ import annotations

import copy
import errno
import os
import struct
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    GPT2Config,
    LlamaConfig,
)

import zerofx
from tests.kit.checkpoints import Everything, assert_same, built, file_size_limit, train, zero
from tests.kit.covering import exhaustive, first, nightly
from tests.kit.ranks import ranks_fixture  # noqa: F401
from zerofx.checkpoint import safetensors
from zerofx.checkpoint.pieces import Piece, Range


def export(root: str, stage: int, file_bytes: int) -> dict:
    """Train, and export; the values."""
    torch._dynamo.reset()
    pair = built()
    train(zero(stage), pair, range(1))
    assert (
        zerofx.export_safetensors(Path(root) / "out", pair[0], file_bytes=file_bytes)
        == Path(root) / "out"
    )
    return dict(pair[0].state_dict())


@pytest.mark.slow(reason="ranks compile and train")
@pytest.mark.parametrize(("size", "stage", "file_bytes"), first(1, [(2, 3, 1 << 30), (3, 1, 300)]))
def test_the_library_reads_what_all_ranks_write(
    size,
    stage,
    file_bytes,
    ranks,  # noqa: F811
    tmp_path,
):
    saved = ranks(size).run(export, str(tmp_path), stage, file_bytes)[0]
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert (len(files) > 1) == (file_bytes == 300)
    found = {name: value for file in files for name, value in load_file(file).items()}
    assert_same(dict(sorted(found.items())), dict(sorted(saved.items())))
    assert all(load_file(file) for file in files)


def load_here(path: str, stage: int, is_bound: bool) -> dict:
    torch._dynamo.reset()
    pair, compiled = built(1), zero(stage)
    if is_bound:
        train(compiled, pair, range(1))
    zerofx.load_safetensors(path, pair[0])
    found = copy.deepcopy(dict(pair[0].state_dict()))
    train(compiled, pair, range(1))
    return found


@pytest.mark.slow(reason="a step is compiled for each way to name a file")
@pytest.mark.parametrize(
    ("size", "stage", "is_bound"),
    [(1, 3, True), nightly(2, 3, True), nightly(2, 1, True), nightly(3, 3, False)],
)
def test_files_of_others_are_loaded(size, stage, is_bound, ranks, tmp_path):  # noqa: F811
    expected = {name: value.contiguous() for name, value in Everything().state_dict().items()}
    file = tmp_path / "model.safetensors"
    save_file({name: v.clone() for name, v in expected.items() if name != "head.weight"}, file)
    for path in (file, tmp_path):
        arguments = str(path), stage, is_bound
        alone = size == 1
        for found in [load_here(*arguments)] if alone else ranks(size).run(load_here, *arguments):
            assert_same(found, expected)
        is_bound = not is_bound


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=33,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def test_from_pretrained_gives_the_same_logits(tmp_path):
    model, tokens = llama(), torch.arange(7)[None]
    expected = model(tokens).logits
    for file_bytes in (1 << 30, 2000):
        path = zerofx.export_safetensors(tmp_path / str(file_bytes), model, file_bytes=file_bytes)
        again = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        assert torch.equal(again(tokens).logits, expected)
    other = AutoModelForCausalLM.from_config(model.config).eval()
    model.save_pretrained(tmp_path / "theirs")
    zerofx.load_safetensors(tmp_path / "theirs", other)
    assert torch.equal(other(tokens).logits, expected)


SIZES = {"vocab_size": 33, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIGS = {
    "gpt2": GPT2Config(vocab_size=33, n_positions=16, n_embd=12, n_layer=2, n_head=2),  # tied
    "bert": BertConfig(**SIZES, intermediate_size=20, max_position_embeddings=16),  # tied
    "llama": LlamaConfig(**SIZES, intermediate_size=20, num_key_value_heads=1),
}


def language_step(model, optimizer, tokens):
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def train_and_export(path: str, name: str, file_bytes: int) -> tuple[torch.Tensor, ...]:
    """Logits of a model before it is trained, after that, and as ``from_pretrained`` gives it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    kind = AutoModelForMaskedLM if name == "bert" else AutoModelForCausalLM
    model = kind.from_config(CONFIGS[name])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"stage": 3, "lowering": "eager"}
    compiled = torch.compile(language_step, backend="zero", options=options)

    def logits(one: nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return one.eval()(input_ids=torch.arange(7)[None]).logits

    before = logits(model)
    model.train()
    for number in range(2):
        generator = torch.Generator().manual_seed(2 * number + dist.get_rank())
        compiled(model, optimizer, torch.randint(0, 33, (2, 9), generator=generator))
    zerofx.export_safetensors(path, model, file_bytes=file_bytes)
    read = kind.from_pretrained(path, dtype=torch.float32)
    assert (len(list(Path(path).glob("*.safetensors"))) > 1) == (file_bytes < 1 << 20)
    with zerofx.full_params(model):
        return before, logits(model), logits(read)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "file_bytes"), [("gpt2", 1 << 30), exhaustive("bert", 8000), ("llama", 8000)]
)
def test_from_pretrained_gives_the_logits_of_a_sharded_training(
    name,
    file_bytes,
    ranks,  # noqa: F811
    tmp_path,
):
    for before, trained, read in ranks(2).run(
        train_and_export, str(tmp_path / "out"), name, file_bytes
    ):
        assert torch.equal(read, trained)
        assert not torch.allclose(trained, before)


class Noted(nn.Linear):
    """Has in its state dict what is no tensor, and a tensor that is made when it is asked for."""

    def __init__(self, scale: float):
        super().__init__(2, 2)
        self.scale, self.calls = scale, int(scale)

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "scale"] = torch.tensor(self.scale)
        destination[prefix + "history"] = [self.scale]

    def _load_from_state_dict(self, state_dict, prefix, *arguments):
        self.scale = float(state_dict.pop(prefix + "scale", self.scale))
        state_dict.pop(prefix + "history", None)
        super()._load_from_state_dict(state_dict, prefix, *arguments)


@pytest.mark.parametrize("prefix", (False, True))
def test_what_a_state_dict_makes_anew_is_given_to_the_model(prefix, tmp_path, caplog):
    def made(scale):
        model = nn.Sequential(Noted(scale))
        if prefix:
            model[0] = torch.compile(model[0], backend="eager")
        return model

    zerofx.save(tmp_path / "saved", made(3.0))
    zerofx.export_safetensors(tmp_path / "exported", made(3.0))
    for load, name, calls in ((zerofx.load, "saved", 3), (zerofx.load_safetensors, "exported", 1)):
        model = made(1.0)
        load(tmp_path / name, model)
        assert (model[0].scale, model[0].calls) == (3.0, calls)
    assert not [record for record in caplog.records if "takes no" in record.getMessage()]


def test_what_a_model_makes_anew_and_does_not_take_is_named(tmp_path, caplog):
    class Written(nn.Linear):
        value = 1.0

        def _save_to_state_dict(self, destination, prefix, keep_vars):
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "written"] = torch.tensor(self.value)

    model = Written(2, 2)
    zerofx.save(tmp_path / "a", model)
    zerofx.load(tmp_path / "a", model)
    assert not caplog.text
    model.value = 2.0
    zerofx.load(tmp_path / "a", model)
    assert "load_state_dict() takes no written" in caplog.text


def test_what_does_not_fit_is_listed_and_nothing_changes(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(3, 2), "more": torch.ones(1)}, file)
    model = torch.nn.Linear(2, 2)
    before = model.weight.detach().clone()
    with pytest.raises(zerofx.MismatchError) as caught:
        zerofx.load_safetensors(file, model)
    for part in ("(1): bias", "(1): more", "weight (shape (3, 2) in the file, (2, 2) here)"):
        assert part in str(caught.value)
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("harm", ("cut", "length", "range", "text"))
def test_damaged_files_are_refused(harm, tmp_path):
    model = torch.nn.Linear(2, 2)
    zerofx.export_safetensors(tmp_path / "a", model)
    file = tmp_path / "a" / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(
        {
            "cut": data[:-3],
            "length": struct.pack("<Q", 1 << 60) + data[8:],
            "range": data.replace(b'"data_offsets": [0, 16]', b'"data_offsets": [0, 15]'),
            "text": data[:8] + b"}" + data[9:],
        }[harm]
    )
    with pytest.raises(zerofx.CheckpointError, match="cannot be read.*fetch it again"):
        zerofx.load_safetensors(file, model)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (0, 2, 1), (1, 2, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_a_rank_writes_its_own_bytes_and_no_others(order, dtype, tmp_path):
    shape = (5, 3, 4)
    whole = torch.arange(60).reshape(shape).remainder(7).to(dtype)
    in_order = whole.permute(order).reshape(-1)
    length, at = 60 * dtype.itemsize, 7
    mine = torch.zeros(60, dtype=torch.bool)
    mine[11:48] = True
    mine = mine.view([shape[dim] for dim in order]).permute(sorted(range(3), key=order.__getitem__))
    expected = torch.full((60, dtype.itemsize), 0xAA, dtype=torch.uint8)
    chosen = mine.reshape(-1)
    expected[chosen] = whole.reshape(-1).view(torch.uint8).view(60, -1)[chosen]
    path = tmp_path / "file"
    path.write_bytes(b"\xaa" * (at + length + 5))
    piece = Piece(Range(shape, order, 11, 48), dtype, lambda: in_order[11:48])
    with mock.patch.object(safetensors, "STAGING_BYTES", 24):
        descriptor = os.open(path, os.O_WRONLY)
        safetensors._copy_part(descriptor, at, piece, rank=1)
        os.close(descriptor)
    written = path.read_bytes()
    assert written[at:-5] == expected.numpy().tobytes()
    assert written[:at] == b"\xaa" * at and written[-5:] == b"\xaa" * 5


def test_an_export_maps_no_file(tmp_path):
    with mock.patch.object(torch, "from_file", side_effect=AssertionError("mapped")):
        zerofx.export_safetensors(tmp_path / "a", nn.Linear(2, 3))


def test_a_full_disk_leaves_nothing(tmp_path):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with mock.patch("os.posix_fallocate", side_effect=full):
        with pytest.raises(
            zerofx.CheckpointError, match="No space left.*written of this one is removed"
        ):
            zerofx.export_safetensors(tmp_path / "a", torch.nn.Linear(2, 2))
    assert os.listdir(tmp_path) == []


def export_without_room(root: str) -> str:
    """The kernel refuses to make files longer than a limit of this process; then it does not."""
    torch._dynamo.reset()
    pair, path = built(), Path(root) / "out"
    train(zero(3), pair, range(1))
    with file_size_limit(900, ranks=[0]), pytest.raises(zerofx.CheckpointError) as caught:
        zerofx.export_safetensors(path, pair[0])
    dist.barrier()
    assert os.listdir(root) == []
    zerofx.export_safetensors(path, pair[0])
    found = load_file(path / "model.safetensors")
    assert_same(dict(sorted(found.items())), dict(sorted(pair[0].state_dict().items())))
    return str(caught.value)


@pytest.mark.nightly
def test_files_that_the_kernel_refuses_leave_nothing(ranks, tmp_path):  # noqa: F811
    for words in ranks(2).run(export_without_room, str(tmp_path)):
        assert "File too large" in words


def test_what_has_no_files_or_no_such_dtype_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="no model.safetensors or"):
        zerofx.load_safetensors(tmp_path, torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="torch.complex64, which safetensors does not have"):
        zerofx.export_safetensors(tmp_path / "a", torch.nn.Linear(2, 2, dtype=torch.complex64))
    assert os.listdir(tmp_path) == []


def test_reading_without_the_library_says_what_to_install(tmp_path):
    path = zerofx.export_safetensors(tmp_path / "a", torch.nn.Linear(2, 2))
    with mock.patch.dict("sys.modules", {"safetensors": None}):
        with pytest.raises(zerofx.CheckpointError, match=r"pip install 'zerofx\[safetensors\]'"):
            zerofx.load_safetensors(path, torch.nn.Linear(2, 2))
