"""The roles of a program's inputs, results and nodes, as its metadata hold them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from zerofx.ir.mesh import Mesh
from zerofx.ir.parameters import Decisions

aten = torch.ops.aten


META = (
    "val",
    "stack_trace",
    "autograd_backward",
    "recompute",
    "ac_graph_id",
    "source_name",
    "zerofx",
    "zerofx_input",
    "zerofx_program",
    "zerofx_gradient_of",
    "zerofx_kept",
    "zerofx_stands_for",
    "zerofx_work",
    "zerofx_region",
)
"""All metadata of nodes that is read of a program; dumps also name the user's modules."""


@dataclass(frozen=True)
class InputRole:
    """The role of an input: ``parameter``, ``gradient``, ``buffer``, ``number`` or ``other``.

    A ``number`` is one that the user passes, and not a size of some tensor.

    ``parameter`` is the index of the parameter, or of the one whose gradient it is; -1 for
    other kinds.  ``sharded`` says that the program receives this rank's flat shard of it,
    ``unreduced`` names the axes of ranks over which a gradient still has to be averaged: along all
    of them it is this rank's own, along the outer one of a mesh a sum over the inner one.
    ``on_host`` says that it is a shard in host memory.  ``is_loss_scale``: a ``GradScaler``
    multiplies losses by it.  ``is_argument``: the step is called with it, or with what has it.
    ``becomes`` is the position of the result that is stored in its place; -1 if none is.
    """

    kind: str
    parameter: int = -1
    sharded: bool = False
    unreduced: str = ""
    on_host: bool = False
    is_loss_scale: bool = False
    is_argument: bool = False
    becomes: int = -1


def input_role(node: fx.Node) -> InputRole:
    return node.meta["zerofx_input"]


def set_input_role(node: fx.Node, role: InputRole) -> None:
    node.meta["zerofx_input"] = role


def written_input(node: fx.Node) -> InputRole | None:
    """The role of the input that a ``copy_`` writes to; None for any other node."""
    is_write = node.target is aten.copy_.default and node.args[0].op == "placeholder"
    return input_role(node.args[0]) if is_write else None


def placeholders(graph: fx.Graph, kind: str | None = None) -> list[fx.Node]:
    """The program's inputs, all or of one kind."""
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    return nodes if kind is None else [node for node in nodes if input_role(node).kind == kind]


@dataclass
class Recorded:
    """What is recorded of a program as a whole; results go by their positions.

    ``gradients`` become some ``p.grad``, by index; those that are ``unreduced`` are not averaged
    over these axes.
    ``written_gradients`` replace an unreduced gradient that came in, by the parameter's index; they
    are behind those that the step returns.  ``sharded`` results leave as this rank's shards.

    ``updates`` are those that the program had when it was captured; None if nobody recorded them.
    ``decisions`` is what has been decided of the program.  ``mesh`` are the axes that its operators
    name; None if there is but one.  ``warnings`` are for every start that takes the program.
    """

    gradients: dict[int, int] = field(default_factory=dict)
    unreduced: dict[int, str] = field(default_factory=dict)
    written_gradients: dict[int, int] = field(default_factory=dict)
    sharded: set[int] = field(default_factory=set)
    updates: Counter[tuple[int, int]] | None = None
    decisions: Decisions = field(default_factory=Decisions)
    mesh: Mesh | None = None
    warnings: list[str] = field(default_factory=list)


def recorded(graph: fx.Graph) -> Recorded:
    """What is recorded of a program, to be added to."""
    return graph.output_node().meta.setdefault("zerofx_program", Recorded())


def set_recorded(graph: fx.Graph, of_program: Recorded) -> None:
    graph.output_node().meta["zerofx_program"] = of_program


def note_decisions(graph: fx.Graph, **fields: Any) -> None:
    """Record what has been decided of a program, by fields of ``Decisions``."""
    of_program = recorded(graph)
    of_program.decisions = replace(of_program.decisions, **fields)


def noted(graph: fx.Graph, warning: str) -> str:
    """Return a warning, recorded for starts that take the program from disk."""
    recorded(graph).warnings.append(warning)
    return warning


def mark_gradient(node: fx.Node, parameter: int) -> None:
    """Record that a node is a parameter's local gradient, one of those that become its average."""
    node.meta["zerofx_gradient_of"] = gradient_of(node) | {parameter}


def gradient_of(node: fx.Node) -> frozenset[int]:
    """The parameters whose local gradient a node is; none if nobody knows."""
    return node.meta.get("zerofx_gradient_of", frozenset())


def mark_kept(node: fx.Node, reason: str) -> None:
    """Record that a value is kept from forward to backward, and why."""
    node.meta["zerofx_kept"] = reason


def why_kept(node: fx.Node) -> str | None:
    """Why a value is kept from forward to backward; None if nobody decided on it."""
    return node.meta.get("zerofx_kept")


STANDS_FOR = "zerofx_stands_for"
"""In a node's metadata, the name of the first node that it runs in place of."""


def set_gradient_work(update: fx.Node, work: Any) -> None:
    """Record what ``update_together`` says as text, for a kernel."""
    update.meta["zerofx_work"] = work


def gradient_work(update: fx.Node) -> Any:
    """Return the work on gradients that an ``update_together`` does first; None for none."""
    return update.meta.get("zerofx_work")


def set_region(node: fx.Node, number: int) -> None:
    """Record which run of compute a node is in: what is compiled together."""
    node.meta["zerofx_region"] = number


def region_of(node: fx.Node) -> int | None:
    """The run of compute that a node is in; None for what is none, or not in one yet."""
    return node.meta.get("zerofx_region")
