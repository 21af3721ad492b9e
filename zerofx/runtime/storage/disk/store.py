"""Buckets of flat tensors in scratch files, striped over directories, read and written ahead."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import IO

import torch

from zerofx.errors import FileTierError
from zerofx.runtime.memory.pages import aligned_empty
from zerofx.runtime.storage.disk.layout import ALIGNMENT, BucketLayout, bytes_of
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

    Raises: ValueError for directories that make no sense, FileTierError for one that cannot be used
    or has no room.
    """

    def __init__(
        self,
        directories: Sequence[str | os.PathLike[str]],
        layouts: Iterable[BucketLayout] = (),
        *,
        block_bytes: int = 2**20,
        depth: int = 32,
        checksums: bool = False,
        system: SystemCalls | None = None,
    ) -> None:
        _check_directories(directories)
        self.block_bytes = block_bytes
        self.layouts: dict[str, BucketLayout] = {}
        self._pid = os.getpid()
        self._files: dict[str, list[StripeFile]] = {}
        self._under_way: dict[str, list[Operation]] = {}
        self._written: set[str] = set()

        system = system or SystemCalls()
        self._stripes = Stripes(directories, block_bytes, system)
        self._transfers = Transfers(depth, system, checksums=checksums)
        # Also when the interpreter exits, and nothing in it looks at this object.
        self._finalizer = weakref.finalize(self, _close, os.getpid(), self._transfers, self._files)
        try:
            self.add(layouts)
        except BaseException:
            self.close()
            raise

    def add(self, layouts: Iterable[BucketLayout]) -> None:
        """Make room on disk for more buckets, for all of them or for none.

        Raises: ValueError for a name that is there already, FileTierError with what is needed
        and what is free if there is no room.
        """
        self._transfers.check_usable()
        layouts = list(layouts)
        names = [layout.bucket for layout in layouts]
        if not self.layouts.keys().isdisjoint(names) or len(set(names)) < len(names):
            raise ValueError(f"buckets go by their names, and two have one of {', '.join(names)}")
        made = self._stripes.make([layout.nbytes for layout in layouts])
        self._files.update(zip(names, made, strict=True))
        self.layouts.update(zip(names, layouts, strict=True))

    def lay_out_anew(self, layout: BucketLayout) -> None:
        """Give a bucket files of another layout, in which nothing has been written.

        Raises: FileTierError if there is no room, besides the files that it has; it keeps these.
        """
        (files,) = self._stripes.make([layout.nbytes])
        self.remove(layout.bucket)
        self._files[layout.bucket], self.layouts[layout.bucket] = files, layout

    def remove(self, bucket: str) -> None:
        """Give a bucket's room on disk back, once what is under way with it has ended.

        Raises: ValueError for a bucket that the store does not have.
        """
        self.layout(bucket)
        for operation in self._under_way.pop(bucket, ()):
            operation.wait_for_its_end()
        _close_files(self._files.pop(bucket))
        self._written.discard(bucket)
        del self.layouts[bucket]

    def was_written(self, bucket: str) -> bool:
        """Return whether any of a bucket is in its files, or on its way there."""
        return bucket in self._written

    def forget(self, bucket: str) -> None:
        """Note that nothing needs what a bucket's files hold: it is as if never written."""
        self._written.discard(bucket)

    def empty(self, bucket: str) -> torch.Tensor:
        """Memory for a whole bucket, which moves without a copy; pinned if there is CUDA.

        Shapes: uint8[layout.nbytes].
        """
        return aligned_empty(self.layout(bucket).nbytes, pinned=torch.cuda.is_available())

    def layout(self, bucket: str) -> BucketLayout:
        """Raises: ValueError for a bucket that the store does not have."""
        layout = self.layouts.get(bucket)
        if layout is None:
            raise ValueError(
                f"the store has no bucket {bucket!r}; add its layout first."
                f" Known: {', '.join(self.layouts) or 'none'}"
            )
        return layout

    def start_read(
        self, bucket: str, into: torch.Tensor, *, after: Iterable[Operation] = ()
    ) -> Operation:
        """Begin to read a bucket into memory that ``empty`` has made, or is like it.

        ``after`` are operations that must have ended before, of whatever bucket; if one is a write
        that fails, this one fails too.

        Shapes: uint8[layout.nbytes] on the CPU, from a multiple of ``ALIGNMENT`` on.
        Raises: ValueError, TypeError for a tensor that does not fit; FileTierError if the bucket
        was never written, or the store is unusable.
        """
        if self.layout(bucket).nbytes and bucket not in self._written:
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
        self._written.add(bucket)
        return operation

    def check_usable(self) -> None:
        """Raises: FileTierError if a write has failed, or the store is closed."""
        self._transfers.check_usable()

    def files(self, bucket: str) -> list[IO[bytes]]:
        """The files of a bucket, for who looks at it from outside: tests and benchmarks."""
        return [one.file for one in self._files[bucket]]

    @property
    def is_direct(self) -> list[bool]:
        """For each directory, whether its files are read and written past the page cache."""
        return list(self._stripes.is_direct)

    @property
    def bytes_read(self) -> int:
        """The bytes that operations have read since the store was opened, without padding."""
        return self._transfers.bytes_read

    @property
    def bytes_written(self) -> int:
        return self._transfers.bytes_written

    def close(self) -> None:
        """Give up what has not been waited for and close the files.  Again is no error."""
        self._finalizer()

    def __enter__(self) -> FileStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(
        self, bucket: str, memory: torch.Tensor, after: Iterable[Operation], *, is_write: bool
    ) -> Operation:
        layout = self.layout(bucket)
        _check_tensor(layout, memory)
        if os.getpid() != self._pid:
            raise FileTierError(
                f"this process was forked from {self._pid}, whose file store this is, and has none"
                " of its threads: open a store of its own"
            )
        self._transfers.check_usable()
        others = [one for one in self._under_way.get(bucket, ()) if not one.is_done]
        order = [one for one in others if is_write or one.is_write]
        nbytes = sum(part.nbytes for part in layout.parts)
        operation = Operation(bucket, is_write, nbytes, self._cut(layout, memory), memory)
        self._transfers.start(operation, [*order, *after])
        self._under_way[bucket] = [*others, operation]
        return operation

    def _cut(self, layout: BucketLayout, memory: torch.Tensor) -> list[Piece]:
        """Cut a bucket into blocks, always alike: checksums are of pieces."""
        files, size, view = self._files[layout.bucket], self.block_bytes, bytes_of(memory)
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


def _check_tensor(layout: BucketLayout, tensor: torch.Tensor) -> None:
    what = f"bucket {layout.bucket!r}"
    if tensor.device.type != "cpu":
        raise TypeError(
            f"{what} moves between files and host memory, and the tensor is on {tensor.device}:"
            " give one that store.empty() made, and copy between it and the device"
        )
    if tensor.dtype != torch.uint8 or tensor.numel() != layout.nbytes:
        raise ValueError(
            f"{what} has {layout.nbytes} elements of torch.uint8, and the tensor has"
            f" {tensor.numel()} of {tensor.dtype}: give one that fits"
        )
    if not tensor.is_contiguous() or tensor.data_ptr() % ALIGNMENT:
        raise ValueError(
            f"{what} moves as one range of memory, from a multiple of {ALIGNMENT} bytes on: give a"
            " tensor that store.empty() made"
        )
