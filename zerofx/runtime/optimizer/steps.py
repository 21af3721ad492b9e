"""The steps that a program's optimizers make in a call, and their updates on the device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import fx

from zerofx.codegen.kernels import Keep
from zerofx.codegen.rewrite.gradient_norm import squares_of
from zerofx.codegen.rewrite.gradient_work import GradientWork
from zerofx.ir.effects import gradients_read_after_update, owned_parameters
from zerofx.runtime.comm.communication import Communicator
from zerofx.runtime.optimizer.lazy_states import unread
from zerofx.runtime.optimizer.setup import DeviceSetup, HostSetup, Trained, UpdateSettings
from zerofx.runtime.optimizer.update import OptimizerRunner
from zerofx.runtime.parameters.registry import REGISTRY
from zerofx.runtime.parameters.snapshots import SNAPSHOTS
from zerofx.runtime.storage.host import HostMemory


class OptimizerSteps:
    """The runners of a program's optimizers, by handle, and which step each of them is in.

    An optimizer has a runner ``on_device``, and one ``on_host`` if updates run there: they step
    together.  A step begins with its first update, and ends when one of its parameters is updated
    once more or the program has run.  What goes on beside the program is completed before by
    ``complete_updates``, given the optimizer; groups that delayed updates change are written back
    when these complete.
    """

    def __init__(
        self,
        graph: fx.Graph,
        rank: int,
        trained: Trained,
        device: DeviceSetup,
        host: HostSetup,
        keep_source: Keep | None = None,
    ) -> None:
        parameters = {info.index: (trained.tensors[info.index], info) for info in trained.table}
        read_later = gradients_read_after_update(graph)
        owned = owned_parameters(graph)

        def runners(memory: HostMemory | None) -> dict[int, OptimizerRunner]:
            return {
                handle: OptimizerRunner(
                    optimizer,
                    parameters,
                    UpdateSettings(
                        rank=rank,
                        sharded=device.stage > 0,
                        gradients_read_later=read_later,
                        keep_source=keep_source,
                        precision=device.precision,
                        owned=owned.get(handle, frozenset()),
                        host=memory,
                    ),
                )
                for handle, optimizer in trained.optimizers.items()
            }

        self._tensors = {index: weakref.ref(tensor) for index, (tensor, _) in parameters.items()}
        self.on_device = runners(None)
        self.on_host = runners(REGISTRY.host) if host.keeps_states else {}
        self.complete_updates: Callable[[int], object] = lambda optimizer: None
        self._delayed = host.delayed
        self._updated: dict[int, set[int]] = {}  # in the step that is under way
        self._found_inf: dict[int, tuple[torch.Tensor, bool]] = {}

    def prepare(
        self, updates: Iterable[tuple[int, int]], updated_on_host: Iterable[tuple[int, int]]
    ) -> None:
        """Trace the first of these (optimizer, parameter), each for where it runs.

        Raises: UpdateError if one cannot be compiled.
        """
        on_host = list(updated_on_host)
        on_device = [update for update in updates if update not in on_host]
        for runners, mine in ((self.on_device, on_device), (self.on_host, on_host)):
            for handle, runner in runners.items():
                runner.prepare(parameter for other, parameter in mine if other == handle)

    def host_bytes(self) -> int:
        """Bytes of optimizer states in host memory."""
        return sum(runner.states.nbytes() for runner in self.on_host.values())

    def host_bytes_to_come(self, updates: Iterable[tuple[int, int]]) -> int:
        """Bytes of states that these (optimizer, parameter) will have in host memory beyond now."""
        mine: dict[int, list[int]] = {}
        for handle, parameter in updates:
            mine.setdefault(handle, []).append(parameter)
        return sum(self.on_host[handle].states.bytes_to_come(of) for handle, of in mine.items())

    def live_optimizer(self, optimizer: int) -> torch.optim.Optimizer:
        """The optimizer of this handle.  Raises: RuntimeError if it is gone."""
        return self.on_device[optimizer].live_optimizer()

    def is_skipped(self, found_inf: torch.Tensor | None) -> bool:
        """Return whether a step is skipped, as gradients have overflowed; read once a call."""
        if found_inf is None:
            return False
        known = self._found_inf.get(id(found_inf))
        if known is None:
            known = self._found_inf[id(found_inf)] = (found_inf, bool(found_inf.item()))
        return known[1]

    def has_begun(self, optimizer: int) -> bool:
        """Return whether a step of it has begun in this call."""
        return optimizer in self._updated

    def runner(self, optimizer: int, parameters: list[int]) -> OptimizerRunner:
        """The optimizer's runner, in a step that has not updated these parameters yet."""
        SNAPSHOTS.before_change(self._tensors[parameter]() for parameter in parameters)
        runner = self.on_device[optimizer]
        if all(map(runner.owned.has_begun, parameters)):
            return runner
        updated = self._updated.get(optimizer)
        if updated is None or not updated.isdisjoint(parameters):  # a second step of it
            if updated is not None:
                self.complete_updates(optimizer)
                self._end(optimizer)
            for one in self._runners_of(optimizer):
                one.begin()
            updated = self._updated[optimizer] = set()
        updated.update(parameters)
        return runner

    def host_runner(self, optimizer: int, parameters: list[int]) -> OptimizerRunner:
        """Its runner for host memory, in the same step as ``runner`` for these."""
        self.runner(optimizer, parameters)
        return self.on_host[optimizer]

    def runner_with_states(self, optimizer: int, parameters: list[int]) -> OptimizerRunner:
        """Its runner as ``runner`` gives it, with these parameters' states on the device."""
        runner = self.runner(optimizer, parameters)
        if unread() or not (REGISTRY.host.is_empty and REGISTRY.files.is_empty):
            runner.states.place(parameters, REGISTRY.host)
        return runner

    def finish(self) -> None:
        """End the steps that are under way."""
        for optimizer in self._updated:
            self._end(optimizer)

    def end_call(self) -> None:
        """Forget the call, also after one that has failed."""
        self._updated.clear()
        self._found_inf.clear()

    def _runners_of(self, optimizer: int) -> list[OptimizerRunner]:
        """The device's and the host's."""
        every = (self.on_device, self.on_host)
        return [runners[optimizer] for runners in every if optimizer in runners]

    def _end(self, optimizer: int) -> None:
        for runner in self._runners_of(optimizer):
            keep_groups = runner.end()
            if self._delayed is not None and runner is self.on_host.get(optimizer):
                self._delayed.keep_groups(runner.live_optimizer(), keep_groups)


