"""Reads dumped programs: their facts, their text, and their function to run it."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zerofx.errors import CommandError
from zerofx.ir.mesh import DATA, Mesh
from zerofx.ir.parameters import ParameterInfo, ParameterTable, Place
from zerofx.report.text import FORMAT

_VERSIONS = re.compile(r"# zerofx dump (\d+), torch (\S+), zerofx (\S+)\n")


@dataclass(frozen=True)
class ProgramFacts:
    """A program's ``facts`` by name, as they stand in front of it in its file."""

    facts: Mapping[str, Any]

    @property
    def rank(self) -> int:
        return self.facts["RANK"]

    @property
    def world_size(self) -> int:
        return self.facts["WORLD_SIZE"]

    @property
    def mesh(self) -> Mesh:
        """The ranks' axes."""
        axes = self.facts.get("MESH", ((DATA, self.world_size),))
        return Mesh(axes, self.rank, self.facts.get("OUTER_STAGE", 0))

    def table(self) -> ParameterTable:
        """Return the parameters as the program's passes have laid them out."""
        infos = (
            ParameterInfo(
                index=index,
                name=name,
                shape=of["shape"],
                stride=of["stride"],
                dtype=getattr(torch, of["dtype"]),
                device=torch.device(of["device"]),
                requires_grad=of["requires_grad"],
                world_size=self.mesh.num_shards,
                rank=self.mesh.shard,
                parts=self.mesh.parts,
                assigned=Place(*of["place"]) if "place" in of else None,
            )
            for index, (name, of) in enumerate(self.facts["PARAMETERS"].items())
        )
        return ParameterTable(tuple(infos))


@dataclass(frozen=True)
class DumpedProgram(ProgramFacts):
    """One dumped file; ``function`` is the part of its text that defines ``program``."""

    path: Path
    torch_version: str
    text: str
    function: str

    @property
    def title(self) -> str:
        return self.path.name.split(".")[0].replace("_", " ", 1)

    def namespace(self) -> dict[str, Any]:
        """Execute the file, and return its names; the function ``program`` is defined, not run.

        Raises: CommandError if it is no Python any more, or its constants are gone.
        """
        names: dict[str, Any] = {"__name__": "zerofx_program", "__file__": str(self.path)}
        try:
            exec(compile(self.text, str(self.path), "exec"), names)
        except SyntaxError as error:
            raise CommandError(f"{self.path}, line {error.lineno}: {error.msg}") from error
        except FileNotFoundError as error:
            raise CommandError(f"{self.path} needs {error.filename}, which is not there") from error
        return names


def read(path: str | Path) -> DumpedProgram:
    """Read a dumped program.

    Raises: CommandError if it is none, or of a version that this one does not read; OSError if it
    is not there.
    """
    path = Path(path)
    if path.is_dir():
        raise CommandError(f"{path} is a folder; name one of the programs in it")
    text = path.read_text(encoding="utf-8", errors="replace")
    versions = _VERSIONS.match(text)
    if versions is None:
        raise CommandError(f"{path} is no program that zerofx has dumped")
    if int(versions[1]) != FORMAT:
        raise CommandError(
            f"{path} is a dump of format {versions[1]}, written by zerofx {versions[3]}; this one "
            f"reads format {FORMAT}. Use that zerofx, or dump the step again."
        )
    head, start, tail = text.partition("\ndef program(\n")
    function = (start + tail).strip().partition("\nif __name__")[0]
    try:
        facts = _literals(head)
    except SyntaxError:
        facts = {}
    if "OBSTACLES" not in facts or "\n    return" not in function:  # the last of each
        raise CommandError(f"{path} is not whole: dump the step again")
    return DumpedProgram(facts, path, versions[2], text, function)


def function_folders(folder: Path, rank: int, function: str | None = None) -> list[Path]:
    """Find one rank's functions in a dump, in the order in which they were compiled.

    ``folder`` may also be the rank's, or one function's; ``function`` asks for one by name.

    Raises: CommandError if there are none.
    """
    if not folder.is_dir():
        what = "is no folder" if folder.exists() else "does not exist"
        raise CommandError(f"{folder} {what}: give the folder that was dumped to.")
    for found in ([folder], sorted((folder / f"rank{rank}").glob("*")), sorted(folder.glob("*"))):
        functions = [path for path in found if path.is_dir() and any(path.glob("00_captured.py"))]
        if functions:
            functions.sort(key=_order)
            wanted = [path for path in functions if function in (None, path.name)]
            if not wanted:
                known = ", ".join(path.name for path in functions)
                raise CommandError(f"there is no function {function!r}; there is {known}")
            return wanted
    ranks = ", ".join(sorted(path.name for path in folder.glob("rank*")))
    raise CommandError(
        f"{folder} holds no dump of rank {rank}; it holds {ranks or 'no ranks'}. Run the training "
        "with ZEROFX_DUMP set to a folder, and give that."
    )


def _order(folder: Path) -> tuple[int, int, str]:
    """Order by function and program: ``step10_0`` is behind ``step2_1``."""
    numbers = re.search(r"(\d+)_(\d+)$", folder.name)
    function, program = map(int, numbers.groups()) if numbers else (0, 0)
    return function, program, folder.name


def _literals(text: str) -> dict[str, Any]:
    """Return the constants that are literals, by name; others are for the program alone."""
    found = {}
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            with contextlib.suppress(ValueError):
                found[statement.targets[0].id] = ast.literal_eval(statement.value)
    return found
