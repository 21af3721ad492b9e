"""One kernel per update is as exact as torch's own, for every optimizer and any length."""

import json
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.kit.covering import each_value, first, nightly, only
from tests.kit.optimizers import VARIANTS
from tests.runtime.optimizer.test_update import layout
from zerofx import compat
from zerofx.codegen import kernel
from zerofx.codegen.kernels import Kernels
from zerofx.runtime.optimizer import update as updates
from zerofx.runtime.optimizer.setup import UpdateSettings
from zerofx.runtime.optimizer.update import OptimizerRunner

LENGTHS = (1, 3, 127, 1024, 1025)
LONG = 2**20 + 7
STEPS = 100

# Of which the compiled kernel is tested by default: between them, every operator that the split
# rewrites.  The others are compiled in another tier.
COMPILED = ("adamw_amsgrad_maximize", "sgd_nesterov", "rprop", "radam_tensor_lr", "lion")


class Trained:
    """One flat parameter, three times: in a kernel, in torch.optim, and there in float64."""

    def __init__(self, make, length: int, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        start = torch.randn(length, generator=generator)
        self.mean = torch.randn(length, generator=generator)
        self.generator = generator
        self.parameter = nn.Parameter(start.clone())
        self.single, self.double = nn.Parameter(start.clone()), nn.Parameter(start.double())
        self.optimizer = make([self.parameter])
        self.others = [make([self.single]), make([self.double])]
        table = {0: (self.parameter, layout(self.parameter, 1))}
        self.runner = OptimizerRunner(self.optimizer, table, UpdateSettings(rank=0, sharded=True))
        self.data = self.parameter.detach().clone()

    def gradient(self):
        noise = torch.randn(self.data.shape, generator=self.generator)
        return self.mean + noise

    def step(self, gradient=None):
        gradient = self.gradient() if gradient is None else gradient
        self.runner.begin()
        self.runner.run_together([self.data], [gradient.clone()], [0])
        self.runner.end()
        self.single.grad, self.double.grad = gradient.clone(), gradient.double()
        for optimizer in self.others:
            optimizer.step()

    def check(self):
        """Errors against float64, and what is allowed: twice torch's own and a few roundings."""
        exact = self.double.detach()
        for size in (rms, largest):
            mine, torchs = (size(p.double() - exact) for p in (self.data, self.single.detach()))
            rounding = torch.finfo(torch.float32).eps * largest(exact)
            assert mine <= 2 * torchs + 8 * rounding, f"{size.__name__}: {mine} against {torchs}"


def rms(error):
    return error.square().mean().sqrt().item()


def largest(error):
    return error.abs().max().item()


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """A kernel whatever the length; returns how often one ran."""
    monkeypatch.setattr(updates, "FEWEST_ELEMENTS", 0)
    calls = []
    ready = kernel.UpdateKernel.ready

    def counted(self, *values):
        calls.append(self)
        return ready(self, *values)

    monkeypatch.setattr(kernel.UpdateKernel, "ready", counted)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # lengths that are not worth a thread
    yield calls
    torch.set_num_threads(num_threads)


@pytest.fixture
def uncompiled(monkeypatch):
    monkeypatch.setattr(compat.inductor, "CompiledForAnyLength", lambda gm: gm)


def train(name, lengths, steps, kernels):
    """Train each length with one runner's kernels, and check the errors at the end."""
    compiled = Kernels()
    for length in lengths:
        run = Trained(VARIANTS[name], length)
        run.runner.kernels = compiled
        kernels.clear()
        for _ in range(steps):
            run.step()
        assert len(kernels) == steps
        run.check()


@pytest.mark.parametrize(
    "name", only(("adadelta_decay", "adam_amsgrad", "sgd_nesterov"), sorted(VARIANTS))
)
def test_the_split_update_is_as_exact_as_torchs(name, uncompiled, kernels):
    train(name, (1, 127), STEPS, kernels)


@pytest.mark.slow(reason="kernels of four lengths are compiled")
@pytest.mark.parametrize("name", only(("sgd_nesterov",), COMPILED))
def test_the_compiled_update_is_as_exact_as_torchs(name, kernels):
    train(name, LENGTHS, STEPS, kernels)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_every_update_compiled_is_as_exact_as_torchs(name, kernels):
    train(name, (*LENGTHS, LONG), STEPS, kernels)


@pytest.mark.nightly
def test_momentum_takes_the_branch_of_lerp_that_its_weight_asks_for():
    run = Trained(lambda p: torch.optim.AdamW(p, betas=(0.9, 0.99), foreach=False), 1025)
    for beta in (0.9, 0.9, 0.0, 0.3, 0.9):  # weights on both sides of 0.5
        run.optimizer.param_groups[0]["betas"] = (beta, 0.99)
        run.others[0].param_groups[0]["betas"] = (beta, 0.99)
        gradient = run.gradient()
        run.step(gradient)
        mine = run.optimizer.state[run.parameter]["exp_avg"]
        expected = run.others[0].state[run.single]["exp_avg"]
        # torch multiplies and adds in one rounding:
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-6)
        if not beta:
            assert mine.equal(gradient)  # which the formula of small weights does not give
    assert run.runner.trace_count == 2  # without states, and with


