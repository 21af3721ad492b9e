"""``python -m zerofx bisect -- COMMAND``: runs a training until one pass is left to blame.

Source: Zeller 1999, "Yesterday, my program worked. Today, it does not. Why?".
"""

from __future__ import annotations

import argparse
import contextlib
import math
import re
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tabulate import tabulate

from zerofx.cli.training_runs import SWITCHED, Command, Trial, furthest, interruptible
from zerofx.errors import CommandError
from zerofx.options import turned_off
from zerofx.passes.pipeline import PIPELINE, rewrites
from zerofx.report.read import read

NEEDED = tuple(
    step.name
    for step in rewrites(PIPELINE)
    if step.option not in SWITCHED
    and step.name not in ("normalize", "global_loss", "data_parallel")
)
"""The passes that the stage and offloads call for; ``stop_after`` does without them."""

_INTERRUPTED = 130
"""The exit status after Ctrl-C, as shells have it."""

PASSES = ("data_parallel", *NEEDED, *SWITCHED)
LEVELS = (
    *(turned_off(SWITCHED, name) for name in ("data_parallel", *NEEDED[:-1])),
    *(turned_off(SWITCHED[n:]) for n in range(len(SWITCHED) + 1)),
)
"""The environment that turns off all passes behind each of ``PASSES``."""

LEAST, REFERENCE, ALL = 0, len(NEEDED), len(LEVELS) - 1
"""The levels with data parallelism alone, with every optional pass off, and with everything."""


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
        "--tolerance", type=_number, default=1e-6, metavar="T", help="relative (default 1e-6)"
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
    words = chosen.command[chosen.command[:1] == ["--"] :]
    if not words:
        raise CommandError("bisect runs a command: give it behind --, as you would type it")
    command = Command(words, chosen.out, chosen.metric, chosen.timeout)
    search = Search(command, chosen.tolerance)
    status = 0
    try:
        with interruptible():
            found = list(search.run())
    except KeyboardInterrupt:
        found, status = ["Interrupted: no pass is named."], _INTERRUPTED
    finally:
        if command.trials:
            print(f"{search.table()}\n", flush=True)
    print("\n".join(found))
    return status


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None


