"""Buckets of flat tensors in scratch files, striped over directories, read and written ahead."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Sequence

import torch

from zerofx.errors import FileTierError
from zerofx.runtime.storage.disk.layout import BucketLayout, bytes_of
from zerofx.runtime.storage.disk.stripes import StripeFile, Stripes
from zerofx.runtime.storage.disk.system import SystemCalls
from zerofx.runtime.storage.disk.transfers import Operation, Piece, Transfers


class FileStore:
    """Holds buckets in files, striped by blocks over directories.

    Operations on one bucket take effect in the order they were started; those on different
    buckets overlap.  What is being read into is undefined, and what is being written must not
    change, until the operation's ``wait`` returns.

    Each process opens its own store; several may share the directories.  The files have no names,
    and are gone after ``close``, or when the process ends.  A forked child may not use its
    parent's.

    ``block_bytes`` is how much one call moves, a multiple of ``ALIGNMENT``, and ``depth`` how many
    calls are outstanding.
    ``checksums`` finds a changed block when it is read, at the cost of a CRC-32 over all that
    moves.

    ``layouts`` are those of the buckets that it has, ``files`` their files, by name.  ``written``
    are those of which something that is needed is in the files, or on its way there.

    Raises: ValueError for directories that make no sense, FileTierError for one that cannot be
    used.
    """

    def __init__(
        self,
        directories: Sequence[str | os.PathLike[str]],
        *,
        block_bytes: int = 2**20,
        depth: int = 32,
        checksums: bool = False,
        system: SystemCalls | None = None,
    ) -> None:
        _check_directories(directories)
        self.block_bytes = block_bytes
        self.layouts: dict[str, BucketLayout] = {}
        self.files: dict[str, list[StripeFile]] = {}
        self._pid = os.getpid()
        self._under_way: dict[str, list[Operation]] = {}
        self.written: set[str] = set()

        system = system or SystemCalls()
        self.stripes = Stripes(directories, block_bytes, system)
        self.transfers = Transfers(depth, system, checksums=checksums)
        # Also when the interpreter exits, and nothing in it looks at this object.
        self._finalizer = weakref.finalize(self, _close, os.getpid(), self.transfers, self.files)

    def add(self, layouts: Iterable[BucketLayout]) -> None:
        """Make room on disk for more buckets, of other names, for all of them or for none.

        Raises: FileTierError with what is needed and what is free if there is no room.
        """
        self.transfers.check_usable()
        layouts = list(layouts)
        names = [layout.bucket for layout in layouts]
        made = self.stripes.make([layout.nbytes for layout in layouts])
        self.files.update(zip(names, made, strict=True))
        self.layouts.update(zip(names, layouts, strict=True))

    def lay_out_anew(self, layout: BucketLayout) -> None:
        """Give a bucket files of another layout, in which nothing has been written.

        Raises: FileTierError if there is no room, besides the files that it has; it keeps these.
        """
        (files,) = self.stripes.make([layout.nbytes])
        self.remove(layout.bucket)
        self.files[layout.bucket], self.layouts[layout.bucket] = files, layout

    def remove(self, bucket: str) -> None:
        """Give a bucket's room on disk back, once what is under way with it has ended."""
        for operation in self._under_way.pop(bucket, ()):
            operation.wait_for_its_end()
        _close_files(self.files.pop(bucket))
        self.written.discard(bucket)
        del self.layouts[bucket]

    def start_read(
        self, bucket: str, into: torch.Tensor, *, after: Iterable[Operation] = ()
    ) -> Operation:
        """Begin to read a bucket into memory.

        ``after`` are operations that must have ended before, of whatever bucket; if one is a write
        that fails, this one fails too.

        Shapes: uint8[layout.nbytes] on the CPU, from a multiple of ``ALIGNMENT`` on.
        Raises: FileTierError if the bucket was never written, or the store is unusable.
        """
        if self.layouts[bucket].nbytes and bucket not in self.written:
            raise FileTierError(
                f"bucket {bucket!r} was never written, and its file holds nothing yet:"
                " start_write it first",
                bucket=bucket,
            )
        return self._start(bucket, into, after, is_write=False)

    def start_write(
        self, bucket: str, source: torch.Tensor, *, after: Iterable[Operation] = ()
    ) -> Operation:
        """Begin to write a bucket; the counterpart of ``start_read``.

        A write that fails makes the store unusable, whether it is waited for or not.
        """
        operation = self._start(bucket, source, after, is_write=True)
        self.written.add(bucket)
        return operation

    def close(self) -> None:
        """Give up what has not been waited for and close the files.  Again is no error."""
        self._finalizer()

    def _start(
        self, bucket: str, memory: torch.Tensor, after: Iterable[Operation], *, is_write: bool
    ) -> Operation:
        layout = self.layouts[bucket]
        assert memory.dtype == torch.uint8 and memory.nbytes == layout.nbytes
        if os.getpid() != self._pid:
            raise FileTierError(
                f"this process was forked from {self._pid}, whose file store this is, and has none"
                " of its threads: open a store of its own"
            )
        others = [one for one in self._under_way.get(bucket, ()) if not one.is_done]
        order = [one for one in others if is_write or one.is_write]
        nbytes = sum(part.nbytes for part in layout.parts)
        operation = Operation(bucket, is_write, nbytes, self._cut(layout, memory), memory)
        self.transfers.start(operation, [*order, *after])
        self._under_way[bucket] = [*others, operation]
        return operation

    def _cut(self, layout: BucketLayout, memory: torch.Tensor) -> list[Piece]:
        """Cut a bucket into blocks, always alike: checksums are of pieces."""
        files, size, view = self.files[layout.bucket], self.block_bytes, bytes_of(memory)
        return [
            Piece(
                words=layout.names_in(start, start + size),
                file=files[block % len(files)],
                offset=block // len(files) * size,
                memory=view[start : start + size],
            )
            for block, start in enumerate(range(0, layout.nbytes, size))
        ]


def _close(pid: int, transfers: Transfers, files: dict[str, list[StripeFile]]) -> None:
    if os.getpid() != pid:
        return
    if transfers.is_own_thread:
        # A garbage collection in one of the threads found the store: none can wait for itself.
        threading.Thread(target=_close, args=(pid, transfers, files)).start()
        return
    transfers.close()
    for each in files.values():
        _close_files(each)


def _close_files(files: Iterable[StripeFile]) -> None:
    for one in files:
        one.file.close()


def _check_directories(directories: Sequence[str | os.PathLike[str]]) -> None:
    if not directories:
        raise ValueError("the file tier needs at least one directory")
    real = [os.path.realpath(directory) for directory in directories]
    if len(set(real)) != len(real):
        raise ValueError(
            f"one directory is named twice, of {', '.join(real)}: striping is over different"
            " disks. Name each once"
        )
