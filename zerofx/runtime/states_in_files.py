"""The optimizer states that a program reads from files, and what it has changed of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from zerofx.runtime.file_tier import FileTier
from zerofx.runtime.filed_states import StateBucket
from zerofx.runtime.update import OptimizerRunner


class StatesInFiles:
    """The buckets of a ``tier`` that a program uses, and which are there in a call.

    ``groups`` are whose states it reads, as (optimizer, parameters), in the order in which it
    uses them; ``buckets`` those that these are in, in the same order.  A call is ``begin``, the
    program's operators, ``finish`` or ``failed``, ``end_call``.

    Raises: StepError if there is no room for what is new.
    """

    def __init__(
        self,
        tier: FileTier,
        groups: Sequence[tuple[int, tuple[int, ...]]],
        runners: Mapping[int, OptimizerRunner],
    ) -> None:
        self.tier = tier
        known = list(dict.fromkeys(groups))
        buckets = tier.reserve([runners[handle].group_of(of) for handle, of in known])
        self._bucket_of = dict(zip(known, buckets, strict=True))
        self.buckets: list[StateBucket] = [self._bucket_of[group] for group in groups]
        self._reading: dict[int, tuple[torch.Tensor, StateBucket]] = {}  # by what stands for it
        self._changed: set[tuple[int, int]] = set()  # whose states are not as they were in files

    def begin(self) -> None:
        self.tier.begin(self.buckets)

    def states_from_file_start(
        self, optimizer: int, parameters: list[int], nbytes: int
    ) -> torch.Tensor:
        """Ask for states: the cache reads ahead by itself, in the order of the waits."""
        started = torch.empty(0, dtype=torch.uint8)
        self._reading[id(started)] = started, self._bucket_of[optimizer, tuple(parameters)]
        return started

    def wait_states(self, started: torch.Tensor) -> torch.Tensor:
        self.tier.fetch(self._reading[id(started)][1])
        return started

    def note_changes(self, optimizer: int, parameters: Iterable[int]) -> None:
        """Have these states written when they are let go of."""
        self._changed.update((optimizer, parameter) for parameter in parameters)

    def states_to_file(self, states: torch.Tensor, optimizer: int, parameters: list[int]) -> None:
        """Let go of states, which are written to files if they have changed."""
        _, bucket = self._reading.pop(id(states))
        group = {(optimizer, parameter) for parameter in parameters}
        self.tier.release(bucket, is_dirty=not group.isdisjoint(self._changed))
        self._changed -= group

    def finish(self) -> None:
        self.tier.finish()

    def failed(self, error: BaseException) -> None:
        """Leave a call that has failed, when no update writes to states any more."""
        self.tier.failed(error)

    def end_call(self) -> None:
        """Forget the call, also after one that has failed."""
        self._reading.clear()
        self._changed.clear()
