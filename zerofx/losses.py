"""What only the user knows of a loss, for ``loss="global"``; otherwise nothing changes."""

from __future__ import annotations

from typing import TypeVar

import torch

from zerofx.ir import ops

Number = TypeVar("Number", torch.Tensor, int, float)


def local_count(number: Number) -> Number:
    """Say that a loss is divided by a count of this rank's batch: of tokens, of samples.

    With ``loss="global"`` the mean of the ranks' counts takes its place.  Give it for a number that
    the step is called with (``num_items_in_batch``), and where a refusal says so.
    """
    return _marked(number, "local")


def global_count(number: Number) -> Number:
    """Say that a loss is divided by a count of all ranks' batches together.

    Gradients are means over ranks: with ``loss="global"`` it is divided by the number of ranks.
    """
    return _marked(number, "global")


def per_rank(value: torch.Tensor) -> torch.Tensor:
    """Say that a part of a loss, a tensor, is meant for each rank's batch by itself.

    With ``loss="global"`` it stays a mean over the ranks, of each rank's own counts: what else is
    divided by a count of all ranks is to be computed once more in it.
    """
    if torch.compiler.is_compiling():
        return ops.loss_part(value, "per_rank")
    return value


def _marked(number: Number, of: str) -> Number:
    if not torch.compiler.is_compiling():
        return number
    if not isinstance(number, torch.Tensor):
        number = torch.scalar_tensor(number, dtype=torch.float32)
    return ops.count(number, of)
