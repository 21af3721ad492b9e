"""Updates in host memory that go on beside the step: started, waited for, delayed to the next."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from zerofx.runtime.optimizer.delayed import HostUpdate
from zerofx.runtime.optimizer.delayed import Key as DelayedKey
from zerofx.runtime.optimizer.setup import ProgramSetup
from zerofx.runtime.optimizer.steps import OptimizerSteps
from zerofx.runtime.parameters.parameter import ParameterState
from zerofx.runtime.parameters.registry import REGISTRY
from zerofx.runtime.parameters.snapshots import SNAPSHOTS


class HostUpdates:
    """Runs a program's updates in host memory, in its optimizers' steps.

    All that traces, compiles, reads hyperparameters or changes ``optimizer.state`` is done in the
    step's thread: where an update is started, or where it is waited for.  The elements are computed
    by the worker of updates of ``copies``, those of a bucket as one if they are ``joined``.
    ``changed_in_files`` is told of states that have changed; None if states are in no files.

    With ``delayed``, an update begins where it is waited for, and goes on into the next call,
    which takes what it has made.  A call is ``begin_call``, the program's operators, ``finish`` or
    ``failed``, ``end_call``.
    """

    def __init__(
        self,
        steps: OptimizerSteps,
        setup: ProgramSetup,
        changed_in_files: Callable[[int, Sequence[int]], object] | None,
    ) -> None:
        self.steps, self.copies = steps, setup.copies
        self.joined, self.delayed = setup.joins_updates, setup.delayed
        self._changed_in_files = changed_in_files
        self._delayed_keys: dict[tuple[int, tuple[int, ...]], DelayedKey] = {}
        # By the id of what they write:
        self._updating: dict[int, tuple[int, HostUpdate]] = {}  # with its optimizer
        self._asked: dict[int, Callable[[], torch.Tensor]] = {}  # delayed ones, before they begin
        steps.complete_updates = self._complete

    def bind(
        self, bounds: Sequence[ParameterState], groups: Iterable[tuple[int, tuple[int, ...]]]
    ) -> None:
        """Know the parameters of the (optimizer, parameters) that the program updates here."""
        self._delayed_keys = {
            (handle, of): (self.steps.runners[handle].optimizer, tuple(bounds[i] for i in of))
            for handle, of in groups
            if self.delayed is not None
        }

    def begin_call(
        self, bounds: Collection[ParameterState], optimizers: Collection[torch.optim.Optimizer]
    ) -> None:
        """Settle any function's delayed updates of these, except those that this call stores."""
        for delayed in list(REGISTRY.delayed):
            mine = self._delayed_keys.values() if delayed is self.delayed else ()
            delayed.settle(bounds, optimizers, taken_over=mine)

    def update_start(
        self,
        values: torch.Tensor,
        grads: torch.Tensor,
        optimizer: int,
        parameters: list[int],
        found_inf: torch.Tensor | None = None,
    ) -> torch.Tensor:
        is_skipped = self.steps.is_skipped(found_inf)
        if self.delayed is not None:
            asked = partial(self._exchange, values, grads, optimizer, parameters, is_skipped)
            self._asked[id(values)] = asked
        elif not is_skipped:
            data = self._parts(values, optimizer, parameters)
            update = self._started(data, grads, [values, grads], optimizer, parameters)
            self._updating[id(values)] = optimizer, update
        return values

    def update_start_shards(
        self,
        shards: list[torch.Tensor],
        grads: torch.Tensor,
        optimizer: int,
        parameters: list[int],
        found_inf: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        # Nothing copies the shards any more when the gradients are there: the verifier sees to it.
        if not self.steps.is_skipped(found_inf):
            data = [shard.detach() for shard in shards]
            update = self._started(data, grads, [grads], optimizer, parameters)
            self._updating[id(shards)] = optimizer, update
        return shards

    def wait_update(self, started: Any) -> Any:
        """The new values: if updates are delayed, those that the call before's has made.

        Both moves have been waited for then, and this call's begins from those values.
        """
        if id(started) in self._asked:
            return self._asked.pop(id(started))()
        if id(started) in self._updating:  # else it has been skipped
            self._updating.pop(id(started))[1].complete()
        return started

    def finish(self) -> None:
        """Leave the call before's delayed updates, which this one has stored."""
        if self.delayed is not None:
            self.delayed.end(self._delayed_keys.values())

    def failed(self, error: BaseException, bounds: Collection[ParameterState]) -> None:
        """Leave no update half done: the call before's, nor what this one has started.

        Calls for other models have started some too: these end before their worker is abandoned.
        """
        self._updating.clear()
        if self.delayed is None:
            return
        try:
            self.delayed.settle(bounds)
        except Exception as another:
            error.add_note(f"An update that had been started failed too: {another!r}")
        self.delayed.wait()

    def end_call(self) -> None:
        """Forget the call, also after one that has failed."""
        self._asked.clear()

    def _complete(self, optimizer: int) -> None:
        """Complete what is under way of an optimizer, before its next step."""
        for whose, update in self._updating.values():
            if whose == optimizer:
                update.complete()

    def _parts(
        self, flat: torch.Tensor, optimizer: int, parameters: Sequence[int]
    ) -> Sequence[torch.Tensor]:
        known = self.steps.runners[optimizer].parameters
        return flat.detach().split([known[index].info.shard_numel for index in parameters])

    def _started(
        self,
        data: Sequence[torch.Tensor],
        gradients: torch.Tensor,
        arriving: Sequence[torch.Tensor],
        optimizer: int,
        parameters: list[int],
    ) -> HostUpdate:
        """Start the updates of ``data``.  They begin when what is ``arriving`` is there."""
        arrivals = [self.copies.arrival(move) for move in arriving]
        runner = self.steps.enter(optimizer, parameters)
        pieces = gradients.split([shard.numel() for shard in data])
        self._place_states(optimizer, parameters)
        if self.joined:
            ready = runner.ready_together(data, pieces, parameters)
        else:
            ready = [runner.ready(*one) for one in zip(data, pieces, parameters, strict=True)]

        def compute() -> list[Any]:
            for has_arrived in arrivals:
                has_arrived()
            with torch.no_grad():
                return [update.compute() for update in ready]

        def finish(results: list[Any]) -> None:
            for update, result in zip(ready, results, strict=True):
                update.finish(result)
            self._place_states(optimizer, parameters)  # those it has made

        return HostUpdate(self.copies.updates.start(compute), finish)

    def _place_states(self, optimizer: int, parameters: list[int]) -> None:
        """Have states in host memory; those in files, their wait has brought there."""
        if self._changed_in_files is None:
            self.steps.runners[optimizer].states.place(parameters)
        else:
            self._changed_in_files(optimizer, parameters)

    def _exchange(
        self,
        values: torch.Tensor,
        gradients: torch.Tensor,
        optimizer: int,
        parameters: list[int],
        is_skipped: bool,
    ) -> torch.Tensor:
        """Take what the call before has made, and begin this call's update of that.

        ``values`` and ``gradients`` are in staging buffers.
        """
        assert self.delayed is not None
        key = self._delayed_keys[optimizer, tuple(parameters)]
        SNAPSHOTS.before_change(bound.parameter for bound in key[1])
        for moved in (values, gradients):
            REGISTRY.host.settle(moved)
        self.delayed.exchange(key, values)
        if not is_skipped:
            if not self.steps.has_begun(optimizer):  # its step reads states and groups
                self.delayed.complete(key[0])
            update = self.delayed.leave(key, values, gradients)
            data = self._parts(update.values, optimizer, parameters)
            update.updating = self._started(data, update.gradients, [], optimizer, parameters)
        return values
