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

    Rank 0 alone shows it, on a terminal alone.
    """
    regions = [child for child in program.children() if isinstance(child, CompiledRegion)]
    bar = _bar(len(regions), name) if regions and rank == 0 else None
    if bar is None:
        yield
        return

    def count(*_: Any) -> None:
        bar.update()  # a hook's result, unless it is None, would stand for the region's

    hooks = [region.register_forward_hook(count) for region in regions]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        bar.close()


def _bar(total: int, name: str) -> Any:
    """The bar; None where nobody would see it, or tqdm is not installed: it is an extra."""
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(
        total=total,
        desc=f"zerofx compiles {name}",
        unit="region",
        delay=DELAY_S,
        leave=False,
        file=sys.stderr,
    )
