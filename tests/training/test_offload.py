"""``options={"offload": "optimizer"}``: states live in host memory, and nothing else changes.

On a machine without a GPU what torch's CPU allocator gives stands for the device, and memory of the
system's own for the host: every byte that moves is copied.
"""

import copy
import gc
import os
import pathlib
import re
import threading
import time
from unittest import mock

import pytest
import torch

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
import zerofx
from tests.kit.covering import first, nightly, only
from tests.kit.device_memory import Deep, assert_falls_as_planned, measured, squares
from tests.kit.fake_cuda import Cuda
from tests.kit.ranks import ranks_fixture  # noqa: F401
from tests.kit.trainings import (
    FORMS,
    OFFLOAD,
    PRECISIONS,
    assert_same,
    built,
    clipped,
    plain,
    program_of,
    read_after,
    run,
    running,
    save_and_resume,
    stepped_twice,
    tensors_of,
    train_with,
    trained,
    with_kernels,
    write_between,
    zero,
)
from zerofx.codegen.rewrite.storage import MASTER
from zerofx.codegen.trace.trace import Update
from zerofx.compiler.choices import choose
from zerofx.cost.program import live_bytes
from zerofx.cost.traffic import moved_bytes
from zerofx.errors import StepError
from zerofx.runtime.optimizer.host import HostUpdates
from zerofx.runtime.optimizer.update import OptimizerRunner
from zerofx.runtime.parameters.registry import REGISTRY
from zerofx.runtime.storage import copies as copying
from zerofx.runtime.storage.copies import Copies
from zerofx.runtime.storage.memory import HostMemory


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()


def both(step, stage, options, dtype):
    options = {"stage": stage, **options}
    return trained(step, options, dtype), trained(step, {**options, **OFFLOAD}, dtype)


def check(found):
    for without, offloaded in found:
        assert_same(offloaded[:3], without[:3])
        assert without[0][0] != without[0][-1]
        held, count = offloaded[3]
        assert held == count > 0 and without[3][0] == 0


@pytest.mark.slow(reason="ranks compile and train")
@pytest.mark.parametrize("world_size", (nightly(1), 2))
@pytest.mark.parametrize("stage", only((3,), (1, 2, 3)))
@pytest.mark.parametrize("step", only((clipped,), (plain, clipped)))
def test_losses_parameters_and_states_are_bitwise_those_without_offload(
    step, stage, world_size, ranks
):
    if world_size == 1:
        check([both(step, stage, {}, torch.float32)])
    else:
        check(ranks(2).run(both, step, stage, {}, torch.float32))


@pytest.mark.nightly
@pytest.mark.parametrize("stage", (1, 3))
def test_two_steps_of_an_optimizer_in_one_are_bitwise_the_same(stage):
    check([both(stepped_twice, stage, {}, torch.float32)])


STAGES_3_AND_1 = (3, pytest.param(1, marks=pytest.mark.exhaustive))


@pytest.mark.nightly
@pytest.mark.parametrize("stage", STAGES_3_AND_1)
@pytest.mark.parametrize("step", FORMS[2:])
def test_every_form_of_a_step_is_bitwise_the_same(step, stage, ranks):
    check(ranks(2).run(both, step, stage, {}, torch.float32))


@pytest.mark.nightly
@pytest.mark.parametrize("stage", STAGES_3_AND_1)
@pytest.mark.parametrize(
    "options",
    [
        {"bucket": False},
        {"update_in_backward": False, "prefetch": False},
        {"bucket_bytes": 256, "reduce_dtype": "bfloat16"},
        {"accumulate": "sharded"},
    ],
    ids=str,
)
def test_with_other_options_it_is_bitwise_the_same(options, stage, ranks):
    check(ranks(2).run(both, clipped, stage, options, torch.float32))


@pytest.mark.nightly
@pytest.mark.parametrize("name", only(("masters, int8 moments",), PRECISIONS))
def test_precision_options_are_bitwise_the_same(name):
    with mock.patch("zerofx.codegen.rewrite.storage.FEWEST_CODED", 64):
        check([both(plain, 3, PRECISIONS[name], torch.bfloat16)])


@pytest.mark.nightly
@pytest.mark.parametrize("stage", STAGES_3_AND_1)
@pytest.mark.parametrize("name", ["masters, int8 moments", "rounded"])
def test_precision_options_are_bitwise_the_same_on_two_ranks(name, stage, ranks):
    check(ranks(2).run(both, clipped, stage, PRECISIONS[name], torch.bfloat16))


