"""Describes an optimizer as plain data for a dump, and makes an optimizer of it again."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zerofx import compat
from zerofx.errors import CommandError

_TENSOR = "tensor"
"""The key of a hyperparameter that is a tensor of one element, with its value."""


def describe(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return an optimizer's class, defaults and groups with their hyperparameters, as literals.

    ``names`` are those of the program's parameters, by the ``id`` of each.  A hyperparameter that
    is neither a literal nor a tensor of one element is listed as ``omitted``.  States are left out.
    """
    kind = type(optimizer)
    omitted: set[str] = set()

    def literals(values: Mapping[str, Any]) -> dict[str, Any]:
        found = {}
        for name, value in values.items():
            try:
                if name != "params":
                    found[name] = _literal(value)
            except TypeError:
                omitted.add(name)
        return found

    groups = []
    for group in optimizer.param_groups:
        parameters = [names[id(p)] for p in group["params"] if id(p) in names]
        groups.append({"parameters": parameters, **literals(group)})
    return {
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "defaults": literals(optimizer.defaults),
        "groups": groups,
        "omitted": sorted(omitted),
    }


def rebuild(
    described: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]
) -> torch.optim.Optimizer:
    """Make an optimizer of the described class, with its hyperparameters and no states.

    Raises: CommandError if its class cannot be imported or made this way.
    """
    name = described["class"]
    if described["omitted"]:
        raise CommandError(
            f"the optimizer {name} has hyperparameters that are no numbers, which a dump cannot "
            f"hold: {', '.join(described['omitted'])}. {REMEDY}"
        )
    try:
        kind = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise CommandError(
            f"the program's optimizer {name} cannot be imported here: {error}. Put its module on "
            f"PYTHONPATH (a class of __main__ or of a function has no module to find it in). "
            f"{REMEDY}"
        ) from error
    groups = []
    for group in described["groups"]:
        members = [parameters[parameter] for parameter in group["parameters"]]
        if members:
            others = {key: _value(of) for key, of in group.items() if key != "parameters"}
            groups.append({**others, "params": members})
    accepted = inspect.signature(kind).parameters
    defaults = {k: _value(v) for k, v in described["defaults"].items() if k in accepted}
    try:
        optimizer = kind([dict(group) for group in groups], **defaults)
    except (TypeError, ValueError) as error:
        raise CommandError(
            f"{name} cannot be made of its parameter groups and defaults: {error}. {REMEDY}"
        ) from error
    for made, group in zip(optimizer.param_groups, groups, strict=True):
        made.update({key: value for key, value in group.items() if key != "params"})
    return optimizer


REMEDY = "--sgd updates with plain SGD instead, --fake runs the program on shapes alone."


def _value(described: Any) -> Any:
    if not (isinstance(described, dict) and _TENSOR in described):
        return described
    dtype = getattr(torch, described["dtype"])
    return torch.tensor(described[_TENSOR], dtype=dtype, device=described["device"])


def _literal(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not compat.tensors.is_fake(value):
        dtype = str(value.dtype).removeprefix("torch.")
        with compat.tensors.real_tensors():
            return {_TENSOR: value.item(), "dtype": dtype, "device": str(value.device)}
    if isinstance(value, tuple | list):
        return type(value)([_literal(item) for item in value])
    raise TypeError(f"a {type(value).__name__} is no literal")
