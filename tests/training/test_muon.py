"""Muon, whose update needs whole matrices, trains on shards as it does in plain torch."""

from __future__ import annotations

import copy
import functools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW, Muon

from tests.kit.covering import first, only
from tests.kit.ranks import ranks_fixture  # noqa: F401 - a fixture
from tests.kit.traffic import traffic_of
from zerofx import backend
from zerofx.ir.parameters import ParameterInfo
from zerofx.runtime.comm.communication import Communicator
from zerofx.runtime.optimizer.whole_tensors import compute_on_owners

STEPS = 4


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()


class Heavier(Muon):
    """A user's own Muon, with a state and a step of its own."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"], state["average"] = 0, torch.zeros_like(p)
                state["step"] += 1
                state["average"].lerp_(p.grad, 0.1)
                update = state["average"] / (1 - 0.9 ** state["step"])
                update = update @ torch.linalg.pinv(update) @ update
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(update / update.norm(), alpha=group["lr"])


class Net(nn.Module):
    """A tall, a square and a wide matrix, and a vector in the shape of a matrix."""

    def __init__(self):
        super().__init__()
        self.up, self.square = nn.Linear(7, 13), nn.Linear(13, 13)
        self.down, self.row = nn.Linear(13, 5), nn.Linear(5, 1)

    def forward(self, x):
        x = self.square(self.up(x).tanh()).tanh()
        return self.row(self.down(x).tanh())


def matrices(model):
    return [p for p in model.parameters() if p.ndim == 2]


def all_kinds(model):
    """A group for each of Muon's settings."""
    first, second, third, fourth = matrices(model)
    return Muon(
        [
            {"params": [first], "nesterov": False},
            {"params": [second], "adjust_lr_fn": "match_rms_adamw"},
            {"params": [third], "weight_decay": 0.0, "momentum": 0.5, "adjust_lr_fn": "original"},
            {"params": [fourth], "lr": 0.005, "ns_steps": 3, "eps": 1e-3, "weight_decay": 0.3},
        ],
        lr=0.02,
    )


MUONS = {
    "muon": lambda model: Muon(matrices(model), lr=0.02),
    "all kinds": all_kinds,
    "one matrix": lambda model: Muon(matrices(model)[:1], lr=0.02),
    "subclass": lambda model: Heavier(matrices(model), lr=0.02),
}


def built(name, dtype=torch.float32):
    torch.manual_seed(0)
    model = Net().to(dtype)
    muon = MUONS[name](model)
    owned = {id(p) for group in muon.param_groups for p in group["params"]}
    rest = [p for p in model.parameters() if id(p) not in owned]
    return model, muon, AdamW(rest, lr=0.01, foreach=False)


def batch(number, rank, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 * number + rank)
    values = torch.randn(4, 10, generator=generator).to(dtype)
    return values[:, :7], values[:, 7:8]


def backward(model, x, y):
    loss = (model(x) - y).pow(2).mean()
    loss.backward()
    return loss.detach()


def step(model, muon, adamw, x, y):
    loss = backward(model, x, y)
    muon.step()
    adamw.step()
    muon.zero_grad()
    adamw.zero_grad()
    return loss


def clipped_step(model, muon, adamw, x, y):
    loss = backward(model, x, y)
    nn.utils.clip_grad_norm_(model.parameters(), 0.2)
    muon.step()
    adamw.step()
    muon.zero_grad()
    adamw.zero_grad()
    return loss


def eager_losses(members, numbers, rank, world_size, clip=False, dtype=torch.float32):
    """A rank's losses where one process sees all batches; gradients are added in rank order."""
    model, muon, adamw = members
    losses = []
    for number in numbers:
        gradients = []
        for other in range(world_size):
            model.zero_grad()
            loss = backward(model, *batch(number, other, dtype))
            losses += [loss.item()] if other == rank else []
            gradients.append([p.grad.clone() for p in model.parameters()])
        for p, *found in zip(model.parameters(), *gradients, strict=True):
            p.grad = functools.reduce(torch.add, found) / world_size
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        set_lr(muon, number)
        muon.step()
        adamw.step()
    model.zero_grad()
    return losses


