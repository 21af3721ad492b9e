"""Start gathers, and the moves before them, within a memory budget: early enough to be hidden."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from torch import fx

from zerofx.cost.program import seconds
from zerofx.cost.timeline import predict, transfer_s
from zerofx.ir import ops
from zerofx.ir.graph import program_order
from zerofx.ir.offload import copies_to_device
from zerofx.ir.reach import reached
from zerofx.ir.roles import Role, bucket_of, parameter_of, provenance, role
from zerofx.ir.sizes import value_bytes
from zerofx.ir.wire_graph import frees_of
from zerofx.passes.base import PassContext
from zerofx.passes.memory.decisions import bytes_alive

MARGIN = 2.0
"""The time that a transfer is given, in its own durations.

Predicted compute is of operators one by one, which a compiler fuses, and nothing else has a use
for memory that is left over.
"""


ENOUGH = "as late as hides it"

PREPARING = (
    *(Role.GATHER_CAST, Role.PACK, Role.GATHER_SHARD, Role.QUANTIZED),
    *(Role.SHARD_ON_DEVICE, Role.SHARD_TO_DEVICE),
)
"""The roles of what stands between a shard and its gather."""


def chain_of(wait: fx.Node) -> list[fx.Node]:
    """The start of a gather and what prepares its input, last node first.

    What several gathers read is prepared for the first of them.
    """

    def prepared_by(node: fx.Node) -> list[fx.Node]:
        return [
            operand
            for operand in node.all_input_nodes
            if role(operand) in PREPARING and min(operand.users) is node
        ]

    return sorted(reached([wait.args[0]], prepared_by), reverse=True)


class _Fixed:
    """A program without what will be moved: its nodes, and the bytes and the seconds of each.

    The bytes are those with all that is moved at its wait, and grow as it is placed.
    """

    def __init__(self, graph: fx.Graph, ctx: PassContext, moved: Collection[fx.Node]) -> None:
        alive = bytes_alive(graph, ctx)
        self.nodes = [node for node in graph.nodes if node not in moved]
        self.position = {node: index for index, node in enumerate(self.nodes)}
        order = program_order(graph)
        self.alive = [alive[order[node]] for node in self.nodes]
        self.seconds = [seconds(node, ctx.figures, ctx.table) for node in self.nodes]
        inputs = [at for node, at in self.position.items() if node.op == "placeholder"]
        self.last_input = max(inputs, default=0)
        self.communicating = [at for node, at in self.position.items() if _communicates(node)]

    def in_time(
        self, stop: int, lowest: int, needed_s: float, travels: Sequence[float] = ()
    ) -> int:
        """After which node to start, for ``needed_s`` of compute until ``stop``.

        ``travels`` is what more is needed for each node that is passed.
        """
        at, passed_s = stop, 0.0
        while at > lowest and passed_s < needed_s:
            passed_s += self.seconds[at]
            needed_s += travels[at] if travels else 0.0
            at -= 1
        return at

    def fit(self, stop: int, lowest: int, nbytes: int, budget: int) -> int:
        """After which node to start, as early as ``budget`` allows; counts the bytes from there."""
        at = stop
        while at > lowest and self.alive[at] + nbytes <= budget:
            at -= 1
        for index in range(at + 1, stop + 1):
            self.alive[index] += nbytes
        return at


def start_behind(anchors: Iterable[tuple[Sequence[fx.Node], fx.Node]]) -> None:
    """Move nodes, of each list the last first, behind a node and what has been moved there."""
    last_behind: dict[fx.Node, fx.Node] = {}
    for chain, anchor in anchors:
        for node in reversed(chain):
            last_behind.get(anchor, anchor).append(node)
            last_behind[anchor] = node


def starts_within_budget(
    graph: fx.Graph, ctx: PassContext, waits: Sequence[fx.Node], budget: int
) -> dict[str, tuple[str, str]]:
    """Return behind which node each gather is to start, and why, by its wait: all by name.

    A gather starts when the compute until its wait takes ``MARGIN`` times as long as what the link
    has to carry until then, or where ``budget`` bytes, the collective before it or its input allow.
    How early may differ between ranks, whose batches may; the order of collectives does not.
    Source: DeepCompile, Tanaka et al. 2025, "proactive prefetching".
    """
    chains = {wait: chain_of(wait) for wait in waits}
    fixed = _Fixed(graph, ctx, set(itertools.chain.from_iterable(chains.values())))
    earliest = {wait: _earliest(wait, chains, waits, fixed) for wait in waits}
    wanted = _wanted(ctx, waits, earliest, fixed)
    starts: dict[str, tuple[str, str]] = {}
    at = -1
    for wait in waits:
        lowest = max(wanted[wait], at)
        at = fixed.fit(fixed.position[wait] - 1, lowest, bytes_of(chains[wait]), budget)
        if at > lowest:
            why = "as early as memory_budget allows"
        elif at == wanted[wait]:
            why = "as soon as it can be" if earliest[wait] == wanted[wait] else ENOUGH
        else:
            why = "behind the start before it"
        starts[wait.name] = fixed.nodes[at].name, why
    return starts


def bytes_of(chain: Sequence[fx.Node]) -> int:
    """Return what a gather and what prepares its input take on the device.  Units: bytes."""
    made = (node for node in chain if role(node) not in _VIEWING and not ops.is_wait(node))
    return sum(map(value_bytes, made))


# Nodes of a chain whose memory exists anyway: shards, and what has arrived.
_VIEWING = (Role.PACK, Role.SHARD_ON_DEVICE)


def _earliest(
    wait: fx.Node, chains: dict[fx.Node, list[fx.Node]], waits: Sequence[fx.Node], fixed: _Fixed
) -> int:
    """After which node a gather can start: its values are there, and what it repeats is gone."""
    position = fixed.position
    # A wire that another gather prepares is there when what that has gathered is freed.
    needed = [node for node in chains[wait][-1].all_input_nodes if node in position]
    serves = parameter_of(wait), bucket_of(wait)
    for other in waits[: waits.index(wait)]:
        if (parameter_of(other), bucket_of(other)) == serves:
            needed += frees_of(other)
    # Never across another collective: the ranks' batches, and with them the times and the bytes
    # looked at here, may differ, and the order of collectives must not.
    others = fixed.communicating[: bisect_left(fixed.communicating, position[wait])]
    return max([fixed.last_input, *others[-1:], *(position[node] for node in needed)])


def _communicates(node: fx.Node) -> bool:
    """Return whether ranks do something together here; an all-reduce may have a second half."""
    ends_all_reduce = node.target is ops.wait and node.args[0].target is ops.all_reduce_start
    return ops.is_collective(node) or ends_all_reduce


def _wanted(
    ctx: PassContext, waits: Sequence[fx.Node], earliest: dict[fx.Node, int], fixed: _Fixed
) -> dict[fx.Node, int]:
    """After which node each gather would start if there were memory enough; the last one first."""
    figures, ranks = ctx.figures, ctx.world_size
    travels = [
        transfer_s(node, figures, ranks) if ops.is_collective(node) else 0.0 for node in fixed.nodes
    ]
    wanted: dict[fx.Node, int] = {}
    following = len(fixed.nodes)
    for wait in reversed(waits):
        # From when on the link is the next gather's, this one should have arrived.
        stop = min(fixed.position[wait] - 1, following)
        needed_s = MARGIN * transfer_s(wait.args[0], figures, ranks)
        at = fixed.in_time(stop, earliest[wait], needed_s, travels)
        wanted[wait] = following = max(at, earliest[wait])
    return wanted


def start_moves_ahead(graph: fx.Graph, ctx: PassContext, waits: Sequence[fx.Node]) -> None:
    """Start the copy of what is gathered next when a gather has started.

    With all gathers one ahead, one bucket is being used while the next one is gathered and the
    one after it is copied from the host::

        start = zerofx.all_gather_start(...)
        move = zerofx.copy_start([q], [1], "cuda")
        y = mm(x, w)
        w = zerofx.wait(start);  start_1 = zerofx.all_gather_start(zerofx.wait(move)[0:n], 2)

    With a ``memory_budget`` it starts when the compute until its wait takes ``MARGIN`` times as
    long as copies that are under way, or where the budget allows.  What one rank copies when is
    its own affair.
    """
    ordered = sorted(waits, key=lambda wait: wait.args[0])
    first_of = {wait.args[0]: chain_of(wait)[-1] for wait in ordered}
    if ctx.options.memory_budget is not None:
        moves = list(filter(copies_to_device, first_of.values()))
        _start_moves_within(ctx.options.memory_budget, _Fixed(graph, ctx, moves), ctx, moves)
        return
    for before, start in itertools.pairwise(first_of):
        move = first_of[start]
        anchor = max([before, *move.all_input_nodes])
        if copies_to_device(move) and anchor < move:
            anchor.append(move)


def _start_moves_within(
    budget: int, fixed: _Fixed, ctx: PassContext, moves: Sequence[fx.Node]
) -> None:
    at, anchors = fixed.last_input, []
    for move in moves:
        (wait,) = move.users
        stop = fixed.position[wait] - 1
        lowest = max([at, *(fixed.position[operand] for operand in move.all_input_nodes)])
        copy_s = ops.rules(move).carries(move, ctx.table) / ctx.figures.copy_bytes_per_s
        lowest = fixed.in_time(stop, lowest, MARGIN * copy_s)
        at = fixed.fit(stop, lowest, value_bytes(move), budget)
        anchors.append(([move], fixed.nodes[at]))
    start_behind(anchors)


def explain_transfers(
    graph: fx.Graph,
    ctx: PassContext,
    why: Mapping[fx.Node, str],
    concerns: Callable[[fx.Node], bool] = lambda start: True,
) -> None:
    """Note with each transfer what it is predicted to take, and why it starts where it does."""
    transfers = predict(graph, ctx.figures, ctx.table, ctx.world_size).transfers
    for start, transfer in transfers.items():
        origin = provenance(start)
        if origin is None or not concerns(start):
            continue
        words = [origin.reason, str(transfer)]
        if start in why:
            late = why[start] == ENOUGH and not transfer.is_hidden
            words.append(f"starts {'behind transfers that are late' if late else why[start]}")
        start.meta["zerofx"] = replace(origin, reason="; ".join(filter(None, words)))
