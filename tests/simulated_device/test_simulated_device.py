"""Steps on an asynchronous accelerator compute what they compute on the CPU, whatever runs when."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
import tests.simulated_device as simulated
from tests.kit.ranks import Ranks
from tests.kit.step_forms.form import FORMS
from tests.simulated_device import training
from zerofx.errors import OrderError
from zerofx.hardware import Hardware
from zerofx.order.check import CHECK
from zerofx.order.hooks import Noted
from zerofx.runtime.comm import measure
from zerofx.runtime.comm.communication import Communicator

pytestmark = pytest.mark.nightly
ROOT = Path(__file__).parents[2]
SEEDS = 200
NOT_SERVED = {
    "tied_weights_autocast_and_clipping": "the device has no kernels for autocast",
    "evaluation_under_inference_mode_first": "its copies write to what inference mode made",
}
SERVED = [name for name in FORMS if name not in NOT_SERVED]

OFFLOADS = (
    "",
    "optimizer",
    "params",
    "activations",
    "optimizer,params",
    "optimizer,params,activations",
)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Compile it once, elsewhere: a process that has loaded it has kernels of its own for good."""
    build = "import tests.simulated_device as simulated; simulated.build()"
    subprocess.run([sys.executable, "-c", build], check=True, cwd=ROOT)


@pytest.fixture(scope="module")
def devices(compiled):
    """``devices(n)``: n ranks of their own, as a process that has the device keeps it."""
    groups: dict[int, Ranks] = {}
    yield lambda count: groups.setdefault(count, Ranks(count))
    for group in groups.values():
        group.kill()


# What the device does.


def _missing_wait(policy: str, waits: bool) -> list[float]:
    simulated.use()
    with simulated.schedule(policy, 3):
        values, copy = torch.zeros(4, device="sim"), torch.zeros(4, device="sim")
        torch.accelerator.synchronize()
        beside = torch.sim.Stream("sim")
        values += 1
        if waits:
            beside.wait_stream(torch.sim.current_stream("sim"))
        with torch.sim.stream(beside):
            copy.copy_(values)
        beside.synchronize()
        return copy.tolist()


def test_a_wait_that_is_missing_shows_when_streams_run_late(devices):
    (group,) = [devices(1)]
    assert group.run(_missing_wait, "early", False) == [[1.0] * 4]
    assert group.run(_missing_wait, "late", False) == [[0.0] * 4]
    for policy in ("early", "late", "random"):
        assert group.run(_missing_wait, policy, True) == [[1.0] * 4]


def _freed_while_read(records: bool) -> bool:
    simulated.use()
    with simulated.schedule("late"):
        values = torch.ones(1000, device="sim")
        beside = torch.sim.Stream("sim")
        beside.wait_stream(torch.sim.current_stream("sim"))
        with torch.sim.stream(beside):
            copy = values + 1
        if records:
            values.record_stream(beside)
        del values
        torch.sim.current_stream("sim").synchronize()
        beside.synchronize()
        return bool((copy.cpu() == 2).all())


def test_memory_freed_while_another_stream_reads_it_is_poison_unless_recorded(devices):
    assert devices(1).run(_freed_while_read, True) == [True]
    assert devices(1).run(_freed_while_read, False) == [False]


def _written_while_read(pinned: bool) -> list[float]:
    simulated.use()
    with simulated.schedule("late"):
        host = torch.ones(4, pin_memory=pinned)
        values = host.to("sim", non_blocking=True)
        host.fill_(7)
        return values.tolist()


def test_pinned_memory_is_read_when_the_copy_runs_and_other_memory_at_once(devices):
    assert devices(1).run(_written_while_read, True) == [[7.0] * 4]
    assert devices(1).run(_written_while_read, False) == [[1.0] * 4]


TOUCH = """
import ctypes, torch, tests.simulated_device as simulated
simulated.use()
values = torch.ones(4, device="sim")
print(values.tolist(), flush=True)
ctypes.string_at(values.data_ptr(), 1)
"""


def test_the_host_cannot_touch_the_memory():
    done = subprocess.run([sys.executable, "-c", TOUCH], capture_output=True, text=True)
    assert done.stdout == "[1.0, 1.0, 1.0, 1.0]\n", done.stderr
    assert done.returncode == -signal.SIGSEGV


def _collective(policy: str) -> tuple[list[float], bool]:
    training.give_group_a_device()
    with simulated.schedule(policy):
        rank = torch.distributed.get_rank()
        torch.sim.set_device(rank)
        values = torch.full((3,), float(rank + 1), device="sim")
        work = torch.distributed.all_reduce(values, async_op=True)
        before = torch.sim.Stream("sim")
        with torch.sim.stream(before):  # does not wait
            copy = values.clone()
        before.synchronize()
        work.wait()
        result = values.tolist()
        torch.sim.set_device(0)
        return result, copy.tolist() == result


