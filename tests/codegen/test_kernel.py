"""One kernel per update is as exact as torch's own, for every optimizer and any length."""

import pytest
import torch
from torch import nn

from tests.optimizers import VARIANTS
from tests.test_update import layout
from zerofx import compat
from zerofx.codegen import kernel
from zerofx.runtime import update as updates
from zerofx.runtime.update import OptimizerRunner

LENGTHS = (1, 3, 127, 1024, 1025)
LONG = 2**20 + 7
STEPS = 100

# Of which the compiled kernel is tested by default: between them, every operator that the split
# rewrites.  The others are compiled in the long run.
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
        self.runner = OptimizerRunner(self.optimizer, table, rank=0, sharded=True)
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
    run = kernel.UpdateKernel.__call__

    def counted(self, *values):
        calls.append(self)
        return run(self, *values)

    monkeypatch.setattr(kernel.UpdateKernel, "__call__", counted)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # lengths that are not worth a thread
    yield calls
    torch.set_num_threads(num_threads)


@pytest.fixture
def uncompiled(monkeypatch):
    monkeypatch.setattr(compat, "compile_for_any_length", lambda gm: gm)


def train(name, lengths, steps, kernels):
    """Train each length with one runner's kernels, and check the errors at the end."""
    compiled: dict = {}
    for length in lengths:
        run = Trained(VARIANTS[name], length)
        run.runner._kernels = compiled
        kernels.clear()
        for _ in range(steps):
            run.step()
        assert len(kernels) == steps
        run.check()


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_the_split_update_is_as_exact_as_torchs(name, uncompiled, kernels):
    train(name, (1, 127), STEPS, kernels)


@pytest.mark.parametrize("name", COMPILED)
def test_the_compiled_update_is_as_exact_as_torchs(name, kernels):
    train(name, LENGTHS, STEPS, kernels)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_every_update_compiled_is_as_exact_as_torchs(name, kernels):
    train(name, (*LENGTHS, LONG), STEPS, kernels)
