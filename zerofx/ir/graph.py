"""Questions about a program, and insertion into it: aliases, order, nodes with fresh metadata."""

from __future__ import annotations

import operator
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import fx

from zerofx import compat
from zerofx.ir import ops
from zerofx.ir.parameters import KeptGathered, ParameterTable, Resident
from zerofx.ir.roles import Provenance, parameter_of

aten = torch.ops.aten


@dataclass(frozen=True)
class InputRole:
    """What an input is: ``parameter``, ``gradient``, ``buffer``, ``number`` or ``other``.

    A ``number`` is one that the user passes, and not a size of some tensor.

    ``parameter`` is the index of the parameter, or of the one whose gradient it is; -1 for
    other kinds.  ``sharded`` says that the program receives this rank's flat shard of it,
    ``unreduced`` that it is a gradient of this rank's own, not yet averaged over the ranks,
    ``on_host`` that it is a shard in host memory.
    """

    kind: str
    parameter: int = -1
    sharded: bool = False
    unreduced: bool = False
    on_host: bool = False


def input_role(node: fx.Node) -> InputRole:
    return node.meta["zerofx_input"]


def set_input_role(node: fx.Node, role: InputRole) -> None:
    node.meta["zerofx_input"] = role


def placeholders(graph: fx.Graph, kind: str | None = None) -> list[fx.Node]:
    """The program's inputs, all or of one kind."""
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    return nodes if kind is None else [node for node in nodes if input_role(node).kind == kind]


def gradient_outputs(graph: fx.Graph) -> dict[int, int]:
    """Positions of results that become some ``p.grad`` -> that parameter's index."""
    return graph.output_node().meta.get("zerofx_gradients", {})


def sharded_results(graph: fx.Graph) -> set[int]:
    """Positions of results that leave as this rank's shards; to be added to."""
    return graph.output_node().meta.setdefault("zerofx_sharded_results", set())


def unreduced_results(graph: fx.Graph) -> set[int]:
    """Positions of results that become some ``p.grad`` without being averaged; to be added to."""
    return graph.output_node().meta.setdefault("zerofx_unreduced_results", set())


def written_gradients(graph: fx.Graph) -> dict[int, int]:
    """Positions of results that replace an unreduced gradient that came in -> its parameter.

    They are behind those that the step returns; to be added to.
    """
    return graph.output_node().meta.setdefault("zerofx_written_gradients", {})


def set_kept_gathered(graph: fx.Graph, kept: KeptGathered) -> None:
    """Record what the program keeps gathered within its budget."""
    graph.output_node().meta["zerofx_kept_gathered"] = kept


def kept_gathered(graph: fx.Graph) -> KeptGathered | None:
    """What the program keeps gathered within its budget; None if it has none or needs none."""
    return graph.output_node().meta.get("zerofx_kept_gathered")


def set_resident(graph: fx.Graph, resident: Resident) -> None:
    """Record what stays on the device of what the program could offload."""
    graph.output_node().meta["zerofx_resident"] = resident


def resident(graph: fx.Graph) -> Resident | None:
    """What stays on the device of what the program could offload; None if nobody has decided."""
    return graph.output_node().meta.get("zerofx_resident")


def mark_gradient(node: fx.Node, parameter: int) -> None:
    """Record that a node is a parameter's local gradient, one of those that become its average."""
    node.meta["zerofx_gradient_of"] = gradient_of(node) | {parameter}


def gradient_of(node: fx.Node) -> frozenset[int]:
    """The parameters whose local gradient a node is; none if nobody knows."""
    return node.meta.get("zerofx_gradient_of", frozenset())


def updates(graph: fx.Graph) -> Counter[tuple[int, int]]:
    """How often the program updates what: (optimizer, parameter) -> count."""
    found: Counter[tuple[int, int]] = Counter()
    for node in graph.nodes:
        found.update(updated_by(node))
    return found


def updated_by(node: fx.Node) -> list[tuple[int, int]]:
    """The updates that a node runs: (optimizer, parameter)."""
    updates = ops.rules(node).updates
    if updates is None:
        return []
    optimizer, parameters = updates(node)
    return [(optimizer, parameter) for parameter in parameters]


def is_owned(update: fx.Node) -> bool:
    """Whether an update goes on with what one rank has computed of the whole tensor."""
    direction = update.args[1]
    return direction.target is operator.getitem and direction.args[0].target is ops.on_owners


def captured_updates(graph: fx.Graph) -> Counter[tuple[int, int]] | None:
    """The updates that the program had when it was captured; None if nobody recorded them."""
    return graph.output_node().meta.get("zerofx_updates")


