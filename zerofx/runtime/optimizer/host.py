"""Updates in host memory that go on beside the step: started, waited for, delayed to the next."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from zerofx.ir.parameters import ParameterTable
from zerofx.runtime.optimizer.delayed import DelayedUpdates
from zerofx.runtime.optimizer.delayed import Key as DelayedKey
from zerofx.runtime.optimizer.steps import OptimizerSteps
from zerofx.runtime.parameters.parameter import ParameterState
from zerofx.runtime.parameters.registry import REGISTRY
from zerofx.runtime.parameters.snapshots import SNAPSHOTS
from zerofx.runtime.storage.copies import Copies


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
        copies: Copies,
        steps: OptimizerSteps,
        table: ParameterTable,
        *,
        changed_in_files: Callable[[int, Sequence[int]], object] | None,
        joined: bool,
        delayed: DelayedUpdates | None,
    ) -> None:
        self.copies, self.steps, self.table = copies, steps, table
        self.joined, self.delayed = joined, delayed
        self._changed_in_files = changed_in_files
        self._delayed_keys: dict[tuple[int, tuple[int, ...]], DelayedKey] = {}
        self._updating: dict[int, HostUpdate] = {}  # by the id of what it writes
        self._asked: dict[int, _Asked] = {}  # delayed ones before they begin, as well
        steps.complete_updates = self._complete

    def bind(
        self, bounds: Sequence[ParameterState], groups: Iterable[tuple[int, tuple[int, ...]]]
    ) -> None:
        """Know the parameters of the (optimizer, parameters) that the program updates here."""
        self._delayed_keys = {
            (handle, of): (
                weakref.ref(self.steps.live_optimizer(handle)),
                tuple(bounds[index] for index in of),
            )
            for handle, of in groups
            if self.delayed is not None
        }

    def begin_call(
        self,
        bounds: Collection[ParameterState],
        optimizers: Collection[torch.optim.Optimizer],
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
            self._asked[id(values)] = _Asked(values, grads, optimizer, parameters, is_skipped)
        else:
            data = None if is_skipped else self._parts(values, parameters)
            self._start(values, data, [values, grads], optimizer, parameters)
        return values

    def update_start_shards(
        self,
        shards: list[torch.Tensor],
        grads: torch.Tensor,
        optimizer: int,
        parameters: list[int],
        found_inf: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        for shard in shards:
            REGISTRY.host.settle(shard)  # it has left for the device
        is_skipped = self.steps.is_skipped(found_inf)
        data = None if is_skipped else [shard.detach() for shard in shards]
        self._start(shards, data, [grads], optimizer, parameters)
        return shards

    def wait_update(self, started: Any) -> Any:
        """The new values: if updates are delayed, those that the call before's has made.

        Both moves have been waited for then, and this call's begins from those values.
        """
        if id(started) in self._asked:
            return self._exchange(self._asked.pop(id(started)))
        update = self._updating.pop(id(started))
        update.complete()
        return update.values

    def finish(self) -> None:
        """Leave the call before's delayed updates, which this one has stored."""
        if self.delayed is not None:
            self.delayed.end(self._delayed_keys.values())

    def failed(self, error: BaseException, bounds: Collection[ParameterState]) -> None:
        """Leave no update half done: the call before's, nor what this one has started."""
        self._updating.clear()
        if self.delayed is None:
            return
        try:
            self.delayed.settle(bounds)
        except Exception as another:
            error.add_note(f"An update that had been started failed too: {another!r}")

    def end_call(self) -> None:
        """Forget the call, also after one that has failed."""
        self._asked.clear()

    def _complete(self, optimizer: int) -> None:
        """Complete what is under way of an optimizer, before its next step."""
        for update in self._updating.values():
            if update.optimizer == optimizer:
                update.complete()

    def _parts(self, flat: torch.Tensor, parameters: list[int]) -> Sequence[torch.Tensor]:
        return flat.detach().split([self.table[index].shard_numel for index in parameters])

    def _start(
        self,
        written: Any,
        data: Sequence[torch.Tensor] | None,
        arriving: Sequence[torch.Tensor],
        optimizer: int,
        parameters: list[int],
    ) -> None:
        """Start the updates of ``data``, which is ``written``; with None there is nothing to do.

        They begin when what is ``arriving`` is there, the last of which are the gradients.
        """
        update = HostUpdate(written, None)
        if data is not None:
            arrivals = [self.copies.arrival(move) for move in arriving]
            update = self._started(written, data, arriving[-1], arrivals, optimizer, parameters)
        self._updating[id(written)] = update

    def _started(
        self,
        written: Any,
        data: Sequence[torch.Tensor],
        gradients: torch.Tensor,
        arrivals: Sequence[Callable[[], object]],
        optimizer: int,
        parameters: list[int],
    ) -> HostUpdate:
        """Start the updates of ``data``; ``arrivals`` return when all is there that they read."""
        runner = self.steps.host_runner(optimizer, parameters)
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

        computing = self.copies.updates.start(compute)
        return HostUpdate(written, computing, finish, optimizer)

    def _place_states(self, optimizer: int, parameters: list[int]) -> None:
        """Have states in host memory; those in files, their wait has brought there."""
        if self._changed_in_files is None:
            self.steps.on_host[optimizer].states.place(parameters, REGISTRY.host)
        else:
            self._changed_in_files(optimizer, parameters)

    def _exchange(self, asked: _Asked) -> torch.Tensor:
        assert self.delayed is not None
        key = self._delayed_keys[asked.optimizer, tuple(asked.parameters)]
        SNAPSHOTS.before_change(bound.parameter for bound in key[1])
        self.delayed.exchange(key, asked.values)
        if asked.is_skipped:
            return asked.values
        if not self.steps.has_begun(asked.optimizer):  # its step reads states and groups
            self.delayed.complete(self.steps.live_optimizer(asked.optimizer))
        update = self.delayed.leave(key, asked.values, asked.gradients)
        data = self._parts(update.values, asked.parameters)
        update.updating = self._started(
            update.values, data, update.gradients, [], asked.optimizer, asked.parameters
        )
        return asked.values


@dataclass(frozen=True)
class _Asked:
    """A delayed update before it begins: its operands, in staging buffers."""

    values: torch.Tensor
    gradients: torch.Tensor
    optimizer: int
    parameters: list[int]
    is_skipped: bool


class HostUpdate:
    """An update that goes on beside the step, and what is left to do with what it returns.

    ``computing`` is None where there is nothing to do.
    """

    def __init__(
        self,
        values: Any,
        computing: Future | None,
        finish: Callable[[list[Any]], None] | None = None,
        optimizer: int = -1,
    ) -> None:
        self.values, self.optimizer = values, optimizer
        self._computing, self._finish = computing, finish

    def complete(self) -> None:
        """Wait for it and keep its states.  Raises: what it has raised."""
        if self._computing is not None:
            computing, self._computing = self._computing, None
            results = computing.result()
            assert self._finish is not None
            with torch.no_grad():
                self._finish(results)

    def forget_states(self) -> None:
        """Keep no states when it completes: there is no optimizer to keep them."""
        if self._finish is not None:
            self._finish = lambda results: None
