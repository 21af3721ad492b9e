"""``zerofx.explain(step)``: what was compiled, in tables that a newcomer can read."""

from __future__ import annotations

from collections.abc import Callable

from tabulate import tabulate

from zerofx import ops
from zerofx.account import gathered_peak, moved_bytes, size_text, wire_bytes
from zerofx.backend import CompiledFunction, Program, zero
from zerofx.cost import live_bytes
from zerofx.graph import input_role, placeholders, resident, served, value_bytes
from zerofx.runtime.filed_bucket import words_for
from zerofx.timeline import Timeline, Transfer, milliseconds, predict


def explain(step: Callable) -> str:
    """Describe every program compiled for ``step``: shards, memory, traffic, passes.

    ``step`` is what ``torch.compile(step, backend="zero")`` returned; call it once before.
    Not collective.

    Raises: ValueError if ``step`` has not been compiled by this backend.
    """
    function = getattr(step, "_torchdynamo_orig_callable", None)
    code = getattr(function, "__code__", None)
    compiled = [known for known in zero.functions if known.code is code and known.programs]
    if code is None or not compiled:
        raise ValueError(
            f"{step!r} has no zero-compiled program yet: pass what "
            'torch.compile(step, backend="zero") returned, after its first call.'
        )
    parts = [
        _describe(function, number, program)
        for function in compiled
        for number, program in enumerate(function.programs)
    ]
    return "\n\n".join(parts)


def _describe(function: CompiledFunction, number: int, program: Program) -> str:
    ranks = function.communicator.world_size
    stage = program.options.stage
    title = f"{function.name}, program {number}: stage {stage} on {ranks} rank(s)"
    wire = wire_bytes(program.gm, ranks)
    peak = gathered_peak(program.gm, program.table)
    alive = live_bytes(program.gm.graph, ranks, sockets=not program.options.peer_memory)
    timeline = predict(program.gm.graph, program.figures, program.table, ranks)
    numbers = [
        ("parameters", f"{len(program.table)}, {size_text(sum(p.nbytes for p in program.table))}"),
        ("kept per rank between steps", size_text(_kept(program, stage, ranks))),
        (
            "most gathered at once",
            f"{size_text(peak.nbytes)} ({', '.join(peak.parameters) or 'none'})",
        ),
        ("gathered for the next step", _carried(program)),
        ("most allocated at once in a step", size_text(max(alive))),
        ("sent per rank and step: gathers", size_text(wire.gathers)),
        ("sent per rank and step: reductions", size_text(wire.reductions)),
        ("sent per rank and step: to owners and back", size_text(wire.exchanges)),
        ("sent per rank and step: norms and flags", size_text(wire.scalars)),
        ("collectives per step", str(wire.num_collectives)),
        *_offload(program),
        ("link and compute", f"{program.figures} ({program.figures.source})"),
        ("bucket_bytes", size_text(program.bucket_bytes)),
        ("predicted for a step", str(timeline)),
        ("what each lane has to do", _lanes(timeline)),
        ("no schedule of these beats", milliseconds(timeline.bound_s)),
    ]
    passes = [
        (r.name, "off" if r.skipped else "on", r.skipped or _counts(r.counts), f"{r.seconds:.3f}")
        for r in program.reports
    ]
    return "\n".join(
        [
            title,
            tabulate(numbers, tablefmt="plain"),
            "",
            tabulate(passes, headers=("pass", "", "what it did", "seconds")),
        ]
    )


def _lanes(timeline: Timeline) -> str:
    """Seconds by lane, the busiest first."""
    busy = sorted(timeline.lanes.items(), key=lambda lane: -lane[1])
    return ", ".join(f"{name} {milliseconds(seconds)}" for name, seconds in busy if seconds)


def _offload(program: Program) -> list[tuple[str, str]]:
    """What a step keeps in host memory, and moves there and back; nothing without offload."""
    moved = moved_bytes(program.gm)
    if not (program.options.offload or moved.to_device):
        return []
    states = program.runtime.steps.host_bytes() if program.runtime is not None else 0
    there = resident(program.gm.graph)
    stays = (
        [("optimizer states on the device", size_text(there.nbytes))]
        if there and there.nbytes
        else []
    )
    targets = ", ".join(program.options.offload) or "what another function keeps there"
    rows = [
        ("leaves the device, as far as it has to", targets),
        *_files(program),
        (
            "parameters in host memory",
            size_text(0 if _files_hold_shards(program) else _on_host(program)),
        ),
        ("optimizer states in host memory", size_text(states)),
        *stays,
        ("staging buffers in host memory", size_text(moved.staging)),
        ("moved per step: to the host", size_text(moved.to_host)),
        ("moved per step: to the device", size_text(moved.to_device)),
    ]
    if "activations" in program.options.offload:
        number, nbytes = moved.num_activations, size_text(moved.activations)
        rows.append(("activations away from the device", f"{number}, {nbytes}"))
        rows.append(("predicted for their ways there and back", _ways(program)))
    return rows


def _ways(program: Program) -> str:
    """How long activations travel in a step, and for how much of that compute waits."""
    ranks = program.function.communicator.world_size
    transfers = predict(program.gm.graph, program.figures, program.table, ranks).transfers
    ways = [way for start, way in transfers.items() if start.target in ops.ACTIVATION_MOVES]
    exposed_s = sum(way.exposed_s for way in ways)
    return str(Transfer(sum(way.seconds for way in ways), exposed_s))


def _files(program: Program) -> list[tuple[str, str]]:
    """What a step keeps in files; nothing without ``offload_tier="nvme"``."""
    files = program.runtime.files if program.runtime is not None else None
    if files is None:
        return []
    tier = files.tier
    nbytes = sum(bucket.nbytes for bucket in set(files.buckets))
    largest = max(bucket.nbytes for bucket in files.buckets)
    return [
        (
            f"{words_for(files.buckets)} in files",
            f"{size_text(nbytes)} in {', '.join(tier.directories)}",
        ),
        ("their largest bucket", size_text(largest)),
        ("read per step, at most", size_text(files.read_bytes)),
        ("written per step, at most", size_text(files.written_bytes)),
        (
            "of that in host memory",
            f"{size_text(tier.cached_bytes)} of at most {size_text(tier.cache_bytes)}",
        ),
    ]


def _files_hold_shards(program: Program) -> bool:
    return any(node.target is ops.shards_from_file_start for node in program.gm.graph.nodes)


def _kept(program: Program, stage: int, ranks: int) -> int:
    """Bytes of parameters that this rank keeps on its device; optimizer states come on top."""
    if stage < 3:
        return sum(info.nbytes for info in program.table)
    shards = sum(info.shard_numel * info.dtype.itemsize for info in program.table)
    return shards - _on_host(program)


def _on_host(program: Program) -> int:
    """Bytes of parameters that this rank keeps in host memory."""
    roles = map(input_role, placeholders(program.gm.graph, "parameter"))
    infos = (program.table[role.parameter] for role in roles if role.on_host)
    return sum(info.shard_numel * info.dtype.itemsize for info in infos)


def _carried(program: Program) -> str:
    """What a rank holds gathered between steps, and whose it is."""
    carried = [node.args[0] for node in program.gm.graph.nodes if node.target is ops.carry]
    names = ", ".join(served(start, program.table) for start in carried)
    return f"{size_text(sum(map(value_bytes, carried)))} ({names or 'none'})"


def _counts(counts) -> str:
    return ", ".join(f"{what}: {count}" for what, count in counts.items() if count)
