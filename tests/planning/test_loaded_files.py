"""Checkpoints that a script loads while it is being planned: headers are read, tensors are not."""

from __future__ import annotations

import json
import os
import re
import runpy
import struct
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from tests.kit.covering import first, nightly
from zerofx.deferred.mapped import MAPPED
from zerofx.devices import device_named
from zerofx.errors import CommandError
from zerofx.planning.script import call_of

safetensors = pytest.importorskip("safetensors")
st = pytest.importorskip("safetensors.torch")
LOAD, DCP_LOAD, SAFE_OPEN = torch.load, dcp.load, safetensors.safe_open

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
    first(
        1,
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
    ),
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
    assert not MAPPED._files and torch.load is LOAD and dcp.load is DCP_LOAD
    assert safetensors.safe_open is st.safe_open is SAFE_OPEN
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


READ = [
    "assert torch.load('b.pt')['scale'].sum().item() == 15",
    "assert torch.load('b.pt')['scale'].double().tolist() == [0, 1, 2, 3, 4, 5]",
    "assert (torch.load('b.pt')['scale'].numpy() + 1).sum() == 21",
    "one = torch.load('b.pt')['scale']\n"
    "double = one * 2\n"
    "try:\n"
    "    array = one.numpy()\n"
    "    array += 1\n"
    "except ValueError:\n"
    "    pass\n"
    "assert double.sum().item() == 30",
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
    # Two tensors in one place.
    "file = safetensors.safe_open('a.safetensors', 'pt')\n"
    "one, same = file.get_tensor('0.bias'), file.get_tensor('0.bias')\n"
    "sum, double = one.sum().item(), one * 2\n"
    "same.zero_()\n"
    "assert one.sum().item() == 0 and abs(double.sum().item() - 2 * sum) < 1e-5 and sum",
    # Through what is open, from where it is.
    "import os\n"
    "file = open('b.pt', 'rb')\n"
    "os.rename('b.pt', 'c.pt')\n"
    "assert torch.load(file)['scale'].sum() == 15\n"
    "os.rename('c.pt', 'b.pt')\n"
    "assert torch.load(os.fdopen(os.open('b.pt', os.O_RDONLY), 'rb'))['step'] == 7",
    "torch.save(torch.load('b.pt'), 'c.pt')\nassert torch.load('c.pt')['scale'].sum() == 15",
    "model.register_buffer('scale', torch.load('b.pt')['scale'])\n"
    "assert model.scale.max().item() == 5",
    "norm = torch.nn.BatchNorm1d(6)\n"
    "norm.load_state_dict({'running_mean': torch.load('b.pt')['scale']}, strict=False)\n"
    "assert norm.running_mean.tolist() == [0, 1, 2, 3, 4, 5]",
    "one = safetensors.safe_open('a.safetensors', 'pt', backend='pread').get_tensors()\n"
    "assert all(one[name].equal(value) for name, value in torch.load('a.pt').items())",
    # What cannot be mapped is read.
    "file = io.BytesIO(open('b.pt', 'rb').read())\nassert torch.load(file)['step'] == 7",
    "assert torch.load('old.pt').sum().item() == 3",
    # A recorder does not see other threads.
    "found = []\n"
    "load = lambda: found.append(load_file('a.safetensors')['0.bias'].double().sum().item())\n"
    "thread = threading.Thread(target=load)\n"
    "thread.start(); thread.join()\n"
    "assert found == [load_file('a.safetensors')['0.bias'].double().sum().item()]",
]


def test_what_a_script_reads_of_it_is_true(captured, files, tmp_path):
    before = (tmp_path / "b.pt").read_bytes()
    captured("\n".join(READ))
    assert (tmp_path / "b.pt").read_bytes() == before


@pytest.mark.parametrize(
    "lines, words",
    [
        ("model.load_state_dict(load_file('a.safetensors'))", "model[0].weight.sum().item()"),
        nightly("model.load_state_dict(torch.load('a.pt'), assign=True)", "print(model[0].weight)"),
        nightly(
            "model.load_state_dict(load_file('a.safetensors'), assign=True)", "model(ones).tolist()"
        ),
        nightly(
            "model.load_state_dict(torch.load('a.pt'), assign=True)", "model(ones).sum().backward()"
        ),
    ],
)
def test_parameters_are_refused_by_name_as_without_a_file(captured, files, lines, words):
    with pytest.raises(CommandError, match=r"of the parameter '.\.weight' of shape \(8, 8\)"):
        captured(f"ones = torch.ones(2, 8)\n{lines}\n{words}")


