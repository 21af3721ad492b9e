"""A program's record: what its timeline predicts, and what its memory holds, of which kind."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from zerofx import compat
from zerofx.cost.program import Allocation, allocations, owned_bytes
from zerofx.cost.timeline import predict, shared_bytes
from zerofx.hardware import Figures
from zerofx.ir import ops
from zerofx.ir.graph import (
    aliased_inputs,
    bucket_of,
    gradient_of,
    hinted_bytes,
    input_role,
    is_backward,
    memory_of,
    operands_of_updates,
    parameter_of,
    program_order,
    provenance,
    role,
    source_line,
    staged_until,
    value_bytes,
)
from zerofx.ir.parameters import ParameterTable
from zerofx.report.timeline.record import Busy, Memory, Node, StepRecord

aten = torch.ops.aten

_SHORT = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.bool: "b8",
}


def record_of(
    graph: fx.Graph,
    table: ParameterTable,
    figures: Figures,
    world_size: int,
    *,
    title: str = "step",
    program: str = "program",
    rank: int = 0,
    sockets: bool = False,
    state_bytes: Mapping[tuple[int, int], float] | None = None,
) -> StepRecord:
    """Predict one step of a program, node by node.

    ``state_bytes`` is what the optimizers keep per element, by (optimizer, parameter); what of that
    is not known is not drawn.  ``sockets`` counts what reductions on a CPU receive into.
    """
    timeline = predict(graph, figures, table, world_size)
    order = program_order(graph)
    nodes = list(graph.nodes)
    pieces, lies_in = allocations(graph, world_size, sockets=sockets)
    phases = _phases(nodes)
    about = _parameters(nodes, table)
    lines: dict[str, str] = {}  # by stack: of a layer's nodes many have the same
    rows = [
        Node(
            name=node.name,
            operator=_operator(node),
            value=_shape(node.meta.get("val")),
            phase=phases[node],
            issued_s=issued_s,
            bucket=bucket_of(node),
            parameters=tuple(sorted(about[node])),
            role=role(node) or "",
            why=_why(node),
            source=_line(node, lines),
            waits_for=order[node.args[0]] if node.target in ops.WAITS else -1,
        )
        for node, issued_s in zip(nodes, timeline.issued_s, strict=True)
    ]
    spans = [
        Busy(
            order[span.node],
            span.lane,
            span.begin_s,
            span.end_s,
            _carried(span.node, span.lane, table, world_size),
        )
        for span in timeline.spans
    ]
    kinds = _Kinds(nodes, phases, lies_in)
    memory = [
        *_inputs(nodes, len(nodes)),
        *_states(nodes, table, state_bytes or {}),
        *(
            Memory(
                order[piece.node],
                "device",
                kinds.of(piece),
                piece.begin,
                piece.end,
                piece.nbytes,
                "" if piece.own else _shape(_part(piece)),
            )
            for piece in pieces
            if piece.nbytes
        ),
        *_staging(nodes, order),
    ]
    return StepRecord(
        title=title,
        program=program,
        rank=rank,
        world_size=world_size,
        figures=f"{figures} ({figures.source})",
        compute_s=timeline.compute_s,
        exposed_s=timeline.exposed_s,
        bound_s=timeline.bound_s,
        parameters=tuple(info.name for info in table),
        nodes=tuple(rows),
        spans=tuple(spans),
        memory=tuple(memory),
    )


class _Kinds:
    """What kind of memory an allocation is, from what lies in it and who reads that."""

    def __init__(
        self,
        nodes: list[fx.Node],
        phases: Mapping[fx.Node, str],
        lies_in: Mapping[fx.Node, set[tuple[fx.Node, int]]],
    ):
        self.phases = phases
        self.lying: dict[tuple[fx.Node, int], list[fx.Node]] = {}
        for node in nodes:
            for root in lies_in[node]:
                self.lying.setdefault(root, []).append(node)
        self.gradients = {
            piece.gradient for node in nodes for piece in operands_of_updates(node)
        } | {node.args[0] for node in nodes if node.target is ops.gradient}

    def of(self, piece: Allocation) -> str:
        node, target = piece.node, piece.node.target
        lying = self.lying.get((node, piece.part), [node])
        if piece.own:
            return "temporaries" if target is ops.update else "staging"
        if target in (ops.all_gather_start, ops.resume_gather):
            return "gathered parameters"
        if target is ops.reload_start:
            return "activations"
        if target is ops.to_device_start or role(node) in ("gather_cast", "pack"):
            return "staging"
        if target in (ops.reduce_scatter_start, ops.all_reduce_start):
            return "gradients" if role(node) == "reduce_gradient" else "temporaries"
        if target in (ops.flatten_bucket, ops.gradient) or role(node) in _OF_GRADIENTS:
            return "gradients"
        if any(gradient_of(one) or one in self.gradients for one in lying):
            return "gradients"
        readers = {self.phases[reader] for one in lying for reader in one.users}
        if self.phases[node] == "recompute":
            return "activations"
        if self.phases[node] == "forward" and readers & {"backward", "recompute"}:
            return "activations"
        return "temporaries"


_OF_GRADIENTS = ("reduce_cast", "flatten", "reduced_gradient", "accumulate", "take_shard")


_OF_BACKWARD = ("flatten", "reduce_cast", "reduce_gradient", "accumulate")


def _phases(nodes: list[fx.Node]) -> dict[fx.Node, str]:
    """Forward, backward, what backward computes again, and the update with all it waits for.

    What reads gradients is the update's, up to the new values: a second forward may read those.
    """
    updates = (ops.update, ops.optimizer_step, *ops.HOST_UPDATES)
    phases: dict[fx.Node, str] = {}
    for node in nodes:
        if role(node) == "recompute":
            phases[node] = "recompute"
        elif node.target in updates or node.target is aten.copy_.default:
            phases[node] = "update"
        elif is_backward(node) or role(node) in _OF_BACKWARD:
            phases[node] = "backward"
        elif node.target is operator.getitem or node.target in ops.WAITS:
            phases[node] = phases[node.args[0]]
        elif any(
            phases[source] in ("backward", "update") and source.target not in updates
            for source in node.all_input_nodes
        ):
            phases[node] = "update"
        else:
            phases[node] = "forward"
    return phases


def _parameters(nodes: list[fx.Node], table: ParameterTable) -> dict[fx.Node, frozenset[int]]:
    """The parameters that a node is about: that it serves, is a gradient of, views or reads."""
    is_value: dict[fx.Node, frozenset[int]] = {}
    about: dict[fx.Node, frozenset[int]] = {}
    none: frozenset[int] = frozenset()
    for node in nodes:
        own = none
        if parameter_of(node) >= 0:
            own = frozenset({parameter_of(node)})
        elif bucket_of(node) >= 0:
            own = frozenset(info.index for info in table.bucket(bucket_of(node)))
        elif node.op == "placeholder" and input_role(node).parameter >= 0:
            own = frozenset({input_role(node).parameter})
        own = own or _gradient_of(node)
        views = aliased_inputs(node)
        is_value[node] = own if own else none.union(*(is_value[view] for view in views))
        about[node] = own or none.union(*(is_value[source] for source in node.all_input_nodes))
        if _gradient_of(node):
            about.update(dict.fromkeys(memory_of(node), own))
    return about


def _gradient_of(node: fx.Node) -> frozenset[int]:
    if node.target is ops.gradient:
        return frozenset({node.args[1]})
    for user in node.users:
        if user.target is ops.gradient:
            return frozenset({user.args[1]})
    return gradient_of(node)


def _inputs(nodes: list[fx.Node], count: int) -> list[Memory]:
    """What the step finds in memory and leaves there: parameters, gradients, the batch."""
    kinds = {"parameter": "parameters", "gradient": "gradients"}
    found = []
    for position, node in enumerate(nodes):
        if node.op != "placeholder" or not hinted_bytes(node):
            continue
        given = input_role(node)
        place = "host" if given.on_host else "device"
        kind = kinds.get(given.kind, "inputs")
        value = node.meta["val"]
        found.append(Memory(position, place, kind, 0, count - 1, hinted_bytes(node), _shape(value)))
    return found


def _states(
    nodes: list[fx.Node], table: ParameterTable, state_bytes: Mapping[tuple[int, int], float]
) -> list[Memory]:
    """What the optimizers keep of what a program updates; states in files while they are read."""
    filed = _filed(nodes)
    found = []
    seen: set[tuple[int, int]] = set()
    for position, node in enumerate(nodes):
        place = "host" if node.target in ops.HOST_UPDATES else "device"
        for parameter, numel in _updated(node, table):
            update = (node.args[2], parameter)
            nbytes = int(state_bytes.get(update, 0) * numel)
            if not nbytes or update in seen:
                continue
            seen.add(update)
            begin, end = filed.get(update, (0, len(nodes) - 1))
            value = f"{state_bytes[update]:g} bytes per element"
            found.append(Memory(position, place, "optimizer states", begin, end, nbytes, value))
    return found


def _filed(nodes: list[fx.Node]) -> dict[tuple[int, int], tuple[int, int]]:
    """From where to where states are in host memory that are kept in files."""
    order = {node: position for position, node in enumerate(nodes)}
    found = {}
    for node in nodes:
        if node.target is not ops.states_to_file:
            continue
        states, optimizer, parameters = node.args
        begins = order[states.args[0]] if states.target is ops.wait_file else order[states]
        found.update({(optimizer, index): (begins, order[node]) for index in parameters})
    return found


def _updated(node: fx.Node, table: ParameterTable) -> list[tuple[int, int]]:
    """Whose updates a node runs here, and of how many elements: (parameter, count)."""
    if node.target is ops.update:
        return [(node.args[3], value_bytes(node) // node.meta["val"].dtype.itemsize)]
    if node.target is ops.optimizer_step:
        return [(index, table[index].numel) for index in node.args[4]]
    return [(piece.parameter, table[piece.parameter].shard_numel)
            for piece in operands_of_updates(node)]  # fmt: skip


def _staging(nodes: list[fx.Node], order: dict[fx.Node, int]) -> list[Memory]:
    """What moves to the host write to, while it is in use there."""
    return [
        Memory(
            order[node],
            "host",
            "staging",
            order[node],
            staged_until(node, order),
            hinted_bytes(node),
            _shape(node.meta["val"]),
        )
        for node in nodes
        if node.target in ops.TO_HOST and hinted_bytes(node)
    ]


def _carried(node: fx.Node, lane: str, table: ParameterTable, world_size: int) -> int:
    """Bytes of what a node puts on a lane; 0 where that is not bytes."""
    if lane in ("to host", "to device"):
        return shared_bytes(node, table)
    if lane == "files":
        states = node.args[0] if node.target is ops.states_to_file else node
        return value_bytes(states)
    if lane != "link":
        return 0
    if node.target is ops.on_owners:
        return owned_bytes(node, world_size, table)
    is_gather = node.target in (ops.all_gather_start, ops.resume_gather)
    return value_bytes(node if is_gather else node.args[0])


def _part(piece: Allocation) -> Any:
    value = piece.node.meta.get("val")
    return value[piece.part] if isinstance(value, (tuple, list)) else value


def _why(node: fx.Node) -> str:
    origin = provenance(node)
    if origin is None:
        return ""
    return f"{origin.inserted_by}: {origin.reason}" if origin.reason else origin.inserted_by


def _line(node: fx.Node, known: dict[str, str]) -> str:
    stack = node.meta.get("stack_trace") or node.stack_trace or ""
    if stack not in known:
        known[stack] = source_line(node)
    return known[stack]


def _operator(node: fx.Node) -> str:
    if node.op == "placeholder":
        given = input_role(node)
        return f"{'shard of ' if given.sharded else ''}{given.kind}"
    if node.op != "call_function":
        return node.op
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target).removesuffix(".default")
    return "getitem" if node.target is operator.getitem else str(node.target)


def _shape(value: Any) -> str:
    """``bf16[8, 512]``, of the sizes there were when it was captured; empty for no tensor."""
    if isinstance(value, (tuple, list)):
        return ", ".join(filter(None, map(_shape, value)))
    if not isinstance(value, torch.Tensor):
        return ""
    dtype = _SHORT.get(value.dtype, str(value.dtype).removeprefix("torch."))
    return f"{dtype}[{', '.join(str(compat.size_hint(size)) for size in value.shape)}]"
