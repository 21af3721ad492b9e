"""Refuse an update that would differ between ranks."""

from __future__ import annotations

import torch
from torch import fx

from zerofx.errors import StepError
from zerofx.ir import ops
from zerofx.ir.graph import rank_varying
from zerofx.ir.interface import input_role
from zerofx.ir.parameters import ParameterTable
from zerofx.ir.source import source_line

aten = torch.ops.aten


def check_updates_are_uniform(graph: fx.Graph, table: ParameterTable, world_size: int) -> None:
    """Refuse an update that each rank would compute from its own batch.

    Under plain data parallelism the ranks' parameters would drift apart in silence.
    Raises: StepError naming the parameter and the line.
    """
    varying = rank_varying(graph, world_size)
    for node in graph.nodes:
        if node.target is ops.optimizer_step:
            _, gradients, _, found_inf, indices = node.args
            if found_inf in varying:
                _refuse("found_inf", found_inf)
            for index, gradient in zip(indices, gradients, strict=True):
                if gradient in varying:
                    _refuse(f"the gradient of {table[index].name!r}", gradient)
        elif node.target is aten.copy_.default and node.args[0].op == "placeholder":
            role = input_role(node.args[0])
            if role.kind in ("parameter", "gradient") and node.args[1] in varying:
                what = "" if role.kind == "parameter" else "the gradient of "
                _refuse(f"{what}{table[role.parameter].name!r}", node.args[1])


def _refuse(what: str, node: fx.Node) -> None:
    line = source_line(node)
    raise StepError(
        f"{what} is computed from values that differ between ranks (this rank's batch or its size, "
        "a buffer or a random draw), so the ranks' parameters would drift apart. Between "
        "backward() and optimizer.step() use only averaged gradients, parameters and numbers that "
        f"are the same on every rank.{chr(10) + '  at ' + line if line else ''}"
    )
