"""What nothing orders is seen, what something orders is not: by the checker of ``tests.kit.order``.

CPU tensors stand for a device's memory; the streams and events are the checker's.
"""

import time

import pytest
import torch

from tests.kit.files import BLOCK, layout, store_of
from tests.kit.order.plants import places, planted, races_in
from tests.kit.order.watching import watching
from zerofx.checkpoint.barrier import Saving
from zerofx.order.blocks import addresses
from zerofx.order.clocks import Where, join
from zerofx.runtime.comm.communication import Communicator
from zerofx.runtime.storage.copies import Copies, _complete
from zerofx.runtime.storage.disk import HostCache
from zerofx.runtime.storage.memory import HostMemory
from zerofx.worker import Worker

CPU = torch.device("cpu")


class Run:
    """A run under watch, with memory of its device and a stream beside the default one."""

    def __init__(self, watched):
        self.watched, self.device = watched, watched.device
        self.side = self.device.Stream()

    def on_device(self, *sizes):
        return torch.zeros(2, dtype=torch.float32).new_zeros(sizes or (8,))

    def pinned(self, numel=8):
        return HostMemory().empty(numel, torch.float32, pinned=True)

    @property
    def races(self):
        return races_in(self.watched.history)


@pytest.fixture
def run():
    with watching() as watched, watched.operators():
        yield Run(watched)


def test_a_clock_knows_what_another_has_told_it():
    clock = {0: 3, 1: 1}
    join(clock, {1: 2, 2: 5})
    assert clock == {0: 3, 1: 2, 2: 5}


def test_streams_that_do_not_wait_race(run):
    values = run.on_device()
    run.side.wait_stream(run.device.current_stream())
    with run.device.stream(run.side):
        values.add_(1)
    values.sum()
    (race,) = run.races
    assert race.first.name == "aten.add_.Tensor" and race.second.name == "aten.sum.default"
    assert race.lines == ("stream 1", "default stream")
    assert "test_order.py" in str(race)


def test_a_stream_that_waits_does_not(run):
    values = run.on_device()
    run.side.wait_stream(run.device.current_stream())
    with run.device.stream(run.side):
        values.add_(1)
    run.device.current_stream().wait_stream(run.side)
    values.sum()
    assert not run.races


def test_an_event_orders_what_came_before_it_and_no_more(run):
    values = run.on_device()
    run.side.wait_stream(run.device.current_stream())
    with run.device.stream(run.side):
        values.add_(1)
        event = run.side.record_event()
    run.device.current_stream().wait_event(event)
    values.sum()
    assert not run.races
    with run.device.stream(run.side):
        values.mul_(2)
    assert run.races


def test_reads_do_not_race(run):
    values = run.on_device()
    run.side.wait_stream(run.device.current_stream())
    with run.device.stream(run.side):
        kept = values.sum()
    values.sum()
    run.device.current_stream().wait_stream(run.side)
    assert not run.races and kept is not None


def test_neighbours_in_one_memory_do_not_race(run):
    flat = run.on_device(16)
    run.side.wait_stream(run.device.current_stream())
    with run.device.stream(run.side):
        flat[:8].add_(1)
    flat[8:].add_(1)
    assert not run.races
    flat[7:9].add_(1)
    assert len(run.races) == 1


def test_rows_and_columns_are_told_apart(run):
    square = run.on_device(4, 4)
    run.side.wait_stream(run.device.current_stream())
    with run.device.stream(run.side):
        square[:, 0].add_(1)
    square[:, 1:].mul_(2)
    assert not run.races
    square[1].mul_(2)
    assert run.races


def test_memory_is_the_same_under_another_storage(run):
    flat = run.on_device(16)
    alone = torch.from_dlpack(flat[:8])
    assert alone.untyped_storage()._cdata != flat.untyped_storage()._cdata
    run.side.wait_stream(run.device.current_stream())
    with run.device.stream(run.side):
        alone.add_(1)
    flat.sum()
    assert run.races


