"""Compiled steps that keep an optimizer's numbers otherwise: training, checkpoints, refusals."""

import copy

import pytest
import torch
from torch import nn

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
from tests.kit.covering import first
from tests.kit.models import features
from tests.kit.ranks import ranks_fixture  # noqa: F401
from tests.kit.trainings import program_of
from zerofx.codegen.rewrite.storage import MASTER
from zerofx.runtime.access import full_params, unshard
from zerofx.runtime.optimizer import precision

CHOICES = {
    "masters": {"master_weights": True},
    "rounded": {"stochastic_rounding": True},
    "bfloat16 moments": {"moment_dtype": "bfloat16"},
    "int8 moments": {"moment_dtype": "int8"},
    "masters, int8 moments": {"master_weights": True, "moment_dtype": "int8"},
}


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()


class Wide(nn.Module):
    """Weights of so many elements that a kernel updates them, and in eight bits."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 1600), nn.Linear(1600, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def step(model, optimizer, x, y):
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def zero(stage=3, lowering="eager", **options):
    return torch.compile(
        step, backend="zero", options={"stage": stage, "lowering": lowering, **options}
    )


def built(dtype=torch.bfloat16):
    torch.manual_seed(0)
    model = Wide().to(dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(compiled, pair, numbers):
    dtype = next(pair[0].parameters()).dtype
    batches = ([part.to(dtype) for part in features(number, 8)] for number in numbers)
    return [compiled(*pair, *batch).float().item() for batch in batches]


def trained_and_saved(options, stage, dtype):
    torch._dynamo.reset()
    pair = built(dtype)
    losses = train(zero(stage, **options), pair, range(6))
    return losses, pair[0].state_dict(), pair[1].state_dict()


def resumed(options, stage, dtype, saved):
    """Three steps on from a checkpoint, loaded after a first step as its error says."""
    torch._dynamo.reset()
    pair = built(dtype)
    compiled = zero(stage, **options)
    train(compiled, pair, range(1))
    for one, state in zip(pair, saved, strict=True):
        one.load_state_dict(copy.deepcopy(state))
    return train(compiled, pair, range(6, 9)), pair[0].state_dict(), pair[1].state_dict()


@pytest.mark.nightly
@pytest.mark.parametrize("stage", (pytest.param(1, marks=pytest.mark.exhaustive), 3))
@pytest.mark.parametrize("name", first(1, CHOICES))
def test_two_ranks_train_save_and_resume(name, stage, ranks):  # noqa: F811
    options = CHOICES[name]
    dtype = torch.float32 if name.endswith("moments") and len(options) == 1 else torch.bfloat16
    found = ranks(2).run(trained_and_saved, options, stage, dtype)
    alone = built(torch.float32)
    expected = train(step, alone, range(6))
    for losses, model_state, optimizer_state in found:
        assert losses == pytest.approx(expected, rel=0.05)
        for state in optimizer_state["state"].values():
            assert (MASTER in state) == ("master_weights" in options)
            names = {"step", "exp_avg", "exp_avg_sq"} | ({MASTER} & state.keys())
            assert state.keys() == names
            moment = torch.bfloat16 if name == "rounded" else torch.float32
            assert state["exp_avg"].dtype is state["exp_avg_sq"].dtype is moment
        again = ranks(2).run(resumed, options, stage, dtype, (model_state, optimizer_state))
        for losses, *_ in again:
            assert losses == pytest.approx(train(step, copy.deepcopy(alone), range(6, 9)), rel=0.05)
        plain = built(dtype)  # torch casts states to its parameters' dtype, and ignores a master
        plain[0].load_state_dict(model_state)
        plain[1].load_state_dict(copy.deepcopy(optimizer_state))
        continued = train(step, plain, range(6, 9))
        assert continued == pytest.approx(losses, rel=0.05)


@pytest.mark.parametrize("name", first(1, ["masters", "rounded", "bfloat16 moments"]))
def test_a_checkpoint_continues_bitwise(name):
    options = CHOICES[name]
    dtype = torch.float32 if name == "bfloat16 moments" else torch.bfloat16
    one = built(dtype)
    compiled = zero(**options)
    train(compiled, one, range(4))
    saved = [copy.deepcopy(part.state_dict()) for part in one]
    expected = train(compiled, one, range(4, 8))
    other = built(dtype)
    again = zero(**options)
    train(again, other, range(2))
    for part, state in zip(other, saved, strict=True):
        part.load_state_dict(state)
    assert train(again, other, range(4, 8)) == expected


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.scale = nn.Linear(6, 3), nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.scale * self.body(x)


class Counting(torch.optim.Optimizer):
    """Keeps how often it has stepped by another name than torch's own do, and reads it."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.125})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state.setdefault("count", torch.zeros(())).add_(1)
            p.sub_(p.grad.sign(), alpha=self.param_groups[0]["lr"] / state["count"].item())


