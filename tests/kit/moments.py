"""The moments of a process at which what others find on the disk may change, by number.

Audit events tell of opening, making, renaming and removing, whoever does it; what Python does not
audit (writing to a stream, making room, waiting for the disk) and what is copied into files that
are mapped is patched.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import filesystem

from zerofx.checkpoint import safetensors
from zerofx.checkpoint.targets import Target

_AUDITED = frozenset(
    (
        *("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"),
        *("os.scandir", "os.listdir", "fcntl.flock"),
    )
)

Act = Callable[[int, str], object]


class Moments:
    """Calls ``act`` with a number and words before each operation below ``root``.

    From when it is made to the end of the process: an audit hook stays.  Of writes to a stream one
    in ``every_write`` counts.
    """

    def __init__(self, root: str | Path, act: Act, every_write: int = 1) -> None:
        self.root, self.act, self.count = str(root), act, 0
        self.every_write, self.writes = every_write, 0
        sys.addaudithook(self._audited)
        for name in ("fsync", "pwrite", "posix_fallocate"):
            self._before(os, name)
        self._before(Target, "fill", "assign")
        self._before(safetensors, "_copy_part", "copy")
        self._streams()

    def here(self, what: str) -> None:
        """This is one."""
        number, self.count = self.count, self.count + 1
        self.act(number, what)

    def _audited(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _AUDITED and self._is_below(arguments[0]):
            name = arguments[0] if isinstance(arguments[0], int) else Path(arguments[0]).name
            self.here(f"{event} {name}")

    def _is_below(self, path: Any) -> bool:
        if isinstance(path, int):
            return True  # what is open has been audited when it was opened
        text = os.fsdecode(path)
        return text.startswith(self.root) or not os.path.isabs(text)  # or below a folder's number

    def _before(self, owner: Any, name: str, what: str = "") -> None:
        original = getattr(owner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            self.here(what or name)
            return original(*arguments, **named)

        setattr(owner, name, call)

    def _streams(self) -> None:
        original = filesystem.FileSystem.create_stream

        @contextlib.contextmanager
        def create_stream(system: Any, path: Any, mode: str) -> Iterator[Any]:
            with original(system, path, mode) as stream:
                yield _Written(stream, self) if "w" in mode else stream

        filesystem.FileSystem.create_stream = create_stream


class _Written:
    """A stream of which all that was written before a moment is in the file."""

    def __init__(self, stream: Any, moments: Moments) -> None:
        self._stream, self._moments = stream, moments

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, data: Any) -> int:
        self._stream.flush()
        self._moments.writes += 1
        if self._moments.writes % self._moments.every_write == 0:
            self._moments.here("write")
        return self._stream.write(data)


def killing(at: int, *processes: int) -> Act:
    """Kill these processes at a moment, this one last."""

    def act(number: int, what: str) -> None:
        if number == at:
            for process in sorted(processes, key=lambda process: process == os.getpid()):
                os.kill(process, signal.SIGKILL)

    return act


def failing(at: int) -> Act:
    """Have the operation of a moment fail as on a full disk."""

    def act(number: int, what: str) -> None:
        if number == at and what != "return":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), what)

    return act