def mark_kept(node: fx.Node, reason: str) -> None:
    """Record that a value is kept from forward to backward, and why."""
    node.meta["zerofx_kept"] = reason


def why_kept(node: fx.Node) -> str | None:
    """Why a value is kept from forward to backward; None if nobody decided on it."""
    return node.meta.get("zerofx_kept")


class Builder:
    """Inserts nodes with fresh metadata and provenance, on behalf of one pass."""

    def __init__(self, gm: fx.GraphModule, inserted_by: str, table: ParameterTable | None = None):
        self.graph = gm.graph
        self.inserted_by = inserted_by
        self.table = table

    @cached_property
    def fake_mode(self):
        for node in self.graph.nodes:
            value = node.meta.get("val")
            if compat.is_fake(value):
                return value.fake_mode
        raise ValueError("the program has no tensor")

    def call(
        self,
        target: Callable,
        *args: Any,
        role: str,
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

    def _name(self, node: fx.Node, role: str, parameter: int, bucket: int) -> str:
        """``gather_start_head_weight``: what a reader of the dumped program looks for."""
        stem = f"{role}_start" if ops.starts(node) else role
        if bucket >= 0:
            return f"{stem}_bucket{bucket}"
        if parameter < 0 or self.table is None:
            return stem
        return f"{stem}_{self.table[parameter].name}"

    def copy(
        self, node: fx.Node, substitute: Callable[[fx.Node], fx.Node], **origin: Any
    ) -> fx.Node:
        """Insert a copy of ``node`` that reads ``substitute(argument)`` for each argument."""
        duplicate = self.graph.node_copy(node, substitute)
        duplicate.meta = dict(node.meta)
        if origin:
            duplicate.meta["zerofx"] = Provenance(inserted_by=self.inserted_by, **origin)
        self.refresh(duplicate)
        return duplicate

    def refresh(self, node: fx.Node) -> None:
        """Recompute ``meta["val"]`` from the arguments'."""
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
        with self.fake_mode, torch.no_grad():
            node.meta["val"] = node.target(*args, **kwargs)
        node.meta.pop("tensor_meta", None)


def aliased_inputs(node: fx.Node) -> list[fx.Node]:
    """Arguments whose memory the node's result may share."""
    if node.op != "call_function":
        return []
    shares = ops.rules(node).shares
    if shares is not None:
        return list(shares(node))
    if node.target is operator.getitem and node.args[0].target is ops.wait_shards:
        (start,) = node.args[0].args
        return [mutated_inputs(start)[node.args[1]]]  # and not those written to with it
    if node.target in (operator.getitem, aten._unsafe_view.default):  # its schema does not say so
        return [node.args[0]] if isinstance(node.args[0], fx.Node) else []
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    return _arguments(node, _aliased_arguments(node.target))


def mutated_inputs(node: fx.Node) -> list[fx.Node]:
    """Arguments that the node writes to."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return []
    return _arguments(node, _written_arguments(node.target))


@cache
def _aliased_arguments(operator_: torch._ops.OpOverload) -> tuple[tuple[int, str], ...]:
    """Positions and names of the arguments whose memory a result may share."""
    schema = operator_._schema
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and schema.returns
    )


@cache
def _written_arguments(operator_: torch._ops.OpOverload) -> tuple[tuple[int, str], ...]:
    """Positions and names of the arguments that an operator writes to."""
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(operator_._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _arguments(node: fx.Node, which: Iterable[tuple[int, str]]) -> list[fx.Node]:
    found: list[fx.Node] = []
    for position, name in which:
        value = node.args[position] if position < len(node.args) else node.kwargs.get(name)
        fx.node.map_arg(value, found.append)
    return found


def aliases(node: fx.Node, through_gathers: bool = False) -> set[fx.Node]:
    """``node`` and every later node that may share its memory.

    ``through_gathers`` takes what is gathered from a shard for the shard's memory too.
    """
    found = {node}
    pending = [node]
    while pending:
        for user in pending.pop().users:
            sources = aliased_inputs(user)
            if through_gathers and ops.rules(user).gathers:
                sources = user.all_input_nodes
            if user not in found and any(source in found for source in sources):
                found.add(user)
                pending.append(user)
    return found


def memory_of(node: fx.Node) -> set[fx.Node]:
    """``node`` and every earlier node whose memory it may share."""
    found = {node}
    pending = [node]
    while pending:
        sources = set(aliased_inputs(pending.pop())) - found
        found |= sources
        pending += sources
    return found


def is_kept_on_host(node: fx.Node) -> bool:
    """Whether a node's memory is that of a parameter's shard which is kept in host memory."""
    return any(
        source.op == "placeholder" and input_role(source).on_host for source in memory_of(node)
    )


def shard_of(node: fx.Node) -> int:
    """Index of the parameter that a flat shard is of, or is laid out like; -1 for none."""
    if node.target is aten.copy_.default:
        return shard_of(node.args[0])
    if node.op == "placeholder":
        return input_role(node).parameter if input_role(node).sharded else -1
    return parameter_of(node)


def writers(node: fx.Node) -> set[fx.Node]:
    """Every node that writes to ``node``'s memory."""
    return {
        user for alias in aliases(node) for user in alias.users if alias in mutated_inputs(user)
    }


def call_text(node: fx.Node, name: Callable[[fx.Node], str]) -> str:
    """A node's operation and arguments, its sources as ``name`` gives them."""
    arguments = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: _Text(name(n)))
    return f"{node.op} {node.target} {arguments}"


