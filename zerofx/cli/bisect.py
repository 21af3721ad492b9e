"""``python -m zerofx bisect -- command``: the pass that a training run fails of."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from zerofx.errors import CommandError

if TYPE_CHECKING:
    from zerofx.cli.bisection import Bisection, Culprit
    from zerofx.cli.trials import Command, Trial
    from zerofx.report.statements import Statement

_LINES = 30
"""Of what a pass has changed, as many lines are printed."""

_INTERRUPTED = 130
"""The exit status of what Ctrl-C has ended, as shells have it."""


def add_to(subparsers: Any) -> None:
    """Add the command ``bisect``."""
    parser = subparsers.add_parser(
        "bisect",
        help="find the pass that a training run fails of",
        description="Run a training command again and again with passes turned off, and say "
        "behind which of them it begins to fail, or with --metric to print other numbers.",
        usage="%(prog)s [-h] [--metric REGEX] [--tolerance T] [--timeout SECONDS] [--out FOLDER] "
        "-- COMMAND ...",
    )
    parser.add_argument(
        "--metric",
        type=_pattern,
        metavar="REGEX",
        help="numbers in what the command prints, its first group, as 'loss ([-+.\\w]+)': a run "
        "is bad if they differ from those with every optional pass off",
    )
    parser.add_argument(
        "--tolerance",
        type=_tolerance,
        default=1e-6,
        metavar="T",
        help="by how much they may, relative (default 1e-6)",
    )
    parser.add_argument(
        "--timeout", type=_seconds, metavar="SECONDS", help="a run that takes longer has failed"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("zerofx-bisect"),
        metavar="FOLDER",
        help="for what the runs print and the programs (default zerofx-bisect)",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command, behind --")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Search, and print the runs and what they show."""
    from zerofx.cli.bisection import Bisection
    from zerofx.cli.trials import Command, interruptible

    words = chosen.command[chosen.command[:1] == ["--"] :]
    if not words:
        raise CommandError("bisect runs a command: give it behind --, as you would type it")
    command = Command(words, chosen.out, chosen.metric, chosen.timeout)
    dumps = chosen.out / "dumps"
    bisection = Bisection(command, chosen.tolerance, {"ZEROFX_DUMP": str(dumps.absolute())})
    try:
        with interruptible():
            culprit = bisection.search()
            validated = _validated(command, culprit, chosen.out / "validated")
    except KeyboardInterrupt:
        print(f"{_table(bisection)}\n\nInterrupted: no pass is named.")
        return _INTERRUPTED
    except CommandError:
        if command.trials:
            print(f"{_table(bisection)}\n")
            sys.stdout.flush()
        raise
    print(f"{_table(bisection)}\n")
    for line in _report(bisection, culprit, validated, chosen.out):
        print(line)
    return 0


def _validated(command: Command, culprit: Culprit, dumps: Path) -> Trial:
    behind = culprit.behind
    variables = {"ZEROFX_VALIDATE": "1", "ZEROFX_DUMP": str(dumps.absolute())}
    return command.run("and validated", behind.off, variables, stop_after=behind.stop_after)


def _table(bisection: Bisection) -> str:
    """A row for each run."""
    from zerofx.cli.bisection import passes_on

    has_metric = bisection.command.metric is not None
    headers = ["run", "", "passes on", "ended", "seconds"]
    headers += ["last number", "differs by"] if has_metric else []
    rows = []
    for trial in bisection.command.trials:
        row = [str(trial.number), trial.why, passes_on(trial.off, trial.stop_after), trial.ending]
        row.append(f"{trial.seconds:.1f}")
        if has_metric:
            row.append(f"{trial.metric[-1]:.9g}" if trial.metric else "none")
            if trial.metric and bisection.reference is not None:
                row.append(f"{bisection.difference(trial):.3g}")
        rows.append(row)
    return tabulate(rows, headers=headers, disable_numparse=True)


def _report(bisection: Bisection, culprit: Culprit, validated: Trial, out: Path) -> Iterator[str]:
    """The pass, how to see it again, and what it does to the program."""
    command, name, behind = bisection.command, culprit.name, culprit.behind
    changed = "begins to fail" if not behind.succeeded else "prints other numbers"
    yield f"Behind {name} the run {changed}."
    if error := behind.error():
        yield f"It says: {error}"
    named = re.search(r"in pass '(\w+)' of zerofx", behind.text())
    if named and named[1] != name:
        yield f"It is raised in another pass, {named[1]}, which stumbles on what {name} does."
    if culprit.without is None:
        yield f"{name} has no switch: a smaller stage, or no offload, does without it."
    elif culprit.is_enough:
        yield f"With {name} alone turned off it does not: go on with ZEROFX_{name.upper()}=0."
    else:
        yield (
            f"With {name} alone turned off it does so too (run {culprit.without.number}): a later "
            "pass has the same effect, or needs what it does."
        )
    yield ""
    yield from _validation(culprit, validated)
    yield from _minimal(out / "validated")
    yield ""
    yield from _rewrites(name, out / "dumps")
    yield ""
    yield "To see it again, without the pass and with it:"
    yield f"  {command.line(culprit.before)}"
    yield f"  {command.line(behind)}"
    yield f"What every run has printed is in {command.folder}/run<number>.txt."


