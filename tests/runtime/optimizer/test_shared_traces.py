"""Programs share the traces of torch's own optimizers, and nothing but what is the same."""

from __future__ import annotations

import gc
import sys
import weakref
from unittest import mock

import pytest
import torch
from torch import Tensor, nn, optim

from tests.codegen.test_trace import layout, trace_custom
from tests.kit import models
from tests.kit.covering import exhaustive, first
from tests.kit.optimizers import VARIANTS
from zerofx.codegen.trace.arguments import group_values, plain_key, read_arguments
from zerofx.codegen.trace.trace import Update, trace_update
from zerofx.runtime.optimizer import traces
from zerofx.runtime.optimizer.traces import SharedTraces

# Lion is a user's class, and a default that is a tensor may change and stay the same object.
TORCHS = [name for name in VARIANTS if name != "lion" and not name.endswith("_tensor_lr")]


class Case:
    """What ``trace_update`` is given for an optimizer's only parameter as it is now."""

    def __init__(self, optimizer: optim.Optimizer, sharded: bool = True) -> None:
        (parameter,) = optimizer.param_groups[0]["params"]
        shard = (parameter.numel(),)
        state = {
            name: value.reshape(shard) if sharded and is_whole(value, parameter) else value
            for name, value in optimizer.state.get(parameter, {}).items()
        }
        self.optimizer, self.info = optimizer, layout(parameter)
        group = read_arguments(
            group_values(optimizer.param_groups[0]), shard_shape=None, inputs=set()
        )
        states = read_arguments(state, shard_shape=shard if sharded else None, inputs=state)
        self.scalars = (*group.scalars, *states.scalars)
        self.given = {"group": group, "state": states, "sharded": sharded}

    def traced(self) -> Update:
        return trace_update(self.optimizer, self.info, **self.given)

    def keys(self, shared: SharedTraces):
        return shared.keys(self.optimizer, self.info, **self.given)

    def found(self, shared: SharedTraces) -> Update | None:
        return shared.find(self.keys(shared), self.scalars)

    def kept(self, shared: SharedTraces) -> Update:
        update = self.traced()
        shared.keep(self.keys(shared), update)
        return update


def is_whole(value, parameter) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape


def stepped(make, shape, steps: int) -> optim.Optimizer:
    generator = torch.Generator().manual_seed(len(shape))
    parameter = nn.Parameter(torch.randn(shape, generator=generator))
    optimizer = make([parameter])
    for _ in range(steps):
        parameter.grad = torch.randn(shape, generator=generator)
        optimizer.step()
    return optimizer


def facts(update: Update) -> tuple:
    """All that an update does, and all that is made of it later."""
    nodes = update.graph_module.graph.nodes
    values = [node.meta["val"] for node in nodes if "val" in node.meta]
    return (
        update.computation,
        [(v.dtype, v.dim() > 0) if isinstance(v, Tensor) else type(v) for v in values],
        [node.meta.get("stack_trace") for node in nodes],
        (update.guard is None, update.conversions, update.optimizer, update.inputs),
        (update.clones_gradient, update.writes_gradient, update.of_any_sizes),
    )


SHAPES = ((4, 3), (2, 3, 5))
ODD_SHAPES = ((7, 1), (1,))


@pytest.mark.parametrize(
    "sharded, shapes, moments",
    (
        (True, SHAPES, (0, 7)),
        exhaustive(True, (*SHAPES, *ODD_SHAPES), (1, 2, 6)),
        exhaustive(False, SHAPES * 2, (0, 1, 7)),
    ),
    ids=("shards", "more", "whole"),
)
@pytest.mark.parametrize("name", first(25, TORCHS))
def test_a_shared_trace_is_the_one_that_would_be_made(name, sharded, shapes, moments):
    shared, found = SharedTraces(), 0
    for steps in moments:
        for number, shape in enumerate(shapes):
            optimizer = stepped(VARIANTS[name], shape, steps)
            optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] * (number + 1)
            case = Case(optimizer, sharded)
            known = case.found(shared)
            made = case.kept(shared) if known is None else case.traced()
            if known is not None:
                found += 1
                assert facts(known) == facts(made)
    assert found or name in NOT_OF_ANY_SIZES


# Rprop writes by masks, which Python indexing looks at.
NOT_OF_ANY_SIZES = {name for name in TORCHS if name.startswith("rprop")}


@pytest.mark.parametrize("name", ("sgd", "adam", "adamw_decay", "rmsprop_centered", "nadam"))
def test_sizes_do_not_count(name):
    shared = SharedTraces()
    Case(stepped(VARIANTS[name], (4, 3), 1)).kept(shared)
    assert Case(stepped(VARIANTS[name], (2, 3, 5), 1)).found(shared) is not None
    # Number-like and strided parameters are traced for themselves, and whole ones.
    assert Case(stepped(VARIANTS[name], (1, 1), 1)).found(shared) is None
    assert Case(stepped(VARIANTS[name], (), 1)).found(shared) is None
    other = optimizer_of(nn.Parameter(torch.ones(3, 4).t()), VARIANTS[name])
    assert Case(other).found(shared) is None
    assert Case(stepped(VARIANTS[name], (2, 3, 5), 1), sharded=False).found(shared) is None


