"""Plain torch.distributed.checkpoint, FSDP2 and single files read what is saved here, and back."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import zerofx
from tests.kit.checkpoints import assert_same, step, train, zero
from tests.kit.ranks import ranks_fixture  # noqa: F401


class Shardable(nn.Module):
    """What FSDP2 takes: no 0-dim parameters."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 5)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.deep = nn.Parameter(torch.randn(2, 3, 2, 2))
        self.frozen = nn.Parameter(torch.randn(3, 2), requires_grad=False)
        self.register_buffer("table", torch.randn(3))

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(x).logsumexp(-1).mean() + self.body(x).mean() + self.deep.square().sum()


def pair_of(seed: int):
    model = Shardable(seed)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2 * (1 + seed))


def fsdp(seed: int):
    model = Shardable(seed)
    fully_shard(model.body)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2 * (1 + seed))


def whole(value):
    """Plain whole tensors, copied."""
    if isinstance(value, dict):
        return {key: whole(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [whole(inner) for inner in value]
    if isinstance(value, torch.Tensor):
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        return value.detach().clone()
    return value


def named_states(pair) -> dict:
    """The state dicts with parameters' names, whole."""
    model, optimizer = get_state_dict(*pair)
    return {"model": whole(model), "optimizer": whole(optimizer)}


def named_here(pair) -> dict:
    """The same of a pair that is sharded here."""
    model, optimizer = copy.deepcopy((pair[0].state_dict(), pair[1].state_dict()))
    names = [name for name, _ in pair[0].named_parameters()]
    optimizer["state"] = {names[number]: state for number, state in optimizer["state"].items()}
    for group in optimizer["param_groups"]:
        group["params"] = [names[number] for number in group["params"]]
    return {"model": dict(model), "optimizer": optimizer}


def save_here(path, stage: int):
    torch._dynamo.reset()
    pair = pair_of(0)
    train(zero(stage), pair, range(2))
    zerofx.save(path, *pair)
    return named_here(pair)


def load_with_fsdp(path):
    pair = fsdp(1)
    model, optimizer = get_state_dict(*pair)
    found = {"model": model, "optimizer": optimizer}
    dcp.load(found, checkpoint_id=path)
    set_state_dict(*pair, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    return named_states(pair)


def save_with_fsdp(path, root: str):
    pair = fsdp(0)
    for number in range(2):
        step(*pair, torch.arange(6) + number)
    model, optimizer = get_state_dict(*pair)
    dcp.save({"model": model, root: optimizer}, checkpoint_id=path)
    return named_states(pair)


def load_here(path, stage: int, is_bound: bool):
    torch._dynamo.reset()
    pair = pair_of(1)
    compiled = zero(stage)
    if is_bound:
        train(compiled, pair, range(1))
    zerofx.load(path, *pair)
    loaded = named_here(pair)
    train(compiled, pair, range(1))
    return loaded


@pytest.mark.nightly
@pytest.mark.parametrize(("size", "stage", "fsdp_size"), [(2, 3, 3), (3, 1, 2), (1, 0, 1)])
def test_fsdp2_loads_what_is_saved_here(size, stage, fsdp_size, ranks, tmp_path):  # noqa: F811
    saved = ranks(size).run(save_here, tmp_path / "here", stage)
    for loaded in ranks(fsdp_size).run(load_with_fsdp, tmp_path / "here"):
        assert_same(loaded, saved[0])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fsdp_size", "size", "stage", "is_bound", "root"),
    [(2, 3, 3, True, "optimizer"), (3, 2, 2, False, "optim"), (1, 2, 0, True, "optimizer")],
)
def test_what_fsdp2_saves_is_loaded_here(
    fsdp_size,
    size,
    stage,
    is_bound,
    root,
    ranks,
    tmp_path,  # noqa: F811
):
    saved = ranks(fsdp_size).run(save_with_fsdp, tmp_path / "fsdp", root)
    for loaded in ranks(size).run(load_here, tmp_path / "fsdp", stage, is_bound):
        assert_same(loaded, saved[0])


@pytest.mark.nightly
def test_one_file_and_one_process_read_what_two_ranks_save(ranks, tmp_path):  # noqa: F811
    saved = ranks(2).run(save_here, tmp_path / "here", 3)[0]
    dcp_to_torch_save(tmp_path / "here", tmp_path / "file.pt")
    read = torch.load(tmp_path / "file.pt", weights_only=True)
    assert read.pop("rng").keys() == {"0", "1"}
    assert_same(read, saved)
    found = {"model": {name: torch.zeros_like(v) for name, v in saved["model"].items()}}
    dcp.load(found, checkpoint_id=tmp_path / "here", no_dist=True)
    assert_same(found["model"], saved["model"])


@pytest.mark.nightly
def test_a_single_file_is_loaded_by_way_of_torchs_converter(ranks, tmp_path):  # noqa: F811
    saved = ranks(1).run(save_here, tmp_path / "here", 3)[0]
    torch.save(saved, tmp_path / "file.pt")
    torch_save_to_dcp(tmp_path / "file.pt", tmp_path / "converted")
    for loaded in ranks(2).run(load_here, tmp_path / "converted", 3, False):
        assert_same(loaded, saved)
