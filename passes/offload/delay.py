"""Refuse programs that cannot have their updates stored by the next call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import fx

from zerofx.errors import StepError
from zerofx.ir.aliases import writers
from zerofx.ir.interface import input_role, placeholders
from zerofx.ir.parameters import ParameterTable
from zerofx.options import Options
from zerofx.passes.base import Conflict


def _conflict(when: Callable[[Options], object], words: str) -> Conflict:
    return Conflict(lambda options: options.delayed_update and when(options), words, is_lack=True)


DELAYED_CONFLICTS = (
    _conflict(
        lambda options: "optimizer" not in options.offload,
        "delayed_update is about updates that run on the host: add offload='optimizer', or"
        " drop delayed_update",
    ),
    _conflict(
        lambda options: options.stage != 3,
        "delayed_update needs stage 3: stage {stage} keeps whole parameters, ordinary tensors"
        " that a state_dict() or an evaluation reads without waiting for an update that is"
        " under way. Choose stage 3, or drop delayed_update",
    ),
    _conflict(
        lambda options: options.outer_stage in (1, 2),
        "delayed_update needs parameters that are cut over both axes of the mesh or over the"
        " inner one alone, with what updates them: its outer axis has stage {outer_stage}. Give it"
        " stage 3 or 0, or drop delayed_update",
    ),
    _conflict(
        lambda options: options.offload_tier != "cpu" or "params" in options.offload,
        "delayed_update needs optimizer states in host memory and parameters on the device:"
        " drop offload_tier='nvme' and offload='params', or delayed_update",
    ),
    _conflict(
        lambda options: options.memory_budget is not None,
        "with a memory_budget some updates stay on the device, where delayed_update does not"
        " delay them. Choose one",
    ),
)


def check_can_be_delayed(
    graph: fx.Graph, updates: Sequence[fx.Node], table: ParameterTable
) -> None:
    """Refuse a step that would see the difference between a new value and a delayed one.

    Raises: StepError.
    """
    counts = Counter(update.args[3] for update in updates)
    for update in updates:
        target, index = update.args[0], update.args[3]
        if counts[index] > 1:
            _refuse(table, index, "updated twice in a call", "Step its optimizer once in it")
        if target.op != "placeholder" or writers(target) != {update}:
            _refuse(table, index, "written to in the step", "Write to it between calls")
        if update.users:
            _refuse(table, index, "read after its update", "Read it between calls")
    for gradient in placeholders(graph, "gradient"):
        if updates and any(user.target is not _ZEROED for user in gradient.users):
            _refuse(
                table,
                input_role(gradient).parameter,
                "updated with a gradient that another call has left, of other values",
                "Accumulate in one call, and call optimizer.zero_grad() in it, with "
                "set_to_none=False before its backward()",
            )


_ZEROED = torch.ops.aten.zeros_like.default
"""``zero_grad(set_to_none=False)`` calls it, which reads a gradient's shape alone."""


def _refuse(table: ParameterTable, index: int, what: str, remedy: str) -> None:
    raise StepError(
        f"parameter {table[index].name!r} is {what}, and with delayed_update the values that an "
        f"update makes are not there before the next call. {remedy}, or drop delayed_update."
    )
