"""Updates of shards that lie next to each other, run as one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zerofx.codegen.kernels import Choice, runs_triton
from zerofx.codegen.rewrite.gradient_norm import squares_of, with_squares
from zerofx.codegen.rewrite.gradient_work import GradientWork
from zerofx.codegen.rewrite.rounding import BLOCK
from zerofx.codegen.trace.arguments import read_arguments
from zerofx.codegen.trace.trace import Update
from zerofx.codegen.triton.launch import Launches
from zerofx.runtime.memory.flat import adjoin, join
from zerofx.runtime.optimizer.context import ReadyUpdate, UpdateContext
from zerofx.runtime.optimizer.joined import joined_state, keep_state

FEWEST_ELEMENTS = 8192
"""Below this, a CPU kernel's call costs more than it saves: 55 us against 25 at 5,200 elements."""

Member = tuple[Tensor, Tensor, int]
"""A parameter's shard, its gradient's, both flat ``[n]``, and the parameter's number."""


class JoinedUpdates:
    """Runs each piece of memory with one kernel, where the same update holds for all in it."""

    def __init__(self, context: UpdateContext) -> None:
        self._context = context
        self._extensions: dict[Hashable, tuple[Update, Update]] = {}  # whose ids are in use

    def run(
        self,
        members: Sequence[Member],
        run_one: Callable[[Tensor, Tensor, int], object],
        work: GradientWork | None,
        coefficients: Sequence[Tensor],
        squares: list[Tensor] | None,
    ) -> None:
        """Run updates piece by piece; add what the gradients' squares are in sum to ``squares``."""
        launches = Launches()
        for piece in self._neighbours(members):
            if not self._run_joined(piece, launches, work, coefficients, squares):
                for shard, grad, parameter in piece:
                    done = grad if work is None else work(grad, *coefficients)
                    if squares is not None:
                        squares.append(squares_of(done))
                    run_one(shard, done, parameter)
        sums = launches.run()
        if squares is not None:
            squares += sums

    def ready(
        self,
        members: Sequence[Member],
        ready_one: Callable[[Tensor, Tensor, int], ReadyUpdate],
    ) -> list[ReadyUpdate]:
        """Do of ``run``, on a CPU, what only the step's thread may."""
        found = []
        for piece in self._neighbours(members):
            joined = self._joined(piece)
            if joined is None:
                found += [ready_one(*member) for member in piece]
            else:
                found.append(joined.ready())
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
        """Whether elements are numbered on from a piece, and its blocks end where it does."""
        last, _, parameter = piece[-1]
        if storage is torch.int8 and any(len(data) % BLOCK for data, *_ in piece):
            return False
        first = self._context.draws.number_of_first
        return first(parameter) + len(last) == first(member[2])

    def _run_joined(
        self,
        members: Sequence[Member],
        launches: Launches,
        work: GradientWork | None,
        coefficients: Sequence[Tensor],
        squares: list[Tensor] | None,
    ) -> bool:
        """Update shards that are one piece of memory with one kernel; False if that cannot be.

        On a GPU the kernel waits for ``launches``, and goes with those of other pieces.  The sum of
        the gradient's squares goes to ``squares``, or comes from ``launches``.
        """
        joined = self._joined(members, work, coefficients, squares is not None)
        if joined is None:
            return False
        results = joined.run(launches)
        if squares is not None and results[-1] is not None:  # it does not wait
            squares.append(results[-1].sum())
        return True

    def _joined(
        self,
        members: Sequence[Member],
        work: GradientWork | None = None,
        coefficients: Sequence[Tensor] = (),
        gives_squares: bool = False,
    ) -> _JoinedUpdate | None:
        """One kernel's call for shards that are one piece of memory; None if that cannot be."""
        context, optimizer = self._context, self._context.live_optimizer()
        parameters = tuple(parameter for *_, parameter in members)
        users = [context.parameters[parameter][0]() for parameter in parameters]
        info = context.parameters[parameters[0]][1]
        group = context.group_of(parameters[0])
        states = [optimizer.state.get(user) or {} for user in users]
        lengths = [member[0].numel() for member in members]
        is_short = sum(lengths) < FEWEST_ELEMENTS and not runs_triton(members[0][0].device)
        if group is None or is_short:
            return None
        for state, (data, *_) in zip(states, members, strict=True):
            context.storage.adopt(state, data, info)
        values = joined_state(states, lengths)
        if values is None:
            return None
        with torch.no_grad():
            logical = context.storage.logical(values, info)
            state = read_arguments(logical, shard_shape=(sum(lengths),), inputs=logical)
            traced, arguments = context.traces.find(optimizer, parameters[0], group, state)
            layouts = {context.traces.layouts[parameter]: parameter for parameter in parameters}
            for parameter in layouts.values():
                other, _ = context.traces.find(optimizer, parameter, group, state)
                if other.computation != traced.computation:
                    return None
            if traced.writes_gradient:
                for parameter in parameters:
                    context.traces.check_gradient(traced, parameter)
            data = join([member[0] for member in members])
            grad = join([member[1] for member in members])
            draw = context.draws.of(parameters[0], values)
            gradient_dtype = grad.dtype if work is None else work.dtype
            update, tensors, numbers = context.storage.rewrite(
                traced, values, arguments, state, data, gradient_dtype, draw
            )
            update = self._extended(update, work, data.dtype, gives_squares)
            if work is not None:
                numbers += coefficients
            kernel = context.kernels.find(update, data, grad)
            if kernel is None:
                return None
            # New states are settled below, and rounded: what makes them cannot wait.
            is_settled = draw is None or all(name in values for name, _ in update.state)
            inputs = [data, grad, *tensors, *numbers]

        def finish(results: Sequence[Any]) -> None:
            new_state, new_group = update.filled(results)
            context.storage.settle(new_state, values, data, info, draw)
            group.changed.update(new_group)
            if new_state:
                live = context.live_optimizer().state
                keep_state(new_state, values, [live[user] for user in users], lengths)

        return _JoinedUpdate(kernel, inputs, kernel.may_wait and is_settled, finish)

    def _extended(
        self,
        update: Update,
        work: GradientWork | None,
        parameter_dtype: torch.dtype,
        gives_squares: bool,
    ) -> Update:
        """An update that sums its gradient's squares, with work in front of both: made once."""
        if work is None and not gives_squares:
            return update
        key = (id(update), work, parameter_dtype, gives_squares)
        if key not in self._extensions:
            made = with_squares(update) if gives_squares else update
            if work is not None:
                made = work.before(made, parameter_dtype)
            self._extensions[key] = update, made
        return self._extensions[key][1]


@dataclass(frozen=True)
class _JoinedUpdate:
    """The call of a kernel that updates neighbours; it ``waits`` for others to launch with."""

    kernel: Choice
    inputs: Sequence[Any]
    waits: bool
    finish: Callable[[Sequence[Any]], None]

    def run(self, launches: Launches) -> Sequence[Any]:
        with torch.no_grad():
            run = partial(self.kernel.run, launches=launches) if self.waits else self.kernel.run
            data, grad, *others = self.inputs
            results = run(data, grad.to(self.kernel.gradient_dtype), *others)
            self.finish(results)
        return results

    def ready(self) -> ReadyUpdate:
        """As one that another thread computes; the gradient may be there only then."""
        assert self.kernel.ready is not None, "updates on the host run on its CPU"
        data, grad, *others = self.inputs
        converted = grad
        if grad.dtype is not self.kernel.gradient_dtype:
            converted = torch.empty_like(grad, dtype=self.kernel.gradient_dtype)
        with torch.no_grad():
            run = self.kernel.ready(data, converted, *others)

        def compute() -> Any:
            if converted is not grad:
                converted.copy_(grad)
            return run()

        return ReadyUpdate(compute, self.finish)
