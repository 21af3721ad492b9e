"""Runs a training command again and again, with some passes off, and reads what it prints."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zerofx.errors import CommandError
from zerofx.options import OPTIONS, environment
from zerofx.passes.pipeline import PIPELINE

SWITCHED = tuple(
    dict.fromkeys(step.option for step in PIPELINE if step.optional or step.name in OPTIONS)
)
"""Passes that can be turned off, by the options that do so, in their order; then lowering's."""

GRACE_S = 40.0
"""A command that was told to end has so long to do it: torchrun gives its workers 30 s."""


@dataclass(frozen=True)
class Trial:
    """One run of the command.

    ``passes`` are the variables that turn passes off, in the environment beside the user's;
    ``ending`` is ``exit 1``, ``SIGSEGV`` or ``timed out``; ``numbers`` are those that it printed
    for the metric; ``output`` is the file with all that it printed.
    """

    number: int
    why: str
    passes: Mapping[str, str]
    ending: str
    numbers: tuple[float, ...]
    seconds: float
    output: Path

    @property
    def succeeded(self) -> bool:
        return self.ending == "exit 0"

    def text(self) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace")

    def error(self) -> str:
        """The first line of its output that names an exception; empty for none, and if it hung."""
        found = _ERROR.search(self.text())
        return found[1] if found and self.ending not in ("exit 0", "timed out") else ""


_ERROR = re.compile(r"^(?:\[\w+\]:)?\s*((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*)", re.M)


@dataclass
class Command:
    """A command that is run again and again, and writes to ``folder/run1.txt`` and so on.

    ``metric`` finds numbers in what it prints, by its first group or else all of it;
    ``timeout_s`` is for each run, None for no limit.
    """

    words: Sequence[str]
    folder: Path
    metric: re.Pattern[str] | None
    timeout_s: float | None
    trials: list[Trial] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in self.folder.glob("run*.txt"):
            if old.stem.removeprefix("run").isdigit():
                old.unlink()

    def run(self, why: str, passes: Mapping[str, str], **variables: str) -> Trial:
        """Run it once, and wait; ``variables`` are environment beside what turns passes off.

        Raises: CommandError if it cannot be started, or prints for a metric what is no number.
        """
        number = len(self.trials) + 1
        output = self.folder / f"run{number}.txt"
        began = time.monotonic()
        with output.open("ab") as file:
            status = self._status({**environment(), **passes, **variables}, file)
        seconds = time.monotonic() - began
        trial = Trial(number, why, passes, _ending(status), self._numbers(output), seconds, output)
        self.trials.append(trial)
        return trial

    def _status(self, variables: Mapping[str, str], file: Any) -> int | None:
        """The exit status; None if the time is up.  Nothing of the command is left running then."""
        try:
            process = subprocess.Popen(
                self.words,
                env=dict(variables),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # to end all of it, and so that Ctrl-C comes to us alone
            )
        except OSError as error:
            raise CommandError(
                f"cannot start {self.words[0]!r}: {error.strerror}. Give the command as you would "
                "run it, behind --: python -m zerofx bisect -- torchrun --nproc-per-node 2 train.py"
            ) from error
        try:
            return process.wait(self.timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                _end(process)

    def _numbers(self, output: Path) -> tuple[float, ...]:
        if self.metric is None:
            return ()
        text = output.read_text(encoding="utf-8", errors="replace")
        found = [match[1 if match.re.groups else 0] for match in self.metric.finditer(text)]
        try:
            return tuple(map(float, found))
        except (TypeError, ValueError):
            raise CommandError(
                f"--metric {self.metric.pattern!r} finds what is no number in {output}: "
                f"{found[:3]}. Let its first group hold the number alone: 'loss ([-+.\\w]+)'"
            ) from None

    def line(self, passes: Mapping[str, str]) -> str:
        """The same run, as one types it."""
        words = [f"{name}={shlex.quote(value)}" for name, value in passes.items()]
        return " ".join([*words, shlex.join(self.words)])


def _ending(status: int | None) -> str:
    if status is None:
        return "timed out"
    return signal.Signals(-status).name if -status in set(signal.Signals) else f"exit {status}"


def _end(process: subprocess.Popen) -> None:
    """End a command and all that it has started, politely first: torchrun ends its workers."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    finally:  # a second Ctrl-C does not wait
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let signals that end this process end the run under way too, as Ctrl-C does.

    A run has a session of its own, which no terminal and no ``timeout`` would end.  Signals that
    this process ignores, as under ``nohup``, stay ignored.
    """
    both = (signal.SIGTERM, signal.SIGHUP)
    signals = [one for one in both if signal.getsignal(one) is not signal.SIG_IGN]
    before = [signal.signal(one, signal.default_int_handler) for one in signals]
    try:
        yield
    finally:
        for one, handler in zip(signals, before, strict=True):
            signal.signal(one, handler)


def furthest(numbers: Sequence[float], others: Sequence[float]) -> float:
    """The largest relative difference of two runs' numbers; infinite if one has more of them.

    Ranks print in any order, so both are sorted first.
    """
    if len(numbers) != len(others):
        return math.inf
    one, other = (torch.tensor(of, dtype=torch.float64).sort().values for of in (numbers, others))
    alike = (one == other) | (one.isnan() & other.isnan())
    apart = (one - other).abs() / torch.maximum(one.abs(), other.abs())
    return max(apart[~alike].nan_to_num(nan=math.inf).tolist(), default=0.0)
