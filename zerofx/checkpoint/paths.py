"""The arguments that saving and loading have in common."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from torch.optim import Optimizer


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


def as_list(optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    """No, one or several optimizers as a list.  Raises: TypeError for anything else."""
    if optimizer is None:
        return []
    found = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    for one in found:
        if not isinstance(one, Optimizer):
            raise TypeError(
                f"optimizer is a {type(one).__name__}; expected a torch.optim.Optimizer, several "
                "of them, or None. Give anything else as extra={'name': its state_dict()}."
            )
    return found
