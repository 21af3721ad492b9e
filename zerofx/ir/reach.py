"""All that one thing leads to, through others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def reached(starts: Iterable[T], onward: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """Yield ``starts`` and all that ``onward`` leads to from them, each once."""
    pending = list(starts)
    found: set[T] = set()
    while pending:
        one = pending.pop()
        if one not in found:
            found.add(one)
            yield one
            pending += onward(one)
