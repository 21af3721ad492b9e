"""``python -m zerofx diff``: what changed between two dumped programs, by parameter."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from zerofx.cli.compare import Change, Difference, Move, compare
from zerofx.errors import CommandError
from zerofx.report.python_text import quoted_name
from zerofx.report.read import DumpedProgram, read
from zerofx.report.statements import Statement, statements
from zerofx.report.write import REJECTED

_SHOWN = 4
"""Names of one kind that are listed; --full lists all."""


def add_to(subparsers: Any) -> None:
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
    parser.add_argument("--full", action="store_true", help="show every statement")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    paths = _paths(chosen)
    before, after = (read(path) for path in paths)
    for line in report(before, after, chosen.full):
        print(line)
    return 0


def report(before: DumpedProgram, after: DumpedProgram, full: bool = False) -> Iterable[str]:
    """What changed, line by line."""
    was, now = statements(before), statements(after)
    difference = compare(was, now)
    yield f"--- {before.path}"
    yield f"+++ {after.path}"
    yield ""
    yield from _costs(before, after)
    moved = sum(len(move.statements) for move in difference.moved)
    yield (
        f"{len(difference.inserted)} inserted, {len(difference.removed)} removed, {moved} moved, "
        f"{len(difference.changed)} changed, {difference.unchanged} as they were"
    )
    groups = _Groups(before, after)
    groups.add(difference, full)
    for title, lines in groups.ordered():
        yield ""
        yield title
        yield from (f"  {line}" for line in lines)


class _Groups:
    """Lines by what they are about: a bucket, a parameter, or a module of the user's."""

    def __init__(self, *programs: DumpedProgram):
        self._bucket_of: dict[str, int] = {}
        members: dict[int, list[str]] = {}
        for program in programs:
            members = {}
            for name, of in program.facts["PARAMETERS"].items():
                if "place" in of:
                    members.setdefault(of["place"][0], []).append(quoted_name(name))
                    self._bucket_of[quoted_name(name)] = of["place"][0]
        self._members = members
        self._lines: dict[str, list[str]] = {}
        self._programs = programs
        self._after = programs[-1]

    def add(self, difference: Difference, full: bool) -> None:
        for sign, found in (("-", difference.removed), ("+", difference.inserted)):
            self._add_statements(sign, found, full)
        for move in difference.moved:
            self._line(self._title(move.statements[0]), _moved(move, full))
        self._add_changes(difference.changed, full)

    def _add_statements(self, sign: str, found: Sequence[Statement], full: bool) -> None:
        kinds: dict[tuple[str, str, str, str], list[Statement]] = {}
        for statement in found:
            kind = "" if full else statement.role or statement.operator
            key = (self._title(statement), statement.by, kind, statement.name if full else "")
            kinds.setdefault(key, []).append(statement)
        for (title, by, kind, _), members in kinds.items():
            why = next((statement.why for statement in members if statement.why), "")
            note = "; ".join(part for part in (by, why) if part)
            note = f"  ({note})" if note else ""
            if full:
                self._line(title, f"{sign} {members[0].name} = {members[0].call}{note}")
            else:
                self._line(title, f"{sign} {kind}: {_listed(members)}{note}")

    def _add_changes(self, changed: Sequence[Change], full: bool) -> None:
        alike: dict[tuple[str, tuple[tuple[str, str], ...]], list[Statement]] = {}
        for change in changed:
            title = self._title(change.after)
            if change.replaced and not full:
                key = (title, tuple(sorted(change.replaced.items())))
                alike.setdefault(key, []).append(change.after)
            elif change.before.role == "input":
                was, now = change.before.value, change.after.value
                self._line(title, f"~ input {change.after.name}: {was} -> {now}")
            else:
                self._line(title, f"~ {change.after.name}")
                for sign, one in (("-", change.before), ("+", change.after)):
                    self._line(title, f"    {sign} {_shortened(one.call, full)}  {one.value}")
        for (title, replaced), readers in alike.items():
            instead = ", ".join(f"{new} instead of {old}" for old, new in replaced)
            verb = "reads" if len(readers) == 1 else "read"
            self._line(title, f"~ {_listed(readers)} {verb} {instead}")

    def _title(self, statement: Statement) -> str:
        bucket = statement.bucket
        if bucket < 0 and statement.names in self._bucket_of:
            bucket = self._bucket_of[statement.names]
        if bucket >= 0:
            return f"bucket {bucket} ({', '.join(self._members.get(bucket, [])) or '?'})"
        if statement.names:
            return statement.names
        if statement.role == "input":
            return self._title_of_input(statement)
        if statement.gradient_of:
            return statement.gradient_of
        if statement.module:
            return f"in {statement.module}"
        return self._title_of_operand(statement)

    def _title_of_operand(self, statement: Statement) -> str:
        """For what is of no module: the parameter that it marks or writes to, or the line."""
        name = self._marked(statement.call)
        writes = statement.operator.endswith("copy_.default") and statement.reads
        for program in self._programs if writes and not name else ():
            of = program.facts["INPUTS"].get(statement.reads[0], {})
            name = name or (quoted_name(of["parameter"]) if "parameter" in of else "")
        if name:
            return self._title(Statement(statement.name, "", "", names=name))
        if not statement.place:
            return "elsewhere"
        return f"at {short_source(statement.place)}"

    def _marked(self, call: str) -> str:
        match = re.search(r"\bparameter=(\d+)", call)
        names = list(self._after.facts["PARAMETERS"]) if match else []
        return quoted_name(names[int(match[1])]) if match and int(match[1]) < len(names) else ""

    def _title_of_input(self, statement: Statement) -> str:
        of = self._after.facts["INPUTS"].get(statement.name, {})
        name = quoted_name(of["parameter"]) if "parameter" in of else ""
        if not name:
            return "inputs"
        return self._title(Statement(statement.name, "", "", names=name))

    def _line(self, title: str, line: str) -> None:
        self._lines.setdefault(title, []).append(line)

    def ordered(self) -> list[tuple[str, list[str]]]:
        """Buckets and parameters as the program lists them, then modules, then the rest."""
        names = [quoted_name(name) for name in self._after.facts["PARAMETERS"]]
        place = {name: number for number, name in enumerate(names)}

        def key(item: tuple[str, list[str]]) -> tuple[int, int, str]:
            title = item[0]
            if match := re.match(r"bucket (\d+) \((.*?)[,)]", title):
                return 0, place.get(match[2], len(names)), title
            if title in place:
                return 0, place[title], title
            return 1 + (title.startswith("at ")) + 2 * (title == "elsewhere"), 0, title

        return sorted(self._lines.items(), key=key)


