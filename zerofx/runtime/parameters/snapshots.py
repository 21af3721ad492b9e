"""Copies of what a rank keeps, made beside the training that goes on to change it.

A step only reads shards and states until it updates them, so that a copy of one can be made while
the forward and backward pass run.  Code that is about to change it makes the copy first, if there
is none.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zerofx.accelerator import is_accelerator
from zerofx.runtime.memory.flat import ordinary_tensors
from zerofx.runtime.storage.ring import Chunk, Ring


class SnapshotError(RuntimeError):
    """Something that does not know of a copy has changed the values before they were copied."""


class Snapshot:
    """Copies in host memory, each of what one parameter's update changes.

    ``add`` says what to copy, ``run`` copies all that has not been, in a thread of its own;
    ``before_change`` has those of some parameters copied at once.  What is on an accelerator
    travels through a ring of pinned memory, on a stream of its own: ``before_change`` has what the
    current stream does next come after it.  (Not run on a GPU.)
    """

    def __init__(self) -> None:
        self._copies: dict[int, list[_Copy]] = {}  # by the id of the parameter, in their order
        # By storage: neighbours in a bucket's memory, of which torch counts changes together.
        self._neighbours: dict[int, list[_Copy]] = {}
        self._rings: dict[torch.device, Ring] = {}

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
                copy.start(self._rings)
        SNAPSHOTS.add(self)

    def run(self) -> None:
        """Make all copies, those first that a backward pass comes to first."""
        copies = [copy for of_one in reversed(self._copies.values()) for copy in of_one]
        try:
            for copy in copies:
                copy.make()
            for copy in copies:
                copy.settle()
        finally:
            for ring in self._rings.values():
                ring.end()
            SNAPSHOTS.discard(self)

    def before_change(self, parameters: Iterable[Any]) -> None:
        for parameter in parameters:
            for copy in self._copies.get(id(parameter), ()):
                if copy.parameter() is parameter and not copy.is_safe:
                    for storage in copy.storages:
                        for neighbour in self._neighbours[storage]:
                            neighbour.make_before_change()


class Snapshots:
    """Those of this process that are not done; a process that is forked off has its own values."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self.active: weakref.WeakSet[Snapshot] = weakref.WeakSet()
        self._lock = threading.Lock()  # one is done in its own thread while a step goes through all

    def add(self, snapshot: Snapshot) -> None:
        if self._process != os.getpid():
            self._begin()
        with self._lock:
            self.active.add(snapshot)

    def discard(self, snapshot: Snapshot) -> None:
        with self._lock:
            self.active.discard(snapshot)

    def before_change(self, parameters: Iterable[Any]) -> None:
        """Return when shards and states of these parameters may be written to."""
        if not self.active or self._process != os.getpid():
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
        self._error: BaseException | None = None
        self._ring: Ring | None = None
        self._chunks: Sequence[Chunk] = ()  # on their way through it
        self._lock = threading.Lock()

    def start(self, rings: dict[torch.device, Ring]) -> None:
        """Have it go through its device's ring, if it is of an accelerator: from now on.

        Raises: StepError if that device has no streams.
        """
        device = self._sources[0][0].device
        if is_accelerator(device):
            if device not in rings:
                rings[device] = Ring(device)
            self._ring = rings[device]

    def make(self) -> None:
        """Make it, if there is none; or have its stream do that."""
        with self._lock:
            if self._read is None:
                return
            read, self._read = self._read, None
            try:
                with ordinary_tensors():
                    if self._ring is None:
                        self._values = _on_host(read())
                    else:
                        self._values, self._chunks = self._ring.send(read)
            except BaseException as error:
                self._fail(error)
                if not isinstance(error, Exception):
                    raise
            self._check_versions()
            if not self._chunks:
                self._sources = []

    def make_before_change(self) -> None:
        """Have it made before what the calling thread, or its stream, does next."""
        self.make()
        self._check_versions()
        self.is_safe = True
        if self._ring is not None:
            self._ring.wait(self._chunks)

    def settle(self) -> None:
        """Return when a stream has made it, if one does: what it is made of may be freed then."""
        for chunk in self._chunks:
            assert self._ring is not None
            self._ring.land(chunk)
            if chunk.error is not None:
                self._fail(chunk.error)
        self._check_versions()
        self._sources = []

    def _check_versions(self) -> None:
        """Fail if something else has changed what may not have been copied by then."""
        is_changed = any(source._version != version for source, version in self._sources)
        if is_changed and not self.is_safe:  # in this order: it is safe before it is changed
            self._fail(
                SnapshotError(
                    f"{self.name} has been written to, by something other than a compiled step, "
                    "while it was being saved. Write to it before the save, or wait() for it first."
                )
            )

    def _fail(self, error: BaseException) -> None:
        """Have the reader of the copy be told; the training goes on."""
        if not isinstance(error, Exception):  # a thread that raises those ends in silence
            error = SnapshotError(f"the copy of {self.name} was interrupted ({error!r})")
        self._values, self._error = None, self._error or error

    def result(self) -> Tensor:
        """The copy, on the CPU.  Raises: what has gone wrong."""
        self.make()
        self.settle()
        if self._error is not None:
            raise self._error
        assert self._values is not None
        return self._values


def _on_host(values: Tensor) -> Tensor:
    return values.detach().to("cpu", copy=True)
