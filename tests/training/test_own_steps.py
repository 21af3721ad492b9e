"""Optimizers that no shard can be updated by: their own step runs on whole parameters' owners."""

from __future__ import annotations

import collections
import copy
import functools
import math
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
import zerofx
from tests.kit.covering import nightly, only
from tests.kit.ranks import ranks_fixture  # noqa: F401 - a fixture
from tests.kit.traffic import traffic_of
from zerofx import backend
from zerofx.codegen.rewrite.elementwise import UpdateError
from zerofx.cost.traffic import wire_bytes
from zerofx.runtime.comm.communication import Communicator
from zerofx.runtime.optimizer.owners import owners_among, why_own_step

STEPS = 4


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()


class OneByOne(torch.optim.Optimizer):
    """Updates each parameter by ``update``, given its group and its state."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(group, p, self.state[p])


class Lamb(OneByOne):
    """You et al. 2020: the step is scaled by norms of the whole, unless one is zero."""

    def update(self, group, p, state):
        average = state.setdefault("average", torch.zeros_like(p)).lerp_(p.grad, 0.1)
        state["step"] = state.get("step", 0) + 1
        ours, its = p.norm().item(), average.norm().item()
        p.add_(average, alpha=-group["lr"] * (ours / its if ours and its else 1.0))


class Factored(OneByOne):
    """Shazeer & Stern 2018: second moments of rows and columns, whatever the dimensions."""

    def update(self, group, p, state):
        square = p.grad.square().reshape(p.shape[0], -1)
        rows = state.setdefault("rows", square.new_zeros(len(square))).lerp_(square.mean(1), 0.1)
        columns = state.setdefault("columns", square.new_zeros(square.shape[1]))
        columns.lerp_(square.mean(0), 0.1)
        scale = (rows[:, None] * columns / rows.mean()).sqrt().add(1e-8).view(p.shape)
        p.sub_(p.grad / scale, alpha=0.1 * group["lr"])


class Counts(OneByOne):
    """Does nothing that a shard could not do, and counts in a tensor of one element."""

    def update(self, group, p, state):
        count = state.setdefault("count", torch.zeros(1)).add_(1)
        p.sub_(p.grad / count, alpha=group["lr"])


class Listed(OneByOne):
    """Gupta et al. 2018, Shampoo's way to keep matrices: in a list."""

    def update(self, group, p, state):
        if not state:
            state["moments"] = [torch.zeros(size, size) for size in p.shape]
        for dim, moment in enumerate(state["moments"]):
            rows = p.grad.movedim(dim, 0).flatten(1) if p.dim() > 1 else p.grad[:, None]
            moment.add_(rows @ rows.T)
        norms = [moment.norm() for moment in state["moments"]]
        p.sub_(p.grad / (1e-3 + sum(norms)).sqrt(), alpha=group["lr"])


class Bookkeeper(OneByOne):
    """Keeps things where no trace looks, and makes new memory for what it updates."""

    def __init__(self, params):
        super().__init__(params)
        self.rates = collections.Counter()
        self.known = {}
        self.state["all"]["steps"] = 0

    def step(self, closure=None):
        self.state["all"]["steps"] += 1
        self.rates[self.state["all"]["steps"] % 2] += 1
        for group in self.param_groups:
            group["number"] = group.get("number", 0) + 1
        super().step()

    def update(self, group, p, state):
        momentum = state.setdefault("momenta", [torch.zeros_like(p), torch.zeros(p.shape[::-1])])
        momentum[0].add_(p.grad)
        momentum[1].add_(p.grad.permute(*reversed(range(p.dim()))), alpha=0.5)
        count = self.known[p] = self.known.get(p, 0) + 1
        p.n = getattr(p, "n", 0) + 1
        rate = group["lr"] / (self.state["all"]["steps"] + group["number"] + count + p.n)
        back = momentum[1].permute(*reversed(range(p.dim())))
        p.data = p.data - rate * (momentum[0] + back) / sum(self.rates.values())


OPTIMIZERS = {kind.__name__: kind for kind in (Lamb, Factored, Counts, Listed, Bookkeeper)}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.square = nn.Linear(7, 13), nn.Linear(13, 13)
        self.row, self.unused = nn.Linear(13, 1), nn.Parameter(torch.ones(2, 2))

    def forward(self, x):
        return self.row(self.square(self.up(x).tanh()).tanh())


