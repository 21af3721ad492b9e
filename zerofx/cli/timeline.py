"""``python -m zerofx timeline DIR``: dumped programs' traces as a picture and in words."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from zerofx.errors import CommandError
from zerofx.report.folder import written_anew
from zerofx.report.measured import PROFILE, add_measured
from zerofx.report.picture import MISSING, draw
from zerofx.report.timeline import SUFFIX, read, text_of


def add_to(subparsers: Any) -> None:
    """Add the command ``timeline``."""
    parser = subparsers.add_parser(
        "timeline",
        help="draw a dumped program: lanes and memory over one step",
        description="Of the last dumped program of each function, draw a picture (.png) next to "
        "its trace (.trace.json), and say where it has its peak of memory and what it waits for. "
        "https://ui.perfetto.dev opens the traces, which every program has.",
    )
    parser.add_argument(
        "folder",
        type=Path,
        help="what the option dump (or ZEROFX_DUMP) names, a folder in it, or a .trace.json",
    )
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="PROFILE",
        help="what torch.profiler has exported of the step, run within zerofx.named_ranges: goes "
        "into the trace, beside what was predicted (by default what zerofx.profile has written)",
    )
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Draw each trace, with what was measured in it, and print where it is and its words."""
    paths = _traces(chosen.folder)
    if chosen.measured is not None and len(paths) > 1:
        raise CommandError(
            f"{chosen.measured} is of one function on one rank, and {chosen.folder} has the "
            f"programs of {len(paths)}: give the folder of one, as {paths[0].parent}."
        )
    for path in paths:
        trace = read(path)
        beside = path.parent / PROFILE
        is_last = path == max(path.parent.glob(f"*{SUFFIX}"))  # what ran, and is measured
        profile = chosen.measured or (beside if is_last and beside.exists() else None)
        if profile is not None:
            add_measured(trace, profile)
            with written_anew(path) as part:
                part.write_text(text_of(trace), "utf-8", "backslashreplace")
        print(path)
        picture = path.with_name(path.name.removesuffix(SUFFIX) + ".png")
        try:
            draw(trace, picture)
            print(picture)
        except ImportError:
            print(MISSING)
        ours = trace["zerofx"]
        first, *others = ours["words"]
        measured = [ours["measured"]] if "measured" in ours else []
        print("", ours["title"], first, *measured, *others, "", sep="\n")
    return 0


def _traces(folder: Path) -> list[Path]:
    """The trace that a path names, or the last of each function below a folder.

    Raises: CommandError if there is none.
    """
    if folder.is_file():
        if not folder.name.endswith(SUFFIX):
            raise CommandError(f"{folder} is no timeline: give a folder, or a file *{SUFFIX}.")
        return [folder]
    if not folder.is_dir():
        raise CommandError(f"{folder} does not exist: give the folder that was dumped to.")
    last = {path.parent: path for path in sorted(folder.rglob(f"*{SUFFIX}"))}
    if last:
        return list(last.values())
    raise CommandError(
        f"there is no dumped timeline (*{SUFFIX}) in {folder}: run the training with "
        "ZEROFX_DUMP set to a folder, and give that."
    )
