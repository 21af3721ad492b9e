"""Optimizers that cannot be compiled, or be sharded, are refused with the reason, or run."""

from __future__ import annotations

import copy
import io
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.exc import Unsupported
from torch.optim.optimizer import register_optimizer_step_post_hook

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
import zerofx
from tests.kit import models
from tests.kit.covering import each_value, first, nightly, only
from tests.kit.models import Mlp, squared_loss
from tests.kit.refusals import BATCH, assert_untouched, good_step, sgd, values, zero
from zerofx.codegen.rewrite.elementwise import UpdateError
from zerofx.errors import StepError


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()


def test_an_overridden_zero_grad_is_run_or_refused():
    class Counting(torch.optim.SGD):
        calls = 0

        def zero_grad(self, set_to_none=True):
            self.calls += 1
            super().zero_grad(set_to_none)

    model = Mlp()
    optimizer = Counting(model.parameters(), lr=1e-2)
    try:
        zero(good_step)(model, optimizer, *BATCH)
    except (StepError, Unsupported):
        return
    assert optimizer.calls == 1


def test_hooks_on_an_optimizers_step_run_or_are_refused():
    model = Mlp()
    optimizer = sgd(model)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    try:
        zero(good_step)(model, optimizer, *BATCH)
    except (StepError, Unsupported):
        return
    assert calls == ["before", "after"]


def test_a_hook_that_comes_between_two_calls_is_refused():
    model = Mlp()
    optimizer, step = sgd(model), zero(good_step)
    step(model, optimizer, *BATCH)
    hook = optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(StepError, match="SGD has step hooks"):
        step(model, optimizer, *BATCH)
    hook.remove()
    step(model, optimizer, *BATCH)


@pytest.mark.parametrize(
    ("stage", "kind"),
    only(
        ((3, "register_hook"),),
        itertools.product((1, 3), ("register_hook", "register_post_accumulate_grad_hook")),
    ),
)
def test_a_hook_on_a_gradient_that_comes_between_two_calls_is_refused(stage, kind):
    model = Mlp()
    optimizer, step = sgd(model), zero(good_step, stage=stage)
    step(model, optimizer, *BATCH)
    hook = getattr(next(model.parameters()), kind)(lambda _: None)
    with pytest.raises(StepError, match="has gradient hooks"):
        step(model, optimizer, *BATCH)
    hook.remove()
    step(model, optimizer, *BATCH)


@pytest.mark.parametrize("stage", only((3,), (0, 1, 3)))
def test_a_copy_that_would_hold_shards_is_refused(stage):
    model = Mlp()
    optimizer, step = torch.optim.AdamW(model.parameters()), zero(good_step, stage=stage)
    copies = (copy.copy, copy.deepcopy, pickle.dumps, lambda one: torch.save(one, io.BytesIO()))
    for copied in copies:
        copied(optimizer)
    for _ in range(2):
        step(model, optimizer, *BATCH)
    for copied in copies if stage else ():
        with pytest.raises(StepError, match="a copy of AdamW, .* optimizer.state_dict()"):
            copied(optimizer)
    zerofx.unshard(model, optimizer)
    for copied in copies:
        copied(optimizer)
    found = pickle.loads(pickle.dumps(optimizer)).state_dict()["state"]
    for one, other in zip(found.values(), optimizer.state.values(), strict=True):
        torch.testing.assert_close(one, dict(other))


class CountsInGroups(torch.optim.Optimizer):
    """Has one number of steps for all of a group's parameters."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / group["k"])


def steps_for_body_then_for(*modules):
    def step(model, optimizer, x, y):
        for trained in modules:
            optimizer.zero_grad()
            squared_loss(model, x, y).backward()
            for name in {"body", "head"} - set(trained):
                for p in getattr(model, name).parameters():
                    p.grad = None
            optimizer.step()  # here

    return step


@pytest.mark.parametrize("then", (("head",), nightly(("body", "head"))), ids=str)
def test_steps_of_different_parameters_that_count_in_a_group_are_refused(then):
    model = Mlp()
    optimizer, before = CountsInGroups(model.parameters()), values(model)
    with pytest.raises(StepError, match="CountsInGroups.step changes numbers of its param_groups"):
        zero(steps_for_body_then_for(("body",), then))(model, optimizer, *BATCH)
    assert_untouched(model, optimizer, before)


@pytest.mark.parametrize(
    "kind, modules",
    first(1, [(sgd, (("body",), ("head",))), (None, (("body", "head"), ("body", "head")))]),
    ids=["torchs, of different parameters", "of the same"],
)
def test_other_steps_in_one_call_are_as_in_eager(kind, modules):
    trained, expected = Mlp(), Mlp()
    expected.load_state_dict(trained.state_dict())
    make = kind or (lambda model: CountsInGroups(model.parameters()))
    step, optimizers = steps_for_body_then_for(*modules), (make(trained), make(expected))
    compiled = zero(step)
    for _ in range(2):
        compiled(trained, optimizers[0], *BATCH)
        step(expected, optimizers[1], *BATCH)
    with zerofx.full_params(trained):
        for one, other in zip(trained.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(one, other)


class Lookalike(torch.optim.Optimizer):
    """Has another's groups and states, and nothing of its class."""

    def __init__(self, inner):
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state
        self.defaults = inner.defaults

    def step(self, closure=None):
        self.inner.step()

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)


