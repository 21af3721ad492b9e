"""Updates in host memory that go on into the next call, which stores what they make."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from zerofx.runtime.memory.flat import ordinary_tensors
from zerofx.runtime.optimizer.piece import GroupOfStep
from zerofx.runtime.parameters.parameter import ParameterState, State
from zerofx.runtime.parameters.registry import REGISTRY
from zerofx.worker import Job

OptimizerReference = weakref.ref[torch.optim.Optimizer]

Key = tuple[OptimizerReference, tuple[ParameterState, ...]]
"""An optimizer, and the parameters that it updates together."""


class HostUpdate:
    """An update that goes on beside the step; ``finish`` is given what ``computing`` returns."""

    def __init__(self, computing: Job, finish: Callable[[list[Any]], object]) -> None:
        self._computing: Job | None = computing
        self._finish = finish

    def complete(self) -> None:
        """Wait for it and keep its states, once.  Raises: what it has raised."""
        if self._computing is not None:
            computing, self._computing = self._computing, None
            results = computing.result()
            with ordinary_tensors():  # an evaluation may wait for it
                self._finish(results)

    def wait(self) -> None:
        """Wait until it has been computed, or has failed, which ``complete`` raises."""
        if self._computing is not None:
            with contextlib.suppress(Exception):
                self._computing.result()

    def forget_states(self) -> None:
        """Keep no states when it completes: there is no optimizer to keep them."""
        self._finish = lambda results: None


class DelayedUpdate:
    """One bucket's update that may be under way between two calls.

    ``values`` and ``gradients`` are flat, in host memory, with a part for each of ``bounds``: the
    update writes to the first and reads the second, and nothing else uses them.  ``updating`` is
    the update under way, ``groups`` those of its step: its changes of them are written back when it
    completes.  If the optimizer has been freed, only parameter values are kept.
    """

    def __init__(self, key: Key, values: Tensor, gradients: Tensor) -> None:
        optimizer, self.bounds = key[0](), key[1]
        assert optimizer is not None, "it is about to make a step"
        self.values, self.gradients = values, gradients
        self.updating: HostUpdate | None = None
        self.has_failed = False
        self.groups: Sequence[GroupOfStep] = ()
        this = weakref.ref(self)

        def forget_states(_reference: Any) -> None:
            update = this()
            if update is not None:
                update.groups = ()
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
        groups, self.groups = self.groups, ()
        for group in groups:
            group.keep_changes()

    def store(self) -> None:
        """Have the shards hold the new values, if there are any."""
        if self.has_failed:
            return
        lengths = [bound.info.shard_numel for bound in self.bounds]
        for bound, part in zip(self.bounds, self.values.split(lengths), strict=True):
            bound.write_shard(part)


class DelayedUpdates:
    """The updates that one compiled function leaves to do between its calls; at stage 3.

    ``pending`` are the updates whose values the shards do not hold yet.  While there are any, the
    registry keeps them, however long their function lives.
    """

    def __init__(self) -> None:
        self.pending: dict[Key, DelayedUpdate] = {}
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
        REGISTRY.delayed.add(self)
        return update

    def _copied(self, value: Tensor) -> Tensor:
        return REGISTRY.host.empty(value.numel(), value.dtype).copy_(value)

    def complete(self, optimizer: OptimizerReference) -> None:
        """Have an optimizer's states and groups as after the call before, for its next step."""
        for (whose, _), update in list(self.pending.items()):
            if whose == optimizer:
                update.complete()

    def wait(self) -> None:
        """Wait until all that is under way has been computed, and leave it to who completes it."""
        for update in list(self.pending.values()):
            if update.updating is not None:
                update.updating.wait()

    def keep_changes(self, optimizer: OptimizerReference, groups: Sequence[GroupOfStep]) -> None:
        """Write back changes of these groups too when an update of the optimizer's step ends."""
        for key in self._renewed:
            if key[0] == optimizer:
                self.pending[key].groups = groups

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
            if all(bound.state is State.RETIRED for bound in update.bounds):
                self.pending.pop(key, None)
        self._forget_if_empty()

    def _forget_if_empty(self) -> None:
        if not self.pending:
            REGISTRY.delayed.discard(self)