def _validation(culprit: Culprit, validated: Trial) -> Iterator[str]:
    """What ``ZEROFX_VALIDATE=1`` has said."""
    found = re.search(r"ValidationError: (.*)", validated.text())
    if found:
        yield f"Validation (run {validated.number}): {found[1]}"
        return
    if not validated.succeeded and validated.error() != culprit.behind.error():
        yield (
            f"Validation did not come to an end (run {validated.number}, {validated.ending}): "
            f"{validated.error() or 'see what it printed'}"
        )
        return
    yield (
        f"Validation (run {validated.number}) has nothing against any pass's program: on random "
        "inputs it computes what it did before. The fault is in how it is lowered or run, or "
        "shows with your data and states alone."
    )


def _minimal(dumps: Path) -> Iterator[str]:
    """The least of the programs before and behind the pass that shows what is wrong with it."""
    for before in sorted(dumps.glob("rank0/*/minimal_before.py")):
        yield ""
        yield "The least that shows it, before the pass and behind it:"
        after = before.with_name("minimal_after.py")
        for path in (before, after):
            yield ""
            yield f"  $ python -m zerofx run {path} --random"
            yield from (f"    {line}" for line in _function(path) if line.strip())


def _function(path: Path) -> Iterator[str]:
    """The lines of a dumped program's function, without comments."""
    from zerofx.report.read import read

    for line in read(path).lines:
        if line.startswith("if __name__"):
            return
        if not line.lstrip().startswith("#"):
            yield line


def _rewrites(name: str, dumps: Path) -> Iterator[str]:
    """What the pass has changed in the programs of rank 0, also in one that was rejected."""
    from zerofx.report.write import REJECTED

    kept = sorted(dumps.glob(f"rank0/*/[0-9]*_{name}.py"))
    rejected = sorted(dumps.glob(f"rank0/*/[0-9]*_{name}{REJECTED}.py"))
    if not (kept or rejected):
        yield (
            f"{name} has left no program in {dumps}: it did not get that far, or has none of its "
            "own. What was there before is in rank0."
        )
    for after in (*kept, *rejected):
        before = max(path for path in after.parent.glob("[0-9]*_*.py") if path.name < after.name)
        yield from _rewrite(name, before, after)
        if after in kept:
            yield "Run both on random inputs, with no training around them:"
            for path in (before, after):
                yield f"  python -m zerofx run {path} --random"


def _rewrite(name: str, before: Path, after: Path) -> Iterator[str]:
    """The first statement that a pass has touched, and what else it has changed."""
    from zerofx.cli.diff import report
    from zerofx.report.read import read

    try:
        programs = read(before), read(after)
    except CommandError:
        yield f"What {name} has left is no program: {after}."
        return
    first = _first_rewrite(*programs)
    if first is None:
        yield f"{name} has changed nothing in {after.parent.name}."
        return
    where = f" of {first.place}" if first.place else ""
    yield f"The first statement that {name} has touched in {after.parent.name}:"
    yield f"  {first.name} = {first.call}{where}"
    if first.why:
        yield f"  {first.by}: {first.why}"
    lines = list(report(*programs))
    yield from lines[:_LINES]
    if len(lines) > _LINES:
        yield f"... and {len(lines) - _LINES} lines more:"
        yield f"  python -m zerofx diff {before} {after}"


def _first_rewrite(before: Any, after: Any) -> Statement | None:
    """The first statement that is new, moved or changed; one that is gone if that is all."""
    from zerofx.cli.compare import compare
    from zerofx.report.statements import statements

    now = statements(after)
    difference = compare(statements(before), now)
    touched = {statement.name for statement in difference.inserted}
    touched |= {change.after.name for change in difference.changed}
    touched |= {statement.name for move in difference.moved for statement in move.statements}
    first = next((statement for statement in now if statement.name in touched), None)
    return first or next(iter(difference.removed), None)


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None


def _tolerance(text: str) -> float:
    value = _number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no tolerance: a number from 0 on")
    return value


def _seconds(text: str) -> float:
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no time limit: seconds, more than 0")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
