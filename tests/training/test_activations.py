"""``options={"offload": "activations"}``: what forward saves is away, and nothing else changes.

On a machine without a GPU what torch's CPU allocator gives stands for the device, and memory of the
system's own for the host: every byte that moves is copied.
"""

import copy
import functools
import gc
import os
import re
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
import zerofx
from tests.kit.covering import nightly, only
from tests.kit.device_memory import measured
from tests.kit.fake_cuda import Cuda
from tests.kit.models import ConvNet, Gpt, images, language_loss, squared_loss, tokens
from tests.kit.ranks import ranks_fixture  # noqa: F401
from tests.kit.trainings import SLOW, assert_same, moving_small_values, program_of
from zerofx.compiler.choices import choose
from zerofx.cost.traffic import moved_bytes
from zerofx.errors import StepError
from zerofx.lower.regions import CompiledRegion
from zerofx.runtime.parameters.registry import REGISTRY
from zerofx.runtime.storage import copies as copying
from zerofx.runtime.storage.copies import Copies
from zerofx.runtime.storage.memory import HostMemory

ACTIVATIONS, BOTH = {"offload": "activations"}, {"offload": "optimizer,activations"}


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()


@pytest.fixture
def small_values():
    with moving_small_values():
        yield


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 11), nn.Linear(11, 3)

    def forward(self, x):
        return self.head(F.dropout(F.gelu(self.body(F.dropout(x, 0.3))), 0.5))


def batch_of(kind, number, rows):
    if kind == "tokens":
        return tokens(number, rows)
    return (
        images(number, rows) if kind == "images" else (torch.randn(rows, 6), torch.zeros(rows, 3))
    )


CASES = {
    "gpt": (lambda: Gpt(), language_loss, "tokens"),
    "checkpointed": (lambda: Gpt(checkpoint=True), language_loss, "tokens"),
    "convolution": (ConvNet, squared_loss, "images"),
    "dropout": (Dropping, squared_loss, "features"),
}
FORMS = ("plain", "accumulated", "gradients stay", "autocast", "clipped")


def step_of(loss_of, form):
    def step(model, optimizer, *batch):
        parts = zip(*(value.chunk(2) for value in batch), strict=True)
        losses = []
        for part in parts if form == "accumulated" else [batch]:
            with torch.autocast("cpu", torch.bfloat16, enabled=form == "autocast"):
                losses.append(loss_of(model, *part))
            losses[-1].backward()
        if form == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        if form != "gradients stay":
            optimizer.zero_grad()
        return torch.stack(losses).sum()

    return step


def trained(name, form, options, rows=(4, 4, 4), lowering="eager"):
    """Losses, parameters, buffers, states and gradients after a few steps, and what has moved."""
    torch._dynamo.reset()
    make, loss_of, kind = CASES[name]
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    compiled = torch.compile(
        step_of(loss_of, form), backend="zero", options={"lowering": lowering, **options}
    )
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    losses = []
    with moving_small_values():
        for number, count in enumerate(rows):
            torch.manual_seed(100 * rank + number)
            batch = batch_of(kind, 10 * rank + number, count)
            losses.append(compiled(model, optimizer, *batch).item())
        after = torch.rand(1).item()  # as many numbers were drawn
    program = program_of(compiled)
    gradients = []
    if form == "gradients stay" and options["stage"] < 2:
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    found = (losses, after, gradients, model.state_dict(), optimizer.state_dict())
    return found, moved_bytes(program.gm), program.function.copies


@functools.cache
def expected_of(name, form, stage, rows, lowering):
    """What is trained without offload, once in a process."""
    expected, _, _ = trained(name, form, {"stage": stage}, rows, lowering)
    return copy.deepcopy(expected)


def both(name, form, stage, offload, rows=(4, 4, 4), lowering="eager"):
    expected = expected_of(name, form, stage, rows, lowering)
    found, moved, copies = trained(name, form, {"stage": stage, **offload}, rows, lowering)
    if len(set(rows)) == 1:
        assert copies.to_host_bytes == len(rows) * moved.to_host
        assert copies.to_device_bytes == len(rows) * moved.to_device
    return expected, found, moved.num_activations