def built(name):
    """A model and its optimizer, which has two groups, one of a single tensor."""
    torch.manual_seed(0)
    model = Net()
    first = model.up.weight
    others = [p for p in model.parameters() if p is not first]
    return model, OPTIMIZERS[name]([{"params": others}, {"params": [first]}])


def batch(number, rank):
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(4, 8, generator=generator).split([7, 1], 1)


def step(model, optimizer, x, y):
    loss = (model(x) - y).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def compiled(function, stage, **options):
    options = {"stage": stage, "lowering": "eager", **options}
    return torch.compile(function, backend="zero", options=options)


def rank_and_size():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def eager_losses(model, optimizer, numbers):
    """A rank's losses where one process sees all batches; gradients are added in rank order."""
    rank, world_size = rank_and_size()
    losses = []
    for number in numbers:
        gradients = []
        for other in range(world_size):
            x, y = batch(number, other)
            loss = (model(x) - y).pow(2).mean()
            found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
            losses += [loss.item()] if other == rank else []
            gradients.append(found)
        for p, *found in zip(model.parameters(), *gradients, strict=True):
            p.grad = functools.reduce(torch.add, found) / world_size if None not in found else None
        optimizer.step()
        optimizer.zero_grad()
    return losses


def assert_same(found, expected, where=""):
    assert type(found) is type(expected), where
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_same(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other, where)
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), where
    else:
        assert found == expected, where


def trains_like_eager(name, stage):
    """Losses, values and states, all bitwise."""
    torch._dynamo.reset()
    rank, world_size = rank_and_size()
    (model, optimizer), other = built(name), built(name)
    zero = compiled(step, stage)
    found = [zero(model, optimizer, *batch(number, rank)).item() for number in range(STEPS)]
    assert found == eager_losses(*other, range(STEPS))
    if stage:
        owners = owners_among(optimizer, world_size)
        held = [p for p in optimizer.state if isinstance(p, torch.Tensor)]
        assert all(owners[p] == rank for p in held)
    assert_same(optimizer.state_dict(), other[1].state_dict())
    assert_same(model.state_dict(), other[0].state_dict())
    assert model.up.weight is optimizer.param_groups[1]["params"][0]
    zerofx.unshard(model, optimizer)
    assert step(model, optimizer, *batch(9, 0)) == step(*other, *batch(9, 0))
    return len(held) if stage else None


@pytest.mark.parametrize("name", only(("Bookkeeper",), OPTIMIZERS))
@pytest.mark.parametrize("stage", only((0,), (0, 1, 3)))
def test_alone_it_is_bitwise_plain_torch(name, stage):
    trains_like_eager(name, stage)


@pytest.mark.slow(reason="a program of two ranks, beside plain torch with both batches")
@pytest.mark.parametrize(
    ("world_size", "stage"), only(((2, 3),), [(2, 0), (2, 1), (2, 3), (3, 2), (3, 3)])
)
@pytest.mark.parametrize("name", only(("Lamb",), OPTIMIZERS))
def test_ranks_are_bitwise_plain_torch(ranks, world_size, name, stage):
    held = ranks(world_size).run(trains_like_eager, name, stage)
    assert stage == 0 or (sum(held) == 6 and min(held) >= 1)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", only((3,), (0, 3)))
def test_torchs_adafactor_trains_on_ranks(ranks, stage):
    ranks(2).run(adafactor, stage)


def adafactor(stage):
    torch._dynamo.reset()
    rank, _ = rank_and_size()
    OPTIMIZERS["Adafactor"] = lambda groups: torch.optim.Adafactor(groups, lr=0.1)
    one, other = built("Adafactor"), built("Adafactor")
    zero = compiled(step, stage)
    assert [zero(*one, *batch(n, rank)).item() for n in range(3)] == eager_losses(*other, range(3))
    assert_same(one[1].state_dict(), other[1].state_dict())


