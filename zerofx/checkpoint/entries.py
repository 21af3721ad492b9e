"""Entries of a model's state dict that cannot be read in place: the model has to be given them."""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import nn

from zerofx.checkpoint.contents import own_entries, plain_name

logger = logging.getLogger("zerofx")

EXTRA_STATE = "_extra_state"
"""The end of the name of a module's own state (``nn.Module.get_extra_state``)."""


def entries_to_give(model: nn.Module, saved: Container[str] = ()) -> set[str]:
    """Return the names of the entries that only ``model.load_state_dict`` can put in their place.

    They are modules' own states, what is no tensor, and tensors that the state dict makes anew each
    time: to read into one of those would change nothing of the model.  ``saved`` as in
    ``own_entries``.
    """
    one, other = own_entries(model, saved), own_entries(model, saved)
    return {
        plain_name(name)
        for name, value in one.items()
        if name.endswith(EXTRA_STATE)
        or not isinstance(value, torch.Tensor)
        or _is_made_anew(value, other[name])
    }


def _is_made_anew(value: torch.Tensor, again: torch.Tensor) -> bool:
    storages = (tensor.untyped_storage()._cdata for tensor in (value, again))
    return value is not again and len(set(storages)) == 2


def give(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Give a model entries of its state dict; log those that it ignores and has otherwise."""
    if not values:
        return
    here = own_entries(model, values)
    given = {name: values[plain] for name in here if (plain := plain_name(name)) in values}
    ignored = model.load_state_dict(given, strict=False).unexpected_keys
    lost = [name for name in ignored if not _is_same(here[name], given[name])]
    if lost:
        logger.warning(
            "the model's load_state_dict() takes no %s, so that it keeps its own. Have a module's "
            "_load_from_state_dict take what its _save_to_state_dict adds.",
            ", ".join(lost),
        )


def _is_same(one: Any, other: Any) -> bool:
    are_tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return are_tensors and not one.is_meta and torch.equal(one.cpu(), other)
