"""Finds the optional pass behind which a training run changes, by turning passes off.

Source: Zeller 1999, "Yesterday, my program worked. Today, it does not. Why?".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerofx.errors import CommandError
from zerofx.passes.pipeline import PIPELINE
from zerofx.trials import Command, Trial, furthest

SWITCHED = (*(step.name for step in PIPELINE if step.optional), "fuse_optimizer")
"""What is turned off from the end: the optional passes in their order, and what lowering does."""


class Undecided(CommandError):
    """The runs name no pass: says why, and what to try."""


@dataclass(frozen=True)
class Culprit:
    """The pass behind which the result changes, and the runs on both sides of it.

    ``before`` ran with every switched pass in front of it, ``behind`` with it too; ``without`` ran
    with it alone turned off, and ``is_enough`` says whether that ended well.
    """

    name: str
    before: Trial
    behind: Trial
    without: Trial
    is_enough: bool


class Bisection:
    """A search over runs of one command.

    Without a metric, a run that fails is bad.  With one, it is a run whose numbers are further
    than ``tolerance`` (relative) from those of the reference, which has every switched pass off,
    or that fails.  ``dump`` is the environment of the run that is to show its programs.
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
        behind = self._first_runs()
        before = self.reference
        assert before is not None
        passed, failed = 0, len(SWITCHED)  # how many passes are on
        while failed - passed > 1:
            middle = (passed + failed) // 2
            trial = self.command.run(f"up to {SWITCHED[middle - 1]}", SWITCHED[middle:])
            if self.is_bad(trial):
                failed, behind = middle, trial
            else:
                passed, before = middle, trial
        name = SWITCHED[passed]
        self._again(before)
        self._again(behind, self.dump)
        without = self.command.run(f"{name} alone off", (name,))
        return Culprit(name, before, behind, without, not self.is_bad(without))

    def _first_runs(self) -> Trial:
        """The run as it is, which has to be bad, and the reference, which must not."""
        metric = self.command.metric
        everything = self.command.run("as it is")
        if everything.succeeded and metric is None:
            raise Undecided(
                "the command succeeds as it is, so there is nothing to find. If what it prints is "
                "wrong, say where with --metric, and how wrong with --tolerance."
            )
        reference = self.command.run("every pass off", SWITCHED)
        if not reference.succeeded:
            raise Undecided(
                f"the command fails ({reference.ending}) with every optional pass off too: no "
                f"optional pass is to blame. {_error(reference)}Try ZEROFX_VALIDATE=1, which names "
                "any pass; then ZEROFX_LOWERING=eager, ZEROFX_PEER_MEMORY=0 and smaller "
                "ZEROFX_STAGE, one after the other."
            )
        if metric is not None and not reference.metric:
            raise Undecided(
                f"--metric {metric.pattern!r} finds nothing in what the command printed: "
                f"{reference.output}."
            )
        self.reference = reference
        if not self.is_bad(everything):
            raise Undecided(
                f"no run differs: with every optional pass off, the numbers are the same to "
                f"{self.difference(everything):.3g}, and --tolerance is {self.tolerance:g}."
            )
        return everything

    def _again(self, trial: Trial, extra: dict[str, str] | None = None) -> None:
        again = self.command.run(f"run {trial.number} again", trial.off, extra)
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


def passes_on(off: Sequence[str]) -> str:
    """What of the switched passes a run has on, in words."""
    on = [name for name in SWITCHED if name not in off]
    if not off:
        return "all"
    if len(on) > len(off):
        return f"all but {', '.join(off)}"
    return ", ".join(on) or "none"
