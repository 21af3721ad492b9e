"""Insertion into a program, and questions about its order and its updates."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cached_property, partial
from typing import Any

import torch
from torch import fx

from zerofx import compat
from zerofx.ir import ops
from zerofx.ir.aliases import mutated_inputs
from zerofx.ir.interface import input_role, placeholders, recorded, set_recorded
from zerofx.ir.mesh import Mesh
from zerofx.ir.parameters import ParameterTable
from zerofx.ir.reach import reached
from zerofx.ir.roles import Provenance, Role
from zerofx.ir.rules import rules

aten = torch.ops.aten


def updates(graph: fx.Graph) -> Counter[tuple[int, int]]:
    """Count the program's updates: (optimizer, parameter) -> count."""
    return Counter(update for node in graph.nodes for update in updated_by(node))


def updated_by(node: fx.Node) -> list[tuple[int, int]]:
    """The updates that a node runs: (optimizer, parameter)."""
    updates = ops.rules(node).updates
    if updates is None:
        return []
    optimizer, parameters = updates(node)
    return [(optimizer, parameter) for parameter in parameters]


def is_owned(update: fx.Node) -> bool:
    """Return whether an update goes on with what one rank has computed of the whole tensor."""
    direction = update.args[1]
    return direction.target is operator.getitem and direction.args[0].target is ops.on_owners


class Builder:
    """Inserts nodes with fresh metadata and provenance, on behalf of one pass."""

    def __init__(self, gm: fx.GraphModule, inserted_by: str, table: ParameterTable | None = None):
        self.graph = gm.graph
        self.inserted_by = inserted_by
        self.table = table
        self._computed: dict[Hashable, Any] = {}  # by operator and operands' layouts

    @cached_property
    def mesh(self) -> Mesh:
        """The axes that inserted collectives are along."""
        return recorded(self.graph).mesh or Mesh()

    @cached_property
    def fake_mode(self):
        for node in self.graph.nodes:
            value = node.meta.get("val")
            if compat.tensors.is_fake(value):
                return value.fake_mode
        raise ValueError("the program has no tensor")

    def call(
        self,
        target: Callable,
        *args: Any,
        role: Role,
        parameter: int = -1,
        bucket: int = -1,
        like: fx.Node | None = None,
        reason: str = "",
        **kwargs: Any,
    ) -> fx.Node:
        """Insert ``target(*args, **kwargs)`` at the graph's insertion point.

        ``like`` lends the user's source line and the forward or backward tag; ``reason`` is why
        the pass chose to.
        """
        node = self.graph.create_node("call_function", target, args, kwargs)
        node._rename(self._name(node, role, parameter, bucket))
        if like is not None:
            for key in ("stack_trace", "autograd_backward", "nn_module_stack"):
                if key in like.meta:
                    node.meta[key] = like.meta[key]
        node.meta["zerofx"] = Provenance(role, parameter, self.inserted_by, bucket, reason)
        self.refresh(node)
        return node

    @contextmanager
    def before(self, node: fx.Node, **origin: Any) -> Iterator[Callable[..., fx.Node]]:
        """Insert in front of ``node``, and like it; ``origin`` is what ``call`` takes by name."""
        with self.graph.inserting_before(node):
            yield partial(self.call, **{"like": node, **origin})

    def serving(self, indices: Sequence[int]) -> dict[str, int]:
        """The origin of what serves these parameters, of one bucket, together."""
        assert self.table is not None
        first = self.table[indices[0]]
        return {"bucket": first.place.bucket} if first.shares_bucket else {"parameter": first.index}

    def _name(self, node: fx.Node, role: Role, parameter: int, bucket: int) -> str:
        """``gather_start_head_weight``: what a reader of the dumped program looks for."""
        stem = f"{role}_start" if ops.starts(node) else role
        if bucket >= 0:
            return f"{stem}_bucket{bucket}"
        if parameter < 0 or self.table is None:
            return stem
        return f"{stem}_{self.table[parameter].name}"

    def copy(self, node: fx.Node, substitutes: Mapping[fx.Node, fx.Node], **origin: Any) -> fx.Node:
        """Insert a copy of ``node`` that reads ``substitutes`` for those of its arguments."""
        duplicate = self.graph.node_copy(node, lambda source: substitutes.get(source, source))
        duplicate.meta = dict(node.meta)
        if origin:
            duplicate.meta["zerofx"] = Provenance(inserted_by=self.inserted_by, **origin)
        self.refresh(duplicate)
        return duplicate

    def refresh(self, node: fx.Node) -> None:
        """Recompute ``meta["val"]`` from the arguments'; past torch's dispatch where it is ours.

        Equal layers have it from the first.  Results of operators that run programs stay as they
        are.
        """
        if compat.inductor.is_higher_order(node.target):
            return
        call = node.target, _layout((node.args, *sorted(node.kwargs.items())))
        is_known = None not in call and not mutated_inputs(node) and not _depends_on_data(node)
        value = self._computed.get(call) if is_known else None
        if value is None:
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
            with self.fake_mode, torch.no_grad():
                value = (rules(node).fake or node.target)(*args, **kwargs)
            if is_known:
                self._computed[call] = value
        node.meta["val"] = value
        node.meta.pop("tensor_meta", None)