def check(results):
    for expected, found, num_activations in results:
        assert_same(found, expected)
        assert num_activations > 0 and len(set(expected[0])) > 1


EXHAUSTIVE = pytest.mark.exhaustive
OTHERS_EXHAUSTIVE = tuple(pytest.param(stage, marks=EXHAUSTIVE) for stage in (0, 1, 2))
STAGES = (0, *OTHERS_EXHAUSTIVE[1:], 3)


@pytest.mark.slow(reason="two ranks train with and without")
@pytest.mark.parametrize("stage", (*OTHERS_EXHAUSTIVE, 3))
@pytest.mark.parametrize("name", only(("dropout",), CASES))
def test_every_model_is_bitwise_the_same_on_two_ranks(name, stage, ranks):
    check(ranks(2).run(both, name, "plain", stage, ACTIVATIONS))


@pytest.mark.nightly
@pytest.mark.parametrize("stage", (*OTHERS_EXHAUSTIVE, 3))
@pytest.mark.parametrize("form", FORMS[1:])
def test_every_form_of_a_step_is_bitwise_the_same_on_two_ranks(form, stage, ranks):
    check(ranks(2).run(both, "gpt", form, stage, ACTIVATIONS))


@pytest.mark.nightly
@pytest.mark.parametrize("stage", (*OTHERS_EXHAUSTIVE[1:], 3))
@pytest.mark.parametrize("form", only(("plain",), ("plain", "clipped", "accumulated")))
def test_with_the_optimizer_offloaded_too_it_is_bitwise_the_same(form, stage, ranks):
    check(ranks(2).run(both, "gpt", form, stage, BOTH))


@pytest.mark.nightly
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["gpt", *(pytest.param(name, marks=EXHAUSTIVE) for name in CASES)])
def test_alone_it_is_bitwise_the_same(name, stage):
    check([both(name, "plain", stage, BOTH if stage else ACTIVATIONS)])


@pytest.mark.nightly
@pytest.mark.parametrize("stage", STAGES)
def test_batches_that_change_their_size_are_bitwise_the_same(stage):
    check([both("gpt", "plain", stage, ACTIVATIONS, rows=(4, 6, 2, 9, 4))])


@pytest.mark.nightly
@pytest.mark.parametrize("stage", (0, pytest.param(3, marks=EXHAUSTIVE)))
@pytest.mark.parametrize("name", ["dropout", pytest.param("gpt", marks=EXHAUSTIVE)])
def test_compiled_it_is_bitwise_the_same(name, stage):
    check([both(name, "plain", stage, ACTIVATIONS, lowering="inductor")])


class Layers(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(count))
        self.norms = nn.ModuleList(nn.LayerNorm(24) for _ in range(count))

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + F.gelu(layer(norm(x)))
        return x


