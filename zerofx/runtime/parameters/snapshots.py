"""Copies of what a rank keeps, made beside the training that goes on to change it.

A step only reads shards and states until it updates them, so that a copy of one can be made while
the forward and backward pass run.  Code that is about to change it makes the copy first, if there
is none.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zerofx.accelerator import check_copies_beside, is_accelerator, module_of
from zerofx.runtime.memory.flat import ordinary_tensors


class SnapshotError(RuntimeError):
    """Something that does not know of a copy has changed the values before they were copied."""


class Snapshot:
    """Copies in host memory, each of what one parameter's update changes.

    ``add`` says what to copy, ``run`` copies all that has not been, in a thread of its own;
    ``before_change`` has those of some parameters copied at once.  On an accelerator copies are on
    a stream of their own from the start, and ``run`` waits for them.  (Not run on one.)
    """

    def __init__(self) -> None:
        self._copies: dict[int, list[_Copy]] = {}  # by the id of the parameter, in their order
        # By storage: neighbours in a bucket's memory, of which torch counts changes together.
        self._neighbours: dict[int, list[_Copy]] = {}

    def add(
        self,
        parameter: nn.Parameter,
        sources: Sequence[Tensor],
        read: Callable[[], Tensor],
        name: str,
    ) -> Callable[[], Tensor]:
        """Copy what ``read`` makes of ``sources``, which only updates of ``parameter`` change.

        What is returned gives the copy, and raises SnapshotError if there is none.
        """
        copy = _Copy(parameter, sources, read, name)
        self._copies.setdefault(id(parameter), []).append(copy)
        for storage in copy.storages:
            self._neighbours.setdefault(storage, []).append(copy)
        return copy.result

    def begin(self) -> None:
        """Let the training go on: what changes any of this has to come to ``before_change``."""
        for copies in self._copies.values():
            for copy in copies:
                copy.start()
        SNAPSHOTS.add(self)

    def run(self) -> None:
        """Make all copies, those first that a backward pass comes to first."""
        try:
            for copies in reversed(self._copies.values()):
                for copy in copies:
                    copy.make()
                    copy.settle()
        finally:
            SNAPSHOTS.discard(self)

    def before_change(self, parameters: Iterable[Any]) -> None:
        for parameter in parameters:
            for copy in self._copies.get(id(parameter), ()):
                if copy.parameter() is parameter and not copy.is_safe:
                    for storage in copy.storages:
                        for neighbour in self._neighbours[storage]:
                            neighbour.make_before_change()


class Snapshots:
    """Those of this process that are not done."""

    def __init__(self) -> None:
        self.active: weakref.WeakSet[Snapshot] = weakref.WeakSet()
        self._lock = threading.Lock()  # one is done in its own thread while a step goes through all

    def add(self, snapshot: Snapshot) -> None:
        with self._lock:
            self.active.add(snapshot)

    def discard(self, snapshot: Snapshot) -> None:
        with self._lock:
            self.active.discard(snapshot)

    def before_change(self, parameters: Iterable[Any]) -> None:
        """Return when shards and states of these parameters may be written to."""
        if not self.active:
            return
        with self._lock:
            snapshots = list(self.active)
        changing = list(parameters)
        for snapshot in snapshots:
            snapshot.before_change(changing)


SNAPSHOTS = Snapshots()


class _Copy:
    """One copy: to be made, made, or failed; by whichever thread comes first."""

    def __init__(
        self,
        parameter: nn.Parameter,
        sources: Sequence[Tensor],
        read: Callable[[], Tensor],
        name: str,
    ) -> None:
        self.parameter = weakref.ref(parameter)
        self.name = name
        self.storages = {source.untyped_storage()._cdata for source in sources}
        self.is_safe = False
        self._sources = [(source, source._version) for source in sources]
        self._read: Callable[[], Tensor] | None = read
        self._values: Tensor | None = None
        self._error: Exception | None = None
        self._event: Any = None  # when a stream has made it, of what is held until then
        self._held: Sequence[Any] = ()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start it where copies are made without this thread: on a GPU."""
        device = self._sources[0][0].device
        if not is_accelerator(device):
            return
        check_copies_beside(device)
        stream, self._held = _stream(device), self._sources
        stream.wait_stream(module_of(device).current_stream(device))
        with module_of(device).stream(stream):
            self.make()
        self._event = stream.record_event()

    def make(self) -> None:
        """Make it, if there is none."""
        with self._lock:
            if self._read is None:
                return
            read, self._read = self._read, None
            try:
                with ordinary_tensors():
                    self._values = _on_host(read())
                self._check_versions()
            except Exception as error:  # the training goes on: the reader of the copy is told
                self._values, self._error = None, error
            self._sources = []

    def make_before_change(self) -> None:
        """Have it made before what the calling thread, or its stream, does next."""
        self.make()
        self.is_safe = True
        if self._event is not None:
            self._event.wait()

    def _check_versions(self) -> None:
        if any(source._version != version for source, version in self._sources):
            raise SnapshotError(
                f"{self.name} has been written to, by something other than a compiled step, while "
                "it was being saved. Write to it before the save, or wait() for it first."
            )

    def settle(self) -> None:
        """Return when a stream has made it, if one does: what it is made of may be freed then."""
        if self._event is not None:
            self._event.synchronize()
        self._held = ()

    def result(self) -> Tensor:
        """The copy, on the CPU.  Raises: what has gone wrong."""
        self.make()
        self.settle()
        if self._error is not None:
            raise self._error
        assert self._values is not None
        return self._values


def _on_host(values: Tensor) -> Tensor:
    is_on_gpu = is_accelerator(values.device)
    copy = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=is_on_gpu)
    return copy.copy_(values.detach(), non_blocking=is_on_gpu)


_streams: dict[torch.device, Any] = {}


def _stream(device: torch.device) -> Any:
    if device not in _streams:
        _streams[device] = module_of(device).Stream(device)
    return _streams[device]
