"""Updates in host memory that go on into the next call, which stores what they make."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from zerofx.runtime.parameters.parameter import ParameterState
from zerofx.runtime.storage.host import HostMemory

Key = tuple[weakref.ref[torch.optim.Optimizer], tuple[ParameterState, ...]]
"""An optimizer, and the parameters that it updates together."""


class DelayedUpdate:
    """One bucket's update that may be under way between two calls.

    ``values`` and ``gradients`` are flat, in host memory, with a part for each of ``bounds``: the
    update writes to the first and reads the second, and nothing else uses them.  ``updating`` is
    the update under way; ``keep_groups`` writes back its changes of the optimizer's
    groups.  If the optimizer has been freed, only parameter values are kept.
    """

    def __init__(self, key: Key, values: Tensor, gradients: Tensor) -> None:
        optimizer, self.bounds = key[0](), key[1]
        assert optimizer is not None, "it is about to make a step"
        self.values, self.gradients = values, gradients
        self.updating: Any = None
        self.has_failed = False
        self.keep_groups: Callable[[], object] = _nothing
        this = weakref.ref(self)

        def forget_states(_reference: Any) -> None:
            update = this()
            if update is not None:
                update.keep_groups = _nothing
                if update.updating is not None:
                    update.updating.forget_states()

        self.optimizer = weakref.ref(optimizer, forget_states)

    def complete(self) -> None:
        """Wait for the update and keep its states.  Raises: what it has raised."""
        if self.updating is None:
            return
        updating, self.updating = self.updating, None
        try:
            updating.complete()
        except BaseException:
            self.has_failed = True
            raise
        keep_groups, self.keep_groups = self.keep_groups, _nothing
        keep_groups()

    def store(self) -> None:
        """Have the shards hold the new values, if there are any."""
        if self.has_failed:
            return
        lengths = [bound.info.shard_numel for bound in self.bounds]
        for bound, part in zip(self.bounds, self.values.split(lengths), strict=True):
            bound.write_shard(part)


class DelayedUpdates:
    """The updates that one compiled function leaves to do between its calls; at stage 3.

    ``pending`` are the updates whose values the shards do not hold yet.  ``all_pending`` are those
    of the process that have any, and keep them however long their function lives.
    """

    def __init__(self, memory: HostMemory, all_pending: set[Any]) -> None:
        self.memory = memory
        self.pending: dict[Key, DelayedUpdate] = {}
        self._all_pending = all_pending
        self._renewed: set[Key] = set()

    def exchange(self, key: Key, values: Tensor) -> None:
        """Write what the call before has made to ``values``, if it has left anything.

        What is there then is for this call's update to begin with.
        """
        update = self.pending.get(key)
        if update is not None:
            update.complete()
            values.copy_(update.values)

    def leave(self, key: Key, values: Tensor, gradients: Tensor) -> DelayedUpdate:
        """Take copies of what an update reads and writes: it will be there after the call.

        ``values`` are as ``exchange`` has left them.
        """
        update = self.pending.get(key)
        if update is None:
            update = DelayedUpdate(key, self._copied(values), self._copied(gradients))
            self.pending[key] = update
        else:  # which has these values
            update.gradients.copy_(gradients)
        self._renewed.add(key)
        self._all_pending.add(self)
        return update

    def _copied(self, value: Tensor) -> Tensor:
        return self.memory.empty(value.numel(), value.dtype).copy_(value)

    def complete(self, optimizer: torch.optim.Optimizer) -> None:
        """Have an optimizer's states and groups as after the call before, for its next step."""
        for (whose, _), update in list(self.pending.items()):
            if whose() is optimizer:
                update.complete()

    def keep_groups(
        self, optimizer: torch.optim.Optimizer, keep_groups: Callable[[], object]
    ) -> None:
        """Do this too when an update of the optimizer's step completes."""
        for key in self._renewed:
            if key[0]() is optimizer:
                self.pending[key].keep_groups = keep_groups

    def end(self, keys: Collection[Key]) -> None:
        """Leave a call that has stored what was pending for these; what it renewed stays."""
        for key in keys:
            if key not in self._renewed:
                self.pending.pop(key, None)
        self._renewed.clear()
        self._forget_if_empty()

    def settle(
        self,
        bounds: Collection[ParameterState],
        optimizers: Collection[torch.optim.Optimizer] = (),
        taken_over: Collection[Key] = (),
    ) -> None:
        """Wait for the updates that are about these, and store what they have made.

        That is all updates of optimizers that update one of these parameters or are among these,
        unless a call is about to take them over, one and all.

        Raises: what an update has raised; its values are lost, and all others stored.
        """
        keys = list(self.pending)
        whose = {key[0] for key in keys if not set(key[1]).isdisjoint(bounds)}
        whose |= {key[0] for key in keys if any(key[0]() is one for one in optimizers)}
        affected = [key for key in keys if key[0] in whose]
        if set(affected) <= set(taken_over):
            return
        failed: list[BaseException] = []
        with torch.no_grad():
            for key in affected:
                update = self.pending.pop(key, None)
                if update is None:  # its parameters have gone meanwhile
                    continue
                try:
                    update.complete()
                    update.store()
                except Exception as error:
                    failed.append(error)
        self._renewed -= set(affected)
        self._forget_if_empty()
        if failed:
            raise failed[0]

    def drop_retired(self) -> None:
        """Forget updates of parameters that are gone."""
        for key, update in list(self.pending.items()):
            if all(bound.retired for bound in update.bounds):
                self.pending.pop(key, None)
        self._forget_if_empty()

    def _forget_if_empty(self) -> None:
        if not self.pending:
            self._all_pending.discard(self)


def _nothing() -> None:
    return None
