"""Modules whose hooks compute entries of the state dict from parameters, as fused matrices do."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import zerofx
from tests.kit.checkpoints import assert_same, zero
from tests.kit.ranks import ranks_fixture  # noqa: F401


class Fused(nn.Module):
    """Two matrices in one, which its state dict has apart; and a buffer that stays what it is."""

    def __init__(self):
        super().__init__()
        self.both = nn.Linear(6, 8, bias=False)
        self.register_buffer("scale", torch.ones(1))
        self.register_state_dict_post_hook(self._split)
        self.register_load_state_dict_pre_hook(self._merge)

    def forward(self, tokens):
        return self.scale * self.both(nn.functional.one_hot(tokens % 6, 6).float()).square().mean()

    @staticmethod
    def _split(module, state, prefix, _metadata):
        both = state.pop(f"{prefix}both.weight").reshape(2, 4, 6)
        state[f"{prefix}first"], state[f"{prefix}second"] = both[0].clone(), both[1].clone()

    @staticmethod
    def _merge(module, state, prefix, *_others):
        parts = [state.pop(f"{prefix}{name}", None) for name in ("first", "second")]
        if parts[0] is not None:
            state[f"{prefix}both.weight"] = torch.cat(parts)


class Model(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layer, self.out = Fused(), nn.Linear(1, 1)

    def forward(self, tokens):
        return self.out(self.layer(tokens)).sum()


def pair_of(seed=0):
    model = Model(seed)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained(seed, folder, is_bound):
    """Train and save; have another model, trained itself or not, load it; return what both are."""
    torch._dynamo.reset()
    pair, other, tokens = pair_of(seed), pair_of(seed + 1), torch.arange(6)
    run = zero(stage=3)
    run(*pair, tokens)
    zerofx.save(folder, *pair)
    if is_bound:
        run(*other, tokens)
    zerofx.load(folder, *other)
    with zerofx.full_params(pair[0]):
        zerofx.export_safetensors(f"{folder}-exported", pair[0])
    if not is_bound:
        run(*other, tokens)
        run(*pair, tokens)
    return [{n: w.clone() for n, w in one.state_dict().items()} for one, _ in (pair, other)]


@pytest.mark.slow(reason="ranks trace two steps")
@pytest.mark.parametrize("is_bound", [True, False])
def test_a_parameter_is_saved_by_its_own_name(is_bound, ranks, tmp_path):  # noqa: F811
    (one, other), its = ranks(2).run(trained, 0, tmp_path / "a", is_bound)
    assert list(one) == ["layer.scale", "layer.first", "layer.second", "out.weight", "out.bias"]
    assert_same(one, other)
    assert_same(its, [one, other])
    names = dcp.FileSystemReader(tmp_path / "a").read_metadata().state_dict_metadata
    assert {"model.layer.both.weight", "optimizer.state.layer.both.weight.exp_avg"} <= set(names)
    assert "model.layer.first" not in names
    zerofx.load_safetensors(f"{tmp_path}/a-exported", model := Model(2))
    if is_bound:
        assert_same(dict(model.state_dict()), one)


@pytest.mark.parametrize("kind", ["checkpoint", "safetensors"])
def test_what_hooks_have_written_is_given_to_the_model(kind, tmp_path):
    written, model = Model(0), Model(1)
    if kind == "checkpoint":
        dcp.save({"model": written.state_dict()}, checkpoint_id=tmp_path / "a", no_dist=True)
        zerofx.load(tmp_path / "a", model)
    else:
        zerofx.export_safetensors(tmp_path / "a", written)
        zerofx.load_safetensors(tmp_path / "a", model)
    assert_same(model.state_dict(), written.state_dict())


def test_a_hook_that_renames_or_drops_is_followed(tmp_path):
    def rename(module, state, prefix, _metadata):
        state["other"] = state.pop("weight")
        del state["bias"]

    model = nn.Linear(2, 2)
    model.register_state_dict_post_hook(rename)
    zerofx.save(tmp_path / "a", model)
    names = dcp.FileSystemReader(tmp_path / "a").read_metadata().state_dict_metadata
    assert {name for name in names if name.startswith("model.")} == {"model.other"}
    assert type(model.weight) is nn.Parameter and not model.weight.is_meta
