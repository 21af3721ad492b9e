"""Python's garbage collection, and when it only costs time."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Stop Python's garbage collection while many objects are made that stay.

    They make Python look through all objects there are, and it finds little.  A call that compiles
    makes nodes, and most of what made them is gone by itself when it ends (of 24 layers it takes a
    sixth less time without, and 20 MB more); the plan of a save has an object for every part of
    every tensor, on rank 0 for those of all ranks (0.3 s).
    """
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()


@contextlib.contextmanager
def collecting_once() -> Iterator[None]:
    """Stop it too, and have it look at the end through what it has not looked through yet.

    Predicting a program makes graphs to drop, beside all those that are kept: looking through
    these again and again is a fifth of the time that a plan of Llama 8B takes.
    """
    with without_collections():
        yield
    gc.collect(1)
