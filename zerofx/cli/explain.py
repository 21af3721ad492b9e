"""``python -m zerofx explain``: what a dumped step keeps, sends and waits for, in tables."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from zerofx.errors import CommandError


def add_to(subparsers: Any) -> None:
    """Add the command ``explain``."""
    parser = subparsers.add_parser(
        "explain",
        help="say what a dumped step keeps, sends and waits for",
        description="Print what zerofx.explain(step) had said of every dumped function: shards, "
        "memory beside ZeRO's formulas, communication, what limits the step, passes on and off.",
    )
    parser.add_argument(
        "folder", type=Path, help="what the option dump (or ZEROFX_DUMP) names, or a folder in it"
    )
    parser.add_argument("--rank", type=int, default=0, help="whose (default 0)")
    parser.add_argument("--function", help="of this function alone: step0_0")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Print the explanation of each function that has run."""
    from zerofx.report.write import EXPLANATION

    folders = _functions(chosen.folder, chosen.rank)
    if chosen.function is not None:
        known = ", ".join(folder.name for folder in folders)
        folders = [folder for folder in folders if folder.name == chosen.function]
        if not folders:
            raise CommandError(f"there is no function {chosen.function!r}; there is {known}")
    for position, folder in enumerate(folders):
        path = folder / EXPLANATION
        if position:
            print()
        if path.is_file():
            print(path.read_text(encoding="utf-8"), end="")
        else:
            print(f"{folder.name} has no {EXPLANATION}: it was compiled, and has not run once.")
    return 0


def _functions(folder: Path, rank: int) -> list[Path]:
    """The folders of one rank's functions, in the order in which they were compiled.

    Raises: CommandError if there are none.
    """
    if not folder.is_dir():
        what = "is no folder" if folder.exists() else "does not exist"
        raise CommandError(f"{folder} {what}: give the folder that was dumped to.")
    for found in ([folder], sorted((folder / f"rank{rank}").glob("*")), sorted(folder.glob("*"))):
        functions = [path for path in found if path.is_dir() and any(path.glob("00_captured.py"))]
        if functions:
            return sorted(functions, key=_order)
    ranks = ", ".join(sorted(path.name for path in folder.glob("rank*")))
    raise CommandError(
        f"{folder} holds no dump of rank {rank}; it holds {ranks or 'no ranks'}. Run the training "
        "with ZEROFX_DUMP set to a folder, and give that."
    )


def _order(folder: Path) -> tuple[int, int, str]:
    """``step10_0`` is behind ``step2_1``: the how manieth function, and of its programs."""
    numbers = re.search(r"(\d+)_(\d+)$", folder.name)
    function, program = map(int, numbers.groups()) if numbers else (0, 0)
    return function, program, folder.name
