"""Optimizers and models that another library has wrapped: trained as in eager, or refused."""

from __future__ import annotations

import copy
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch._dynamo.exc import Unsupported
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tests.conftest  # noqa: F401  # the backend's name
import zerofx
from tests.kit.checkpoints import assert_same
from tests.kit.covering import first, nightly
from tests.kit.models import features
from zerofx.errors import StepError
from zerofx.wrappers import unwrapped


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()


def built() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(wrap, stage: int | None, *, steps: int = 3, scheduled: bool = False):
    """Train, with a scheduler of the wrapper; return all that has become of it, and the losses."""
    model, optimizer = built()
    wrapper = wrap(optimizer)
    if scheduled:
        scheduler = torch.optim.lr_scheduler.StepLR(wrapper, 1, gamma=0.5)

    def step(x, y):
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        wrapper.step()
        wrapper.zero_grad()
        return loss

    compiled = step if stage is None else zero(step, stage)
    losses = []
    for number in range(steps):
        losses.append(compiled(*features(number, 4)).item())
        if scheduled:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # such as that the optimizer has not stepped
                scheduler.step()
    return model, wrapper, losses


def zero(step, stage):
    return torch.compile(step, backend="zero", options={"stage": stage, "lowering": "eager"})


class EverySecond(torch.optim.Optimizer):
    """Steps at every second call, as Accelerate's does while it accumulates; counts the calls."""

    def __init__(self, optimizer, scaler=None):
        self.optimizer, self.scaler, self.calls = optimizer, scaler, 0

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    @property
    def state(self):
        return self.optimizer.state

    def state_dict(self):
        return self.optimizer.state_dict()

    def step(self, closure=None):
        self.calls += 1
        if self.calls % 2 == 0:
            self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        if self.calls % 2 == 0:
            self.optimizer.zero_grad(set_to_none)


class Strategy:
    calls = 0

    def optimizer_step(self, optimizer, **kwargs):
        self.calls += 1
        return optimizer.step(**kwargs)


class Delegating:
    """Takes on the class of what it wraps, as Lightning's and Fabric's do."""

    def __init__(self, optimizer):
        self._optimizer, self._strategy, self.calls = optimizer, Strategy(), 0
        self._on_before_step = self._on_after_step = self._count
        bases = (type(self), type(optimizer))
        self.__class__ = type(f"Wrapped{type(optimizer).__name__}", bases, {})

    @property
    def optimizer(self):
        return self._optimizer

    def __getattr__(self, name):
        return getattr(self._optimizer, name)

    def _count(self):
        self.calls += 1


class LikeFabrics(Delegating):
    def step(self, closure=None):
        result = self._strategy.optimizer_step(
            self.optimizer, **({} if closure is None else {"closure": closure})
        )
        for callback in (self._count,):
            callback()
        return result


class LikeLightnings(Delegating):
    def step(self, closure=None, **kwargs):
        self._on_before_step()
        closure = closure or (lambda: None)
        result = self._strategy.optimizer_step(self._optimizer, closure=closure, **kwargs)
        self._on_after_step()
        return result


def around_another(optimizer):
    return EverySecond(LikeFabrics(optimizer))


@pytest.mark.parametrize(
    "wrap, stage",
    (
        (EverySecond, 0),
        nightly(LikeLightnings, 3),
        nightly(LikeFabrics, 3),
        nightly(EverySecond, 3),
        nightly(around_another, 3),
    ),
)
def test_a_wrapped_optimizer_does_what_its_wrapper_says(wrap, stage):
    model, wrapper, losses = train(wrap, stage, scheduled=True)
    other, expected, eager = train(wrap, None, scheduled=True)
    assert losses == eager
    assert_same(model.state_dict(), other.state_dict())
    assert_same(wrapper.optimizer.state_dict(), expected.optimizer.state_dict())
    assert wrapper.calls == expected.calls > 0
    mine, theirs = (getattr(one, "_strategy", None) for one in (wrapper, expected))
    assert mine is theirs is None or mine.calls == theirs.calls > 0


