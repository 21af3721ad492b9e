"""The arguments that saving and loading have in common."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from zerofx.wrappers import unwrapped


def as_path(path: str | os.PathLike[str]) -> Path:
    """The folder of a checkpoint, wherever this process goes then.  Raises: ValueError for none."""
    text = os.fspath(path)
    if "://" in text:
        raise ValueError(
            f"{text!r} is no path: checkpoints are folders of a file system that all ranks see. "
            "Save to one, and copy the folder."
        )
    found = Path(text)
    if not found.name or found.name.startswith("."):
        raise ValueError(
            f"{text!r} cannot be a checkpoint's name: it must have one that does not begin with a "
            "dot, such as 'checkpoints/step-100'"
        )
    return found.absolute()


def check_model(model: object) -> None:
    """Raise TypeError for what is no module."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is {_what(model)}; expected a torch.nn.Module: path, model and optimizer, in "
            "this order"
        )


def check_extra(extra: Mapping[str, Any] | None) -> None:
    """Raise TypeError for what is no mapping."""
    if extra is not None and not isinstance(extra, Mapping):
        raise TypeError(
            f"extra is {_what(extra)}; expected values by name, such as {{'step': 100}}, or None"
        )


def _what(value: object) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"


def as_list(optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    """No, one or several optimizers as a list, those in wrappers.

    Raises: TypeError for anything else.
    """
    if optimizer is None:
        return []
    found = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
    for one in found:
        if not isinstance(one, Optimizer):
            raise TypeError(
                f"optimizer is a {type(one).__name__}; expected a torch.optim.Optimizer, several "
                "of them, or None: the one in it, if it wraps one. Give anything else as "
                "extra={'name': its state_dict()}."
            )
    return [unwrapped(one) for one in found]