def saves(folder, name, asynchronous):
    torch._dynamo.reset()
    rank, _ = rank_and_size()
    model, optimizer = built(name)
    zero = compiled(step, 3)
    for number in range(2):
        zero(model, optimizer, *batch(number, rank))
    saving = zerofx.save(folder, model, optimizer, asynchronous=asynchronous)
    zero(model, optimizer, *batch(2, rank))
    saving.wait()
    return optimizer.state_dict(), model.state_dict()


def resumes(folder, name, first):
    """``first``: "load" before anything is compiled, "evaluate" or "train" before."""
    torch._dynamo.reset()
    rank, _ = rank_and_size()
    model, optimizer = built(name)
    zero = compiled(step, 3)
    if first == "evaluate":
        compiled(evaluate, 3)(model, batch(0, rank)[0])
    elif first == "train":
        zero(model, optimizer, *batch(7, rank))
    zerofx.load(folder, model, optimizer)
    # All ranks have the batches of two, so that the mean is theirs on any number of ranks.
    parts = [batch(2, one) for one in range(2)]
    x, y = (torch.cat(both) for both in zip(*parts, strict=True))
    zero(model, optimizer, x, y)
    return optimizer.state_dict(), model.state_dict()


def evaluate(model, x):
    with torch.no_grad():
        return model(x).sum()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "asynchronous", "world_size", "first"),
    only(
        (("Listed", True, 2, "evaluate"),),
        [
            *[("Factored", False, 3, first) for first in ("load", "evaluate", "train")],
            *[("Listed", True, 2, first) for first in ("load", "evaluate", "train")],
            ("Lamb", False, 1, "train"),
            ("Lamb", True, 3, "load"),
        ],
    ),
)
def test_a_checkpoint_goes_on_on_other_ranks(
    ranks, tmp_path, name, asynchronous, world_size, first
):
    folder = tmp_path / "checkpoint"
    ((states, values), *_) = ranks(2).run(saves, folder, name, asynchronous)
    run = ranks(world_size).run if world_size > 1 else lambda function, *args: [function(*args)]
    for found, own in run(resumes, folder, name, first):
        close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
        close(own, dict(values))
        close(found["state"], states["state"])
        assert [g["lr"] for g in found["param_groups"]] == [g["lr"] for g in states["param_groups"]]


def test_a_state_of_no_parameter_is_not_left_out_of_a_checkpoint(tmp_path):
    model, optimizer = built("Bookkeeper")
    compiled(step, 3)(model, optimizer, *batch(0, 0))
    words = "Bookkeeper keeps state 'all', which belongs to no parameter.*extra="
    with pytest.raises(ValueError, match=words):
        zerofx.save(tmp_path / "checkpoint", model, optimizer)
    zerofx.save(tmp_path / "values", model, extra={"optimizer": optimizer.state_dict()})


def hands_over():
    """Whole states go from ranks to plain torch and back by state dicts."""
    torch._dynamo.reset()
    rank, _ = rank_and_size()
    expected, sharded, other = (built("Factored") for _ in range(3))
    zero = compiled(step, 3)
    found = [zero(*sharded, *batch(n, rank)).item() for n in range(2)]
    for one, its in zip(sharded, other, strict=True):
        its.load_state_dict(copy.deepcopy(one.state_dict()))
    found += eager_losses(*other, range(2, 4))
    for one, its in zip(sharded, other, strict=True):
        one.load_state_dict(copy.deepcopy(its.state_dict()))
    found += [zero(*sharded, *batch(n, rank)).item() for n in range(4, 6)]
    assert found == eager_losses(*expected, range(6))


@pytest.mark.nightly
def test_state_dicts_are_whole_and_fit_plain_torch(ranks):
    ranks(2).run(hands_over)


def sends():
    torch._dynamo.reset()
    rank, _ = rank_and_size()
    communicator = Communicator.of(None)  # kept: only a living one is the steps' own
    traffic = traffic_of(communicator)
    model, optimizer = built("Lamb")
    known = set(backend.zero.functions)
    zero = compiled(step, 3, bucket=False)
    zero(model, optimizer, *batch(0, rank))
    (function,) = [one for one in backend.zero.functions if one not in known]
    traffic.reset()
    zero(model, optimizer, *batch(1, rank))
    (program,) = function.programs
    return traffic.sent_bytes["exchange"], wire_bytes(program.gm, 2).exchanges