def _moved(move: Move, full: bool) -> str:
    way = "up" if move.by < 0 else "down"
    names = ", ".join(s.name for s in move.statements) if full else _listed(move.statements)
    passed = f"{abs(move.by)} statement{'s' if abs(move.by) != 1 else ''}"
    return (
        f"> {names} moved {way} past {passed}: was before {_landmark(move.was_before)}, is before "
        f"{_landmark(move.is_before)}"
    )


def _landmark(statement: Statement | None) -> str:
    if statement is None:
        return "the end"
    return statement.name if statement.name == "return" else f"{statement.name} ({statement.what})"


def _listed(members: Sequence[Statement]) -> str:
    names = [statement.name for statement in members]
    if len(names) <= _SHOWN:
        return ", ".join(names)
    return f"{', '.join(names[: _SHOWN - 1])} and {len(names) - _SHOWN + 1} more"


def _shortened(call: str, full: bool) -> str:
    return call if full or len(call) <= 120 else f"{call[:117]}..."


_COST = re.compile(r"# (allocated at most|sent|collectives|moved to the \w+) {2,}(.*)$")


def _costs(before: DumpedProgram, after: DumpedProgram) -> list[str]:
    """What of the costs in the two headers differs."""
    costs = []
    for program in (before, after):
        matches = map(_COST.match, program.text[:4000].splitlines())
        costs.append({m[1]: re.split(r" {2,}", m[2])[-1] for m in matches if m})
    was, now = costs
    pairs = [(what, was.get(what, "0 B"), now.get(what, "0 B")) for what in {**was, **now}]
    lines = [f"{what}: {first} -> {second}" for what, first, second in pairs if first != second]
    return [*lines, ""] if lines else []


def _paths(chosen: argparse.Namespace) -> tuple[Path, Path]:
    if len(chosen.what) == 2:
        first, second = map(Path, chosen.what)
        return first, second
    if len(chosen.what) != 3:
        raise CommandError("diff takes a folder and two passes, or two files; see --help")
    folder = _function_folder(Path(chosen.what[0]), chosen.rank, chosen.function)
    first, second = (_program(folder, wanted) for wanted in chosen.what[1:])
    return first, second


def _function_folder(folder: Path, rank: int, function: str | None) -> Path:
    """The folder that holds one function's programs, in or below a dump's."""
    if not folder.is_dir():
        raise CommandError(f"{folder} is no folder")
    if _programs(folder):
        return folder
    ranks = folder / f"rank{rank}"
    if not ranks.is_dir():
        raise CommandError(f"{folder} holds no dump of rank {rank}: there is no {ranks}")
    found = sorted(path for path in ranks.iterdir() if path.is_dir() and _programs(path))
    if function is not None:
        found = [path for path in found if path.name == function]
    if len(found) == 1:
        return found[0]
    names = ", ".join(path.name for path in sorted(ranks.iterdir()) if path.is_dir())
    which = "name one with --function" if function is None else f"{function!r} is none of them"
    raise CommandError(f"{ranks} holds the programs of {names or 'no function'}: {which}")


def _program(folder: Path, wanted: str) -> Path:
    for path in _programs(folder):
        number, name = path.stem.removesuffix(REJECTED).split("_", 1)
        if wanted in (name, path.name, path.stem) or (
            wanted.isdigit() and int(wanted) == int(number)
        ):
            return path
    known = ", ".join(path.stem for path in _programs(folder))
    raise CommandError(f"{folder} has no program {wanted!r}; it has {known}")


def _programs(folder: Path) -> list[Path]:
    pattern = re.compile(rf"\d\d+_\w+({re.escape(REJECTED)})?\.py")
    return sorted(path for path in folder.glob("*.py") if pattern.fullmatch(path.name))


def short_source(source: str) -> str:
    """``train.py:12 loss.backward()``: a line of source with its file's name alone."""
    place = re.match(r".*?:\d+(?=[: ]|$)", source)
    end = place.end() if place else 0
    return f"{source[:end].replace(chr(92), '/').rpartition('/')[2]}{source[end:]}"
