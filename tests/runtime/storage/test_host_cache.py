"""The host cache keeps what its bound allows, reads ahead and writes what changed."""

import contextlib
import errno
import os
import time

import pytest
import torch

from tests.kit.files import BLOCK, Failing, Slow, Watched, layout, store_of, write
from zerofx.errors import FileTierError
from zerofx.runtime.storage.disk import FileStore, HostCache, Operation
from zerofx.runtime.storage.memory import HostMemory

NUMEL = BLOCK // 16
SIZE = 4 * NUMEL


class Recorded(FileStore):
    """A store with a log of what it was asked for, in order."""

    def __init__(self, *arguments, **options):
        self.log = []
        super().__init__(*arguments, block_bytes=BLOCK, depth=4, **options)

    def start_read(self, bucket, into, **options):
        self.log.append(f"read {bucket}")
        return super().start_read(bucket, into, **options)

    def start_write(self, bucket, source, **options):
        self.log.append(f"write {bucket}")
        return super().start_write(bucket, source, **options)


def cache_of(store, order, memory_bytes):
    """A cache of a store's buckets that goes by an order."""
    cache = HostCache(store, memory_bytes, HostMemory())
    cache.begin(order)
    return cache


@pytest.fixture
def open_store(tmp_path):
    """Open a store of buckets of these lengths, each full of its number."""
    opened = []

    def open_one(numels, system=None):
        layouts = [layout(f"{index}", shard=numel) for index, numel in enumerate(numels)]
        store = store_of([tmp_path], layouts, Recorded, system=system, checksums=True)
        opened.append(store)
        for index, each in enumerate(layouts):
            write(
                store,
                each.bucket,
                {(0, "shard"): torch.full((each.parts[0].nbytes // 4,), float(index))},
            )
        store.log.clear()
        return store

    yield open_one
    for store in opened:
        store.close()


def train(cache, order, *, steps=1, compute_s=0.0, is_dirty=lambda bucket: True):
    """Use and change the buckets as steps do; check that each holds what it was left with."""
    counts = {}
    for _ in range(steps):
        for bucket in order:
            values = cache.use(bucket)[0, "shard"]
            assert (values == int(bucket) + counts.get(bucket, 0)).all()
            assert cache.held_bytes <= cache.memory_bytes
            time.sleep(compute_s)
            if is_dirty(bucket):
                values += 1
                counts[bucket] = counts.get(bucket, 0) + 1
            cache.release(bucket, dirty=is_dirty(bucket))
    return counts


def test_it_reads_ahead_what_fits_and_evicts_the_coldest_first(open_store):
    store = open_store([NUMEL] * 4)
    cache = cache_of(store, "0123", 2 * SIZE)
    assert store.log == ["read 0", "read 1"]  # before any is used
    cache.use("0")
    assert store.log[2:] == []  # 0 is in use and 1 is next: no room for 2
    cache.release("0", dirty=True)
    assert store.log[2:] == ["write 0", "read 2"]  # 0 is used last of all
    cache.use("1")
    cache.release("1", dirty=False)
    assert store.log[4:] == ["read 3"]  # 1 was not changed
    cache.use("2")
    cache.release("2", dirty=True)
    assert store.log[5:] == ["write 2", "read 0"]


def test_buckets_used_again_soon_stay(open_store):
    # Forward, then backward: what was used last is used first.
    order = "01233210"
    store = open_store([NUMEL] * 4)
    cache = cache_of(store, order, 3 * SIZE)
    train(cache, order)
    assert [entry for entry in store.log if entry.startswith("read")] == [
        "read 0",
        "read 1",
        "read 2",
        "read 3",  # in the place of 0, whose next use was then the farthest
        "read 0",
    ]


@pytest.mark.parametrize("order", ["01234", "0123443210", "0121343"])
@pytest.mark.parametrize("num_held", [1, 2, 3, 5])
def test_values_survive_any_bound(open_store, order, num_held):
    store = open_store([NUMEL] * 5)
    cache = cache_of(store, order, num_held * SIZE + 5)
    counts = train(cache, order, steps=4, is_dirty=lambda bucket: bucket != "2")
    for bucket, count in counts.items():
        assert (cache.read(bucket)[0, "shard"] == int(bucket) + count).all()
    assert "write 2" not in store.log


def test_what_fits_is_read_once(open_store):
    store = open_store([NUMEL] * 3)
    cache = cache_of(store, "012", 3 * SIZE)
    counts = train(cache, "012", steps=5)
    assert store.log == ["read 0", "read 1", "read 2"]
    assert (cache.read("2")[0, "shard"] == 2 + counts["2"]).all()


def test_buckets_of_one_size_allocate_nothing_after_the_first_round(open_store):
    store = open_store([NUMEL] * 6)
    cache = cache_of(store, "012345", 3 * SIZE)
    train(cache, "012345", steps=5)
    assert cache._host.num_allocations == 3


def test_buckets_of_many_sizes_stay_within_the_bound(open_store):
    numels = [NUMEL, 3 * NUMEL, NUMEL // 2, 5 * NUMEL, NUMEL, 2 * NUMEL]
    order = "012345543210"
    store = open_store(numels)
    for num_held in (5, 8):
        cache = cache_of(store, order, num_held * SIZE)
        for bucket in order * 3:  # held_bytes is looked at inside too, by what the store allocates
            values = cache.use(bucket)[0, "shard"]
            assert (values == int(bucket)).all()
            held = sum(each.memory.nbytes for each in cache._resident.values())
            held += sum(memory.nbytes for memory, _ in cache._free)
            assert held == cache.held_bytes <= cache.memory_bytes
            cache.release(bucket, dirty=True)


def test_what_it_does_does_not_depend_on_the_disk(open_store):
    logs = []
    for system in (Watched(), Slow(0.01), Slow(0.01, kinds=["write"])):
        store = open_store([NUMEL] * 6, system=system)
        train(cache_of(store, "012345", 3 * SIZE), "012345", steps=3)
        logs.append(store.log)
    assert logs[0] == logs[1] == logs[2] and len(logs[0]) > 20


def test_a_slow_disk_is_hidden_behind_the_work(open_store):
    delay_s = 0.03
    order = "01234567"
    waited = {}
    for num_held in (1, 4):
        store = open_store([NUMEL] * 8, system=Slow(delay_s, kinds=["read"]))
        cache = cache_of(store, order, num_held * SIZE)
        start_s = time.monotonic()
        train(cache, order, steps=2, compute_s=2 * delay_s, is_dirty=lambda bucket: False)
        waited[num_held] = time.monotonic() - start_s - 16 * 2 * delay_s
    assert waited[1] > 12 * delay_s  # with room for one, each of 16 uses waits for its read
    assert waited[4] < waited[1] / 3


def test_an_eviction_does_not_make_the_caller_wait(open_store):
    store = open_store([NUMEL] * 4)
    cache = cache_of(store, "0123", 2 * SIZE)
    cache.use("0")
    cache._resident["1"].load.wait()
    slow = Slow(1.0, kinds=["write"])
    store.transfers._system = slow
    start_s = time.monotonic()
    cache.release("0", dirty=True)  # written a second long, and 2 read into its memory after
    cache.use("1")
    assert time.monotonic() - start_s < 0.5
    cache.release("1", dirty=False)
    assert (cache.use("2")[0, "shard"] == 2).all()
    assert time.monotonic() - start_s >= 1.0


def test_a_bucket_in_use_is_never_evicted(open_store):
    cache = cache_of(open_store([NUMEL] * 4), "0123", 2 * SIZE)
    zero, one = cache.use("0")[0, "shard"], cache.use("1")[0, "shard"]
    with pytest.raises(AssertionError, match="no room for '2' besides what is in use"):
        cache.use("2")
    assert (zero == 0).all() and (one == 1).all()
    cache.release("1", dirty=False)
    assert (cache.use("2")[0, "shard"] == 2).all() and (zero == 0).all()


def test_after_a_step_that_failed_the_order_begins_anew_and_changes_are_kept(open_store):
    store = open_store([NUMEL] * 4)
    cache = cache_of(store, "0123", 2 * SIZE)
    cache.use("0")[0, "shard"].fill_(70)
    cache.release("0", dirty=True)
    cache.use("1")[0, "shard"].fill_(71)  # and the step ends here
    cache.begin("0123")
    for bucket, value in zip("0123", (70, 71, 2, 3), strict=True):
        assert (cache.use(bucket)[0, "shard"] == value).all()
        cache.release(bucket, dirty=False)
    cache.begin("31")  # another program
    for bucket, value in zip("3131", (3, 71, 3, 71), strict=True):
        assert (cache.use(bucket)[0, "shard"] == value).all()
        cache.release(bucket, dirty=False)


def test_a_bucket_that_could_not_be_read_can_be_tried_again(open_store):
    system = Failing()
    store = open_store([NUMEL] * 3, system=system)
    system.arm("read", errno.EIO)
    cache = cache_of(store, "012", SIZE)
    with pytest.raises(FileTierError, match="reading bucket '0' failed"):
        cache.use("0")
    system.armed = None
    cache.begin("012")
    train(cache, "012", steps=2)


def test_a_write_back_that_fails_is_an_error_at_a_later_use(open_store):
    system = Failing()
    store = open_store([NUMEL] * 3, system=system)
    cache = cache_of(store, "012", SIZE)
    system.arm("write", errno.ENOSPC)
    with pytest.raises(FileTierError, match="writing bucket '0' failed.*checkpoint"):
        train(cache, "012", steps=2)


def test_what_was_never_written_gets_memory_without_a_read_and_is_kept_from_then_on(tmp_path):
    layouts = [layout(f"{index}", shard=NUMEL) for index in range(4)]
    with contextlib.closing(store_of([tmp_path], layouts, Recorded, checksums=True)) as store:
        order = [each.bucket for each in layouts]
        cache = cache_of(store, order, 2 * SIZE)
        for bucket in order:
            cache.use(bucket)[0, "shard"].fill_(int(bucket))
            cache.release(bucket, dirty=True)
        assert not any(
            entry.startswith("read") for entry in store.log[: store.log.index("write 0")]
        )
        train(cache, order, steps=3)


def test_a_bucket_is_read_out_of_turn_as_it_is_now(open_store):
    store = open_store([NUMEL] * 4)
    cache = cache_of(store, list("0123"), 2 * SIZE)
    counts = train(cache, list("0123"), steps=2)
    held = cache.held_bytes
    for bucket in "0123":
        values = cache.read(bucket)[0, "shard"]
        assert (values == int(bucket) + counts[bucket]).all()
        values.fill_(-1)  # nobody else's
    assert cache.held_bytes == held
    assert (cache.use("0")[0, "shard"] == counts["0"]).all()


def test_what_nobody_has_written_cannot_be_read_out_of_turn(tmp_path):
    layouts = [layout("0", shard=NUMEL), layout("1", shard=NUMEL)]
    with contextlib.closing(store_of([tmp_path], layouts, Recorded)) as store:
        cache = cache_of(store, ["0"], 2 * SIZE)
        for bucket in "01":
            with pytest.raises(FileTierError, match="was never written"):
                cache.read(bucket)


def test_a_bucket_that_is_dropped_gives_its_memory_and_its_room_back(open_store):
    store = open_store([NUMEL] * 3)
    cache = cache_of(store, list("012"), 2 * SIZE)
    train(cache, list("012"))
    before = len(os.listdir("/proc/self/fd"))
    cache.drop("1")
    store.remove("1")
    assert len(os.listdir("/proc/self/fd")) == before - 1 and "1" not in store.layouts
    cache.begin(list("02"))
    for bucket in "0202":
        assert (cache.use(bucket)[0, "shard"] == int(bucket) + 1).all()
        cache.release(bucket, dirty=False)
    assert cache.held_bytes <= 2 * SIZE
    store.add([layout("1", shard=3)])  # another one of that name, in files of its own
    assert "1" not in store.written


def test_to_begin_a_round_where_the_last_one_ended_changes_nothing(open_store):
    store = open_store([NUMEL] * 3)
    order = list("012")
    cache = cache_of(store, order, 2 * SIZE)
    train(cache, order)
    store.log.clear()
    cache.begin(order)
    assert store.log == []
    cache.use("0")
    cache.begin(order)  # as after a step that failed: from its start, and 0 counts as changed
    cache.use("0")
    cache.release("0", dirty=False)
    assert not any(held.num_uses for held in cache._resident.values())


def use_all(cache, order):
    for bucket in order:
        cache.use(bucket)
        cache.release(bucket, dirty=False)


def test_what_is_void_is_neither_written_nor_read_until_it_is_made_anew(open_store):
    store = open_store([NUMEL] * 4)
    cache = cache_of(store, "0123", 2 * SIZE)
    use_all(cache, "01")
    cache.use("2")[0, "shard"].fill_(12.0)
    cache.release("2", dirty=True, void=True)
    use_all(cache, "301")
    assert "write 2" not in store.log and store.log.count("read 2") == 1
    cache.use("2")[0, "shard"].fill_(20.0)
    cache.release("2", dirty=True)
    assert store.log.count("read 2") == 1, "what it held was nobody's any more"
    use_all(cache, "301")
    assert (cache.use("2")[0, "shard"] == 20).all()
    assert (store.log.count("write 2"), store.log.count("read 2")) == (1, 2)


def test_what_was_changed_and_then_is_void_is_not_written_either(open_store):
    store = open_store([NUMEL] * 3)
    cache = cache_of(store, "0012", 2 * SIZE)
    cache.use("0")[0, "shard"].fill_(5.0)
    cache.release("0", dirty=True)
    cache.use("0")
    cache.release("0", dirty=False, void=True)
    use_all(cache, "12")
    use_all(cache, "0012")
    assert not any(entry.startswith("write") for entry in store.log)


def test_a_bucket_of_another_layout_keeps_its_place(open_store):
    store = open_store([NUMEL] * 3)
    cache = cache_of(store, "0121", 4 * SIZE)
    use_all(cache, "0")
    store.lay_out_anew(layout("1", shard=2 * NUMEL))
    cache.drop("1")
    store.log.clear()
    values = cache.use("1")[0, "shard"]
    assert len(values) == 2 * NUMEL and "read 1" not in store.log
    values.fill_(8.0)
    cache.release("1", dirty=True)
    use_all(cache, "2")
    for bucket, value in (("1", 8), ("0", 0), ("1", 8), ("2", 2)):
        assert (cache.use(bucket)[0, "shard"] == value).all()
        assert cache.held_bytes <= 4 * SIZE
        cache.release(bucket, dirty=False)


def test_who_is_interrupted_while_waiting_has_changed_nothing(open_store, monkeypatch):
    store = open_store([NUMEL] * 4)
    cache = cache_of(store, "0123", 2 * SIZE)
    wait = Operation.wait

    def interrupted(operation):
        monkeypatch.setattr(Operation, "wait", wait)
        raise KeyboardInterrupt

    monkeypatch.setattr(Operation, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.use("0")
    assert not any(held.num_uses for held in cache._resident.values())
    train(cache, "123", is_dirty=lambda bucket: False)
    cache.begin("0123")
    train(cache, "0123", is_dirty=lambda bucket: False)
    assert not any(entry.startswith("write") for entry in store.log)