class Plain:
    __init__, step, zero_grad = Lookalike.__init__, Lookalike.step, Lookalike.zero_grad


def test_an_optimizer_that_is_none_by_half_is_refused_and_a_wrapper_trains():
    model = Mlp()
    with pytest.raises(
        StepError, match="has not called Optimizer.__init__.* derive it from object"
    ):
        zero(good_step)(model, Lookalike(sgd(model)), *BATCH)
    trained, expected = Mlp(), copy.deepcopy(model)
    trained.load_state_dict(model.state_dict())
    zero(good_step)(trained, Plain(sgd(trained)), *BATCH)
    good_step(expected, sgd(expected), *BATCH)
    with zerofx.full_params(trained):
        for one, other in zip(trained.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(one, other)


class Exchanges(torch.optim.SGD):
    """Evaluates elsewhere than it trains, as schedule-free optimizers do."""

    @torch.no_grad()
    def move(self, share):
        for p in self.param_groups[0]["params"]:
            p.add_(self.state[p]["momentum_buffer"], alpha=share)


@pytest.mark.parametrize("stage", only((3,), (1, 3)))
def test_parameters_and_states_mix_between_calls_once_they_are_unsharded(stage):
    models = Mlp(), Mlp()
    models[1].load_state_dict(models[0].state_dict())
    one, other = (Exchanges(model.parameters(), lr=0.1, momentum=0.9) for model in models)
    step = zero(good_step, stage=stage)
    for _ in range(2):
        step(models[0], one, *BATCH)
        good_step(models[1], other, *BATCH)
        zerofx.unshard(models[0], one)
        for optimizer in (one, other):
            optimizer.move(0.1)
        torch.testing.assert_close(*map(values, models))
        for optimizer in (one, other):
            optimizer.move(-0.1)


class TakesBatchSize(torch.optim.SGD):
    def step(self, closure=None, batch_size=4):
        return super().step(closure)


def test_arguments_of_a_step_are_refused():
    model = Mlp()
    optimizer = TakesBatchSize(model.parameters(), lr=0.1)

    def step(x, y):
        F.mse_loss(model(x), y).backward()
        optimizer.step(batch_size=2)

    with pytest.raises(StepError, match="TakesBatchSize.step is called with more than a closure"):
        zero(step)(*BATCH)


class DecaysAll(torch.optim.Optimizer):
    """Decays parameters whether or not they have gradients."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "k": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                p.mul_(1 - group["lr"])
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / group["k"])


@pytest.mark.parametrize("stage", only((3,), (0, 3)))
def test_a_step_that_updates_parameters_without_gradients_is_refused_where_there_are_any(stage):
    model, eager = Mlp(), Mlp()
    eager.load_state_dict(model.state_dict())
    unused = nn.Parameter(torch.ones(3))
    for one in (model, eager):
        one.unused = unused
    optimizer = DecaysAll(model.parameters())
    with pytest.raises(StepError, match="DecaysAll.step changes parameters that have no gradient"):
        zero(good_step, stage)(model, optimizer, *BATCH)
    torch._dynamo.reset()
    del model.unused, eager.unused
    optimizer, other = DecaysAll(model.parameters()), DecaysAll(eager.parameters())
    step = zero(good_step, stage)
    for _ in range(2):
        assert step(model, optimizer, *BATCH) == good_step(eager, other, *BATCH)


class CountsGroups(torch.optim.Optimizer):
    """Counts steps in its groups, on the device of their parameters."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "k": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            assert group["params"][0].device.type == "cpu"
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.direction(p.grad), alpha=group["lr"] / group["k"])

    def direction(self, grad):
        return grad


class CountsGroupsOfWhole(CountsGroups):
    def direction(self, grad):
        return grad / (1 + grad.norm())


