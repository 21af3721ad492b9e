"""Streams and events that take note of what waits for what; nothing is ever late."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from tests.kit.order.places import PlacedNotes


class Stream:
    """Stands for a stream of a device: a line of the history."""

    def __init__(self, notes: PlacedNotes, line: int) -> None:
        self._notes, self.line = notes, line

    def wait_stream(self, other: Stream) -> None:
        mark = self._notes.mark(other.line, "wait_stream")
        self._notes.after(self.line, mark, "wait_stream")

    def wait_event(self, event: Event) -> None:
        event._before(self.line, "wait_event")

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._notes)
        event.record(self)
        return event

    def synchronize(self) -> None:
        thread = self._notes.thread
        self._notes.after(thread, self._notes.mark(self.line, "synchronize"), "synchronize")

    def query(self) -> bool:
        self.synchronize()
        return True


class Event:
    """Stands for an event; one that was never recorded orders nothing."""

    def __init__(self, notes: PlacedNotes) -> None:
        self._notes = notes
        self._mark: int | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._mark = self._notes.mark((stream or self._notes.current).line, "record")

    def wait(self, stream: Stream | None = None) -> None:
        self._before((stream or self._notes.current).line, "wait")

    def synchronize(self) -> None:
        self._before(self._notes.thread, "synchronize")

    def query(self) -> bool:
        self.synchronize()
        return True

    def _before(self, line: int, kind: str) -> None:
        if self._mark is not None:
            self._notes.after(line, self._mark, kind)


class Device:
    """Stands for ``torch.cuda`` and its like: one device, which CPU tensors are taken to lie on."""

    def __init__(self, notes: PlacedNotes) -> None:
        self._notes = notes
        notes.default = Stream(notes, 1)
        self._all = [notes.default]

    def Stream(self, *_device: Any, **_options: Any) -> Stream:  # noqa: N802
        number = len(self._all)
        made = Stream(self._notes, self._notes.clocks.line(f"stream {number}", is_stream=True))
        self._all.append(made)
        return made

    def Event(self, **_options: Any) -> Event:  # noqa: N802
        return Event(self._notes)

    def current_stream(self, _device: Any = None) -> Stream:
        return self._notes.current

    def default_stream(self, _device: Any = None) -> Stream:
        return self._all[0]

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self._notes.current
        self._notes.current = stream
        try:
            yield
        finally:
            self._notes.current = before

    def set_stream(self, stream: Stream) -> None:
        self._notes.current = stream

    def synchronize(self, _device: Any = None) -> None:
        for stream in self._all:
            stream.synchronize()

    def device(self, _device: Any) -> Any:
        return contextlib.nullcontext()

    def set_device(self, _device: Any) -> None:
        pass

    def current_device(self) -> int:
        return 0

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def get_rng_state(self, _device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()
