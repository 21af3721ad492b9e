"""``python -m zerofx timeline dir``: dumped programs as pages and pictures, and in words."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from zerofx.errors import CommandError

if TYPE_CHECKING:
    from zerofx.report.timeline.record import Busy, StepRecord


def add_to(subparsers: Any) -> None:
    """Add the command ``timeline``."""
    parser = subparsers.add_parser(
        "timeline",
        help="draw dumped programs: lanes and memory over one step",
        description="Write a page (.timeline.html) and a picture (.timeline.svg) next to every "
        "dumped program, and say where the last one has its peak of memory and what it waits for.",
    )
    parser.add_argument(
        "folder",
        type=Path,
        help="what the option dump (or ZEROFX_DUMP) names, a folder in it, or a .timeline.json",
    )
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="TRACE",
        help="what torch.profiler has exported of the step, run within zerofx.named_ranges: drawn "
        "beside the last program (by default what zerofx.profile has put there)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write pages and pictures, and print the last program of each folder in words."""
    from zerofx.report.timeline.files import write_pictures
    from zerofx.report.timeline.measured import TRACE, measured_spans
    from zerofx.report.timeline.record import read

    found = _records(arguments.folder)
    trace = arguments.measured
    if trace is not None and len(found) > 1:
        raise CommandError(
            f"{trace} is of one function on one rank, and {arguments.folder} has the programs of "
            f"{len(found)}: give the folder of one, as {next(iter(found))}."
        )
    for folder, paths in found.items():
        beside = folder / TRACE
        its_trace = trace or (beside if beside.exists() else None)
        for path in paths:
            record = read(path)
            is_last = path == paths[-1]
            measured = measured_spans(record, its_trace) if its_trace and is_last else []
            page, picture = write_pictures(path, record, measured)
        print(f"{page}\n{picture}\n")
        print(_words(record, measured))
        print()
    return 0


def _records(folder: Path) -> dict[Path, list[Path]]:
    """The records below a folder, by the folder that they are in, in the order of the passes.

    Raises: CommandError if there are none.
    """
    from zerofx.report.timeline.record import SUFFIX

    if folder.is_file():
        if not folder.name.endswith(SUFFIX):
            raise CommandError(f"{folder} is no timeline: give a folder, or a file *{SUFFIX}.")
        return {folder.parent: [folder]}
    if not folder.is_dir():
        raise CommandError(f"{folder} does not exist: give the folder that was dumped to.")
    found: dict[Path, list[Path]] = {}
    for path in sorted(folder.rglob(f"*{SUFFIX}")):
        found.setdefault(path.parent, []).append(path)
    if not found:
        raise CommandError(
            f"there is no dumped timeline (*{SUFFIX}) in {folder}: run the training with "
            "ZEROFX_DUMP set to a folder, and give that."
        )
    return found


_TENSOR = ("at the peak", "kind", "tensor", "made by", "parameter", "your line")
_WAIT = ("waits", "at", "for")


def _words(record: StepRecord, measured: Sequence[Busy]) -> str:
    """The step, its peak with its largest tensors, and its longest waits."""
    from zerofx.report.timeline import words

    parts = [f"{record.title}, rank {record.rank} of {record.world_size}: {record.program}"]
    parts.append(words.step_sentence(record))
    if measured:
        parts.append(words.measured_sentence(record, measured))
    parts += words.peak_sentences(record)
    peak = words.peak_of(record)
    if peak is not None:
        rows = [
            (r.size, r.kind, r.value, r.made_by, r.serves, words.short_source(r.source))
            for r in words.rows_of(record, peak.largest)
        ]
        parts += ["", tabulate(rows, headers=_TENSOR, disable_numparse=True)]
    waits = words.longest_waits(record)
    if waits:
        nodes = [record.nodes[wait.node] for wait in waits]
        waited = [
            (words.duration(wait.seconds), node.name, record.for_whom(node))
            for wait, node in zip(waits, nodes, strict=True)
        ]
        parts += ["", tabulate(waited, headers=_WAIT, disable_numparse=True)]
    return "\n".join(parts)
