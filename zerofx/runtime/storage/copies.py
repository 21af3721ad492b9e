"""Copies between a device and the host: on streams or by threads, and waited for by events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zerofx.accelerator import is_accelerator, module_of
from zerofx.runtime.memory.flat import adjoin, join
from zerofx.runtime.memory.pages import BufferPool
from zerofx.runtime.storage.bucket import Place, ValueBucket
from zerofx.runtime.storage.memory import HostMemory
from zerofx.worker import Job, Worker


class Copies:
    """The moves of one compiled function, its staging buffers and its updates in host memory.

    ``slots`` are the buffers, by their place and number: in host memory, or with files behind it.
    ``*_start`` returns the tensor that ``wait`` completes.  What moves must not change before.
    Without a GPU, a move is a copy that is made as it starts, or by the worker of its way in
    ``workers``.  The code for CUDA streams has not been run on a GPU.
    """

    def __init__(self, memory: HostMemory) -> None:
        self.memory = memory
        self.updates = Worker("updates")
        self.workers: Mapping[str, Worker] = {}
        self.to_host_bytes = self.to_device_bytes = 0  # since it was made, for tests
        self.slots: dict[tuple[Place, int], ValueBucket] = {}
        self._started: dict[int, tuple[Tensor, Sequence[Tensor], torch.device | None, Any]] = {}
        self._streams: dict[tuple[torch.device, str], Any] = {}

    def to_host_start(
        self, pieces: Sequence[Tensor], slot: int, place: Place | None = None
    ) -> Tensor:
        """Start copying flat tensors, one behind the other, to a staging buffer.

        One in host memory grows as it has to; of another ``place`` it is large enough.
        """
        first = pieces[0]
        nbytes = sum(piece.numel() for piece in pieces) * first.itemsize
        buffer = self._slot(place or self.memory, slot, nbytes, first.device).acquired()
        into = buffer[:nbytes].view(first.dtype)
        if is_accelerator(first.device):
            # What was there may not have left yet, if it was copied for a call on another stream.
            after = self.memory.copied(buffer)
            event = self._copy_beside("to host", first.device, pieces, into, [into], after)
        else:
            event = self._copy_by_worker("to host", pieces, into)
        self.to_host_bytes += into.nbytes
        self._started[id(into)] = into, pieces, first.device, event
        return into

    def to_device_start(
        self, pieces: Sequence[Tensor], device: torch.device, buffers: BufferPool | None = None
    ) -> Tensor:
        """Start copying flat tensors in host memory, one behind the other, to a device.

        Without a GPU, to one of these ``buffers`` if they are given.
        """
        numel = sum(piece.numel() for piece in pieces)
        event: Any
        if is_accelerator(device):
            into = torch.empty(numel, dtype=pieces[0].dtype, device=device)
            event = self._copy_beside("to device", device, pieces, into, pieces)
        else:
            like = pieces[0]
            into = buffers.empty(numel, like) if buffers is not None else like.new_empty(numel)
            event = self._copy_by_worker("to device", pieces, into)
        self.to_device_bytes += into.nbytes
        self._started[id(into)] = into, pieces, device, event
        return into

    def store_start(self, pieces: Sequence[Tensor], shards: Sequence[Tensor]) -> list[Tensor]:
        """Start copying flat tensors on a device to shards in host memory, each to its own."""
        device, event = pieces[0].device, None
        into, sent = list(shards), list[Tensor]()
        for parts, place in _to_neighbours(pieces, into):
            sent += parts  # which the copy reads, and may be no pieces
            if is_accelerator(device):
                # Behind what has been brought from there, which it waited for.
                event = self._copy_beside("to host", device, parts, place)
            else:
                event = self._copy_by_worker("to host", parts, place)
        self.to_host_bytes += sum(piece.nbytes for piece in pieces)
        self._started[id(into)] = into, sent, None, event
        return into

    def offload_start(self, value: Tensor, slot: int, place: Place | None = None) -> Tensor:
        """Start copying a value to a staging buffer, where it has its shape and strides.

        ``wait`` lets go of its memory on the device: kernels that the device is given later may
        use it.
        """
        moved = self.to_host_start([_span(value)], slot, place)
        return self._laid_out(moved, value, value.device)

    @staticmethod
    def span_bytes(value: Tensor) -> int:
        """Return the bytes that a value takes where ``offload_start`` copies it."""
        return _span(value).nbytes

    def reload_start(self, host: Tensor, device: torch.device) -> Tensor:
        """Start copying back what ``offload_start`` has moved, to memory of its own."""
        return self._laid_out(self.to_device_start([_span(host)], device), host, device)

    def _laid_out(self, into: Tensor, like: Tensor, device: torch.device) -> Tensor:
        """Return the memory that a move writes to, as a tensor laid out like another."""
        laid_out = into.as_strided(like.shape, like.stride())
        _, pieces, _, event = self._started.pop(id(into))
        self._started[id(laid_out)] = laid_out, pieces, device, event
        return laid_out

    def wait(self, started: Any) -> Any:
        """Complete a move: the device's kernels may use what it has read and written.

        The host waits here for shards that are stored; for anything else that it reads, it asks
        ``arrival`` or ``HostMemory.settle``.
        """
        into, _, device, event = self._started.pop(id(started))
        if device is None or event is None or isinstance(event, Job):
            _complete(event)
        else:
            module_of(device).current_stream(device).wait_event(event)
        return into

    def arrival(self, started: Tensor) -> Callable[[], object]:
        """Return a function that returns, in any thread, when a move to the host has ended."""
        *_, event = self._started[id(started)]
        return partial(_complete, event)

    def bytes_to_come(self, staging: Mapping[int, int]) -> int:
        """Return the bytes that staging buffers of these sizes, by number, will take beyond now."""
        buckets = {slot: self.slots.get((self.memory, slot)) for slot in staging}
        there = {slot: bucket.num_bytes for slot, bucket in buckets.items() if bucket is not None}
        return sum(max(nbytes - there.get(slot, 0), 0) for slot, nbytes in staging.items())

    def complete(self) -> None:
        """Wait for what is under way, and forget it: updates that have not begun are left to do."""
        for *_, event in self._started.values():
            _complete(event)
        self._started.clear()

    def abandon(self) -> None:
        """Forget what is under way, after a step that failed."""
        for worker in (self.updates, *self.workers.values()):
            worker.abandon()
        for *_, event in self._started.values():
            if not isinstance(event, Job):
                _complete(event)
        self._started.clear()

    def _slot(self, place: Place, slot: int, nbytes: int, device: torch.device) -> ValueBucket:
        """The staging buffer of this number, as large as it has ever had to be."""
        bucket = self.slots.get((place, slot))
        if bucket is None:
            bucket = ValueBucket(place, f"staging buffer {slot}", nbytes, device)
            self.slots[place, slot] = bucket
        elif bucket.num_bytes < nbytes:
            bucket.resize(nbytes)
        return bucket

    def _copy_by_worker(self, way: str, pieces: Sequence[Tensor], into: Tensor) -> Job | None:
        """Have the worker of this way copy, or copy now if it has none."""
        if way in self.workers:
            return self.workers[way].start(partial(_copy, pieces, into))
        _copy(pieces, into)
        return None

    def _copy_beside(
        self,
        way: str,
        device: torch.device,
        pieces: Sequence[Tensor],
        into: Tensor,
        on_host: Sequence[Tensor] = (),
        after: Iterable[Any] = (),
    ) -> Any:
        """Copy on a stream of this way's own, behind what the device has been given until now.

        And behind the events ``after``.  Host memory is told when it can write to ``on_host``.
        """
        if (device, way) not in self._streams:
            self._streams[device, way] = module_of(device).Stream(device)
        stream = self._streams[device, way]
        stream.wait_stream(module_of(device).current_stream(device))
        for earlier in after:
            stream.wait_event(earlier)
        with module_of(device).stream(stream):
            _copy(pieces, into)
            event = module_of(device).Event()
            event.record(stream)
        for there in on_host:
            self.memory.is_copied_until(event, there, stream)
        return event  # and no record_stream: whoever uses the memory waits for this


def _complete(event: Any) -> None:
    """Return when a copy has been made: by a worker, or in a GPU's stream."""
    if isinstance(event, Job):
        event.result()
    elif event is not None:
        event.synchronize()


