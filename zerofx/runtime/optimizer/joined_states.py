"""The states of shards that lie next to each other, seen as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from zerofx.codegen.rewrite.rounding import num_blocks
from zerofx.codegen.rewrite.storage import NATIVE
from zerofx.runtime.memory.flat import adjoin, join, ordinary_tensors, without_base
from zerofx.runtime.memory.pages import in_huge_pages, prefer_huge_pages
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
    """Give each parameter its part of what an update of ``joined`` has returned.

    If it is one parameter, a number or a whole tensor is its own.
    """
    native = new.get(NATIVE, {})
    for name, value in new.items():
        is_count = isinstance(value, Tensor) and not value.dim()  # which each has for itself
        if value is joined.get(name) and not (is_count and len(states) > 1):
            continue
        parts = blocks_of(lengths) if is_scale(name, native) else lengths
        if isinstance(value, Tensor) and value.shape == (sum(parts),):
            _divide(name, in_huge_pages(value), states, parts)
        elif isinstance(value, Tensor) and len(states) > 1:
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
