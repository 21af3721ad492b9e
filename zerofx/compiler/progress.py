"""Counts the seconds of a first call by its parts, and shows a bar while regions compile."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

from torch import nn

from zerofx.lower import regions

DELAY_S = 3.0
"""The time after which a bar is shown."""


@contextlib.contextmanager
def counted(seconds: dict[str, float], part: str) -> Iterator[None]:
    """Count the seconds in here for a part of a first call, and for no part around it."""
    begun_s, before_s = time.perf_counter(), sum(seconds.values())
    try:
        yield
    finally:
        within_s = sum(seconds.values()) - before_s
        seconds[part] = seconds.get(part, 0.0) + time.perf_counter() - begun_s - within_s


def compile_with_bar(program: nn.Module, name: str, rank: int) -> None:
    """Compile a program's regions, and show how many are ready.

    Rank 0 alone shows it, on a terminal alone, and if tqdm is installed: it is an extra.
    """
    compiled = regions.compile_regions(program)
    if rank == 0 and sys.stderr is not None and sys.stderr.isatty():
        with contextlib.suppress(ImportError):
            from tqdm import tqdm

            compiled = tqdm(
                compiled,
                total=len(regions.to_compile(program)),
                desc=f"zerofx compiles {name}",
                unit="region",
                delay=DELAY_S,
                leave=False,
                file=sys.stderr,
            )
    for _ in compiled:
        pass
