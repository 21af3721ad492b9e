"""A program's memory by kind: parameters, gradients, activations and so on, node by node."""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from zerofx.cost.program import Allocation, Own, Rehearsal, allocations, bytes_by_owner
from zerofx.ir import ops
from zerofx.ir.aliases import aliased_inputs, memory_of
from zerofx.ir.graph import is_backward, is_owned, updated_by
from zerofx.ir.interface import gradient_of, input_role
from zerofx.ir.mesh import EVERY_RANK
from zerofx.ir.offload import is_staged, operands_of_updates, staged_until
from zerofx.ir.parameters import ParameterTable
from zerofx.ir.roles import Role, bucket_of, parameter_of, role
from zerofx.ir.sizes import hinted_bytes, value_bytes

aten = torch.ops.aten

LOWERED_BY = {
    "parameters": "stage 3 keeps a shard of them, and offload=params keeps that in host memory",
    "optimizer states": "stage 1 keeps a shard of them, and offload=optimizer keeps that in host "
    "memory",
    "errors of wires": "error_feedback keeps a float32 for each element that an axis reduces",
    "inputs": "a smaller batch lowers them",
    "gathered parameters": "a memory_budget or smaller bucket_bytes gathers less at once",
    "gradients": "stage 2 keeps a shard of them, and update_in_backward frees each one early",
    "activations": "recompute with a memory_budget, offload=activations or a smaller batch lowers "
    "them",
    "temporaries": "a smaller batch lowers them, or a loss that is computed in pieces",
    "staging": "smaller bucket_bytes lower it",
}
"""Advice on lowering each kind of memory on the device, from the bottom of the stack to its top."""

KINDS = {"device": tuple(LOWERED_BY), "host": ("parameters", "optimizer states", "staging")}
"""Kinds of memory by place; on the host are those of what leaves the device."""


class Piece(NamedTuple):
    """Bytes that are in memory while the nodes from ``begin`` to ``end`` run, both included.

    ``node`` makes them; ``place`` is ``device`` or ``host``; ``value`` is the tensor in them, or
    what else they are.
    """

    node: fx.Node
    place: str
    kind: str
    begin: int
    end: int
    nbytes: int
    value: Any


def pieces_of(
    graph: fx.Graph,
    table: ParameterTable,
    world_size: int,
    ignored: Collection[fx.Node] = (),
    *,
    sockets: bool = False,
    state_bytes: Mapping[tuple[int, int], float] | None = None,
    largest: bool = False,
    own: Mapping[fx.Node, Own] | None = None,
    rehearsals: Sequence[Rehearsal] = (),
) -> list[Piece]:
    """List everything that a program has in memory on one rank.

    ``state_bytes`` is what the optimizers keep per element, by (optimizer, parameter); states that
    are not in it are left out.  ``sockets`` counts the buffers that reductions on a CPU receive
    into.  ``ignored`` nodes allocate no result.  ``largest`` counts updates as on the rank whose
    shard is largest, ``own`` what operators allocate for themselves; nodes of ``rehearsals``
    allocate what these say.  No guard is added on a symbolic size.
    """
    nodes = list(graph.nodes)
    found = allocations(
        graph,
        world_size,
        ignored,
        sockets=sockets,
        table=table if largest else None,
        own=own,
        rehearsals=rehearsals,
    )
    allocated = _allocated(nodes, *found)
    states = _states(nodes, table, state_bytes or {}, largest)
    return [*_inputs(nodes), *_kept(nodes, table), *states, *allocated, *_staging(nodes)]


def alive(pieces: Iterable[Piece], count: int, place: str = "device") -> dict[str, list[int]]:
    """Return the bytes of each kind while each of ``count`` nodes runs, without unused kinds."""
    changes = {kind: [0] * (count + 1) for kind in KINDS[place]}
    for piece in pieces:
        if piece.place == place:
            changes[piece.kind][piece.begin] += piece.nbytes
            changes[piece.kind][piece.end + 1] -= piece.nbytes
    columns = {kind: list(itertools.accumulate(of[:count])) for kind, of in changes.items()}
    return {kind: column for kind, column in columns.items() if any(column)}


