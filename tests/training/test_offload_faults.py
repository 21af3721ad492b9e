"""Disks that fail while a model is trained whose optimizer states are in files."""

import copy
import errno
import gc
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
from tests.kit.covering import nightly, only
from tests.kit.device_memory import squares
from tests.kit.files import Failing, Short, Slow, files_of
from tests.kit.ranks import Ranks
from tests.kit.trainings import (
    assert_same,
    built,
    clipped,
    program_of,
    run,
    running,
    zero,
)
from tests.training.test_offload_nvme import SMALL_BUCKETS, TWO_BUCKETS, Deep, files, flush
from zerofx.codegen.trace.trace import Update
from zerofx.errors import FileTierError
from zerofx.runtime.optimizer.host import HostUpdates
from zerofx.runtime.optimizer.states import StateBucket, per_element
from zerofx.runtime.parameters.guarded import GuardedState
from zerofx.runtime.parameters.registry import REGISTRY
from zerofx.runtime.storage.tier import FileTier


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()
    gc.collect()


@pytest.fixture
def on_system(monkeypatch):
    def use(system):
        monkeypatch.setattr(REGISTRY.files, "system", system)
        return system

    return use


def filed(directory, **options):
    return zero(clipped, **SMALL_BUCKETS, **files(directory, TWO_BUCKETS, **options))


@pytest.fixture(scope="module", name="expected")
def losses_without_files():
    torch._dynamo.reset()
    return run(zero(clipped, **SMALL_BUCKETS), built(), range(8))


def train_until_it_fails(compiled, pair, steps=range(2, 8)):
    """The losses before the failure, and the failure."""
    losses = []
    for number in steps:
        try:
            losses += run(compiled, pair, [number])
        except FileTierError as error:
            return losses, error
    raise AssertionError("no step failed")


SEED = random.Random(5)
FAULTS = [
    (kind, code, SEED.randrange(14))
    for kind, code in (
        ("read", errno.EIO),
        ("read", errno.EIO),
        ("write", errno.EIO),
        ("write", errno.EIO),
        ("write", errno.ENOSPC),
    )
]


@pytest.mark.nightly
@pytest.mark.parametrize("kind, code, at", FAULTS)
def test_a_failing_disk_stops_the_step_and_leaves_the_checkpoint_good(
    kind, code, at, tmp_path, on_system, expected
):
    system = on_system(Failing())
    pair, compiled = built(), filed(tmp_path)
    assert run(compiled, pair, range(2)) == expected[:2]
    torch.save([part.state_dict() for part in pair], tmp_path / "checkpoint")
    flush(program_of(compiled).runtime.files.tier)
    system.arm(kind, code, at)
    losses, error = train_until_it_fails(compiled, pair)
    system.armed = None
    assert losses == expected[2 : 2 + len(losses)], "what was reported before it failed is right"
    assert error.errno == code and "AdamW of" in error.bucket
    assert f"errno {code}" in str(error) and f"{kind[:4].rstrip('e')}" in str(error)
    # It stays so: nothing of what is there is given out, or trained on.
    lost = "lost since a step failed in the middle.*Load a checkpoint.*errno"
    with pytest.raises(FileTierError, match=lost):
        run(compiled, pair, [9])
    with pytest.raises(FileTierError, match=lost):
        pair[1].state_dict()
    with pytest.raises(FileTierError, match=lost):
        run(zero(clipped, **SMALL_BUCKETS), pair, [9])
    # Into a fresh run, and into this one.
    saved = torch.load(tmp_path / "checkpoint")
    fresh = built()
    for objects in (fresh, pair):
        for part, state in zip(objects, copy.deepcopy(saved), strict=True):
            part.load_state_dict(state)
    torch._dynamo.reset()
    assert run(zero(clipped, **SMALL_BUCKETS), fresh, range(2, 5)) == expected[2:5]
    assert run(compiled, pair, range(2, 5)) == expected[2:5]
    assert_same(pair[1].state_dict(), fresh[1].state_dict())


def test_a_failure_in_the_very_first_step_is_not_trained_over(tmp_path, on_system, expected):
    system = on_system(Failing())
    pair, compiled = built(), filed(tmp_path)
    before = copy.deepcopy([dict(pair[0].state_dict()), pair[1].state_dict()])
    system.arm("write", errno.EIO, at=2)  # when the directory has been tried
    train_until_it_fails(compiled, pair, range(3))
    system.armed = None
    with pytest.raises(FileTierError, match="lost since a step failed in the middle"):
        run(compiled, pair, [0])
    pair[0].load_state_dict(before[0])
    pair[1].load_state_dict(before[1])
    assert run(compiled, pair, range(3)) == expected[:3]


