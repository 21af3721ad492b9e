"""Start the moves of shards that are kept in host memory: one gather ahead, or in time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import fx

from zerofx.cost.program import live_bytes, seconds
from zerofx.ir import ops
from zerofx.ir.graph import program_order
from zerofx.ir.offload import copies_to_device
from zerofx.ir.sizes import value_bytes
from zerofx.passes.base import PassContext
from zerofx.passes.schedule.start_times import MARGIN, chain_of


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
    started = [wait.args[0] for wait in sorted(waits, key=lambda wait: wait.args[0])]
    moves = {start: _move_of(start.users) for start in started}
    if ctx.options.memory_budget is None:
        for before, start in itertools.pairwise(started):
            move = moves[start]
            if move is not None:
                anchor = max([before, *move.all_input_nodes])
                if anchor < move:
                    anchor.append(move)
        return
    _start_within_budget(graph, ctx, [move for move in moves.values() if move is not None])


def _move_of(waits) -> fx.Node | None:
    """The move that brings what a gather puts together; None if it is on the device."""
    (wait,) = waits
    first = chain_of(wait)[-1]
    return first if copies_to_device(first) else None


def _start_within_budget(graph: fx.Graph, ctx: PassContext, moves: list[fx.Node]) -> None:
    budget = ctx.options.memory_budget
    assert budget is not None
    order = program_order(graph)
    everything = live_bytes(
        graph, ctx.world_size, sockets=not ctx.options.peer_memory, table=ctx.table
    )
    fixed = [node for node in graph.nodes if node not in moves]
    position = {node: index for index, node in enumerate(fixed)}
    alive = [everything[order[node]] for node in fixed]
    computes = [seconds(node, ctx.figures, ctx.table) for node in fixed]
    copies = {
        move: ops.rules(move).carries(move, ctx.table) / ctx.figures.copy_bytes_per_s
        for move in moves
    }
    last_input = max((position[n] for n in fixed if n.op == "placeholder"), default=0)
    before = last_input
    anchors: dict[int, fx.Node] = {}
    for move in moves:
        (wait,) = move.users
        stop = at = position[wait] - 1
        lowest = max([before, *(position[operand] for operand in move.all_input_nodes)])
        passed, needed = 0.0, MARGIN * copies[move]
        while at > lowest and passed < needed and alive[at] + value_bytes(move) <= budget:
            passed += computes[at]
            at -= 1
        for index in range(at + 1, stop + 1):
            alive[index] += value_bytes(move)
        anchors.get(at, fixed[at]).append(move)
        anchors[at], before = move, at
