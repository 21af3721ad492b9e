"""Watch a run: its steps take the paths of accelerators on CPU tensors, and all is noted."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.kit.order.collectives import Collectives
from tests.kit.order.history import History
from tests.kit.order.places import PlacedNotes
from tests.kit.order.resources import Resources
from tests.kit.order.streams import Device
from tests.kit.order.threads import Threads
from zerofx import accelerator
from zerofx.compiler import program
from zerofx.order.check import OrderCheck
from zerofx.order.clocks import Where
from zerofx.order.operators import Watch, of_compiled
from zerofx.runtime.memory import pages
from zerofx.runtime.memory.pages import BufferPool
from zerofx.runtime.parameters import snapshots
from zerofx.runtime.parameters.registry import REGISTRY
from zerofx.runtime.step import StepRuntime
from zerofx.runtime.storage.memory import HostMemory

ON_DEVICE = ("zerofx.runtime.parameters", "zerofx.runtime.storage", "zerofx.runtime.optimizer")
"""The rooms that are told that a CPU is an accelerator."""


class Watched:
    """A run that is watched: its history, and what notes more of it."""

    def __init__(self) -> None:
        self.history = History()
        self.notes = PlacedNotes(self.history)
        self.device = Device(self.notes)

    def operators(self) -> Watch:
        """Return a mode that notes operators outside of compiled steps too."""
        return Watch(self.notes)


@contextlib.contextmanager
def checking() -> Iterator[OrderCheck]:
    """Have the option ``check_order`` watch the paths of accelerators, on CPU tensors."""
    with watching(is_by_option=True) as watched:
        check = OrderCheck(lambda: watched.notes, lambda notes: ())
        with mock.patch.object(program, "CHECK", check):
            yield check


@contextlib.contextmanager
def watching(is_by_option: bool = False) -> Iterator[Watched]:
    """Note what compiled steps do, and jobs that they hand over, until the block ends."""
    watched = Watched()
    notes = watched.notes
    with contextlib.ExitStack() as stack:
        for patch in (
            *_accelerators(watched),
            *_memory(notes),
            *Threads(notes).patches(),
            *Collectives(notes).patches(),
            *Resources(notes).patches(),
            *of_compiled(notes),
        ):
            stack.enter_context(patch)
        call = StepRuntime.__call__

        def watched_call(runtime: StepRuntime, inputs: list[Any]) -> list[Any]:
            for one in inputs:  # parameters, buffers, a batch
                if isinstance(one, Tensor) and not REGISTRY.host.holds(one):
                    notes.lies_in(one, Where.DEVICE, "the program's caller", is_new=False)
            with contextlib.nullcontext() if is_by_option else watched.operators():
                return call(runtime, inputs)

        stack.enter_context(mock.patch.object(StepRuntime, "__call__", watched_call))
        try:
            yield watched
        finally:
            notes.is_on = False


def _accelerators(watched: Watched) -> Iterator[Any]:
    stand_ins: dict[str, Callable] = {
        "is_accelerator": lambda device: device.type != "meta",
        "module_of": lambda device: watched.device,
    }
    for name, module in sorted(sys.modules.items()):
        if name.startswith(ON_DEVICE):
            for function, stand_in in stand_ins.items():
                if vars(module).get(function) is getattr(accelerator, function):
                    yield mock.patch.object(module, function, stand_in)
            if isinstance(vars(module).get("_streams"), dict):  # those of another run
                yield mock.patch.object(module, "_streams", {})


def _memory(notes: PlacedNotes) -> Iterator[Any]:
    """Note what is the host's, and what of it is pinned; the device's is taken anew each time."""
    empty = HostMemory.empty
    taken: dict[str, Callable] = {"aligned_empty": pages.aligned_empty}

    def host_empty(
        host: HostMemory, numel: int, dtype: torch.dtype, pinned: bool = False
    ) -> Tensor:
        memory = empty(host, numel, dtype, pinned)
        notes.lies_in(memory, Where.PINNED if pinned else Where.HOST, "HostMemory.empty")
        return memory

    def aligned_empty(
        nbytes: int, *, pinned: bool = False, before_free: Callable[[int], object] | None = None
    ) -> Tensor:
        memory = taken["aligned_empty"](nbytes)
        notes.lies_in(memory, Where.PINNED if pinned else Where.HOST, "aligned_empty")
        if before_free is not None:
            notes.blocks.before_given[memory.data_ptr()] = before_free
        return memory

    yield mock.patch.object(HostMemory, "empty", host_empty)
    for name, module in sorted(sys.modules.items()):
        if name.startswith("zerofx.") and "aligned_empty" in vars(module):
            yield mock.patch.object(module, "aligned_empty", aligned_empty)
    start = snapshots._Copy.start

    def start_of(copy: snapshots._Copy, rings: dict) -> None:
        if not REGISTRY.host.holds(copy._sources[0][0]):
            start(copy, rings)

    yield mock.patch.object(snapshots._Copy, "start", start_of)
    yield mock.patch.object(BufferPool, "empty", lambda pool, numel, like: like.new_empty(numel))
