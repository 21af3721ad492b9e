"""Buckets of flat tensors in scratch files, striped over directories, read and written ahead."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from zerofx.errors import FileTierError
from zerofx.runtime.memory.pages import aligned_empty
from zerofx.runtime.storage.disk.layout import ALIGNMENT, BucketLayout, Field, round_up
from zerofx.runtime.storage.disk.stripes import Stripes
from zerofx.runtime.storage.disk.system import SystemCalls
from zerofx.runtime.storage.disk.transfers import Operation, Piece, Transfers, bytes_of

MIN_BLOCK_BYTES = 512 * 1024


class FileStore:
    """Holds buckets in files, striped by blocks over directories, in a private folder of each.

    Operations on one bucket take effect in the order they were started; those on different
    buckets overlap.  What is being read into is undefined, and what is being written must not
    change, until ``wait`` returns.

    Each process opens its own store; several may share the directories.  The folders are removed
    by ``close``, at the latest when the process ends; after a kill by the next store there.  A
    forked child may not use its parent's.

    ``block_bytes`` is how much one call moves, ``depth`` how many calls are outstanding.
    ``checksums`` finds a changed block when it is read, at the cost of a CRC-32 over all that
    moves.

    Raises: ValueError for arguments that make no sense, FileTierError for a directory that
    cannot be used or has no room.
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
        _check_arguments(directories, block_bytes, depth)
        self.block_bytes = block_bytes
        self.layouts: dict[str, BucketLayout] = {}
        self._pid = os.getpid()
        self._numbers: dict[str, int] = {}
        self._written: set[tuple[str, str]] = set()
        self._last_write: dict[str, Operation] = {}
        self._reads: dict[str, list[Operation]] = {}

        system = system or SystemCalls()
        self._stripes = Stripes(directories, block_bytes, system)
        try:
            self._transfers = Transfers(depth, block_bytes, system, checksums=checksums)
        except BaseException:
            self._stripes.close()
            raise
        # Also when the interpreter exits, and nothing in it looks at this object.
        self._finalizer = weakref.finalize(
            self, _close, os.getpid(), self._transfers, self._stripes
        )
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
        for index, name in enumerate(names):
            if name in self.layouts or name in names[:index]:
                raise ValueError(
                    f"the store has a bucket {name!r} already, and buckets go by their names:"
                    " choose another name"
                )
        self._stripes.add([layout.nbytes for layout in layouts])
        first = self._stripes.num_buckets - len(layouts)
        for number, layout in enumerate(layouts, first):
            self._numbers[layout.bucket] = number
            self.layouts[layout.bucket] = layout

    def remove(self, bucket: str) -> None:
        """Give a bucket's room on disk back, once what is under way with it has ended.

        Raises: ValueError for a bucket that the store does not have.
        """
        self.layout(bucket)
        last_write = self._last_write.pop(bucket, None)
        under_way = [*self._reads.pop(bucket, ()), *([last_write] if last_write else [])]
        for operation in under_way:
            operation.wait_for_its_end()
        self._stripes.remove(self._numbers.pop(bucket))
        self._written = {(name, field) for name, field in self._written if name != bucket}
        del self.layouts[bucket]

    def was_written(self, bucket: str) -> bool:
        """Return whether any of a bucket is in its files, or on its way there."""
        return bucket in self._last_write

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
        self,
        bucket: str,
        into: torch.Tensor | Mapping[str, torch.Tensor],
        *,
        after: Iterable[Operation] = (),
    ) -> Operation:
        """Begin to read a bucket: all of it into memory laid out alike, or some of its fields.

        Shapes: uint8[layout.nbytes], or ``[field.numel]`` by the fields' names, on the CPU.  What
        begins at a multiple of ``ALIGNMENT`` is read without a copy, except for a last block.
        ``after`` are operations that must have ended before, of whatever bucket; if one is a write
        that fails, this one fails too.

        Raises: ValueError, TypeError for tensors that do not fit; FileTierError if a field was
        never written, or the store is unusable.
        """
        layout = self.layout(bucket)
        ranges = self._ranges(layout, into)
        for field, _ in ranges:
            if field.numel and (bucket, field.name) not in self._written:
                raise FileTierError(
                    f"field {field.name!r} of bucket {bucket!r} was never written, and its file"
                    " holds nothing yet: start_write it first",
                    bucket=bucket,
                )
        order = [self._last_write[bucket]] if bucket in self._last_write else []
        operation = self._start(layout, ranges, order, after, is_write=False)
        reads = self._reads.setdefault(bucket, [])
        reads[:] = [read for read in reads if not read.is_done]
        reads.append(operation)
        return operation

    def start_write(
        self,
        bucket: str,
        source: torch.Tensor | Mapping[str, torch.Tensor],
        *,
        after: Iterable[Operation] = (),
    ) -> Operation:
        """Begin to write a bucket, or some of its fields; the counterpart of ``start_read``.

        A write that fails makes the store unusable, whether it is waited for or not.
        """
        layout = self.layout(bucket)
        ranges = self._ranges(layout, source)
        order = list(self._reads.get(bucket, ()))
        if bucket in self._last_write:
            order.append(self._last_write[bucket])
        operation = self._start(layout, ranges, order, after, is_write=True)
        self._last_write[bucket] = operation
        self._reads.pop(bucket, None)
        self._written.update((bucket, field.name) for field, _ in ranges)
        return operation

    def wait(self, operation: Operation) -> None:
        """Return when an operation has ended: what was read is there, or is on disk.

        Raises: FileTierError with file, offset, bucket and errno if it failed.
        """
        operation.wait()

    def check_usable(self) -> None:
        """Raises: FileTierError if a write has failed, or the store is closed."""
        self._transfers.check_usable()

    @property
    def folders(self) -> list[str]:
        """This process's folder in each directory."""
        return self._stripes.folders

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

    @property
    def staging_bytes(self) -> int:
        """The memory that what is not aligned passes through: a block for each thread."""
        return self._transfers.staging.nbytes

    def close(self) -> None:
        """Give up what has not been waited for and remove the files.  Again is no error."""
        self._finalizer()

    def __enter__(self) -> FileStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(
        self,
        layout: BucketLayout,
        ranges: list[tuple[Field, torch.Tensor]],
        order: list[Operation],
        after: Iterable[Operation],
        *,
        is_write: bool,
    ) -> Operation:
        if os.getpid() != self._pid:
            raise FileTierError(
                f"this process was forked from {self._pid}, whose file store this is, and has none"
                " of its threads: open a store of its own"
            )
        self._transfers.check_usable()
        pieces = [piece for field, memory in ranges for piece in self._cut(layout, field, memory)]
        keeps = tuple(memory for _, memory in ranges)
        operation = Operation(layout.bucket, is_write, pieces, keeps)
        self._transfers.start(operation, [*order, *after])
        return operation

    def _ranges(
        self, layout: BucketLayout, tensors: torch.Tensor | Mapping[str, torch.Tensor]
    ) -> list[tuple[Field, torch.Tensor]]:
        """Each field's memory; with the padding after it if it is part of a whole bucket's."""
        if isinstance(tensors, torch.Tensor):
            _check_tensor(f"bucket {layout.bucket!r}", tensors, torch.uint8, layout.nbytes)
            return [
                (
                    field,
                    tensors.narrow(
                        0, layout.offsets[field.name], round_up(field.nbytes, ALIGNMENT)
                    ),
                )
                for field in layout.fields
            ]
        fields = {field.name: field for field in layout.fields}
        for name, tensor in tensors.items():
            if name not in fields:
                raise ValueError(
                    f"bucket {layout.bucket!r} has no field {name!r}. Known: {', '.join(fields)}"
                )
            _check_tensor(
                f"field {name!r} of bucket {layout.bucket!r}",
                tensor,
                fields[name].dtype,
                fields[name].numel,
            )
        return [(fields[name], tensor) for name, tensor in tensors.items()]

    def _cut(self, layout: BucketLayout, field: Field, tensor: torch.Tensor) -> Iterator[Piece]:
        """Cut a field where blocks end, always alike: checksums are of pieces."""
        memory, address = bytes_of(tensor), tensor.data_ptr()
        number = self._numbers[layout.bucket]
        start, position = layout.offsets[field.name], 0
        while position < field.nbytes:
            file, offset, left = self._stripes.locate(number, start + position)
            nbytes = min(left, field.nbytes - position)
            is_last = position + nbytes == field.nbytes
            yield Piece(
                name=f"field {field.name!r}",
                file=file,
                offset=offset,
                nbytes=nbytes,
                memory=memory[position:] if is_last else memory[position : position + nbytes],
                address=address + position,
            )
            position += nbytes


