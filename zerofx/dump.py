"""Programs as numbered, readable files: one per pass, and a table of what each pass did."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate
from torch import fx

from zerofx.graph import provenance, served, why_kept
from zerofx.plan import ParameterTable

logger = logging.getLogger("zerofx")


class ProgramDump:
    """Writes ``<folder>/rank<r>/<function>/00_captured.py`` and so on.

    ``figures`` is a line for every program's header: what its plan was made with.  A folder that
    cannot be written to costs the dump, not the training run.
    """

    def __init__(
        self, folder: str, rank: int, function: str, table: ParameterTable, figures: str = ""
    ):
        self.folder = Path(folder) / f"rank{rank}" / function
        self.table = table
        self.figures = figures
        self.number = 0

    def write(self, name: str, gm: fx.GraphModule, report) -> None:
        """Write one program, with the counts of the pass that made it in its first lines."""
        header = f"# {self.number:02d} {name}\n"
        if report is not None:
            counts = ", ".join(f"{what}: {count}" for what, count in report.counts.items())
            header += f"# {counts}\n"
        if self.figures:
            header += f"# {self.figures}\n"
        self._write(f"{self.number:02d}_{name}.py", header + self._body(gm))
        self.number += 1

    def write_kernel(self, name: str, source: str) -> None:
        """Write a kernel that was generated for the program, when it first ran."""
        self._write(name, source)

    def write_summary(self, reports: Sequence, predicted: str = "") -> None:
        rows = [
            (
                report.name,
                report.skipped or ", ".join(f"{k}: {v}" for k, v in report.counts.items()),
                f"{report.seconds * 1e3:.1f}",
            )
            for report in reports
        ]
        table = tabulate(rows, headers=("pass", "what it did", "ms"))
        lines = [table, *([self.figures] if self.figures else [])]
        lines += [f"predicted: {predicted}"] if predicted else []
        self._write("summary.txt", "\n".join(lines) + "\n")

    def _body(self, gm: fx.GraphModule) -> str:
        for node in gm.graph.nodes:
            origin = provenance(node)
            if origin is not None:
                serves = origin.parameter >= 0 or origin.bucket >= 0
                what = f" {served(node, self.table)}" if serves else ""
                why = f": {origin.reason}" if origin.reason else ""
                node.meta["custom_comment"] = f"{origin.role}{what} ({origin.inserted_by}{why})"
        body = gm.print_readable(print_output=False, include_device=True)
        return body + self._origins(gm) + self._kept(gm)

    def _origins(self, gm: fx.GraphModule) -> str:
        lines = ["", "# Inserted by zerofx:"]
        for node in gm.graph.nodes:
            if (comment := node.meta.pop("custom_comment", None)) is not None:
                lines.append(f"#   {node.name}: {comment}")
        return "\n".join(lines) + "\n"

    def _kept(self, gm: fx.GraphModule) -> str:
        lines = [f"#   {node.name}: {why}" for node in gm.graph.nodes if (why := why_kept(node))]
        return "\n".join(["", "# Kept from forward to backward:", *lines, ""]) if lines else ""

    def _write(self, name: str, text: str) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(text, encoding="utf-8")
        except OSError as error:
            logger.warning("zerofx cannot write %s: %s", self.folder / name, error)
