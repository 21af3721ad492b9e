"""One update as data: the parameters that it changes, their states seen as one, and its trace."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zerofx import compat
from zerofx.codegen.rewrite.storage import NATIVE, is_scale
from zerofx.codegen.trace.arguments import Arguments, kind_of_number
from zerofx.codegen.trace.trace import Update, is_usual
from zerofx.ir.parameters import ParameterInfo
from zerofx.ir.wires import num_blocks
from zerofx.runtime.memory.flat import (
    Seen,
    adjoin,
    join,
    ordinary_tensors,
    whole_from_flat,
    without_base,
)
from zerofx.runtime.memory.pages import in_huge_pages, prefer_huge_pages


class GroupOfStep:
    """A parameter group during one step: read once, changed at its end.

    ``on_host`` it is that of updates there, for which its tensors are read on the CPU.
    """

    def __init__(self, values: dict[str, Any], on_host: bool) -> None:
        self.values, self.on_host = values, on_host
        self.arguments: Arguments | None = None
        self.key = -1
        self.is_updated = False
        self.changed: dict[str, Any] = {}

    def keep_changes(self) -> None:
        """Write back what the step's updates have changed."""
        self.values.update(self.changed)


@dataclass(eq=False)
class UpdatedParameter:
    """A parameter that an optimizer updates, and what it is in the step under way.

    ``on_host`` its update runs on CPU tensors, which its layout then is of.  ``is_sharded``: its
    update is traced for shards.  One that is divided later is whole until then.  ``seen_flat``: it
    is whole, and its update is traced for one shard that is all of it.
    ``layouts`` are what traces of it are known by: what it shares with shards of any size, if there
    may be such traces, and last its own layout.
    ``first_element`` is the number of this rank's first element among all of the optimizer's, by
    which random numbers are drawn: the same on any number of ranks.  ``attributes`` are those
    that the user has given to it, such as a factor for its learning rate.
    """

    index: int
    user: weakref.ref[nn.Parameter]
    info: ParameterInfo
    on_host: bool
    is_sharded: bool
    seen_flat: bool = False
    layouts: list[tuple] = field(init=False)
    first_element: int = 0
    attributes: tuple = ()

    def __post_init__(self) -> None:
        self.see_flat(self.seen_flat)

    def see_flat(self, is_so: bool) -> None:
        """Have a whole parameter seen flat from now on, or not any more."""
        self.seen_flat, info = is_so, self.info
        self.layouts = [(is_so, info.shape, info.stride, info.dtype, info.device)]
        if (self.is_sharded or is_so) and is_usual(info):
            self.layouts.insert(0, (info.dtype, info.device))


class Piece(NamedTuple):
    """What one update changes: a parameter's shard, or those of neighbours, seen as one.

    ``users`` are the user's parameters, ``lengths`` their shards', ``states`` their entries of
    ``optimizer.state``, and ``values`` is the state that the update is given.
    """

    parameters: Sequence[UpdatedParameter]
    users: Sequence[nn.Parameter]
    group: GroupOfStep
    lengths: Sequence[int]
    data: Tensor
    grad: Tensor
    states: Sequence[dict[str, Any]]
    values: dict[str, Any]

    @property
    def info(self) -> ParameterInfo:
        """The layout of the first: all are of one dtype and device."""
        return self.parameters[0].info

    @property
    def indices(self) -> tuple[int, ...]:
        """The parameters' numbers."""
        return tuple(parameter.index for parameter in self.parameters)

    @property
    def whole(self) -> ParameterInfo | None:
        """The layout of states that are kept whole, and seen flat as the data are."""
        return self.info if self.parameters[0].seen_flat else None


class Traced(NamedTuple):
    """The update that holds for a group and a state as they are now, and what these give it."""

    update: Update
    group: Arguments
    state: Arguments

    @property
    def inputs(self) -> list[Any]:
        """What the update takes after the parameter and the gradient: tensors, then numbers."""
        group, state = self.group, self.state
        return [*group.tensors, *state.tensors, *group.scalars, *state.scalars]

    @property
    def holds(self) -> bool:
        """Return whether the update was traced for numbers like these."""
        guard = self.update.guard
        return guard is None or guard((*self.group.scalars, *self.state.scalars))


