"""Clocks forget what matters no more: they find what those find that forget nothing."""

import contextlib
import random
import threading
from types import SimpleNamespace

import pytest
import torch

from tests.kit import trainings
from tests.kit.covering import first
from zerofx.order.check import CHECK, OrderCheck
from zerofx.order.clocks import (
    FEW_ENDED,
    MAIN,
    Access,
    Block,
    Clocks,
    Operator,
    Range,
    Where,
)
from zerofx.order.operators import Watch
from zerofx.runtime.comm.communication import Communicator
from zerofx.worker import Worker


class Complete(Clocks):
    """Clocks that forget nothing, and compare each access with all before it."""

    def prune(self):
        pass

    def _check(self, block: Block, access: Access) -> None:
        knows, before = self.clocks[access.line], self._accesses.setdefault(block, [])
        for other in before:
            overlaps = other.start < access.stop and access.start < other.stop
            is_before = other.count <= knows.get(other.line, 0)
            if overlaps and not is_before and (access.writes or other.writes):
                self._found(block, other, access)
        before.append(access)


def drawn(seed, num_entries=60):
    """Return a run: threads and streams, lines of one operator that end, marks, old ones too.

    Memory of the device is written to by streams, and is given back.
    """
    draw = random.Random(seed)
    threads, streams = ["main", "thread"], ["default", "stream"]
    entries, marks, num_ended = [], [], 0
    for number in range(num_entries):
        kind = draw.choice(("operator", "operator", "once", "mark", "after", "after", "given"))
        block, writes = draw.randrange(4), draw.random() < 0.4
        start = draw.randrange(0, 4)
        at = block, start, draw.randrange(start + 1, 6)
        if kind == "operator":
            by = draw.choice(streams if block < 2 else [*threads, *streams])
            entries.append(("operator", number, by, *at, writes))
        elif kind == "once":
            name, num_ended = f"once {num_ended}", num_ended + 1
            entries.append(("line", name))
            if marks and draw.random() < 0.7:
                entries.append(("after", name, draw.choice(marks)))
            entries.append(("operator", number, name, *at, writes and block >= 2))
            entries += [("mark", name, number), ("end", name)]
            marks.append(number)
        elif kind == "mark":
            entries.append(("mark", draw.choice([*threads, *streams]), number))
            marks.append(number)
        elif kind == "after" and marks:
            entries.append(("after", draw.choice([*threads, *streams]), draw.choice(marks)))
        elif kind == "given":
            entries.append(("given", draw.randrange(2)))
    return entries


def races_of(clocks, entries):
    """Return what is in no order with something before it: operators by number, and memory."""
    lines = {"main": MAIN, "default": 1}
    lines |= {"thread": clocks.line("thread"), "stream": clocks.line("stream", is_stream=True)}
    where = [Where.DEVICE, Where.DEVICE, Where.HOST, Where.HOST]
    blocks = [Block(0, 8, f"block {at}", one) for at, one in enumerate(where)]
    marks = {}
    for kind, *facts in entries:
        if kind == "line":
            lines[facts[0]] = clocks.line(facts[0])
        elif kind == "operator":
            number, by, block, start, stop, writes = facts
            ranges = (Range(blocks[block], start, stop, writes),)
            line = lines[by]
            clocks.operator(Operator(str(number), line, 1, ranges, (), line=line))
        elif kind == "mark":
            marks[facts[1]] = clocks.mark(lines[facts[0]], lines[facts[0]], (), "")
        elif kind == "after":
            clocks.after(lines[facts[0]], marks[facts[1]], lines[facts[0]], (), "")
        elif kind == "end":
            clocks.end(lines[facts[0]])
        else:
            clocks.given(blocks[facts[0]], MAIN, 1, ())
            blocks[facts[0]] = Block(0, 8, f"{blocks[facts[0]].name}'", Where.DEVICE)
        clocks.prune()
    return {(race.block, race.second.name) for race in clocks.races}


def test_what_is_forgotten_hides_nothing():
    num_races, num_lines = 0, 0
    for seed in range(300):
        clocks, complete, entries = Clocks(), Complete(), drawn(seed)
        found = races_of(clocks, entries)
        assert found == races_of(complete, entries), seed
        num_races += len(found)
        num_lines += len(complete.lines) - len(clocks.lines)
    assert num_races > 1000 and num_lines > 1000, "there is much to be found, and to forget"


