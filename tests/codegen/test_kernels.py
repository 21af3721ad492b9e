"""Which kernel an update gets, and who is told of its source."""

import logging
import sys

import pytest
import torch
from torch import nn

import zerofx  # noqa: F401 - makes the backend known
from tests.codegen.updates import OPTIMIZERS, Shards
from zerofx.codegen import kernels
from zerofx.codegen.kernel import UpdateKernel
from zerofx.codegen.kernels import Kernels
from zerofx.codegen.triton.launch import TritonKernel

DATA = torch.ones(7)


def update_of(make):
    return Shards(make([nn.Parameter(DATA.clone())]), lambda update: None).trace()[0]


class Tanh(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.sub_(torch.tanh(p.grad))


@pytest.fixture
def on_gpu(monkeypatch):
    if sys.platform != "linux":
        pytest.skip("Triton is for Linux only")
    monkeypatch.setattr(kernels, "runs_triton", lambda device: True)


def test_a_cpu_gets_inductors_kernel():
    choice = Kernels().find(update_of(OPTIMIZERS["adamw"]), DATA, DATA.bfloat16())
    assert isinstance(choice, UpdateKernel)
    assert choice.gradient_dtype is torch.float32 and not choice.may_wait


def test_a_gpu_gets_a_triton_kernel_that_reads_the_gradient_as_it_comes(on_gpu):
    choice = Kernels().find(update_of(OPTIMIZERS["adamw"]), DATA, DATA.bfloat16())
    assert isinstance(choice, TritonKernel)
    assert choice.gradient_dtype is torch.bfloat16 and choice.may_wait


def test_a_kernel_is_made_once_for_each_dtype_of_the_gradient(on_gpu):
    known = Kernels()
    update = update_of(OPTIMIZERS["adamw"])
    first = known.find(update, DATA, DATA)
    assert known.find(update_of(OPTIMIZERS["adamw"]), DATA, DATA) is first
    assert known.find(update, DATA, DATA.bfloat16()) is not first


class FromState(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad).sub_(self.state[p]["target"])


def test_a_kernel_is_made_once_for_each_dtype_of_a_state(on_gpu):
    known, found = Kernels(), []
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        optimizer = FromState([nn.Parameter(DATA.clone())])
        optimizer.state[optimizer.param_groups[0]["params"][0]]["target"] = DATA.to(dtype)
        update, *_ = Shards(optimizer, lambda update: None).trace()
        found.append(known.find(update, DATA, DATA))
    assert found[0] is found[2] is not found[1]


def test_what_triton_is_not_written_for_goes_to_inductor_and_says_why(on_gpu, caplog):
    with caplog.at_level(logging.WARNING, "zerofx"):
        choice = Kernels().find(update_of(Tanh), DATA, DATA)
    assert isinstance(choice, UpdateKernel)
    assert "aten.tanh.default" in caplog.text and "torch.compile" in caplog.text


def test_sources_are_handed_over_as_they_are_made(on_gpu, monkeypatch):
    kept = {}
    Kernels(kept.__setitem__).find(update_of(OPTIMIZERS["adamw"]), DATA, DATA)
    monkeypatch.setattr(kernels, "runs_triton", lambda device: False)
    Kernels(kept.__setitem__).find(update_of(OPTIMIZERS["sgd"]), DATA, DATA)
    (adamw, triton), (sgd, inductor) = kept.items()
    assert adamw.startswith("kernel_adamw_") and "@triton.jit" in triton
    assert sgd.startswith("kernel_sgd_") and "def forward" in inductor


@pytest.mark.slow(reason="kernels are compiled")
def test_a_step_that_is_dumped_has_its_kernels_beside_it(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(100, 100)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    compiled = torch.compile(step, backend="zero", options={"dump": str(tmp_path)})
    compiled(torch.ones(2, 100))
    (folder,) = (tmp_path / "rank0").iterdir()
    kernels_written = sorted(path.name for path in folder.glob("kernel_*.py"))
    assert len(kernels_written) == 1 and kernels_written[0].startswith("kernel_adamw_")