def test_memory_given_back_while_another_stream_reads_it_is_seen(run):
    values = run.on_device()
    run.side.wait_stream(run.device.current_stream())
    with run.device.stream(run.side):
        total = values.sum()
    del values
    (race,) = run.races
    assert "given back" in race.second.name and total is not None


@pytest.mark.parametrize("way", ["the stream waits", "the host waits"])
def test_memory_given_back_behind_its_last_use_is_not(run, way):
    values = run.on_device()
    run.side.wait_stream(run.device.current_stream())
    with run.device.stream(run.side):
        total = values.sum()
    if way == "the stream waits":
        run.device.current_stream().wait_stream(run.side)
    else:
        run.side.synchronize()
    del values
    assert not run.races and total is not None


def test_memory_just_taken_may_be_in_use_by_the_stream_it_is_of(run):
    into = torch.empty(8).new_empty(8)
    with run.device.stream(run.side):
        into.fill_(1.0)
    assert [race.first.name for race in run.races] == ["the memory's user before"]


def test_the_host_reads_pinned_memory_only_after_the_copy(run):
    there, values = run.pinned(), run.on_device()
    there.copy_(values, non_blocking=True)
    event = run.device.current_stream().record_event()
    there.sum()
    assert len(run.races) == 1
    there.copy_(values, non_blocking=True)
    event = run.device.current_stream().record_event()
    event.synchronize()
    there.mul_(2)
    assert len(run.races) == 1


def test_the_host_waits_for_a_copy_of_pageable_memory_and_a_blocking_one(run):
    values, pageable = run.on_device(), HostMemory().empty(8, torch.float32)
    pageable.copy_(values, non_blocking=True)
    pageable.sum()
    pinned = run.pinned()
    pinned.copy_(values)
    pinned.sum()
    assert not run.races


def test_pinned_memory_of_torch_outlives_its_copies_and_our_own_does_not(run):
    values = run.on_device()
    of_torch = torch.empty(8, pin_memory=True)
    of_torch.copy_(values, non_blocking=True)
    del of_torch
    assert not run.races
    own = run.pinned()
    own.copy_(values, non_blocking=True)
    del own
    assert len(run.races) == 1


def test_a_number_that_the_host_reads_makes_it_wait(run):
    values, there = run.on_device(), run.pinned()
    there.copy_(values, non_blocking=True)
    values.sum().item()
    there.sum()
    assert not run.races


def test_a_number_of_the_host_makes_nothing_wait(run):
    values, there, steps = run.on_device(), run.pinned(), torch.tensor(0.0)
    there.copy_(values, non_blocking=True)
    steps.add_(1)
    values.mul_(steps)
    assert steps.item() == 1
    there.sum()
    assert len(run.races) == 1


def test_a_job_begins_after_it_was_handed_over_and_ends_before_its_result(run):
    there, worker = run.pinned(), Worker("test")
    there.fill_(1.0)
    job = worker.start(lambda: there.add_(1))
    job.result()
    there.sum()
    assert not run.races
    job = worker.start(lambda: there.add_(1))
    while not job.done():  # which is no wait for it
        time.sleep(0.001)
    there.sum()
    assert len(run.races) == 1


def test_a_thread_that_is_joined_has_come_before(run, tmp_path):
    there, saving = run.pinned(), Saving(tmp_path)
    saving.start(lambda: there.add_(1))
    saving.wait()
    there.sum()
    assert not run.races and {kind for kind, _ in places(run.watched.history)} == {"join"}
    saving.start(lambda: there.add_(1))
    while not saving.done():  # which is no wait for it
        time.sleep(0.001)
    there.sum()
    assert len(run.races) == 1


def test_a_collective_is_waited_for_by_the_stream(run):
    communicator = Communicator(None)
    started = communicator.all_reduce_start(run.on_device(), "sum")
    started.sum()
    assert [race.lines[0] for race in run.races] == ["communication stream"]
    communicator.wait(started)
    started.mul_(2)
    assert len(run.races) == 1