def size_of(notes):
    """Return how much is kept: lines, clocks and what they count, accesses, blocks."""
    clocks = notes.clocks
    return SimpleNamespace(
        lines=len(clocks.lines),
        ended=len(clocks._ended),
        clocks=len(clocks.clocks),
        counts=sum(map(len, clocks.clocks.values())),
        accesses=sum(map(len, clocks._accesses.values())),
        blocks=len(clocks._accesses),
        taken_on=len(notes._taken_on),
    )


def used(notes, communicator, worker, shard):
    """Do what a step does that changes nothing: gather and reduce, have a job, and a thread end."""
    for _ in range(3):
        communicator.wait(communicator.all_gather_start(shard, 1)).sum()
        communicator.wait(communicator.all_reduce_start(shard * 2, "sum"))
        communicator.wait(communicator.there(shard)).sum()
    worker.start(lambda: shard.sum()).result()
    thread = threading.Thread(target=lambda: notes.thread)
    thread.start()
    thread.join()


@pytest.mark.parametrize("is_watched", first(1, (True, False)))
def test_what_is_kept_does_not_grow_with_the_calls(is_watched):
    """Of memory that is only read as well; of steps beside a watched one it stays below a bound."""
    check, sizes = OrderCheck(), []
    watched = SimpleNamespace(bound=(), table=())
    try:
        check.begin()
        communicator, worker, shard = Communicator(None), Worker("test"), torch.zeros(8)
        for _ in range(100):
            with check.watching(watched, None) if is_watched else contextlib.nullcontext():
                used(check.notes, communicator, worker, shard)
            sizes.append(size_of(check.notes))
    finally:
        check.end()
    if is_watched:
        assert sizes[9:] == sizes[9:10] * 91
    assert max(one.lines for one in sizes) < (12 if is_watched else FEW_ENDED + 12)
    assert max(one.counts for one in sizes) < (50 if is_watched else 50 * FEW_ENDED)
    assert max(one.accesses for one in sizes) < 20


@pytest.mark.nightly
def test_a_step_of_many_calls_keeps_what_it_kept_after_few(tmp_path):
    torch._dynamo.reset()
    options = {"offload": "optimizer", "offload_tier": "nvme", "offload_dir": [str(tmp_path)]}
    try:
        compiled = trainings.zero(trainings.clipped, 3, check_order=True, **options)
        pair, sizes = trainings.built(), []
        for number in range(24):
            trainings.run(compiled, pair, range(number, number + 1))
            sizes.append(size_of(CHECK.notes))
    finally:
        CHECK.end()
    few, many = sizes[4:14], sizes[14:]
    for name in vars(few[0]):
        assert max(vars(one)[name] for one in many) <= max(vars(one)[name] for one in few), name
    assert many[-1].counts < 200


def test_a_line_of_a_thread_ends_with_it():
    check = OrderCheck()
    try:
        check.begin()
        with Watch(check.notes):
            thread = threading.Thread(target=lambda: check.notes.thread)
            thread.start()
            thread.join()
            assert "Thread-" in str(check.notes.clocks.lines)
        check.notes.clocks.prune()
        assert "Thread-" not in str(check.notes.clocks.lines)
        assert MAIN in check.notes.clocks.lines
    finally:
        check.end()


def read(clocks, block, line):
    ranges = (Range(block, 0, 8, writes=False),)
    clocks.operator(Operator("read", line, 1, ranges, (), line=line))


def test_memory_given_back_under_a_streams_read_is_found_behind_reads_of_others():
    """They hold what they read, and the stream does not."""
    clocks, block = Clocks(), Block(0, 8, "block", Where.DEVICE)
    stream, once = clocks.line("stream", is_stream=True), clocks.line("once")
    read(clocks, block, stream)
    clocks.after(once, clocks.mark(stream, stream, (), ""), once, (), "")
    read(clocks, block, once)
    clocks.given(block, MAIN, 1, ())
    assert [race.lines[0] for race in clocks.races] == ["stream"]


def test_an_old_mark_brings_back_no_line_that_is_forgotten():
    clocks, block = Clocks(), Block(0, 8, "block", Where.HOST)
    once = clocks.line("once")
    read(clocks, block, once)
    mark = clocks.mark(once, once, (), "")
    clocks.end(once)
    clocks.prune()
    assert once in clocks.lines, "what it has read may be written to yet"
    del block
    clocks.prune()
    assert once not in clocks.lines
    clocks.after(MAIN, mark, MAIN, (), "")
    assert mark == {once: 1} and once not in clocks.clocks[MAIN]
