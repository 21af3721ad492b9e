"""Disks and users that stop a step whose parameters' shards and activations are in files."""

import copy
import errno
import gc
from unittest import mock

import pytest
import torch

import tests.conftest  # noqa: F401
import zerofx
from tests.kit.files import Failing, files_of
from tests.kit.trainings import (
    assert_same,
    built,
    clipped,
    moving_small_values,
    program_of,
    run,
    zero,
)
from tests.training.test_offload_faults import flip_a_bit, train_until_it_fails
from tests.training.test_offload_nvme import flush
from tests.training.test_offload_params_nvme import ALL, PARAMS, SMALL_BUCKETS, files
from zerofx.errors import FileTierError
from zerofx.runtime.parameters.parameter import ParameterState
from zerofx.runtime.parameters.registry import REGISTRY
from zerofx.runtime.storage.bucket import Location
from zerofx.runtime.storage.memory import HostMemory

LOST = "lost since a step failed in the middle.*Load a checkpoint"


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()
    gc.collect()
    with moving_small_values():
        yield


@pytest.fixture
def system(monkeypatch):
    monkeypatch.setattr(REGISTRY.files, "system", Failing())
    return REGISTRY.files.system


@pytest.fixture(scope="module", name="expected")
def losses_without_files():
    torch._dynamo.reset()
    return run(zero(clipped, **SMALL_BUCKETS), built(), range(8))


def filed(directory, offload, cache_bytes, **options):
    return zero(clipped, **SMALL_BUCKETS, **files(directory, offload, cache_bytes, **options))


def load(pair, saved):
    for part, state in zip(pair, copy.deepcopy(saved), strict=True):
        part.load_state_dict(state)


FAULTS = [
    (PARAMS, 2 * 8192, "read", errno.EIO, 7),
    (ALL, 6 * 8192, "read", errno.EIO, 3),
    pytest.param(ALL, 6 * 8192, "write", errno.ENOSPC, 6, marks=pytest.mark.exhaustive),
    pytest.param(PARAMS, 2 * 8192, "write", errno.EIO, 2, marks=pytest.mark.exhaustive),
]


@pytest.mark.nightly
@pytest.mark.parametrize("offload, cache_bytes, kind, code, at", FAULTS)
def test_what_a_failing_disk_leaves_is_lost_until_all_of_a_checkpoint_is_loaded(
    offload, cache_bytes, kind, code, at, tmp_path, system, expected
):
    pair, compiled = built(), filed(tmp_path, offload, cache_bytes)
    assert run(compiled, pair, range(2)) == expected[:2]
    saved = copy.deepcopy([part.state_dict() for part in pair])
    flush(program_of(compiled).runtime.files.tier)
    system.arm(kind, code, at)
    losses, error = train_until_it_fails(compiled, pair)
    system.armed = None
    assert losses == expected[2 : 2 + len(losses)] and error.errno == code
    for read in (
        pair[0].state_dict,
        lambda: zerofx.full_params(pair[0]).__enter__(),
        lambda: zerofx.unshard(*pair),
        lambda: run(compiled, pair, [9]),
    ):
        with pytest.raises(FileTierError, match=LOST):
            read()
    pair[0].load_state_dict(copy.deepcopy(saved[0]))
    with pytest.raises(FileTierError, match=LOST):
        run(compiled, pair, [9])  # the optimizer's states are of that step, wherever they are
    load(pair, saved)
    assert run(compiled, pair, range(2, 5)) == expected[2:5]


@pytest.mark.nightly
def test_a_bit_flip_in_a_shard_is_found_with_checksums(tmp_path, expected):
    pair = built()
    compiled = filed(tmp_path, PARAMS, 2 * 8192, offload_checksums=True)
    assert run(compiled, pair, range(2)) == expected[:2]
    tier = program_of(compiled).runtime.files.tier
    flush(tier)
    for path in files_of(tier.store):
        flip_a_bit(path)
    with pytest.raises(FileTierError, match="is not what was written.*a bit flip"):
        run(compiled, pair, range(2, 4))


def interrupted_at(place, options):
    """Train; a key is pressed at this operator of the third step; what there is then, and after."""
    torch._dynamo.reset()
    gc.collect()
    pair, compiled = built(), zero(clipped, **SMALL_BUCKETS, **options)
    run(compiled, pair, range(2))
    program = program_of(compiled).runtime.program
    called = [node for node in program.graph.nodes if node.op == "call_function"]
    node = called[int(place * len(called))]
    target = node.target

    def interrupt(*_arguments):
        raise KeyboardInterrupt

    node.target = interrupt
    program.recompile()
    with pytest.raises(KeyboardInterrupt):
        run(compiled, pair, [2])
    node.target = target
    program.recompile()
    values = [bound_value(parameter) for parameter in pair[0].parameters()]
    losses = run(compiled, pair, range(3, 5))
    return values, losses, pair[0].state_dict()


def bound_value(parameter):
    bound = REGISTRY.lookup(parameter)
    assert bound is not None and (bound.location is not Location.FILE or not bound.shard.numel())
    return bound.values().clone()


PLACES = (0.05, 0.3, *(pytest.param(place, marks=pytest.mark.exhaustive) for place in (0.15, 0.45)))


@pytest.mark.nightly
@pytest.mark.parametrize("place", PLACES)
def test_who_interrupts_a_step_before_its_updates_finds_all_as_it_was(place, tmp_path):
    found = interrupted_at(place, files(tmp_path, ALL, 6 * 8192))
    assert_same(found, interrupted_at(place, {}))


def test_an_interrupt_while_a_shard_comes_or_goes_leaves_no_shard_in_the_cache(
    tmp_path, monkeypatch, expected
):
    pair, compiled = built(), filed(tmp_path, PARAMS, 2 * 8192)
    assert run(compiled, pair, range(2)) == expected[:2]
    for method, at in (("lie_in", 1), ("leave_memory", 1), ("lie_in", 3)):
        original, calls = getattr(ParameterState, method), []

        def interrupts(bound, *part, original=original, calls=calls, at=at):
            calls.append(bound)
            if len(calls) == at:
                raise KeyboardInterrupt
            return original(bound, *part)

        before = pair[0].state_dict()
        with monkeypatch.context() as patch:
            patch.setattr(ParameterState, method, interrupts)
            with pytest.raises(KeyboardInterrupt):
                run(compiled, pair, [2])
        assert_same(dict(pair[0].state_dict()), dict(before))
        [bound_value(parameter) for parameter in pair[0].parameters()]
    assert run(compiled, pair, range(2, 4)) == expected[2:4]


def test_a_shards_memory_is_given_out_again_when_no_gpu_copies_it_any_more():
    host = HostMemory()
    part, event = host.empty(4, torch.float32), []

    class Event:
        def synchronize(self):
            event.append(bound.shard.numel())

    bound = ParameterState(mock.Mock(), mock.Mock(), 3, None, torch.Tensor, host)
    bound._shard, bound.location = host.empty(4, torch.float32).fill_(3.0), Location.HOST
    bound.lie_in(part, Location.FILE)
    assert bound.location is Location.FILE and bound.shard.data_ptr() == part.data_ptr()
    host.is_copied_until(Event(), bound.shard, "stream")
    bound.leave_memory()
    assert event == [4] and not bound.shard.numel(), "it waited before it left"
