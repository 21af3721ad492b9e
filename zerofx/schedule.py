"""A program's collectives as text: what ranks compare before the first of them runs."""

from __future__ import annotations

from torch import fx

from zerofx import ops
from zerofx.graph import served, value_bytes
from zerofx.plan import ParameterTable


def schedule(gm: fx.GraphModule, table: ParameterTable, stage: int) -> tuple[str, ...]:
    """One line per parameter, then one per collective in program order.

    Shapes of batches are left out: they may differ between ranks.
    """
    lines = [f"stage {stage}"]
    for info in table:
        shape = "x".join(map(str, info.shape)) or "scalar"
        frozen = "" if info.requires_grad else " frozen"
        lines.append(f"parameter {info.name} {info.dtype} {shape}{frozen}")
    for node in gm.graph.nodes:
        if node.target in ops.STARTS:
            kind = node.target._schema.name.removeprefix("zerofx::").removesuffix("_start")
            name = served(node, table)
            nbytes = max(value_bytes(node), value_bytes(node.args[0]))
            lines.append(f"{kind} {name} {node.meta['val'].dtype} {nbytes} bytes")
        elif node.target is ops.update:
            lines.append(f"update {table[node.args[3]].name}")
    return tuple(lines)