def _close(pid: int, transfers: Transfers, stripes: Stripes) -> None:
    if os.getpid() != pid:
        return
    if transfers.is_own_thread:
        # A garbage collection in one of the threads found the store: none can wait for itself.
        threading.Thread(target=_close, args=(pid, transfers, stripes)).start()
        return
    transfers.close()
    stripes.close()


def _check_arguments(
    directories: Sequence[str | os.PathLike[str]], block_bytes: int, depth: int
) -> None:
    if isinstance(directories, str | os.PathLike):
        raise TypeError(f"directories is a list of them, not one: give [{str(directories)!r}]")
    if not directories:
        raise ValueError("the file tier needs at least one directory")
    real = [os.path.realpath(directory) for directory in directories]
    if len(set(real)) != len(real):
        raise ValueError(
            f"one directory is named twice, of {', '.join(real)}: striping is over different"
            " disks. Name each once"
        )
    if block_bytes < MIN_BLOCK_BYTES or block_bytes % ALIGNMENT:
        raise ValueError(
            f"block_bytes must be a multiple of {ALIGNMENT}, from {MIN_BLOCK_BYTES} on (smaller"
            f" calls do not keep a disk busy), not {block_bytes}"
        )
    if depth < 1:
        raise ValueError(f"depth is how many calls are outstanding, 1 or more, not {depth}")


def _check_tensor(what: str, tensor: torch.Tensor, dtype: torch.dtype, numel: int) -> None:
    if tensor.device.type != "cpu":
        raise TypeError(
            f"{what} moves between files and host memory, and the tensor is on {tensor.device}:"
            " give one that store.empty() made, and copy between it and the device"
        )
    if tensor.dtype != dtype or tensor.numel() != numel:
        raise ValueError(
            f"{what} has {numel} elements of {dtype}, and the tensor has {tensor.numel()} of"
            f" {tensor.dtype}: give one that fits"
        )
    if not tensor.is_contiguous():
        raise ValueError(f"{what} moves as one range of memory: give a contiguous tensor")
