"""Tells whether an optimizer's first update does what later ones do to states that are zeros.

``if not state: state["exp_avg"] = torch.zeros_like(p)`` begins nearly every step.  What follows is
what all steps do: then the first needs no kernel of its own, and runs that of the later ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerofx.codegen.numbers import roots_of
from zerofx.codegen.operations import NumberOperand, Operand, Value
from zerofx.codegen.program import Program
from zerofx.codegen.trace.nested import Slot
from zerofx.codegen.trace.trace import Update

aten = torch.ops.aten


def zero_states(
    update: Update, program: Program, inputs: Sequence[Any], like: Tensor
) -> dict[str, Any] | None:
    """Return zeros for the states that a first update makes, each as it makes it.

    ``program`` is the update's, ``inputs`` all that it is given, ``like`` a shard ``[n]``.  None if
    it makes other states than shards of its own and numbers, or changes its group too.
    """
    if update.group or _share_results(update):
        return None
    numbers, _ = _numbers_of(program, inputs)
    made = {stream.name: stream for stream in program.streams if stream.kind == "new state"}
    states: dict[str, Any] = {}
    for name, slot in update.state:
        if type(slot) in (int, float) and slot == 1:  # known when it was traced: a count
            states[name] = type(slot)(0)
            continue
        if not isinstance(slot, Slot):
            return None
        result = program.results[slot.index]
        if result[0] == "stream" and result[1] in made:
            states[name] = torch.zeros_like(like, dtype=made[result[1]].dtype)
        elif result[0] == "number" and _begins_as_zero(update, slot.index):
            number = numbers[result[1]]
            is_tensor = isinstance(number, Tensor)
            states[name] = torch.zeros_like(number) if is_tensor else type(number)(0)
        else:
            return None
    return states


def goes_on(
    first: tuple[Update, Program, Sequence[Any]], later: tuple[Update, Program, Sequence[Any]]
) -> bool:
    """Return whether a later update does to states that are zeros what the first does without any.

    Each is its trace, its program, and all that it is given.  All operations on elements are
    compared, and the numbers that they take by their values in this step.
    """
    (update, program, inputs), (other_update, other_program, other_inputs) = first, later
    pairs = _Pairs(program, other_program)
    if not pairs.match() or not pairs.match_results(update, other_update):
        return False
    kept, computed = _numbers_of(program, inputs)
    other_kept, other_computed = _numbers_of(other_program, other_inputs)
    numbers = dict(zip(program.numbers, computed, strict=True))
    others = dict(zip(other_program.numbers, other_computed, strict=True))
    return all(_are_equal(numbers[one], others[other]) for one, other in pairs.numbers) and all(
        _are_equal(kept[one] if isinstance(one, int) else one.value, other_kept[other])
        for one, other in pairs.results
    )


class _Known(NamedTuple):
    """A number that a trace has found to be this one."""

    value: Any


class _Pairs:
    """The values of two programs that are computed alike, and the numbers that must be equal."""

    def __init__(self, first: Program, later: Program) -> None:
        self.first, self.later = first, later
        self.numbers: list[tuple[Any, Any]] = []
        self.results: list[tuple[int | _Known, int]] = []
        self._zeros = {value for value in first.values if _is_zero(value)}
        states = [stream for stream in later.streams if stream.kind == "state"]
        self._states = {stream.load: stream for stream in states if stream.load is not None}
        self._known: dict[Value, Value] = {}

    def match(self) -> bool:
        """Match all values, in their order, but for zeros and the states that are loaded."""
        ones = [value for value in self.first.values if value not in self._zeros]
        others = [value for value in self.later.values if value not in self._states]
        if len(ones) != len(others):
            return False
        for one, other in zip(ones, others, strict=True):
            if not self._are_alike(one, other):
                return False
            self._known[one] = other
        mine, theirs = _streams(self.first), _streams(self.later)
        return self._match_or_none(self.first.squares, self.later.squares) and all(
            mine[kind].dtype == theirs[kind].dtype
            and self._match_or_none(mine[kind].store, theirs[kind].store)
            for kind in ("parameter", "gradient")
        )

    def match_results(self, update: Update, other: Update) -> bool:
        """Match what the states become: an element's value, or a number."""
        if other.group or [name for name, _ in update.state] != [name for name, _ in other.state]:
            return False
        made = {stream.name: stream for stream in self.first.streams}
        kept = {stream.name: stream for stream in self.later.streams}
        for (_, slot), (_, other_slot) in zip(update.state, other.state, strict=True):
            if not isinstance(other_slot, Slot):
                return False
            two = self.later.results[other_slot.index]
            if not isinstance(slot, Slot):
                if two[0] != "number":
                    return False
                self.results.append((_Known(slot), two[1]))
                continue
            one = self.first.results[slot.index]
            if one[0] == "number" and two[0] == "number":
                self.results.append((one[1], two[1]))
                continue
            if one[0] != "stream" or two[0] != "stream":
                return False
            new, old = made[one[1]], kept[two[1]]
            if (new.kind, old.kind) != ("new state", "state") or new.dtype != old.dtype:
                return False
            becomes = old.store if old.store is not None else old.load
            if becomes is None:  # as it was: zeros
                if new.store not in self._zeros:
                    return False
            elif not self._match(new.store, becomes):
                return False
        return True

    def _are_alike(self, one: Value, other: Value) -> bool:
        if one.operation == "load" and one.name != other.name:
            return False
        return (
            _operation(one) == _operation(other)
            and one.dtype == other.dtype
            and len(one.operands) == len(other.operands)
            and all(map(self._match, one.operands, other.operands))
        )

    def _match_or_none(self, one: Value | None, other: Value | None) -> bool:
        return one is other is None or self._match(one, other)

    def _match(self, one: Operand | None, other: Operand | None) -> bool:
        if isinstance(one, Value) and isinstance(other, Value):
            if one in self._zeros:
                return other in self._states and one.dtype == other.dtype
            return self._known.get(one) is other
        if isinstance(one, NumberOperand) and isinstance(other, NumberOperand):
            return one.dtype == other.dtype and self._match_numbers(one.number, other.number)
        return type(one) is type(other) and repr(one) == repr(other)

    def _match_numbers(self, one: Any, other: Any) -> bool:
        mine, theirs = self.first.device_numbers, self.later.device_numbers
        if one in mine or other in theirs:  # what the step has computed: the same for both
            return one in mine and other in theirs and mine.index(one) == theirs.index(other)
        self.numbers.append((one, other))
        return True


