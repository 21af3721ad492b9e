"""Bugs planted in programs: for every node that a pass has inserted, what could be wrong with it.

Source of the idea: DeMillo, Lipton and Sayward 1978, "Hints on Test Data Selection".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from zerofx.ir.aliases import memory_of
from zerofx.ir.roles import provenance
from zerofx.ir.source import layout_text

KINDS = ("delete", "duplicate", "apply twice", "move up", "move down", "swap", "constant")


@dataclass(frozen=True)
class Bug:
    """One change of one node, by name: the same on all ranks.

    ``other`` is the node that it is moved across, or whose operands or place in line it gets;
    ``argument`` the position of a constant, and ``value`` what that becomes.
    """

    kind: str
    node: str
    other: str = ""
    argument: int = -1
    value: Any = None

    def __str__(self) -> str:
        what = {
            "move up": f" above {self.other}",
            "move down": f" below {self.other}",
            "swap": f" with {self.other}",
            "constant": f" {self.argument} becomes {self.value!r}",
        }
        return f"{self.kind} {self.node}{what.get(self.kind, '')}"

    def plant(self, graph: fx.Graph) -> None:
        """Change the program."""
        nodes = {node.name: node for node in graph.nodes}
        node, other = nodes[self.node], nodes.get(self.other)
        getattr(self, f"_{self.kind.replace(' ', '_')}")(graph, node, other)

    def _delete(self, graph: fx.Graph, node: fx.Node, _other: None) -> None:
        if node.users:
            _read_instead(node, stand_in(node))
        graph.erase_node(node)

    def _duplicate(self, graph: fx.Graph, node: fx.Node, _other: None) -> None:
        last = list(node.users)[-1:]
        with graph.inserting_after(node):
            copy = graph.node_copy(node)
        for user in last:
            user.replace_input_with(node, copy)

    def _apply_twice(self, graph: fx.Graph, node: fx.Node, other: fx.Node) -> None:
        with graph.inserting_after(node):
            copy = graph.node_copy(node, lambda source: node if source is other else source)
        node.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)

    def _move_up(self, _graph: fx.Graph, node: fx.Node, other: fx.Node) -> None:
        other.prepend(node)

    def _move_down(self, _graph: fx.Graph, node: fx.Node, other: fx.Node) -> None:
        other.append(node)

    def _swap(self, _graph: fx.Graph, node: fx.Node, other: fx.Node) -> None:
        node.args, other.args = other.args, node.args

    def _constant(self, _graph: fx.Graph, node: fx.Node, _other: None) -> None:
        node.update_arg(self.argument, self.value)


def bugs(graph: fx.Graph, inserted_by: str | None = None) -> Iterator[Bug]:
    """Every bug of nodes that a pass has inserted; of those of all passes if none is named."""
    order = list(graph.nodes)
    memory = {node: roots(node) for node in order if node.op != "output"}
    for position, node in enumerate(order):
        origin = provenance(node)
        if origin is None or node.op != "call_function":
            continue
        if inserted_by is not None and origin.inserted_by != inserted_by:
            continue
        if not node.users or stand_in(node) is not None:
            yield Bug("delete", node.name)
        yield Bug("duplicate", node.name)
        for source in node.all_input_nodes:
            if layout(source) == layout(node):
                yield Bug("apply twice", node.name, source.name)
                break
        related = [
            other
            for other in order
            if other.op == "call_function" and other is not node and memory[other] & memory[node]
        ]
        before = [other for other in related if order.index(other) < position]
        behind = [other for other in related if order.index(other) > position]
        if before:
            yield Bug("move up", node.name, before[-1].name)
        if behind:
            yield Bug("move down", node.name, behind[0].name)
        if other := _partner(node, order, position):
            yield Bug("swap", node.name, other.name)
        for argument, value in enumerate(node.args):
            if (changed := _changed(value)) is not None:
                yield Bug("constant", node.name, argument=argument, value=changed)


def roots(node: fx.Node) -> frozenset[fx.Node]:
    """The memory that a node makes, and that it looks at or writes to, by who made it."""
    touched = [node, *node.all_input_nodes]
    return frozenset(
        made for one in touched for made in memory_of(one) if len(memory_of(made)) == 1
    )


def stand_in(node: fx.Node) -> Any:
    """What a node's readers could read instead of it: an operand, one like its result if any."""
    nested = [value for value in node.args if isinstance(value, (list, tuple))]
    lists = [list(v) for v in nested if v and all(isinstance(one, fx.Node) for one in v)]
    if isinstance(node.meta.get("val"), (list, tuple)):
        same = [one for one in (*node.args, *lists) if layout(one) == layout(node)]
        return same[-1] if same else None
    sources = node.all_input_nodes
    alike = [source for source in sources if layout(source) == layout(node)]
    return next(iter((*alike, *sources)), None)


def layout(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return str([layout(one) for one in value])
    value = value.meta.get("val") if isinstance(value, fx.Node) else value
    return layout(value) if isinstance(value, (list, tuple)) else layout_text(value)


def _read_instead(node: fx.Node, stand_in: Any) -> None:
    for user in list(node.users):
        user.args = _replaced(user.args, node, stand_in)
        user.kwargs = {name: _replaced(v, node, stand_in) for name, v in user.kwargs.items()}


def _replaced(value: Any, node: fx.Node, stand_in: Any) -> Any:
    if value is node:
        return stand_in
    if isinstance(value, (list, tuple)):
        return type(value)(_replaced(one, node, stand_in) for one in value)
    return value


def _partner(node: fx.Node, order: list[fx.Node], position: int) -> fx.Node | None:
    """The next node that does the same with others, which the order of the program lets swap."""
    defined = set(order[:position])
    for other in order[position + 1 :]:
        if other.target is not node.target or provenance(other) is None:
            continue
        if other.args != node.args and set(other.all_input_nodes) <= defined:
            return other
    return None


def _changed(value: Any) -> Any:
    """Another value of a constant; None for what is none."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return "mean" if value == "sum" else "sum"
    return None
