"""Reads and writes that go on while the caller computes: threads over preadv and pwritev.

Both calls release the GIL and move a whole block, so threads keep as many blocks outstanding as
there are of them.  Why threads: docs/decisions/files-are-read-by-threads.md.
"""

from __future__ import annotations

import errno
import threading
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch

from zerofx.errors import FileTierError
from zerofx.runtime.storage.disk.layout import ALIGNMENT
from zerofx.runtime.storage.disk.stripes import StripeFile
from zerofx.runtime.storage.disk.system import SystemCalls

MAX_STALLS = 8
"""The number of calls without progress that count as a failure."""


_WHERE = ("path", "bucket", "offset", "errno")


@dataclass(frozen=True)
class Piece:
    """A range of a bucket that lies in one block of one file: aligned there and in memory.

    ``words`` say which parts of the bucket are in it.
    """

    words: str
    file: StripeFile
    offset: int
    memory: memoryview


@dataclass(eq=False)
class Operation:
    """A read or a write under way of ``nbytes`` and their padding; ``wait`` waits for it."""

    bucket: str
    is_write: bool
    nbytes: int
    pieces: list[Piece]
    memory: torch.Tensor | None = field(repr=False)
    error: Exception | None = None
    is_done: bool = False
    _remaining: int = field(default=0, repr=False)
    _blockers: int = field(default=0, repr=False)
    _dependents: list[Operation] = field(default_factory=list, repr=False)
    _finished: threading.Event = field(default_factory=threading.Event, repr=False)

    def wait(self) -> None:
        """Return when it has ended: what was read is there, or is on disk.

        Raises: FileTierError with directory, offset, bucket and errno if it failed.
        """
        self.wait_for_its_end()
        if self.error is not None:
            raise self.error

    def wait_for_its_end(self) -> None:
        """Return when no byte of it moves any more, whether it has failed or not."""
        self._finished.wait()


class Transfers:
    """``depth`` threads that carry out operations, straight between files and memory.

    After a failed write ``broken`` says what failed, and nothing more can be started.
    """

    def __init__(self, depth: int, system: SystemCalls, *, checksums: bool) -> None:
        self.broken: Exception | None = None
        self.bytes_read = 0
        self.bytes_written = 0
        self._system = system
        self._has_checksums = checksums
        self._lock = threading.Lock()
        self._queue: SimpleQueue[tuple[Operation, Piece | None] | None] = SimpleQueue()
        self._open: set[Operation] = set()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"zerofx-files-{index}", daemon=True)
            for index in range(depth)
        ]
        for thread in self._threads:
            thread.start()

    def check_usable(self) -> None:
        """Raises: FileTierError if the store is closed, or a write has failed."""
        if self._closed:
            raise FileTierError("the file store is closed: make another one")
        if self.broken is not None:
            raise FileTierError(
                "the file store is unusable since a write failed, for what its files hold is no"
                f" longer whole: {self.broken}",
                **{name: getattr(self.broken, name, None) for name in _WHERE},
            ) from self.broken

    def start(self, operation: Operation, after: Iterable[Operation]) -> None:
        """Carry out an operation once those before it have ended.

        A write before it that fails makes it fail with the same error.  A read that fails does
        not: that is for whoever waits for it.

        Raises: FileTierError if the store is unusable.
        """
        with self._lock:
            self.check_usable()
            operation._remaining = max(1, len(operation.pieces))
            self._open.add(operation)
            for other in after:
                if not other.is_done:
                    other._dependents.append(operation)
                    operation._blockers += 1
            if operation._blockers == 0:
                self._enqueue(operation)

    @property
    def is_own_thread(self) -> bool:
        return threading.current_thread() in self._threads

    def close(self) -> None:
        """Let the calls under way end, drop those that have not begun, and stop the threads."""
        with self._lock:
            self._closed = True
            waiting = list(self._open)
        for operation in waiting:
            operation._finished.wait()
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _enqueue(self, operation: Operation) -> None:
        pieces: list[Piece | None] = [*operation.pieces]
        for piece in pieces or [None]:
            self._queue.put((operation, piece))

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            operation, piece = item
            try:
                if self._closed:
                    raise FileTierError(
                        f"{_doing(operation)} was given up: the store was closed before it ended."
                        " Wait for what was started, then close"
                    )
                if piece is not None and operation.error is None:
                    self._move(operation, piece)
            except Exception as error:
                with self._lock:
                    operation.error = operation.error or error
            with self._lock:
                operation._remaining -= 1
                if operation._remaining == 0:
                    self._finish(operation)
            del item, operation, piece

    def _finish(self, operation: Operation) -> None:
        if operation.error is not None:
            if operation.is_write and not self._closed:
                self.broken = self.broken or operation.error
        elif operation.is_write:
            self.bytes_written += operation.nbytes
        else:
            self.bytes_read += operation.nbytes
        operation.is_done = True
        operation.pieces, operation.memory = [], None  # a handle that is kept keeps no memory
        self._open.discard(operation)
        for dependent in operation._dependents:
            if operation.is_write:
                dependent.error = dependent.error or operation.error
            dependent._blockers -= 1
            if dependent._blockers == 0:
                self._enqueue(dependent)
        operation._dependents = []
        operation._finished.set()

    def _move(self, operation: Operation, piece: Piece) -> None:
        file, is_write = piece.file, operation.is_write
        if is_write and self._has_checksums:
            file.checksums[piece.offset] = zlib.crc32(piece.memory)
        try:
            self._call_until_moved(operation, piece)
            if is_write and not file.is_direct:
                self._system.sync(file.file.fileno())
        except OSError as error:
            raise _failure(operation, piece, error) from error
        if not is_write and self._has_checksums:
            _check(operation, piece)

    def _call_until_moved(self, operation: Operation, piece: Piece) -> None:
        """Call until all of it has moved.  A short call is gone on with, where alignment allows.

        Raises: FileTierError at the end of the file, and if calls move nothing.
        """
        call = self._system.pwritev if operation.is_write else self._system.preadv
        file, memory, done, stalls = piece.file, piece.memory, 0, 0
        while done < len(memory):
            moved = call(file.file.fileno(), [memory[done:]], piece.offset + done)
            if moved == 0 and not operation.is_write:
                raise FileTierError(
                    f"{_doing(operation)} met the end of its file in {file.directory} at byte"
                    f" {piece.offset + done}, where {len(memory) - done} more were written:"
                    " something cut it short. Its values are lost: start again from a checkpoint",
                    path=file.directory,
                    bucket=operation.bucket,
                    offset=piece.offset + done,
                )
            end = done + moved
            if file.is_direct and end < len(memory):
                end -= end % ALIGNMENT
            stalls = 0 if end > done else stalls + 1
            if stalls == MAX_STALLS:
                raise OSError(errno.EIO, f"{stalls} calls in a row moved less than {ALIGNMENT} B")
            done = end


