"""Start gathers within a memory budget: early enough to be hidden, if that fits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import fx

from zerofx.cost.program import live_bytes, seconds
from zerofx.cost.timeline import transfer_s
from zerofx.ir import ops
from zerofx.ir.aliases import aliases
from zerofx.ir.graph import program_order
from zerofx.ir.roles import Role, bucket_of, parameter_of, role
from zerofx.ir.sizes import value_bytes
from zerofx.passes.base import PassContext

MARGIN = 2.0
"""The time that a gather is given, in its own durations.

Predicted compute is of operators one by one, which a compiler fuses, and nothing else has a use
for memory that is left over.
"""


ENOUGH = "as late as hides it"

PREPARING = (Role.GATHER_CAST, Role.PACK, Role.SHARD_ON_DEVICE, Role.SHARD_TO_DEVICE)
"""The roles of what stands between a shard and its gather."""


def chain_of(wait: fx.Node) -> list[fx.Node]:
    """The start of a gather and what prepares its input, last node first."""
    chain, pending = {wait.args[0]}, [wait.args[0]]
    while pending:
        for operand in pending.pop().all_input_nodes:
            if role(operand) in PREPARING and operand not in chain:
                chain.add(operand)
                pending.append(operand)
    return sorted(chain, reverse=True)


def start_within_budget(
    graph: fx.Graph, ctx: PassContext, waits: Sequence[fx.Node], budget: int
) -> dict[fx.Node, str]:
    """Move each gather's start up from its wait; return why each stands where it does, by wait.

    A gather starts when the compute until its wait takes ``MARGIN`` times as long as what the link
    has to carry until then, or where ``budget`` bytes, the collective before it or its input allow.
    How early may differ between ranks, whose batches may; the order of collectives does not.
    Source: DeepCompile, Tanaka et al. 2025, "proactive prefetching".
    """
    chains = {wait: chain_of(wait) for wait in waits}
    moved = set(itertools.chain.from_iterable(chains.values()))
    fixed = [node for node in graph.nodes if node not in moved]
    position = {node: index for index, node in enumerate(fixed)}
    alive = _alive(graph, ctx, waits, fixed)
    earliest = {wait: _earliest(wait, chains, waits, position) for wait in waits}
    wanted = _wanted(ctx, waits, earliest, fixed, position)
    why: dict[fx.Node, str] = {}
    before, anchor = -1, None
    for wait in waits:
        start = chains[wait][0]
        extra = sum(map(value_bytes, chains[wait])) - _viewed_bytes(chains[wait])
        at = stop = position[wait] - 1
        lowest = max(wanted[wait], before)
        while at > lowest and alive[at] + extra <= budget:
            at -= 1
        for index in range(at + 1, stop + 1):
            alive[index] += extra
        if at > lowest:
            why[wait] = "as early as memory_budget allows"
        elif at == wanted[wait]:
            ready = earliest[wait] == wanted[wait]
            why[wait] = "as soon as it can be" if ready else ENOUGH
        else:
            why[wait] = "behind the start before it"
        anchor = anchor if at == before and anchor is not None else fixed[at]
        for node in reversed(chains[wait]):
            anchor.append(node)
            anchor = node
        assert anchor is start
        before = at
    return why


def _alive(
    graph: fx.Graph, ctx: PassContext, waits: Sequence[fx.Node], fixed: list[fx.Node]
) -> list[int]:
    """Return the bytes at each fixed node with every gather at its wait."""
    alive = live_bytes(graph, ctx.world_size, sockets=not ctx.options.peer_memory, table=ctx.table)
    order = program_order(graph)
    return [alive[order[node]] for node in fixed]


def _viewed_bytes(chain: list[fx.Node]) -> int:
    """Return the part of a chain whose memory exists anyway: shards, and what has arrived."""
    return sum(
        value_bytes(node) for node in chain if role(node) in (Role.PACK, Role.SHARD_ON_DEVICE)
    )


def _earliest(
    wait: fx.Node,
    chains: dict[fx.Node, list[fx.Node]],
    waits: Sequence[fx.Node],
    position: dict[fx.Node, int],
) -> int:
    """After which node a gather can start: its values are there, and what it repeats is gone."""
    needed = list(chains[wait][-1].all_input_nodes)
    serves = parameter_of(wait), bucket_of(wait)
    for other in waits[: waits.index(wait)]:
        if (parameter_of(other), bucket_of(other)) == serves:
            needed += [
                user for alias in aliases(other) for user in alias.users if user.target is ops.free
            ]
    inputs = [node for node in position if node.op == "placeholder"]
    # Never across another collective: the ranks' batches, and with them the times and the bytes
    # looked at here, may differ, and the order of collectives must not.
    others = [n for n in position if _communicates(n) and position[n] < position[wait]]
    return max(position[node] for node in (*needed, *inputs[-1:], *others[-1:]))


def _communicates(node: fx.Node) -> bool:
    """Return whether ranks do something together here; an all-reduce may have a second half."""
    ends_all_reduce = node.target is ops.wait and node.args[0].target is ops.all_reduce_start
    return ops.is_collective(node) or ends_all_reduce


def _wanted(
    ctx: PassContext,
    waits: Sequence[fx.Node],
    earliest: dict[fx.Node, int],
    fixed: list[fx.Node],
    position: dict[fx.Node, int],
) -> dict[fx.Node, int]:
    """After which node each gather would start if there were memory enough; the last one first."""
    figures, ranks = ctx.figures, ctx.world_size
    computes = [seconds(node, figures, ctx.table) for node in fixed]
    travels = [
        transfer_s(node, figures, ranks) if ops.is_collective(node) else 0.0 for node in fixed
    ]
    wanted: dict[fx.Node, int] = {}
    following = len(fixed)
    for wait in reversed(waits):
        # From when on the link is the next gather's, this one should have arrived.
        at = min(position[wait] - 1, following)
        needed = MARGIN * transfer_s(wait.args[0], figures, ranks)
        passed = 0.0
        while passed < needed and at > earliest[wait]:
            passed += computes[at]
            needed += travels[at]
            at -= 1
        wanted[wait] = following = max(at, earliest[wait])
    return wanted