def optimizer_of(update, **defaults):
    """A class whose step is ``update(group, p, state)`` for each parameter."""

    class Custom(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.01, **defaults})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    update(group, p, self.state[p])

    return Custom


def writes_to_out(group, p, state):
    if not state:
        state["scale"], state["scaled"] = torch.ones_like(p), torch.zeros_like(p)
    torch.maximum(state["scale"], p.grad.abs(), out=state["scale"])
    state["scaled"] = torch.div(p.grad, state["scale"], out=state["scaled"])
    torch.sub(p, state["scaled"] * group["lr"], out=p)


def goes_towards_a_number(group, p, state):
    if not state:
        state["anchor"] = torch.zeros((), dtype=p.dtype)
    state["anchor"] += 1
    p.lerp_(state["anchor"], 0.1).lerp_(state["anchor"] / 4, group["lr"])
    p.sub_(torch.where(p > state["anchor"], p.grad, -p.grad), alpha=group["lr"])


@pytest.mark.slow(reason="kernels are compiled")
@pytest.mark.parametrize("update", [writes_to_out, goes_towards_a_number])
def test_a_custom_update_is_as_exact_as_torchs(update, kernels):
    run = Trained(optimizer_of(update), 1025)
    for _ in range(5):
        run.step()
    run.check()
    assert kernels
    for name, state in run.optimizer.state[run.parameter].items():
        torch.testing.assert_close(state, run.others[0].state[run.single][name])


def counts_elements(group, p, state):
    if not state:
        state["step"], state["sum"] = 2**24, torch.zeros_like(p, dtype=torch.int64)
    state["step"] += 1
    state["sum"].add_(state["step"])
    p.sub_(p.grad * (state["sum"] % 2 == 0), alpha=group["lr"])


def compares_counts(group, p, state):
    if not state:
        state["step"], state["last"] = 2**24, torch.full_like(p, 2**24, dtype=torch.int64)
    state["step"] += 1
    state["last"].masked_fill_(p.grad > 0, state["step"])
    p.sub_(torch.where(state["last"] == state["step"], p.grad, 0), alpha=group["lr"])


@pytest.mark.parametrize("update", [counts_elements, compares_counts])
def test_integers_are_not_made_floats(update, uncompiled):
    run = Trained(optimizer_of(update), 1025)
    for _ in range(4):
        run.step()
    run.check()
    for name, state in run.optimizer.state[run.parameter].items():
        torch.testing.assert_close(state, run.others[0].state[run.single][name], rtol=0, atol=0)