def _check(operation: Operation, piece: Piece) -> None:
    """Raise FileTierError if what was read is not what was written."""
    written, found = piece.file.checksums[piece.offset], zlib.crc32(piece.memory)
    if found == written:
        return
    raise FileTierError(
        f"bucket {operation.bucket!r} is not what was written: {len(piece.memory)} bytes of"
        f" {piece.words} at byte {piece.offset} of its file in {piece.file.directory} have the"
        f" CRC-32 {found:08x}, and had {written:08x} when they were written (a bit flip, or a write"
        " that reached the disk in part). Check the disk, use another directory, and start"
        " again from a checkpoint",
        path=piece.file.directory,
        bucket=operation.bucket,
        offset=piece.offset,
    )


def _doing(operation: Operation) -> str:
    return f"{'writing' if operation.is_write else 'reading'} bucket {operation.bucket!r}"


def _failure(operation: Operation, piece: Piece, error: OSError) -> FileTierError:
    """The error of a call on a file, with what failed and what to do."""
    remedies = {
        errno.ENOSPC: (
            "the disk is full although room was reserved (a file system that copies on write"
            " reserves none): free space in {folder}"
        ),
        errno.EDQUOT: "this user's quota is used up: free space or raise it",
        errno.EIO: "the device or its connection fails: look at the kernel's log (dmesg)",
    }
    remedy = remedies.get(error.errno or 0, "see to the file system")
    directory = piece.file.directory
    message = (
        f"{_doing(operation)} failed at byte {piece.offset} of its file in {directory}"
        f" ({len(piece.memory)} bytes of {piece.words}): errno {error.errno}, {error.strerror}:"
        f" {remedy.format(folder=directory)}, or use another directory."
    )
    if operation.is_write:
        message += " The store is unusable from here on: start again from a checkpoint"
    else:
        message += " What was read into is of no use"
    return FileTierError(
        message, path=directory, bucket=operation.bucket, offset=piece.offset, errno=error.errno
    )