def accelerated(stage: int | None):
    """Accumulate over two calls with Accelerate, which says when its optimizer steps."""
    model, optimizer = built()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    wrapper = accelerator.prepare_optimizer(optimizer)

    def step(x, y):
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        wrapper.step()
        wrapper.zero_grad()
        return loss

    compiled = step if stage is None else zero(step, stage)
    losses = []
    for number in range(4):
        with accelerator.accumulate(model):
            losses.append(compiled(*features(number, 4)).item())
    return losses, model.state_dict(), wrapper.state_dict()


@pytest.mark.nightly
def test_accelerates_optimizer_steps_when_gradients_are_synchronized():
    losses, parameters, states = accelerated(3)
    expected_losses, expected_parameters, expected_states = accelerated(None)
    assert losses == expected_losses
    assert len(set(losses[:2])) == 2, "batches differ"
    assert_same(parameters, expected_parameters)
    assert_same(states, expected_states)


def scaled(optimizer):
    Accelerator(cpu=True)
    return AcceleratedOptimizer(optimizer, scaler=torch.amp.GradScaler("cpu"))


@pytest.mark.parametrize(
    "wrap", (scaled, lambda one: EverySecond(one, torch.amp.GradScaler("cpu")))
)
def test_a_wrapper_with_a_scaler_is_refused(wrap):
    words = "(AcceleratedOptimizer|EverySecond) wraps an optimizer and a GradScaler.*`optimizer`"
    with pytest.raises(StepError, match=words):
        train(wrap, 3)


@pytest.mark.parametrize("method", ("step", "unscale_"))
def test_a_scaler_that_is_given_a_wrapper_is_refused(method):
    model, optimizer = built()
    wrapper, scaler = EverySecond(optimizer), torch.amp.GradScaler("cpu")

    def step(x):
        scaler.scale(model(x).sum()).backward()
        getattr(scaler, method)(wrapper)

    with pytest.raises(StepError, match="GradScaler is given EverySecond.*has as `optimizer`"):
        zero(step, 0)(features(0, 4)[0])
    assert not optimizer.state


@pytest.mark.parametrize("method", first(1, ("step", "unscale_")))
def test_a_scaler_that_has_not_been_updated_refuses_the_next_call(method):
    model, optimizer = built()
    scaler = torch.amp.GradScaler("cpu")

    def step(x):
        scaler.scale(model(x).sum()).backward()
        getattr(scaler, method)(optimizer)

    compiled = zero(step, 0)
    compiled(features(0, 4)[0])
    words = rf"{method}\(\) has already been called .*since the last update"
    with pytest.raises(StepError, match=words):
        compiled(features(1, 4)[0])
    scaler.update()
    compiled(features(1, 4)[0])


def test_what_objects_have_in_the_place_of_their_classes_methods_is_called():
    model, optimizer = built()
    scaler, calls = torch.amp.GradScaler("cpu"), []
    scaler.update = lambda: calls.append("update")
    optimizer.zero_grad = lambda: calls.append("zero_grad")

    def step(x):
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    zero(step, 0)(features(0, 4)[0])
    assert calls == ["update", "zero_grad"]
    assert model.weight.grad is not None


class Prints(EverySecond):
    def step(self, closure=None):
        print(self.calls)
        self.optimizer.step(closure)


def with_another_step(optimizer):
    original = optimizer.step
    optimizer.step = lambda closure=None: original(closure)
    return optimizer


class Replaces(EverySecond):
    """Puts another function in the place of the optimizer's step, for as long as its own."""

    def step(self, closure=None):
        original, self.optimizer.step = self.optimizer.step, self._skip
        self.optimizer.step(closure)
        self.optimizer.step = original

    def _skip(self, closure=None):
        self.calls += 1


