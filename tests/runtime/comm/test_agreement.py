"""Ranks agree on schedules through the store; threads stand for ranks where they can."""

import itertools
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch.distributed as dist

from tests.kit.covering import only
from tests.kit.ranks import ranks_fixture  # noqa: F401
from zerofx import compat
from zerofx.runtime.comm.agreement import Agreement, AgreementError, rendezvous

LINES = ("parameter 0 weight f32[8, 4]", "all_gather 0 f32 128", "reduce_scatter 0 f32 128")


class CountingStore:
    """A store that counts the calls made through it."""

    def __init__(self, store):
        self.store = store
        self.calls = 0

    def __getattr__(self, name):
        self.calls += 1
        return getattr(self.store, name)


def on_ranks(world_size, fn):
    """Return what ``fn(rank)`` returns, or raises, on one thread per rank."""

    def outcome(rank):
        try:
            return fn(rank)
        except RuntimeError as error:
            return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(outcome, range(world_size)))


def agreements(world_size, scope="step"):
    store = dist.HashStore()
    return [Agreement(store, rank, world_size, scope) for rank in range(world_size)]


def check_all(ranks, lines):
    return on_ranks(len(ranks), lambda rank: ranks[rank].check(lines, 5))


@pytest.mark.parametrize("world_size", (2, 3, 4))
def test_equal_schedules_agree_again_and_again(world_size):
    ranks = agreements(world_size)
    for turn in range(5):
        assert check_all(ranks, (*LINES, f"turn {turn}")) == [False] * world_size


def test_ranks_agree_whichever_zlib_compresses_their_schedules():
    levels, compress = itertools.count(1), zlib.compress
    with mock.patch.object(zlib, "compress", lambda text: compress(text, next(levels))):
        assert check_all(agreements(3), LINES) == [False] * 3


def test_a_repeated_check_asks_nobody():
    store = CountingStore(dist.HashStore())
    first = Agreement(store, 0, 2, "step")
    other = Agreement(store, 1, 2, "step")
    on_ranks(2, lambda rank: (first, other)[rank].check(LINES, 5, beside=["a number, 3"]))
    calls = store.calls
    assert calls
    first.check(LINES, 0)
    first.check(list(LINES), 0, beside=["a number, 4"])
    assert store.calls == calls


def test_what_is_beside_a_schedule_is_compared_where_ranks_meet():
    ranks = agreements(2)
    errors = on_ranks(2, lambda rank: ranks[rank].check(LINES, 5, beside=[f"a number, {rank}"]))
    assert all("a number, 0" in str(error) for error in errors)


def test_a_world_of_one_needs_no_store():
    alone = Agreement(None, 0, 1, "step")
    alone.check(LINES, 0)
    alone.fail("unheard")
    rendezvous(None, "state_dict()", 0, 1)


def test_the_first_differing_line_of_the_first_differing_rank_is_named():
    ranks = agreements(4)
    theirs = (LINES[0], "all_gather 0 bf16 64", "something else")
    lines = (LINES, LINES, theirs, LINES[:1])
    errors = on_ranks(4, lambda rank: ranks[rank].check(lines[rank], 5))
    assert len({str(error) for error in errors}) == 1
    assert isinstance(errors[0], AgreementError)
    assert (
        "ranks 0 and 2 compiled different programs of 'step'. Line 2 of the schedule is "
        "`all_gather 0 f32 128` on rank 0 and `all_gather 0 bf16 64` on rank 2"
    ) in str(errors[0])


def test_a_schedule_that_ends_early_differs():
    ranks = agreements(2)
    errors = on_ranks(2, lambda rank: ranks[rank].check(LINES[: 3 - rank], 5))
    assert f"Line 3 of the schedule is `{LINES[2]}` on rank 0 and absent on rank 1" in str(
        errors[1]
    )


@pytest.mark.parametrize("values", [(b"a", b"a"), (b"a", b"b"), (b"a", b""), (b"", b"")])
def test_all_hear_whether_they_have_come_with_the_same_value(values):
    ranks = agreements(2)
    found = on_ranks(2, lambda rank: ranks[rank].check(LINES, 5, values[rank]))
    assert found == [values == (b"a", b"a")] * 2
    assert check_all(ranks, LINES) == [False, False]  # they agree already, and do not meet


def test_a_difference_leaves_the_ranks_able_to_agree():
    ranks = agreements(2)
    on_ranks(2, lambda rank: ranks[rank].check((f"rank {rank}",), 5))
    assert check_all(ranks, LINES) == [False, False]


