"""The steps that a program's optimizers make in a call, and their updates on the device."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import fx

from zerofx.codegen.kernels import Keep
from zerofx.codegen.rewrite.gradient_work import GradientWork, squares_of
from zerofx.codegen.rewrite.storage import Precision
from zerofx.ir import ops
from zerofx.ir.effects import (
    gradients_read_after_update,
    groups_on_host,
    owned_parameters,
    taking_own_steps,
)
from zerofx.ir.graph import updates
from zerofx.ir.interface import gradient_work
from zerofx.runtime.comm.communication import Communicator
from zerofx.runtime.optimizer.lazy_states import unread
from zerofx.runtime.optimizer.setup import ProgramSetup, Trained, UpdateSettings
from zerofx.runtime.optimizer.update import FEWEST_ELEMENTS, Fused, OptimizerRunner
from zerofx.runtime.parameters.registry import REGISTRY
from zerofx.runtime.parameters.snapshots import SNAPSHOTS


class OptimizerSteps:
    """The runners of a program's optimizers, by handle, and which step each of them is in.

    A step begins with its first update, and ends when one of its parameters is updated
    once more or the program has run.  What goes on beside the program is completed before by
    ``complete_updates``, given the optimizer; groups that delayed updates change are written back
    when these complete.

    Raises: UpdateError if the first update of a parameter cannot be compiled.
    """

    def __init__(
        self,
        graph: fx.Graph,
        communicator: Communicator,
        trained: Trained,
        setup: ProgramSetup,
        keep_source: Keep | None = None,
    ) -> None:
        self.communicator = communicator
        parameters = {info.index: (trained.tensors[info.index], info) for info in trained.table}
        read_later, owned = gradients_read_after_update(graph), owned_parameters(graph)
        own_steps = taking_own_steps(graph)
        on_host: dict[int, set[int]] = defaultdict(set)
        for handle, together in groups_on_host(graph):
            on_host[handle].update(together)
        self.runners = {
            handle: OptimizerRunner(
                optimizer,
                parameters,
                UpdateSettings(
                    rank=communicator.rank,
                    sharded=setup.options.stage > 0,
                    gradients_read_later=read_later,
                    keep_source=keep_source,
                    precision=Precision.of(setup.options),
                    owned=owned.get(handle, ()),
                    own_step=handle in own_steps,
                    on_host=on_host[handle],
                    seen_flat=setup.options.stage == 0 and setup.joins_updates,
                ),
            )
            for handle, optimizer in trained.optimizers.items()
        }
        for handle, runner in self.runners.items():
            runner.prepare(parameter for other, parameter in updates(graph) if other == handle)
        self.complete_updates: Callable[[int], object] = lambda optimizer: None
        self._delayed = setup.delayed
        self._updated: dict[int, set[int]] = {}  # in the step that is under way
        self._found_inf: dict[int, tuple[torch.Tensor, bool]] = {}

    def ask_for_kernels(self, graph: fx.Graph) -> None:
        """Make the kernels of a program's first updates on the device ready, and run nothing."""
        asked = set()
        for node in graph.find_nodes(op="call_function", target=ops.update_together):
            values, grads, optimizer, parameters = node.args[:4]
            runner = self.runners[optimizer]
            elements = sum(value.meta["val"].numel() for value in values)
            if not runner.settings.sharded or elements < FEWEST_ELEMENTS:
                continue
            given = [one.meta["val"] for one in ops.argument(node, "coefficients") or ()]
            coefficients = [torch.ones((), dtype=one.dtype, device=one.device) for one in given]
            squares = ops.argument(node, "norm") is not None
            dtypes = values[0].meta["val"].dtype, grads[0].meta["val"].dtype
            kind = (optimizer, *dtypes, ops.argument(node, "work"), squares)
            if kind not in asked:
                asked.add(kind)
                with contextlib.suppress(Exception):  # its first run says what is wrong
                    fused = Fused(gradient_work(node), coefficients, squares)
                    runner.ask_for_kernel(parameters[0], dtypes[1], fused)

    def host_bytes(self) -> int:
        """Bytes of optimizer states in host memory."""
        return sum(runner.states.nbytes() for runner in self.runners.values())

    def host_bytes_to_come(self) -> int:
        """Bytes of states that will be in host memory beyond now."""
        return sum(runner.states.bytes_to_come() for runner in self.runners.values())

    def is_skipped(self, found_inf: torch.Tensor | None) -> bool:
        """Return whether a step is skipped, as gradients have overflowed; read once a call."""
        if found_inf is None:
            return False
        known = self._found_inf.get(id(found_inf))
        if known is None:
            known = self._found_inf[id(found_inf)] = (found_inf, bool(found_inf.item()))
        return known[1]

    def num_updated(self) -> int:
        """Return how many parameters the steps that are under way have updated, or begun to."""
        return sum(map(len, self._updated.values()))

    def has_begun(self, optimizer: int) -> bool:
        """Return whether a step of it has begun in this call."""
        return optimizer in self._updated

    def enter(self, optimizer: int, parameters: Sequence[int]) -> OptimizerRunner:
        """Be in a step that has not updated these parameters yet; return the runner."""
        runner = self.runners[optimizer]
        SNAPSHOTS.before_change(runner.parameters[index].user() for index in parameters)
        if all(map(runner.owned.has_begun, parameters)):
            return runner
        updated = self._updated.get(optimizer)
        if updated is None or not updated.isdisjoint(parameters):  # a second step of it
            if updated is not None:
                self.complete_updates(optimizer)
                self._end(optimizer)
            runner.begin()
            updated = self._updated[optimizer] = set()
        updated.update(parameters)
        return runner

    def finish(self) -> None:
        """End the steps that are under way."""
        for optimizer in self._updated:
            self._end(optimizer)

    def end_call(self) -> None:
        """Forget the call, also after one that has failed."""
        self._updated.clear()
        self._found_inf.clear()

    def _end(self, optimizer: int) -> None:
        runner = self.runners[optimizer]
        groups = runner.end()
        if self._delayed is not None:
            self._delayed.keep_changes(runner.optimizer, groups)

    # The operators of updates on the device

    def _enter_with_states(self, optimizer: int, parameters: Sequence[int]) -> OptimizerRunner:
        """Be in a step as ``enter`` does, with these parameters' states on the device."""
        runner = self.enter(optimizer, parameters)
        if unread() or not (REGISTRY.host.is_empty and REGISTRY.files.is_empty):
            runner.states.place(parameters)
        return runner

    def update(
        self,
        values: torch.Tensor,
        grad: torch.Tensor,
        optimizer: int,
        parameter: int,
        found_inf: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self.is_skipped(found_inf):
            return values
        runner = self._enter_with_states(optimizer, [parameter])
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
        fused = Fused(work, coefficients, gives_squares=norm is not None)
        if self.is_skipped(found_inf):
            done = map(fused.done_to, grads if fused.gives_squares else ())
            return [*values, *map(squares_of, done)]
        data = [value.detach() for value in values]
        runner = self._enter_with_states(optimizer, parameters)
        squares = runner.run_together(data, grads, parameters, fused)
        if not fused.gives_squares:
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
        own_step: bool = False,
    ) -> list[torch.Tensor]:
        """Begin these updates, as far as what needs whole tensors; ``update`` goes on with it."""
        if self.is_skipped(found_inf):
            return grads
        runner = self._enter_with_states(optimizer, parameters)
        shards = [value.detach() for value in values]
        return runner.owned.begin(shards, grads, parameters, owners, self.communicator.shards)