def set_lr(optimizer, number):
    """Another one at every step: nothing may be compiled for it."""
    for group in optimizer.param_groups:
        group["lr"] = (0.02 if group["ns_steps"] == 5 else 0.005) * (1 + number / 8)


def compiled(function, stage, **options):
    options = {"stage": stage, "lowering": "eager", **options}
    return torch.compile(function, backend="zero", options=options)


def losses_of(zero, members, numbers, rank, dtype=torch.float32):
    losses = []
    for number in numbers:
        set_lr(members[1], number)
        losses.append(zero(*members, *batch(number, rank, dtype)).item())
    return losses


def rank_and_size():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def plain(state_dict):
    return {
        (number, name): value
        for number, state in state_dict["state"].items()
        for name, value in state.items()
    }


def assert_equal_states(found, expected):
    found, expected = plain(found), plain(expected)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(torch.as_tensor(found[key]), torch.as_tensor(value)), key


def trains_like_eager(name, stage):
    """Losses, parameters and states, all bitwise: nothing is summed in another order."""
    torch._dynamo.reset()
    rank, world_size = rank_and_size()
    one, other = built(name), built(name)
    known = set(backend.zero.functions)
    found = losses_of(compiled(step, stage), one, range(STEPS), rank)
    assert found == eager_losses(other, range(STEPS), rank, world_size)
    (function,) = [f for f in backend.zero.functions if f not in known]
    assert len(function.programs) == 1  # for four learning rates
    for mine, expected in zip(one[1:], other[1:], strict=True):
        assert_equal_states(mine.state_dict(), expected.state_dict())
    expected = other[0].state_dict()
    for key, value in one[0].state_dict().items():
        assert torch.equal(value, expected[key]), key


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "stage"),
    only(
        (("all kinds", 3),),
        [
            *(("all kinds", stage) for stage in (0, 3)),
            *(pytest.param("all kinds", stage, marks=pytest.mark.exhaustive) for stage in (1, 2)),
            ("subclass", 3),
            pytest.param("one matrix", 3, marks=pytest.mark.exhaustive),
        ],
    ),
)
def test_alone_it_is_bitwise_plain_torch(name, stage):
    trains_like_eager(name, stage)


@pytest.mark.slow(reason="two ranks train with two optimizers")
@pytest.mark.parametrize(
    ("world_size", "name", "stage"),
    only(
        ((2, "all kinds", 3),),
        [
            *((2, "all kinds", stage) for stage in (2, 3)),
            (3, "all kinds", 1),
            *(
                pytest.param(3, "all kinds", stage, marks=pytest.mark.exhaustive)
                for stage in (2, 3)
            ),
            pytest.param(2, "all kinds", 1, marks=pytest.mark.exhaustive),
            pytest.param(2, "subclass", 3, marks=pytest.mark.exhaustive),
            *(
                pytest.param(3, "one matrix", stage, marks=pytest.mark.exhaustive)
                for stage in (1, 2, 3)
            ),
        ],
    ),
)
def test_ranks_are_bitwise_plain_torch(ranks, world_size, name, stage):
    ranks(world_size).run(trains_like_eager, name, stage)


def hands_its_state_over(world_size):
    """From ranks to plain torch and back, clipped by the global norm, evaluated in between."""
    torch._dynamo.reset()
    communicator = Communicator.of(None)  # kept: only a living one is the steps' own
    traffic_of(communicator)
    rank, _ = rank_and_size()
    whole, sharded, other = (built("muon") for _ in range(3))
    expected = eager_losses(whole, range(6), rank, world_size, clip=True)
    zero = compiled(clipped_step, 3)
    compiled(evaluate, 3)(sharded[0], batch(0, rank)[0])
    found = losses_of(zero, sharded, range(2), rank)
    hand_over(sharded, other)
    found += eager_losses(other, range(2, 4), rank, world_size, clip=True)
    hand_over(other, sharded)
    sent = traffic_of_one_step(zero, sharded, rank)
    hand_over(other, sharded)
    found += losses_of(zero, sharded, range(4, 6), rank)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    muon = sharded[1]
    kept = sum(state["momentum_buffer"].numel() for state in muon.state.values())
    return sent, kept


