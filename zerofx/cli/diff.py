"""``python -m zerofx diff``: what changed between two dumped programs, by parameter.

Statements are known by their names, which passes keep.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from zerofx.errors import CommandError
from zerofx.report.python_text import quoted_name
from zerofx.report.read import WORD, DumpedProgram, Statement, function_folders, read, statements
from zerofx.report.write import REJECTED

_SHOWN = 4
"""Without --full, at most so many names of one kind are listed."""


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
    parser.add_argument("--full", action="store_true", help="show every statement")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Print what changed."""
    before, after = (read(path) for path in _paths(chosen))
    for line in report(before, after, chosen.full):
        print(line)
    return 0


@dataclass(frozen=True)
class Difference:
    """The statements that differ between two programs; ``unchanged`` counts all others.

    ``moved`` are statements in another order, as ``difflib`` matches names, by the name of the next
    statement that stays; ``changed`` are those that read or call something else, or have another
    shape.
    """

    inserted: list[Statement]
    removed: list[Statement]
    moved: list[tuple[Statement, str]]
    changed: list[tuple[Statement, Statement]]
    unchanged: int


def compare(before: Sequence[Statement], after: Sequence[Statement]) -> Difference:
    """Compare two programs by the names of their statements."""
    old, new = ({one.name: one for one in of} for of in (before, after))
    first, second = [n for n in old if n in new], [n for n in new if n in old]
    blocks = SequenceMatcher(None, first, second, autojunk=False).get_matching_blocks()
    stays = {second[at] for block in blocks for at in range(block.b, block.b + block.size)}
    moved, coming = [], "the end"
    for statement in reversed(after):
        if statement.name in stays:
            coming = statement.name
        elif statement.name in old:
            moved.append((statement, coming))
    pairs = [(old[name], new[name]) for name in second]
    changed = [(a, b) for a, b in pairs if (a.call, a.value) != (b.call, b.value)]
    touched = {one.name for one, _ in moved} | {one.name for one, _ in changed}
    return Difference(
        inserted=[statement for statement in after if statement.name not in old],
        removed=[statement for statement in before if statement.name not in new],
        moved=moved[::-1],
        changed=changed,
        unchanged=len(pairs) - len(touched),
    )


def report(before: DumpedProgram, after: DumpedProgram, full: bool = False) -> Iterable[str]:
    """Say what changed, line by line."""
    found = compare(statements(before), statements(after))
    yield from (f"--- {before.path}", f"+++ {after.path}", "", *_costs(before, after))
    yield (
        f"{len(found.inserted)} inserted, {len(found.removed)} removed, {len(found.moved)} moved, "
        f"{len(found.changed)} changed, {found.unchanged} as they were"
    )
    groups = _Groups((before, after), found, full)
    for title in groups.ordered():
        yield from ("", title, *(f"  {line}" for line in groups.lines[title]))


