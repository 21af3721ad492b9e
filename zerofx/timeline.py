"""When things happen in a program, as predicted: compute on one stream, the link on another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from zerofx import ops
from zerofx.cost import host_update_s, owned_bytes, seconds
from zerofx.figures import Figures
from zerofx.graph import hinted_bytes, role, value_bytes
from zerofx.plan import ParameterTable, shard_numel


@dataclass(frozen=True)
class Transfer:
    """One collective or move: how long it travels, and for how long its wait makes ranks idle."""

    seconds: float
    exposed_s: float

    @property
    def is_hidden(self) -> bool:
        return self.exposed_s <= 0.01 * self.seconds

    def __str__(self) -> str:
        if not self.seconds:
            return "no transfer"
        words = f"{milliseconds(self.seconds)} of transfer"
        if self.is_hidden:
            return f"{words}, hidden behind compute"
        if self.exposed_s >= 0.99 * self.seconds:
            return f"{words}, exposed"
        return f"{words}, {milliseconds(self.exposed_s)} of it exposed"


@dataclass(frozen=True)
class Timeline:
    """A program's predicted seconds.  ``transfers`` are by the node that starts each.

    ``exposed_s`` is how long a rank has nothing to do but to wait.
    """

    compute_s: float
    exposed_s: float
    transfers: Mapping[fx.Node, Transfer]

    @property
    def transfer_s(self) -> float:
        return sum(transfer.seconds for transfer in self.transfers.values())

    def __str__(self) -> str:
        return (
            f"{milliseconds(self.compute_s)} of compute, {milliseconds(self.transfer_s)} of "
            f"transfers, {milliseconds(self.exposed_s)} of them exposed"
        )


def predict(graph: fx.Graph, figures: Figures, table: ParameterTable, world_size: int) -> Timeline:
    """Run the program on clocks: a collective waits for the link, a ``wait`` for it.

    The link carries one collective at a time, in the order of starts.  Without overlap it begins
    at the wait.  What the call before has carried over has arrived, and what this one carries
    over is waited for by the next.  Copies to and from the host have a lane of their own each way.
    So have updates on the host.
    """
    compute_s = link_s = idle_s = updated_s = 0.0
    copied_s = {True: 0.0, False: 0.0}  # to the device, and from it
    done: dict[fx.Node, float] = {}
    transfers: dict[fx.Node, Transfer] = {}
    for node in graph.nodes:
        now = compute_s + idle_s
        if node.target in ops.STARTS:
            travels_s = (
                0.0 if node.target is ops.resume_gather else transfer_s(node, figures, world_size)
            )
            transfers[node] = Transfer(travels_s, 0.0)
            if figures.overlaps:
                link_s = done[node] = max(link_s, now) + travels_s
        elif ops.is_move(node.target):
            travels_s = shared_bytes(node, table) / figures.copy_bytes_per_s
            transfers[node] = Transfer(travels_s, 0.0)
            lane = node.target in ops.TO_DEVICE
            copied_s[lane] = done[node] = max(copied_s[lane], now) + travels_s
        elif node.target in ops.HOST_UPDATES:
            updates_s = host_update_s(node, figures, table)
            transfers[node] = Transfer(updates_s, 0.0)
            updated_s = done[node] = max(updated_s, now) + updates_s
        elif node.target in (*ops.MOVE_WAITS, ops.wait_update):
            start = node.args[0]
            late_s = max(done[start] - now, 0.0)
            travels_s = transfers[start].seconds
            transfers[start] = Transfer(travels_s, min(late_s, travels_s))
            idle_s += late_s
        elif node.target is ops.wait:
            start = node.args[0]
            travels_s = transfers[start].seconds
            late_s = max(done[start] - now, 0.0) if figures.overlaps else travels_s
            # The rest is spent on transfers before it, which nobody has waited for yet.
            transfers[start] = Transfer(travels_s, min(late_s, travels_s))
            idle_s += late_s
        elif node.target is ops.on_owners:
            share = owned_bytes(node, world_size, table)
            travels_s = 2 * figures.transfer_s(share, world_size)
            transfers[node] = Transfer(travels_s, travels_s)
            compute_s += seconds(node, figures, table)
            idle_s += travels_s
        else:
            compute_s += seconds(node, figures, table)
    return Timeline(compute_s, idle_s, transfers)


def shared_bytes(move: fx.Node, table: ParameterTable) -> int:
    """Bytes of a move of equal shares: ranks predict alike, whose shards differ in length."""
    if move.target in ops.ACTIVATION_MOVES:
        return hinted_bytes(move)
    itemsize = move.args[0][0].meta["val"].dtype.itemsize
    return sum(shard_numel(table[i].numel, table[i].world_size) * itemsize for i in move.args[1])


def transfer_s(start: fx.Node, figures: Figures, world_size: int) -> float:
    """How long a collective travels by itself, from the buffer that its ranks make of it."""
    if start.target in (ops.all_gather_start, ops.resume_gather):
        return figures.transfer_s(value_bytes(start), world_size)
    nbytes = value_bytes(start.args[0])
    if start.target is ops.all_reduce_start and role(start) == "reduce_gradient":
        nbytes *= 2
    return figures.transfer_s(nbytes, world_size)


def milliseconds(value: float) -> str:
    return f"{value * 1e3:.3g} ms"
