"""Flat ranges of a tensor as boxes of it: what torch.distributed.checkpoint knows of shards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A box of a tensor, and where it begins in the flat range that it is a part of."""

    offsets: Shape
    sizes: Shape
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def boxes_of(shape: Shape, order: Sequence[int], start: int, stop: int) -> list[Box]:
    """Cut a flat range of a tensor into boxes, each of which is one piece of that range.

    The tensor is flat with its dimensions in ``order``, from slowest to fastest; ``start`` and
    ``stop`` count its elements so.  Boxes come in the order in which they lie in the range: at most
    2 ndim - 1, one for a single number, none for an empty range.

    A tensor without elements is one empty box, on every rank: it is written once, and a reader
    finds its name.

    Shapes: [4, 3], 2 to 10 -> [1, 1] at (0, 2), [2, 3] at (1, 0), [1, 1] at (3, 0).
    """
    if math.prod(shape) == 0:
        return [Box((0,) * len(shape), tuple(shape), 0)]
    permuted = tuple(shape[dim] for dim in order)
    found, position = [], start
    for offsets, sizes in _cut(permuted, start, stop):
        where, extents = [0] * len(shape), [0] * len(shape)
        for dim, offset, size in zip(order, offsets, sizes, strict=True):
            where[dim], extents[dim] = offset, size
        box = Box(tuple(where), tuple(extents), position - start)
        found.append(box)
        position += box.numel
    return found


def _cut(shape: Shape, start: int, stop: int) -> list[tuple[Shape, Shape]]:
    """(offsets, sizes) of the boxes of a range of a contiguous tensor."""
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    if len(shape) == 1:
        return [((start,), (stop - start,))]
    rest = shape[1:]
    inner = math.prod(rest)
    (first, head), (last, tail) = divmod(start, inner), divmod(stop, inner)

    def within(row: int, begin: int, end: int) -> list[tuple[Shape, Shape]]:
        return [((row, *o), (1, *s)) for o, s in _cut(rest, begin, end)]

    if first == last:
        return within(first, head, tail)
    found = []
    if head:
        found += within(first, head, inner)
        first += 1
    if first < last:
        found.append(((first, *(0 for _ in rest)), (last - first, *rest)))
    return found + within(last, 0, tail)