def evaluate(model, x):
    with torch.no_grad():
        return model(x).sum()


def hand_over(source, target):
    for one, other in zip(source, target, strict=True):
        other.load_state_dict(copy.deepcopy(one.state_dict()))


def traffic_of_one_step(zero, members, rank):
    traffic = traffic_of(Communicator.of(None))
    before = dict(traffic.sent_bytes)
    losses_of(zero, members, [4], rank)
    return {kind: nbytes - before[kind] for kind, nbytes in traffic.sent_bytes.items()}


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", (pytest.param(2, marks=pytest.mark.exhaustive), 3))
def test_states_are_shards_that_plain_torch_can_load(ranks, world_size):
    results = ranks(world_size).run(hands_its_state_over, world_size)
    numel = sum(p.numel() for p in matrices(Net()))
    padding = 4 * 4 * world_size
    assert numel <= sum(kept for _, kept in results) <= numel + padding
    assert max(kept for _, kept in results) < 0.7 * numel
    # To the owner and back, in the bfloat16 that the iteration computes in: what the owner has
    # itself does not travel.
    sent = sum(sent["exchange"] for sent, _ in results)
    assert 0.5 < sent / (2 * 2 * numel * (world_size - 1) / world_size) < 1.5
    assert sent <= 2 * 2 * numel


def update(model, muon, adamw):
    nn.utils.clip_grad_norm_(model.parameters(), 0.2)
    muon.step()
    adamw.step()
    muon.zero_grad()
    adamw.zero_grad()


def accumulates(stage):
    """Backward and update in two functions, and a loop of micro-batches."""
    torch._dynamo.reset()
    rank, world_size = rank_and_size()
    one, other = built("muon"), built("muon")
    gradients, final = compiled(backward, stage), compiled(update, stage)
    for number in range(3):
        for micro in range(2):
            gradients(one[0], *batch(10 * number + micro, rank))
        final(*one)
        parts = [batch(10 * number + m, r) for m in range(2) for r in range(world_size)]
        for x, y in parts:
            (backward_loss(other[0], x, y) / world_size).backward()
        update(*other)
    for p, expected in zip(whole_values(one[0]), other[0].parameters(), strict=True):
        torch.testing.assert_close(p, expected.detach(), rtol=1e-3, atol=1e-4)


def backward_loss(model, x, y):
    return (model(x) - y).pow(2).mean()


def whole_values(model):
    return list(model.state_dict().values())


@pytest.mark.nightly
def test_gradients_may_come_from_another_function():
    accumulates(3)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", (1, 2, 3))
def test_gradients_may_come_from_another_function_of_ranks(ranks, stage):
    ranks(2).run(accumulates, stage)


def scaled_step(model, muon, adamw, scaler, x, y):
    scaler.scale((model(x) - y).pow(2).mean()).backward()
    scaler.step(muon)
    scaler.step(adamw)
    scaler.update()
    muon.zero_grad()
    adamw.zero_grad()


@pytest.mark.nightly
def test_a_step_that_overflows_is_left_out():
    model, muon, adamw = built("muon")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    zero = compiled(scaled_step, 3)
    zero(model, muon, adamw, scaler, *batch(0, 0))
    before = [v.clone() for v in whole_values(model)]
    x, y = batch(1, 0)
    zero(model, muon, adamw, scaler, x * math.inf, y)
    assert all(map(torch.equal, whole_values(model), before))
    zero(model, muon, adamw, scaler, x, y)
    assert not any(map(torch.equal, whole_values(model), before))


@pytest.mark.nightly
@pytest.mark.parametrize("stage", (0, pytest.param(1, marks=pytest.mark.exhaustive), 3))
def test_compiled_by_inductor_it_trains_as_well(stage):
    one, other = built("muon"), built("muon")
    found = losses_of(compiled(step, stage, lowering="inductor"), one, range(3), 0)
    torch.testing.assert_close(found, eager_losses(other, range(3), 0, 1), rtol=1e-4, atol=0)