def uses_what_no_rule_is_for(group, p, state):
    grad = p.grad.clamp(-3.0, 3.0)
    p.sub_(torch.tanh(grad).div(0.3, rounding_mode="floor"), alpha=group["lr"])
    p.sub_(p.abs().pow(group["lr"]).mul_(p.atan2(p.grad)), alpha=group["lr"])
    torch._foreach_add_([p], [p.grad], alpha=-group["lr"])


def uses_a_number_that_it_changes_then(group, p, state):
    scale = state.setdefault("scale", torch.tensor(0.5))
    p.mul_(1 - scale * group["lr"])
    scale.mul_(0.5)


def uses_numbers_that_differ_by_what_is_named(group, p, state):
    c = state.setdefault("c", torch.tensor(0.5))
    p.sub_(p.grad * c.clamp(min=0.9)).sub_(p.grad.sign() * c.clamp(max=0.1))
    p.sub_(p.grad * torch.add(c, c, alpha=2)).add_(p.grad * torch.add(c, c, alpha=3))
    p.sub_(p.grad * torch.addcmul(c, c, c, value=0.3)).sub_(p.grad * torch.addcmul(c, c, c))
    p.sub_(p.grad * torch.div(c, 0.3, rounding_mode="floor")).sub_(p.grad * torch.div(c, 0.3))


def keeps_a_number_outside(group, p, state):
    p.sub_(p.grad * _OUTSIDE)


_OUTSIDE = torch.tensor(0.125)


@pytest.mark.parametrize(
    "update",
    [
        uses_what_no_rule_is_for,
        uses_a_number_that_it_changes_then,
        uses_numbers_that_differ_by_what_is_named,
        keeps_a_number_outside,
    ],
)
def test_an_update_that_triton_is_not_written_for_has_a_kernel_too(update, uncompiled, kernels):
    run = Trained(optimizer_of(update), 1025)
    for _ in range(4):
        run.step()
    run.check()
    assert len(kernels) == 4


def test_an_operator_that_takes_no_tensor_for_a_number_runs_by_itself(uncompiled, kernels):
    def update(group, p, state):
        p.sub_(nn.functional.leaky_relu(p.grad, group["lr"]))

    run = Trained(optimizer_of(update), 1025)
    run.step()
    run.check()
    assert not kernels


def corrects_rounding(group, p, state):
    """Kahan 1965, as optimizers of bfloat16 parameters do."""
    left = state.setdefault("left", torch.zeros_like(p))
    left.add_(p.grad, alpha=-group["lr"])
    before = p.clone()
    p.add_(left)
    left.add_(before.sub_(p))


def corrects_rounding_of_a_copy(group, p, state):
    left = state.setdefault("left", torch.zeros_like(p))
    left.add_(p.grad, alpha=-group["lr"])
    after = p + left
    left.sub_(after - p)
    p.copy_(after)


def corrects_rounding_of_lists(group, p, state):
    left = state.setdefault("left", torch.zeros_like(p))
    torch._foreach_add_([left], [p.grad * -group["lr"]])
    before = [p.clone()]
    torch._foreach_add_([p], [left])
    torch._foreach_sub_(before, [p])
    torch._foreach_add_([left], before)


@pytest.mark.slow(reason="kernels are compiled")
@pytest.mark.parametrize("dtype", first(1, [torch.bfloat16, torch.float16]))
@pytest.mark.parametrize(
    "update",
    only(
        (corrects_rounding_of_lists,),
        [corrects_rounding, corrects_rounding_of_a_copy, corrects_rounding_of_lists],
    ),
)
def test_an_update_that_makes_up_for_its_rounding_finds_it(update, dtype, kernels):
    start = torch.linspace(1, 2, 1025).to(dtype)
    parameter = nn.Parameter(start.clone())
    optimizer = optimizer_of(update, lr=1e-4)([parameter])
    runner = OptimizerRunner(
        optimizer, {0: (parameter, layout(parameter, 1))}, UpdateSettings(rank=0, sharded=True)
    )
    data = start.clone()
    for _ in range(200):
        runner.begin()
        runner.run_together([data], [torch.ones_like(data)], [0])
        runner.end()
    assert kernels
    moved = (start - data).float().mean().item()
    assert 0.015 < moved < 0.025  # without the correction next to nothing moves