@pytest.mark.parametrize(
    "wrap, words",
    (
        (Replaces, "Replaces wraps an optimizer: its step"),
        (Prints, "Prints wraps an optimizer: its step.*without them"),
        (with_another_step, "SGD has methods of its own: its step"),
    ),
)
def test_methods_that_cannot_be_traced_are_named(wrap, words):
    with pytest.raises(Unsupported) as told:
        train(wrap, 3)
    assert re.search(words, str(told.value))


def test_what_a_step_sets_on_an_optimizer_stays():
    model, optimizer = built()
    optimizer.calls = 0

    def step(x):
        optimizer.calls += 1
        model(x).sum().backward()
        optimizer.step()
        optimizer.note = "stepped"

    compiled = zero(step, 3)
    for number in range(3):
        compiled(features(number, 4)[0])
    assert (optimizer.calls, optimizer.note) == (3, "stepped")


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_model_that_shards_by_itself_is_refused(one_rank):
    model = fully_shard(built()[0])

    def step(x):
        model(x).sum().backward()

    with pytest.raises(StepError, match="wrapped in FSDPLinear.*build the model without it"):
        zero(step, 3)(features(0, 4)[0])


def test_the_averaging_around_a_model_is_left_out_with_a_line_in_the_log(one_rank, caplog):
    def train(wrap, compiles):
        torch.manual_seed(0)
        model, optimizer = built()
        called = wrap(model)

        def step(x):
            optimizer.zero_grad()
            (called(x).square().mean() + called(2 * x).mean()).backward()
            optimizer.step()

        step = compiles(step)
        for number in range(3):
            step(features(number, 4)[0])
        zerofx.unshard(model, optimizer)
        return [parameter.detach().clone() for parameter in model.parameters()]

    with caplog.at_level("INFO", "zerofx"):
        found = train(DistributedDataParallel, lambda step: zero(step, 3))
    said = [record.message for record in caplog.records if "DistributedData" in record.message]
    assert len(said) == 1 and "Linear" in said[0]
    assert_same(found, train(lambda model: model, lambda step: step))


def test_the_module_in_a_parallel_one_trains(one_rank):
    model, optimizer = built()
    parallel = DistributedDataParallel(model)

    def step(x):
        parallel.module(x).sum().backward()
        optimizer.step()

    zero(step, 3)(features(0, 4)[0])
    assert optimizer.state


@pytest.mark.nightly
def test_checkpoints_and_unshard_take_wrapped_optimizers(tmp_path):
    model, wrapper, _ = train(LikeFabrics, 3, steps=2)
    zerofx.save(tmp_path / "one", model, wrapper)
    expected = wrapper.optimizer.state_dict()
    other, optimizer = built()
    zerofx.load(tmp_path / "one", other, EverySecond(optimizer))
    assert_same(copy.deepcopy(optimizer.state_dict()), expected)
    zerofx.unshard(model, wrapper)
    assert_same(wrapper.optimizer.state_dict(), expected)
    assert wrapper.optimizer.state[model.weight]["momentum_buffer"].shape == (3, 6)


class Hides(torch.optim.Optimizer):
    """A wrapper that says nothing of what it wraps."""

    def __init__(self, optimizer):
        self._hidden = optimizer

    @property
    def param_groups(self):
        return self._hidden.param_groups


def test_an_unknown_wrapper_is_refused_by_its_class(tmp_path):
    model, optimizer = built()
    for refuse in (
        lambda: zerofx.save(tmp_path / "one", model, Hides(optimizer)),
        lambda: zerofx.load(tmp_path / "one", model, Hides(optimizer)),
        lambda: zerofx.unshard(model, Hides(optimizer)),
        lambda: unwrapped(EverySecond(Hides(optimizer))),
    ):
        with pytest.raises(TypeError, match="(Hides|EverySecond) wraps an optimizer.*Give the opt"):
            refuse()
    assert not (tmp_path / "one").exists()
