"""Run an optimizer's update on what this rank holds of each parameter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zerofx.codegen.first_update import goes_on, zero_states
from zerofx.codegen.kernels import Kernel, runs_triton
from zerofx.codegen.program import Program
from zerofx.codegen.rewrite.elementwise import UpdateError
from zerofx.codegen.rewrite.gradient_work import GradientWork, squares_of
from zerofx.codegen.trace.arguments import Arguments, read_arguments
from zerofx.codegen.trace.independence import check_idle, check_independent
from zerofx.codegen.trace.trace import Update
from zerofx.codegen.triton.launch import Launches
from zerofx.ir.parameters import ParameterInfo
from zerofx.ir.wires import BLOCK
from zerofx.runtime.memory.flat import adjoin, in_storage_order, layout
from zerofx.runtime.optimizer.piece import (
    GroupOfStep,
    KnownStates,
    Piece,
    Traced,
    joined_state,
)
from zerofx.runtime.optimizer.precision import Draw
from zerofx.runtime.optimizer.setup import UpdateSettings
from zerofx.runtime.optimizer.states import StatePlaces
from zerofx.runtime.optimizer.traces import Member, TracedOptimizer
from zerofx.runtime.optimizer.whole_tensors import OwnedUpdates

FEWEST_ELEMENTS = 8192
"""Below this, a CPU kernel's call costs more than it saves: 55 us against 25 at 5,200 elements."""


@dataclass(frozen=True)
class ReadyUpdate:
    """An update of which the elements are left to ``compute``, in any thread.

    ``finish`` takes what that returns, and keeps new states; in the step's thread.
    """

    compute: Callable[[], Sequence[Any]]
    finish: Callable[[Sequence[Any]], None]

    def run(self) -> Sequence[Any]:
        with torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext():
            results = self.compute()
            self.finish(results)
        return results


class Fused(NamedTuple):
    """What an update's kernel does besides.

    ``work``, with its ``coefficients``, is done to the gradient first.  With ``gives_squares`` the
    squares of the gradient after that are a further result.  A kernel that may wait for
    ``launches`` does so.
    """

    work: GradientWork | None = None
    coefficients: Sequence[Tensor] = ()
    gives_squares: bool = False
    launches: Launches | None = None

    def done_to(self, grad: Tensor) -> Tensor:
        """The gradient after ``work``, operator by operator."""
        return grad if self.work is None else self.work(grad, *self.coefficients)


ALONE = Fused()


class KnownRun(NamedTuple):
    """Keeps what ran a piece's update, for as long as all that it was chosen by is the same.

    ``chosen_by`` is all of that but the states.
    """

    states: KnownStates
    chosen_by: tuple
    update: Update
    kernel: Kernel