@pytest.mark.nightly
def test_a_parameter_and_its_gradient_travel_once_and_the_value_comes_back(ranks):
    sent = ranks(2).run(sends)
    numel = sum(p.numel() for p in Net().parameters()) - 4  # one has no gradient
    padding = 3 * 4 * 6 * 2
    assert 0 <= sum(told for _, told in sent) - 3 * 4 * numel // 2 <= padding
    assert 0.9 < sum(real for real, _ in sent) / (3 * 4 * numel / 2) < 1.1


class Swings(OneByOne):
    """Its group ends with what the last parameter's gradient was."""

    def update(self, group, p, state):
        group["last"] = p.grad.norm().item()
        p.sub_(p.grad, alpha=group["lr"])


def swings():
    torch._dynamo.reset()
    rank, _ = rank_and_size()
    model = Net()
    optimizer = Swings(model.parameters())
    with pytest.raises(UpdateError, match="Swings.step has left numbers .* that differ between"):
        compiled(step, 3)(model, optimizer, *batch(0, rank))


@pytest.mark.nightly
def test_a_number_that_comes_to_differ_between_ranks_is_refused(ranks):
    ranks(2).run(swings)


class Late(Lamb):
    """Divides by the number of parameters once it is warm."""

    def update(self, group, p, state):
        super().update(group, p, state)
        if state["step"] > 30:
            p.div_(len(group["params"]))


def test_an_update_that_depends_on_others_later_is_refused_then():
    torch.manual_seed(0)
    model = Net()
    optimizer = Late(model.parameters())
    zero = compiled(step, 3)
    with pytest.raises(UpdateError, match="Late.step does not update each parameter by itself"):
        for number in range(40):
            zero(model, optimizer, *batch(number, 0))
    assert number == 31


class Shares(Lamb):
    """Has one tensor for all."""

    def __init__(self, params):
        super().__init__(params)
        shared = torch.zeros(())
        for p in self.param_groups[0]["params"]:
            self.state[p]["shared"] = shared


class SharesLater(Lamb):
    def update(self, group, p, state):
        super().update(group, p, state)
        group.setdefault("table", torch.ones(1))
        state["shared"] = group["table"]


class LooksElsewhere(Lamb):
    """Goes through parameters that are not those of its groups."""

    def __init__(self, params):
        super().__init__(params)
        self.mine = self.param_groups[0]["params"]

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.mine:
            if p.grad is not None:
                self.update(self.param_groups[0], p, self.state[p])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Shares, "Shares.step has one Tensor for state `shared` of several parameters"),
        (SharesLater, "one tensor in the states of several parameters"),
        (LooksElsewhere, "LooksElsewhere.step looks into its attribute `mine`"),
    ],
)
def test_what_owners_cannot_do_alone_is_refused(ranks, kind, words):
    told = ranks(2).run(refused, kind)
    assert any(re.search(words, text) for text in told), told
    assert all(re.search(f"{words}|failed on rank", text) for text in told), told


def refused(kind):
    torch._dynamo.reset()
    rank, _ = rank_and_size()
    model = Net()
    with pytest.raises(Exception) as caught:
        compiled(step, 3)(model, kind(model.parameters()), *batch(0, rank))
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"offload": "optimizer"}, "updated as a whole tensor .* Leave offload out"),
        nightly({"moment_dtype": torch.bfloat16}, "updated as a whole tensor, and Lamb then keeps"),
    ],
)
def test_what_needs_elementwise_states_is_refused(options, words):
    model, optimizer = built("Lamb")
    with pytest.raises(Exception, match=words):
        compiled(step, 3, **options)(model, optimizer, *batch(0, 0))


class WritesGradients(Lamb):
    def update(self, group, p, state):
        p.grad.mul_(2)
        super().update(group, p, state)


class ReplacesGradients(Lamb):
    def update(self, group, p, state):
        super().update(group, p, state)
        p.grad = p.grad * 2