@pytest.mark.parametrize("load", ["torch.load('a.pt')", nightly("load_file('a.safetensors')")])
@pytest.mark.parametrize(
    "lines",
    [
        "del state['0.bias']; state['2.bias'] = torch.ones(8); model.load_state_dict(state)",
        nightly("state['0.weight'] = state['0.weight'][:4]; model.load_state_dict(state)"),
        nightly(
            "state['0.weight'] = state['0.weight'][:4]; model.load_state_dict(state, assign=True)"
        ),
        nightly("state['0.weight'] = 3; model.load_state_dict(state)"),
        nightly("model.append(torch.nn.Linear(8, 8)); load_model(model, 'a.safetensors')"),
        nightly("load_model(model[:1], 'a.safetensors')"),
        "torch.load('nowhere.pt')",
        nightly("load_file('nowhere.safetensors')"),
        nightly("torch.load('cut.pt')"),
        "load_file('cut.safetensors')",
        nightly("open('empty.pt', 'w').close(); torch.load('empty.pt')"),
    ],
)
def test_what_is_wrong_is_said_as_without_a_plan(captured, files, tmp_path, lines, load):
    for name in ("a.pt", "a.safetensors"):
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name.replace("a.", "cut.")).write_bytes(whole[:-100])
    lines = f"state = {load}\n{lines}"
    with pytest.raises(Exception) as expected:  # noqa: B017  # whichever it is
        captured(lines, call=lambda path: runpy.run_path(str(path), run_name="__main__"))
    with pytest.raises(expected.type, match=re.escape(str(expected.value))):
        captured(lines)


@pytest.mark.parametrize(
    "lines",
    [
        nightly("load_model(model, 'tied.safetensors')"),
        "model.load_state_dict(torch.load('tied.pt'))",
        nightly(
            "model.load_state_dict(torch.load('tied.pt'), strict=True, assign=True)\n"
            "model[1].weight = model[0].weight"
        ),
        nightly("model = torch.load('model.pt', weights_only=False)"),
    ],
)
def test_tied_parameters_are_one(captured, tmp_path, lines):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    st.save_model(model, str(tmp_path / "tied.safetensors"))
    torch.save(model.state_dict(), tmp_path / "tied.pt")
    torch.save(model, tmp_path / "model.pt")
    call = captured(f"model[1].weight = model[0].weight\n{lines}")
    assert len(call.step.table) == 3


@pytest.mark.nightly
def test_the_states_of_an_optimizer_are_loaded(captured, tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}
    torch.save(state, tmp_path / "whole.pt")
    lines = """
        state = torch.load("whole.pt", map_location="cpu")
        model.load_state_dict(state["model"])
        other = torch.optim.AdamW(model.parameters())
        other.load_state_dict(state["optimizer"])
        assert other.state[model[0].bias]["step"].item() == state["step"] == 1
        found = other.state[model[0].bias]["exp_avg"].sum().item()
    """
    expected = optimizer.state[model[0].bias]["exp_avg"].sum().item()
    captured(lines + f"    assert abs(found - {expected}) < 1e-6, found")


@pytest.mark.nightly
def test_a_place_on_a_device_that_is_not_there(captured, files):
    lines = """
        place = f"cuda:{torch.cuda.device_count() - 1}"
        model.cuda()
        model.load_state_dict(torch.load("a.pt", map_location=place))
        torch.load("a.pt", torch.device(place))
        torch.load("a.pt", {"cpu": place})
        torch.load("a.pt", lambda storage, location: storage.cuda(0))
        assert torch.load("a.pt", "meta")["0.bias"].is_meta
        load_model(model, "a.safetensors", device="cuda")
        with safetensors.safe_open("a.safetensors", "pt", device=place) as file:
            assert file.get_tensor("0.bias").tolist() == torch.load("a.pt")["0.bias"].tolist()
    """
    call = captured(lines, call=lambda path: call_of(path, [], 2, 2, device_named("h100")))
    assert {info.device.type for info in call.step.table} == {"cuda"}


