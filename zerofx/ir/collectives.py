"""A program's collectives as text: what ranks compare before the first of them runs."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import fx

from zerofx import compat
from zerofx.ir import ops
from zerofx.ir.graph import updated_by
from zerofx.ir.interface import gradient_work, recorded, written_input
from zerofx.ir.parameters import ParameterTable
from zerofx.ir.reach import reached
from zerofx.ir.roles import Role, role, served


def schedule(gm: fx.GraphModule, table: ParameterTable, stage: int) -> tuple[str, ...]:
    """One line per parameter, then one per collective in program order.

    Shapes of batches are left out: they may differ between ranks.
    """
    mesh = recorded(gm.graph).mesh
    lines = [f"stage {stage}" if mesh is None else f"stage {stage} on {mesh}"]
    for info in table:
        shape = "x".join(map(str, info.shape)) or "scalar"
        frozen = "" if info.requires_grad else " frozen"
        lines.append(f"parameter {info.name} {info.dtype} {shape}{frozen}")
    for node in gm.graph.nodes:
        if ops.is_collective(node):
            kind = node.target._schema.name.removeprefix("zerofx::").removesuffix("_start")
            name = served(node, table)
            nbytes = ops.rules(node).sends(node)
            over = "" if mesh is None else f" over {ops.argument(node, 'axis')}"
            lines.append(f"{kind} {name} {node.meta['val'].dtype} {nbytes} bytes{over}")
        elif node.target is ops.correct:
            corrected = ", ".join(table[index].name for index in node.args[1])
            lines.append(f"errors of {corrected} over {ops.argument(node, 'axis')}")
        elif node.target is ops.on_owners:
            names = (table[index].name for index in node.args[3])
            owners = (f"{name} on {o}" for name, o in zip(names, node.args[4], strict=True))
            lines.append(f"updates of whole {', '.join(owners)}")
        else:
            lines += [f"update {table[parameter].name}" for _, parameter in updated_by(node)]
    lines += _numbers_in_gradients(gm.graph, changing=False)
    return tuple(lines)


def changing_numbers(graph: fx.Graph) -> list[str]:
    """Return the same lines for numbers that may change at every call, as they were when captured.

    They are in no schedule: a rank that captures once more would be alone with its schedule.
    """
    return _numbers_in_gradients(graph, changing=True)


def _numbers_in_gradients(graph: fx.Graph, *, changing: bool) -> list[str]:
    """A line per operation between averaged gradients and updates that takes a plain number.

    The number may be a rank's own, as that of its batch's rows is, and each rank would scale
    its own shards by it.  Norms of gradients are followed too; what a step only reports is not.
    """
    with_numbers = partial(_with_numbers, changing=changing)
    averaged: set[fx.Node] = set()
    lines: set[str] = set()
    leading = _leading_to_updates(graph)
    for node in graph.nodes:
        if role(node) in (Role.REDUCE_GRADIENT, Role.REDUCE_SCALAR) and not ops.starts(node):
            averaged.add(node)
        if (work := gradient_work(node)) is not None:
            lines.update(*map(with_numbers, work.graph_module.graph.nodes))
        if node.op != "call_function" or ops.is_ours(node.target):
            continue
        if averaged.isdisjoint(node.all_input_nodes):
            continue
        averaged.add(node)
        if node in leading:
            lines.update(with_numbers(node))
    return sorted(lines)


def _leading_to_updates(graph: fx.Graph) -> set[fx.Node]:
    """Return all that updates, written inputs and stored gradients are computed of, with these."""
    of_program, results = recorded(graph), graph.output_node().args[0]
    stored = {**of_program.gradients, **of_program.written_gradients}
    ends = [node for node in graph.nodes if updated_by(node) or written_input(node)]
    ends += [results[position] for position in stored]
    return set(reached(ends, lambda node: node.all_input_nodes))


def _with_numbers(node: fx.Node, *, changing: bool) -> list[str]:
    """Return a line per plain number that an elementwise operation takes."""
    if torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        return []
    operands: Any = (*node.args, *node.kwargs.values())
    if changing:
        symbols = (one.meta.get("val") for one in operands if isinstance(one, fx.Node))
        operands = map(compat.aot.scalar_hint, symbols)
    numbers = [value for value in operands if isinstance(value, int | float)]
    return [f"{node.target} of averaged gradients and {number}" for number in numbers]