def phases_of(nodes: Iterable[fx.Node]) -> dict[fx.Node, str]:
    """Tell forward, backward, what backward computes again, and the update.

    What reads gradients belongs to the update, up to the new values: a second forward may read
    those.
    """
    phases: dict[fx.Node, str] = {}
    for node in nodes:
        if role(node) == Role.RECOMPUTE:
            phases[node] = "recompute"
        elif updated_by(node) or node.target is aten.copy_.default:
            phases[node] = "update"
        elif is_backward(node) or role(node) in _OF_BACKWARD:
            phases[node] = "backward"
        elif node.target is operator.getitem or ops.is_wait(node):
            phases[node] = phases[node.args[0]]
        elif any(
            phases[source] in ("backward", "update") and not updated_by(source)
            for source in node.all_input_nodes
        ):
            phases[node] = "update"
        else:
            phases[node] = "forward"
    return phases


_OF_BACKWARD = (
    *(Role.FLATTEN, Role.REDUCE_CAST, Role.GRADIENT_WIRE, Role.REDUCE_GRADIENT),
    *(Role.ACCUMULATE, Role.ROUNDING_ERROR, Role.KEPT_ERROR),
)
_OF_GRADIENTS = (
    Role.REDUCE_CAST,
    Role.FLATTEN,
    Role.REDUCED_GRADIENT,
    Role.ACCUMULATE,
    Role.TAKE_SHARD,
)


def parameters_of(nodes: Iterable[fx.Node], table: ParameterTable) -> dict[fx.Node, frozenset[int]]:
    """Return the parameters, by index, that each node serves, is a gradient of, views or reads."""
    is_value: dict[fx.Node, frozenset[int]] = {}
    about: dict[fx.Node, frozenset[int]] = {}
    none: frozenset[int] = frozenset()
    for node in nodes:
        own = _gradient_of(node)
        if parameter_of(node) >= 0:
            own = frozenset({parameter_of(node)})
        elif bucket_of(node) >= 0:
            own = frozenset(info.index for info in table.bucket(bucket_of(node)))
        elif node.op == "placeholder" and input_role(node).parameter >= 0:
            own = frozenset({input_role(node).parameter})
        is_value[node] = own or none.union(*(is_value[view] for view in aliased_inputs(node)))
        about[node] = own or none.union(*(is_value[source] for source in node.all_input_nodes))
        if _gradient_of(node):
            about.update(dict.fromkeys(memory_of(node), own))
    return about


def _gradient_of(node: fx.Node) -> frozenset[int]:
    if node.target is ops.gradient:
        return frozenset({node.args[1]})
    marks = [user.args[1] for user in node.users if user.target is ops.gradient]
    return frozenset(marks[:1]) or gradient_of(node)


def _allocated(
    nodes: Sequence[fx.Node],
    allocated: Iterable[Allocation],
    lies_in: Mapping[fx.Node, set[tuple[fx.Node, int]]],
) -> Iterator[Piece]:
    """Yield what nodes allocate; its kind is told by what lies in it and what reads that."""
    phases = phases_of(nodes)
    lying: dict[tuple[fx.Node, int], list[fx.Node]] = defaultdict(list)
    for node in nodes:
        for root in lies_in[node]:
            lying[root].append(node)
    gradients = {node.args[0] for node in nodes if node.target is ops.gradient}
    gradients |= {piece.gradient for node in nodes for piece in operands_of_updates(node)}

    def kind_of(node: fx.Node, part: int, own: bool) -> str:
        if own:
            return "staging" if ops.is_collective(node) else "temporaries"
        if kind := ops.holds(node):
            return kind
        if role(node) in (Role.GATHER_CAST, Role.PACK):
            return "staging"
        there = lying.get((node, part), [node])
        if role(node) in _OF_GRADIENTS or any(gradient_of(n) or n in gradients for n in there):
            return "gradients"
        saved = {"backward", "recompute"} & {phases[reader] for n in there for reader in n.users}
        if phases[node] == "recompute" or phases[node] == "forward" and saved:
            return "activations"
        return "temporaries"

    for node, part, begin, end, nbytes, own in allocated:
        if nbytes:
            value = None if own else node.meta.get("val")
            value = value[part] if isinstance(value, tuple | list) else value
            yield Piece(node, "device", kind_of(node, part, own), begin, end, nbytes, value)


