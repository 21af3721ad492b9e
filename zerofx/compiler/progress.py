"""A bar on the terminal while a step's regions compile, if tqdm is there to draw it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from zerofx.lower.regions import CompiledRegion

DELAY_S = 3.0
"""The time after which a bar is shown."""


@contextlib.contextmanager
def progress(program: nn.Module, name: str, rank: int) -> Iterator[None]:
    """Show how many of a program's compiled regions have run, in the call that compiles them.

    Rank 0 alone shows it, on a terminal alone, and if tqdm is installed: it is an extra.
    """
    regions = [child for child in program.children() if isinstance(child, CompiledRegion)]
    is_seen = sys.stderr is not None and sys.stderr.isatty()
    with contextlib.ExitStack() as ending:
        if rank == 0 and regions and is_seen:
            with contextlib.suppress(ImportError):
                from tqdm import tqdm

                bar = tqdm(
                    total=len(regions),
                    desc=f"zerofx compiles {name}",
                    unit="region",
                    delay=DELAY_S,
                    leave=False,
                    file=sys.stderr,
                )
                ending.callback(bar.close)

                def count(*_: Any) -> None:
                    bar.update()  # a hook's result, unless it is None, would stand for the region's

                for region in regions:
                    ending.callback(region.register_forward_hook(count).remove)
        yield
