"""Modules whose hooks compute entries of the state dict from parameters, as fused matrices do."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

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


class Turned(nn.Module):
    """A square matrix that its state dict has transposed, by the same name."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.register_state_dict_post_hook(self._turn)
        self.register_load_state_dict_pre_hook(self._turn)

    def forward(self, tokens):
        return (nn.functional.one_hot(tokens % 6, 6).float() @ self.weight).square().mean()

    @staticmethod
    def _turn(module, state, prefix, *_others):
        if f"{prefix}weight" in state:
            state[f"{prefix}weight"] = state[f"{prefix}weight"].t().clone()


class Wrapped(nn.Module):
    """All kinds at once: a wrapper whose hook renames, a hook of the whole, a state of its own."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layer, self.turned = checkpoint_wrapper(Fused()), Turned()
        self.register_state_dict_post_hook(lambda *_arguments: None)

    def forward(self, tokens):
        return self.layer(tokens) + self.turned(tokens)

    def get_extra_state(self):
        return {"size": self.turned.weight.numel()}

    def set_extra_state(self, state):
        self.size = state["size"]


MODELS = {"fused": Model, "wrapped": Wrapped}


def pair_of(kind, seed):
    model = MODELS[kind](seed)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained(kind, folder, is_bound):
    """Train and save; have another model, trained itself or not, load it; return what both are."""
    torch._dynamo.reset()
    pair, other, tokens = pair_of(kind, 0), pair_of(kind, 1), torch.arange(6)
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
    return [{n: w.clone() for n, w in tensors_of(one)} for one, _ in (pair, other)]


def tensors_of(model):
    return [(n, w) for n, w in model.state_dict().items() if isinstance(w, torch.Tensor)]


def saved_names(folder):
    names = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {name.removeprefix("model.") for name in names if name.startswith("model.")}


@pytest.mark.slow(reason="ranks trace two steps")
@pytest.mark.parametrize("is_bound", [True, False])
@pytest.mark.parametrize("kind", MODELS)
def test_a_parameter_is_saved_by_its_own_name(kind, is_bound, ranks, tmp_path):  # noqa: F811
    (one, other), its = ranks(2).run(trained, kind, tmp_path / "a", is_bound)
    assert {"layer.scale", "layer.first", "layer.second"} < set(one)
    assert_same(one, other)
    assert_same(its, [one, other])
    names = saved_names(tmp_path / "a")
    assert "layer.both.weight" in names and "layer.first" not in names
    if is_bound:
        zerofx.load_safetensors(f"{tmp_path}/a-exported", model := MODELS[kind](2))
        assert_same(dict(tensors_of(model)), one)


def loaded_late(folder):
    """Load what hooks have written into a model that is sharded already."""
    torch._dynamo.reset()
    pair = pair_of("wrapped", 1)
    zero(stage=3)(*pair, torch.arange(6))
    before = dict(tensors_of(pair[0]))
    for load, name in ((zerofx.load, "a"), (zerofx.load_safetensors, "b")):
        with pytest.raises(zerofx.MismatchError, match="turned.weight .* first compiled call"):
            load(folder / name, pair[0])
    assert_same(dict(tensors_of(pair[0])), before)


@pytest.mark.slow(reason="ranks trace a step")
def test_what_hooks_have_written_is_not_read_in_place(ranks, tmp_path):  # noqa: F811
    zerofx.save(tmp_path / "a", model := Wrapped(0))
    zerofx.export_safetensors(tmp_path / "b", model)
    ranks(2).run(loaded_late, tmp_path)


@pytest.mark.parametrize("kind", ["torch", "zerofx", "safetensors"])
@pytest.mark.parametrize("model", MODELS)
def test_what_hooks_have_written_is_given_to_the_model(kind, model, tmp_path):
    written, other = MODELS[model](0), MODELS[model](1)
    if kind == "torch":
        tensors = dict(tensors_of(written))
        dcp.save({"model": tensors}, checkpoint_id=tmp_path / "a", no_dist=True)
        zerofx.load(tmp_path / "a", other, strict=model == "fused")
    elif kind == "zerofx":
        zerofx.save(tmp_path / "a", written)
        zerofx.load(tmp_path / "a", other)
        assert model == "fused" or other.size == 36
    else:
        zerofx.export_safetensors(tmp_path / "a", written)
        zerofx.load_safetensors(tmp_path / "a", other)
    assert_same(dict(tensors_of(other)), dict(tensors_of(written)))


def test_a_hook_that_renames_or_drops_is_followed(tmp_path):
    def rename(module, state, prefix, _metadata):
        state["other"] = state.pop("weight")
        del state["bias"]

    model = nn.Linear(2, 2)
    model.register_state_dict_post_hook(rename)
    zerofx.save(tmp_path / "a", model)
    assert saved_names(tmp_path / "a") == {"other"}
    assert list(model._state_dict_hooks.values()) == [rename]
