"""What an optimizer will keep is known before it keeps anything."""

import pytest
import torch
from torch import Tensor, nn

from tests.kit.covering import each_pair
from zerofx.codegen.rewrite.storage import Precision
from zerofx.ir.parameters import ParameterTable
from zerofx.runtime.optimizer.states import bytes_of_states

OPTIMIZERS = {
    "AdamW": lambda ps: torch.optim.AdamW(ps),
    "amsgrad": lambda ps: torch.optim.Adam(ps, amsgrad=True),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, centered=True, momentum=0.5),
    "foreach": lambda ps: torch.optim.AdamW(ps, foreach=True),
    "capturable": lambda ps: torch.optim.NAdam(ps),
}
PRECISIONS = {
    "plain": {},
    "masters": {"master_weights": True},
    "int8": {"moment_dtype": torch.int8},
    "bf16": {"moment_dtype": torch.bfloat16, "stochastic_rounding": True},
}


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()


def predicted(monkeypatch, optimizer, precision):
    """What is predicted while a step over the optimizer compiles, by parameter."""
    from zerofx.capture import substitutes
    from zerofx.compiler import facts

    found = {}
    original = facts.whole_updates

    def look(step, *others):
        infos = {id(t): info for t, info in zip(step.tensors, step.table, strict=True)}
        assert isinstance(step.table, ParameterTable)
        assert step.optimizers == (substitutes.handle_of(optimizer),)
        found.update(bytes_of_states(optimizer, infos, Precision(**precision)))
        return original(step, *others)

    monkeypatch.setattr(facts, "whole_updates", look)
    return found


def kept(optimizer, parameter):
    values = [v for v in optimizer.state[parameter].values() if isinstance(v, Tensor) and v.dim()]
    return sum(value.nbytes for value in values) / parameter.numel()


@pytest.mark.parametrize(
    "name, precision, dtype",
    each_pair(
        OPTIMIZERS,
        PRECISIONS,
        (torch.float32, torch.bfloat16),
        default=[("amsgrad", "masters", torch.bfloat16)],
    ),
    ids=str,
)
def test_it_is_what_is_kept_after_the_first_step_and_after_the_second(
    monkeypatch, name, precision, dtype
):
    model = nn.Linear(64, 128, dtype=dtype)
    optimizer = OPTIMIZERS[name](model.parameters())
    found = predicted(monkeypatch, optimizer, PRECISIONS[precision])
    random_before = torch.random.get_rng_state()

    def compiled():
        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        options = {"lowering": "eager", "stage": 1, **PRECISIONS[precision]}
        return torch.compile(step, backend="zero", options=options)

    x = torch.ones(4, 64, dtype=dtype)
    compiled()(x)
    assert torch.equal(torch.random.get_rng_state(), random_before)
    before = dict(found)
    assert set(before) == {id(parameter) for parameter in model.parameters()}
    for parameter in model.parameters():
        assert before[id(parameter)] == pytest.approx(kept(optimizer, parameter), rel=1e-6)
    found.clear()
    torch._dynamo.reset()
    compiled()(x)  # from the states that there are now
    for parameter in model.parameters():
        assert found[id(parameter)] == pytest.approx(kept(optimizer, parameter), rel=1e-6)


class Failing(torch.optim.SGD):
    def step(self, closure=None):
        raise RuntimeError("not on small tensors")


def test_an_optimizer_whose_step_fails_is_left_out():
    model = nn.Linear(4, 4)
    optimizer = Failing(model.parameters(), lr=0.1)

    class Info:
        dtype, numel = torch.float32, 16

    assert bytes_of_states(optimizer, {id(model.weight): Info()}, Precision()) == {}


def test_groups_are_tried_apart():
    model = nn.Linear(4, 4)
    groups = [{"params": [model.weight], "momentum": 0.9}, {"params": [model.bias]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)

    class Info:
        dtype, numel = torch.float32, 16

    infos = {id(parameter): Info() for parameter in model.parameters()}
    found = bytes_of_states(optimizer, infos, Precision())
    assert found == {id(model.weight): 4.0, id(model.bias): 0.0}


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.NAdam])
def test_a_capturable_optimizer_is_tried_on_the_cpu(make):
    parameter = nn.Parameter(torch.empty(4, 4, device="meta"))

    class Info:
        dtype, numel = torch.float32, 16

    optimizer = make([parameter], capturable=True)
    assert bytes_of_states(optimizer, {id(parameter): Info()}, Precision()) == {id(parameter): 8.0}
    assert optimizer.param_groups[0]["capturable"]


class EightBit(torch.optim.SGD):
    """Keeps states of one byte for large tensors, as bitsandbytes does."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            kind = torch.uint8 if parameter.numel() >= 4096 else torch.float32
            self.state[parameter]["state1"] = torch.zeros_like(parameter, dtype=kind)


def test_states_that_are_small_of_large_tensors_are_counted_so():
    model = nn.Linear(64, 64)
    optimizer = EightBit(model.parameters(), lr=0.1)

    class Info:
        dtype = torch.float32

        def __init__(self, numel):
            self.numel = numel

    infos = {id(parameter): Info(parameter.numel()) for parameter in model.parameters()}
    found = bytes_of_states(optimizer, infos, Precision())
    assert found == {id(model.weight): 1.0, id(model.bias): 4.0}