def test_what_a_collective_reads_may_be_dropped_before_its_wait(run):
    communicator = Communicator(None)
    gathered = communicator.all_gather_start(run.on_device(), 1)
    communicator.wait(gathered)
    gathered.sum()
    assert not run.races


def test_copies_beside_the_step_are_in_order_and_need_each_wait(run):
    copies = Copies(HostMemory())
    for _ in range(2):
        values = run.on_device()
        host = copies.wait(copies.to_host_start([values], 0))
        values.mul_(3)  # the device may use it again
        copies.memory.settle(host)  # for the host itself
        values = host.add_(1)
        back = copies.wait(copies.to_device_start([host], CPU))
        back.mul_(2)
        del values, back
    assert not run.races
    bugs = planted(run.watched.history)
    assert {kind for kind, _ in bugs} == {"wait_stream", "wait_event", "record", "synchronize"}
    survivors = [code for (_, code), race in bugs.items() if race is None]
    assert all("_copy_beside" in code[0] for code in survivors), survivors  # of one stream


def test_host_memory_is_written_to_behind_the_copies_of_all_streams(run):
    """Two functions copy it, each for a stream; the host waits for none of these by itself."""
    memory, there = HostMemory(), run.pinned()
    there.fill_(1.0)
    for stream in (run.device.Stream(), run.device.Stream()):
        copies = Copies(memory)
        with run.device.stream(stream):
            copies.wait(copies.to_device_start([there], CPU))
    memory.settle(there)
    there.fill_(2.0)
    assert not run.races


def test_a_staging_buffer_is_shared_by_streams_that_do_not_wait_for_each_other(run):
    copies = Copies(HostMemory())
    for stream in (run.device.Stream(), run.device.Stream()):
        with run.device.stream(stream):
            host = copies.wait(copies.to_host_start([run.on_device()], 0))
            copies.wait(copies.to_device_start([host], CPU))
    assert not run.races
    bugs = planted(run.watched.history)
    assert len(bugs) == 7 and all(bugs.values()), bugs


def test_a_wait_for_what_touches_no_memory_is_not_among_the_bugs(run):
    there, worker = run.pinned(), Worker("test")
    _complete(worker.start(lambda: None))
    assert places(run.watched.history) and not planted(run.watched.history)
    _complete(worker.start(lambda: there.add_(1)))
    there.sum()
    ((kind, _), race) = next(iter(planted(run.watched.history).items()))
    assert kind == "result" and race is not None


def test_room_in_a_cache_is_there_again_when_no_operation_holds_it(run, tmp_path):
    layouts = [layout("small", shard=4), layout("large", shard=BLOCK)]
    store = store_of([tmp_path], layouts)
    sizes = [one.nbytes for one in layouts]
    cache = HostCache(store, sum(sizes) - 1, HostMemory())
    cache.begin(["small", "large"])
    for name in ("small", "large", "small"):
        cache.use(name)
        cache.release(name, dirty=True)
    assert not run.races
    store.close()
    races = {code[0].split()[-1]: race for (_, code), race in planted(run.watched.history).items()}
    assert races["_give_back"] is not None


def test_stretches_of_memory_are_as_long_as_rows():
    square = torch.zeros(4, 4)
    start = square.data_ptr()
    assert addresses(square) == [(start, start + 64)]
    assert addresses(square.t()) == [(start, start + 64)]
    assert addresses(square[:2]) == [(start, start + 32)]
    rows = [(start + 16 * row, start + 16 * row + 8) for row in range(4)]
    assert addresses(square[:, :2]) == rows
    assert addresses(square[0, 0].expand(3)) == [(start, start + 4)]
    assert addresses(square[:0]) == []


def test_memory_of_the_host_is_known_from_the_devices(run):
    block = run.watched.notes.block(run.pinned(), "test")
    assert block.where is Where.PINNED and not block.is_on_device
    assert run.watched.notes.block(run.on_device(), "test").is_on_device
