"""Refuse programs that cannot have their updates stored by the next call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import fx

from zerofx.errors import StepError
from zerofx.ir.aliases import writers
from zerofx.ir.interface import input_role, placeholders
from zerofx.ir.parameters import ParameterTable


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
        if updates and gradient.users:
            _refuse(
                table,
                input_role(gradient).parameter,
                "updated with a gradient that another call has left, of other values",
                "Accumulate in one call, and call optimizer.zero_grad() in it",
            )


def _refuse(table: ParameterTable, index: int, what: str, remedy: str) -> None:
    raise StepError(
        f"parameter {table[index].name!r} is {what}, and with delayed_update the values that an "
        f"update makes are not there before the next call. {remedy}, or drop delayed_update."
    )