def regions_compiled(count, stage):
    """How many regions were compiled, how many there are, and what moves."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Layers(count)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    compiled = torch.compile(step, backend="zero", options={"stage": stage, **ACTIVATIONS})
    with (
        mock.patch.object(CompiledRegion, "_known", {}),
        mock.patch(
            "zerofx.compat.inductor.compile_with_inductor", lambda gm, inputs, donated: gm.forward
        ),
    ):
        compiled(torch.ones(8, 24))
        program = program_of(compiled)
        there = [m for m in program.runtime.program.children() if isinstance(m, CompiledRegion)]
        return sum(map(len, CompiledRegion._known.values())), len(there), moved_bytes(program.gm)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", (0, 3))
def test_equal_layers_are_compiled_once_however_many_there_are(stage, small_values):
    few, some_regions, _ = regions_compiled(4, stage)
    many, all_regions, moved = regions_compiled(8, stage)
    assert moved.num_activations >= 8 and all_regions > some_regions
    assert many <= few + 2


# Memory


def on_a_slow_device(stage, options):
    with mock.patch.dict(os.environ, {"ZEROFX_HARDWARE": SLOW}):
        return measured(stage=stage, **options)


def check_memory(without, offloaded):
    plan = without.predicted - offloaded.predicted
    assert plan > 0.4 * without.predicted and offloaded.activations >= plan
    assert without.step - offloaded.step == pytest.approx(plan, rel=0.05)
    assert offloaded.step == pytest.approx(offloaded.predicted, rel=0.05)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", (0, OTHERS_EXHAUSTIVE[1], 3))
def test_the_devices_peak_falls_by_what_the_plan_says(stage):
    check_memory(on_a_slow_device(stage, {}), on_a_slow_device(stage, ACTIVATIONS))


@pytest.mark.nightly
@pytest.mark.parametrize("stage", (OTHERS_EXHAUSTIVE[0], 3))
def test_on_two_ranks_too(stage, ranks):
    before = ranks(2).run(on_a_slow_device, stage, {})
    after = ranks(2).run(on_a_slow_device, stage, ACTIVATIONS)
    for without, offloaded in zip(before, after, strict=True):
        check_memory(without, offloaded)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", (0, 3))
def test_a_step_keeps_within_its_memory_budget(stage):
    without = on_a_slow_device(stage, {})
    least = on_a_slow_device(stage, ACTIVATIONS)
    budget = (without.predicted + least.predicted) // 2
    within = on_a_slow_device(stage, {"memory_budget": budget, **ACTIVATIONS})
    assert within.step <= budget + 2**10 and within.predicted <= budget
    assert 0 < within.activations < least.activations


def test_a_budget_that_cannot_be_met_is_refused_before_the_first_step():
    with pytest.raises(
        Exception, match=r"memory_budget is 1000 bytes, and this step allocates \d+"
    ):
        measured(stage=0, memory_budget=1000, **ACTIVATIONS)


def pair_of(name, **options):
    torch.manual_seed(0)
    make, loss_of, kind = CASES[name]
    model, step = make(), step_of(loss_of, "plain")
    compiled = torch.compile(step, backend="zero", options={"lowering": "eager", **options})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = 4 if kind == "tokens" else 64
    return compiled, model, optimizer, [batch_of(kind, number, rows) for number in range(4)]


@pytest.mark.parametrize(
    "name, stage", [("dropout", 0), *(nightly("gpt", stage) for stage in (0, 3))]
)
def test_staging_memory_is_what_was_said_and_goes_with_the_step(name, stage, small_values):
    gc.collect()
    before = REGISTRY.host.nbytes
    compiled, *pair, batches = pair_of(name, stage=stage, **ACTIVATIONS)
    for batch in batches[:2]:
        compiled(*pair, *batch)
    program = program_of(compiled)
    staging = moved_bytes(program.gm).staging
    assert REGISTRY.host.nbytes - before == staging > 0
    assert program.runtime.host_needs["activations"] == staging
    num_allocations = REGISTRY.host.num_allocations
    for batch in batches:
        compiled(*pair, *batch)
    assert REGISTRY.host.num_allocations == num_allocations, "nothing once it has trained"
    assert REGISTRY.host.nbytes - before == staging
    del compiled, pair, program
    torch._dynamo.reset()
    gc.collect()
    assert REGISTRY.host.nbytes == before


def test_no_room_on_the_host_is_an_error_with_the_numbers_before_the_first_step(
    monkeypatch, small_values
):
    monkeypatch.setattr(HostMemory, "available_bytes", lambda self: 1000)
    compiled, model, optimizer, (batch, *_) = pair_of("dropout", stage=0, **ACTIVATIONS)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    words = r"needs \d+ bytes of host memory .*\(\d+ of activations\), and 1000 are available"
    with pytest.raises(StepError, match=words):
        compiled(model, optimizer, *batch)
    assert_same(dict(model.state_dict()), before)
    assert not optimizer.state


@pytest.mark.parametrize("name", ("dropout", nightly("gpt")))
def test_explain_says_what_is_away_and_for_how_long_it_travels(name, small_values):
    compiled, *pair, batches = pair_of(name, stage=0, **ACTIVATIONS)
    compiled(*pair, *batches[0])
    moved = moved_bytes(program_of(compiled).gm)
    text = zerofx.explain(compiled)
    number, kib = moved.num_activations, moved.activations / 1024
    assert re.search(rf"activations away from the device +{number}, {kib:.2f} KiB", text)
    assert "ms of transfer, hidden behind compute" in text


@pytest.mark.nightly
def test_a_step_that_fails_leaves_the_next_one_alone(small_values):
    expected, *pair, batches = pair_of("gpt", stage=0)
    losses = [expected(*pair, *batch).item() for batch in batches[:3]]
    torch._dynamo.reset()
    compiled, *pair, _ = pair_of("gpt", stage=0, **ACTIVATIONS)
    found = [compiled(*pair, *batches[0]).item()]
    with mock.patch.object(Copies, "reload_start", side_effect=RuntimeError("no")):
        with pytest.raises(RuntimeError, match="no"):
            compiled(*pair, *batches[1])
    found += [compiled(*pair, *batch).item() for batch in batches[1:3]]
    assert found == losses


# Layouts and streams


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(24.0).view(2, 3, 4).transpose(0, 2),
        torch.arange(48.0).view(2, 3, 2, 4).to(memory_format=torch.channels_last),
        torch.arange(24.0).view(4, 6)[1:3, ::2],
        torch.arange(3.0).expand(4, 3),
        torch.tensor(5.0),
        torch.zeros(0, 3),
        torch.tensor([True, False, True]),
        torch.arange(5, dtype=torch.bfloat16),
    ],
    ids=lambda value: f"{value.dtype}{tuple(value.shape)}{value.stride()}",
)
def test_a_value_comes_back_as_it_lay(value):
    copies = Copies(HostMemory())
    host = copies.wait(copies.offload_start(value, 0))
    back = copies.wait(copies.reload_start(host, torch.device("cpu")))
    for other in (host, back):
        assert_same(other, value)
        assert (other.stride(), other.dtype) == (value.stride(), value.dtype)
    assert not value.numel() or back.data_ptr() != value.data_ptr() != host.data_ptr()
    assert REGISTRY.host.holds(host) or copies.memory.holds(host)


def test_a_staging_buffer_grows_with_its_value():
    copies = Copies(HostMemory())
    for rows in (2, 5, 3):
        value = torch.randn(rows, 4)
        host = copies.wait(copies.offload_start(value, 0))
        assert_same(host, value)
    assert copies.memory.num_allocations == 2


def test_the_device_and_not_the_host_waits_for_a_copy_out(monkeypatch):
    """The next kernels may use the memory; the thread that gives them goes on."""
    cuda = Cuda()
    monkeypatch.setattr(copying, "is_accelerator", lambda device: True)
    monkeypatch.setattr(copying, "module_of", lambda device: cuda)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    memory = HostMemory()
    monkeypatch.setattr(
        memory, "empty", lambda numel, dtype, pinned: torch.empty(numel, dtype=dtype)
    )
    copies = Copies(memory)
    value = torch.arange(8.0).view(2, 4).t()
    host = copies.wait(copies.offload_start(value, 0))
    assert cuda.asked == [
        "new stream0",
        "stream0 behind current",
        "record event of stream0",
        "current after event of stream0",
    ]
    cuda.asked.clear()
    back = copies.wait(copies.reload_start(host, torch.device("cpu")))
    assert_same(back, value)
    assert [asked.split(" ", 1)[1] for asked in cuda.asked[1:]][0] == "behind current"
    cuda.asked.clear()
    copies.offload_start(value, 0)
    assert any("after event" in asked for asked in cuda.asked[:2]), "it has not left the buffer yet"


# Options


def test_targets_may_be_named_together():
    assert choose(ACTIVATIONS, {}).offload == ("activations",)
    for given in (
        "activations,optimizer",
        ["optimizer", "activations"],
        {"activations", "optimizer"},
    ):
        assert choose({"offload": given}, {}).offload == ("optimizer", "activations")
    assert choose({}, {"ZEROFX_OFFLOAD": "activations"}).offload == ("activations",)


def test_stage_0_has_activations_to_offload_and_no_states():
    assert choose({"stage": 0, **ACTIVATIONS}, {}).stage == 0
    with pytest.raises(ValueError, match="'optimizer' needs stage 1, 2 or 3"):
        choose({"stage": 0, **BOTH}, {})
