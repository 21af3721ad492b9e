"""Counts the seconds of a first call by its parts, and says on a terminal how far it is."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TextIO

import torch.distributed as dist
from torch import nn

from zerofx.lower import regions

DELAY_S = 3.0
"""The time after which a line is shown."""

PERIOD_S = 0.5
"""The time after which it is written anew."""

CLEAR_LINE = "\r\x1b[K"


class FirstCall:
    """Counts the seconds of a call that compiles, by its parts; what is in none is Dynamo's.

    On a terminal, rank 0 shows them in one line, which is gone when the call ends.
    """

    def __init__(self, begun_s: float) -> None:
        self.name = "a step"  # until it is known
        self.seconds = {"Dynamo": 0.0}
        self._begun_s = self._counted_s = begun_s
        self._under_way = ["Dynamo"]  # and what is within it
        self._done = ""  # how far the innermost is
        self._has_ended = threading.Event()
        self._line: threading.Thread | None = None

    def show(self) -> None:
        """Show the line once it takes long, on rank 0 if standard error is a terminal."""
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        # Whatever somebody has put in its place: closed, or without a word on what it is.
        with contextlib.suppress(Exception):
            if rank == 0 and sys.stderr.isatty():
                line = threading.Thread(
                    target=self._write, args=(sys.stderr,), name="zerofx compiles", daemon=True
                )
                line.start()
                self._line = line

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the seconds in here for a part, and for no part around it."""
        self._count()
        self.seconds.setdefault(name, 0.0)  # first: the line may be written meanwhile
        self._under_way.append(name)
        try:
            yield
        finally:
            self._count()
            self._under_way.pop()

    def compile_regions(
        self, program: nn.Module, kernels: Sequence[regions.KernelAhead] = ()
    ) -> None:
        """Compile a program's regions, and kernels of updates, and say how many are ready."""
        total = len(regions.to_compile(program)) + len(kernels)
        with self.part("compiling regions"):
            self._done = f" (0 of {total})"
            try:
                for number, _ in enumerate(regions.compile_regions(program, kernels), 1):
                    self._done = f" ({number} of {total})"
            finally:
                self._done = ""

    def end(self) -> None:
        """Take the line away, if it is there."""
        self._has_ended.set()
        if self._line is not None:
            self._line.join()

    def _count(self) -> None:
        now_s = time.perf_counter()
        self.seconds[self._under_way[-1]] += now_s - self._counted_s
        self._counted_s = now_s

    def _words(self) -> str:
        now, seconds = self._under_way[-1], dict(self.seconds)
        seconds[now] += time.perf_counter() - self._counted_s
        before = [f"{part} {taken:.0f}" for part, taken in seconds.items() if part != now]
        so_far = f" ({', '.join(before)})" if before else ""
        return f"zerofx compiles {self.name}: {now}{self._done} {seconds[now]:.0f} s{so_far}"

    def _write(self, terminal: TextIO) -> None:
        wait_s = self._begun_s + DELAY_S - time.perf_counter()
        if self._has_ended.wait(max(wait_s, 0.0)):
            return
        with contextlib.suppress(Exception):  # a terminal that is gone takes no line
            while True:
                width = shutil.get_terminal_size().columns - 1  # longer, it would begin another
                print(f"{CLEAR_LINE}{self._words()[:width]}", end="", file=terminal, flush=True)
                if self._has_ended.wait(PERIOD_S):
                    break
            print(CLEAR_LINE, end="", file=terminal, flush=True)