@pytest.mark.nightly
def test_a_slow_disk_changes_nothing(tmp_path, on_system, expected):
    system = on_system(Slow(0.01))
    pair, compiled = built(), filed(tmp_path, offload_checksums=True)
    assert run(compiled, pair, range(3)) == expected[:3]
    assert {kind for kind, *_ in system.calls} == {"read", "write"}


def deep(options):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Deep(layers=4)
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = zero(squares, bucket=False, **options)
    losses = [compiled(model, optimizer, torch.ones(4, 64)).item() for _ in range(3)]
    return losses, optimizer.state_dict()


@pytest.mark.nightly
def test_short_calls_change_nothing(tmp_path, on_system):
    system = on_system(Short(4096 + 100))
    options = files(tmp_path, 2 * 32_768, offload_checksums=True)  # of 160 KiB
    assert_same(deep(options), deep({}))
    lengths = {length for kind, _, length, _ in system.calls if kind == "read"}
    assert max(lengths) > min(lengths) >= 4096 and len(lengths) > 3


def flip_a_bit(path):
    with open(path, "r+b", buffering=0) as file:
        (byte,) = os.pread(file.fileno(), 1, 5)
        os.pwrite(file.fileno(), bytes([byte ^ 16]), 5)
        os.fsync(file.fileno())


def test_a_bit_flip_is_found_with_checksums_and_the_bucket_named(tmp_path, expected):
    pair, compiled = built(), filed(tmp_path, offload_checksums=True)
    assert run(compiled, pair, range(2)) == expected[:2]
    tier = program_of(compiled).runtime.files.tier
    flush(tier)
    for path in files_of(tier.store):
        flip_a_bit(path)
    with pytest.raises(FileTierError, match="is not what was written.*a bit flip") as caught:
        run(compiled, pair, range(2, 4))
    assert "AdamW of" in caught.value.bucket and caught.value.bucket in str(caught.value)
    with pytest.raises(FileTierError, match="lost since a step failed in the middle"):
        run(compiled, pair, range(3, 4))


@pytest.mark.nightly
def test_an_error_that_is_no_disks_leaves_the_states_as_they_are(tmp_path, monkeypatch, expected):
    """As without files: updates that have run have run, and the next step goes on."""

    def failing(options):
        torch._dynamo.reset()
        pair = built()
        compiled = zero(clipped, **SMALL_BUCKETS, **options)
        run(compiled, pair, range(2))
        original, calls = HostUpdates.update_start, []

        def update(self, *arguments):
            calls.append(arguments)
            if len(calls) == 1:  # later ones find some under way: how far they come is a race
                raise KeyboardInterrupt
            return original(self, *arguments)

        monkeypatch.setattr(HostUpdates, "update_start", update)
        program = program_of(compiled).runtime.program
        for node in program.graph.nodes:  # bound methods, taken when it was lowered
            if getattr(node.target, "__name__", "") == "update_start":
                node.target = update.__get__(node.target.__self__)
        program.recompile()
        with pytest.raises(KeyboardInterrupt):
            run(compiled, pair, [2])
        monkeypatch.setattr(HostUpdates, "update_start", original)
        states = pair[1].state_dict()
        return states, run(compiled, pair, range(3, 5)), pair[1].state_dict()

    offload = {"offload": "optimizer"}
    assert_same(failing(files(tmp_path, TWO_BUCKETS)), failing(offload))


@pytest.mark.nightly
def test_states_are_let_go_of_when_no_update_writes_to_them_any_more(tmp_path, monkeypatch):
    pair = built()
    compiled = zero(**SMALL_BUCKETS, **files(tmp_path, TWO_BUCKETS))
    run(compiled, pair, range(2))
    copies = program_of(compiled).function.copies
    failed, under_way = FileTier.failed, []

    def slow(run):
        time.sleep(0.1)
        return run()

    def watched(tier, error, *optimizers):
        under_way.append(copies.updates._process != -1)
        failed(tier, error, *optimizers)

    monkeypatch.setattr(Update, "ready", running(slow))
    monkeypatch.setattr(FileTier, "failed", watched)
    with monkeypatch.context() as patch:
        patch.setattr(HostUpdates, "wait_update", _interrupted)
        for node in program_of(compiled).runtime.program.graph.nodes:
            if getattr(node.target, "__name__", "") == "wait_update":
                node.target = _interrupted
        program_of(compiled).runtime.program.recompile()
        with pytest.raises(KeyboardInterrupt):
            run(compiled, pair, [2])
    assert under_way == [False]


