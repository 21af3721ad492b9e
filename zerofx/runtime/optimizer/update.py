"""Run an optimizer's update on what this rank holds of each parameter."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zerofx.codegen.kernels import Kernel, runs_triton
from zerofx.codegen.rewrite.gradient_norm import squares_of, with_squares
from zerofx.codegen.rewrite.gradient_work import GradientWork
from zerofx.codegen.rewrite.rounding import BLOCK
from zerofx.codegen.trace.arguments import Arguments, read_arguments
from zerofx.codegen.trace.independence import check_independent
from zerofx.codegen.trace.trace import Update
from zerofx.codegen.triton.launch import Launches
from zerofx.ir.parameters import ParameterInfo
from zerofx.runtime.memory.flat import adjoin, join
from zerofx.runtime.optimizer.context import UpdateContext
from zerofx.runtime.optimizer.joined_states import joined_state
from zerofx.runtime.optimizer.setup import UpdateSettings
from zerofx.runtime.optimizer.states import StatePlaces
from zerofx.runtime.optimizer.traces import GroupOfStep
from zerofx.runtime.optimizer.whole_tensors import OwnedUpdates

FEWEST_ELEMENTS = 8192
"""Below this, a CPU kernel's call costs more than it saves: 55 us against 25 at 5,200 elements."""

Member = tuple[Tensor, Tensor, int]
"""A parameter's shard, its gradient's, both flat ``[n]``, and the parameter's number."""


@dataclass(frozen=True)
class ReadyUpdate:
    """An update of which the elements are left to ``compute``, in any thread.

    ``finish`` takes what that returns, and keeps new states; in the step's thread.
    """

    compute: Callable[[], Sequence[Any]]
    finish: Callable[[Sequence[Any]], None]

    def run(self) -> Sequence[Any]:
        with torch.no_grad():
            results = self.compute()
            self.finish(results)
        return results


class _Piece(NamedTuple):
    """What one kernel updates: a parameter's shard, or those of neighbours, seen as one.

    ``parameter`` is the first, ``users`` are the user's, ``values`` is the state.
    """

    parameter: int
    group: GroupOfStep
    users: Sequence[Any]
    lengths: Sequence[int]
    data: Tensor
    grad: Tensor
    values: dict[str, Any]