@pytest.mark.nightly
def test_parameters_in_bfloat16_agree_bitwise():
    one, other = built("muon", torch.bfloat16), built("muon", torch.bfloat16)
    found = losses_of(compiled(step, 3), one, range(3), 0, torch.bfloat16)
    assert found == eager_losses(other, range(3), 0, 1, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("dtype", "options"),
    first(
        1,
        [
            (torch.float32, {"moment_dtype": torch.bfloat16}),
            (torch.bfloat16, {"moment_dtype": torch.bfloat16}),
            (torch.bfloat16, {"master_weights": True}),
            (torch.bfloat16, {"stochastic_rounding": True}),
        ],
    ),
)
def test_states_of_another_dtype_are_refused_before_anything_changes(dtype, options):
    model, *optimizers = built("muon", dtype)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(Exception, match="up.weight.* is updated as a whole tensor, and Muon"):
        compiled(step, 3, **options)(model, *optimizers, *batch(0, 0, dtype))
    assert all(map(torch.equal, model.parameters(), before))


class Rows(Muon):
    """Needs two tensors whole: the gradient and the momentum."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                state["m"].lerp_(p.grad, 0.1)
                p.sub_(state["m"] / p.grad.norm() * p.grad.square().sum(0), alpha=group["lr"])


def test_an_update_that_needs_two_tensors_whole_is_refused_by_line():
    torch.manual_seed(0)
    model = Net()
    rows = Rows(matrices(model), lr=0.01)
    rest = AdamW([p for p in model.parameters() if p.ndim == 1], foreach=False)
    words = r"Rows cannot run on shards: `aten\.\w+.* at .*test_muon\.py:\d+ .*stage.: 0"
    with pytest.raises(Exception, match=words):
        compiled(step, 2)(model, rows, rest, *batch(0, 0))


# The exchange by itself


def as_its_shard(whole, info, rank):
    start, stop = info.owned_by(rank)
    shard = whole.new_full((info.shard_numel,), math.nan)
    shard[: stop - start] = whole.permute(info.storage_order).reshape(-1)[start:stop]
    return shard


def gathers_and_scatters(world_size):
    """Every dtype and layout, nothing on some ranks, owners of none: row sums arrive."""
    rank, _ = rank_and_size()
    generator = torch.Generator().manual_seed(0)
    wholes = [
        torch.randn(5, 3, generator=generator).to(torch.bfloat16),
        torch.randn(1, 1, generator=generator),
        torch.randn(4, 6, generator=generator).t(),
        torch.randn(0, 3, generator=generator),
        torch.randn(7, 2, generator=generator, dtype=torch.float64),
    ]
    infos = [
        ParameterInfo(
            i, f"p{i}", tuple(w.shape), w.stride(), w.dtype, w.device, True, world_size, rank
        )
        for i, w in enumerate(wholes)
    ]
    owners, seen = [0, 0, world_size - 1, 0, 0], []

    def compute(position, whole):
        seen.append(position)
        assert torch.equal(whole, wholes[position])
        assert whole.stride() == wholes[position].stride()
        return (whole + whole.sum()).to(torch.float32)

    shards = [as_its_shard(w, info, rank) for w, info in zip(wholes, infos, strict=True)]
    dtypes = [torch.float32] * len(wholes)
    communicator = Communicator.of(None)
    results = compute_on_owners(shards, infos, owners, dtypes, compute, communicator)
    assert seen == [i for i, owner in enumerate(owners) if owner == rank]
    for whole, info, result in zip(wholes, infos, results, strict=True):
        expected = as_its_shard((whole + whole.sum()).to(torch.float32), info, rank)
        assert torch.equal(result, expected.nan_to_num(0.0))
    return len(seen)


@pytest.mark.parametrize("world_size", only((2,), (1, 2, 3)))
def test_owners_get_whole_tensors_and_give_back_shards(ranks, world_size):
    if world_size == 1:
        gathers_and_scatters(1)
        return
    computed = ranks(world_size).run(gathers_and_scatters, world_size)
    assert sum(computed) == 5 and computed[1] == (1 if world_size == 2 else 0)