@pytest.mark.nightly
def test_ranks_that_disagree_hear_of_it(ranks):
    with pytest.raises(Exception, match="offload optimizer|to_host|update"):
        ranks(2).run(train_with, [OFFLOAD, {}])


@pytest.mark.nightly
@pytest.mark.parametrize(
    "make", only((torch.optim.SGD,), [torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop])
)
def test_other_optimizers_are_bitwise_the_same(make):
    def losses(**options):
        torch._dynamo.reset()
        pair = built(make=make)
        return run(zero(**options), pair, range(3)), pair[0].state_dict()

    assert_same(losses(**OFFLOAD), losses())


# The kernel


@pytest.mark.slow(reason="kernels are compiled")
@pytest.mark.parametrize("stage", (3, nightly(1)))
def test_a_bucket_is_one_kernel_there_too_and_bitwise_the_same(stage):
    without, offloaded = with_kernels(stage), with_kernels(stage, **OFFLOAD)
    assert_same(offloaded[:3], without[:3])
    assert offloaded[3] == without[3] and all(found for _, found in offloaded[3])


# Memory


@pytest.mark.nightly
@pytest.mark.parametrize("stage", (1, 3))
def test_the_devices_peak_falls_by_what_the_plan_says(stage):
    without, offloaded = measured(stage=stage), measured(stage=stage, **OFFLOAD)
    assert offloaded.staging > 0
    assert_falls_as_planned(without, offloaded)


@pytest.mark.nightly
def test_on_two_ranks_too(ranks):
    found = zip(
        ranks(2).run(measured_there, {}), ranks(2).run(measured_there, OFFLOAD), strict=True
    )
    for without, offloaded in found:
        assert_falls_as_planned(without, offloaded)


def measured_there(options):
    # So many layers that one buffer is 3% of the states: a rank that is ahead takes another one
    # while its neighbour still reads the last.
    return measured(layers=32, **options)


@pytest.mark.parametrize("stage", only((3,), (1, 3)))
def test_what_is_in_host_memory_and_what_moves_is_what_is_said(stage):
    gc.collect()
    torch._dynamo.reset()
    before = REGISTRY.host.nbytes
    pair, compiled = built(), zero(stage=stage, **OFFLOAD)
    run(compiled, pair, range(2))
    program = program_of(compiled)
    states = sum(tensor.nbytes for tensor in tensors_of(pair[1]))
    empty = sum(not tensor.numel() for tensor in tensors_of(pair[1]))
    moved, copies = moved_bytes(program.gm), program.function.copies
    assert program.runtime.host_needs == {
        "optimizer states": states,
        "staging buffers": moved.staging,
    }
    assert REGISTRY.host.nbytes - before == states + moved.staging + empty
    assert REGISTRY.host.peak_nbytes >= REGISTRY.host.nbytes
    assert copies.to_host_bytes == 2 * moved.to_host > 0
    assert copies.to_device_bytes == 2 * moved.to_device > 0
    text = zerofx.explain(compiled)
    assert f"optimizer states in host memory             {states / 1024:.2f} KiB" in text
    for line in ("staging buffers in host memory", "moved per step: to the host", "place_offload"):
        assert line in text
    assert {"offload optimizer", "offload_tier cpu"} < {*program.rewritten.schedule}, "ranks agree"
    once_trained = REGISTRY.host.num_allocations, REGISTRY.host.nbytes
    run(compiled, pair, range(2, 6))
    assert (REGISTRY.host.num_allocations, REGISTRY.host.nbytes) == once_trained
    del pair, compiled, program, copies
    torch._dynamo.reset()
    gc.collect()
    assert REGISTRY.host.nbytes == before


@pytest.mark.nightly
def test_explain_says_nothing_of_host_memory_that_is_not_used():
    run(compiled := zero(read_after), built(), range(1))
    assert "host memory" not in zerofx.explain(compiled)


@pytest.mark.nightly
@pytest.mark.parametrize("room", (0, 50_000))
def test_a_memory_budget_has_room_for_what_travels(room, ranks):
    """What the program allocates fits the least budget that is said to do, and every larger one."""
    for budget, alive in ranks(2).run(within_budget, room):
        assert alive <= budget


def within_budget(room):
    least = None
    for budget in (1, None):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Deep()
        optimizer = torch.optim.AdamW(model.parameters())
        options = {"lowering": "eager", "hardware": "latency_s=1e-4 bytes_per_s=1e9", **OFFLOAD}
        options["memory_budget"] = budget = budget or least + room
        compiled = torch.compile(squares, backend="zero", options=options)
        try:
            compiled(model, optimizer, torch.ones(8, 96))
        except Exception as error:
            least = int(re.search(r"this step allocates (\d+)", str(error)).group(1))
    program = program_of(compiled)
    return budget, max(live_bytes(program.gm.graph, 2, table=program.table))