def optimizer_of(parameter, make=VARIANTS["adamw"]):
    return make([parameter])


def adamw(**values):
    return optimizer_of(nn.Parameter(torch.ones(4, 3)), lambda p: optim.AdamW(p, **values))


class Own(optim.AdamW):
    pass


def named(optimizer, name, value):
    setattr(optimizer, name, value)
    return optimizer


def in_group(optimizer, name, value):
    optimizer.param_groups[0][name] = value
    return optimizer


def with_state(value):
    optimizer = stepped(lambda p: optim.SGD(p, momentum=0.9), (4, 3), 1)
    (state,) = optimizer.state.values()
    state["count"] = value
    return optimizer


OTHERS = {
    "a flag": lambda: adamw(maximize=True),
    "a class": lambda: optim.Adam(adamw().param_groups[0]["params"]),
    "a dtype": lambda: optimizer_of(nn.Parameter(torch.ones(4, 3, dtype=torch.float64))),
    "an attribute": lambda: named(adamw(), "mine", 1),
    "an entry of the group": lambda: in_group(adamw(), "mine", "x"),
    "states": lambda: stepped(VARIANTS["adamw"], (4, 3), 1),
    "a number of another type": lambda: in_group(adamw(), "weight_decay", 0),
    "a default": lambda: named_default(adamw(), "differentiable", 0),
    "another learning rate by default": lambda: adamw(lr=0.5),
}


def named_default(optimizer, name, value):
    optimizer.defaults[name] = value
    return optimizer


@pytest.mark.parametrize("name", OTHERS)
def test_what_a_trace_depends_on_makes_it_another(name):
    shared = SharedTraces()
    Case(adamw()).kept(shared)
    numbers = {"lr": 0.5, "weight_decay": 0.3, "betas": (0.1, 0.2)}
    changed = adamw()
    changed.param_groups[0].update(numbers)
    assert Case(changed).found(shared) is not None
    assert Case(OTHERS[name]()).found(shared) is None


def test_integers_in_the_state_are_not_floats():
    shared = SharedTraces()
    Case(with_state(3)).kept(shared)
    assert Case(with_state(4)).found(shared) is not None
    assert Case(with_state(4.0)).found(shared) is None


def test_a_branch_on_a_number_holds_for_its_side_alone():
    shared = SharedTraces()
    Case(in_group(adamw(), "weight_decay", 0.1)).kept(shared)
    assert Case(in_group(adamw(), "weight_decay", 0.2)).found(shared) is not None
    assert Case(in_group(adamw(), "weight_decay", 0.0)).found(shared) is None


@pytest.mark.parametrize(
    "change",
    (
        torch.no_grad,
        torch.inference_mode,
        lambda: torch._functorch.config.patch(fake_tensor_allow_meta=False),
        lambda: torch._inductor.config.patch(emulate_precision_casts=True),
        lambda: mock.patch("torch.compiler.is_compiling", lambda: True),
    ),
    ids=("no_grad", "inference_mode", "functorch", "inductor", "compiling"),
)
def test_settings_make_another(change):
    shared = SharedTraces()
    Case(adamw()).kept(shared)
    optimizer = adamw()
    with change():
        assert Case(optimizer).found(shared) is None
    assert Case(optimizer).found(shared) is not None


def test_the_default_dtype_makes_another():
    shared = SharedTraces()
    Case(adamw()).kept(shared)
    optimizer = adamw()
    torch.set_default_dtype(torch.float64)
    try:
        assert Case(optimizer).found(shared) is None
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "inside",
    (
        lambda: torch.device("cpu"),
        lambda: torch.autocast("cpu"),
        lambda: torch.utils.flop_counter.FlopCounterMode(display=False),
    ),
    ids=("device", "autocast", "dispatch mode"),
)
def test_nothing_is_shared_inside_of(inside):
    optimizer = adamw()
    with inside():
        assert not Case(optimizer).keys(SharedTraces())


