"""The bytes that a process takes beside those of its program: allocators, libraries, links."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

KIB, MIB = 2**10, 2**20


class Span(NamedTuple):
    """Bytes that are allocated from one position of a program to another, both included."""

    begin: int
    end: int
    nbytes: int


class Row(NamedTuple):
    """Bytes outside the program, on the ``device`` or the ``host``, and how they are known.

    What is ``at first`` or ``spare`` is on the device too, and no form of the step needs it.

    The source is ``simulated`` (of this program's allocations), ``measured`` (here, on a machine
    with that device), ``assumed`` (from what libraries and their users say; not measured) or
    ``computed`` (from what this rank holds, by what zerofx does).
    """

    nbytes: int
    source: str
    place: str = "device"


REUSED = "buffers"
"""Names what a CPU keeps of a step's buffers to use them again, if the device has room for it."""

AT_FIRST = "whole at first"
"""Names what whole parameters take before the first call cuts them, above a step's peak."""


class Figure(NamedTuple):
    """Bytes that a library takes, how they are known, and from where."""

    nbytes: int
    source: str
    origin: str


@dataclass(frozen=True)
class Figures:
    """The bytes of one kind of device that no program decides on."""

    context: Figure
    workspaces: Figure
    first_communicator: Figure
    next_communicator: Figure


CHANNEL_BYTES = 4 * MIB + 8 * 512 * 8 * 16 + 640 * 120 * 8 * 8
"""NCCL's buffers of one channel, for its protocols Simple, LL and LL128 (src/include/device.h)."""

NUM_CHANNELS = 16
"""Channels of a ring over NVLink; NCCL_MAX_NCHANNELS lowers them.  Assumed."""

_NCCL = Figure(NUM_CHANNELS * CHANNEL_BYTES, "assumed", "NCCL: its buffers of 16 channels")

FIGURES = {
    "cpu": Figures(
        Figure(0, "computed", "a CPU has no context"),
        Figure(0, "computed", "no workspace that outlives its operator is known"),
        Figure(0, "computed", "2.6 to 2.9 MiB of gloo, which are there before anybody plans"),
        Figure(0, "computed", "0.07 to 0.21 MiB, likewise"),
    ),
    "cuda": Figures(
        Figure(512 * MIB, "assumed", "users of other GPUs report 200 to 1000 MiB"),
        Figure(32 * MIB, "assumed", "torch's cuBLAS workspace on Hopper; elsewhere 8.1 MiB"),
        _NCCL,
        _NCCL,
    ),
}
"""What is known of each kind of device; an accelerator that is not here counts as ``cuda``."""

COMPILING = {"eager": (30 * MIB, 18 * KIB), "inductor": (90 * MIB, 9 * KIB)}
"""Host memory that Python, Dynamo and the passes leave in use once a step has run, and Inductor,
by lowering: so much, and so much for each node of the program.  Measured (docs/measured.md)."""

PINNED_OF_SAVES = 64 * MIB
"""Pinned host memory that an asynchronous save copies through (docs/checkpoints.md)."""

TOGETHER = 4 * MIB
"""Deferred parameters that are made together (docs/deferred-initialisation.md)."""


def outside_bytes(
    spans: Sequence[Span],
    device: str,
    *,
    buffers: Sequence[Span] = (),
    num_communicators: int = 0,
    kept: int = 0,
    deferred: int = 0,
    largest_deferred: int = 0,
    whole: int = 0,
    file_cache: int = 0,
    compiling: int = 0,
) -> dict[str, Row]:
    """Return what one rank's process takes beside its program's bytes, by what it is for.

    ``spans`` are the program's bytes on the device, ``device`` its type; ``buffers`` those of them
    that a CPU keeps to use them again.  ``kept`` is what is saved between steps, ``deferred`` the
    part of it that is made by this process at first, ``whole`` the bytes of parameters that the
    script makes whole.  ``file_cache`` is what of ``offload_cache_bytes`` no program counts,
    ``compiling`` what compiling leaves in host memory.  Rows add up: initialisation counts as what
    it holds above the step's peak, checkpoints as an asynchronous save, which holds most.  Units:
    bytes.
    """
    figures = FIGURES.get(device, FIGURES["cuda"])
    is_cpu = device == "cpu"
    peak = most_alive(spans)
    reserved = _heap(spans) if is_cpu else CachingAllocator().most_reserved(spans)
    links = figures.first_communicator.nbytes * (num_communicators > 0)
    links += figures.next_communicator.nbytes * max(num_communicators - 1, 0)
    at_first = deferred + max(largest_deferred, TOGETHER) if deferred else 0
    end = max((span.end for span in spans), default=0)
    reused = most_alive([*spans, *_idle(buffers, end)]) - peak if is_cpu else 0
    saved = kept + (0 if is_cpu else PINNED_OF_SAVES)
    rows = {
        "context": Row(figures.context.nbytes, figures.context.source),
        "allocator": Row(reserved - peak, "simulated"),
        "workspaces": Row(figures.workspaces.nbytes, figures.workspaces.source),
        "communication": Row(links, figures.first_communicator.source),
        "initialisation": Row(max(at_first - peak, 0), "computed"),
        AT_FIRST: Row(max(whole - peak, 0), "computed", "at first"),
        REUSED: Row(reused, "computed", "spare"),
        "compiling": Row(compiling, "measured", "host"),
        "file cache": Row(file_cache, "computed", "host"),
        "checkpoint": Row(saved if kept else 0, "computed", "host"),
    }
    return {name: row for name, row in rows.items() if row.nbytes}