@pytest.mark.parametrize(("kind", "stage"), each_value((CountsGroups, CountsGroupsOfWhole), (3, 0)))
def test_groups_without_gradients_count_their_steps(kind, stage):
    def trained(run):
        torch.manual_seed(0)
        model = Mlp()
        frozen, *others = model.parameters()
        frozen.requires_grad_(False)
        optimizer = kind([{"params": others}, {"params": [frozen]}])
        losses = [run(model, optimizer, *BATCH).item() for _ in range(3)]
        return losses, [group["k"] for group in optimizer.param_groups]

    assert trained(zero(good_step, stage)) == trained(good_step)


# Optimizers that are not elementwise.


class Lamb(torch.optim.Optimizer):
    """You et al. 2020, without its moments: the step is scaled by two norms of the whole."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                ratio = p.norm() / p.grad.norm()
                p.add_(p.grad * ratio, alpha=-group["lr"])


class Orthogonal(torch.optim.Optimizer):
    """Needs whole matrices, and nobody has said so."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad @ p.grad.T @ p.grad, alpha=-group["lr"])


class Matrices(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 5, bias=False), nn.Linear(5, 3, bias=False)

    def forward(self, x):
        return self.head(self.body(x).relu())


NOT_ELEMENTWISE = {kind.__name__: kind for kind in (Orthogonal, Lamb)}


@pytest.mark.parametrize("stage", only((3,), (0, 1, 2, 3)))
@pytest.mark.parametrize("name", first(1, NOT_ELEMENTWISE))
def test_an_optimizer_that_is_not_elementwise_takes_its_own_steps(name, stage):
    torch.manual_seed(0)
    model = Matrices()
    other = copy.deepcopy(model)
    optimizers = [NOT_ELEMENTWISE[name](one.parameters()) for one in (model, other)]
    step = zero(good_step, stage)
    for number in range(3):
        batch = models.features(number, 4)
        assert step(model, optimizers[0], *batch) == good_step(other, optimizers[1], *batch)


# Optimizers whose step no trace can follow.


@torch.compile(backend="eager")
def decayed(p, grad):
    return p - 0.1 * grad


class CompilesItself(torch.optim.SGD):
    """As those of torchao and heavyball do."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.copy_(decayed(p, p.grad))


@pytest.mark.parametrize("stage", only((3,), (0, 3)))
def test_an_update_that_compiles_itself_is_traced_as_what_it_compiles(stage):
    trained = []
    for run in (good_step, zero(good_step, stage)):
        torch.manual_seed(0)
        model = Mlp()
        optimizer = CompilesItself(model.parameters(), lr=0.1)
        trained.append([run(model, optimizer, *BATCH).item() for _ in range(3)])
    assert trained[0] == trained[1] and trained[0][0] > trained[0][2]


class TakesAddresses(torch.optim.SGD):
    """As those of bitsandbytes do."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.numpy()[:] -= 0.1 * p.grad.numpy()


