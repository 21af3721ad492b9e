"""Traffic, read off a program's nodes: bytes on the wire, gathered, and moved to the host."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import fx

from zerofx.cost.program import journeys, owned_bytes
from zerofx.ir import ops
from zerofx.ir.interface import recorded
from zerofx.ir.mesh import DATA, NUMBERS_TOGETHER
from zerofx.ir.offload import copies_activation, is_staged, staging_bytes
from zerofx.ir.parameters import ParameterTable
from zerofx.ir.roles import Role, role, served
from zerofx.ir.rules import TO_DEVICE, TO_HOST
from zerofx.ir.sizes import hinted_bytes, value_bytes


@dataclass(frozen=True)
class WireBytes:
    """Bytes that each rank sends in one step.

    ``gathers`` and ``reductions`` are of parameters and gradients, (N-1)/N of each padded
    buffer, twice that for an all-reduce; ``scalars`` are norms and flags.  ``exchanges`` is what
    travels to owners and back, at most and shared out evenly: they may send a narrower dtype.
    """

    gathers: int = 0
    reductions: int = 0
    scalars: int = 0
    num_collectives: int = 0
    exchanges: int = 0

    @property
    def total(self) -> int:
        """All bytes."""
        return self.gathers + self.reductions + self.scalars + self.exchanges


def wire_bytes(gm: fx.GraphModule, world_size: int, axis: str | None = None) -> WireBytes:
    """Count what one step sends, in all or along one axis of a mesh.  Units: bytes per rank.

    A gather that the step before has started is that step's.

    Source: ZeRO, Rajbhandari et al. 2020, section 7.
    """
    sent: Counter[str] = Counter()
    shards, mesh = ops.num_shards(gm.graph, world_size), recorded(gm.graph).mesh
    for node in gm.graph.nodes:
        if node.target is ops.on_owners and axis in (None, mesh.across if mesh else DATA):
            times = journeys(node)
            sent["num_collectives"] += 2 if times else 0
            if times and ops.argument(node, "own_step"):  # ranks compare their groups
                sent["num_collectives"] += 1
                sent["scalars"] += 8 * NUMBERS_TOGETHER * (shards - 1)
            sent["exchanges"] += times * owned_bytes(node, shards) * (shards - 1) // shards
        of = ops.rules(node).traffic(node)
        if of and axis in (None, ops.argument(node, "axis")):
            sent["num_collectives"] += 1
            nbytes = ops.rules(node).rounds(node) * ops.rules(node).sends(node)
            ranks = ops.num_ranks(node, world_size)
            sent[of] += nbytes * (ranks - 1) // (1 if of == "scalars" else ranks)
    return WireBytes(**sent)


@dataclass(frozen=True)
class GatheredPeak:
    """The moment when most gathered bytes are alive, and whose they are."""

    nbytes: int
    parameters: tuple[str, ...]


def gathered_peak(gm: fx.GraphModule, table: ParameterTable) -> GatheredPeak:
    """Walk the program from start to free of every gathered buffer.  Units: bytes."""
    alive: dict[fx.Node, int] = {}
    peak = GatheredPeak(0, ())
    for node in gm.graph.nodes:
        if role(node) == Role.REDUCE_GRADIENT:  # which no parameter is gathered for
            continue
        if ops.rules(node).gathers or node.target is ops.dequantize:
            if role(shard := node.args[0]) == Role.GATHER_SHARD:  # which has gone on to this one
                alive.pop(shard.args[0], None)
            alive[node] = value_bytes(node)
            total = sum(alive.values())
            if total > peak.nbytes:
                peak = GatheredPeak(total, tuple(served(start, table) for start in alive))
        elif node.target is ops.free:
            freed = node.args[0]
            alive.pop(freed.args[0] if ops.is_wait(freed) else freed, None)
    return peak


def size_text(nbytes: int) -> str:
    """Bytes as people read them."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes} B"


@dataclass(frozen=True)
class MovedBytes:
    """Bytes that a step copies between this rank's device and the host, and stages there.

    ``staging`` is of the buffers in host memory, which are kept between steps; ``activations`` is
    what of ``to_host`` are values that forward saves for backward, ``num_activations`` in all.
    """

    to_host: int
    to_device: int
    staging: int
    activations: int = 0
    num_activations: int = 0


def moved_bytes(gm: fx.GraphModule) -> MovedBytes:
    """Count what one step moves, of the sizes there were when it was captured.  Units: bytes."""
    moved: dict[str, list[int]] = {TO_HOST: [], TO_DEVICE: []}
    for node in filter(ops.is_move, gm.graph.nodes):
        moved[ops.lane(node)].append(sum(map(hinted_bytes, ops.argument(node, "values"))))
    leaving = filter(copies_activation, filter(is_staged, gm.graph.nodes))
    activations = list(map(hinted_bytes, leaving))
    return MovedBytes(
        to_host=sum(moved[TO_HOST]),
        to_device=sum(moved[TO_DEVICE]),
        staging=sum(staging_bytes(gm.graph).values()),
        activations=sum(activations),
        num_activations=len(activations),
    )