UNKNOWN = {
    "a subclass": lambda: Own(adamw().param_groups[0]["params"]),
    "a user's class": lambda: VARIANTS["lion"]([nn.Parameter(torch.ones(4, 3))]),
    "an object in the group": lambda: in_group(adamw(), "mine", object()),
    "an object in a list": lambda: in_group(adamw(), "mine", ["x", {"y": object()}]),
    "an object as an attribute": lambda: named(adamw(), "mine", object()),
    "a tensor as an attribute": lambda: named(adamw(), "mine", torch.ones(2)),
    "a tensor as a default": lambda: VARIANTS["adamw_tensor_lr"]([nn.Parameter(torch.ones(4, 3))]),
    "an object in the state": lambda: with_state(object()),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_may_depend_on_more_is_not_shared(name):
    assert not Case(UNKNOWN[name]()).keys(SharedTraces())


def test_a_class_that_is_only_called_like_torchs_is_not_shared():
    with mock.patch.object(optim, "Own", Own, create=True):
        assert not Case(Own(adamw().param_groups[0]["params"])).keys(SharedTraces())


def test_replaced_code_is_traced_anew():
    shared = SharedTraces()
    Case(adamw()).kept(shared)
    adam = sys.modules["torch.optim.adam"]
    for place in ("_single_tensor_adam", "adam", "_get_value"):
        with mock.patch.object(adam, place, lambda *a, **k: None):
            assert Case(adamw()).found(shared) is None
    with mock.patch.object(optim.Adam, "_init_group", lambda *a: False):
        assert Case(adamw()).found(shared) is None
    code = adam._single_tensor_adam.__code__
    adam._single_tensor_adam.__code__ = adam._multi_tensor_adam.__code__
    try:
        assert Case(adamw()).found(shared) is None
    finally:
        adam._single_tensor_adam.__code__ = code


def reads(function):
    def step(self, group, p, state):
        function(p)
        p.add_(p.grad, alpha=-group["lr"])

    return step


@pytest.mark.parametrize(
    "function",
    (
        lambda p: p.shape,
        lambda p: p.size(),
        lambda p: p.size(0),
        lambda p: p.dim(),
        lambda p: p.ndim,
        lambda p: p.numel(),
        lambda p: torch.numel(p),
        lambda p: len(p),
        lambda p: p.stride(),
        lambda p: p.is_contiguous(),
        lambda p: p.grad.nbytes,
        lambda p: p.mul(2).shape,
        lambda p: p.untyped_storage(),
        lambda p: torch.broadcast_tensors(p, p.grad),
        lambda p: p.expand(4, 3),
        lambda p: p.zero_().copy_(torch.full((4, 3), 2.0)),
    ),
)
def test_a_step_that_may_know_sizes_is_for_these_alone(function):
    assert not trace_custom(reads(function)).of_any_sizes


@pytest.mark.parametrize("shape, any_sizes", (((4, 3), True), ((7,), True), ((1,), False)))
def test_a_step_that_knows_no_sizes_is_for_all(shape, any_sizes):
    def step(self, group, p, state):
        assert p.dtype is torch.float32 and not p.is_complex() and p.grad is not None
        state["m"] = torch.zeros_like(p).lerp(p.grad, 0.5)
        p.add_(state["m"], alpha=-group["lr"])

    assert trace_custom(step, shape=shape).of_any_sizes is any_sizes
    assert not trace_custom(step, shape=shape, sharded=False).of_any_sizes


def test_plain_keys_tell_types_and_signs_apart():
    values = [1, 1.0, True, "1", None, 0.0, -0.0, (1,), [1], {1: 1}, torch.float32]
    assert len({plain_key(value) for value in values}) == len(values)
    assert plain_key(float("nan")) == plain_key(float("nan"))
    assert plain_key((1, [object()])) is None and plain_key({object(): 1}) is None


def test_few_are_kept(monkeypatch):
    monkeypatch.setattr(traces, "_MOST_KEYS", 2)
    shared = SharedTraces()
    cases = [Case(adamw(), sharded=False), Case(adamw()), Case(adamw(maximize=True))]
    for case in cases[:2]:
        case.kept(shared)
    assert cases[0].found(shared) is not None
    cases[2].kept(shared)
    assert [case.found(shared) is not None for case in cases] == [True, False, True]


def trained(width: int, lr: float, compiled: bool):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))
    optimizer = optim.AdamW(model.parameters(), lr=lr)

    def step(model, optimizer, x, y):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    if compiled:
        step = torch.compile(step, backend="zero", options={"lowering": "eager"})
    for number in range(3):
        step(model, optimizer, *models.features(number, 4))
    values = {name: value.clone() for name, value in model.state_dict().items()}
    return values, weakref.ref(model), weakref.ref(optimizer)


def test_a_second_program_traces_nothing_and_is_right(monkeypatch):
    monkeypatch.setattr(traces, "SHARED_TRACES", SharedTraces())
    made = []

    def counted(optimizer, *arguments, **given):
        made.append(type(optimizer))
        return trace_update(optimizer, *arguments, **given)

    monkeypatch.setattr(traces, "trace_update", counted)
    for width, lr in ((5, 1e-2), (11, 1e-2)):
        values, model, optimizer = trained(width, lr, compiled=True)
        expected, *_ = trained(width, lr, compiled=False)
        torch.testing.assert_close(values, expected, rtol=0, atol=0)
        torch._dynamo.reset()
        gc.collect()
        assert model() is None and optimizer() is None
    assert len(made) == 2  # without states, and with
