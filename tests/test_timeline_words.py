"""A record's peak, waits and times in words that a person would use."""

import pytest

from tests.records import MIB, empty, node, nothing, small
from zerofx.report.timeline.record import DEVICE, Busy, Memory
from zerofx.report.timeline.words import (
    duration,
    longest_waits,
    peak_of,
    peak_sentences,
    rows_of,
    share_of,
    short_source,
    size,
    step_sentence,
)


def test_the_peak_is_where_most_is_in_memory():
    peak = peak_of(small())
    assert (peak.position, peak.at_s, peak.nbytes) == (3, 2e-3, 16 * MIB)
    assert peak.kinds[0] == ("activations", 8 * MIB) and peak.count == 3


def test_the_peak_is_explained():
    assert peak_sentences(small()) == [
        "The peak is 16.0 MiB at 2 ms, 67% into the step, while mm_backward runs in backward "
        "(train.py:8 loss.backward()).",
        "It is 50% activations (8.00 MiB), 38% temporaries (6.00 MiB) and 12% parameters "
        "(2.00 MiB).",
        "The 3 largest of 3 tensors hold 100% of it.",
        "Most of it is activations: recompute with a memory_budget, offload=activations or a "
        "smaller batch lowers them.",
    ]


@pytest.mark.parametrize("kind", DEVICE)
def test_every_kind_has_a_remedy(kind):
    record = small(memory=(Memory(2, "device", kind, 2, 2, 8, "f32[2]"),))
    assert peak_sentences(record)[-1].startswith(f"Most of it is {kind}: ")
    assert "The largest tensor holds 100% of it." in peak_sentences(record)


@pytest.mark.parametrize("record", (empty, nothing))
def test_nothing_in_memory_is_said_so(record):
    assert peak_of(record()) is None
    assert peak_sentences(record()) == ["Nothing is in memory on the device at any time."]
    assert longest_waits(record()) == []
    assert step_sentence(record()) == (
        "A step is predicted to take 0, all of it compute. No schedule of its nodes beats 0."
    )


def test_tensors_at_the_peak_say_who_made_them_for_whom_and_until_when():
    record = small(name="body.weight")
    activations, _, parameters = rows_of(record, peak_of(record).largest)
    assert (activations.made_by, activations.value) == ("mm", "f32[2097152]")
    assert activations.alive == "1 ms – 2 ms"
    assert activations.source == "/home/me/train.py:7 loss = model(body.weight)"
    assert (parameters.alive, parameters.serves) == ("always", "bucket 0: body.weight")


def test_waits_are_added_up_by_node_and_the_longest_comes_first():
    nodes = tuple(node(f"n{i}", 0.0) for i in range(5))
    spans = (Busy(0, "waiting", 0, 1, 0), Busy(1, "waiting", 1, 4, 0), Busy(0, "waiting", 4, 5, 0),
             Busy(2, "compute", 5, 9, 0))  # fmt: skip
    waits = longest_waits(small(nodes=nodes, spans=spans, memory=()))
    assert [(wait.node, wait.seconds) for wait in waits] == [(1, 3), (0, 2)]


def test_a_step_is_described():
    assert step_sentence(small()) == (
        "A step is predicted to take 3 ms: 2 ms of compute and 1 ms (33%) of waiting. "
        "No schedule of its nodes beats 2.5 ms."
    )


def test_sizes_and_times_have_three_digits():
    assert [size(n) for n in (0, 1023, 1024, 10_240, 2**20 - 1, 1.5 * 2**30, 2**40)] == [
        "0 B", "1023 B", "1.00 KiB", "10.0 KiB", "1024 KiB", "1.50 GiB", "1024 GiB",
    ]  # fmt: skip
    assert [duration(s) for s in (0, 1.234e-7, 2.5e-4, 0.01234, 12.34)] == [
        "0", "0.123 µs", "250 µs", "12.3 ms", "12.3 s",
    ]  # fmt: skip
    assert [share_of(1, n) for n in (1, 2, 1000, 0)] == ["100%", "50%", "under 1%", "0%"]


@pytest.mark.parametrize(
    "source, expected",
    [
        ("/home/me/train.py:7 loss = a / b", "train.py:7 loss = a / b"),
        ("/home/My runs/a/train me.py:7 loss = a / b:2", "train me.py:7 loss = a / b:2"),
        ("/home/me/train.py:7: loss = a / b", "train.py:7: loss = a / b"),
        (r"C:\me\train.py:7 loss = a", "train.py:7 loss = a"),
        ("train.py:7", "train.py:7"),
        ("", ""),
    ],
)
def test_a_line_of_source_is_shown_with_its_files_name(source, expected):
    assert short_source(source) == expected