class _Text(str):
    __repr__ = str.__str__


def layout_text(value: Any) -> str:
    """What a value is but for its elements: dtype, device, shape and strides."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {value.device} {tuple(value.shape)} {value.stride()}"
    return repr(value)


def done_with(reader: fx.Node, order: dict[fx.Node, int]) -> int:
    """When a reader needs its operands no more: what is started reads them until its wait."""
    if ops.is_collective(reader) or ops.is_move(reader):
        return max(done_with(user, order) for user in reader.users)
    return order[reader]


def last_use(nodes: Iterable[fx.Node], order: dict[fx.Node, int]) -> fx.Node:
    """The last reader of any of ``nodes`` (or the last of them, if nobody reads it)."""
    nodes = list(nodes)
    readers = [user for node in nodes for user in node.users] or nodes
    return max(readers, key=order.__getitem__)


def program_order(graph: fx.Graph) -> dict[fx.Node, int]:
    return {node: position for position, node in enumerate(graph.nodes)}


def is_backward(node: fx.Node) -> bool:
    return bool(node.meta.get("autograd_backward"))


def rank_varying(graph: fx.Graph, world_size: int) -> set[fx.Node]:
    """Nodes whose value may differ between ranks; none if there is only one.

    Batches, buffers and random draws differ; so does all that is computed from them, until a
    gradient is averaged.  A 0-dim input (a loss scale, a coefficient) is taken to be the same
    on all ranks, as a Python number is; the size of a batch is not.
    """
    varying: set[fx.Node] = set()
    if world_size == 1:
        return varying
    for node in graph.nodes:
        if node.op == "placeholder":
            value = node.meta.get("val")
            is_scalar = isinstance(value, torch.Tensor) and value.dim() == 0
            kind = input_role(node).kind
            is_own = kind == "buffer" or input_role(node).unreduced
            if is_own or (kind == "other" and not is_scalar):
                varying.add(node)
        elif ops.rules(node).uniform:
            continue  # the same on all ranks once it has been averaged or gathered
        elif is_random(node) or any(source in varying for source in node.all_input_nodes):
            varying.add(node)
    return varying


def is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers: the order of draws is part of what a step computes."""
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded in node.target.tags
        and not mutated_inputs(node)
    )


def copied(graph: fx.Graph) -> fx.Graph:
    """A copy of a program, with what is recorded about its inputs and results."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    copy.output_node().meta = dict(graph.output_node().meta)
    return copy


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


def source_line(node: fx.Node) -> str:
    """``file:line text`` of the user's line that a node comes from, or an empty string."""
    return " ".join(filter(None, source_of(node)))


def source_of(node: fx.Node) -> tuple[str, str]:
    """The user's line that a node comes from: ``file:line`` and its text; empty if none is known.

    Lines of torch and of this package are passed over: users look for their own.
    """
    found = "", ""
    for frame in _FRAME.finditer(node.meta.get("stack_trace") or node.stack_trace or ""):
        if found[0] and frame["path"].startswith(_LIBRARIES):
            continue
        path = " ".join(frame["path"].splitlines())  # for a name may have line breaks
        found = f"{path}:{frame['line']}", (frame["text"] or "").strip()
    return found


# A line of source may begin with File too, and is missing where its file is.
_FRAME = re.compile(
    r'^ *File "(?P<path>.*?)", line (?P<line>\d+)(?:, in [^\n]*)?'
    r'(?:\n(?! *File ")(?P<text>[^\n]*))?',
    re.MULTILINE | re.DOTALL,
)

_LIBRARIES = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
)
