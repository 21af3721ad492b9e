"""Finds the pass behind which a training run changes, by turning passes off.

Source: Zeller 1999, "Yesterday, my program worked. Today, it does not. Why?".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerofx.cli.trials import Command, Trial, furthest
from zerofx.errors import CommandError
from zerofx.passes.pipeline import PIPELINE

SWITCHED = (*(step.name for step in PIPELINE if step.optional), "fuse_optimizer")
"""What is turned off from the end: the optional passes in their order, and what lowering does."""

NEEDED = tuple(step.name for step in PIPELINE if not step.optional and step.name != "data_parallel")
"""What ``stop_after`` does without: passes that the stage and offloads call for."""


@dataclass(frozen=True)
class Level:
    """How much of the compiler runs: with these passes ``off``, and nothing behind one.

    ``adds`` is the pass that it has and the level below has not.
    """

    adds: str
    off: tuple[str, ...]
    stop_after: str | None = None


LEVELS = (
    Level("data_parallel", SWITCHED, "data_parallel"),
    *(Level(name, SWITCHED, name) for name in NEEDED[:-1]),
    Level(NEEDED[-1], SWITCHED),
    *(Level(name, SWITCHED[n + 1 :]) for n, name in enumerate(SWITCHED)),
)
"""From data parallelism alone to everything, a pass at a time."""

ALL_NEEDED = len(NEEDED)
"""The level of the reference: every optional pass off."""


class Undecided(CommandError):
    """The runs name no pass: says why, and what to try."""


@dataclass(frozen=True)
class Culprit:
    """The pass behind which the result changes, and the runs on both sides of it.

    ``before`` ran with every pass in front of it, ``behind`` with it too.  Of one with a switch,
    ``without`` ran with it alone turned off, and ``is_enough`` says whether that ended well.
    """

    name: str
    before: Trial
    behind: Trial
    without: Trial | None
    is_enough: bool


class Bisection:
    """A search over runs of one command.

    Without a metric, a run that fails is bad.  With one, it is a run whose numbers are further
    than ``tolerance`` (relative) from those of the reference, which has every optional pass off,
    or that fails.  If it is bad itself, or nothing differs from it, the reference is the run with
    data parallelism alone, and the fault is looked for in the passes that have no switch.
    ``dump`` is the environment of the run that is to show its programs.
    """

    def __init__(self, command: Command, tolerance: float, dump: dict[str, str]) -> None:
        self.command = command
        self.tolerance = tolerance
        self.dump = dump
        self.reference: Trial | None = None

    def difference(self, trial: Trial) -> float:
        """How far a run's numbers are from the reference's, relative."""
        assert self.reference is not None, "the reference runs before anything is compared with it"
        return furthest(trial.metric, self.reference.metric)

    def is_bad(self, trial: Trial) -> bool:
        return not trial.succeeded or self.difference(trial) > self.tolerance

    def search(self) -> Culprit:
        """Run the command until two runs that differ in one pass end differently, and twice each.

        Raises: Undecided if there are none, or the same run ends in two ways.
        """
        passed, before, failed, behind = self._ends()
        while failed - passed > 1:
            middle = (passed + failed) // 2
            trial = self._at(middle, f"up to {LEVELS[middle].adds}")
            if self.is_bad(trial):
                failed, behind = middle, trial
            else:
                passed, before = middle, trial
        name = LEVELS[failed].adds
        self._again(before)
        self._again(behind, self.dump)
        if name not in SWITCHED:
            return Culprit(name, before, behind, None, False)
        without = self.command.run(f"{name} alone off", (name,))
        return Culprit(name, before, behind, without, not self.is_bad(without))

    def _at(self, level: int, why: str) -> Trial:
        return self.command.run(why, LEVELS[level].off, stop_after=LEVELS[level].stop_after)

    def _ends(self) -> tuple[int, Trial, int, Trial]:
        """A level that is good and a higher one that is bad, with their runs."""
        everything = self.command.run("as it is")
        if everything.succeeded and self.command.metric is None:
            raise Undecided(
                "the command succeeds as it is, so there is nothing to find. If what it prints is "
                "wrong, say where with --metric, and how wrong with --tolerance."
            )
        needed = self._at(ALL_NEEDED, "every pass off")
        if needed.succeeded:
            self._refer_to(needed)
            if self.is_bad(everything):
                return ALL_NEEDED, needed, len(LEVELS) - 1, everything
        least = self._at(0, "data_parallel alone")
        if not least.succeeded:
            raise self._no_pass(needed if not needed.succeeded else least)
        self._refer_to(least)
        if self.is_bad(needed):
            return 0, least, ALL_NEEDED, needed
        raise Undecided(
            "no run differs: with every optional pass off, and with data_parallel alone, the "
            f"numbers are the same to {max(map(self.difference, (needed, everything))):.3g}, and "
            f"--tolerance is {self.tolerance:g}."
        )

    def _refer_to(self, trial: Trial) -> None:
        metric = self.command.metric
        if metric is not None and not trial.metric:
            raise Undecided(
                f"--metric {metric.pattern!r} finds nothing in what the command printed: "
                f"{trial.output}."
            )
        self.reference = trial

    def _no_pass(self, trial: Trial) -> Undecided:
        what = "every optional pass off" if trial.stop_after is None else "data_parallel alone"
        return Undecided(
            f"the command fails ({trial.ending}) with {what} too: no pass can be named. "
            f"{_error(trial)}Try ZEROFX_VALIDATE=1, which says of any pass whether it computes "
            "something else; then ZEROFX_LOWERING=eager and ZEROFX_PEER_MEMORY=0, one after the "
            "other."
        )

    def _again(self, trial: Trial, extra: dict[str, str] | None = None) -> None:
        why = f"run {trial.number} again"
        again = self.command.run(why, trial.off, extra, stop_after=trial.stop_after)
        if self.is_bad(again) != self.is_bad(trial):
            raise Undecided(
                f"runs {trial.number} and {again.number} have the same passes on and do not end "
                "alike: what the command does is not the same twice, and no pass can be named. "
                "Make it deterministic (seeds, data order, ZEROFX_LINK for the plans), or give a "
                "larger --tolerance."
            )


def _error(trial: Trial) -> str:
    error = trial.error()
    return f"It says: {error}. " if error else ""


def passes_on(off: Sequence[str], stop_after: str | None = None) -> str:
    """What of the switched passes a run has on, in words."""
    if stop_after is not None:
        return f"{stop_after} and before"
    on = [name for name in SWITCHED if name not in off]
    if not off:
        return "all"
    if len(on) > len(off):
        return f"all but {', '.join(off)}"
    return ", ".join(on) or "none"
