"""The first update runs the kernel of later ones, on zeros, only if that does the same."""

import pytest
import torch
from torch import nn

from tests.kit.optimizers import VARIANTS
from tests.runtime.optimizer.test_update import layout
from zerofx import compat
from zerofx.codegen import kernel
from zerofx.runtime.optimizer import update as updates
from zerofx.runtime.optimizer.setup import UpdateSettings
from zerofx.runtime.optimizer.update import OptimizerRunner

LENGTH, STEPS = 64, 3


@pytest.fixture
def made(monkeypatch):
    """The kernels that have run, by the names of what they load; operator by operator."""
    monkeypatch.setattr(updates, "FEWEST_ELEMENTS", 0)
    monkeypatch.setattr(compat.inductor, "CompiledForAnyLength", lambda gm: gm)
    found = []
    ready = kernel.UpdateKernel.ready

    def noted(self, *values):
        streams = self.program.streams
        found.append((self, {one.name for one in streams if one.kind in ("state", "new state")}))
        return ready(self, *values)

    monkeypatch.setattr(kernel.UpdateKernel, "ready", noted)
    return found


def train(make, steps=STEPS):
    """Train a shard by kernels, and the same parameter by torch; compare after every step."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(LENGTH, generator=generator)
    parameter, other = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizer, eager = make([parameter]), make([other])
    table = {0: (parameter, layout(parameter, 1))}
    runner = OptimizerRunner(optimizer, table, UpdateSettings(rank=0, sharded=True))
    data = parameter.detach().clone()
    for _ in range(steps):
        gradient = torch.randn(LENGTH, generator=generator) * 10.0 ** torch.randint(
            -6, 6, (LENGTH,), generator=generator
        )
        gradient[:2] = torch.tensor([0.0, -0.0])
        runner.begin()
        runner.run_together([data], [gradient.clone()], [0])
        runner.end()
        other.grad = gradient
        eager.step()
        torch.testing.assert_close(data, other.detach(), rtol=1e-5, atol=1e-7)
        mine, theirs = optimizer.state[parameter], eager.state[other]
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(mine[name], value, rtol=1e-5, atol=1e-9)
            assert not isinstance(value, torch.Tensor) or mine[name].dtype == value.dtype


def has_one_kernel(made) -> bool:
    """Return whether the first step ran what the second did."""
    return made[0][0] is made[1][0]


# Whose states begin as zeros, and whose first update does what each does.
AS_LATER = (
    *("adam", "adam_amsgrad", "adamw", "adamw_amsgrad_maximize", "adamw_tensor_lr", "rmsprop"),
    *("rmsprop_centered", "adadelta", "adamax", "lion"),
)
# Whose first update is another, whose states begin as ones, or are there from the start.
OTHERWISE = ("sgd_momentum", "sgd_nesterov", "nadam", "rprop")


@pytest.mark.parametrize("name", AS_LATER)
def test_the_first_update_runs_the_kernel_of_later_ones(name, made):
    train(VARIANTS[name])
    assert has_one_kernel(made)


@pytest.mark.parametrize("name", OTHERWISE)
def test_a_first_update_that_is_another_has_a_kernel_of_its_own(name, made):
    train(VARIANTS[name])
    assert not has_one_kernel(made)


class Own(torch.optim.Optimizer):
    """Momentum, begun by ``begin(p, state)``, with what ``other`` makes of the first gradient."""

    def __init__(self, parameters, begin, other=lambda grad: grad, beta=0.9):
        super().__init__(parameters, {"lr": 0.1, "beta": beta})
        self.begin, self.other = begin, other

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state, grad, beta = self.state[p], p.grad, group["beta"]
                if not state:
                    self.begin(p, state)
                    grad = self.other(grad)
                    beta = beta if self.begin is not with_a_weight_of_its_own else 0.0
                state["count"] += 1
                state["momentum"].mul_(beta).add_(grad, alpha=1 - beta)
                p.sub_(state["momentum"] / (1 - group["beta"] ** state["count"]) * group["lr"])


def with_zeros(p, state):
    state["count"], state["momentum"] = 0.0, torch.zeros_like(p)


def with_ones(p, state):
    state["count"], state["momentum"] = 0.0, torch.ones_like(p)


def from_a_later_count(p, state):
    state["count"], state["momentum"] = 1.0, torch.zeros_like(p)


def with_a_weight_of_its_own(p, state):
    state["count"], state["momentum"] = 0.0, torch.zeros_like(p)


def with_what_it_is_of(p, state):
    state["count"], state["momentum"] = 0.0, p.clone()


@pytest.mark.parametrize(
    "begin",
    [with_ones, from_a_later_count, with_a_weight_of_its_own, with_what_it_is_of],
)
def test_other_beginnings_have_kernels_of_their_own(begin, made):
    train(lambda parameters: Own(parameters, begin))
    assert not has_one_kernel(made)


@pytest.mark.parametrize(
    "other",
    [
        lambda grad: grad.clamp(-1e5, 1e5),
        lambda grad: grad * 1.0000001,
        lambda grad: torch.where(grad == 3.7, 0.0, grad),
        lambda grad: -grad,
    ],
    ids=["clamped", "scaled", "but for one value", "negated"],
)
def test_a_first_gradient_that_is_changed_is_not_taken_for_others(other, made):
    train(lambda parameters: Own(parameters, with_zeros, other))
    assert not has_one_kernel(made)


def test_an_optimizer_of_ones_own_that_begins_with_zeros_has_one_kernel(made):
    train(lambda parameters: Own(parameters, with_zeros))
    assert has_one_kernel(made)


class Begun(torch.optim.Optimizer):
    """Begins as ``begin(p, state)`` says, and then calls ``go_on(p, state)``."""

    def __init__(self, parameters, begin, go_on):
        super().__init__(parameters, {"lr": 0.1})
        self.begin, self.go_on = begin, go_on

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    self.begin(p, state)
                self.go_on(p, state)


def counts_in_one_element(p, state):
    state["n"], state["momentum"] = torch.zeros(1), torch.zeros_like(p)


def divides_by_a_count(p, state):
    state["n"], state["momentum"] = torch.tensor(2.0), torch.zeros_like(p)


def has_two_names_for_a_count(p, state):
    state["n"] = state["other"] = torch.zeros(())
    state["momentum"] = torch.zeros_like(p)


def keeps_nothing_under_a_name(p, state):
    state["none"], state["n"], state["momentum"] = None, torch.zeros(()), torch.zeros_like(p)


def counts(p, state):
    state["n"] += 1
    state["momentum"].mul_(0.9).add_(p.grad)
    p.sub_(state["momentum"], alpha=0.1)


def divides(p, state):
    factor = 1 / (state["n"] * 1.5).item()
    state["momentum"].mul_(0.9).add_(p.grad)
    p.sub_(state["momentum"], alpha=0.1 * factor)


@pytest.mark.parametrize(
    ("begin", "go_on"),
    [
        (counts_in_one_element, counts),
        (divides_by_a_count, divides),
        (has_two_names_for_a_count, lambda p, state: state["momentum"].add_(p.grad)),
        (keeps_nothing_under_a_name, counts),
    ],
)
def test_states_of_any_kind_are_what_torch_makes_of_them(begin, go_on, made):
    """Of whole parameters, whose states need be no shards."""
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(LENGTH))
    other = nn.Parameter(parameter.detach().clone())
    optimizer, eager = Begun([parameter], begin, go_on), Begun([other], begin, go_on)
    table = {0: (parameter, layout(parameter, 1))}
    runner = OptimizerRunner(
        optimizer, table, UpdateSettings(rank=0, sharded=False, seen_flat=True)
    )
    for _ in range(STEPS):
        gradient = torch.randn(LENGTH)
        runner.begin()
        runner.run_together([parameter.detach()], [gradient.clone()], [0])
        runner.end()
        other.grad = gradient
        eager.step()
        torch.testing.assert_close(parameter.detach(), other.detach(), rtol=1e-6, atol=1e-6)
        mine, theirs = optimizer.state[parameter], eager.state[other]
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(mine[name], value, rtol=1e-6, atol=1e-6)


def begins_vectors_as_they_are(p, state):
    state["momentum"] = torch.zeros_like(p) if p.dim() > 1 else p.clone()


def counts_vectors_from_five(p, state):
    state["n"] = torch.zeros(()) if p.dim() > 1 else torch.full((), 5.0)
    state["momentum"] = torch.zeros_like(p)


def counts_matrices_alone(p, state):
    if p.dim() > 1:
        state["n"] = torch.zeros(())
    state["momentum"] = torch.zeros_like(p)


def may_count(p, state):
    if "n" in state:
        state["n"] += 1
    state["momentum"].mul_(0.9).add_(p.grad)
    p.sub_(state["momentum"], alpha=0.1)


@pytest.mark.parametrize(
    "begin", [begins_vectors_as_they_are, counts_vectors_from_five, counts_matrices_alone]
)
def test_neighbours_begin_each_as_its_own_first_update_says(begin, made):
    """Joined shards run one update, which the first parameter's is not alone."""
    torch.manual_seed(0)
    shapes = [(8, 8), (8,)]
    data = torch.randn(72)
    parts = list(data.split([64, 8]))
    parameters = [
        nn.Parameter(part.clone().view(shape)) for part, shape in zip(parts, shapes, strict=True)
    ]
    others = [nn.Parameter(p.detach().clone()) for p in parameters]
    optimizer, eager = Begun(parameters, begin, may_count), Begun(others, begin, may_count)
    table = {index: (p, layout(p, 1, index)) for index, p in enumerate(parameters)}
    runner = OptimizerRunner(optimizer, table, UpdateSettings(rank=0, sharded=True))
    for _ in range(STEPS):
        gradients = torch.randn(72)
        runner.begin()
        runner.run_together(parts, list(gradients.clone().split([64, 8])), [0, 1])
        runner.end()
        for other, gradient in zip(others, gradients.split([64, 8]), strict=True):
            other.grad = gradient.view(other.shape)
        eager.step()
        for part, p, other in zip(parts, parameters, others, strict=True):
            torch.testing.assert_close(part, other.detach().flatten(), rtol=1e-6, atol=1e-6)
            mine, theirs = optimizer.state[p], eager.state[other]
            assert mine.keys() == theirs.keys()
            for name, value in theirs.items():
                torch.testing.assert_close(mine[name], value.flatten() if value.dim() else value)


def test_states_in_another_precision_are_begun_by_their_own_kernel(made):
    """``moment_dtype`` keeps states otherwise than the optimizer makes them."""
    parameter = nn.Parameter(torch.randn(LENGTH))
    optimizer = torch.optim.AdamW([parameter], foreach=False)
    table = {0: (parameter, layout(parameter, 1))}
    precision = updates.UpdateSettings(rank=0, sharded=True).precision
    settings = UpdateSettings(
        rank=0, sharded=True, precision=type(precision)(moment_dtype=torch.bfloat16)
    )
    runner = OptimizerRunner(optimizer, table, settings)
    data = parameter.detach().clone()
    for _ in range(2):
        runner.begin()
        runner.run_together([data], [torch.ones(LENGTH)], [0])
        runner.end()
    assert not has_one_kernel(made)
