"""Sort what an update reads into the inputs of its trace and what the trace depends on."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerofx import compat
from zerofx.codegen.trace.nested import contents, map_leaves, named_leaves

# What tells the single-tensor form of torch's optimizers from the others.
_SINGLE_TENSOR = {"foreach": False, "fused": False, "differentiable": False}


@dataclass(frozen=True)
class Arguments:
    """The values that a parameter group, or a parameter's state, gives to one run of the update.

    ``key`` is all of it that a trace depends on, in the order of its values, and ``kinds`` that of
    each value in it; what changes freely between runs is in ``tensors`` and ``scalars``.
    ``shards`` says which tensors stand for whole ones, of the parameter's shape.
    """

    values: Mapping[str, Any]
    key: tuple
    kinds: list[Any]
    tensors: list[Tensor]
    shards: list[bool]
    scalars: list[float | int]

    @property
    def constants(self) -> set[str]:
        """The names of the values that a trace takes as they are."""
        return {name for name, kind in self.key if isinstance(kind, _Constant)}

    def paths(self, owner: str) -> tuple[list[str], list[str]]:
        """Return the paths of the tensors and the scalars, as ``owner.betas.0``.

        A 0-dim tensor and its number are found in one place.
        """
        tensors: list[str] = []
        scalars: list[str] = []
        for (path, _), kind in zip(named_leaves(dict(self.values)), self.kinds, strict=True):
            text = ".".join(map(str, (owner, *path)))
            if kind == "number":
                scalars.append(text)
            elif not isinstance(kind, _Constant):
                tensors.append(text)
                scalars += [text] * (kind[0] == "scalar tensor")
        return tensors, scalars

    def rebuild(
        self, tensors: Iterator[Any], scalars: Iterator[Any], know: Callable[..., None]
    ) -> dict[str, Any]:
        """The same values with other tensors and numbers in place of the inputs.

        ``know(tensor, scalar, counts=...)`` is called for each 0-dim tensor whose number is an
        input too; ``counts``: adding integers to the tensor does not round.
        """
        kinds = iter(self.kinds)

        def rebuilt(value: Any) -> Any:
            kind = next(kinds)
            if isinstance(kind, _Constant):
                return value
            if kind == "number":
                return next(scalars)
            tensor = next(tensors)
            if kind[0] == "scalar tensor":
                know(tensor, next(scalars), counts=kind[2])
            return tensor

        return {name: map_leaves(rebuilt, value) for name, value in self.values.items()}


def read_arguments(
    values: Mapping[str, Any], *, shard_shape: tuple[int, ...] | None, inputs: Any
) -> Arguments:
    """Sort what an update reads into run-time inputs and constants.

    Tensors and finite floats are inputs; an int is one if its name is in ``inputs``.  A tensor
    of ``shard_shape`` stands for a whole one, of the parameter's shape.  The value of a 0-dim
    CPU tensor is an input next to the tensor: reading it costs no synchronisation, and branches
    on it can then be guarded.
    """
    kinds: list[Any] = []
    tensors: list[Tensor] = []
    shards: list[bool] = []
    scalars: list[float | int] = []

    def kind_of(value: Any, is_input: bool) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
            shards.append(False)
            if not value.dim() and value.is_cpu:
                number = value.item()
                kind = kind_of_number(number, value.dtype, is_input)
                if kind is not None:
                    scalars.append(number)
                    return kind
            if value.shape == shard_shape:
                shards[-1] = True
                return ("shard", value.dtype, value.device)
            return ("tensor", value.dtype, value.device, tuple(value.shape), value.stride())
        is_float = isinstance(value, float) and math.isfinite(value)
        if is_float or (is_input and isinstance(value, int) and not isinstance(value, bool)):
            scalars.append(float(value) if is_float else int(value))
            return "number"
        return _Constant(value)

    def describe(value: Any, is_input: bool) -> Hashable:
        if type(value) in (list, tuple):
            return (type(value), *(describe(item, is_input) for item in value))
        if type(value) is dict:
            return (dict, *((name, describe(item, is_input)) for name, item in value.items()))
        kinds.append(kind_of(value, is_input))
        return kinds[-1]

    key = tuple((name, describe(value, name in inputs)) for name, value in values.items())
    return Arguments(values, key, kinds, tensors, shards, scalars)


def kind_of_number(number: Any, dtype: torch.dtype, is_input: bool = True) -> tuple | None:
    """Return the kind of a 0-dim tensor by its number; None if that is not finite."""
    if not _is_number(number):
        return None
    return ("scalar tensor", dtype, is_input and _counts_exactly(number, dtype))


def not_carried(state: Any) -> tuple[str, str] | None:
    """Find what a trace cannot carry from one step to the next: its path, and what it is.

    Tensors, numbers, strings, booleans and None can be, in lists, tuples and dictionaries of which
    each is in one place.  An object changes inside, where a trace does not look; None if there is
    no such.
    """
    seen: set[int] = set()

    def find(value: Any, path: str) -> Iterator[tuple[str, str]]:
        kind = type(value)
        if kind not in (list, tuple, dict):
            if not _is_carried(value):
                what = "a tensor" if isinstance(value, Tensor) else "an object"
                yield path, f"{what} of class {kind.__qualname__}"
            return
        if kind is not tuple and id(value) in seen:
            yield path, f"a {kind.__name__} that is in another place too"
        seen.add(id(value))
        for key, item in value.items() if kind is dict else enumerate(value):
            inner = f"{path}.{key}" if path else str(key)
            if kind is dict and not isinstance(key, _IMMUTABLE):
                yield path, f"a dictionary with a {type(key).__qualname__} for a key"
            yield from find(item, inner)

    return next(find(state, ""), None)


_IMMUTABLE = (numbers.Number, str, torch.dtype, torch.device, torch.Size, type(None))


def _is_carried(value: Any) -> bool:
    if isinstance(value, Tensor):  # a tensor with tensors inside is an object too
        return compat.tensors.is_fake(value) or (
            type(value).__torch_dispatch__ is Tensor.__torch_dispatch__
        )
    if isinstance(value, (*compat.scalars.SYMBOLIC_SCALARS, torch.SymBool)):
        return True
    return isinstance(value, _IMMUTABLE) and not hasattr(value, "__dict__")  # no enumeration's


def group_values(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group's hyperparameters, set to torch's single-tensor implementation."""
    # Sorted: groups that name some of them themselves hold them in another order.
    values = {name: group[name] for name in sorted(group) if name not in BY_PLACE}
    return values | {name: value for name, value in _SINGLE_TENSOR.items() if name in values}