def _number(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 on")


def _seconds(text: str) -> float:
    if not (seconds := _number(text)):
        raise argparse.ArgumentTypeError("a time limit is more than 0 seconds")
    return seconds


class Search:
    """Looks for the pass behind which a command fails, or prints other numbers.

    With a metric, a run is bad if it fails, or if a number is further than ``tolerance`` (relative)
    from the reference's: the run with every optional pass off.  If that is bad itself, or nothing
    differs from it, the reference is the run with data parallelism alone, and the passes that have
    no switch are searched.
    """

    def __init__(self, command: Command, tolerance: float) -> None:
        self.command, self.tolerance = command, tolerance
        self.dumps, self.validated = command.folder / "dumps", command.folder / "validated"
        self.reference: Trial | None = None
        self.at: dict[int, Trial] = {}

    def difference(self, trial: Trial) -> float:
        """Return how far a run's numbers are from the reference's, relative."""
        assert self.reference is not None, "the reference runs before anything is compared with it"
        return furthest(trial.numbers, self.reference.numbers)

    def is_bad(self, trial: Trial) -> bool:
        return not trial.succeeded or self.difference(trial) > self.tolerance

    def run(self) -> Iterator[str]:
        """Find the pass; yield what it is, what it does to the program, and how to run it again.

        Raises: CommandError if no pass can be named, which says why and what to try.
        """
        passed, failed = self._ends()
        found = bisect_left(
            range(failed), True, lo=passed + 1, key=lambda level: self.is_bad(self._trial(level))
        )
        name, before, behind = PASSES[found], self.at[found - 1], self.at[found]
        self._again(before)
        self._again(behind, ZEROFX_DUMP=str(self.dumps.absolute()))
        without = None
        if name in SWITCHED:
            without = self.command.run(f"{name} alone off", turned_off((name,)))
        variables = {"ZEROFX_VALIDATE": "1", "ZEROFX_DUMP": str(self.validated.absolute())}
        validated = self.command.run("and validated", behind.passes, **variables)
        changed = "begins to fail" if not behind.succeeded else "prints other numbers"
        yield f"Behind {name} the run {changed}."
        if error := behind.error():
            yield f"It says: {error}"
        named = re.search(r"in pass '(\w+)' of zerofx", behind.text())
        if named and named[1] != name:
            yield f"It is raised in another pass, {named[1]}, which stumbles on what {name} does."
        if without is None:
            yield f"{name} has no switch: a smaller stage, or no offload, does without it."
        elif not self.is_bad(without):
            yield f"With {name} alone turned off it does not: go on with ZEROFX_{name.upper()}=0."
        else:
            yield (
                f"With {name} alone turned off it does so too (run {without.number}): a later pass "
                "has the same effect, or needs what it does."
            )
        yield from ("", _verdict(behind, validated), *_minimal(self.validated), "")
        yield from _programs(name, self.dumps)
        yield from ("", "To see it again, without the pass and with it:")
        yield from (f"  {self.command.line(trial.passes)}" for trial in (before, behind))
        yield f"What every run has printed is in {self.command.folder}/run<number>.txt."

    def _trial(self, level: int) -> Trial:
        if level not in self.at:
            known = {LEAST: "data_parallel alone", REFERENCE: "every pass off", ALL: "as it is"}
            why = known.get(level, f"up to {PASSES[level]}")
            self.at[level] = self.command.run(why, LEVELS[level])
        return self.at[level]

    def _ends(self) -> tuple[int, int]:
        """Run the ends of the search; return a good level and a higher, bad one."""
        metric = self.command.metric
        if self._trial(ALL).succeeded and metric is None:
            raise CommandError(
                "the command succeeds as it is, so there is nothing to find. If what it prints is "
                "wrong, say where with --metric, and how wrong with --tolerance."
            )
        higher = ALL
        for level in (REFERENCE, LEAST):
            if self._trial(level).succeeded:
                self.reference = self._trial(level)
                if metric is not None and not self.reference.numbers:
                    raise CommandError(
                        f"--metric {metric.pattern!r} finds nothing in what the command printed: "
                        f"{self.reference.output}."
                    )
                if self.is_bad(self._trial(higher)):
                    return level, higher
            higher = level
        if self._trial(LEAST).succeeded:
            furthest_apart = max(self.difference(self._trial(level)) for level in (REFERENCE, ALL))
            raise CommandError(
                "no run differs: with every optional pass off, and with data_parallel alone, the "
                f"numbers are the same to {furthest_apart:.3g}, and --tolerance is "
                f"{self.tolerance:g}."
            )
        failed, what = self._trial(REFERENCE), "every optional pass off"
        if failed.succeeded:
            failed, what = self._trial(LEAST), "data_parallel alone"
        says = f"It says: {failed.error()}. " if failed.error() else ""
        raise CommandError(
            f"the command fails ({failed.ending}) with {what} too: no pass can be named. "
            f"{says}Try ZEROFX_VALIDATE=1, which says of any pass whether it computes "
            "something else; then ZEROFX_LOWERING=eager and ZEROFX_PEER_MEMORY=0, one after "
            "the other."
        )

    def _again(self, trial: Trial, **variables: str) -> None:
        again = self.command.run(f"run {trial.number} again", trial.passes, **variables)
        if self.is_bad(again) != self.is_bad(trial):
            raise CommandError(
                f"runs {trial.number} and {again.number} have the same passes on and do not end "
                "alike: what the command does is not the same twice, and no pass can be named. "
                "Make it deterministic (seeds, data order, ZEROFX_HARDWARE for the plans), or give "
                "a larger --tolerance."
            )

    def table(self) -> str:
        """Return a table with a row for each run."""
        rows = []
        for trial in self.command.trials:
            row = {"run": trial.number, "": trial.why, "ended": trial.ending}
            row["seconds"] = f"{trial.seconds:.1f}"
            if self.command.metric is not None:
                row["last number"] = f"{trial.numbers[-1]:.9g}" if trial.numbers else "none"
                if trial.numbers and self.reference is not None:
                    row["differs by"] = f"{self.difference(trial):.3g}"
            rows.append(row)
        return tabulate(rows, headers="keys", disable_numparse=True)


def _verdict(behind: Trial, validated: Trial) -> str:
    """Return what the run with ``ZEROFX_VALIDATE=1`` has found."""
    if found := re.search(r"ValidationError: (.*)", validated.text()):
        return f"Validation (run {validated.number}): {found[1]}"
    if not validated.succeeded and validated.error() != behind.error():
        return (
            f"Validation did not come to an end (run {validated.number}, {validated.ending}): "
            f"{validated.error() or 'see what it printed'}"
        )
    return (
        f"Validation (run {validated.number}) has nothing against any pass's program: on random "
        "inputs it computes what it did before. The fault is in how it is lowered or run, or "
        "shows with your data and states alone."
    )


def _minimal(dumps: Path) -> Iterator[str]:
    """Show the smallest parts of the programs before and behind the pass that differ."""
    for before in sorted(dumps.glob("rank0/*/minimal_before.py")):
        yield from ("", "The least that shows it, before the pass and behind it:")
        for path in (before, before.with_name("minimal_after.py")):
            yield from ("", f"  $ python -m zerofx run {path} --random")
            shown = re.sub(r"^\s*(#.*)?\n", "", read(path).function, flags=re.M)
            yield from (f"    {line}" for line in shown.splitlines())


def _programs(name: str, dumps: Path) -> Iterator[str]:
    """Tell how to see what the pass has changed in rank 0's programs, rejected ones too."""
    found = sorted(dumps.glob(f"rank0/*/[0-9]*_{name}.*py"))
    if not found:
        yield (
            f"{name} has left no program in {dumps}: it did not get that far, or has none of its "
            "own. What was there before is in rank0."
        )
        return
    yield "What it changes in the program:"
    for after in found:
        before = max(path for path in after.parent.glob("[0-9]*_*.py") if path.name < after.name)
        yield f"  python -m zerofx diff {before} {after}"