@pytest.mark.slow(reason="steps are compiled and run")
@pytest.mark.parametrize("kind", first(1, [torch.optim.AdamW, Counting]))
def test_a_parameter_without_dimensions_is_rounded_and_its_steps_are_counted(kind, monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(precision.torch, "empty", lambda *a, **given: empty(*a, **given).fill_(99))
    torch.manual_seed(0)
    model = Scaled().bfloat16()
    expected = copy.deepcopy(model).float()
    one, other = kind(model.parameters()), kind(expected.parameters())
    losses = train(zero(0, stochastic_rounding=True), (model, one), range(4))
    assert losses == pytest.approx(train(step, (expected, other), range(4)), rel=0.05)
    assert model.scale.item() == pytest.approx(expected.scale.item(), abs=0.02)
    state = one.state[model.scale]
    assert state["step" if kind is torch.optim.AdamW else "count"] == 4
    kept = {name: state[name].dtype for name in state.keys() & {"step", "exp_avg", "exp_avg_sq"}}
    assert kept.pop("step", torch.float32) is torch.float32
    assert all(dtype is torch.bfloat16 for dtype in kept.values())
    train(step, (model, one), range(4, 5))


@pytest.mark.slow(reason="steps are compiled and run")
def test_a_step_that_is_compiled_anew_does_not_draw_the_same_again():
    found = []
    for is_compiled_anew in (False, True):
        model, _ = built()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        compiled = zero(stochastic_rounding=True)
        for number in range(2):
            if is_compiled_anew:
                torch._dynamo.reset()
            train(compiled, (model, optimizer), [number])
        found.append(model.state_dict())
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_a_plain_checkpoint_gets_a_master_from_its_parameters():
    plain, sharded = built(), built()
    train(step, plain, range(3))
    compiled = zero(master_weights=True)
    train(compiled, sharded, range(1))
    for one, other in zip(plain, sharded, strict=True):
        other.load_state_dict(copy.deepcopy(one.state_dict()))
    compiled(*sharded, *[part.bfloat16() for part in features(3, 8)])
    schedule = program_of(compiled).rewritten.schedule
    assert any("optimizer master_weights=True" in line for line in schedule), "ranks agree"
    for key, value in sharded[0].state_dict().items():
        state = sharded[1].state_dict()["state"]
        assert any(torch.equal(entry[MASTER].bfloat16(), value) for entry in state.values()), key


@pytest.mark.nightly
def test_values_written_in_full_params_are_trained_on():
    pair = built()
    compiled = zero(master_weights=True)
    train(compiled, pair, range(2))
    with full_params(pair[0]), torch.no_grad():
        pair[0].head.bias.fill_(3.0)
    train(compiled, pair, range(2, 3))
    assert (pair[0].state_dict()["head.bias"] - 3.0).abs().max() < 0.1


@pytest.mark.nightly
def test_after_unshard_the_optimizer_is_plain():
    pair = built()
    train(zero(master_weights=True, moment_dtype="int8"), pair, range(3))
    unshard(*pair)
    for state in pair[1].state.values():
        assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert state["exp_avg"].dtype is torch.bfloat16
    train(step, pair, range(3, 5))


def test_a_checkpoint_loaded_too_early_is_refused_and_nothing_is_lost():
    pair, early = built(), built()
    train(zero(master_weights=True), pair, range(2))
    saved = [copy.deepcopy(part.state_dict()) for part in pair]
    early[1].load_state_dict(saved[1])
    compiled = zero(master_weights=True)
    with pytest.raises(Exception, match="has been cast to torch.bfloat16.*Call the step once"):
        train(compiled, early, range(2, 3))


def test_functions_that_keep_states_otherwise_are_refused():
    pair = built(torch.float32)
    train(zero(moment_dtype="int8"), pair, range(1))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="kept in torch.int8 by another compiled function"):
        train(zero(), pair, range(1, 2))


def train_with(options_of_ranks):
    torch._dynamo.reset()
    rank = torch.distributed.get_rank()
    return train(zero(**options_of_ranks[rank]), built(), range(1))


@pytest.mark.nightly
def test_ranks_that_keep_states_otherwise_hear_of_it(ranks):  # noqa: F811
    with pytest.raises(Exception, match="optimizer master_weights=True"):
        ranks(2).run(train_with, [{"master_weights": True}, {"stochastic_rounding": True}])


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name",
    [
        "masters, int8 moments",
        "rounded",
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("masters", "bfloat16 moments", "int8 moments")
        ),
    ],
)
def test_the_default_lowering_trains_too(name):
    pair, expected = built(), built(torch.float32)
    losses = train(zero(lowering="inductor", **CHOICES[name]), pair, range(4))
    assert losses == pytest.approx(train(step, expected, range(4)), rel=0.05)