@pytest.mark.parametrize(
    "name, value", first(3, each_value(sorted(VARIANTS), (math.nan, math.inf, -math.inf)))
)
def test_what_is_not_finite_goes_where_torch_puts_it(name, value, uncompiled):
    assert_not_finite_as_in_torch(name, value)


@pytest.mark.parametrize("name", only(("sgd_nesterov",), COMPILED))
def test_what_is_not_finite_goes_where_torch_puts_it_compiled(name):
    kernels = Kernels()
    for value in (float("nan"), float("inf"), float("-inf")):
        assert_not_finite_as_in_torch(name, value, kernels)


def assert_not_finite_as_in_torch(name, value, kernels=None):
    run = Trained(VARIANTS[name], 37)
    run.runner.kernels = Kernels() if kernels is None else kernels
    for number in range(4):
        gradient = run.gradient()
        if number == 1:
            gradient[::5] = value  # in what is done 16 at a time, and in the tail
        run.step(gradient)
    assert not run.data.isfinite().all() or name.startswith(("rprop", "lion"))
    torch.testing.assert_close(run.data, run.single.detach(), rtol=1e-4, atol=1e-4, equal_nan=True)
    expected = run.others[0].state[run.single] if run.others[0].state else {}
    for key, state in run.optimizer.state.get(run.parameter, {}).items():
        torch.testing.assert_close(state, expected[key], rtol=1e-4, atol=1e-4, equal_nan=True)


