"""The protocol of a pass: what it is given, what it declares, what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import fx

from zerofx.options import Options
from zerofx.plan import ParameterTable

Counts = Mapping[str, int]


@dataclass(frozen=True)
class PassContext:
    """Facts a pass may use; no process group, environment or clock.

    ``num_backwards`` is how many times the step calls backward.
    """

    options: Options
    table: ParameterTable
    rank: int
    world_size: int
    num_backwards: int = 1


@dataclass(frozen=True)
class Pass:
    """A rewrite of the program in place: ``run(gm, ctx) -> counts``.

    ``requires`` and ``provides`` are facts about the program, checked over the pipeline.
    An ``optional`` pass is switched by the option of its name.  One that
    ``preserves_numerics`` leaves every result bitwise the same at two ranks.
    """

    name: str
    run: Callable[[fx.GraphModule, PassContext], Counts]
    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset()
    optional: bool = False
    preserves_numerics: bool = True
    smallest_stage: int = 0
