"""The error about a node that breaks a rule."""

from __future__ import annotations

from torch import fx

from zerofx.errors import GraphError
from zerofx.ir.roles import provenance
from zerofx.ir.source import source_line


def broken(node: fx.Node, rule: str) -> GraphError:
    """The error that names the node, the pass that inserted it, the rule and the user's line."""
    origin = provenance(node)
    made_by = f", inserted by {origin.inserted_by!r}" if origin else ""
    line = source_line(node)
    return GraphError(
        f"{node.format_node() or node.name}{made_by}: {rule}{' at ' + line if line else ''}"
    )