class KnownStates:
    """Neighbours' states as they were when they were last seen as one.

    It holds none of them: they may be moved away, or replaced by others that have been loaded.
    """

    def __init__(self, states: Sequence[dict[str, Any]], seen_as_one: Arguments) -> None:
        self._key, self._kinds = seen_as_one.key, seen_as_one.kinds
        self._shards = seen_as_one.shards
        self._seen = {name: Seen([state[name] for state in states]) for name in states[0]}

    @staticmethod
    def can_be(seen_as_one: Arguments) -> bool:
        """Return whether a state is nothing but shards and numbers, as 0-dim tensors."""
        return all(type(kind) is tuple and kind[0] in _KNOWN_KINDS for kind in seen_as_one.kinds)

    def again(self, states: Sequence[dict[str, Any]]) -> Arguments | None:
        """See the states as one, with the numbers that they have now; None if they have changed."""
        if any(len(state) != len(self._seen) for state in states):
            return None
        values: dict[str, Tensor] = {}
        scalars = []
        for (name, seen), kind, is_shard in zip(
            self._seen.items(), self._kinds, self._shards, strict=True
        ):
            of_all: list[Any] = [state.get(name) for state in states]
            if not (seen.again(of_all) if is_shard else seen.are(of_all)):
                return None
            if is_shard:
                values[name] = join(of_all)
                continue
            values[name] = of_all[0]
            number, *others = [value.item() for value in of_all]
            if any(other != number for other in others):
                return None
            if kind != kind_of_number(number, of_all[0].dtype):
                return None
            scalars.append(number)
        tensors = list(values.values())
        return Arguments(values, self._key, self._kinds, tensors, self._shards, scalars)


_KNOWN_KINDS = ("shard", "scalar tensor")


def joined_state(
    states: Sequence[dict[str, Any]], lengths: Sequence[int], whole: ParameterInfo | None = None
) -> dict[str, Any] | None:
    """See the optimizer's states of neighbouring shards as one; None if they differ in kind.

    Shards of a state that are not next to each other are moved there: ``optimizer.state`` then
    holds views, so that each parameter has its own as ever.  States of one parameter may be
    ``whole``, laid out like that.
    """
    first = states[0]
    if any(state.keys() != first.keys() for state in states):
        return None
    joined: dict[str, Any] = {}
    native = first.get(NATIVE, {})
    for name in first:
        values = [state[name] for state in states]
        parts = list(map(num_blocks, lengths)) if is_scale(name, native) else lengths
        if _are_shards(values, parts, whole):
            joined[name] = _side_by_side(name, values, states, parts)
        elif _are_one_number(values):
            joined[name] = values[0]
        else:
            return None
    return joined


def keep_state(
    new: Mapping[str, Any],
    joined: Mapping[str, Any],
    states: Sequence[dict[str, Any]],
    lengths: Sequence[int],
    whole: ParameterInfo | None = None,
) -> None:
    """Give each parameter its part of what an update of ``joined`` has returned.

    If it is one parameter, a number or a whole tensor is its own; flat ones become ``whole``.
    """
    native = new.get(NATIVE, {})
    for name, value in new.items():
        is_count = isinstance(value, Tensor) and not value.dim()  # which each has for itself
        is_as_before = name in joined and value is joined[name]
        if is_as_before and not (is_count and len(states) > 1):
            continue
        parts = list(map(num_blocks, lengths)) if is_scale(name, native) else lengths
        if isinstance(value, Tensor) and value.shape == (sum(parts),):
            _divide(name, in_huge_pages(value), states, parts, whole)
        elif isinstance(value, Tensor) and len(states) > 1:
            for state in states:
                if not isinstance(state.get(name), Tensor):
                    state[name] = value.clone()
            theirs = [state[name] for state in states if state[name] is not value]
            compat.tensors.copy_to_each(theirs, value)
        else:
            for state in states:
                state[name] = value
    for state in states:
        if len(state) > len(new):
            for name in state.keys() - new.keys():
                del state[name]


def _side_by_side(
    name: str,
    values: Sequence[Tensor],
    states: Sequence[dict[str, Any]],
    lengths: Sequence[int],
) -> Tensor:
    if adjoin(*values):
        return join(values)
    with ordinary_tensors():
        flat = torch.empty(sum(lengths), dtype=values[0].dtype, device=values[0].device)
        prefer_huge_pages(flat)
        _divide(name, torch.cat(list(values), out=flat), states, lengths)
    return flat


def _divide(
    name: str,
    flat: Tensor,
    states: Sequence[dict[str, Any]],
    lengths: Sequence[int],
    whole: ParameterInfo | None = None,
) -> None:
    for state, part in zip(states, flat.split(list(lengths)), strict=True):
        state[name] = without_base(part if whole is None else whole_from_flat(part, whole))


def _are_shards(values: Sequence[Any], lengths: Sequence[int], whole: ParameterInfo | None) -> bool:
    dtype = getattr(values[0], "dtype", None)
    return all(
        isinstance(value, Tensor)
        and (value.shape, value.stride())
        == (((length,), (1,)) if whole is None else (whole.shape, whole.stride))
        and value.dtype is dtype
        for value, length in zip(values, lengths, strict=True)
    )


def _are_one_number(values: Sequence[Any]) -> bool:
    first, kind = values[0], type(values[0])
    if any(type(value) is not kind for value in values):
        return False
    if isinstance(first, Tensor):
        if any(one.dim() or not one.is_cpu or one.dtype is not first.dtype for one in values):
            return False
        number = first.item()
        return all(value.item() == number for value in values)
    if not (isinstance(first, int | float | str | bool) or _is_dtypes(first)):
        return False
    return all(value == first for value in values)


def _is_dtypes(value: Any) -> bool:
    return type(value) is dict and all(isinstance(item, torch.dtype) for item in value.values())
