"""Reads dumped programs: their facts without running anything, and their function to run it."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zerofx.errors import CommandError
from zerofx.ir.parameters import ParameterInfo, ParameterTable, Place
from zerofx.report.text import FORMAT

_VERSIONS = re.compile(r"# zerofx dump (\d+), torch (\S+), zerofx (\S+)$")
_TITLE = re.compile(r"# (\d+) (\w+), rank \d+ of \d+, stage \d$")


@dataclass(frozen=True)
class DumpedProgram:
    """One dumped file: its text, and the facts in front of its function ``program``.

    ``facts`` are its literals by name, ``lines`` those from ``def program(`` on.
    """

    path: Path
    torch_version: str
    title: str
    facts: Mapping[str, Any]
    text: str
    lines: tuple[str, ...]

    @property
    def rank(self) -> int:
        return self.facts["RANK"]

    @property
    def world_size(self) -> int:
        return self.facts["WORLD_SIZE"]

    def table(self) -> ParameterTable:
        """The parameters as the program's passes have laid them out."""
        return ParameterTable(
            tuple(
                ParameterInfo(
                    index=index,
                    name=name,
                    shape=of["shape"],
                    stride=of["stride"],
                    dtype=getattr(torch, of["dtype"]),
                    device=torch.device(of["device"]),
                    requires_grad=of["requires_grad"],
                    world_size=self.world_size,
                    rank=self.rank,
                    assigned=Place(*of["place"]) if "place" in of else None,
                )
                for index, (name, of) in enumerate(self.facts["PARAMETERS"].items())
            )
        )

    def namespace(self) -> dict[str, Any]:
        """Execute the file, and return its names: ``program``, which nobody has called yet.

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
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        text = ""
    lines = text.splitlines()
    versions = _VERSIONS.match(lines[0]) if lines else None
    if versions is None:
        raise CommandError(f"{path} is no program that zerofx has dumped")
    if int(versions[1]) != FORMAT:
        raise CommandError(
            f"{path} is a dump of format {versions[1]}, written by zerofx {versions[3]}; this one "
            f"reads format {FORMAT}. Use that zerofx, or dump the step again."
        )
    title = _TITLE.match(lines[1]) if len(lines) > 1 else None
    if title is None:
        raise CommandError(f"{path} is not whole: dump the step again")
    return parsed(path, text, versions[2], f"{title[1]} {title[2]}")


def parsed(path: Path, text: str, torch_version: str, title: str) -> DumpedProgram:
    """What ``text`` says of a program.  Raises: CommandError if it is not whole."""
    lines = text.splitlines()
    try:
        start = lines.index("def program(")
        facts = _literals("\n".join(lines[:start]))
    except (ValueError, SyntaxError):
        start, facts = 0, {}
    if missing(facts) or not any(line.startswith("    return") for line in lines[start:]):
        raise CommandError(f"{path} is not whole: dump the step again")
    return DumpedProgram(path, torch_version, title, facts, text, tuple(lines[start:]))


def missing(facts: Mapping[str, Any]) -> set[str]:
    """The facts that every dump has, and this one has not."""
    needed = {"RANK", "WORLD_SIZE", "STAGE", "PARAMETERS", "OPTIMIZERS", "INPUTS", "GRADIENTS"}
    return (needed | {"SHARDED_RESULTS", "OBSTACLES"}) - facts.keys()


def _literals(text: str) -> dict[str, Any]:
    """Constants that are literals, by name; what is none is for the program alone."""
    found = {}
    for statement in ast.parse(text).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                try:
                    found[name] = ast.literal_eval(value)
                except ValueError:
                    continue
    return found
