"""Programs as numbered, readable files: one per pass, and a table of what each pass did."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import fx

from zerofx import compat
from zerofx.cost.program import live_bytes
from zerofx.cost.traffic import moved_bytes, size_text, wire_bytes
from zerofx.passes.base import PassContext
from zerofx.report.folder import DumpFolder
from zerofx.report.python_text import one_line
from zerofx.report.text import CONSTANTS_FILE, FORMAT, ProgramText
from zerofx.report.timeline import SUFFIX, StateBytes, text_of, trace_of
from zerofx.versions import __version__

EXPLANATION = "explain.txt"
"""The file of ``explain``, beside a program that has run."""

REJECTED = ".rejected"
"""Ends the name of a program that has broken a rule: ``06_bucket.rejected.py``."""

Costs = Mapping[str, str]
"""What a program costs one rank in one step, as its header says it."""


class ProgramDump:
    """Writes ``<folder>/rank<r>/<function>/00_captured.py`` and so on.

    ``optimizers`` are described by handle.  Programs also go to torch's structured trace, if there
    is one; without a ``folder`` they go there alone.  Only ``summary.txt`` has seconds: the same
    step gives the same files again, on every rank.
    """

    def __init__(
        self,
        folder: DumpFolder | None,
        function: str,
        ctx: PassContext,
        optimizers: Mapping[int, Mapping[str, Any]],
    ):
        self.folder, self.ctx, self.optimizers = folder, ctx, optimizers
        self.name = f"rank{ctx.rank}/{file_name(function)}"
        self.hardware = f"hardware: {ctx.figures} ({ctx.figures.source})"
        self.constants: dict[str, torch.Tensor] = {}
        self._num_saved = 0  # of them
        self.costs: list[tuple[str, Costs]] = []

    def write(self, name: str, gm: fx.GraphModule, report) -> Path | None:
        """Write one program; its first lines say what the pass that made it did.

        Return its path, if it is in a file.
        """
        number = len(self.costs)
        self.costs.append((name, self._costs_of(gm)))
        header = self._header(number, name, report)
        return self._write_program(f"{number:02d}_{name}", header, self._text(gm))

    def write_rejected(self, name: str, gm: fx.GraphModule, error: Exception) -> Path | None:
        """Write what is there when an error ends a pass, without costs.

        It may not be a whole program; the file then lists the graph's nodes as comments.
        """
        number = len(self.costs)
        lines = [*self._first_lines(number, name), f"rejected: {one_line(str(error))}"]
        try:
            text = self._text(gm)
        except Exception as broken:  # anything may be broken in it
            lines += [f"No program can be made of it: {type(broken).__name__}: {broken}", ""]
            lines += str(gm.graph).splitlines()
            text = ""
        return self._write_program(f"{number:02d}_{name}{REJECTED}", lines, text)

    def write_minimal(self, before: fx.GraphModule, after: fx.GraphModule) -> str:
        """Write the parts of two programs that differ; return a sentence that says where."""
        for name, gm in (("minimal_before", before), ("minimal_after", after)):
            lines = self._first_lines(len(self.costs) - 1, name)
            lines.append(f"Run it: python -m zerofx run {name}.py --random")
            self._write_program(name, lines, self._text(gm))
        where = f" in {self.folder.path / self.name}" if self.folder is not None else ""
        return f"The least that shows it is minimal_before.py and minimal_after.py{where}."

    def _text(self, gm: fx.GraphModule) -> str:
        return ProgramText(gm, self.ctx.table, self.optimizers, self.constants).file()

    def _write_program(self, stem: str, lines: Sequence[str], text: str) -> Path | None:
        """Write a program below its first lines and the facts that running it needs."""
        ctx = self.ctx
        facts: dict[str, object] = {
            "RANK": ctx.rank,
            "WORLD_SIZE": ctx.world_size,
            "STAGE": ctx.options.stage,
        }
        facts |= ctx.mesh.facts
        comments = (f"# {line}".rstrip() for line in lines)
        head = [*comments, "", *(f"{fact} = {value}" for fact, value in facts.items())]
        content = "\n".join([*head, "", text])
        path = self.write_file(f"{stem}.py", content)
        if len(self.constants) > self._num_saved:
            buffer = io.BytesIO()
            with compat.tensors.real_tensors():
                torch.save({name: its.cpu() for name, its in self.constants.items()}, buffer)
            self.write_file(CONSTANTS_FILE, buffer.getvalue())
            self._num_saved = len(self.constants)
        compat.aot.trace_program(f"zerofx_{stem}", lambda: content)
        return path

    def write_timeline(self, gm: fx.GraphModule, state_bytes: StateBytes) -> None:
        """Write the predicted step of the program that was written last, as a trace.

        ``state_bytes`` is as in ``trace_of``.
        """
        if self.folder is None or not self.folder.works:
            return
        program = f"{len(self.costs) - 1:02d}_{self.costs[-1][0]}"
        function = self.name.rpartition("/")[2]
        title = f"{function}: {program}, rank {self.ctx.rank} of {self.ctx.world_size}"
        trace = trace_of(gm.graph, self.ctx, title=title, state_bytes=state_bytes)
        self.write_file(f"{program}{SUFFIX}", text_of(trace))

    def write_summary(self, reports: Sequence, predicted: str = "") -> None:
        """Write a table of the passes: what each did, its seconds, and the costs around it."""
        names, costs = zip(*self.costs, strict=True)
        rows: list[tuple[str, ...]] = [("00", names[0], *_shown(None, costs[0]), "")]
        for report in reports:
            if report.skipped:
                rows.append(("", report.name, *[""] * 4, "", f"off: {report.skipped}"))
                continue
            number = names.index(report.name)
            shown = _shown(costs[number - 1], costs[number])
            seconds, counts = f"{report.seconds:.4f}", _counts(report.counts)
            rows.append((f"{number:02d}", report.name, *shown, seconds, counts))
        headers = ("", "pass", "collectives", "sent", "peak before", "after", "seconds", "")
        lines = [tabulate(rows, headers=headers, disable_numparse=True), ""]
        lines += [f"{'sent':12} per rank and step", f"{'peak':12} {_PEAK}", self.hardware]
        lines += [f"predicted: {predicted}"] if predicted else []
        text = "\n".join(lines) + "\n"
        self.write_file("summary.txt", text)
        compat.aot.trace_program("zerofx_summary", lambda: text)

    def _costs_of(self, gm: fx.GraphModule) -> Costs:
        wire, moved = wire_bytes(gm, self.ctx.world_size), moved_bytes(gm)
        alive = live_bytes(gm.graph, self.ctx.world_size, table=self.ctx.table, hinted=True)
        return {
            "allocated at most": size_text(max(alive, default=0)),
            "sent": size_text(wire.total),
            "collectives": str(wire.num_collectives),
            "moved to the host": size_text(moved.to_host),
            "moved to the device": size_text(moved.to_device),
        }

    def _header(self, number: int, name: str, report) -> list[str]:
        costs = [of for _, of in self.costs[max(number - 1, 0) :]]
        lines = self._first_lines(number, name)
        if report is not None:
            lines.append(_counts(report.counts))
        rows = [
            (what, *(of[what] for of in costs))
            for what in costs[0]
            if not what.startswith("moved") or any(of[what] != "0 B" for of in costs)
        ]
        headers = ("per rank and step", *(("before", "after") if number else ("",)))
        table = tabulate(rows, headers=headers, tablefmt="plain", disable_numparse=True)
        lines += ["", *table.splitlines(), "", self.hardware]
        return [*lines, f"Run it again: python -m zerofx run {number:02d}_{name}.py --random"]

    def _first_lines(self, number: int, name: str) -> list[str]:
        ctx = self.ctx
        return [
            f"zerofx dump {FORMAT}, torch {torch.__version__}, zerofx {__version__}",
            f"{number:02d} {name}, rank {ctx.rank} of {ctx.world_size}, stage {ctx.options.stage}",
        ]

    def write_file(self, name: str, content: str | bytes) -> Path | None:
        """Write one file beside the programs; return its path, if it could be written."""
        if self.folder is None:
            return None
        return self.folder.write(f"{self.name}/{name}", content)


_PEAK = "allocated on the device at most, beside parameters, states and the batch"


def file_name(function: str) -> str:
    """Return a folder's name for a function: in any alphabet, without characters that paths use."""
    return re.sub(r"[^\w.-]", "_", function).lstrip(".")


def _shown(before: Costs | None, after: Costs) -> tuple[str, ...]:
    was = before["allocated at most"] if before else ""
    return (after["collectives"], after["sent"], was, after["allocated at most"])


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{what}: {count}" for what, count in counts.items())