# No room


def test_no_room_on_the_host_is_an_error_with_the_numbers_before_the_first_step(monkeypatch):
    monkeypatch.setattr(HostMemory, "available_bytes", lambda self: 1000)
    pair = built()
    before = copy.deepcopy(pair[0].state_dict())
    with pytest.raises(StepError, match=r"needs \d+ bytes of host memory .* 1000 are available"):
        run(zero(**OFFLOAD), pair, range(1))
    assert_same(dict(pair[0].state_dict()), dict(before))
    assert not pair[1].state and REGISTRY.lookup(pair[0].head.weight) is None


def without_room_on_rank_1(options):
    """What each rank is told, and whether anything has changed."""
    is_short = torch.distributed.get_rank() == 1
    available = mock.Mock(return_value=1000 if is_short else 2**30)
    pair = built()
    with mock.patch.object(HostMemory, "available_bytes", available):
        try:
            run(zero(**options), pair, range(1))
        except Exception as error:
            return str(error), bool(pair[1].state), REGISTRY.lookup(pair[0].head.weight) is None
    return None


@pytest.mark.parametrize(
    "options", first(1, (OFFLOAD, {"offload": "optimizer,params,activations"})), ids=str
)
def test_a_rank_without_room_stops_all_of_them_before_the_first_step(options, ranks):
    other, short = ranks(2).run(without_room_on_rank_1, options)
    assert "1000 are available" in short[0]
    assert "rank 1" in other[0] and "bytes of host memory" in other[0]
    assert short[1:] == other[1:] == (False, True)


@pytest.mark.nightly
def test_what_is_there_already_needs_no_more_room(monkeypatch):
    pair, compiled = built(), zero(**OFFLOAD)
    run(compiled, pair, range(1))
    program = program_of(compiled)
    staging = program.runtime.host_needs["staging buffers"]
    torch._dynamo.reset()
    monkeypatch.setattr(HostMemory, "available_bytes", lambda self: 2 * staging)
    run(zero(clipped, **OFFLOAD), pair, range(1))


def test_the_machine_says_what_is_available():
    available = HostMemory().available_bytes()
    assert available is None or available > 2**20


# Checkpoints and the user's writes


@pytest.mark.nightly
@pytest.mark.parametrize("stage", STAGES_3_AND_1)
@pytest.mark.parametrize("first, then", [(OFFLOAD, {}), ({}, OFFLOAD)])
def test_checkpoints_interchange_with_runs_without_offload(first, then, stage, ranks):
    expected = ranks(2).run(save_and_resume, stage, {}, {})
    assert_same(ranks(2).run(save_and_resume, stage, first, then), expected)


def switch_over(stage, options_of_steps):
    """The same objects are trained with and without offload, in turn."""
    torch._dynamo.reset()
    pair = built()
    losses, held = [], []
    for number, options in enumerate(options_of_steps):
        torch._dynamo.reset()
        losses += run(zero(stage=stage, **options), pair, [number])
        tensors = tensors_of(pair[1])
        held.append(sum(map(REGISTRY.host.holds, tensors)) / len(tensors))
    zerofx.unshard(*pair)
    losses += run(plain, pair, [9])
    return losses, dict(pair[0].state_dict()), pair[1].state_dict(), held


@pytest.mark.nightly
@pytest.mark.parametrize("stage", STAGES_3_AND_1)
def test_states_move_there_and_back_with_the_options_and_unshard_gives_them_whole(stage, ranks):
    expected = ranks(2).run(switch_over, stage, [{}, {}, {}])
    found = ranks(2).run(switch_over, stage, [{}, OFFLOAD, {}])
    assert_same([each[:3] for each in found], [each[:3] for each in expected])
    assert all(each[3] == [0, 1, 0] for each in found)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", STAGES_3_AND_1)
def test_what_the_user_writes_between_steps_is_trained_on(stage, ranks):
    expected = ranks(2).run(write_between, stage, {})
    assert_same(ranks(2).run(write_between, stage, OFFLOAD), expected)


def test_masters_are_on_the_host_and_forgotten_where_the_user_writes():
    pair, compiled = built(torch.bfloat16), zero(master_weights=True, **OFFLOAD)
    run(compiled, pair, range(2))
    with zerofx.full_params(pair[0]), torch.no_grad():
        pair[0].head.bias.fill_(3.0)
    run(compiled, pair, range(2, 3))
    assert (pair[0].state_dict()["head.bias"].float() - 3.0).abs().max() < 0.1
    assert all(REGISTRY.host.holds(state[MASTER]) for state in pair[1].state.values())


