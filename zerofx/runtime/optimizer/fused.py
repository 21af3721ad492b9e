"""Shards that lie next to each other, updated by one kernel, and their states, seen as one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from zerofx.codegen.kernels import Choice, runs_triton
from zerofx.codegen.rewrite.gradient_norm import squares_of, with_squares
from zerofx.codegen.rewrite.gradient_work import GradientWork
from zerofx.codegen.rewrite.rounding import BLOCK, num_blocks
from zerofx.codegen.rewrite.storage import NATIVE
from zerofx.codegen.trace.arguments import read_arguments
from zerofx.codegen.trace.trace import Update
from zerofx.codegen.triton.launch import Launches
from zerofx.runtime.memory.flat import adjoin, join, ordinary_tensors, without_base
from zerofx.runtime.memory.pages import in_huge_pages, prefer_huge_pages
from zerofx.runtime.optimizer.context import ReadyUpdate, UpdateContext
from zerofx.runtime.optimizer.precision import is_scale


def joined_state(states: Sequence[dict[str, Any]], lengths: Sequence[int]) -> dict[str, Any] | None:
    """See the optimizer's states of neighbouring shards as one; None if they differ in kind.

    Shards of a state that are not next to each other are moved there: ``optimizer.state`` then
    holds views, so that each parameter has its own as ever.
    """
    first = states[0]
    if any(state.keys() != first.keys() for state in states):
        return None
    joined: dict[str, Any] = {}
    native = first.get(NATIVE, {})
    for name in first:
        values = [state[name] for state in states]
        parts = blocks_of(lengths) if is_scale(name, native) else lengths
        if _are_shards(values, parts):
            joined[name] = _side_by_side(name, values, states, parts)
        elif all(_same_number(values[0], value) for value in values):
            joined[name] = values[0]
        else:
            return None
    return joined


def keep_state(
    new: Mapping[str, Any],
    joined: Mapping[str, Any],
    states: Sequence[dict[str, Any]],
    lengths: Sequence[int],
) -> None:
    """Give each parameter its part of what an update of ``joined`` has returned."""
    native = new.get(NATIVE, {})
    for name, value in new.items():
        parts = blocks_of(lengths) if is_scale(name, native) else lengths
        if isinstance(value, Tensor) and value.shape == (sum(parts),):
            if value is not joined.get(name):
                _divide(name, in_huge_pages(value), states, parts)
        elif isinstance(value, Tensor):
            for state in states:
                if not isinstance(state.get(name), Tensor):
                    state[name] = value.clone()
                elif state[name] is not value:
                    state[name].copy_(value)
        else:
            for state in states:
                state[name] = value
    for state in states:
        for name in [name for name in state if name not in new]:
            del state[name]


def blocks_of(lengths: Sequence[int]) -> list[int]:
    """Count the blocks of each of several neighbours."""
    return [num_blocks(length) for length in lengths]


def _side_by_side(
    name: str,
    values: Sequence[Tensor],
    states: Sequence[dict[str, Any]],
    lengths: Sequence[int],
) -> Tensor:
    there = [value for value in values if value.numel()]
    if all(adjoin(one, other) for one, other in pairwise(there)):
        return join(values)
    with ordinary_tensors():
        flat = torch.empty(sum(lengths), dtype=values[0].dtype, device=values[0].device)
        prefer_huge_pages(flat)
        _divide(name, torch.cat(list(values), out=flat), states, lengths)
    return flat


def _divide(
    name: str, flat: Tensor, states: Sequence[dict[str, Any]], lengths: Sequence[int]
) -> None:
    for state, part in zip(states, flat.split(list(lengths)), strict=True):
        state[name] = without_base(part)


def _are_shards(values: Sequence[Any], lengths: Sequence[int]) -> bool:
    return all(
        isinstance(value, Tensor) and value.shape == (length,) and value.dtype == values[0].dtype
        for value, length in zip(values, lengths, strict=True)
    )


def _same_number(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return (
            isinstance(one, Tensor)
            and isinstance(other, Tensor)
            and one.dim() == other.dim() == 0
            and one.device.type == other.device.type == "cpu"
            and one.dtype == other.dtype
            and one.item() == other.item()
        )
    plain = isinstance(one, int | float | str | bool) or _is_dtypes(one)
    return type(one) is type(other) and plain and one == other


def _is_dtypes(value: Any) -> bool:
    return type(value) is dict and all(isinstance(item, torch.dtype) for item in value.values())


FEWEST_ELEMENTS = 8192
"""Below this, a CPU kernel's call costs more than it saves: 55 us against 25 at 5,200 elements."""

Member = tuple[Tensor, Tensor, int]
"""A parameter's shard, its gradient's, both flat ``[n]``, and the parameter's number."""


class FusedUpdates:
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
        """Return whether elements continue a piece's numbers, and its blocks end where it does."""
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
