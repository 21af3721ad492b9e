"""Records and pictures as files, next to dumped programs: ``09_prefetch.timeline.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import fx

from zerofx.passes.base import PassContext
from zerofx.report.folder import DumpFolder
from zerofx.report.timeline.page import page_of
from zerofx.report.timeline.record import SUFFIX, Busy, StepRecord
from zerofx.report.timeline.recording import record_of
from zerofx.report.timeline.svg import svg_of

PAGE_SUFFIX = ".timeline.html"
SVG_SUFFIX = ".timeline.svg"


class TimelineDump:
    """Writes a record of every program of one function, and a page and a picture of the last.

    As ``dump.ProgramDump`` does, into the folder ``name`` (``rank0/step0_0``) of ``folder``.
    """

    def __init__(
        self,
        folder: DumpFolder,
        name: str,
        ctx: PassContext,
        state_bytes: Mapping[tuple[int, int], float],
    ):
        self.folder, self.name = folder, name
        self.ctx = ctx
        self.state_bytes = state_bytes
        self.number = 0
        self.last: StepRecord | None = None

    def write(self, name: str, gm: fx.GraphModule) -> None:
        """Write the record of one more program."""
        if not self.folder.works:
            return
        ctx = self.ctx
        self.last = record_of(
            gm.graph,
            ctx.table,
            ctx.figures,
            ctx.world_size,
            title=self.name.rpartition("/")[2],
            program=f"{self.number:02d}_{name}",
            rank=ctx.rank,
            sockets=not ctx.options.peer_memory,
            state_bytes=self.state_bytes,
        )
        self.number += 1
        self._write(self.last.program + SUFFIX, self.last.to_json())

    def finish(self) -> None:
        """Write the page and the picture of the program that was written last."""
        if self.last is None:
            return
        self._write(self.last.program + PAGE_SUFFIX, page_of(self.last))
        self._write(self.last.program + SVG_SUFFIX, svg_of(self.last))

    def _write(self, name: str, text: str) -> None:
        self.folder.write(f"{self.name}/{name}", text)


def write_pictures(path: Path, record: StepRecord, measured: Sequence[Busy] = ()) -> list[Path]:
    """Write the page and the picture of a record next to its file; return where.

    The page has links to those of the records before and after it in its folder.
    """
    stem = path.name.removesuffix(SUFFIX)
    names = [other.name.removesuffix(SUFFIX) for other in records_in(path.parent)]
    at = names.index(stem)
    before, after = (
        names[other] + PAGE_SUFFIX if 0 <= other < len(names) else "" for other in (at - 1, at + 1)
    )
    page, picture = path.with_name(stem + PAGE_SUFFIX), path.with_name(stem + SVG_SUFFIX)
    _write_whole(page, page_of(record, measured=measured, before=before, after=after))
    _write_whole(picture, svg_of(record, measured=measured))
    return [page, picture]


def _write_whole(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all.  Raises: OSError that names it."""
    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        if error.filename is None:  # it was opened, and then there was no room
            path.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def records_in(folder: Path) -> list[Path]:
    """The records of one folder, in the order of the passes."""
    return sorted(path for path in folder.iterdir() if path.name.endswith(SUFFIX))
