"""The findings of a section: checks and figures, on disk as soon as they are there."""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RUNNING, PASSED, FAILED = "running", "passed", "failed"
TIMED_OUT, CRASHED, NOT_RUN = "timed out", "crashed", "not run"


class Findings:
    """Checks, figures and notes of one section.

    Written after each of them: what a section has found outlives it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._started = time.monotonic()
        self.record: dict[str, Any] = {
            "status": RUNNING,
            "checks": [],
            "figures": [],
            "notes": [],
            "hardware": {},
        }
        self._write()

    def check(self, name: str, passed: bool, detail: str = "") -> None:
        """Note what has to hold for the section to pass."""
        self._append("checks", {"name": name, "passed": bool(passed), "detail": detail})

    def at_most(self, name: str, value: float, limit: float, unit: str = "") -> None:
        """Note a value and what it may be at most; NaN is more than anything."""
        self.check(name, value <= limit, f"{value:.3g}{unit} (at most {limit:g}{unit})")

    def figure(self, name: str, value: float, unit: str) -> None:
        self._append("figures", {"name": name, "value": value, "unit": unit})

    def note(self, text: str) -> None:
        """Note what could not be shown here, or what a figure means."""
        self._append("notes", text)

    def hardware(self, **figures: float) -> None:
        """Note figures that the option ``hardware`` takes, by their names there."""
        self.record["hardware"] |= figures
        self._write()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part of a section, which fails if it raises; the section goes on."""
        try:
            yield
        except (Exception, SystemExit) as error:
            traceback.print_exc()  # to the section's log
            first = (str(error).strip() or "no words").splitlines()[0]
            self.check(name, False, f"{type(error).__name__}: {first}"[:500])

    def end(self) -> None:
        checks = self.record["checks"]
        passed = bool(checks) and all(check["passed"] for check in checks)
        self.record["status"] = PASSED if passed else FAILED
        self._write()

    def _append(self, kind: str, value: Any) -> None:
        self.record[kind].append(value)
        self._write()

    def _write(self) -> None:
        self.record["seconds"] = time.monotonic() - self._started
        write_json(self.path, self.record)


def write_json(path: Path, value: Any) -> None:
    """Replace a file at once: a reader finds the old one or the new one."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(draft, path)