class _Groups:
    """Groups lines by their subject: a bucket, a parameter, a module or line of the user's."""

    def __init__(
        self, programs: tuple[DumpedProgram, DumpedProgram], found: Difference, full: bool
    ):
        self.facts = [program.facts for program in programs]
        self.names = [quoted_name(name) for name in self.facts[1]["PARAMETERS"]]
        self.bucket_of: dict[str, int] = {}
        for facts in self.facts:  # the later program's are those to show
            for name, of in facts["PARAMETERS"].items():
                if "place" in of:
                    self.bucket_of[quoted_name(name)] = of["place"][0]
        self.full = full
        self.lines: dict[str, list[str]] = {}
        self._add_statements("-", found.removed)
        self._add_statements("+", found.inserted)
        self._add_moved(found.moved)
        self._add_changed(found.changed)

    def _add_statements(self, sign: str, found: Sequence[Statement]) -> None:
        kinds: dict[tuple[str, str, str], list[Statement]] = {}
        for one in found:
            kind = f"{one.name} = {one.call}" if self.full else one.role or one.operator
            kinds.setdefault((self._title(one), one.by, kind), []).append(one)
        for (title, by, kind), members in kinds.items():
            why = next((one.why for one in members if one.why), "")
            note = "; ".join(filter(None, (by, why)))
            what = kind if self.full else f"{kind}: {self._listed(members)}"
            self._line(title, f"{sign} {what}{f'  ({note})' if note else ''}")

    def _add_moved(self, moved: Sequence[tuple[Statement, str]]) -> None:
        together: dict[tuple[str, str], list[Statement]] = {}
        for one, coming in moved:
            together.setdefault((self._title(one), coming), []).append(one)
        for (title, coming), members in together.items():
            self._line(title, f"> {self._listed(members)} moved: now before {coming}")

    def _add_changed(self, changed: Sequence[tuple[Statement, Statement]]) -> None:
        alike: dict[tuple[str, str], list[Statement]] = {}
        for old, new in changed:
            title, replaced = self._title(new), _replaced(old, new)
            if replaced and not self.full:
                instead = ", ".join(f"{now} instead of {was}" for was, now in replaced.items())
                alike.setdefault((title, instead), []).append(new)
            elif old.role == "input":
                self._line(title, f"~ input {new.name}: {old.value} -> {new.value}")
            else:
                self._line(title, f"~ {new.name}")
                for sign, one in (("-", old), ("+", new)):
                    long = len(one.call) > 120 and not self.full
                    call = f"{one.call[:117]}..." if long else one.call
                    self._line(title, f"    {sign} {call}  {one.value}")
        for (title, instead), readers in alike.items():
            verb = "reads" if len(readers) == 1 else "read"
            self._line(title, f"~ {self._listed(readers)} {verb} {instead}")

    def _title(self, statement: Statement) -> str:
        """``bucket 2 (a, b)``, a parameter, a module or a line: what a statement is about."""
        names = statement.names or self._parameter_of(statement)
        bucket = statement.bucket if statement.bucket >= 0 else self.bucket_of.get(names, -1)
        if bucket >= 0:
            members = [name for name in self.names if self.bucket_of.get(name) == bucket]
            return f"bucket {bucket} ({', '.join(members) or '?'})"
        if names or statement.role == "input":
            return names or "inputs"
        if statement.gradient_of or statement.module:
            return statement.gradient_of or f"in {statement.module}"
        return f"at {short_place(statement.place)}" if statement.place else "elsewhere"

    def _parameter_of(self, statement: Statement) -> str:
        """Name the parameter that an input is, or that a statement of no module marks or writes."""
        if statement.role == "input":
            return self._parameter_of_input(statement.name)
        if statement.role or statement.gradient_of or statement.module:
            return ""
        if marked := re.search(r"\bparameter=(\d+)", statement.call):
            return dict(enumerate(self.names)).get(int(marked[1]), "")
        writes = statement.operator.endswith("copy_.default") and statement.reads
        return self._parameter_of_input(statement.reads[0]) if writes else ""

    def _parameter_of_input(self, name: str) -> str:
        found = [facts["INPUTS"].get(name, {}).get("parameter") for facts in self.facts]
        return next((quoted_name(parameter) for parameter in found if parameter), "")

    def _listed(self, members: Sequence[Statement]) -> str:
        names = [statement.name for statement in members]
        if self.full or len(names) <= _SHOWN:
            return ", ".join(names)
        return f"{', '.join(names[: _SHOWN - 1])} and {len(names) - _SHOWN + 1} more"

    def _line(self, title: str, line: str) -> None:
        self.lines.setdefault(title, []).append(line)

    def ordered(self) -> list[str]:
        """Order titles: buckets and parameters as in the program, then modules, then the rest."""
        place = {name: number for number, name in enumerate(self.names)}

        def key(title: str) -> tuple[int, int, str]:
            bucket = re.match(r"bucket \d+ \((.*?)[,)]", title)
            name = bucket[1] if bucket else title
            if bucket or name in place:
                return 0, place.get(name, len(place)), title
            return 1 + title.startswith("at ") + 2 * (title == "elsewhere"), 0, title

        return sorted(self.lines, key=key)


def short_place(place: str) -> str:
    """``train.py:12: loss.backward()``: a line of source with its file's name alone."""
    found = re.match(r"(.*?:\d+)([: ].*|)$", place)
    return f"{re.split(_SEPARATOR, found[1])[-1]}{found[2]}" if found else place


_SEPARATOR = re.compile(r"[\\/]")


def _replaced(old: Statement, new: Statement) -> Mapping[str, str]:
    """Return the names that a statement reads instead of others, if that is all that changed."""
    was, now = WORD.findall(old.call), WORD.findall(new.call)
    replaced = {a: b for a, b in zip(was, now, strict=False) if a != b}
    is_all = WORD.sub(lambda match: replaced.get(match[0], match[0]), old.call) == new.call
    is_all = is_all and old.value == new.value and replaced.keys() <= set(old.reads)
    return replaced if is_all else {}


_COST = re.compile(r"# (allocated at most|sent|collectives|moved to the \w+) {2,}(.*)$")


def _costs(before: DumpedProgram, after: DumpedProgram) -> list[str]:
    """Return lines for the costs that differ between the two headers."""
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
    folder = Path(chosen.what[0])
    if not _programs(folder):
        found = function_folders(folder, chosen.rank, chosen.function)
        if len(found) > 1:
            names = ", ".join(path.name for path in found)
            raise CommandError(f"{folder} holds the programs of {names}: name one with --function")
        (folder,) = found
    first, second = (_program(folder, wanted) for wanted in chosen.what[1:])
    return first, second


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
