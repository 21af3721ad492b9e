"""Copies from a device to ordinary host memory, through a bounded piece that is pinned."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zerofx.accelerator import check_copies_beside, module_of
from zerofx.runtime.storage.memory import HostMemory

logger = logging.getLogger("zerofx")

RING_BYTES = 64 * 2**20
CHUNK_BYTES = 16 * 2**20
"""The most that is copied at once: 0.6 ms at 25 GB/s."""

ALIGNMENT = 64


@dataclass(eq=False)
class Chunk:
    """A part of a copy: in the ring's ``room`` after the ``event``, in ``into`` when it has landed.

    Then there is no ``room``, and an ``error`` if something went wrong.
    """

    room: Tensor | None
    into: Tensor
    start: int
    stop: int
    event: Any
    error: BaseException | None = None
    lock: threading.Lock = field(default_factory=lambda: threading.Lock())


class Ring:
    """Copies what is on a device when this is made, on a stream of their own.

    ``RING_BYTES`` of pinned memory are taken with the first copy and given back by ``end``.
    Threads may use it together: each that needs room lands what is in its way, so that none waits
    for another to come to that.
    """

    def __init__(self, device: torch.device) -> None:
        check_copies_beside(device)
        self.device, self.host = device, HostMemory()
        self._stream = _stream(device)
        self._stream.wait_stream(module_of(device).current_stream(device))
        self._lock = threading.Lock()
        self._memory: Tensor | None = None
        self._end = 0  # of the last chunk
        self._under_way: list[Chunk] = []  # the oldest first

    def send(self, read: Callable[[], Tensor]) -> tuple[Tensor, Sequence[Chunk]]:
        """Copy what ``read`` makes of what is on the device; return the copy, when all has landed.

        Waits for room in the ring, and for nothing else.  Raises: MemoryError; what ``read`` does.
        """
        with module_of(self.device).stream(self._stream):
            values = read().detach().contiguous()
            copy = self.host.empty(values.numel(), values.dtype)
            numel = CHUNK_BYTES // values.itemsize
            parts = zip(values.view(-1).split(numel), copy.split(numel), strict=True)
            return copy.view(values.shape), [self._send(part, into) for part, into in parts]

    def _send(self, values: Tensor, into: Tensor) -> Chunk:
        while True:
            with self._lock:
                start = -(-self._end // ALIGNMENT) * ALIGNMENT
                if start + values.nbytes > RING_BYTES:
                    start = 0
                stop = start + values.nbytes
                others = (one for one in self._under_way if one.start < stop and start < one.stop)
                in_the_way = next(others, None)
                if in_the_way is None:
                    if self._memory is None:
                        self._memory = _pinned(self.host)
                    room = self._memory[start:stop].view(values.dtype)
                    room.copy_(values, non_blocking=True)
                    event = self._stream.record_event()
                    self.host.is_copied_until(event, room, self._stream)
                    chunk = Chunk(room, into, start, stop, event)
                    self._under_way.append(chunk)
                    self._end = stop
                    return chunk
            self.land(in_the_way)

    def wait(self, chunks: Sequence[Chunk]) -> None:
        """Have the current stream go on when these are copied; the host does not wait."""
        for chunk in chunks[-1:]:
            module_of(self.device).current_stream(self.device).wait_event(chunk.event)

    def land(self, chunk: Chunk) -> None:
        """Return when a chunk is in ordinary memory, or has its ``error``."""
        with chunk.lock:
            if chunk.room is None:
                return
            try:
                chunk.event.synchronize()
                chunk.into.copy_(chunk.room)
            except BaseException as error:  # told to the reader of the copy
                chunk.error = error
                if not isinstance(error, Exception):
                    raise
            finally:
                chunk.room = None
                with self._lock:
                    self._under_way.remove(chunk)

    def end(self) -> None:
        """Land all that is under way, and give the pinned memory back."""
        with self._lock:
            chunks = list(self._under_way)
        for chunk in chunks:
            self.land(chunk)
        self._memory = None


def _pinned(host: HostMemory) -> Tensor:
    try:
        return host.empty(RING_BYTES, torch.uint8, pinned=True)
    except RuntimeError as error:
        logger.warning("an asynchronous save copies through unpinned memory, slower: %s", error)
        return host.empty(RING_BYTES, torch.uint8)


_streams: dict[torch.device, Any] = {}


def _stream(device: torch.device) -> Any:
    if device not in _streams:
        _streams[device] = module_of(device).Stream(device)
    return _streams[device]
