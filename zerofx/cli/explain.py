"""``python -m zerofx explain``: what a dumped step keeps, sends and waits for, in tables."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from zerofx.report.read import function_folders
from zerofx.report.write import EXPLANATION


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
    folders = function_folders(chosen.folder, chosen.rank, chosen.function)
    for position, folder in enumerate(folders):
        path = folder / EXPLANATION
        if position:
            print()
        if path.is_file():
            print(path.read_text(encoding="utf-8"), end="")
        else:
            print(f"{folder.name} has no {EXPLANATION}: it was compiled, and has not run once.")
    return 0
