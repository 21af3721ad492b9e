"""The states of random number generators, as plain data."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def rng_state() -> dict[str, Any]:
    """The states of torch's, Python's and numpy's global generators in this process.

    Of a CUDA device the current one's, if this process uses any; numpy's if it is imported.
    """
    state: dict[str, Any] = {"cpu": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *others = numpy.random.get_state()
        state["numpy"] = (name, keys.tolist(), *others)
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Have the generators go on from what ``rng_state`` has returned."""
    torch.set_rng_state(state["cpu"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    numpy = sys.modules.get("numpy")
    if "numpy" in state and numpy is not None:
        name, keys, *others = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *others))