BY_PLACE = {"params", "param_names"}
"""The entries of a parameter group that are lists, of one value for each of its parameters."""


def constant_attributes(optimizer: torch.optim.Optimizer) -> tuple:
    """What a step can read off the optimizer itself: part of the key."""
    attributes = {**own_attributes(optimizer), "defaults": getattr(optimizer, "defaults", {})}
    for base in type(optimizer).__mro__:
        if base in torch.optim.Optimizer.__mro__:
            break
        # What has no __get__ is no method: a value that instances share.
        kept = (item for item in vars(base).items() if not hasattr(type(item[1]), "__get__"))
        attributes = {**dict(kept), **attributes}
    return tuple((path, _Constant(leaf)) for path, leaf in named_leaves(attributes))


def constants(values: Mapping[str, Any]) -> tuple:
    """Return what a trace takes as it is, by name, for a key; it holds what goes by its address."""
    return tuple((name, _Constant(value)) for name, value in values.items())


def is_torchs(kind: type) -> bool:
    """Return whether an optimizer's class is torch's own, and so known."""
    return kind.__module__.startswith("torch.optim.")


def own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The attributes that are the optimizer's own: not what every optimizer has."""
    return {name: value for name, value in optimizer.__dict__.items() if is_own(name)}


def is_own(attribute: str) -> bool:
    """Return whether not every optimizer has such an attribute."""
    return attribute not in _OF_EVERY_OPTIMIZER and not attribute.startswith("_optimizer_")


_OF_EVERY_OPTIMIZER = {
    "defaults",
    "state",
    "param_groups",
    "_opt_called",
    "_step_count",
    "_warned_capturable_if_run_uncaptured",
    "_zero_grad_profile_name",
    "__getstate__",
}


class _Constant:
    """A value that a trace depends on; equal to another of the same type and value."""

    __slots__ = ("token", "value")

    def __init__(self, value: Any) -> None:
        self.value = value  # kept alive: the token may be its id
        # repr: NaN is not equal to itself, and would be traced again at every step.
        self.token = repr(value) if type(value) is float else contents(value)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Constant)
            and type(self.value) is type(other.value)
            and self.token == other.token
        )

    def __hash__(self) -> int:
        return hash(self.token)


def _is_number(value: Any) -> bool:
    """Return whether a value is an integer or a finite float."""
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _counts_exactly(number: float | int, dtype: torch.dtype) -> bool:
    """Return whether adding small integers to this in a dtype is exact, as for a step count."""
    if isinstance(number, int):
        return True
    return number.is_integer() and abs(number) < 1 / torch.finfo(dtype).eps