def _layout(value: Any) -> Hashable | None:
    """Return what an operand's metadata are, where that is plain: equal ones give equal results."""
    if isinstance(value, fx.Node):
        value = value.meta.get("val")
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_conj() or value.is_neg():
            return None
        sizes = (*value.shape, *value.stride(), value.storage_offset())
        are_known = all(type(size) is int for size in sizes)
        return (value.dtype, value.device, value.dim(), sizes) if are_known else None
    if isinstance(value, (tuple, list)):
        parts = tuple(map(_layout, value))
        return None if None in parts else parts
    return (type(value), value) if value is None or isinstance(value, _PLAIN) else None


def _depends_on_data(node: fx.Node) -> bool:
    """Return whether each call of an operator has sizes of its own."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags


_PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def last_use(nodes: Collection[fx.Node]) -> fx.Node:
    """The last reader of any of ``nodes`` (or the last of them, if nobody reads it)."""
    return max([user for node in nodes for user in node.users] or nodes)


def program_order(graph: fx.Graph) -> dict[fx.Node, int]:
    return {node: position for position, node in enumerate(graph.nodes)}


def is_backward(node: fx.Node) -> bool:
    return bool(node.meta.get("autograd_backward"))


def is_of_batch(node: fx.Node) -> bool:
    """Return whether a value is computed of what the step is called with alone."""
    return not any(
        (one.op == "placeholder" and input_role(one).kind in ("parameter", "gradient"))
        or is_random(one)
        or mutated_inputs(one)
        for one in reached([node], lambda reader: reader.all_input_nodes)
    )


def may_be_batch(node: fx.Node) -> bool:
    """Return whether an input may be of a batch: it is a tensor that is nothing of the model's."""
    value = node.meta.get("val")
    is_tensor = isinstance(value, torch.Tensor) and value.dim() > 0
    return node.op == "placeholder" and is_tensor and input_role(node).kind == "other"


def move_to_front(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Move nodes that are of the batch, and what they are computed of, in front of all others."""
    wanted = set(reached(nodes, lambda node: node.all_input_nodes))
    place = placeholders(graph)[-1]
    for node in [node for node in graph.nodes if node in wanted and node.op != "placeholder"]:
        place.append(node)
        place = node


def is_random(node: fx.Node) -> bool:
    """Return whether a node draws random numbers, whose order is part of the step's meaning."""
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded in node.target.tags
        and not mutated_inputs(node)
    )


Copies = dict[fx.Node, fx.Node]
"""Node -> its copy."""


def copied(graph: fx.Graph, copies: Copies | None = None) -> fx.Graph:
    """A copy of a program, with what is recorded about its inputs and results; fills ``copies``."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {} if copies is None else copies))
    copy.output_node().meta = dict(graph.output_node().meta)
    set_recorded(copy, deepcopy(recorded(graph)))
    return copy


def copied_module(gm: fx.GraphModule, copies: Copies | None = None) -> fx.GraphModule:
    """The same of a module, whose attributes both have then."""
    return compat.aot.graph_module(gm, copied(gm.graph, copies))


def erase_unused(graph: fx.Graph, candidates: Iterable[fx.Node]) -> int:
    """Erase those of ``candidates``, and what only they read, that nobody reads."""
    pending = list(candidates)
    erased = 0
    seen: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node in seen or node.users or node.op in ("placeholder", "output"):
            continue
        if mutated_inputs(node) or ops.acts(node):
            continue
        seen.add(node)
        sources = list(node.all_input_nodes)
        graph.erase_node(node)
        erased += 1
        pending.extend(sources)
    return erased