def _streams(program: Program) -> Mapping[str, Any]:
    return {stream.kind: stream for stream in program.streams}


def _is_zero(value: Value) -> bool:
    if value.operation != "full":
        return False
    (operand,) = value.operands
    return isinstance(operand, int | float) and not operand


def _operation(value: Value) -> Any:
    if isinstance(value.operation, partial):
        return value.operation.func, repr(value.operation.keywords)
    return value.operation


def _numbers_of(program: Program, inputs: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Run a program's arithmetic on numbers, on copies of those that it may change in place."""
    given = list(inputs)
    for position in program.host.inputs:
        if isinstance(given[position], Tensor):
            given[position] = given[position].clone()
    return program.host(given)


def _share_results(update: Update) -> bool:
    """Return whether one result is several states."""
    slots = [slot.index for _, slot in update.state if isinstance(slot, Slot)]
    return len(set(slots)) < len(slots)


def _begins_as_zero(update: Update, position: int) -> bool:
    """Return whether a number that an update returns is in memory that it has made a zero."""
    graph = update.graph_module.graph
    begun = roots_of(graph)[graph.output_node().args[0][position]]
    if begun.target is aten.zeros.default:
        return True
    is_constant = begun.target in (aten.full.default, aten.scalar_tensor.default)
    made_of = begun.args[-1] if is_constant else None
    return isinstance(made_of, int | float) and not made_of


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
    return type(one) is type(other) and one == other
