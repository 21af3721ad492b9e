"""Checkpoints that a script loads while it is being planned: headers are read, tensors are not."""

from __future__ import annotations

import json
import os
import re
import struct
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

from zerofx.deferred.mapped import MAPPED
from zerofx.planning.script import call_of

st = pytest.importorskip("safetensors.torch")

WIDTH = 2**15  # 4 GiB of float32 a layer
DEPTH = 10
GIB = 2**30

SCRIPT = """
    import io, sys, threading
    import safetensors, torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file, load_model
    import zerofx

    layers = [torch.nn.Linear({width}, {width}) for _ in range({depth})]
    model = torch.nn.Sequential(*layers)
    {lines}
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = torch.compile(step, backend="zero", options={{"lowering": "eager"}})
    step(torch.ones(2, {width}, dtype=model[0].weight.dtype))
"""


@pytest.fixture
def captured(tmp_path, monkeypatch):
    """``captured(lines)``: the call that a script with these lines in its middle is stopped at."""
    monkeypatch.chdir(tmp_path)

    def of(lines, width=8, depth=2, call=lambda path: call_of(path, [], 2, 2)):
        code = textwrap.dedent(SCRIPT)
        lines = textwrap.dedent(lines)
        path = tmp_path / "train.py"
        path.write_text(code.format(width=width, depth=depth, lines=lines))
        return call(path)

    return of


def dtypes(call):
    return {info.dtype for info in call.step.table}


def peak_bytes():
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024


def write_holes(path, tensors):
    """Write a safetensors file of these shapes of float32: a header, and a hole for the rest."""
    header, end = {}, 0
    for name, shape in tensors.items():
        start, end = end, end + 4 * torch.Size(shape).numel()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + end)


def write_zip_of_holes(path, tensors):
    state = {name: torch.empty(shape) for name, shape in tensors.items()}  # pages nobody touches
    with torch.serialization.skip_data():
        torch.save({"model": state, "step": 7}, path)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    "lines, dtype",
    [
        ("model.load_state_dict(load_file('a.safetensors'))", torch.float32),
        ("model.load_state_dict(load_file('a.safetensors'), assign=True)", torch.float32),
        ("load_model(model, 'a.safetensors')", torch.float32),
        ("model.bfloat16().load_state_dict(load_file('a.safetensors'))", torch.bfloat16),
        (
            "model.load_state_dict(load_file('a.safetensors'), assign=True); model.half()",
            torch.float16,
        ),
        (
            "file = safetensors.safe_open('a.safetensors', 'pt')\n"
            "for name, one in model.named_parameters():\n"
            "    one.data.copy_(file.get_slice(name)[...])",
            torch.float32,
        ),
        ("model.load_state_dict(torch.load('a.pt')['model'])", torch.float32),
        (
            "file = torch.load('a.pt', 'cpu', weights_only=False, mmap=False)\n"
            "assert file['step'] == 7\n"
            "state = {name: one.bfloat16() for name, one in file['model'].items()}\n"
            "model.load_state_dict(state, assign=True)",
            torch.bfloat16,
        ),
        (
            "with open('a.pt', 'rb') as file:\n"
            "    model.load_state_dict(torch.load(file, map_location='cpu')['model'])",
            torch.float32,
        ),
    ],
)
def test_no_tensor_of_a_large_file_is_read(captured, tmp_path, lines, dtype):
    """A file of 40 GiB: the process grows by what imports and the capture take."""
    shapes = {}
    for layer in range(DEPTH):
        shapes |= {f"{layer}.weight": (WIDTH, WIDTH), f"{layer}.bias": (WIDTH,)}
    if "a.pt" in lines:
        write_zip_of_holes(tmp_path / "a.pt", shapes)
    else:
        write_holes(tmp_path / "a.safetensors", shapes)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = peak_bytes()
    call = captured(lines, WIDTH, DEPTH)
    assert peak_bytes() - before < GIB // 4
    assert len(call.step.table) == 2 * DEPTH and dtypes(call) == {dtype}
    assert not MAPPED._files and torch.load.__module__ == "torch.serialization"
    assert "from_file" not in vars(torch.UntypedStorage)


@pytest.fixture
def files(tmp_path):
    """The state of a small model, in ``a.safetensors`` and ``a.pt``; other things in ``b.pt``."""
    state = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).state_dict()
    st.save_file(state, tmp_path / "a.safetensors")
    torch.save(state, tmp_path / "a.pt")
    rng = torch.Generator().manual_seed(3).get_state()
    scale = torch.arange(6.0)
    torch.save({"rng": rng, "scale": scale, "part": scale[2:], "step": 7}, tmp_path / "b.pt")
    torch.save(torch.ones(3), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    return state


@pytest.mark.parametrize(
    "lines",
    [
        "assert torch.load('b.pt')['scale'].sum().item() == 15",
        "assert torch.load('b.pt')['scale'].double().tolist() == [0, 1, 2, 3, 4, 5]",
        "assert (torch.load('b.pt')['scale'].numpy() + 1).sum() == 21",
        "assert 'tensor([0., 1., 2.' in repr(torch.load('b.pt')['scale'])",
        "import copy\nassert copy.deepcopy(torch.load('b.pt')['scale']).sum().item() == 15",
        "torch.set_rng_state(torch.load('b.pt')['rng'])\n"
        "expected = torch.rand(3, generator=torch.Generator().manual_seed(3))\n"
        "assert torch.rand(3).tolist() == expected.tolist()",
        # Written to, before and after what is computed of it has been recorded.
        "one = torch.load('b.pt')\n"
        "double = one['scale'] * 2\n"
        "one['scale'] += 1\n"
        "assert double.sum().item() == 30 and one['scale'].sum().item() == 21\n"
        "assert one['part'].tolist() == [3, 4, 5, 6]\n"
        "one['scale'].copy_(torch.zeros(6))\n"
        "assert one['part'].sum().item() == 0 and double.sum().item() == 30\n"
        "assert torch.load('b.pt')['scale'].sum().item() == 15",
        "torch.save(torch.load('b.pt'), 'c.pt')\nassert torch.load('c.pt')['scale'].sum() == 15",
        "model.register_buffer('scale', torch.load('b.pt')['scale'])\n"
        "assert model.scale.max().item() == 5",
        "norm = torch.nn.BatchNorm1d(6)\n"
        "norm.load_state_dict({'running_mean': torch.load('b.pt')['scale']}, strict=False)\n"
        "assert norm.running_mean.tolist() == [0, 1, 2, 3, 4, 5]",
        # What cannot be mapped is read.
        "file = io.BytesIO(open('b.pt', 'rb').read())\nassert torch.load(file)['step'] == 7",
        "assert torch.load('old.pt').sum().item() == 3",
        # A recorder does not see other threads.
        "found = []\n"
        "load = lambda: found.append(load_file('a.safetensors')['0.bias'].double().sum().item())\n"
        "thread = threading.Thread(target=load)\n"
        "thread.start(); thread.join()\n"
        "assert found == [load_file('a.safetensors')['0.bias'].double().sum().item()]",
    ],
)
def test_what_a_script_reads_of_it_is_true(captured, files, tmp_path, lines):
    before = (tmp_path / "b.pt").read_bytes()
    captured(lines)
    assert (tmp_path / "b.pt").read_bytes() == before
