"""The option ``check_order``: what is in no order in a running step is an error with its words."""

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import fx

from tests.kit import trainings
from tests.kit.order import cases
from tests.kit.order.watching import checking
from tests.kit.planted.bugs import Bug
from tests.kit.ranks import ranks_fixture  # noqa: F401
from zerofx import compat
from zerofx.compiler import program
from zerofx.errors import OrderError
from zerofx.ir import ops
from zerofx.order.check import CHECK, OrderCheck
from zerofx.order.clocks import Range, Where
from zerofx.order.hooks import Noted
from zerofx.order.operators import Watch
from zerofx.replay.in_process_group import in_turns
from zerofx.runtime.comm.communication import Communicator
from zerofx.worker import Worker

OFFLOADED = {"offload": "optimizer,params"}


@pytest.fixture
def check():
    """A check of this process as it is, without a device."""
    checked = OrderCheck()
    checked.begin()
    yield checked
    checked.end()


def without(name):
    """Leave out of every program that is lowered the first node with this in its name."""
    lower = program.lower

    def planted(gm, kernels):
        waits = [node.name for node in gm.graph.nodes if ops.is_wait(node) and name in node.name]
        Bug("delete", waits[0]).plant(gm.graph)
        return lower(gm, kernels)

    return mock.patch.object(program, "lower", planted)


def train(stage, num_steps=2, **options):
    torch._dynamo.reset()
    try:
        compiled = trainings.zero(trainings.clipped, stage, **options)
        return trainings.run(compiled, trainings.built(), range(num_steps))
    finally:
        CHECK.end()


@pytest.mark.slow(reason="steps are compiled and run")
def test_a_step_that_is_in_order_trains_as_without():
    with checking() as checked:
        losses = train(3, check_order=True, **OFFLOADED)
        assert checked.notes.blocks._taken > 10
    assert losses == train(3, **OFFLOADED)


@pytest.mark.slow(reason="steps are compiled and run")
def test_a_wait_that_is_missing_is_told_with_all_that_helps(monkeypatch):
    monkeypatch.setenv("ZEROFX_CHECK_ORDER", "1")
    with checking(), without("bucket0"), pytest.raises(OrderError) as caught:
        train(3)
    words = str(caught.value)
    assert "44 bytes of block" in words and "are used in no order" in words
    assert "all_gather writes them on the communication stream, at zerofx/" in words
    assert "reads them on the default stream, at <program> addmm = torch.ops.aten.addmm" in words
    assert "A wait is missing: aten.addmm.default on the default stream has to come after" in words
    assert "shard_parameters placed one of the two" in words
    assert "please report it" in words and "python -m zerofx bisect" in words


@pytest.mark.nightly
@pytest.mark.parametrize("watch", [checking, contextlib.nullcontext], ids=["device", "CPU"])
def test_a_step_that_fails_leaves_nothing_to_be_found_in_the_next(watch):
    """It fails with an update and copies under way."""
    torch._dynamo.reset()
    with watch():
        cases.RUNS["failed"](
            None, 3, {"offload": "optimizer", "bucket_bytes": 256, "check_order": True}, ""
        )
    CHECK.end()


def test_a_job_of_a_thread_that_is_not_waited_for_is_seen(check):
    values, worker = torch.zeros(8), Worker("test")
    with Watch(check.notes):
        job = worker.start(lambda: values.add_(1))
        job.result()
        values.sum()
        assert not check.notes.clocks.races
        job = worker.start(lambda: values.add_(1))
        worker.start(lambda: None)
        while not job.done():  # which is no wait for it
            pass
        values.sum()
    (race,) = check.notes.clocks.races
    assert race.second.name == "aten.sum.default" and race.lines[1] == "main thread"


def test_the_users_own_threads_are_left_alone(check):
    values = torch.zeros(8)
    submit, result = ThreadPoolExecutor.submit, Future.result
    with ThreadPoolExecutor(1) as pool, Watch(check.notes):
        assert pool.submit(lambda: values.add_(1) is values).result()
        values.sum()
    assert not check.notes.clocks.races and "Thread" not in str(check.notes.clocks.lines)
    check.end()
    assert submit is ThreadPoolExecutor.submit and result is Future.result


