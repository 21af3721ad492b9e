"""Kernels of updates are compiled with a program's regions, before it first runs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._inductor import cpu_vec_isa

import tests.conftest  # noqa: F401
from tests.kit.covering import each_pair
from tests.kit.models import squared_loss
from zerofx.compat import inductor
from zerofx.compat.inductor import CompiledForAnyLength
from zerofx.lower.regions import KernelAhead
from zerofx.runtime.optimizer.steps import OptimizerSteps


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def adam_without_decay(parameters):
    return torch.optim.Adam(parameters, lr=0.01, amsgrad=True)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def train(make_optimizer, options, clips=False, steps=3, optimizer_state=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 4))
    optimizer = make_optimizer(model.parameters())
    if optimizer_state is not None:
        optimizer.load_state_dict(copy.deepcopy(optimizer_state))

    def step(x, y):
        loss = squared_loss(model, x, y)
        loss.backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    compiled = step if options is None else torch.compile(step, backend="zero", options=options)
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(4, 96, generator=generator), torch.randn(4, 4, generator=generator)
    return torch.stack([compiled(*batch).detach() for _ in range(steps)]), optimizer


@pytest.fixture
def compiled(monkeypatch):
    """Note of each kernel, in order, whether it is compiled with the regions."""
    found: list[bool] = []
    original, ahead = CompiledForAnyLength.compile, []
    compile_ahead = KernelAhead.compile_ahead

    def compile(self, inputs):
        found.append(bool(ahead))
        original(self, inputs)

    def noted(self, *arguments, **options):
        ahead.append(self)
        try:
            return compile_ahead(self, *arguments, **options)
        finally:
            ahead.pop()

    monkeypatch.setattr(CompiledForAnyLength, "compile", compile)
    monkeypatch.setattr(KernelAhead, "compile_ahead", noted)
    return found


@pytest.mark.slow(reason="kernels are compiled")
@pytest.mark.parametrize(
    "make_optimizer, stage, clips",
    each_pair((adamw, adam_without_decay, sgd), (1, 2, 3), (False, True)),
)
def test_a_kernel_is_compiled_once_and_with_the_regions(make_optimizer, stage, clips, compiled):
    options = {"stage": stage, "lowering": "inductor"}
    losses, _ = train(make_optimizer, options, clips)
    expects_kernel = make_optimizer is not sgd  # without states there is no first update
    assert compiled == [True] or (not expects_kernel and compiled == [False]), compiled
    expected, _ = train(make_optimizer, None, clips)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow(reason="kernels are compiled")
def test_what_cannot_be_asked_for_is_compiled_when_it_runs(compiled, monkeypatch):
    """A first update that no later one goes on from; states that were loaded; a failure."""
    options = {"stage": 1, "lowering": "inductor"}
    train(momentum, options)
    assert compiled and not any(compiled)
    compiled.clear()
    _, optimizer = train(adamw, None)
    losses, _ = train(adamw, options, optimizer_state=optimizer.state_dict())
    assert compiled == [False]
    expected, _ = train(adamw, None, optimizer_state=optimizer.state_dict())
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-6)
    compiled.clear()
    monkeypatch.setattr(OptimizerSteps, "ask_for_kernels", lambda self, graph: None)
    losses, _ = train(adamw, options)
    assert compiled == [False]


@pytest.mark.slow(reason="kernels are compiled")
def test_a_kernel_that_fails_with_the_regions_says_so_when_it_runs(monkeypatch):
    def fails(self, inputs):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(CompiledForAnyLength, "compile", fails)
    with pytest.raises(RuntimeError, match="no compiler"):
        train(adamw, {"stage": 1, "lowering": "inductor"})


def test_asking_for_a_kernel_leaves_no_state_behind():
    _, optimizer = train(adamw, {"stage": 1, "lowering": "inductor"}, steps=1)
    assert all(state["step"] == 1 for state in optimizer.state.values())


@pytest.mark.skipif(not cpu_vec_isa.x86_isa_checker(), reason="Inductor tries these on x86 alone")
@pytest.mark.slow(reason="a C++ compiler is run")
def test_vector_instructions_are_found_as_inductor_finds_them(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    flags = set(cpu_vec_isa.x86_isa_checker())
    kinds = [one for one in cpu_vec_isa.supported_vec_isa_list if set(str(one).split()) <= flags]
    codes = {name: code for kind in kinds for name, code in codes_of(kind).items()}
    assert kinds and "_avx_code" in codes
    for code in codes.values():
        assert inductor._compiles(kinds[0], code) == kinds[0].check_build(code)
    assert not inductor._compiles(kinds[0], "no C++")
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", lambda: "false")
    assert not inductor._compiles(kinds[0], codes["_avx_code"])


def codes_of(kind):
    """Return the texts that Inductor tries for a kind of vector instructions, by name."""
    names = (name for name in dir(kind) if name.endswith("_code") and name.startswith("_a"))
    return {name: getattr(kind, name) for name in names}
