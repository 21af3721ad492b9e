"""Lists, tuples and dictionaries of an optimizer's values, and what is in them."""

from __future__ import annotations

import contextlib
import io
import pickle
import types
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerofx import compat

Path = tuple[Any, ...]
"""Keys and positions."""


def named_leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """What ``map_leaves`` maps, and where it is."""
    if type(value) not in (list, tuple, dict):
        yield path, value
        return
    for key, item in value.items() if type(value) is dict else enumerate(value):
        yield from named_leaves(item, (*path, key))


def leaves(value: Any) -> Iterator[Any]:
    """All values in nested lists, tuples and dictionaries that are none of these."""
    return (leaf for _, leaf in named_leaves(value))


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """The same lists, tuples and dictionaries anew, with ``function`` of each value in them."""
    if type(value) is dict:
        return {name: map_leaves(function, item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)([map_leaves(function, item) for item in value])
    return function(value)


def copied(value: Any) -> Any:
    """A copy that later changes of lists and dictionaries do not reach."""
    return map_leaves(lambda leaf: leaf, value)


class _Contents(pickle.Pickler):
    """Writes all that a value holds; what is not to be looked into, or cannot be, as its id."""

    def persistent_id(self, value: Any) -> Any:
        return (type(value).__name__, id(value)) if isinstance(value, _AS_THEY_ARE) else None

    def reducer_override(self, value: Any) -> Any:
        try:
            return value.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        except Exception:  # a lock, a generator
            return int, (id(value),)


def contents(value: Any) -> Hashable:
    """Return what tells a value from what it, or another, holds later; tensors by their identity.

    Objects may change inside: a trace has what they held for constants.
    """
    if isinstance(value, _AS_THEY_ARE):
        return type(value), id(value)
    if type(value) in (bool, int, str, type(None), torch.dtype, torch.device):
        return type(value), value
    file = io.BytesIO()
    try:
        _Contents(file).dump(value)
    except Exception:
        return type(value), id(value)
    return file.getvalue()


class _Search(_Contents):
    """Looks for objects with these ids, and for the numbers, in what a value holds or refers to."""

    def __init__(self, ids: Collection[int]) -> None:
        super().__init__(io.BytesIO())
        self._ids, self.has_found = ids, False

    def persistent_id(self, value: Any) -> Any:
        is_id = type(value) is int and value in self._ids
        self.has_found |= is_id or id(value) in self._ids
        return super().persistent_id(value)

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, weakref.ref):
            return id, (value(),)
        return super().reducer_override(value)


def reaches(value: Any, ids: Collection[int]) -> bool:
    """Return whether an object with one of these ids, or such an id, is in what a value holds."""
    search = _Search(ids)
    with contextlib.suppress(Exception):  # what cannot be looked into
        search.dump(value)
    return search.has_found


_AS_THEY_ARE = (
    *(Tensor, torch.nn.Module, torch.optim.Optimizer, *compat.scalars.SYMBOLIC_SCALARS),
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType),
)


def is_same(before: Any, after: Any) -> bool:
    """Return whether two values are one object, or hold the same ones in the same places."""
    left, right = list(named_leaves(before)), list(named_leaves(after))
    same = all(a is b and p == q for (p, a), (q, b) in zip(left, right, strict=False))
    return type(before) is type(after) and len(left) == len(right) and same


@dataclass(frozen=True)
class Slot:
    """Stands for one result of the graph in a new state or group entry."""

    index: int


def store(value: Any, results: list[Any]) -> Any:
    """Move a value's tensors and symbolic numbers to ``results``; return what is left."""

    def stored(leaf: Any) -> Any:
        if isinstance(leaf, torch.SymBool):
            return bool(leaf)  # guarded: another outcome is another trace
        if not isinstance(leaf, (Tensor, *compat.scalars.SYMBOLIC_SCALARS)):
            return leaf
        results.append(leaf)
        return Slot(len(results) - 1)

    return map_leaves(stored, value)


def fill(template: Any, results: Sequence[Any]) -> Any:
    """What ``store`` has left, with these results in it."""
    return map_leaves(lambda leaf: results[leaf.index] if type(leaf) is Slot else leaf, template)
