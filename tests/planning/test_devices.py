"""Plans for devices that this machine lacks: the table, what a script is told, what is captured."""

from __future__ import annotations

import textwrap

import pytest
import torch

import zerofx.__main__ as command_line
from tests.kit.covering import first
from zerofx import plan
from zerofx.devices import DEVICES, device_named
from zerofx.options import Options
from zerofx.planning.plan import _ranks
from zerofx.planning.script import call_of


@pytest.fixture(autouse=True)
def no_figures(monkeypatch):
    """The tests' own figures would come first."""
    monkeypatch.delenv("ZEROFX_HARDWARE", raising=False)


SCRIPT = """
    import os, torch, torch.distributed as dist
    assert torch.cuda.is_available() and torch.accelerator.is_available()
    assert torch.cuda.device_count() == 8 and torch.cuda.is_bf16_supported()
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    assert torch.cuda.get_device_capability() == (9, 0)
    properties = torch.cuda.get_device_properties(device)
    assert properties.total_memory == torch.cuda.mem_get_info()[0] == 79 * 2**30
    model = torch.nn.Linear(32, 32).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    rows = torch.ones(8, 32).pin_memory().cuda(non_blocking=True)
    loader = torch.utils.data.DataLoader(torch.ones(8, 32), batch_size=4, pin_memory=True)
    (rows, _) = (batch.to("cuda:0") for batch in loader)
    with torch.device("cuda"):
        scale = torch.ones(())

    def step(x):
        with torch.autocast("cuda", dtype=torch.float16):
            y = model(x)
            assert y.dtype == torch.float16
            y = y + torch.zeros(32, device="cuda") * scale + torch.arange(32).cuda()
        scaler.scale(y.float().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    torch.compile(step, backend="zero")(rows)
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


@pytest.mark.slow(reason="a script with an autocast and a scaler is captured")
def test_a_script_finds_the_device_that_it_is_planned_for(path):
    answers = torch.cuda.is_available, torch.cuda.device_count, torch.Tensor.pin_memory
    call = call_of(path, [], 64, 8, device_named("h100"))
    assert {info.device.type for info in call.step.table} == {"cuda"}
    assert answers == (torch.cuda.is_available, torch.cuda.device_count, torch.Tensor.pin_memory)


@pytest.mark.nightly
def test_a_script_is_planned_for_a_device(path, capsys):
    words = ["plan", "--ranks", "64", "--mesh", "8x8", "--device", "h100"]
    assert command_line.main([*words, str(path)]) == 0
    out = capsys.readouterr().out
    assert "NVIDIA H100" in out and "unmeasured" in out and ", fits" in out
    assert "node.bytes_per_s=4e+10" in out and "gpu.bytes_per_s=3.6e+11" in out


@pytest.mark.slow(reason="a script is captured for each")
@pytest.mark.parametrize(
    "lines",
    first(
        1,
        [
            "model.to(rank); rows = rows.to(rank); step(rows)",
            "model.to(device=rank); rows = torch.ones(8, 32, device=rank); step(rows)",
            "torch.set_default_device('cuda'); step(torch.ones(8, 32) @ torch.zeros(32, 32))",
            "torch.set_default_device(torch.device(rank)); step(torch.ones(8, 32))",
            "torch.set_default_device(torch.device('cuda', rank)); step(torch.ones(8, 32))",
        ],
    ),
)
def test_a_number_names_a_device(tmp_path, lines):
    path = tmp_path / "train.py"
    path.write_text(
        textwrap.dedent(f"""
        import torch
        rank, rows = 0, torch.ones(8, 32)
        model = torch.nn.Linear(32, 32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def one(x):
            y = model(x.to(rank)) + torch.zeros(32, device=rank)
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step = torch.compile(one, backend="zero")
        {lines}
    """)
    )
    call = call_of(path, [], 8, 8, device_named("h100"))
    assert {info.device for info in call.step.table} == {torch.device("cuda", 0)}
    assert torch.get_default_device().type == "cpu" and torch.ones(1).device.type == "cpu"


def one_step(model, optimizer, x):
    loss = model(x.to("cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def test_a_step_is_planned_as_on_the_device():
    model = torch.nn.Linear(8, 8)
    given = model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, 8)
    made = plan(one_step, given, ranks=16, device="a100", stages=[3])
    (forecast,) = made.forecasts.values()
    ctx = forecast.rewritten.ctx
    assert {info.device.type for info in ctx.table} == {"cuda"} and ctx.on_accelerator
    values = [node.meta.get("val") for node in forecast.rewritten.gm.graph.nodes]
    assert {v.device.type for v in values if isinstance(v, torch.Tensor)} == {"cuda"}
    assert made.memory_limit == 79 * 2**30
    assert ctx.figures.flops_per_s == pytest.approx(0.65 * 312e12)
    # Each machine's eight cards carry what a ring of all sends between two machines.
    assert ctx.figures.bytes_per_s == pytest.approx(0.8 * 8 * 25e9)
    assert model.weight.device.type == "cpu"


@pytest.mark.nightly
def test_figures_that_are_given_come_before_the_devices():
    model = torch.nn.Linear(8, 8)
    given = model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, 8)
    options = {"hardware": "latency_s=1e-3 bytes_per_s=1e6"}
    limit = {"memory_limit": 1000, "stages": [0]}
    made = plan(one_step, given, ranks=2, device="h100", options=options, **limit)
    assert made.memory_limit == 1000
    assert made.forecasts["0"].rewritten.ctx.figures.bytes_per_s == 1e6


def test_the_network_is_slower_than_the_link_inside_a_machine():
    for device in DEVICES.values():
        two = device.hardware((("node", 4), ("gpu", 8)))
        node, gpu = (two.along(axis).bytes_per_s for axis in ("node", "gpu"))
        assert node < two.along("node,gpu").bytes_per_s <= gpu
        assert two.on_one_axis(["node", "gpu"]).bytes_per_s == two.along("node,gpu").bytes_per_s
        alone = device.hardware((("data", 8),))
        assert two.links["gpu"].bytes_per_s == alone.bytes_per_s
        assert device.hardware((("data", 64),)).latency_s > two.links["gpu"].latency_s
        assert device.is_measured or "unmeasured" in two.source and two.spread > 1.5


def test_tf32_makes_float32_faster():
    h100 = DEVICES["h100"]
    slow, fast = (h100.hardware((("data", 8),), has_tf32=on) for on in (False, True))
    assert fast.float32_flops_per_s > 5 * slow.float32_flops_per_s


def test_tf32_is_planned_with_if_it_was_set_by_its_new_name():
    axes, h100 = (("data", 8),), DEVICES["h100"]
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        ranks = _ranks(axes, Options(), (None, h100), makes_whole=False)
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
    assert ranks.figures == h100.hardware(axes, has_tf32=True)


def test_an_unknown_device_names_the_nearest_and_the_way_out(capsys):
    with pytest.raises(ValueError, match=r"'H101' is not .* did you mean 'h100'\? .*--hardware"):
        device_named("H101")
    assert command_line.main(["plan", "--ranks", "2", "--device", "b20", "train.py"]) == 1
    err = capsys.readouterr().err
    assert "did you mean 'b200'" in err and "calibrate" in err
    with pytest.raises(ValueError, match="did you mean 'cpu'"):
        plan(one_step, ranks=2, device="gpu")