# Beside the step


class Watched:
    """Counts the runs of updates' elements by thread, and fails at one of them."""

    def __init__(self, fails_at: int = 0, error: BaseException | None = None):
        self.threads: list[str] = []
        self.fails_at, self.error = fails_at, error

    def __enter__(self):
        def call(run):
            self.threads.append(threading.current_thread().name)
            if len(self.threads) == self.fails_at:
                raise self.error
            return run()

        self.patch = mock.patch.object(Update, "ready", running(call))
        self.patch.start()
        return self

    def __exit__(self, *_):
        self.patch.stop()


@pytest.mark.slow(reason="steps are compiled and run")
def test_updates_run_in_a_thread_of_their_own_and_are_prepared_in_the_steps():
    pair, compiled = built(), zero(**OFFLOAD)
    run(compiled, pair, range(1))
    with Watched() as watched:
        run(compiled, pair, range(1, 3))
    assert watched.threads and all("zerofx updates" in name for name in watched.threads)
    torch._dynamo.reset()
    with Watched() as watched:
        run(zero(clipped, stage=2), built(), range(1))
    assert set(watched.threads) == {threading.current_thread().name}


class Broken(Exception):
    pass


@pytest.mark.parametrize("fails_at", (nightly(1), 4))
def test_an_error_beside_the_step_is_the_steps_and_leaves_nothing_under_way(fails_at):
    pair, compiled = built(), zero(**OFFLOAD)
    run(compiled, pair, range(1))
    copies = program_of(compiled).function.copies
    error = Broken("no")
    with Watched(fails_at, error) as watched:
        with pytest.raises(Broken) as raised:
            run(compiled, pair, range(1))
    assert raised.value is error
    lines = [entry.name for entry in raised.traceback]
    assert "wait_update" in lines and lines[-1] == "call", "where it happened"
    assert copies.updates._process == -1, "its thread has ended"
    count = len(watched.threads)
    assert run(compiled, pair, range(1, 3)) and len(watched.threads) == count


def test_a_step_that_fails_elsewhere_waits_for_what_is_under_way():
    pair, compiled = built(), zero(**OFFLOAD)
    run(compiled, pair, range(1))
    copies = program_of(compiled).function.copies
    ended = []

    def slow(run):
        time.sleep(0.1)
        results = run()
        ended.append(run)
        return results

    with mock.patch.object(Update, "ready", running(slow)):
        with mock.patch.object(Copies, "to_device_start", side_effect=Broken("no")):
            with mock.patch.object(HostUpdates, "wait_update", lambda self, started: started):
                with pytest.raises(Broken, match="no"):
                    run(compiled, pair, range(1))
        count = len(ended)
        assert count and copies.updates._process == -1, "its thread has ended"
        time.sleep(0.3)
        assert len(ended) == count
    assert run(compiled, pair, range(1, 3))


def test_a_step_that_fails_leaves_the_next_one_alone():
    pair, compiled = built(), zero(**OFFLOAD)
    run(compiled, pair, range(1))
    with mock.patch.object(OptimizerRunner, "ready", side_effect=RuntimeError("no")):
        with pytest.raises(RuntimeError, match="no"):
            run(compiled, pair, range(1))
    assert run(compiled, pair, range(1, 3))


# Options


def test_the_options_are_read_from_the_code_and_the_environment():
    assert choose({}, {}).offload == ()
    for given in ("optimizer", ["optimizer"], ("optimizer",), {"optimizer"}):
        assert choose({"offload": given}, {}).offload == ("optimizer",)
    assert choose({}, {"ZEROFX_OFFLOAD": "optimizer"}).offload == ("optimizer",)
    assert choose(OFFLOAD, {"ZEROFX_OFFLOAD": ""}).offload == ()
    assert choose({"offload": None}, {}).offload == choose({"offload": []}, {}).offload == ()
    assert choose({"offload_tier": "cpu"}, {}).offload_tier == "cpu"