def test_calls_in_threads_of_the_users_own_are_in_the_users_order(check):
    """The next call has to wait for what one leaves under way, in whichever thread it is."""
    values, worker, watched = torch.zeros(8), Worker("test"), SimpleNamespace(bound=(), table=())

    def call(then=lambda: None):
        with check.watching(watched, fx.Graph()):
            values.add_(1)
            return then()

    call()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(call).result()
        call()
        job = call(lambda: worker.start(lambda: values.add_(1)))
        while not job.done():  # which is no wait for it
            pass
        with pytest.raises(OrderError, match="writes them on the zerofx test_0"):
            pool.submit(call).result()


def test_what_gathers_between_calls_is_in_the_users_order(check):
    """As full_params and state dicts do, in another thread than the calls around them."""
    values, watched = torch.zeros(8), SimpleNamespace(bound=(), table=())

    def call():
        with check.watching(watched, fx.Graph()):
            values.add_(1)

    def gather():
        Communicator.of(None).gather_whole(values)

    with ThreadPoolExecutor(1) as pool:
        for here, there in ((call, gather), (gather, call)):
            for _ in range(2):
                here()
                pool.submit(there).result()
    call()
    assert not check.notes.clocks.races


def test_ranks_that_are_replayed_in_turns_are_left_alone(check):
    """As ``validate`` does while a step compiles anew: a barrier orders them, not a worker."""

    def program(exchange):
        return sum(one.sum() for one in exchange(torch.ones(4)))

    with Watch(check.notes):
        assert in_turns([program, program]) == [8, 8]
    assert not check.notes.clocks.races


def test_a_thread_that_compiles_is_watched(check):
    values = torch.zeros(8)
    with Watch(check.notes):
        compat.inductor._in_thread_of_its_own(lambda: values.add_(1))
        values.sum()
    assert not check.notes.clocks.races
    lines = check.notes.clocks.lines.values()
    assert any("zerofx compiles" in name for name in lines), lines


def test_what_is_abandoned_has_come_before(check):
    values, worker = torch.zeros(8), Worker("test")
    with Watch(check.notes):
        for _ in range(2):
            worker.start(lambda: values.add_(1))
        worker.abandon()
        values.sum()
    assert not check.notes.clocks.races


def test_streams_wait_by_events_and_for_each_other(check):
    """The device's own are asked too."""
    notes, asked = check.notes, mock.Mock()
    one, other, event = (Noted(notes, real) for real in (asked.one, asked.other, asked.event))
    block = notes.block(torch.zeros(4), "test")
    block.where = Where.DEVICE

    def write(stream):
        ranges = [Range(block, block.start, block.stop, True)]
        notes.operator("write", ranges, stream=stream.line)

    write(one)
    event.record(one)
    other.wait_event(event)
    write(other)
    one.wait_stream(other)
    write(one)
    assert not check.notes.clocks.races
    write(other)
    assert [race.lines for race in check.notes.clocks.races] == [("default stream", "stream 1")]
    assert [call[0] for call in asked.mock_calls] == [
        "event.record",
        "other.wait_event",
        "one.wait_stream",
    ]


def of_ranks(options, is_planted):
    """Train on two ranks as they are; return the error's words if a wait was left out."""
    try:
        with without("bucket0") if is_planted else contextlib.nullcontext():
            return str(train(3, check_order=True, **options))
    except OrderError as error:
        return str(error)


@pytest.mark.nightly
@pytest.mark.parametrize("options", [{}, {**OFFLOADED}, {"offload": "optimizer"}])
def test_ranks_on_cpus_are_watched_as_they_run(options, ranks):  # noqa: F811
    for words in ranks(2).run(of_ranks, options, False):
        assert words.startswith("[")


@pytest.mark.nightly
def test_a_gather_between_ranks_that_is_not_waited_for_is_told(ranks):  # noqa: F811
    for words in ranks(2).run(of_ranks, {}, True):
        assert "all_gather writes them on the collective (all_gather)" in words