class OptimizerRunner(TracedOptimizer):
    """Updates parameters as an optimizer's ``step`` would, one at a time.

    Between steps ``optimizer.state`` holds this rank's states: flat shards if ``sharded``, laid
    out like the parameter's shard, and 0-dim tensors and numbers as they are.  Whole states from
    elsewhere have been cut by ``attach_optimizer``.  Hyperparameters are read from the live
    ``optimizer.param_groups`` once per step and group.

    ``owned.begin`` begins the update of ``settings.owned`` parameters, and ``run`` ends it.

    A step is ``begin()``, one ``run()`` per parameter in any order, ``end()``.  For ``run``,
    ``ready`` may do all but the elements, which another thread can do, and ``finish`` the rest.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[int, tuple[nn.Parameter, ParameterInfo]],
        settings: UpdateSettings,
    ) -> None:
        super().__init__(optimizer, parameters, settings)
        self.owned = OwnedUpdates(self)
        self.states = StatePlaces(self)
        # Of updates that run together: how they lay in the last step, and their pieces.
        self._cuts: dict[tuple[int, ...], tuple[tuple | None, list[list[int]]]] = {}
        self._known_runs: dict[tuple[int, ...], KnownRun] = {}
        for parameter in self.parameters.values() if settings.seen_flat else ():
            info = parameter.info
            parameter.see_flat(info.numel > 1 and _are_enough(info.numel, info.device))

    def begin(self) -> None:
        super().begin()
        self.owned.forget()

    def _forget_traces(self) -> None:
        super()._forget_traces()
        self.owned.forget_traces()
        self._known_runs.clear()

    def prepare(self, parameters: Iterable[int]) -> None:
        """Trace the first update of these parameters without running it.

        An optimizer that cannot be compiled is refused here, before anything has changed.
        Parameters that have states already are left for their first run.

        Raises: UpdateError if an update cannot be traced, or not run on shards.
        """
        optimizer = self.live_optimizer()
        check_independent(optimizer)
        updated = [self.parameters[index] for index in parameters]
        users = {id(parameter.user()) for parameter in updated}
        if any(id(p) not in users for group in optimizer.param_groups for p in group["params"]):
            check_idle(optimizer)
        new = []
        for parameter in updated:
            self.storage.check(parameter.info)
            if parameter.index in self.settings.owned:
                self.owned.check_precision(parameter.info)
            if not optimizer.state.get(parameter.user()):
                new.append(parameter.index)
        if not self.settings.own_step:
            self.trace_first(new)

    def trace_first(self, parameters: Iterable[int], state: Arguments | None = None) -> None:
        """Trace the updates of these parameters as if they had no states, without running them.

        Or as if they had this ``state``.

        Raises: UpdateError if an update cannot be traced, or not run on shards.
        """
        state = state or read_arguments({}, shard_shape=None, inputs=())
        self.begin()
        for parameter in map(self.parameters.__getitem__, parameters):
            group = self._group_of(parameter.index)
            if group is None:
                continue
            try:
                traced = self.find(parameter, group, state)
            except UpdateError:
                if not parameter.seen_flat:
                    raise
                parameter.see_flat(False)
                traced = self.find(parameter, group, state)
            if parameter.index in self.settings.owned:
                self.owned.divide(traced.update, parameter.info)
        self._groups = None

    @torch.no_grad()
    def ask_for_kernel(self, parameter: int, gradient_dtype: torch.dtype, fused: Fused) -> None:
        """Make the kernel of a first update ready, with shards of two elements, and run nothing.

        Neighbours have the same one.  None is asked for where the first update goes on from no
        zeros, or there are states already: that comes to its kernel when it first runs.
        """
        info = self.parameters[parameter].info
        is_new = not self.live_optimizer().state.get(self.parameters[parameter].user())
        if not is_new or parameter in self.settings.owned or runs_triton(info.device):
            return
        data = torch.empty(2, dtype=info.dtype, device=info.device)
        grad = torch.empty_like(data, dtype=gradient_dtype)
        self.begin()
        try:
            piece = self.piece([(data, grad, parameter)])
            if (states := self._zero_states(piece, fused)) is not None:
                self._ready(piece._replace(values=states), fused)
        finally:  # nothing has run
            self._known_runs.clear()
            self._groups = None

    def run(self, data: Tensor, grad: Tensor, parameter: int) -> Tensor:
        """Update ``data`` in place with ``grad``, and this parameter's state; return ``data``.

        Shapes: both flat [n] of the parameter's shard if sharded (n may be 0), else both of the
        parameter's shape.

        Raises: UpdateError if the update cannot be traced, or not run on shards; ValueError if
        a state is neither a shard like ``data`` nor a scalar (if sharded).
        """
        if self.owned.has_begun(parameter):
            return self.owned.finish(data, grad, parameter)
        self.ready(data, grad, parameter).run()
        return data

    def ready(self, data: Tensor, grad: Tensor, parameter: int) -> ReadyUpdate:
        """Do of ``run`` what only the step's thread may: trace, compile and read numbers."""
        ready = self._ready(self.piece([(data, grad, parameter)]))
        assert ready is not None, "every update runs operator by operator"
        return ready

    def run_together(
        self,
        data: Sequence[Tensor],
        grads: Sequence[Tensor],
        parameters: Sequence[int],
        fused: Fused = ALONE,
    ) -> list[Tensor]:
        """Do as ``run`` does to each of several parameters, in one kernel where it can.

        That is where shards, gradients and states lie next to each other and the same update
        holds for all.  States are laid out so when they are first met.  Whole parameters have a
        kernel each, if their update is elementwise.  What is ``fused`` with the updates is done in
        any case; returns what all squares are in sum, as some numbers, 0-dim, in float32.
        """
        members = list(zip(data, grads, parameters, strict=True))
        squares: list[Tensor] = []
        if any(map(self.owned.has_begun, parameters)):
            assert fused == ALONE, "what began an update has read its gradient"
            for member in members:
                self.run(*member)
            return squares
        launches = Launches()
        for neighbours in self._neighbours(members):
            joined = self._joined(neighbours, fused._replace(launches=launches))
            if joined is not None:
                results = joined.run()
                if fused.gives_squares and results[-1] is not None:  # it does not wait
                    squares.append(results[-1].sum())
                continue
            for shard, grad, parameter in neighbours:
                done = fused.done_to(grad)
                if fused.gives_squares:
                    squares.append(squares_of(done))
                self.run(shard, done, parameter)
        return squares + launches.run()

    def ready_together(
        self, data: Sequence[Tensor], grads: Sequence[Tensor], parameters: Sequence[int]
    ) -> list[ReadyUpdate]:
        """Do of ``run_together``, on a CPU, what only the step's thread may."""
        found = []
        for neighbours in self._neighbours(list(zip(data, grads, parameters, strict=True))):
            joined = self._joined(neighbours, ALONE)
            found += [self.ready(*one) for one in neighbours] if joined is None else [joined]
        return found

    def _neighbours(self, members: Sequence[Member]) -> list[list[Member]]:
        """Sort updates by where their shards lie, and cut where groups change or memory does.

        What has no elements on this rank lies nowhere, and goes with the first of its group.  As
        long as all lie to each other as in the last step, they are cut as they were then.  Whole
        parameters are pieces of their own.
        """
        if not self.settings.sharded:
            return [[member] for member in members]
        data, grads, indices = zip(*members, strict=True)
        groups = [self._group_of(index) for index in indices]
        lies: tuple = (layout(data), layout(grads))
        if self.settings.precision.draws:
            lies += ([self.parameters[index].first_element for index in indices],)
        known_lies, pieces = self._cuts.get(indices, (None, []))
        are_of_one = all(group is groups[0] for group in groups)
        if lies != known_lies or not are_of_one:
            pieces = self._cut(members, groups)
            self._cuts[indices] = (lies if are_of_one else None, pieces)
        return [[members[place] for place in piece] for piece in pieces]

    def _cut(
        self, members: Sequence[Member], groups: Sequence[GroupOfStep | None]
    ) -> list[list[int]]:
        """The places of the updates of each piece."""
        found: list[tuple[Any, list[int]]] = []
        order = [(not data.numel(), data.data_ptr()) for data, *_ in members]
        for place in sorted(range(len(members)), key=order.__getitem__):
            data, grad, index = members[place]
            is_coded = self._is_coded(self.parameters[index].info)
            kind = (id(groups[place]), data.dtype, grad.dtype, is_coded)
            near = found[-1:] if data.numel() else found
            alike = [piece for known, piece in near if known == kind]
            if alike and (
                not data.numel()
                or self._goes_on([members[i] for i in alike[0]], members[place], is_coded)
            ):
                alike[0].append(place)
            else:
                found.append((kind, [place]))
        return [piece for _, piece in found]

    def _is_coded(self, info: ParameterInfo) -> bool:
        """Return whether a parameter's moments are kept in eight bits."""
        precision = self.settings.precision
        return precision.draws and precision.moment_storage(info.dtype, info.numel) is torch.int8

    def _goes_on(self, piece: Sequence[Member], member: Member, is_coded: bool) -> bool:
        """Return whether a piece ends where a member begins, and so do its numbers and blocks."""
        (last, last_grad, before), (data, grad, index) = piece[-1], member
        if not (adjoin(last, data) and adjoin(last_grad, grad)):
            return False
        if not self.settings.precision.draws:
            return True
        if is_coded and any(len(shard) % BLOCK for shard, *_ in piece):
            return False
        first_elements = [self.parameters[one].first_element for one in (before, index)]
        return first_elements[0] + len(last) == first_elements[1]

    def _joined(self, members: Sequence[Member], fused: Fused) -> ReadyUpdate | None:
        """One kernel's run for shards that are one piece of memory; None if that cannot be."""
        if not self.settings.sharded:
            return self._seen_flat(*members[0], fused)
        if not _are_enough(sum(shard.numel() for shard, *_ in members), members[0][0].device):
            return None
        return self._ready_as_one(members, fused)

    def _seen_flat(
        self, data: Tensor, grad: Tensor, index: int, fused: Fused
    ) -> ReadyUpdate | None:
        """One kernel's run for a whole parameter; None, from now on, if that cannot be."""
        parameter = self.parameters[index]
        if not parameter.seen_flat:
            return None
        ready = None
        flat, flat_grad = (in_storage_order(one, parameter.info) for one in (data, grad))
        if flat.data_ptr() == data.data_ptr():  # and no copy
            with contextlib.suppress(UpdateError):
                ready = self._ready_as_one([(flat, flat_grad, index)], fused)
        if ready is None:
            parameter.see_flat(False)
        else:
            torch.autograd.graph.increment_version(data)  # no kernel does
        return ready

    def _ready_as_one(self, members: Sequence[Member], fused: Fused) -> ReadyUpdate | None:
        piece = self.piece(members)
        ready = self._again(piece, fused)
        if ready is None:
            if not any(piece.states) and self._begin_states(piece, fused):
                piece = self.piece(members)
            values = joined_state(piece.states, piece.lengths, piece.whole)
            if values is not None:
                ready = self._ready(piece._replace(values=values), fused)
        return ready

    def _begin_states(self, piece: Piece, fused: Fused) -> bool:
        """Keep zeros as the states of a piece without any, if its first update goes on from these.

        It then runs the kernel that later ones will: this one is not compiled at all.
        """
        states = self._zero_states(piece, fused)
        if states is not None:
            self.keep_state(piece, states)
        return states is not None

    @torch.no_grad()
    def _zero_states(self, piece: Piece, fused: Fused) -> dict[str, Any] | None:
        """Return zeros that a piece's first update goes on from as later ones do; None for none."""
        kernels = self.host_kernels if piece.group.on_host else self.kernels
        if not self.storage.precision.is_plain:
            return None

        def given(traced: Traced) -> tuple[Update, Program, list[Any]]:
            options = (piece.data, piece.grad, fused.work, fused.gives_squares)
            program = kernels.program(traced.update, *options)
            inputs = [piece.data, piece.grad, *traced.inputs, *fused.coefficients]
            return traced.update, program, inputs

        # The optimizer's own Python may fail on states that it never has.
        with contextlib.suppress(Exception):
            traced = self.traced(piece)
            first = given(traced)
            states = zero_states(*first, piece.data)
            if not states or not self._holds_for_all(traced, piece):
                return None
            if goes_on(first, given(self.traced(piece._replace(values=states)))):
                return states
        return None

    def _again(self, piece: Piece, fused: Fused) -> ReadyUpdate | None:
        """Return the run of a piece as in the last step; None if anything but numbers differs."""
        known = self._known_runs.get(piece.indices)
        if known is None:
            return None
        group = self._read(piece.group)
        state = known.states.again(piece.states)
        if state is None or known.chosen_by != _chosen_by(piece, fused):
            return None
        traced = Traced(known.update, group, state)
        if not traced.holds:
            return None
        inputs = [*traced.inputs, *fused.coefficients]
        return self._of(
            piece._replace(values=dict(state.values)), known.update, known.kernel, inputs, fused
        )

    @torch.no_grad()
    def _ready(self, piece: Piece, fused: Fused | None = None) -> ReadyUpdate | None:
        """A piece's update, in one kernel if it is ``fused``; None if that cannot be."""
        data, grad, values, info = piece.data, piece.grad, piece.values, piece.info
        traced = self.traced(piece)
        if not self._holds_for_all(traced, piece):
            return None
        draw = self.storage.draw(info, piece.parameters[0].first_element, values)
        work = fused.work if fused is not None else None
        gradient_dtype = grad.dtype if work is None else work.dtype
        update, inputs = self.storage.rewrite(traced, values, data.dtype, gradient_dtype, draw)
        kernels = self.host_kernels if piece.group.on_host else self.kernels
        kernel: Kernel | None
        if fused is None:
            kernel = kernels.without(update, self._is_coded(info))
            return self._of(piece, update, kernel, inputs, ALONE, draw)
        kernel = kernels.find(update, data, grad, fused.work, fused.gives_squares)
        if kernel is None:
            return None
        if update is traced.update and KnownStates.can_be(traced.state):
            known = KnownStates(piece.states, traced.state)
            self._known_runs[piece.indices] = KnownRun(
                known, _chosen_by(piece, fused), update, kernel
            )
        return self._of(piece, update, kernel, [*inputs, *fused.coefficients], fused, draw)

    def _of(
        self,
        piece: Piece,
        update: Update,
        kernel: Kernel,
        inputs: Sequence[Any],
        fused: Fused,
        draw: Draw | None = None,
    ) -> ReadyUpdate:
        """Return the run of a kernel that has been chosen."""
        data, grad, values, info = piece.data, piece.grad, piece.values, piece.info
        waits = {}
        # New states are settled below, and rounded: what makes them cannot wait.
        is_settled = draw is None or all(name in values for name, _ in update.state)
        if kernel.may_wait and is_settled and fused.launches is not None:
            waits["launches"] = fused.launches
        converted = grad  # which may be there only when the kernel computes
        if grad.dtype is not kernel.gradient_dtype:
            converted = torch.empty_like(grad, dtype=kernel.gradient_dtype)
        run = kernel.ready(data, converted, *inputs, **waits)

        def compute() -> Sequence[Any]:
            if converted is not grad:
                converted.copy_(grad)
            return run()

        def finish(results: Sequence[Any]) -> None:
            new_state, new_group = update.filled(results)
            self.storage.settle(new_state, values, data, info, draw)
            piece.group.changed.update(new_group)
            self.keep_state(piece, new_state)

        return ReadyUpdate(compute, finish)

    def _holds_for_all(self, traced: Traced, piece: Piece) -> bool:
        """Return whether the update of a piece's first parameter is that of all.

        Raises: UpdateError if it changes a gradient that is read later.
        """
        update = traced.update
        at = 0 if update.of_any_sizes else -1  # of what the first's trace is known by
        others = {(one.layouts[at], one.attributes): one for one in reversed(piece.parameters)}
        others.popitem()  # the first itself
        for parameter in others.values():
            other = self.find(parameter, piece.group, traced.state).update
            if other is not update and other.computation != update.computation:
                return False
        if update.writes_gradient:
            for parameter in piece.parameters:
                self.check_gradient(update, parameter)
        return True


def _chosen_by(piece: Piece, fused: Fused) -> tuple:
    """Return what a piece's kernel is chosen by, but for its states and the guard of its trace."""
    attributes = [parameter.attributes for parameter in piece.parameters]
    dtypes = (piece.data.dtype, piece.grad.dtype)
    return (piece.group.key, attributes, dtypes, fused.work, fused.gives_squares)


def _are_enough(numel: int, device: torch.device) -> bool:
    """Return whether so many elements are worth a kernel's call."""
    return runs_triton(device) or numel >= FEWEST_ELEMENTS
