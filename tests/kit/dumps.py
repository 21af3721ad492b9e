"""Dumps of captured steps, as the backend writes them, without ranks or a process group."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx

from tests.kit.programs import Captured, clone, context_of, optimizer_over, run_passes
from zerofx.capture import substitutes
from zerofx.ir.graph import copied
from zerofx.ir.parameters import ParameterTable
from zerofx.replay.reference import Interpreter, Reference, Updates
from zerofx.report.folder import DumpFolder
from zerofx.report.optimizers import describe
from zerofx.report.write import ProgramDump


@dataclass(frozen=True)
class Watched:
    """One program as it is in memory when its dump is written."""

    name: str
    gm: fx.GraphModule
    table: ParameterTable
    captured: Captured = field(repr=False)

    def run(self, rank: int, exchange: Callable, inputs: list[Any]) -> Any:
        """Run the graph itself with the kernels that dumped programs run with."""
        updates = Updates(self.table, partial(optimizer_over, self.captured))
        reference = Reference(self.table, self.captured.mesh_of(rank), exchange, updates)
        with torch.no_grad():
            return Interpreter(self.gm, self.gm.graph, reference).run(*inputs)


def write_dump(
    captured: Captured,
    folder: Path | str,
    rank: int = 0,
    function: str = "step0_0",
    watched: list[Watched] | None = None,
    stage: int = 3,
    until: str | None = None,
    **options: object,
) -> Path:
    """Dump every program of a captured step; return the folder they are in.

    ``watched`` is given a copy of every program as it is in memory.
    """
    program = clone(captured)
    names = {id(t): info.name for t, info in zip(captured.tensors, program.table, strict=True)}
    described = {h: describe(substitutes.optimizer_of(h), names) for h in captured.optimizers}
    ctx = context_of(program, rank, stage, **options)
    writer = ProgramDump(DumpFolder(folder), function, ctx, described)

    def on_program(name: str, gm: fx.GraphModule, report: Any) -> None:
        writer.write(name, gm, report)
        if watched is not None:
            table = ParameterTable(tuple(map(dataclasses.replace, program.table)))
            copy_of = fx.GraphModule(gm, copied(gm.graph))
            watched.append(Watched(name, copy_of, table, captured))

    passes = {"rank": rank, "stage": stage, "until": until, **options}
    reports = run_passes(program, on_program=on_program, **passes)
    writer.write_summary(list(reports.values()))
    return Path(folder) / f"rank{rank}" / function


def programs_in(folder: Path) -> list[Path]:
    """The dumped programs of one function, in the order of the passes."""
    return sorted(path for path in folder.glob("[0-9][0-9]*_*.py"))