class ReadsNumbers(torch.optim.SGD):
    """As those of torchao do: it reads a table of numbers."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=torch.linspace(0.0, 0.1, 8)[-1].item() or 0.2)


@pytest.mark.parametrize(("kind", "stage"), each_value((TakesAddresses, ReadsNumbers), (0, 3)))
def test_an_update_that_cannot_be_traced_is_the_optimizers_own(kind, stage):
    trained = []
    for run in (good_step, zero(good_step, stage)):
        torch.manual_seed(0)
        model = Mlp()
        optimizer = kind(model.parameters(), lr=0.1)
        trained.append([run(model, optimizer, *BATCH).item() for _ in range(3)])
    assert trained[0] == trained[1] and trained[0][0] > trained[0][2]


def test_an_update_that_needs_a_closure_is_refused_with_the_reason():
    model = Mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)

    def step(model, optimizer, x, y):
        def loss_of():
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        return optimizer.step(loss_of)

    before = values(model)
    reason = "LBFGS.step cannot.*computes losses anew while it steps.*steps once for each"
    with pytest.raises((UpdateError, Unsupported), match=f"(?s){reason}"):
        zero(step, 0)(model, optimizer, *BATCH)
    assert_untouched(model, optimizer, before)


class TakesClosures(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def rate(self, loss):
        return 0.1

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad * self.rate(loss))
        return loss


class ClampsLoss(TakesClosures):
    def rate(self, loss):
        return 0.1 if loss is None else loss.clamp(max=0.1)


class ComparesLoss(TakesClosures):
    def rate(self, loss):
        return 0.1 if loss is None or loss < 1 else 0.01


def closed_step(model, optimizer, x, y):
    def loss_of():
        optimizer.zero_grad()
        loss = squared_loss(model, x, y)
        loss.backward()
        return loss

    loss = optimizer.step(loss_of)
    optimizer.zero_grad()
    return loss


@pytest.mark.parametrize("kind", first(1, (ClampsLoss, ComparesLoss)))
def test_an_optimizer_that_computes_with_its_closures_loss_is_refused(kind):
    model = Mlp()
    optimizer, before = kind(model.parameters()), values(model)
    with pytest.raises(UpdateError, match=f"{kind.__name__}.step computes with the loss"):
        zero(closed_step)(model, optimizer, *BATCH)
    assert_untouched(model, optimizer, before)
    zero(good_step)(model, optimizer, *BATCH)


def test_an_optimizer_that_returns_its_closures_loss_trains():
    model, eager = Mlp(), Mlp()
    eager.load_state_dict(model.state_dict())
    optimizer, other = (TakesClosures(one.parameters()) for one in (model, eager))
    step = zero(closed_step)
    for _ in range(2):
        assert step(model, optimizer, *BATCH) == closed_step(eager, other, *BATCH)


def test_hooks_on_every_optimizers_step_are_refused():
    handle = register_optimizer_step_post_hook(lambda *_: None)
    model = Mlp()
    try:
        with pytest.raises(StepError, match="step hooks .*global"):
            zero(good_step)(model, sgd(model), *BATCH)
    finally:
        handle.remove()


def test_setting_a_learning_rate_inside_the_step_is_refused_and_leaves_the_optimizer_alone():
    def step(model, optimizer, x, y):
        for group in optimizer.param_groups:
            group["lr"] = 0.5
        return good_step(model, optimizer, x, y)

    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with pytest.raises(StepError, match="sets a hyperparameter .* before the call"):
        zero(step)(model, optimizer, *BATCH)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["capturable"]) == (
        0.1,
        False,
    )


class Nudged(torch.optim.SGD):
    """Reads an attribute of its own at every step, in a method of its own."""

    nudge = 0.0

    def nudged(self, lr):
        return lr + self.nudge

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * self.nudged(group["lr"]))


def copies_a_rate(model, optimizer, groups):
    groups[0]["lr"].copy_(torch.tensor(0.5))


def scales_a_rate_in_a_view(model, optimizer, groups):
    groups[0]["lr"].view(-1).mul_(0.5)


def assigns_a_rate_elsewhere(model, optimizer, groups):
    groups[0]["lr"] = 0.5


def sets_what_its_step_reads(model, optimizer, groups):
    optimizer.nudge = 0.5


def scales_a_moment(model, optimizer, groups):
    optimizer.state[model.head.weight]["momentum_buffer"].mul_(0.5)


def replaces_a_moment(model, optimizer, groups):
    state = optimizer.state[model.head.weight]
    state["momentum_buffer"] = torch.zeros_like(state["momentum_buffer"])


def momentum(parameters, lr):
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


@pytest.mark.parametrize(
    ("write", "make"),
    (
        (copies_a_rate, torch.optim.AdamW),
        nightly(scales_a_rate_in_a_view, torch.optim.AdamW),
        nightly(assigns_a_rate_elsewhere, torch.optim.AdamW),
        (sets_what_its_step_reads, Nudged),
        (scales_a_moment, momentum),
        nightly(replaces_a_moment, momentum),
    ),
)
def test_writing_what_an_update_reads_before_it_is_refused(write, make):
    def step(model, optimizer, x, y, groups):
        squared_loss(model, x, y).backward()
        with torch.no_grad():
            write(model, optimizer, groups)
        optimizer.step()
        optimizer.zero_grad()

    model = Mlp()
    optimizer = make(model.parameters(), lr=torch.tensor(0.1))
    good_step(model, optimizer, *BATCH)
    with pytest.raises(StepError, match="sets a hyperparameter or a state .* before the call"):
        zero(step, 0)(model, optimizer, *BATCH, optimizer.param_groups)


@pytest.mark.nightly
def test_what_no_update_reads_may_be_written_before_it_and_rates_after_it():
    class Noting(torch.optim.SGD):
        notes = 0

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.norm = torch.zeros(())

    def step(model, optimizer, x, y):
        loss = squared_loss(model, x, y)
        loss.backward()
        with torch.no_grad():
            optimizer.notes += 1
            optimizer.norm.add_(model.head.weight.grad.norm())
            optimizer.step()
            optimizer.param_groups[0]["lr"].mul_(0.5)
        optimizer.zero_grad()
        return loss

    found = []
    for compiled in (step, zero(step, 0)):
        torch.manual_seed(0)
        model = Mlp()
        optimizer = Noting(model.parameters(), lr=torch.tensor(0.1))
        losses = [compiled(model, optimizer, *BATCH).detach() for _ in range(3)]
        found.append((losses, optimizer.notes, optimizer.norm, optimizer.param_groups[0]["lr"]))
    torch.testing.assert_close(*found)


class RemembersInList(torch.optim.Optimizer):
    """Keeps its last two gradients in a list, one state."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                last = self.state[p].get("history", [torch.zeros_like(p)])[0]
                self.state[p]["history"] = [p.grad.clone(), last]
                p.sub_(p.grad + last, alpha=group["lr"])