def test_a_checkpoint_of_torch_distributed(captured, tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    state = {"model": model.state_dict(), "scale": torch.arange(6.0).view(2, 3), "step": 7}
    dcp.save(state, checkpoint_id=tmp_path / "folder", no_dist=True)
    lines = """
        torch.distributed.init_process_group("gloo")
        state = {"model": model.state_dict(), "scale": torch.zeros(3, 2).t(), "step": 0}
        dcp.load(state, checkpoint_id="folder")
        assert state["step"] == 7
        assert state["scale"].tolist() == [[0, 1, 2], [3, 4, 5]]
        """
    with pytest.raises(CommandError, match="of the parameter '0.bias' of shape"):
        captured(lines + "print(model[0].bias)")
    with pytest.raises(dcp.api.CheckpointException, match="Missing key .* state_dict: other"):
        captured(lines + "dcp.load({'other': torch.ones(3)}, checkpoint_id='folder')")


@pytest.mark.nightly
def test_no_tensor_of_a_checkpoint_of_torch_distributed_is_read(captured, tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "folder", no_dist=True)
    (data,) = (tmp_path / "folder").glob("*.distcp")
    data.write_bytes(bytes(data.stat().st_size))  # none can be read now
    captured("dcp.load({'model': model.state_dict()}, checkpoint_id='folder')")


@pytest.mark.nightly
def test_a_reader_of_two_checkpoints(captured, tmp_path):
    """A late read gets the first checkpoint's values, though its reader is at the second."""
    scale = {"scale": torch.arange(6.0).view(2, 3)}
    dcp.save(scale, checkpoint_id=tmp_path / "folder", no_dist=True)
    dcp.save({"scale": torch.ones(6)}, checkpoint_id=tmp_path / "other", no_dist=True)
    captured("""
        reader = dcp.FileSystemReader("folder")
        first, second = {"scale": torch.zeros(2, 3)}, {"scale": torch.zeros(6)}
        dcp.load(first, storage_reader=reader)
        dcp.load(second, storage_reader=reader, checkpoint_id="other")
        assert first["scale"].sum().item() == 15 and second["scale"].sum().item() == 6
    """)


@pytest.mark.nightly
@pytest.mark.parametrize("options", ["dtype=torch.bfloat16", "", "torch_dtype='auto'"])
def test_from_pretrained_reads_headers(captured, tmp_path, options):
    """Two files of 7 GiB each, which are holes."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 32000}
    config = transformers.LlamaConfig(**sizes, **heads, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path / "model")
    with torch.device("meta"):
        state = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    names = [f"model-0000{part}-of-00002.safetensors" for part in (1, 2)]
    where = {name: names[index % 2] for index, name in enumerate(state)}
    for file in names:
        shapes = {name: one.shape for name, one in state.items() if where[name] == file}
        write_holes(tmp_path / "model" / file, shapes)
    index = {"metadata": {}, "weight_map": where}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    lines = f"""
        from transformers import AutoModelForCausalLM
        language = AutoModelForCausalLM.from_pretrained("model", {options})
        assert language.model.rotary_emb.inv_freq[0].item() == 1
        words = torch.ones(1, 16, dtype=torch.long)
        model = torch.nn.Sequential(language.lm_head)
    """
    before = peak_bytes()
    call = captured(lines, 8192)
    assert peak_bytes() - before < GIB // 2
    assert dtypes(call) == {torch.bfloat16 if "bfloat16" in options else torch.float32}
    assert transformers.modeling_utils.safe_open is safetensors.safe_open


@pytest.mark.slow(reason="transformers is imported, and a step of a model of it is traced")
@pytest.mark.parametrize("is_equal", first(1, [True, False]))
def test_from_pretrained_ties_what_is_equal(captured, tmp_path, is_equal):
    """A ``.bin`` has both names of tied parameters, and transformers compares their values."""
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 16, "n_positions": 8}
    config = transformers.GPT2Config(**sizes, architectures=["GPT2LMHeadModel"])
    config.save_pretrained(tmp_path / "model")
    state = transformers.GPT2LMHeadModel(config).state_dict()
    if not is_equal:
        state["lm_head.weight"] = state["lm_head.weight"] + 1
    torch.save(state, tmp_path / "model" / "pytorch_model.bin")
    captured(f"""
        from transformers import AutoModelForCausalLM
        language = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float16)
        is_tied = language.lm_head.weight is language.transformer.wte.weight
        assert is_tied == {is_equal}
    """)