@pytest.mark.parametrize(
    "options, error, words",
    [
        (
            {"offload": "optimiser"},
            ValueError,
            "must be one of optimizer, params, activations, auto, not 'optimiser'",
        ),
        (
            {"offload": True},
            TypeError,
            "words like 'optimizer', 'params', 'activations', 'auto', or a list of them",
        ),
        ({"offload": ["optimizer", 3]}, TypeError, "must be one of optimizer"),
        ({"offload": "optimizer, optimiser"}, ValueError, "not 'optimiser'"),
        (
            {"offload": ""},
            ValueError,
            "must be one of optimizer, params, activations, auto, not ''",
        ),
        ({"offload_tier": "disk"}, ValueError, "must be one of cpu, nvme, not 'disk'"),
        ({"offload_tier": None}, TypeError, "must be one of cpu"),
        ({"offload_tier": "nvme"}, ValueError, "does not say what: add offload='optimizer'"),
        ({"offload_tier": "nvme", **OFFLOAD}, ValueError, "nobody has said where: add offload_dir"),
        ({"offload_dir": "x", **OFFLOAD}, ValueError, "offload_dir is about files.* Add offload_t"),
        ({"offload_cache_bytes": 9}, ValueError, "offload_cache_bytes is about files"),
        ({"offload_checksums": True}, ValueError, "offload_checksums is about files"),
        ({"offload_dir": 3}, TypeError, "a folder's path or a list of them, not 3"),
        ({"offload_dir": ["x", None]}, TypeError, "must be a folder's path, not None"),
        ({"offload_dir": ""}, ValueError, "not an empty string"),
        ({"offload_dir": []}, ValueError, "not an empty list"),
        ({"offload_dir": "x::y"}, ValueError, "not an empty string"),
        ({"offload_dir": ["x", "y", "./x"]}, ValueError, "names one folder twice"),
        ({"offload_cache_bytes": 0}, ValueError, "must be a positive number of bytes"),
        ({"stage": 0, **OFFLOAD}, ValueError, "offload 'optimizer' needs stage 1, 2 or 3"),
        ({"offload": "auto"}, ValueError, "say how much fits with memory_budget"),
        ({"offload": "auto,params", "memory_budget": 9}, ValueError, "drop it, or what stands"),
        ({"stage": 0, "offload": "auto", "memory_budget": 9}, ValueError, "'auto' needs stage 1"),
        ({"delayed_update": True}, ValueError, "add offload='optimizer'"),
    ],
)
def test_bad_options_are_refused_with_words(options, error, words):
    with pytest.raises(error, match=words):
        choose(options, {})


def test_folders_are_one_or_several_and_may_come_from_the_environment():
    files = {"offload": "optimizer", "offload_tier": "nvme"}
    two = os.pathsep.join(("a", "b"))
    for given in (two, ["a", "b"], ("a", pathlib.Path("b"))):
        assert choose({**files, "offload_dir": given}, {}).offload_dir == ("a", "b")
    assert choose({**files, "offload_dir": pathlib.Path("a")}, {}).offload_dir == ("a",)
    options = choose(files, {"ZEROFX_OFFLOAD_DIR": two, "ZEROFX_OFFLOAD_CACHE_BYTES": "1e6"})
    assert (options.offload_dir, options.offload_cache_bytes) == (("a", "b"), 10**6)
    # What the environment may add is not missed where the code is checked alone.
    assert choose(files, {}, is_complete=False).offload_dir == ()


# Streams: what is asked of CUDA, in which order.  No GPU has run it.


def test_copies_go_on_streams_of_their_own_and_are_waited_for_by_events(monkeypatch):
    cuda = Cuda()
    monkeypatch.setattr(copying, "is_accelerator", lambda device: True)
    monkeypatch.setattr(copying, "module_of", lambda device: cuda)
    memory = HostMemory()
    monkeypatch.setattr(
        memory, "empty", lambda numel, dtype, pinned: torch.empty(numel, dtype=dtype)
    )
    copies = Copies(memory)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    value = torch.arange(8.0)
    out = copies.to_host_start(list(value.split([3, 5])), 0)
    assert torch.equal(copies.wait(out), value)
    assert cuda.asked == [
        "new stream0",
        "stream0 behind current",
        "record event of stream0",
        "current after event of stream0",
    ]
    cuda.asked.clear()
    back = copies.to_device_start(list(out.split([3, 5])), torch.device("cpu"), mock.MagicMock())
    assert torch.equal(copies.wait(back), value)
    assert cuda.asked[1:] == [
        f"{cuda.asked[0].split()[1]} behind current",
        f"record event of {cuda.asked[0].split()[1]}",
        f"current after event of {cuda.asked[0].split()[1]}",
    ]
    cuda.asked.clear()
    again = copies.to_host_start([value], 0)
    assert again.data_ptr() == out.data_ptr()
    assert any("after event" in asked for asked in cuda.asked[:2]), "it has not left the buffer yet"