class Turns:
    """Counts, inside: GaLore's projectors, for one, are objects with numbers and tensors."""

    def __init__(self):
        self.count = 0


class CountsInObjects(torch.optim.Optimizer):
    """Divides by how many steps an object in each parameter's state has counted."""

    def __init__(self, params, first: int = 1):
        super().__init__(params, {"lr": 0.1})
        self.first = first

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                if state["step"] >= self.first:
                    turns = state.setdefault("turns", Turns())
                    turns.count += 1
                    p.add_(p.grad, alpha=-group["lr"] / turns.count)


@pytest.mark.parametrize(("kind", "stage"), each_value((RemembersInList, CountsInObjects), (3, 0)))
def test_lists_and_objects_in_states_are_left_to_the_optimizers_own_step(kind, stage):
    model, eager = Mlp(), Mlp()
    eager.load_state_dict(model.state_dict())
    optimizer, other = kind(model.parameters()), kind(eager.parameters())
    assert good_step(model, optimizer, *BATCH) == good_step(eager, other, *BATCH)
    step = zero(good_step, stage)
    for _ in range(2):
        assert step(model, optimizer, *BATCH) == good_step(eager, other, *BATCH)


@pytest.mark.parametrize("stage", only((3,), (0, 3)))
def test_an_object_in_a_state_is_refused_when_it_appears(stage):
    model = Mlp()
    optimizer, step = CountsInObjects(model.parameters(), first=3), zero(good_step, stage)
    for _ in range(2):
        step(model, optimizer, *BATCH)
    words = "CountsInObjects.step keeps an object of class Turns as state `turns`, .*of their own"
    with pytest.raises(StepError, match=words):
        step(model, optimizer, *BATCH)


class Writing(torch.optim.Optimizer):
    """``write`` is what it does to ``p.grad``."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.write(p, group["lr"])


class Signed(Writing):
    def write(self, p, lr):
        p.sub_(p.grad.sign_(), alpha=lr)


class Clearing(Writing):
    def write(self, p, lr):
        p.sub_(p.grad, alpha=lr)
        p.grad = None


class ClearingBiases(Writing):
    def write(self, p, lr):
        p.sub_(p.grad, alpha=lr)
        if p.dim() == 1:
            p.grad = None


class Replacing(Writing):
    def write(self, p, lr):
        p.grad = p.grad.sign()
        p.sub_(p.grad, alpha=lr)


@pytest.mark.parametrize("kind", first(1, (Signed, ClearingBiases, Replacing)))
def test_an_optimizer_that_writes_gradients_is_refused_where_somebody_reads_them(kind):
    def step(model, optimizer, x, y):
        loss = squared_loss(model, x, y)
        loss.backward()
        optimizer.step()
        return loss

    model, eager = Mlp(), Mlp()
    eager.load_state_dict(model.state_dict())
    with pytest.raises(StepError, match=r"writes to p\.grad.*read after it"):
        zero(step)(model, kind(model.parameters()), *BATCH)
    zero(good_step)(model, kind(model.parameters()), *BATCH)
    good_step(eager, kind(eager.parameters()), *BATCH)
    trained = model.state_dict()
    assert all(torch.equal(trained[name], value) for name, value in eager.state_dict().items())


@pytest.mark.parametrize("stage", only((3,), (0, 3)))
def test_an_optimizer_that_clears_gradients_does_so(stage):
    def step(model, optimizer, x, y):
        loss = squared_loss(model, x, y)
        loss.backward()
        optimizer.step()
        return loss

    model, eager = Mlp(), Mlp()
    eager.load_state_dict(model.state_dict())
    optimizer, other = Clearing(model.parameters()), Clearing(eager.parameters())
    run = zero(step, stage)
    for _ in range(3):
        assert run(model, optimizer, *BATCH) == step(eager, other, *BATCH)
        assert all(p.grad is None for p in model.parameters())