def bytes_allocated(run: Callable[[], object], folder: Path) -> list[int]:
    """The size of everything that torch's CPU allocator gives out meanwhile, freed or not."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    profile.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    sizes = [event["args"]["Bytes"] for event in events if event.get("name") == "[memory]"]
    return [size for size in sizes if size > 0]


ONE_NUMBER_BYTES = 8


@pytest.mark.parametrize("name", only(("sgd_nesterov",), COMPILED))
def test_an_update_allocates_nothing_beyond_states(name, tmp_path):
    run = Trained(VARIANTS[name], 10_000)
    for _ in range(8):  # radam takes its last branch at the 6th
        run.step()
    gradient = run.gradient()

    def update(together):
        run.runner.begin()
        if together:
            run.runner.run_together([run.data], [gradient], [0])
        else:
            run.runner.run(run.data, gradient, 0)
        run.runner.end()

    assert max(bytes_allocated(lambda: update(True), tmp_path), default=0) <= ONE_NUMBER_BYTES
    # That the instrument works:
    assert max(bytes_allocated(lambda: update(False), tmp_path)) >= 4 * 10_000


@pytest.mark.parametrize("name", only(("sgd_nesterov",), COMPILED))
def test_a_shard_without_elements_is_updated_to_one(name, kernels):
    run = Trained(VARIANTS[name], 0)
    for _ in range(3):
        run.step()
    assert len(kernels) == 3 and run.data.shape == (0,)
    for state in run.optimizer.state.get(run.parameter, {}).values():
        assert state.shape in ((), (0,))


def test_a_learning_rate_that_is_nan_makes_everything_nan(uncompiled):
    run = Trained(VARIANTS["adamw"], 5)
    run.step()
    for optimizer in (run.optimizer, *run.others):
        optimizer.param_groups[0]["lr"] = float("nan")
    run.step()
    run.step()
    assert run.data.isnan().all() and run.single.isnan().all()
    with pytest.raises(ValueError, match="Invalid beta"):  # torch checks what its class is given
        torch.optim.AdamW([run.parameter], betas=(float("nan"), 0.9))


@pytest.mark.nightly
def test_other_threads_of_python_run_beside_a_kernel(monkeypatch):
    """Inductor's own binding of a kernel holds Python's lock, and nobody else comes to a turn."""
    calls: list[tuple[float, float]] = []
    original = compat.inductor._WithoutLock.__call__

    def timed(self, *arguments):
        begun = time.perf_counter()
        original(self, *arguments)
        calls.append((begun, time.perf_counter()))

    monkeypatch.setattr(compat.inductor._WithoutLock, "__call__", timed)
    trained = Trained(lambda parameters: torch.optim.AdamW(parameters), 2**25)
    turns: list[float] = []
    is_over = threading.Event()

    def take_turns():
        while not is_over.wait(0.001):
            turns.append(time.perf_counter())

    thread = threading.Thread(target=take_turns)
    gradient = torch.ones(2**25)
    for number in range(4):
        if number == 1:  # it has been compiled
            calls.clear()
            thread.start()
        trained.runner.begin()
        trained.runner.run_together([trained.data], [gradient], [0])
        trained.runner.end()
    is_over.set()
    thread.join()
    assert len(calls) == 3
    assert max(sum(begun < turn < ended for turn in turns) for begun, ended in calls) >= 3


def error_feedback(p, state, momentum, lr):
    full = p - lr * p.grad + state.setdefault("kept", torch.zeros_like(p))
    rounded = full.bfloat16().float()
    state["kept"].copy_(full - rounded)
    p.copy_(rounded)


def in_half(p, state, momentum, lr):
    full = p.grad + state.setdefault("kept", torch.zeros_like(p))
    rounded = full.half().float()
    state["kept"].copy_(full - rounded)
    p.sub_(lr * rounded)


def in_double(p, state, momentum, lr):
    state.setdefault("kept", p.clone())
    old = p.double()
    p.sub_(lr * p.grad)
    state["kept"].copy_(old)


def the_first(p, state, momentum, lr):
    state.setdefault("kept", p.clone())
    p.sub_(lr * p.grad)


def the_last(p, state, momentum, lr):
    state["kept"] = p.clone()
    p.sub_(lr * p.grad)


def momentum_before(p, state, momentum, lr):
    state["kept"] = momentum.clone()
    momentum.mul_(0.9).add_(p.grad)
    p.sub_(lr * momentum)


class Keeping(torch.optim.Optimizer):
    """Keeps something of what tensors were before they were updated, or rounded."""

    def __init__(self, parameters, what):
        super().__init__(parameters, {"lr": 0.1})
        self.what = what

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                momentum = state.setdefault("momentum", torch.zeros_like(p))
                self.what(p, state, momentum, group["lr"])


@pytest.mark.slow(reason="kernels are compiled")
@pytest.mark.parametrize(
    "what",
    (the_first, the_last, momentum_before, in_double, *map(nightly, (in_half, error_feedback))),
)
def test_what_is_kept_is_neither_new_nor_unrounded(what, kernels):
    """Inductor drops clones, and conversions there and back."""
    run = Trained(lambda parameters: Keeping(parameters, what), 1025)
    for _ in range(3):
        run.step()
    assert len(kernels) == 3
    kept = run.optimizer.state[run.parameter]["kept"]
    expected = run.others[0].state[run.single]["kept"]
    assert expected.any()
    torch.testing.assert_close(kept, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(run.data, run.single.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "own_first"), (("adamw", 0), ("sgd_momentum", 1), ("rmsprop_centered", 0))
)
def test_an_optimizer_that_keeps_no_old_values_is_compiled(name, own_first, kernels, monkeypatch):
    """Its first step too, if that is another, which makes states that it does not read."""
    compiled = []
    monkeypatch.setattr(
        compat.inductor, "CompiledForAnyLength", lambda gm: compiled.append(gm) or gm
    )
    run = Trained(VARIANTS[name], 1025)
    for number in (1, 1 + own_first):
        run.step()
        assert len(compiled) == number
