"""Run sections one after the other, each in a process of its own that others survive."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from contact.findings import CRASHED, NOT_RUN, PASSED, RUNNING, TIMED_OUT, write_json
from contact.sections import FOLDER, FRESH, LONGEST_S, Section

Record = dict[str, Any]
"""The contents of a section's file; see ``Findings``."""

END_S = 10.0
"""How long the processes of a section that is over may take to end."""


def drive(
    sections: Sequence[Section],
    out: Path,
    command_of: Callable[[Section], list[str]],
    *,
    header: Record,
    together_s: float,
    patience: float = 1.0,
    resume: bool = False,
    say: Callable[[str], None] = print,
) -> dict[str, Record]:
    """Run sections and return their records, by name; each is in ``out`` as soon as it is over.

    ``header`` is what records were made with: with ``resume``, sections are left out that passed
    with the same one.  One is killed after its limit, or when there is no time left of
    ``together_s``; both are multiplied by ``patience``.  Units: seconds.
    """
    out.mkdir(parents=True, exist_ok=True)
    records: dict[str, Record] = {}
    deadline = time.monotonic() + together_s * patience
    for section in sections:
        before = read(out, section.name)
        if resume and before.get("status") == PASSED and before.get("header") == header:
            records[section.name] = before
            say(f"{section.name}: passed before")
            continue
        left = deadline - time.monotonic()
        limit_s = min(min(section.limit_s, LONGEST_S) * patience, left)
        if left < 1.0:
            records[section.name] = _ended(out, section, header, NOT_RUN, "No time was left.", 0.0)
        else:
            say(f"{section.name}: {section.shows} ...")
            records[section.name] = _run(section, out, command_of(section), header, limit_s)
        record = records[section.name]
        say(f"{section.name}: {record['status']} after {record['seconds']:.0f} s")
    return records


def read(out: Path, name: str) -> Record:
    """Return what is known of a section; nothing of one that has not been run."""
    try:
        return json.loads((out / f"{name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _run(section: Section, out: Path, command: list[str], header: Record, limit_s: float) -> Record:
    (out / f"{section.name}.json").unlink(missing_ok=True)
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix=f"{section.name}-", dir=out) as fresh,
        (out / f"{section.name}.log").open("w", encoding="utf-8") as log,
    ):
        variables = {**section.environment, **(section.rehearsal if header["rehearsal"] else {})}
        environment = {
            **os.environ,
            FOLDER: fresh,
            **{name: value.replace(FRESH, fresh) for name, value in variables.items()},
        }
        # A session of its own: its ranks and compilers are killed with it.
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    seconds = time.monotonic() - started
    if code is None:
        return _ended(out, section, header, TIMED_OUT, f"Killed after {limit_s:.0f} s.", seconds)
    record = read(out, section.name)
    if code != 0 or record.get("status", RUNNING) == RUNNING:
        why = f"Ended with exit code {code}."
        return _ended(out, section, header, CRASHED, why, seconds)
    record |= {"header": header, "seconds": seconds}
    write_json(out / f"{section.name}.json", record)
    return record


def _end(process: subprocess.Popen) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait(END_S)


def _ended(
    out: Path, section: Section, header: Record, status: str, why: str, seconds: float
) -> Record:
    """Add to what a section has found how it ended, and the last lines of its log."""
    empty = {"checks": [], "figures": [], "notes": [], "hardware": {}}
    found = {} if status == NOT_RUN else read(out, section.name)  # not those of an earlier run
    record = {**empty, **found, "header": header, "status": status, "why": why, "seconds": seconds}
    log = out / f"{section.name}.log"
    if status != NOT_RUN and log.exists():
        record["log"] = log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
    write_json(out / f"{section.name}.json", record)
    return record