def _inputs(nodes: Sequence[fx.Node]) -> Iterator[Piece]:
    """Yield what is in memory before and after the step: parameters, gradients, the batch."""
    kinds = {"parameter": "parameters", "gradient": "gradients"}
    for node in nodes:
        if node.op == "placeholder" and hinted_bytes(node):
            given = input_role(node)
            place = "host" if given.on_host else "device"
            kind, end = kinds.get(given.kind, "inputs"), len(nodes) - 1
            yield Piece(node, place, kind, 0, end, hinted_bytes(node), node.meta["val"])


def _kept(nodes: Sequence[fx.Node], table: ParameterTable) -> Iterator[Piece]:
    """Yield what is no input, and in memory between steps: second shards, what wires have lost."""
    for kind, found in (("parameters", refills(nodes)), ("errors of wires", errors(nodes, table))):
        for node in found:
            value = node.meta["val"]
            yield Piece(node, "device", kind, 0, len(nodes) - 1, hinted_bytes(node), value)


def refills(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Return a node for each second shard: the last that fills it."""
    of = {tuple(node.args[1]): node for node in nodes if node.target is ops.refill_start}
    return [*of.values()]


def errors(nodes: Iterable[fx.Node], table: ParameterTable) -> list[fx.Node]:
    """Return a node for each error that is kept: the last whose result is as large."""
    of = {}
    for node in nodes:
        if node.target is ops.correct:
            of[table[node.args[1][0]].place.bucket, ops.argument(node, "axis")] = node
    return [*of.values()]


def _states(
    nodes: Sequence[fx.Node],
    table: ParameterTable,
    state_bytes: Mapping[tuple[int, int], float],
    largest: bool,
) -> Iterator[Piece]:
    """Yield the optimizers' states; those in files count while they are in host memory.

    Of owners those of this rank, or of the one that has the ``largest`` part.
    """
    filed = _filed(nodes)
    found: set[tuple[int, int]] = set()
    for node in nodes:
        place = "host" if ops.updates_on_host(node) else "device"
        for parameter, numel in _updated(node, table, largest):
            update = (node.args[2], parameter)
            nbytes = int(state_bytes.get(update, 0) * numel)
            if nbytes and update not in found:
                found.add(update)
                span = filed.get(update, (0, len(nodes) - 1))
                value = f"{state_bytes[update]:g} bytes per element"
                yield Piece(node, place, "optimizer states", *span, nbytes, value)


def _filed(nodes: Sequence[fx.Node]) -> dict[tuple[int, int], tuple[int, int]]:
    """Return, by update, the positions between which states of files are in host memory."""
    order = {node: position for position, node in enumerate(nodes)}
    found = {}
    for node in nodes:
        if node.target is ops.evict and node.args[1] == "states":
            there, _, parameters, optimizer, *_ = node.args
            begins = order[there.args[0] if ops.is_wait(there) else there]
            found.update({(optimizer, index): (begins, order[node]) for index in parameters})
    return found


def _updated(node: fx.Node, table: ParameterTable, largest: bool) -> list[tuple[int, int]]:
    """Return the parameters that a node updates, each with the number of elements."""
    if node.target is ops.on_owners and ops.argument(node, "own_step"):
        owned = bytes_by_owner(node, table)
        at_most = max(owned, key=owned.__getitem__)
        pairs = [(table[index], owner) for index, owner in zip(*node.args[3:5], strict=True)]
        return [
            (info.index, info.numel)
            for info, owner in pairs
            if owner in (EVERY_RANK, at_most if largest else info.rank)
        ]
    if node.target is ops.update and is_owned(node) and _follows_own_step(node):
        return []
    if node.target is ops.update:
        return [(node.args[3], value_bytes(node) // node.meta["val"].dtype.itemsize)]
    if node.target is ops.optimizer_step:
        return [(index, table[index].numel) for index in node.args[4]]
    pieces = operands_of_updates(node)
    return [(piece.parameter, table[piece.parameter].shard_numel) for piece in pieces]


def _follows_own_step(update: fx.Node) -> bool:
    direction = update.args[1]
    return ops.argument(direction.args[0], "own_step")


def _staging(nodes: Sequence[fx.Node]) -> Iterator[Piece]:
    """Yield the host memory that moves to the host write to, while it is in use."""
    order = {node: position for position, node in enumerate(nodes)}
    for node in nodes:
        if is_staged(node) and (nbytes := hinted_bytes(node)):
            span = order[node], order[staged_until(node)]
            yield Piece(node, "host", "staging", *span, nbytes, node.meta["val"])
