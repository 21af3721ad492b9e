"""Notes of a run in which CPU tensors stand for a device's memory: which, shows as it goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.kit.order.history import History
from zerofx.order.clocks import Block, Range, Where
from zerofx.order.notes import PACKAGE, Notes

TESTS = Path(__file__).parents[2]
OURS, HERE = (f"{PACKAGE}/", f"{TESTS}/"), (f"{PACKAGE}/order/", f"{TESTS}/kit/order/")

aten = torch.ops.aten


THROUGH = frozenset(
    (
        *("_complete", "settle", "_settle", "result", "wait", "_wait_for", "wait_for_its_end"),
        *("make_before_change", "before_change", "_copy_beside", "_copy", "_start", "complete"),
        *("<genexpr>", "<listcomp>", "synchronize", "start"),
    )
)
"""Functions that wait or copy for others: a place in the code is theirs and their caller's."""

MOST_FRAMES = 6


@dataclass(eq=False)
class Group:
    """Blocks that must be of the same memory, as operators compute on them together."""

    where: Where | None = None
    parent: Group | None = None

    def root(self) -> Group:
        group = self
        while group.parent is not None:
            group = group.parent
        return group


@dataclass(eq=False)
class PlacedBlock(Block):
    """A block that lies where its group does, as far as that is known yet."""

    group: Group = field(default_factory=Group)

    @property  # type: ignore[override]
    def where(self) -> Where | None:
        return self.root().group.root().where

    @where.setter
    def where(self, where: Where | None) -> None:
        pass

    @property
    def is_on_device(self) -> bool:
        """What has met nothing of the host is the device's."""
        return self.where in (None, Where.DEVICE)


class PlacedNotes(Notes):
    """Notes of streams that are the tests' own, and of memory that is known by what it meets."""

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self.history = history
        self.blocks.make = self._block
        self._current = threading.local()
        self.default: Any = None  # the stream of threads that have chosen none

    @property
    def current(self) -> Any:
        return getattr(self._current, "stream", None) or self.default

    @current.setter
    def current(self, stream: Any) -> None:
        self._current.stream = stream

    @property
    def stream(self) -> int:
        return self.current.line

    def _block(self, start: int, stop: int, name: str) -> PlacedBlock:
        block = PlacedBlock(start, stop, name)
        block.group = Group()
        return block

    def lies_in(self, tensor: Tensor, where: Where, name: str, is_new: bool = True) -> None:
        """Note which memory a tensor is of."""
        block = self.block(tensor, name, is_new)
        if block is not None:
            put(block, where)

    def place(self, block: Block, tensor: Tensor, is_new: bool) -> None:
        if not is_new and tensor.dim() == 0:
            put(block, Where.HOST)  # the count of an optimizer's steps, a learning rate

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if kwargs.get("pin_memory"):  # there is nothing to pin it with
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)

    def is_told(self, file: str, frames: Sequence[str]) -> bool:
        is_whole = frames and frames[-1].split()[-1] not in THROUGH
        is_ours = file.startswith(OURS) and not file.startswith(HERE)
        return is_ours and not is_whole and len(frames) < MOST_FRAMES

    def settle_places(self, func, kwargs, inputs, read, made, fresh) -> None:
        packet, name = func.overloadpacket, str(func)
        if kwargs.get("pin_memory"):
            for tensor in fresh:
                self.lies_in(tensor, Where.PINNED_BY_TORCH, name)
        elif packet is aten._to_copy and kwargs.get("device") is not None:
            for tensor in fresh:
                self.lies_in(tensor, Where.HOST, name)
        elif packet is not aten.copy_:
            _settle_places(read, made, is_given_any=bool(inputs))


def unite(groups: Iterable[Group]) -> None:
    """Have blocks be of the same memory; those that are known to be of others are left alone."""
    roots = list(dict.fromkeys(group.root() for group in groups))
    known = {root.where for root in roots} - {None}
    if len(known) > 1:
        return
    for other in roots[1:]:
        other.parent = roots[0]
    if known:
        (roots[0].where,) = known


def put(block: Block, where: Where) -> None:
    """Have a block be of this memory.

    The device's alone if its group is the host's: on a CPU ``.to(device)`` makes no copy of it.
    """
    group = block.root().group.root()
    if where is Where.DEVICE and group.where not in (None, where):
        block.root().group = Group(where)
    else:
        group.where = where


def _settle_places(read: Sequence[Range], made: Sequence[Range], is_given_any: bool) -> None:
    """Have what an operator computes on, and what it makes, lie in one memory.

    A number that is made of nothing is the host's.
    """
    wide = [one.block for one in read if not one.is_number]
    if wide:
        written = [one.block for one in read if one.is_number and one.writes]
        unite(block.root().group for block in (*wide, *written, *(one.block for one in made)))
        return
    on_device = any(one.block.is_on_device for one in read)
    for one in made:
        if read or (one.is_number and not is_given_any):
            put(one.block, Where.DEVICE if on_device else Where.HOST)
