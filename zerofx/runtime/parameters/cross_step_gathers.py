"""Gathers that one compiled call has started for the next, and what becomes of them in between.

Using one and starting anew are different collectives, so every rank must decide alike.  What
drops one is collective (``full_params``, ``unshard``, a compiled call) or a write that all ranks
make; where only the user could have seen to that, the next call makes sure: ``unsure_since``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from zerofx.runtime.comm.communication import Communicator
from zerofx.runtime.parameters.parameter import BoundParameter

Key = tuple[tuple[BoundParameter, ...], torch.dtype]
"""Whose shards a gather puts together, and the dtype in which they travel."""


@dataclass(eq=False)
class CarriedGather:
    """One gather between two calls: started, or dropped (None).

    ``unsure_since`` names what dropped it on this rank, if other ranks may not have done so.
    """

    communicator: Communicator
    gathering: torch.Tensor | None
    unsure_since: str = ""

    def complete(self) -> None:
        if self.gathering is not None:
            self.communicator.complete(self.gathering)

    def drop(self) -> None:
        if self.gathering is not None:
            self.communicator.drop(self.gathering)
            self.gathering = None


class CarriedGathers:
    """Everything that is carried over in this process, by whose it is."""

    def __init__(self) -> None:
        self._gathers: dict[Key, CarriedGather] = {}

    @property
    def nbytes(self) -> int:
        started = (carried.gathering for carried in self._gathers.values())
        return sum(gathering.nbytes for gathering in started if gathering is not None)

    def put(self, key: Key, communicator: Communicator, gathering: torch.Tensor) -> None:
        self._gathers[key] = CarriedGather(communicator, gathering)

    def take(self, key: Key) -> CarriedGather | None:
        """Hand over what was carried for ``key``, to be waited for; None if nothing was."""
        return self._gathers.pop(key, None)

    def drain(self) -> None:
        """Let everything in flight arrive, before anything else is communicated."""
        for carried in self._gathers.values():
            carried.complete()

    def enter_call(self, resumed: Collection[Key], written: Collection[BoundParameter]) -> None:
        """Drain what a call does not resume itself, and drop what it is going to change."""
        changed = set(written)
        for key, carried in list(self._gathers.items()):
            if key in resumed:
                continue
            carried.complete()
            if carried.gathering is not None and not changed.isdisjoint(key[0]):
                carried.drop()
                del self._gathers[key]

    def shard_changes(self, bound: BoundParameter, by: str = "") -> None:
        """Drop what was gathered from this shard, which is about to be written.

        ``by`` names a write that is not collective itself.
        """
        for key, carried in list(self._gathers.items()):
            if bound not in key[0]:
                continue
            carried.complete()  # the other ranks are still being sent the old value
            carried.drop()
            if by:
                carried.unsure_since = by
            elif not carried.unsure_since:
                del self._gathers[key]

    def forget(self, bound: BoundParameter) -> None:
        """The parameter is gone: so is what was gathered from it, in flight or not."""
        for key, carried in list(self._gathers.items()):
            if bound in key[0]:
                carried.drop()
                del self._gathers[key]

    def step_failed(self, communicator: Communicator, resumed: Collection[Key]) -> None:
        """Drop everything of these ranks: who has come how far nobody knows."""
        for key in resumed:
            self._gathers.setdefault(key, CarriedGather(communicator, None))
        for carried in self._gathers.values():
            if carried.communicator is communicator:
                carried.drop()
                carried.unsure_since = "a step that fails"
