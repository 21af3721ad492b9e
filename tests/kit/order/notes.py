"""Notes what happens in a run, by whichever thread, into a history."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.kit.order.blocks import Blocks, addresses, put
from tests.kit.order.history import (
    MAIN,
    After,
    Block,
    Given,
    History,
    Kept,
    Operator,
    Range,
    Site,
    Taken,
    Where,
)

ROOT = Path(__file__).parents[3]
HERE = str(Path(__file__).parent)

THROUGH = frozenset(
    (
        *("_complete", "settle", "_settle", "result", "wait", "_wait_for", "wait_for_its_end"),
        *("make_before_change", "before_change", "_copy_beside", "_copy", "_start", "complete"),
        *("<genexpr>", "<listcomp>", "synchronize", "start"),
    )
)
"""Functions that wait or copy for others: a place in the code is theirs and their caller's."""

MOST_FRAMES = 6


class Notes:
    """Writes the ``history``; ``thread`` and ``stream`` are the calling thread's line and stream.

    While ``is_on`` is false nothing is noted.
    """

    def __init__(self, history: History) -> None:
        self.history = history
        self.is_on = True
        self.blocks = Blocks(self._given)
        self.streams = threading.local()
        self._threads = threading.local()
        self._taken_on: dict[Block, int] = {}
        self._threads.line = MAIN
        self.default: Any = None  # the stream of threads that have chosen none

    @property
    def thread(self) -> int:
        if not hasattr(self._threads, "line"):
            self._threads.line = self.history.line(threading.current_thread().name)
        return self._threads.line

    @property
    def stream(self) -> Any:
        return getattr(self.streams, "current", None) or self.default

    @stream.setter
    def stream(self, stream: Any) -> None:
        self.streams.current = stream

    # What waits for what

    def mark(self, line: int, kind: str) -> int:
        """Note what a line has done until now; return the number that ``after`` takes."""
        return self.history.mark(line, self.thread, site(), kind)

    def after(self, line: int, mark: int, kind: str, given: bool = False) -> None:
        """Have a line go on after a mark."""
        self.history.add(After(line, mark, self.thread, site(), kind, given))

    # Memory

    def block(self, tensor: Tensor, name: str, is_new: bool = False) -> Block | None:
        """Return the block that a tensor lies in.  One that ``is_new`` has just been taken."""
        with self.history.lock:
            found = self.blocks.of(tensor, name)
            if found is None:
                return None
            block, was_unknown = found
            if was_unknown:
                self._taken_on[block] = self.stream.line if is_new else self.default.line
            if was_unknown and not is_new and tensor.dim() == 0:
                put(block, Where.HOST)  # the count of an optimizer's steps, a learning rate
            if was_unknown and is_new:
                self.history.add(Taken(block, self.thread, self.stream.line, site()))
            return block

    def ranges(self, tensor: Tensor, writes: bool, name: str, is_new: bool = False) -> list[Range]:
        """Return what an operator reads or writes of a tensor."""
        block = self.block(tensor, name, is_new)
        if block is None:
            return []
        is_number = tensor.dim() == 0
        return [Range(block, *one, writes, is_number) for one in addresses(tensor)]

    def lies_in(self, tensor: Tensor, where: Where, name: str, is_new: bool = True) -> None:
        """Note which memory a tensor is of."""
        block = self.block(tensor, name, is_new)
        if block is not None:
            put(block, where)

    def _given(self, block: Block) -> None:
        if self.is_on:
            line = self._taken_on.pop(block, self.default.line)
            self.history.add(Given(block, self.thread, line, site()))

    def keep(self, tensor: Tensor, stream: Any) -> None:
        block = self.block(tensor, "record_stream")
        if block is not None:
            self.history.add(Kept(block, stream.line))

    # What is done

    def operator(self, name: str, ranges: Sequence[Range], **facts: Any) -> None:
        """Note an operator that the calling thread runs, or gives to its current stream."""
        if not ranges:
            return
        facts = {"stream": self.stream.line, **facts}
        self.history.add(Operator(name, self.thread, ranges=tuple(ranges), site=site(), **facts))


def site() -> Site:
    """Return the frames of zerofx and the tests that the caller was called from.

    From the innermost to the first of a function that is not ``THROUGH``.
    """
    frames: list[str] = []
    frame: Any = sys._getframe(1)
    while frame is not None and len(frames) < MOST_FRAMES:
        code = frame.f_code
        file = code.co_filename
        is_ours = file.startswith(str(ROOT)) and not file.startswith((HERE, sys.prefix))
        if is_ours or file.startswith("<eval_with_key>"):
            path = file.removeprefix(f"{ROOT}/")
            frames.append(f"{path}:{frame.f_lineno} {code.co_name}")
            if code.co_name not in THROUGH:
                break
        frame = frame.f_back
    return Site(tuple(frames))
