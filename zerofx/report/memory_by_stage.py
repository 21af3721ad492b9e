"""What a rank keeps by ZeRO's formulas, at every stage, beside what a program keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tabulate import tabulate

from zerofx.codegen.rewrite.storage import Precision
from zerofx.cost.traffic import size_text
from zerofx.ir.graph import input_role, placeholders, updates
from zerofx.report.memory import alive, pieces_of
from zerofx.runtime.optimizer.state_bytes import bytes_of_states

if TYPE_CHECKING:
    from zerofx.compiler.program import Program

_FIRST_SHARDED = {"parameters": 3, "gradients": 2, "optimizer states": 1}
"""The stage from which on a rank keeps a share of them."""


def memory_by_stage(program: Program) -> list[str]:
    """Lines of a table: whole, or divided by the ranks, as the stage says, and what is here.

    ZeRO's (2 + 2 + K) bytes per element, with this model's own dtypes.  What is here has padding,
    and is in host memory or in files where that is so; gradients are those that are alive together.

    Source: ZeRO, Rajbhandari et al. 2020, section 5.
    """
    ranks = program.function.communicator.world_size
    trained = [info for info in program.table if info.requires_grad]
    per_element = _state_bytes(program)
    states = {info.index: per_element.get(info.index, 0.0) for info in program.table}
    whole = {
        "parameters": sum(info.nbytes for info in program.table),
        "gradients": sum(info.nbytes for info in trained),
        "optimizer states": sum(int(states[i.index] * i.numel) for i in program.table),
    }
    is_sharded = program.options.stage > 0
    here = {
        "parameters": kept_bytes(program) + on_host_bytes(program),
        "gradients": _gradient_bytes(program),
        "optimizer states": sum(
            int(states[info.index] * (info.shard_numel if is_sharded else info.numel))
            for info in program.table
        ),
    }
    rows = [
        [what, *(size_text(_share(nbytes, what, stage, ranks)) for stage in range(4))]
        + [size_text(here[what])]
        for what, nbytes in whole.items()
    ]
    sums = [
        sum(_share(nbytes, what, stage, ranks) for what, nbytes in whole.items())
        for stage in range(4)
    ]
    rows.append(["together", *map(size_text, sums), size_text(sum(here.values()))])
    headers = ("a rank keeps", *(f"stage {stage}" for stage in range(4)), "this program")
    numel = sum(info.numel for info in program.table)
    average = ", ".join(f"{what} {nbytes / max(numel, 1):.3g}" for what, nbytes in whole.items())
    return [
        tabulate(rows, headers=headers, disable_numparse=True),
        f"Bytes per element: {average}; {numel} elements, {ranks} rank(s).",
        "This program's gradients are the most that a step has at once, averaged and not yet.",
    ]


def _share(nbytes: int, what: str, stage: int, ranks: int) -> int:
    return -(-nbytes // ranks) if stage >= _FIRST_SHARDED[what] else nbytes


def _state_bytes(program: Program) -> dict[int, float]:
    """What the optimizers of a program keep per element, by the parameter's index."""
    runtime = program.runtime
    if runtime is None:
        return {}
    pairs = zip(runtime.tensors, program.table, strict=True)
    infos = {id(tensor()): info for tensor, info in pairs if tensor() is not None}
    precision = Precision.of(program.options)
    optimizers = zip(program.optimizers, (alive() for alive in runtime.optimizers), strict=True)
    known = {
        handle: bytes_of_states(optimizer, infos, precision)
        for handle, optimizer in optimizers
        if optimizer is not None
    }
    by_index = {info.index: identity for identity, info in infos.items()}
    found: dict[int, float] = {}
    for handle, parameter in updates(program.gm.graph):
        nbytes = known.get(handle, {}).get(by_index.get(parameter, 0), 0.0)
        found[parameter] = found.get(parameter, 0.0) + nbytes
    return found


def _gradient_bytes(program: Program) -> int:
    """The most that a step has of gradients at once, averaged or not, whole or shards."""
    graph, ranks = program.gm.graph, program.function.communicator.world_size
    pieces = pieces_of(graph, program.table, ranks, sockets=not program.options.peer_memory)
    return max(alive(pieces, len(graph.nodes)).get("gradients", ()), default=0)


def kept_bytes(program: Program) -> int:
    """Bytes of parameters that this rank keeps on its device; optimizer states come on top."""
    if program.options.stage < 3:
        return sum(info.nbytes for info in program.table)
    shards = sum(info.shard_numel * info.dtype.itemsize for info in program.table)
    return shards - on_host_bytes(program)


def on_host_bytes(program: Program) -> int:
    """Bytes of parameters that this rank keeps in host memory."""
    roles = map(input_role, placeholders(program.gm.graph, "parameter"))
    infos = (program.table[role.parameter] for role in roles if role.on_host)
    return sum(info.shard_numel * info.dtype.itemsize for info in infos)
