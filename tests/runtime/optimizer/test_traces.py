"""A trace serves all parameters that it holds for, of any sizes if it has seen none."""

from __future__ import annotations

import gc
import types
import weakref

import pytest
import torch
from torch import Tensor, nn, optim

from tests.codegen.test_trace import layout, trace_custom
from tests.kit import models
from tests.kit.covering import exhaustive, first, only
from tests.kit.optimizers import VARIANTS
from zerofx.codegen.trace.arguments import group_values, read_arguments
from zerofx.codegen.trace.trace import Update, trace_update
from zerofx.runtime.optimizer.setup import UpdateSettings
from zerofx.runtime.optimizer.update import OptimizerRunner


def traced(optimizer: optim.Optimizer) -> Update:
    """The update of an optimizer's only parameter, on shards, as it is now."""
    (parameter,) = optimizer.param_groups[0]["params"]
    shard = (parameter.numel(),)
    state = {
        name: value.reshape(shard) if is_whole(value, parameter) else value
        for name, value in optimizer.state.get(parameter, {}).items()
    }
    group = read_arguments(group_values(optimizer.param_groups[0]), shard_shape=None, inputs=set())
    states = read_arguments(state, shard_shape=shard, inputs=state)
    return trace_update(optimizer, layout(parameter), group=group, state=states, sharded=True)


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
    "shapes, moments",
    ((SHAPES, (0, 7)), exhaustive((*SHAPES, *ODD_SHAPES), (1, 2, 6))),
    ids=("shapes", "more"),
)
@pytest.mark.parametrize(
    "name", only(("adamw", "sgd_nesterov", "rmsprop_centered", "lion", "rprop"), sorted(VARIANTS))
)
def test_a_trace_of_any_sizes_is_the_one_that_would_be_made(name, shapes, moments):
    found = 0
    for steps in moments:
        made = [traced(stepped(VARIANTS[name], shape, steps)) for shape in shapes]
        same = [facts(update) for update in made if update.of_any_sizes]
        assert all(one == same[0] for one in same)
        found += len(same)
    assert found or name.startswith("rprop")  # it writes by masks, which Python indexing looks at


def runner_of(make, *parameters, sharded=True):
    optimizer = make(list(parameters))
    table = {number: (parameter, layout(parameter)) for number, parameter in enumerate(parameters)}
    return optimizer, OptimizerRunner(optimizer, table, UpdateSettings(rank=0, sharded=sharded))


def num_traces(make, *parameters, sharded=True):
    optimizer, runner = runner_of(make, *parameters, sharded=sharded)
    runner.prepare(range(len(parameters)))
    return runner.trace_count


@pytest.mark.parametrize(
    "name", first(2, ("adamw_decay", "sgd", "adam", "rmsprop_centered", "lion"))
)
def test_sizes_do_not_count(name):
    flat = (nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(2, 3, 5)))
    assert num_traces(VARIANTS[name], *flat) == 1
    # Number-like and strided parameters are traced for themselves, and whole ones.
    own = (torch.ones(1, 1), torch.ones(()), torch.ones(3, 4).t())
    assert num_traces(VARIANTS[name], *flat, *map(nn.Parameter, own)) == 4
    assert num_traces(VARIANTS[name], *flat, sharded=False) == 2


def attribute(name, value):
    return lambda optimizer: setattr(optimizer, name, value)


def entry(name, value):
    return lambda optimizer: optimizer.param_groups[0].update({name: value})


OTHERS = {
    "a flag": entry("maximize", True),
    "an attribute": attribute("mine", 1),
    "an entry of the group": entry("mine", "x"),
    "an object in the group": entry("mine", object()),
    "a number of another type": entry("weight_decay", 0),
    "a branch on a number": entry("weight_decay", 0.0),
    "a default": lambda optimizer: optimizer.defaults.update(mine=0),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_a_trace_depends_on_makes_it_another(name):
    optimizer, runner = runner_of(VARIANTS["adamw"], nn.Parameter(torch.ones(4, 3)))
    runner.prepare([0])
    optimizer.param_groups[0].update({"lr": 0.5, "weight_decay": 0.3, "betas": (0.1, 0.2)})
    runner.prepare([0])
    assert runner.trace_count == 1
    OTHERS[name](optimizer)
    runner.prepare([0])
    assert runner.trace_count == 2


@pytest.mark.nightly
def test_what_changes_at_every_step_is_told_of_and_its_traces_go():
    def num_updates():
        gc.collect()
        return sum(isinstance(one, Update) for one in gc.get_objects())

    optimizer, runner = runner_of(VARIANTS["sgd"], nn.Parameter(torch.ones(4, 3)))
    before = num_updates()
    with pytest.warns(UserWarning, match="SGD.step has been traced 9 times .* attribute") as told:
        for number in range(60):
            optimizer.last_loss = float(number)
            runner.prepare([0])
    assert runner.trace_count == 60 and len(told) == 1
    assert num_updates() - before <= 40


class Sharing(torch.optim.SGD):
    """Its instances share an object."""

    shared = types.SimpleNamespace(factor=1.0)


def test_what_an_object_on_the_class_holds_makes_it_another():
    optimizer, runner = runner_of(Sharing, nn.Parameter(torch.ones(4, 3)))
    runner.prepare([0])
    Sharing.shared.factor = 2.0
    runner.prepare([0])
    assert runner.trace_count == 2


def test_a_parameters_function_is_told_from_one_that_had_its_address():
    parameter = nn.Parameter(torch.ones(4, 3))
    optimizer, runner = runner_of(VARIANTS["sgd"], parameter)
    addresses = set()
    for count in range(1, 5):
        parameter.function = lambda: None
        addresses.add(id(parameter.function))
        runner.prepare([0])
        assert runner.trace_count == count
    assert len(addresses) == 4, "what a trace depends on is held"


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


@pytest.mark.nightly
def test_a_freed_program_frees_what_its_traces_were_made_of():
    values, model, optimizer = trained(5, 1e-2, compiled=True)
    expected, *_ = trained(5, 1e-2, compiled=False)
    torch.testing.assert_close(values, expected, rtol=0, atol=0)
    torch._dynamo.reset()
    gc.collect()
    assert model() is None and optimizer() is None