class OptimizerRunner:
    """Updates parameters as an optimizer's ``step`` would, one at a time.

    Between steps ``optimizer.state`` holds this rank's states: flat shards if ``sharded``, laid
    out like the parameter's shard, and 0-dim tensors and numbers as they are.  Whole states from
    elsewhere have been cut by ``attach_optimizer``.  Hyperparameters are read from the live
    ``optimizer.param_groups`` once per step and group.

    ``parameters`` maps the index that the program uses to the user's parameter and its layout.
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
        self._context = UpdateContext(optimizer, parameters, settings)
        self.owned = OwnedUpdates(self._context)
        self._extensions: dict[Hashable, tuple[Update, Update]] = {}  # whose ids are in use
        self.states = StatePlaces(self._context)

    @property
    def trace_count(self) -> int:
        """The number of traces of the optimizer's Python."""
        return self._context.traces.count

    def begin(self) -> None:
        """Start one optimizer step: look up every parameter's group as it is now."""
        self._context.begin()
        self.owned.forget()

    def prepare(self, parameters: Iterable[int]) -> None:
        """Trace the first update of these parameters without running it.

        An optimizer that cannot be compiled is refused here, before anything has changed.
        Parameters that have states already are left for their first run.

        Raises: UpdateError if an update cannot be traced, or not run on shards.
        """
        context, optimizer = self._context, self._context.live_optimizer()
        check_independent(optimizer)
        nothing = read_arguments({}, shard_shape=None, inputs=())
        context.begin()
        for parameter in parameters:
            reference, info = context.parameters[parameter]
            group, is_owned = context.group_of(parameter), parameter in context.settings.owned
            context.storage.check(info)
            if is_owned:
                self.owned.check_precision(info)
            if group is not None and not optimizer.state.get(reference()):
                update, _ = context.traces.find(optimizer, parameter, group, nothing)
                if is_owned:
                    self.owned.divide(update, info)
        context.end()

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
        context = self._context
        user, info, group = context.of_step(parameter)
        values = context.live_optimizer().state.get(user) or {}
        with torch.no_grad():
            context.storage.adopt(values, data, info)
            if context.settings.sharded:
                context.check_shards(values, data, info)
            traced = context.traced(parameter, group, values, tuple(data.shape))
            piece = _Piece(parameter, group, [user], [data.numel()], data, grad, values)
            ready = self._bound(piece, traced, context.kernels.without)
        assert ready is not None, "every update runs operator by operator"
        return ready

    def run_together(
        self,
        data: Sequence[Tensor],
        grads: Sequence[Tensor],
        parameters: Sequence[int],
        work: GradientWork | None = None,
        coefficients: Sequence[Tensor] = (),
        squares: list[Tensor] | None = None,
    ) -> None:
        """Do as ``run`` does to each of several sharded parameters, in one kernel where it can.

        That is where shards, gradients and states lie next to each other and the same update
        holds for all.  States are laid out so when they are first met.  ``work``, if given, is
        done to each gradient first, in the same kernel.  What the squares of all gradients, after
        ``work``, are in sum is added to ``squares``: some numbers, 0-dim, in float32.
        """
        members = list(zip(data, grads, parameters, strict=True))
        if any(map(self.owned.has_begun, parameters)):
            assert work is None and squares is None, "what began an update has read its gradient"
            for member in members:
                self.run(*member)
            return
        launches = Launches()
        for piece in self._neighbours(members):
            joined = self._joined(piece, launches, work, coefficients, squares is not None)
            if joined is not None:
                results = joined.run()
                if squares is not None and results[-1] is not None:  # it does not wait
                    squares.append(results[-1].sum())
                continue
            for shard, grad, parameter in piece:
                done = grad if work is None else work(grad, *coefficients)
                if squares is not None:
                    squares.append(squares_of(done))
                self.run(shard, done, parameter)
        sums = launches.run()
        if squares is not None:
            squares += sums

    def ready_together(
        self, data: Sequence[Tensor], grads: Sequence[Tensor], parameters: Sequence[int]
    ) -> list[ReadyUpdate]:
        """Do of ``run_together``, on a CPU, what only the step's thread may."""
        found = []
        for piece in self._neighbours(list(zip(data, grads, parameters, strict=True))):
            joined = self._joined(piece)
            found += [self.ready(*member) for member in piece] if joined is None else [joined]
        return found

    def _neighbours(self, members: Sequence[Member]) -> Iterator[list[Member]]:
        """Sort updates by where their shards lie, and cut where groups change or memory does.

        What has no elements on this rank lies nowhere, and goes with the first of its group.
        """
        precision = self._context.storage.precision
        is_plain, draws = precision.is_plain, precision.draws
        pieces: list[tuple[Any, list[Member]]] = []

        def place(member: Member) -> tuple[bool, int]:
            return not member[0].numel(), member[0].data_ptr()

        for member in sorted(members, key=place):
            info = self._context.parameters[member[2]][1]
            group = self._context.group_of(member[2])
            storage = None if is_plain else precision.moment_storage(info.dtype, info.numel)
            kind = (id(group), member[0].dtype, member[1].dtype, storage)
            if member[0].numel():
                candidates = [
                    piece
                    for known, piece in pieces[-1:]
                    if known == kind
                    and adjoin(piece[-1][0], member[0])
                    and adjoin(piece[-1][1], member[1])
                    and (not draws or self._counts_on(piece, member, storage))
                ]
            else:
                candidates = [piece for known, piece in pieces if known == kind][:1]
            if candidates:
                candidates[0].append(member)
            else:
                pieces.append((kind, [member]))
        yield from (piece for _, piece in pieces)

    def _counts_on(
        self, piece: Sequence[Member], member: Member, storage: torch.dtype | None
    ) -> bool:
        """Return whether elements continue a piece's numbers, and its blocks end where it does."""
        last, _, parameter = piece[-1]
        if storage is torch.int8 and any(len(data) % BLOCK for data, *_ in piece):
            return False
        first = self._context.draws.number_of_first
        return first(parameter) + len(last) == first(member[2])

    def _joined(
        self,
        members: Sequence[Member],
        launches: Launches | None = None,
        work: GradientWork | None = None,
        coefficients: Sequence[Tensor] = (),
        gives_squares: bool = False,
    ) -> ReadyUpdate | None:
        """One kernel's run for shards that are one piece of memory; None if that cannot be.

        On a GPU the kernel waits for ``launches``, and goes with those of other pieces.
        """
        context, optimizer = self._context, self._context.live_optimizer()
        shards, grads, parameters = zip(*members, strict=True)
        lengths = [shard.numel() for shard in shards]
        is_short = sum(lengths) < FEWEST_ELEMENTS and not runs_triton(shards[0].device)
        if is_short or context.group_of(parameters[0]) is None:
            return None
        _, info, group = context.of_step(parameters[0])
        users = [context.parameters[parameter][0]() for parameter in parameters]
        states = [optimizer.state.get(user) or {} for user in users]
        for state, shard in zip(states, shards, strict=True):
            context.storage.adopt(state, shard, info)
        values = joined_state(states, lengths)
        if values is None:
            return None
        data, grad = join(shards), join(grads)
        piece = _Piece(parameters[0], group, users, lengths, data, grad, values)

        def kernel_of(update: Update) -> Kernel | None:
            extended = self._extended(update, work, gives_squares)
            return context.kernels.find(extended, data, grad)

        with torch.no_grad():
            traced = context.traced(parameters[0], group, values, (sum(lengths),))
            if not self._holds_for(traced, parameters, group):
                return None
            dtype = grad.dtype if work is None else work.dtype
            return self._bound(piece, traced, kernel_of, dtype, coefficients, launches)

    def _bound(
        self,
        piece: _Piece,
        traced: tuple[Update, Arguments, Arguments],
        kernel_of: Callable[[Update], Kernel | None],
        gradient_dtype: torch.dtype | None = None,
        coefficients: Sequence[Tensor] = (),
        launches: Launches | None = None,
    ) -> ReadyUpdate | None:
        """A kernel's run of a piece; None if there is no kernel.

        The update is given a gradient of ``gradient_dtype``, by default as it is.
        """
        context, data, grad, values = self._context, piece.data, piece.grad, piece.values
        info = context.parameters[piece.parameter][1]
        draw = context.draws.of(piece.parameter, values)
        update, inputs = context.storage.rewrite(
            *traced, values, data, gradient_dtype or grad.dtype, draw
        )
        kernel = kernel_of(update)
        if kernel is None:
            return None
        # New states are settled below, and rounded: what makes them cannot wait.
        is_settled = draw is None or all(name in values for name, _ in update.state)
        waits = {"launches": launches} if kernel.may_wait and is_settled else {}
        converted = grad  # which may be there only when the kernel computes
        if grad.dtype is not kernel.gradient_dtype:
            converted = torch.empty_like(grad, dtype=kernel.gradient_dtype)
        run = kernel.ready(data, converted, *inputs, *coefficients, **waits)

        def compute() -> Sequence[Any]:
            if converted is not grad:
                converted.copy_(grad)
            return run()

        def finish(results: Sequence[Any]) -> None:
            new_state, new_group = update.filled(results)
            context.storage.settle(new_state, values, data, info, draw)
            piece.group.changed.update(new_group)
            context.keep_state(piece.users, piece.lengths, values, new_state)

        return ReadyUpdate(compute, finish)

    def _holds_for(
        self,
        traced: tuple[Update, Arguments, Arguments],
        parameters: Sequence[int],
        group: GroupOfStep,
    ) -> bool:
        """Return whether an update of the first of these parameters is that of all.

        Raises: UpdateError if it changes a gradient that is read later.
        """
        traces, optimizer = self._context.traces, self._context.live_optimizer()
        layouts = {traces.layouts[parameter]: parameter for parameter in parameters}
        update, _, state = traced
        for parameter in layouts.values():
            other, _ = traces.find(optimizer, parameter, group, state)
            if other.computation != update.computation:
                return False
        if update.writes_gradient:
            for parameter in parameters:
                traces.check_gradient(update, parameter)
        return True

    def _extended(
        self,
        update: Update,
        work: GradientWork | None,
        gives_squares: bool,
    ) -> Update:
        """An update that sums its gradient's squares, with work in front of both: made once."""
        if work is None and not gives_squares:
            return update
        key = (id(update), work, gives_squares)
        if key not in self._extensions:
            made = with_squares(update) if gives_squares else update
            if work is not None:
                made = work.before(made)
            self._extensions[key] = update, made
        return self._extensions[key][1]

    def end(self) -> Callable[[], None]:
        """Finish the step: write changed group entries back, and let LR schedulers know.

        What it returns writes back what updates change that finish later.
        """
        groups = self._context.end()

        def keep_groups() -> None:
            for group in groups:
                group.values.update(group.changed)

        keep_groups()
        self.live_optimizer()._opt_called = True
        return keep_groups

    def live_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer.  Raises: RuntimeError if it is gone."""
        return self._context.live_optimizer()
