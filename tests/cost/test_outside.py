"""Bytes beside the program: torch's allocator simulated, and rows with their sources."""

from __future__ import annotations

import random

from zerofx.cost.outside import (
    AT_FIRST,
    MIB,
    REUSED,
    CachingAllocator,
    Span,
    most_alive,
    outside_bytes,
)


def reserved(*spans: Span) -> int:
    return CachingAllocator().most_reserved(spans)


def test_small_blocks_share_segments_of_2_mib():
    small = [Span(0, 9, 512 * 1024) for _ in range(4)]
    assert reserved(*small) == 2 * MIB
    assert reserved(*small, Span(0, 9, 1)) == 4 * MIB


def test_blocks_below_10_mib_share_segments_of_20_and_larger_ones_have_their_own():
    assert reserved(Span(0, 9, 9 * MIB), Span(0, 9, 9 * MIB)) == 20 * MIB
    assert reserved(Span(0, 9, 9 * MIB), Span(0, 9, 9 * MIB), Span(0, 9, 3 * MIB)) == 40 * MIB
    assert reserved(Span(0, 9, 10 * MIB)) == 10 * MIB
    assert reserved(Span(0, 9, 33 * MIB)) == 34 * MIB


def test_what_was_freed_is_used_again_whole_or_in_part():
    assert reserved(Span(0, 1, 30 * MIB), Span(2, 3, 30 * MIB)) == 30 * MIB
    assert reserved(Span(0, 1, 30 * MIB), Span(1, 3, 30 * MIB)) == 60 * MIB
    parts = [Span(2, 3, 10 * MIB) for _ in range(3)]
    assert reserved(Span(0, 1, 30 * MIB), *parts) == 30 * MIB


def test_neighbours_join_when_they_are_freed_in_any_order():
    parts = [Span(0, end, 9 * MIB) for end in (1, 2)]
    assert reserved(*parts, Span(3, 4, 18 * MIB)) == 20 * MIB
    assert reserved(*reversed(parts), Span(3, 4, 18 * MIB)) == 20 * MIB


def test_a_gap_that_is_too_small_costs_a_segment():
    kept = [Span(0, 9, 9 * MIB), Span(0, 1, 9 * MIB)]
    assert reserved(*kept, Span(2, 9, 12 * MIB)) == 32 * MIB


def test_no_program_has_more_alive_than_is_reserved():
    draw = random.Random(0)
    for _ in range(100):
        begins = [draw.randrange(50) for _ in range(60)]
        spans = [Span(at, at + draw.randrange(9), int(2 ** draw.uniform(0, 25))) for at in begins]
        alive = most_alive(spans, 512)
        allocator = CachingAllocator()
        assert alive <= allocator.most_reserved(spans)
        taken = allocator.take(16 * MIB)
        allocator.give_back(*taken)
        for pool in allocator.free.values():
            assert pool == sorted(pool)
        assert sum(len(pool) for pool in allocator.free.values()) == len(allocator.starts)


def test_rows_of_a_gpu_name_their_sources():
    rows = outside_bytes(
        [Span(0, 9, 100 * MIB + 1)],
        "cuda",
        num_communicators=2,
        kept=50 * MIB,
        deferred=40 * MIB,
        largest_deferred=70 * MIB,
        file_cache=5,
        compiling=7,
    )
    assert rows["allocator"] == (2 * MIB - 1, "simulated", "device")
    assert rows["initialisation"].nbytes == 10 * MIB - 1
    assert rows["checkpoint"] == (114 * MIB, "computed", "host")
    assert rows["file cache"] == (5, "computed", "host")
    assert rows["compiling"] == (7, "measured", "host")
    assert {rows[name].source for name in ("context", "workspaces", "communication")} == {"assumed"}
    one = outside_bytes([], "cuda", num_communicators=1)["communication"].nbytes
    assert rows["communication"].nbytes == 2 * one


def test_rows_of_a_cpu_are_what_this_machine_shows():
    assert outside_bytes([Span(0, 0, 1)], "cpu") == {"allocator": (63, "simulated", "device")}
    assert outside_bytes([], "cpu", num_communicators=1) == {}


def test_whole_parameters_count_above_the_peak_and_beside_what_a_step_needs():
    rows = outside_bytes([Span(0, 9, 6 * MIB)], "cpu", whole=10 * MIB)
    assert rows == {AT_FIRST: (4 * MIB, "computed", "at first")}


def test_buffers_that_are_used_again_count_where_they_idle_at_a_peak():
    """Two are in use at once, and idle while something else takes more."""
    first, second = Span(0, 1, 64), Span(1, 1, 64)
    other = Span(3, 4, 256)
    rows = outside_bytes([first, second, other], "cpu", buffers=[first, second])
    assert rows == {REUSED: (128, "computed", "spare")}
    small = Span(3, 4, 64)
    assert outside_bytes([first, second, small], "cpu", buffers=[first, second])[REUSED] == (
        64, "computed", "spare",
    )  # fmt: skip
    assert outside_bytes([first, second], "cpu", buffers=[first, second]) == {}
    assert outside_bytes([first, second, other], "cuda", buffers=[first, second]).keys() == (
        outside_bytes([first, second, other], "cuda").keys()
    )
