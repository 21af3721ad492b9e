"""Tell the clocks of a run what happens in it, by whichever thread."""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from zerofx.accelerator import is_accelerator, kind, module_of
from zerofx.order.blocks import Blocks, addresses
from zerofx.order.clocks import (
    DEFAULT_STREAM,
    MAIN,
    Block,
    Clocks,
    Operator,
    Range,
    Site,
    Where,
)
from zerofx.runtime.parameters.registry import REGISTRY

PACKAGE = Path(__file__).parents[1]
OURS, HERE = f"{PACKAGE}/", f"{PACKAGE}/order/"

PROGRAM = "<eval_with_key>"
"""The file that a program's statements are of: torch makes it of the graph."""


class _Thread:
    """A thread's line, which goes with the thread, and then does nothing more."""

    def __init__(self, line: int, on_end: Callable[[int], object]) -> None:
        self.line, self._on_end = line, on_end

    def __del__(self) -> None:
        self._on_end(self.line)


class Notes:
    """Tells the ``clocks``; ``thread`` and ``stream`` are the calling thread's line and stream.

    While ``is_on`` is false nothing is noted.
    """

    def __init__(self, clocks: Clocks) -> None:
        self.clocks = clocks
        self.is_on = True
        self.blocks = Blocks(self._given)
        self._threads = threading.local()
        self._threads.own = _Thread(MAIN, lambda line: None)
        self._streams: dict[Any, int] = {}
        self._taken_on: WeakKeyDictionary[Block, int] = WeakKeyDictionary()

    @property
    def thread(self) -> int:
        if not hasattr(self._threads, "own"):
            line = self.clocks.line(threading.current_thread().name)
            self._threads.own = _Thread(line, self.clocks.end)
        return self._threads.own.line

    @property
    def stream(self) -> int:
        """The line of the stream that is current; on a CPU of one that nothing uses."""
        device = kind()
        if device is None:
            return DEFAULT_STREAM
        return self.line_of(module_of(torch.device(device)).current_stream())

    def line_of(self, stream: Any) -> int:
        """Return the line of a device's stream; the first that is met is the default one."""
        with self.clocks.lock:
            if stream not in self._streams:
                number = len(self._streams)
                self._streams[stream] = (
                    self.clocks.line(f"stream {number}", is_stream=True)
                    if number
                    else DEFAULT_STREAM
                )
            return self._streams[stream]

    # What waits for what

    def mark(self, line: int, kind: str) -> Any:
        """Return what a line has done until now, for ``after``."""
        return self.clocks.mark(line, self.thread, self.site(), kind)

    def end(self, line: int) -> Any:
        """Return what a line has done that will do nothing more: its last mark."""
        mark = self.mark(line, "end")
        self.clocks.end(line)
        self.clocks.prune_if_due()  # of steps too that are not watched, beside one that is
        return mark

    def after(self, line: int, mark: Any, kind: str, given: bool = False) -> None:
        """Have a line go on after a mark."""
        self.clocks.after(line, mark, self.thread, self.site(), kind, given)

    # Calls, which the user's own threads have wait for each other: nothing is noted of those

    @cached_property
    def _calls(self) -> int:
        return self.clocks.line("calls")

    def begin_call(self) -> None:
        """Have this thread go on after the calls that have ended, in whichever thread."""
        self.after(self.thread, self.mark(self._calls, "calls before"), "begin", given=True)

    def end_call(self) -> None:
        """Have calls that begin from now on go on after what this thread has done."""
        self.mark(self._calls, "end of a call")

    # Memory

    def block(self, tensor: Tensor, name: str, is_new: bool = False) -> Block | None:
        """Return the block that a tensor lies in.  One that ``is_new`` has just been taken."""
        with self.clocks.lock:
            found = self.blocks.of(tensor, name)
            if found is None:
                return None
            block, was_unknown = found
            if was_unknown:
                self._taken_on[block] = self.stream if is_new else DEFAULT_STREAM
                self.place(block, tensor, is_new)
            if was_unknown and is_new:
                self.clocks.taken(block, self.thread, self.stream, self.site())
            return block

    def place(self, block: Block, tensor: Tensor, is_new: bool) -> None:
        """Note which memory a block is of that has not been met before."""
        if is_accelerator(tensor.device):
            block.where = Where.DEVICE
        elif kind() is None or not tensor.is_pinned():
            block.where = Where.HOST
        else:
            is_own = REGISTRY.host.holds(tensor)
            block.where = Where.PINNED if is_own else Where.PINNED_BY_TORCH

    def settle_places(
        self,
        func: Any,
        kwargs: Mapping[str, Any],
        inputs: Sequence[Any],
        read: Sequence[Range],
        made: Sequence[Range],
        fresh: Sequence[Tensor],
    ) -> None:
        """Learn from an operator which memory its tensors are of; real ones say it themselves."""

    def ranges(self, tensor: Tensor, writes: bool, name: str, is_new: bool = False) -> list[Range]:
        """Return what an operator reads or writes of a tensor."""
        block = self.block(tensor, name, is_new)
        if block is None:
            return []
        is_number = tensor.dim() == 0
        return [Range(block, *one, writes, is_number) for one in addresses(tensor)]

    def _given(self, block: Block) -> None:
        if self.is_on:
            line = self._taken_on.pop(block, DEFAULT_STREAM)
            self.clocks.given(block, self.thread, line, self.site())

    # What is done

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator."""
        return func(*args, **kwargs)

    def operator(self, name: str, ranges: Sequence[Range], **facts: Any) -> None:
        """Note an operator that the calling thread runs, or gives to its current stream."""
        if not ranges:
            return
        facts = {"stream": self.stream, "site": self.site(), **facts}
        self.clocks.operator(Operator(name, self.thread, ranges=tuple(ranges), **facts))

    def site(self) -> Site:
        """Return the innermost of our frames that the caller was called from, and the statement."""
        frames: list[str] = []
        frame: Any = sys._getframe(1)
        while frame is not None:
            code, line = frame.f_code, frame.f_lineno
            if code.co_filename.startswith(PROGRAM):
                text = linecache.getline(code.co_filename, line, frame.f_globals)
                frames.append(f"<program> {text.split(';')[0].strip()}")
                break
            if self.is_told(code.co_filename, frames):
                path = code.co_filename.removeprefix(f"{PACKAGE.parent}/")
                frames.append(f"{path}:{line} {code.co_name}")
            frame = frame.f_back
        return tuple(frames)

    def is_told(self, file: str, frames: Sequence[str]) -> bool:
        """Return whether a frame of this file is told, behind those inside of it."""
        return not frames and file.startswith(OURS) and not file.startswith(HERE)
