"""What a program costs, read off its nodes: bytes on the wire, gathered, and moved to the host."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from zerofx.cost.program import owned_bytes
from zerofx.ir import ops
from zerofx.ir.graph import hinted_bytes, moved_values, role, served, staging_bytes, value_bytes
from zerofx.ir.parameters import ParameterTable


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


def wire_bytes(gm: fx.GraphModule, world_size: int) -> WireBytes:
    """Count what one step sends.  Units: bytes per rank.

    A gather that the step before has started is that step's.

    Source: ZeRO, Rajbhandari et al. 2020, section 7.
    """
    gathers = reductions = scalars = exchanges = count = 0
    for node in gm.graph.nodes:
        if node.target is ops.on_owners:
            count += 2
            exchanges += 2 * owned_bytes(node, world_size) * (world_size - 1) // world_size
        if node.target not in ops.STARTS:
            continue
        count += 1
        if node.target is ops.all_gather_start:
            gathers += value_bytes(node) * (world_size - 1) // world_size
        elif node.target is ops.reduce_scatter_start:
            reductions += value_bytes(node.args[0]) * (world_size - 1) // world_size
        elif role(node) == "reduce_gradient":
            reductions += 2 * value_bytes(node) * (world_size - 1) // world_size
        else:
            scalars += value_bytes(node) * (world_size - 1)
    return WireBytes(gathers, reductions, scalars, count, exchanges)


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
        if node.target is ops.all_gather_start:
            alive[node] = value_bytes(node)
            total = sum(alive.values())
            if total > peak.nbytes:
                names = tuple(served(start, table) for start in alive)
                peak = GatheredPeak(total, names)
        elif node.target is ops.free:
            alive.pop(node.args[0].args[0], None)
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
    moves = [node for node in gm.graph.nodes if ops.is_move(node.target)]
    moved = {move: sum(map(hinted_bytes, moved_values(move))) for move in moves}
    to_device = sum(moved[move] for move in moves if move.target in ops.TO_DEVICE)
    activations = [moved[move] for move in moves if move.target is ops.offload_start]
    return MovedBytes(
        to_host=sum(moved.values()) - to_device,
        to_device=to_device,
        staging=sum(staging_bytes(gm.graph).values()),
        activations=sum(activations),
        num_activations=len(activations),
    )