@pytest.mark.nightly
@pytest.mark.parametrize("kind", (WritesGradients, ReplacesGradients))
def test_a_gradient_that_is_written_and_read_later_is_refused(kind):
    def keeps_gradients(model, optimizer, x, y):
        loss = (model(x) - y).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    model = Net()
    optimizer = kind(model.parameters())
    with pytest.raises(UpdateError, match=".*Gradients.step writes to p.grad"):
        compiled(keeps_gradients, 3)(model, optimizer, *batch(0, 0))
    model, other = Net(), Net()
    other.load_state_dict(model.state_dict())
    one, its = kind(model.parameters()), kind(other.parameters())
    assert compiled(step, 3)(model, one, *batch(0, 0)) == step(other, its, *batch(0, 0))
    assert_same(model.state_dict(), other.state_dict())


def scaled_step(model, optimizer, scaler, x, y):
    scaler.scale((model(x) - y).pow(2).mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@pytest.mark.nightly
def test_a_step_that_overflows_is_left_out():
    model, optimizer = built("Lamb")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    zero = compiled(scaled_step, 3)
    zero(model, optimizer, scaler, *batch(0, 0))
    before = copy.deepcopy(model.state_dict())
    x, y = batch(1, 0)
    zero(model, optimizer, scaler, x * math.inf, y)
    assert_same(model.state_dict(), before)
    zero(model, optimizer, scaler, x, y)
    assert not torch.equal(model.state_dict()["up.weight"], before["up.weight"])


class ByName(OneByOne):
    """Updates the parameters of layers with a rate of their own, by their names."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p, name in zip(group["params"], group["param_names"], strict=True):
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * (0.1 if "square" in name else 1.0))


@pytest.mark.parametrize("stage", only((3,), (0, 3)))
def test_names_are_those_of_the_parameters_that_are_updated(stage):
    torch.manual_seed(0)
    model, other = Net(), Net()
    other.load_state_dict(model.state_dict())
    optimizer, its = (ByName(list(one.named_parameters())) for one in (model, other))
    zero = compiled(step, stage)
    for number in range(2):
        assert zero(model, optimizer, *batch(number, 0)) == step(other, its, *batch(number, 0))
    assert_same(model.state_dict(), other.state_dict())
    assert optimizer.param_groups[0]["param_names"] == its.param_groups[0]["param_names"]


class Restarts(Lamb):
    """Forgets all of a parameter's state now and then."""

    def update(self, group, p, state):
        super().update(group, p, state)
        if state["step"] == 2:
            self.state.pop(p)


class KnowsByIdentity(Lamb):
    """Counts by the parameter's ``id``, and tells its group the step."""

    def __init__(self, params):
        super().__init__(params)
        self.counts = {}

    def update(self, group, p, state):
        self.counts[id(p)] = self.counts.get(id(p), 0) + 1
        super().update({"lr": group["lr"] / self.counts[id(p)]}, p, state)
        group["scale"], group["k"] = 1 / state["step"], state["step"]


def goes_on(kind):
    """Over a batch of another size, and states that are loaded."""
    torch._dynamo.reset()
    rank, world_size = rank_and_size()
    OPTIMIZERS[kind.__name__] = kind
    one, other = built(kind.__name__), built(kind.__name__)
    zero = compiled(step, 3)
    for number in range(6):
        if number == 4:
            one[1].load_state_dict(copy.deepcopy(one[1].state_dict()))
        size = 3 if number == 2 else 4
        parts = [[part[:size] for part in batch(number, r)] for r in range(world_size)]
        losses = [(other[0](x) - y).pow(2).mean() for x, y in parts]
        (sum(losses) / world_size).backward()
        other[1].step()
        other[1].zero_grad()
        assert math.isclose(zero(*one, *parts[rank]).item(), losses[rank].item(), rel_tol=1e-5)
    groups = [made.state_dict()["param_groups"] for _, made in (one, other)]
    assert [g.get("k") for g in groups[0]] == [g.get("k") for g in groups[1]]
    assert [g.get("scale") for g in groups[0]] == [g.get("scale") for g in groups[1]]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", (nightly(Restarts), KnowsByIdentity))
def test_it_goes_on_in_other_programs_and_with_loaded_states(ranks, kind):
    ranks(3).run(goes_on, kind)


class WritesData(Lamb):
    """As older optimizers write."""

    def update(self, group, p, state):
        p.grad.data.mul_(2)
        super().update(group, p, state)


def test_a_gradient_that_is_written_as_data_is_seen():
    def keeps_gradients(model, optimizer, x, y):
        loss = (model(x) - y).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    model = Net()
    with pytest.raises(UpdateError, match="WritesData.step writes to p.grad"):
        compiled(keeps_gradients, 3)(model, WritesData(model.parameters()), *batch(0, 0))


class Sends(Lamb):
    def step(self, closure=None):
        dist.all_reduce(torch.ones(1))
        super().step()


def sends_within():
    torch._dynamo.reset()
    rank, _ = rank_and_size()
    model = Net()
    with pytest.raises(Exception, match="Sends.step sends tensors to other ranks itself, by `c10d"):
        compiled(step, 3)(model, Sends(model.parameters()), *batch(0, rank))


def test_a_step_that_sends_to_other_ranks_is_refused(ranks):
    ranks(2).run(sends_within)


class Keeps(Lamb):
    """Has what cannot be pickled in a state."""

    def update(self, group, p, state):
        super().update(group, p, state)
        state["scale"] = lambda value: value


def cannot_be_sent():
    torch._dynamo.reset()
    rank, _ = rank_and_size()
    model = Net()
    optimizer = Keeps(model.parameters())
    compiled(step, 3)(model, optimizer, *batch(0, rank))
    words = "the state of parameter '.*', which one rank has, cannot be pickled"
    with pytest.raises(RuntimeError, match=words):
        optimizer.state_dict()


@pytest.mark.nightly
def test_a_state_that_cannot_be_sent_is_an_error_on_all_ranks(ranks):
    ranks(2).run(cannot_be_sent)


class OfMatrices(OneByOne):
    """Does with a vector what a shard could do."""

    def update(self, group, p, state):
        if p.dim() == 2:
            p.sub_(p.grad / (1 + p.grad.norm()), alpha=group["lr"])
        else:
            p.sub_(p.grad, alpha=group["lr"])


def test_what_trains_later_decides_too():
    torch.manual_seed(0)
    model, other = Net(), Net()
    other.load_state_dict(model.state_dict())
    optimizer, its = OfMatrices(model.parameters()), OfMatrices(other.parameters())
    for frozen in (True, False):
        for one in (model, other):
            for p in one.parameters():
                p.requires_grad_(p.dim() == 1 or not frozen)
        zero = compiled(step, 3)
        assert zero(model, optimizer, *batch(0, 0)) == step(other, its, *batch(0, 0))


def test_frozen_parameters_are_no_load():
    frozen = [nn.Parameter(torch.ones(size), requires_grad=False) for size in (1000, 900)]
    parameters = [nn.Parameter(torch.ones(10)) for _ in range(4)]
    owners = owners_among(Lamb([*frozen, *parameters]), 2)
    assert sorted(owners[p] for p in parameters) == [0, 0, 1, 1]


def test_parameters_that_come_later_take_none_from_others():
    parameters = [nn.Parameter(torch.ones(size)) for size in (50, 30, 20, 10)]
    optimizer = Lamb(parameters)
    owners = dict(owners_among(optimizer, 2))
    assert [owners[p] for p in parameters] == [0, 1, 1, 0]
    assert {**owners_among(optimizer, 3)} != owners
    new = nn.Parameter(torch.ones(100))
    optimizer.add_param_group({"params": [new]})
    again = owners_among(optimizer, 2)
    assert all(again[p] == owner for p, owner in owners.items()) and again[new] == 1


def test_the_log_says_why_the_own_step_runs(caplog):
    model, optimizer = built("Lamb")
    with caplog.at_level("INFO", "zerofx"):
        compiled(step, 3)(model, optimizer, *batch(0, 0))
    (told,) = [text for text in caplog.messages if "own step" in text]
    reason = "Lamb chooses what to do by the value of a tensor, which .* computes, at .*py:[0-9]+"
    where = "Lamb's own step updates whole parameters, each on one rank, with its states"
    assert re.fullmatch(f"{where}: {reason}", told)
    assert re.fullmatch(reason, why_own_step(optimizer, (), sharded=True))
