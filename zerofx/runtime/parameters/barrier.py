"""Points in a program that every rank reaches before any of them communicates.

Ranks meet through the store first: a rank that is missing is an error after a timeout, not a hang.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from zerofx import compat
from zerofx.runtime.comm.agreement import rendezvous
from zerofx.runtime.parameters.parameter import ParameterState


class Barrier:
    """Waits until all ranks that hold shards of some parameters have come to the same point.

    ``written`` are the parameters whose shards this rank has written by itself since it last met
    the other ranks, with the names of the functions that did so.
    """

    def __init__(self, join_timeout_s: float, load_timeout_s: float) -> None:
        self.join_timeout_s = join_timeout_s
        self.load_timeout_s = load_timeout_s  # ranks read files, or compile, at their own pace
        self.written: dict[ParameterState, set[str]] = {}
        self._last_destination: tuple[weakref.ref[Any], int] | None = None

    def wait(self, bounds: Iterable[ParameterState], name: str) -> None:
        """Return once every rank that holds shards of ``bounds`` is in ``name`` too.

        Raises: RuntimeError on the ranks that came, if one does not.
        """
        for ranks, communicator in {b.ranks: b.communicator for b in bounds}.items():
            self.confirm_writes([bound for bound in self.written if bound.ranks is ranks])
            _meet(communicator, name, self.join_timeout_s)

    def wait_once(
        self, destination: Any, epoch: int, bounds: Iterable[ParameterState], name: str
    ) -> None:
        """Do as ``wait``, at the first of several parameters that fill the same ``destination``.

        A call is known by ``destination``, the dict that it fills, and by the ``epoch``.
        """
        if self._last_destination is not None and destination is not None:
            last, then = self._last_destination
            if last() is destination and then == epoch:
                return
        self.wait(bounds, name)
        try:
            self._last_destination = weakref.ref(destination), epoch
        except TypeError:  # a plain dict from the user: the ranks meet at every parameter
            self._last_destination = None

    def wait_to_bind(self, communicator: Any, name: str) -> None:
        """Return once all ranks are about to bind parameters; they may have compiled meanwhile.

        Raises: RuntimeError on the ranks that came, if one does not.
        """
        _meet(communicator, name, self.load_timeout_s)

    def note_write(self, bound: ParameterState, how: str) -> None:
        """Note that this rank has written its shards: each other rank must write its own too."""
        if bound.communicator.world_size > 1:
            self.written.setdefault(bound, set()).add(how)

    def confirm_writes(self, bounds: Iterable[ParameterState]) -> None:
        """Return once all ranks have written their shards of ``bounds``, if this one has.

        Each rank loads a state dict by itself, and no rank waits for another until values are
        read.  Without this, values that only some ranks have written would be mixed with the
        others' old ones.

        Raises: RuntimeError if another rank does not come.
        """
        written = [bound for bound in bounds if bound in self.written]
        for ranks, communicator in {b.ranks: b.communicator for b in written}.items():
            mine = [bound for bound in written if bound.ranks is ranks]
            how = sorted(set().union(*(self.written[bound] for bound in mine)))
            name = f"{' and '.join(how)} before a step or state_dict()"
            _meet(communicator, name, self.load_timeout_s)
            for bound in mine:
                del self.written[bound]


def _meet(communicator: Any, name: str, timeout_s: float) -> None:
    if communicator.world_size > 1:
        store = compat.tensors.agreement_store(communicator.group)
        rendezvous(store, name, communicator.rank, communicator.world_size, timeout_s)
