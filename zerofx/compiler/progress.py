"""A bar on the terminal while a step's regions compile, if tqdm is there to draw it."""

from __future__ import annotations

import contextlib
import sys

from torch import nn

from zerofx.lower import regions

DELAY_S = 3.0
"""The time after which a bar is shown."""


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