def test_a_rank_that_never_posts_is_named_with_what_is_new_here():
    ranks = agreements(3)
    check_all(ranks, LINES)
    longer = (LINES[0], "all_gather 0 f32 256")
    start = time.monotonic()
    errors = on_ranks(3, lambda rank: rank != 1 and ranks[rank].check(longer, 0.2))
    assert time.monotonic() - start < 2
    assert errors[1] is False
    first = next(error for error in errors if "posted no schedule" in str(error))
    assert "rank(s) [1] posted no schedule for 'step' within 0.2 s" in str(first)
    assert f"line 2: `{LINES[1]}` before, `all_gather 0 f32 256` now" in str(first)
    # The late rank learns at once that nobody waits for it any more.
    with pytest.raises(AgreementError, match="gave up waiting"):
        ranks[1].check(longer, 60)


def test_a_first_schedule_that_nobody_else_posts():
    with pytest.raises(AgreementError, match="It is the first schedule of this function"):
        agreements(2)[0].check(LINES, 0.05)


@pytest.mark.parametrize("fails_first", (True, False))
def test_a_rank_that_fails_to_compile_fails_the_others_at_once(fails_first):
    ranks = agreements(3)
    posted = threading.Event()

    def work(rank):
        if rank == 1:
            if not fails_first:
                time.sleep(0.1)
            ranks[1].fail("NotImplementedError: no rule for aten.sort at train.py:12")
            posted.set()
            return None
        if fails_first:
            posted.wait()
        return ranks[rank].check(LINES, 60)

    start = time.monotonic()
    errors = on_ranks(3, work)
    assert time.monotonic() - start < 5
    for rank in (0, 2):
        assert "rank 1 could not compile 'step'" in str(errors[rank])
        assert "no rule for aten.sort at train.py:12" in str(errors[rank])


def test_scopes_and_later_objects_of_one_scope_do_not_mix():
    store = dist.HashStore()
    for turn in range(3):
        for scope in ("step", "evaluate"):
            ranks = [Agreement(store, rank, 2, scope) for rank in range(2)]
            assert check_all(ranks, (scope, str(turn))) == [False, False]


def test_finished_rounds_leave_no_keys():
    store = dist.HashStore()
    ranks = [Agreement(store, rank, 2, "step") for rank in range(2)]
    check_all(ranks, ("warm up",))
    before = store.num_keys()
    for turn in range(20):
        check_all(ranks, (str(turn),))
        on_ranks(2, lambda rank: rendezvous(store, "state_dict()", rank, 2))
    assert store.num_keys() <= before + 10


def test_rendezvous_meets_many_times():
    store = dist.HashStore()
    inside = []

    def work(rank):
        for turn in range(50):
            rendezvous(store, "state_dict()", rank, 3)
            inside.append(turn)

    assert on_ranks(3, work) == [None] * 3
    # Nobody is ever more than one meeting ahead.
    assert all(abs(turn - index // 3) <= 1 for index, turn in enumerate(inside))


def test_rendezvous_without_a_rank_fails_on_all_who_came():
    store = dist.HashStore()
    with pytest.raises(RuntimeError) as caught:
        rendezvous(store, "state_dict()", 0, 3, 0.1)
    assert str(caught.value) == (
        "state_dict() is collective: call it on all ranks; rank(s) [1, 2] did not join within 0.1 s"
    )
    # Those who come late wait for the next call of who gave up, as long as for any.
    errors = on_ranks(3, lambda rank: rank and rendezvous(store, "state_dict()", rank, 3, 0.1))
    assert errors[0] == 0
    for error in errors[1:]:
        assert "call it on all ranks; rank 0 gave up waiting; then rank" in str(error)


@pytest.mark.parametrize("times", (1, 3))
def test_after_a_lone_call_ranks_meet_again(times):
    store = dist.HashStore()
    for _ in range(times):
        with pytest.raises(RuntimeError, match="did not join"):
            rendezvous(store, "state_dict()", 2, 3, 0.05)
    for _ in range(2):
        assert on_ranks(3, lambda rank: rendezvous(store, "state_dict()", rank, 3, 5)) == [None] * 3


def agree_over_tcp():
    store = compat.tensors.agreement_store(dist.group.WORLD)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    agreement = Agreement(store, rank, world_size, "step")
    agreement.check(LINES, 30)
    with pytest.raises(AgreementError, match="Line 1 of the schedule is `0` on rank 0 and `1`"):
        agreement.check((str(rank),), 30)
    rendezvous(store, "state_dict()", rank, world_size)
    start = time.perf_counter()
    for _ in range(50):
        rendezvous(store, "state_dict()", rank, world_size)
    return (time.perf_counter() - start) / 50


@pytest.mark.parametrize("world_size", only((2,), (2, 4)))
def test_processes_agree_through_their_groups_store(ranks, world_size):
    seconds = ranks(world_size).run(agree_over_tcp)
    assert max(seconds) < 0.1  # about 0.001 on an idle machine