def _interrupted(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("method", ("arrive", nightly("leave")))
@pytest.mark.parametrize("at", only((1,), range(3)))
def test_who_interrupts_a_states_coming_or_going_finds_them_all_there(
    method, at, tmp_path, monkeypatch
):
    """A key may be pressed anywhere: what has been assigned by then, and what has not, is right."""
    pair = built()
    compiled = zero(**SMALL_BUCKETS, **files(tmp_path, TWO_BUCKETS))
    run(compiled, pair, range(2))
    original, calls = getattr(StateBucket, method), []

    class Interrupts(dict):
        """A parameter's state, whose second assignment is one too many."""

        def __setitem__(self, name, value):
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            super().__setitem__(name, value)

    def interrupted(bucket, views):
        calls.append(bucket)
        if len(calls) != at + 1:
            return original(bucket, views)
        states = bucket.states()
        first = Interrupts(states[0])
        first.left = 1
        bucket.states = lambda: [first, *states[1:]]
        try:
            original(bucket, views)
        finally:
            del bucket.states
            states[0].update(first)

    monkeypatch.setattr(StateBucket, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(compiled, pair, [2])
    monkeypatch.undo()
    held = [value for state in pair[1].state.values() for _, value in per_element(state)]
    assert held and all(isinstance(value, GuardedState) for value in held), "no cache's memory"
    assert all(torch.isfinite(value).all() for value in squares_of_states(pair[1]))
    assert run(compiled, pair, range(3, 5))


def squares_of_states(optimizer):
    states = optimizer.state_dict()["state"].values()
    return [state["exp_avg_sq"] for state in states]


# Processes


TRAIN = """
    import sys, time
    import torch
    import tests.conftest
    from tests.training.test_offload_nvme import SMALL_BUCKETS, TWO_BUCKETS, files
    from tests.kit.trainings import built, clipped, run, zero

    if __name__ == "__main__":
        torch.set_num_threads(1)
        pair = built()
        compiled = zero(clipped, **SMALL_BUCKETS, **files(sys.argv[1], TWO_BUCKETS))
        number = 0
        while number < int(sys.argv[2]):
            print(repr(run(compiled, pair, [number])[0]), flush=True)
            number += 1
"""


def start_training(directory, steps):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(TRAIN), str(directory), str(steps)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


@pytest.mark.nightly
def test_a_run_beside_another_and_after_a_killed_one_trains_to_the_same_losses(tmp_path, expected):
    killed = start_training(tmp_path, 10**9)
    assert killed.stdout is not None
    assert [float(killed.stdout.readline()) for _ in range(2)] == expected[:2]
    beside = start_training(tmp_path, 3)
    out, _ = beside.communicate(timeout=60)
    assert list(map(float, out.split())) == expected[:3]
    killed.send_signal(signal.SIGKILL)
    killed.wait(30)
    killed.stdout.close()
    pair, compiled = built(), filed(tmp_path)
    assert run(compiled, pair, range(3)) == expected[:3]
    assert os.listdir(tmp_path) == []


def die_in_a_step(directory, steps, dying):
    torch._dynamo.reset()
    pair, compiled = built(), filed(directory)
    run(compiled, pair, range(steps))
    if torch.distributed.get_rank() == dying:
        os.kill(os.getpid(), signal.SIGKILL)
    run(compiled, pair, range(steps, steps + 1))


@pytest.mark.nightly
def test_a_killed_rank_does_not_leave_the_other_hanging(tmp_path):
    with closing(Ranks(2, group_timeout_s=5.0)) as ranks:
        started_s = time.monotonic()
        with pytest.raises(RuntimeError, match="rank 1 died, exit code -9|Connection|closed|timed"):
            ranks.run(die_in_a_step, tmp_path, 1, 1)
        assert time.monotonic() - started_s < 90
        ranks.kill()
    assert os.listdir(tmp_path) == []
    assert run(filed(tmp_path), built(), range(1))


def fail_on_one(directory, failing):
    torch._dynamo.reset()
    system = REGISTRY.files.system = Failing()
    try:
        pair, compiled = built(), filed(directory)
        run(compiled, pair, range(2))
        if torch.distributed.get_rank() == failing:
            system.arm("read", errno.EIO, 3)
        run(compiled, pair, range(2, 5))
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        REGISTRY.files.system = None


@pytest.mark.nightly
def test_a_rank_whose_disk_fails_does_not_leave_the_other_hanging(tmp_path):
    with closing(Ranks(2, group_timeout_s=5.0)) as ranks:
        first, second = ranks.run(fail_on_one, tmp_path, 0)
        ranks.kill()
    assert first[0] == "FileTierError" and re.search("errno 5", first[1])
    assert second is not None and second[0] != "FileTierError"