class DeviceUpdates:
    """Runs a program's updates on the device, in its optimizers' steps."""

    def __init__(self, steps: OptimizerSteps, communicator: Communicator) -> None:
        self.steps = steps
        self.communicator = communicator

    def update(
        self,
        values: torch.Tensor,
        grad: torch.Tensor,
        optimizer: int,
        parameter: int,
        found_inf: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self.steps.is_skipped(found_inf):
            return values
        runner = self.steps.runner_with_states(optimizer, [parameter])
        return runner.run(values.detach(), grad, parameter)

    def update_together(
        self,
        values: list[torch.Tensor],
        grads: list[torch.Tensor],
        optimizer: int,
        parameters: list[int],
        found_inf: torch.Tensor | None = None,
        work: GradientWork | None = None,
        coefficients: Sequence[torch.Tensor] = (),
        norm: int | None = None,
    ) -> list[torch.Tensor]:
        """Several updates of one optimizer that follow one another, as one.

        Each with ``work`` of these coefficients done to its gradient first.  For a ``norm``,
        numbers follow the new values, as many: the gradients' squares, divided among them.
        """
        if self.steps.is_skipped(found_inf):
            if norm is None:
                return values
            done = grads if work is None else [work(grad, *coefficients) for grad in grads]
            return [*values, *map(squares_of, done)]
        data = [value.detach() for value in values]
        runner = self.steps.runner_with_states(optimizer, parameters)
        squares: list[torch.Tensor] | None = None if norm is None else []
        runner.run_together(data, grads, parameters, work, coefficients, squares)
        if squares is None:
            return data
        total = squares[0] if len(squares) == 1 else torch.stack(squares).sum()
        nothing = torch.zeros_like(total)
        return [*data, total, *[nothing] * (len(data) - 1)]

    def on_owners(
        self,
        values: list[torch.Tensor],
        grads: list[torch.Tensor],
        optimizer: int,
        parameters: list[int],
        owners: list[int],
        flops: int,
        found_inf: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """Begin these updates, as far as what needs whole tensors; ``update`` goes on with it."""
        if self.steps.is_skipped(found_inf):
            return grads
        runner = self.steps.runner_with_states(optimizer, parameters)
        shards = [value.detach() for value in values]
        return runner.owned.begin(shards, grads, parameters, owners, self.communicator)