def _to_neighbours(
    pieces: Sequence[Tensor], shards: Sequence[Tensor]
) -> Iterator[tuple[Sequence[Tensor], Tensor]]:
    """Yield copies to make: one to shards that lie next to each other, or one for each."""
    pairs = [
        (piece if piece.shape == shard.shape else piece.expand(shard.shape).contiguous(), shard)
        for piece, shard in zip(pieces, shards, strict=True)
        if shard.numel()
    ]
    if pairs and adjoin(*(shard for _, shard in pairs)):
        yield [piece for piece, _ in pairs], join([shard for _, shard in pairs])
        return
    for piece, shard in pairs:
        yield [piece], shard


def _span(value: Tensor) -> Tensor:
    """The stretch of memory that a tensor's elements lie in, as a flat tensor.

    As long as the tensor if it is dense; with gaps between rows longer, expanded shorter.
    """
    value = value.detach()
    numel = int(value.numel() > 0)
    if numel:
        steps = zip(value.shape, value.stride(), strict=True)
        numel += sum((size - 1) * stride for size, stride in steps)
    return value.as_strided((numel,), (1,))


def _copy(pieces: Sequence[Tensor], into: Tensor) -> None:
    there = [piece.detach() for piece in pieces if piece.numel()]
    if not there:
        return
    if adjoin(*there):
        there = [join(there)]
    position = 0
    for piece in there:
        into[position : position + piece.numel()].copy_(piece, non_blocking=True)
        position += piece.numel()
