"""The memory that a run takes and gives back, known by its addresses."""

from __future__ import annotations

import weakref
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerofx.order.clocks import Block


def addresses(tensor: Tensor) -> list[tuple[int, int]]:
    """Return the stretches of memory that a strided tensor's elements lie in, as byte addresses.

    One stretch, or one for each step along its largest stride.
    """
    if not tensor.numel():
        return []
    strides = zip(tensor.stride(), tensor.shape, strict=True)
    dims = sorted((stride, size) for stride, size in strides if size > 1 and stride)
    start, itemsize = tensor.data_ptr(), tensor.element_size()
    length = 1 + sum((size - 1) * stride for stride, size in dims)
    if not dims or length == tensor.numel():
        return [(start, start + length * itemsize)]
    step, count = dims[-1]
    length -= (count - 1) * step
    if length >= step:
        return [(start, start + (length + (count - 1) * step) * itemsize)]
    firsts = range(start, start + count * step * itemsize, step * itemsize)
    return [(first, first + length * itemsize) for first in firsts]


@dataclass(eq=False)
class _Held:
    """A block that is there: its storage, and what takes note when that goes."""

    block: Block
    storage: weakref.ref[torch.UntypedStorage]


class Blocks:
    """The blocks that are there.

    ``on_given`` is called with one as it is given back, by whichever thread drops it.
    """

    make: Callable[..., Block] = Block

    def __init__(self, on_given: Callable[[Block], Any]) -> None:
        self._on_given = on_given
        self.before_given: dict[int, Callable[[int], object]] = {}  # by where a block starts
        self._starts: list[int] = []
        self._held: dict[int, _Held] = {}
        self._dropped: deque[_Held] = deque()
        self._taken = 0

    def of(self, tensor: Tensor, name: str) -> tuple[Block, bool] | None:
        """Return the block that a tensor lies in, and whether it is new here; None without one."""
        self.drop_dead()
        storage = tensor.untyped_storage()
        start, nbytes = storage.data_ptr(), storage.nbytes()
        if not start or not nbytes:
            return None
        found = self._around(start)
        if found is not None and start + nbytes <= found.block.stop:
            return found.block, False
        return self._add(storage, start, start + nbytes, name), True

    def drop_dead(self) -> None:
        """Forget what has been given back."""
        while self._dropped:
            held = self._dropped.popleft()
            if self._held.get(held.block.start) is held:
                self._remove(held)

    def _around(self, address: int) -> _Held | None:
        at = bisect_right(self._starts, address) - 1
        if at < 0:
            return None
        held = self._held[self._starts[at]]
        if address >= held.block.stop:
            return None
        storage = held.storage()
        if storage is not None and storage.data_ptr() != held.block.start:
            self._remove(held)  # cut to nothing meanwhile, or moved
            self._on_given(held.block)
            return None
        return held

    def _add(self, storage: torch.UntypedStorage, start: int, stop: int, name: str) -> Block:
        self._taken += 1
        block = self.make(start, stop, f"block {self._taken} ({stop - start} bytes, by {name})")
        for other in list(self._between(start, stop)):
            self._remove(other)
            if other.storage() is not None:  # a part of this one, with a storage of its own
                other.block.inside = block

        def is_dead(_reference: Any) -> None:
            self.before_given.pop(start, lambda start: None)(start)
            if held.block.inside is None:
                self._on_given(held.block)
            self._dropped.append(held)

        held = _Held(block, weakref.ref(storage, is_dead))
        self._held[start] = held
        insort(self._starts, start)
        return block

    def _between(self, start: int, stop: int) -> Iterator[_Held]:
        at = max(bisect_right(self._starts, start) - 1, 0)
        for address in self._starts[at : bisect_left(self._starts, stop)]:
            held = self._held[address]
            if held.block.start < stop and start < held.block.stop:
                yield held

    def _remove(self, held: _Held) -> None:
        del self._held[held.block.start]
        del self._starts[bisect_left(self._starts, held.block.start)]
