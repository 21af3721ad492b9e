"""``python -m zerofx diff``: what changed between two dumped programs, line by line.

Statements keep their names from pass to pass, so that a diff of lines shows what a pass did.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from difflib import SequenceMatcher, unified_diff
from pathlib import Path
from typing import Any

from zerofx.errors import CommandError
from zerofx.report.read import DumpedProgram, function_folders, read
from zerofx.report.write import REJECTED


def add_to(subparsers: Any) -> None:
    """Add the command ``diff``."""
    parser = subparsers.add_parser(
        "diff",
        help="say what changed between two dumped programs",
        description="Say what changed between two dumped programs: two passes of one step, or any "
        "two files, of two ranks or two runs.",
        usage="%(prog)s [-h] [--full] [--rank N] [--function NAME] (FOLDER PASS PASS | FILE FILE)",
    )
    parser.add_argument(
        "what", nargs="+", help="a dump's folder and two passes by number or name, or two files"
    )
    parser.add_argument("--rank", type=int, default=0, help="whose programs (default 0)")
    parser.add_argument("--function", help="which function's, of several: step0_0")
    parser.add_argument("--full", action="store_true", help="show every line")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Print what changed."""
    before, after = (read(path) for path in _paths(chosen))
    print(*report(before, after, chosen.full), sep="\n")
    return 0


def report(before: DumpedProgram, after: DumpedProgram, full: bool = False) -> Iterator[str]:
    """Count the statements that changed, then yield the lines that did, and some around them.

    What a statement deletes is left out: it follows from the statements behind it.
    """
    yield _counts(_statements(before), _statements(after))
    old, new = (_DELETED.sub("", program.text).splitlines() for program in (before, after))
    names, shown = (str(before.path), str(after.path)), len(old) if full else 3
    yield from unified_diff(old, new, *names, lineterm="", n=shown)


_DELETED = re.compile(r";  del [\w, ]+$", re.M)
_STATEMENT = re.compile(r"^    (?:(\w+): |(return) )(.*)", re.M)


def _statements(program: DumpedProgram) -> dict[str, str]:
    """Return a program's inputs and statements by name, in order."""
    found = _STATEMENT.finditer(_DELETED.sub("", program.function))
    return {match[1] or match[2]: match[3] for match in found}


def _counts(old: dict[str, str], new: dict[str, str]) -> str:
    """Count statements by their names; those count as moved that others have changed places with.

    One that changed and moved counts as both.
    """
    first, second = [name for name in old if name in new], [name for name in new if name in old]
    blocks = SequenceMatcher(None, first, second, autojunk=False).get_matching_blocks()
    stays = {name for block in blocks for name in first[block.a : block.a + block.size]}
    changed = {name for name in first if old[name] != new[name]}
    return (
        f"{len(new) - len(first)} inserted, {len(old) - len(first)} removed, "
        f"{len(first) - len(stays)} moved, {len(changed)} changed, {len(stays - changed)} as they "
        "were"
    )


def _paths(chosen: argparse.Namespace) -> tuple[Path, Path]:
    if len(chosen.what) == 2:
        first, second = map(Path, chosen.what)
        return first, second
    if len(chosen.what) != 3:
        raise CommandError("diff takes a folder and two passes, or two files; see --help")
    found = function_folders(Path(chosen.what[0]), chosen.rank, chosen.function)
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise CommandError(
            f"{chosen.what[0]} holds the programs of {names}: name one with --function"
        )
    first, second = (_program(found[0], wanted) for wanted in chosen.what[1:])
    return first, second


def _program(folder: Path, wanted: str) -> Path:
    pattern = re.compile(rf"\d\d+_\w+({re.escape(REJECTED)})?\.py")
    paths = sorted(path for path in folder.glob("*.py") if pattern.fullmatch(path.name))
    for path in paths:
        number, name = path.stem.removesuffix(REJECTED).split("_", 1)
        if wanted in (name, path.name, path.stem, number, str(int(number))):
            return path
    known = ", ".join(path.stem for path in paths)
    raise CommandError(f"{folder} has no program {wanted!r}; it has {known}")
