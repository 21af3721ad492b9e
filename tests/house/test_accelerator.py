"""Any accelerator that torch knows: nothing but its name tells it from CUDA."""

import pytest
import torch
import torch.distributed as dist

import zerofx.checkpoint.contents as contents
import zerofx.runtime.comm.communication as communication
import zerofx.runtime.storage.memory as memory
from zerofx.accelerator import is_accelerator, kind, module_of
from zerofx.runtime.comm.communication import TORCHRUN_VARIABLES, default_group


@pytest.mark.parametrize("name", ["cuda", "xpu", "mps"])
def test_a_device_is_asked_for_by_its_own_module(name):
    device = torch.device(name)
    assert is_accelerator(device)
    assert module_of(device) is getattr(torch, name)


def test_the_cpu_and_meta_are_no_accelerators():
    assert not any(map(is_accelerator, map(torch.device, ("cpu", "meta"))))


@pytest.mark.parametrize(
    "name, backend", [(None, "gloo"), ("cuda", "cpu:gloo,cuda:nccl"), ("xpu", "cpu:gloo,xpu:xccl")]
)
def test_a_group_that_is_made_has_the_accelerators_own_backend(monkeypatch, name, backend):
    asked = []
    monkeypatch.setattr(communication, "kind", lambda: name)
    monkeypatch.setattr(dist, "init_process_group", lambda backend: asked.append(backend))
    monkeypatch.setattr(dist, "is_initialized", lambda: bool(asked))
    monkeypatch.setattr(communication.atexit, "register", lambda *_: None)
    default_group(dict.fromkeys(TORCHRUN_VARIABLES, "1"))
    assert asked == [backend]


def test_a_machine_without_one_has_no_kind(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    assert kind() is None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("xpu"))
    assert kind() == "xpu"


def test_an_accelerator_that_is_not_cuda_needs_nothing_of_cuda(monkeypatch):
    for module in (contents, memory):
        monkeypatch.setattr(module, "kind", lambda: "mps")
    assert "mps" not in contents.rng_state()
    values = memory.HostMemory().empty(4096, torch.float32, pinned=True)
    assert not values.is_pinned()