def _idle(buffers: Sequence[Span], end: int) -> Iterator[Span]:
    """Yield what buffers that are used again hold at most, up to ``end``, beside what is in use.

    A new one is made only if none is idle: together they never hold more than was in use at once.
    """
    aligned = [of._replace(nbytes=of.nbytes + LARGE * (of.nbytes >= LARGE)) for of in buffers]
    most, used, begin = most_alive(aligned), 0, 0
    for at, change in sorted(_changes(buffers).items()):
        yield Span(begin, at - 1, most - used)
        used += change
        begin = at
    yield Span(begin, end, most - used)


LARGE = 2 * MIB
"""Buffers from here on have so much more, to begin on a huge page (runtime/memory/pages.py)."""


def most_alive(spans: Iterable[Span], granule: int = 1) -> int:
    """Return the most bytes alive at once, each span's rounded up to a multiple of a granule."""
    alive = most = 0
    for _, change in sorted(_changes(spans, granule).items()):
        alive += change
        most = max(most, alive)
    return most


def _changes(spans: Iterable[Span], granule: int = 1) -> dict[int, int]:
    """Return by how much what is alive changes, by position."""
    changes: dict[int, int] = defaultdict(int)
    for span in spans:
        nbytes = _rounded(span.nbytes, granule)
        changes[span.begin] += nbytes
        changes[span.end + 1] -= nbytes
    return changes


def _rounded(nbytes: int, granule: int) -> int:
    return -(-nbytes // granule) * granule


CPU_ALIGNMENT = 64
"""torch asks the C library for memory at multiples of these bytes."""


def _heap(spans: Sequence[Span]) -> int:
    """Return the most that the C library hands out: whole multiples of torch's alignment."""
    return most_alive(spans, CPU_ALIGNMENT)


BLOCK = 512
SMALL = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
OWN_SEGMENT = 10 * MIB
"""torch's caching allocator: blocks are multiples of 512 bytes; up to 1 MiB they come from segments
of 2 MiB, below 10 MiB from segments of 20 MiB, and else from segments of their own, of whole
2 MiB.  Source: c10/cuda/CUDACachingAllocator.cpp, its defaults."""


class _Block(NamedTuple):
    """A free block, ordered by size: the best fit is the first that is large enough."""

    nbytes: int
    segment: int
    start: int


@dataclass
class CachingAllocator:
    """Simulates torch's CUDA caching allocator: one stream, no limit, no expandable segments."""

    reserved: int = 0
    free: dict[bool, list[_Block]] = field(default_factory=lambda: {True: [], False: []})
    starts: dict[tuple[int, int], _Block] = field(default_factory=dict)
    ends: dict[tuple[int, int], _Block] = field(default_factory=dict)
    num_segments: int = 0

    def most_reserved(self, spans: Iterable[Span]) -> int:
        """Return what the device has reserved after these spans have come and gone in order.

        What ends at a position is freed before the next position's are allocated.
        """
        ends: list[tuple[int, int, bool, _Block]] = []
        for number, span in enumerate(sorted(spans, key=lambda span: span.begin)):
            while ends and ends[0][0] < span.begin:
                _, _, is_small, block = ends.pop(0)
                self.give_back(is_small, block)
            if span.nbytes:
                is_small, block = self.take(span.nbytes)
                insort(ends, (span.end, number, is_small, block))
        return self.reserved

    def take(self, nbytes: int) -> tuple[bool, _Block]:
        """Allocate; return which pool it comes from, and the block."""
        wanted = _rounded(nbytes, BLOCK)
        is_small = wanted <= SMALL
        pool = self.free[is_small]
        at = bisect_left(pool, _Block(wanted, -1, -1))
        if at == len(pool):
            self.num_segments += 1
            block = _Block(_segment_bytes(wanted), self.num_segments, 0)
            self.reserved += block.nbytes
        else:
            block = pool[at]
            self._forget(is_small, block)
        rest = block.nbytes - wanted
        if rest >= BLOCK if is_small else rest > SMALL:
            self._add(is_small, _Block(rest, block.segment, block.start + wanted))
            block = block._replace(nbytes=wanted)
        return is_small, block

    def give_back(self, is_small: bool, block: _Block) -> None:
        """Free a block; it joins the free ones on either side."""
        before = self.ends.get((block.segment, block.start))
        if before is not None:
            self._forget(is_small, before)
            block = before._replace(nbytes=before.nbytes + block.nbytes)
        after = self.starts.get((block.segment, block.start + block.nbytes))
        if after is not None:
            self._forget(is_small, after)
            block = block._replace(nbytes=block.nbytes + after.nbytes)
        self._add(is_small, block)

    def _add(self, is_small: bool, block: _Block) -> None:
        insort(self.free[is_small], block)
        self.starts[block.segment, block.start] = block
        self.ends[block.segment, block.start + block.nbytes] = block

    def _forget(self, is_small: bool, block: _Block) -> None:
        pool = self.free[is_small]
        del pool[bisect_left(pool, block)]
        del self.starts[block.segment, block.start]
        del self.ends[block.segment, block.start + block.nbytes]


def _segment_bytes(wanted: int) -> int:
    if wanted <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if wanted < OWN_SEGMENT else _rounded(wanted, SMALL_SEGMENT)