def test_a_stream_that_does_not_wait_for_a_collective_reads_old_values(devices):
    answers = devices(2).run(_collective, "late")
    assert [result for result, _ in answers] == [[3.0] * 3] * 2
    assert not any(is_new for _, is_new in answers)


def _measured() -> tuple[Hardware, int]:
    training.give_group_a_device()
    torch.sim.reset_peak_memory_stats()
    here, small = torch.device("sim"), {torch.float32: 512}  # these products are the CPU's
    with mock.patch.object(measure, "MATRIX", (small, small)):
        figures = measure.own_figures(Communicator(torch.distributed.group.WORLD), here)
    return figures, torch.sim.max_memory_allocated()


def test_the_link_is_measured_in_a_small_part_of_a_device(devices):
    for figures, peak in devices(2).run(_measured):
        assert figures.bytes_per_s > 1e5 and 0 < figures.latency_s < 10 and peak < 2**29


# What steps do on it.


@pytest.mark.parametrize("policy", ("early", "late"))
@pytest.mark.parametrize("name", SERVED)
def test_alone_every_form_computes_what_the_cpu_does(name, policy, devices):
    stage = sorted(FORMS).index(name) % 4
    devices(1).run(training.check, name, stage, policy)


@pytest.mark.parametrize("policy", ("early", "late", "random"))
@pytest.mark.parametrize("stage", (1, 3))
def test_an_asynchronous_save_holds_what_was_there(stage, policy, devices, tmp_path):
    devices(2).run(training.check_save, str(tmp_path / "save"), stage, policy)


@pytest.mark.parametrize("seed", range(20))
def test_a_save_through_little_pinned_memory_holds_what_was_there(seed, devices, tmp_path):
    draw = random.Random(seed)
    count, stage = draw.choice((1, 2)), draw.choice((1, 2, 3))
    policy = draw.choice(("early", "late", "random", "random"))
    ring_bytes = draw.choice(((256, 256), (1024, 256), (4096, 1024)))
    arguments = str(tmp_path / "save"), stage, policy, seed, ring_bytes, draw.randrange(4)
    devices(count).run(training.check_save, *arguments)


@pytest.mark.parametrize("tier", ("cpu", "nvme"))
@pytest.mark.parametrize("offload", OFFLOADS[1:])
@pytest.mark.parametrize("policy", ("early", "late"))
def test_what_is_offloaded_comes_back_in_time(offload, tier, policy, devices):
    options = {"offload": offload, "offload_tier": tier}
    (num_moved,) = devices(1).run(training.check, "plain", 3, policy, 0, options)
    assert (num_moved > 0) == ("activations" in offload)


def _watched(offload: str, waits: bool) -> str:
    """Train with ``check_order``; return what it says if streams have ``waits`` for events or not.

    The device runs early, so that results are right without.
    """
    options = {"check_order": True, **({"offload": offload} if offload else {})}
    no_wait = mock.patch.object(Noted, "wait_event", lambda stream, event: None)
    try:
        with contextlib.nullcontext() if waits else no_wait:
            training.check("plain", 3, "early", 0, options)
    except OrderError as error:
        return str(error)
    finally:
        CHECK.end()
    return ""


@pytest.mark.parametrize("count", (1, 2))
@pytest.mark.parametrize("offload", OFFLOADS)
def test_check_order_finds_a_missing_wait_and_nothing_else(offload, count, devices):
    assert devices(count).run(_watched, offload, True) == [""] * count
    for words in devices(count).run(_watched, offload, False) if offload else ():
        assert "stream 1" in words and "zerofx/runtime/storage/copies.py" in words
        assert "place_offload" in words or "offload_activations" in words


def smallest_stage(offload: str) -> int:
    return 3 if "params" in offload else int("optimizer" in offload)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_drawn_training_computes_what_the_cpu_does(seed, devices):
    draw = random.Random(seed)
    count = draw.choice((1, 1, 2, 2, 3))
    names = [name for name in SERVED if count == 1 or not FORMS[name].only_alone]
    name, stage = draw.choice(names), draw.randrange(4)
    options = {}
    if offload := draw.choice([one for one in OFFLOADS if smallest_stage(one) <= stage]):
        options = {"offload": offload, "offload_tier": draw.choice(("cpu", "nvme"))}
    devices(count).run(training.check, name, stage, "random", seed, options)
