"""A compiled program in tables: what it keeps and sends, what limits it, what passes did."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

from tabulate import tabulate

from zerofx.codegen.rewrite.storage import Precision
from zerofx.cost.timeline import Timeline, Transfer, milliseconds, predict
from zerofx.cost.traffic import gathered_peak, moved_bytes, size_text, wire_bytes
from zerofx.ir.effects import why_uncaptured
from zerofx.ir.graph import updates
from zerofx.ir.interface import input_role, placeholders, recorded
from zerofx.ir.offload import copies_activation, is_fetch
from zerofx.ir.roles import Role, provenance
from zerofx.ir.sizes import hinted_bytes, is_symbolic, value_bytes
from zerofx.passes.manager import TURNED_OFF
from zerofx.report.memory import alive, errors, pieces_of, refills
from zerofx.runtime.optimizer.states import bytes_of_states
from zerofx.runtime.storage.bucket import words_for

if TYPE_CHECKING:
    from zerofx.compiler.program import Program


def explanation(program: Program, *, with_seconds: bool) -> str:
    """Describe one program that has run: shards, memory, traffic, what limits it, passes.

    Without the seconds that passes took, the same step gives the same text.
    """
    function = program.function
    ranks = function.communicator.world_size
    title = f"{function.name}, program {program.number}: {_stage(program)} on {ranks} rank(s)"
    wire = wire_bytes(program.gm, ranks)
    peak = gathered_peak(program.gm, program.table)
    timeline = predict(program.gm.graph, program.figures, program.table, ranks)
    limit = program.rewritten.ctx.bucket_bytes
    busiest = sorted(timeline.lanes.items(), key=lambda lane: -lane[1])
    lanes = ", ".join(f"{name} {milliseconds(seconds)}" for name, seconds in busiest if seconds)
    numbers = [
        *_chosen(program),
        ("parameters", f"{len(program.table)}, {size_text(sum(p.nbytes for p in program.table))}"),
        ("kept per rank between steps", size_text(kept_bytes(program))),
        *_errors(program),
        (
            "most gathered at once",
            f"{size_text(peak.nbytes)} ({', '.join(peak.parameters) or 'none'})",
        ),
        ("most allocated at once in a step", size_text(program.rewritten.peak_bytes)),
        ("sent per rank and step: gathers", size_text(wire.gathers)),
        ("sent per rank and step: reductions", size_text(wire.reductions)),
        ("sent per rank and step: to owners and back", size_text(wire.exchanges)),
        ("sent per rank and step: norms and flags", size_text(wire.scalars)),
        *_by_axis(program),
        ("collectives per step", str(wire.num_collectives)),
        *_losses(program),
        *_offload(program, timeline),
        *_figures(program),
        ("bucket_bytes", "a layer" if limit == math.inf else size_text(int(limit))),
        ("predicted for a step", str(timeline)),
        ("what each lane has to do", lanes),
        ("no schedule of these beats", milliseconds(timeline.bound_s)),
        ("what limits the step", limit_text(timeline)),
        *(_first_call(program) if with_seconds else ()),
    ]
    tables = [
        title,
        tabulate(numbers, tablefmt="plain"),
        "",
        *memory_by_stage(program),
        "",
        _uncaptured(program),
        "",
        _passes(program, with_seconds),
    ]
    return "\n".join(line.rstrip() for line in "\n".join(tables).splitlines())


def first_words(program: Program) -> str:
    """Return the line that the log has of a step when it is first compiled."""
    communicator = program.function.communicator
    collectives = wire_bytes(program.gm, communicator.world_size).num_collectives
    peak, was = program.rewritten.peak_bytes, program.rewritten.captured_peak
    passes = ", ".join(report.name for report in program.reports if not report.skipped)
    return (
        f"{program.function.name}: {_stage(program)} on {communicator.world_size} "
        f"rank(s), this is {communicator.rank}; of {len(program.table)} parameters, "
        f"{size_text(sum(info.nbytes for info in program.table))}, a rank keeps "
        f"{size_text(kept_bytes(program))}; a step allocates {size_text(peak)} at "
        f"most{f', {size_text(was)} as captured' if was is not None else ''}; "
        f"{collectives} collectives; {passes}"
    )


def _stage(program: Program) -> str:
    """Say the stage, or those of a mesh's axes."""
    mesh, options = program.rewritten.ctx.mesh, program.options
    if not mesh.outer:
        return f"stage {options.stage}"
    outside = options.stage_outside or 0
    return f"stage {options.stage} over {mesh.inner} and {outside} over {mesh.outer}"


def _chosen(program: Program) -> list[tuple[str, str]]:
    """Return what ``plan="auto"`` has chosen, and a row for each reason."""
    choice = program.function.choice
    if choice is None:
        return []
    first, *others = choice.reasons
    return [("chosen by plan=auto", first), *(("", line) for line in others)]


def _by_axis(program: Program) -> list[tuple[str, str]]:
    """Return a row for each axis of a mesh, and one for all together: what is sent there."""
    mesh = program.rewritten.ctx.mesh
    if not mesh.outer:
        return []
    sent = {a: wire_bytes(program.gm, mesh.world_size, a) for a in mesh.names}
    return [
        (f"sent per rank and step: along {axis} ({mesh.size(axis)})", size_text(of.total))
        for axis, of in sent.items()
    ]


def _figures(program: Program) -> list[tuple[str, str]]:
    """Return a row of the figures that were planned with, and one for each axis if they differ."""
    figures = program.figures
    if not figures.links:
        return [("link and compute", f"{figures} ({figures.source})")]
    return [
        *((f"link along {axis}", str(link)) for axis, link in figures.links.items()),
        ("compute", f"{figures.of_ranks} ({figures.source})"),
    ]


def _first_call(program: Program) -> list[tuple[str, str]]:
    """Say what compiling and the first run took, by parts in their order."""
    seconds = program.first_call.seconds
    parts = ", ".join(f"{part} {taken:.2f}" for part, taken in seconds.items())
    was_kept = "; the program is that of an earlier start" if program.rewritten.was_kept else ""
    return [("first call", f"{sum(seconds.values()):.1f} s: {parts}{was_kept}")]


def _passes(program: Program, with_seconds: bool) -> str:
    """Return a table with a row for each pass: what it did, or why it is off."""
    rows = []
    for report in program.reports:
        counts = ", ".join(f"{what}: {count}" for what, count in report.counts.items() if count)
        what = report.skipped or counts
        if report.skipped == TURNED_OFF:
            what += f"; ZEROFX_{report.option.upper()}=1 turns it on"
        row = [report.name, "off" if report.skipped else "on", what]
        rows.append([*row, f"{report.seconds:.3f}"] if with_seconds else row)
    headers = ("pass", "", "what it did, or why not", *(("seconds",) if with_seconds else ()))
    return tabulate(rows, headers=headers, disable_numparse=True)


def _uncaptured(program: Program) -> str:
    """Return a table of what keeps a CUDA graph from holding the whole program, by operator."""
    graph = program.lowered.gm.graph
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for node in graph.nodes:
        if why := why_uncaptured(node):
            what = getattr(node.target, "__name__", node.op).split(".")[0]
            found[what, why].append(node.name)
    sizes = [node.name for node in placeholders(graph) if is_symbolic(node.meta.get("val"))]
    if sizes:
        found["sizes", "they change from call to call, and each needs a graph of its own"] = sizes
    if not found:
        return "A CUDA graph could hold all of this program, if its inputs stayed where they are."
    rows = [
        [f"{what} ({len(names)})", ", ".join(names[:2]) + ", ..." * (len(names) > 2), why]
        for (what, why), names in found.items()
    ]
    headers = ("no CUDA graph can hold", "nodes", "because")
    return tabulate(rows, headers=headers, disable_numparse=True)


def limit_text(timeline: Timeline) -> str:
    """Name the busiest lane, its share of the step, and what would give it less to do."""
    lane = timeline.busiest
    share = timeline.lanes[lane] / timeline.step_s if timeline.step_s else 0.0
    waiting = f"{milliseconds(timeline.exposed_s)} of it a rank only waits"
    return (
        f"{lane}, for {share:.0%} of a step of {milliseconds(timeline.step_s)}; {waiting}."
        f" {_REMEDIES[lane]}"
    )


_MOVES = "A larger batch hides it; a memory_budget lets more stay on the device"

_REMEDIES = {
    "compute": "Communication is hidden, or little: a faster device or less recompute helps",
    "link": "A larger batch or micro-batches in the step hide it; autocast, a memory_budget or "
    "reduce_dtype send less",
    "outer link": "Micro-batches in the step hide it; a stage of 0 along the outer axis gathers "
    "nothing over it, and reduce_dtype sends less",
    "to host": _MOVES,
    "to device": _MOVES,
    "updates": "A larger batch hides them; a memory_budget leaves some to the device",
    "files": "Several disks in offload_dir read together; offload_cache_bytes keeps more in memory",
}


def _offload(program: Program, timeline: Timeline) -> list[tuple[str, str]]:
    """Return rows on host memory and the moves there and back; none without offload."""
    graph, moved = program.gm.graph, moved_bytes(program.gm)
    if not (program.options.offload or moved.to_device):
        return []
    targets = ", ".join(program.options.offload) or "what another function keeps there"
    in_files = any(is_fetch(node, "shards") for node in graph.nodes)
    states = program.runtime.steps.host_bytes() if program.runtime is not None else 0
    rows = [
        ("leaves the device, as far as it has to", targets),
        *_files(program),
        ("parameters in host memory", size_text(0 if in_files else on_host_bytes(program))),
        ("optimizer states in host memory", size_text(states)),
    ]
    residency = recorded(graph).decisions.residency
    if residency and (stays := residency.state_bytes):
        rows.append(("optimizer states on the device", size_text(stays)))
    rows += [
        ("staging buffers in host memory", size_text(moved.staging)),
        ("moved per step: to the host", size_text(moved.to_host)),
        ("moved per step: to the device", size_text(moved.to_device)),
    ]
    if "activations" in program.options.offload:
        number, nbytes = moved.num_activations, size_text(moved.activations)
        rows.append(("activations away from the device", f"{number}, {nbytes}"))
        ways = [way for start, way in timeline.transfers.items() if copies_activation(start)]
        together = Transfer(sum(way.seconds for way in ways), sum(way.exposed_s for way in ways))
        rows.append(("predicted for their ways there and back", str(together)))
    return rows


def _losses(program: Program) -> list[tuple[str, str]]:
    """Return rows on what is counted over all ranks; none with ``loss="rank"``."""
    found = dict.fromkeys(
        origin.reason
        for node in program.gm.graph.nodes
        if (origin := provenance(node)) is not None and origin.role == Role.LOSS_COUNT
    )
    return [("counted over all ranks", reason) for reason in found if reason]


def _files(program: Program) -> list[tuple[str, str]]:
    """Return rows on files; none without ``offload_tier="nvme"``."""
    files = program.runtime.files if program.runtime is not None else None
    if files is None:
        return []
    tier, sizes = files.tier, {bucket: bucket.nbytes for bucket in files.buckets}
    there = f"{size_text(sum(sizes.values()))} in {', '.join(tier.options.directories)}"
    held, bound = size_text(tier.cache.held_bytes), size_text(tier.cache.memory_bytes)
    return [
        (f"{words_for(files.buckets)} in files", there),
        ("their largest bucket", size_text(max(sizes.values()))),
        ("read per step, at most", size_text(files.read_bytes)),
        ("written per step, at most", size_text(files.written_bytes)),
        ("of that in host memory", f"{held} of at most {bound}"),
    ]


def memory_by_stage(program: Program) -> list[str]:
    """Return a table of what a rank keeps at each stage by ZeRO's formulas, and in this program.

    The formulas are ZeRO's (2 + 2 + K) bytes per element, with this model's own dtypes.  This
    program's column has padding, and counts host memory and files too; its gradients are the most
    that are alive together.

    Source: ZeRO, Rajbhandari et al. 2020, section 5.
    """
    table, mesh = program.table, program.rewritten.ctx.mesh
    ranks, holders = mesh.num_shards, "shard" if mesh.outer else "rank"
    states = _state_bytes(program)
    whole_states = sum(int(states[info.index] * info.numel) for info in table)
    own_states = whole_states
    if program.options.stage:
        own_states = sum(int(states[info.index] * info.shard_numel) for info in table)
    trained = sum(info.nbytes for info in table if info.requires_grad)
    parameters = sum(info.nbytes for info in table)
    own_parameters = kept_bytes(program) + on_host_bytes(program)
    # By what it is: its bytes in all and in this program, and the first stage that shards it.
    kept = {
        "parameters": (parameters, own_parameters, 3),
        "gradients": (trained, _gradient_bytes(program), 2),
        "optimizer states": (whole_states, own_states, 1),
    }
    rows = [
        [*(-(-whole // cut) if stage >= first else whole for stage in range(4)), here]
        for whole, here, first in kept.values()
        for cut in [ranks // mesh.parts if first == 3 else ranks]
    ]
    rows.append([sum(column) for column in zip(*rows, strict=True)])
    shown = [
        [what, *map(size_text, row)] for what, row in zip([*kept, "together"], rows, strict=True)
    ]
    headers = ("a rank keeps", *(f"stage {stage}" for stage in range(4)), "this program")
    numel = sum(info.numel for info in table)
    each = ", ".join(f"{what} {of[0] / max(numel, 1):.3g}" for what, of in kept.items())
    return [
        tabulate(shown, headers=headers, disable_numparse=True),
        f"Bytes per element: {each}; {numel} elements, {ranks} {holders}(s).",
        "This program's gradients are the most that a step has at once, averaged and not yet.",
    ]


def _state_bytes(program: Program) -> dict[int, float]:
    """Return the bytes per element that optimizers keep, by the parameter's index."""
    found: dict[int, float] = defaultdict(float)
    if program.runtime is None:
        return found
    tensors = [tensor() for tensor in program.runtime.tensors]
    infos = {id(t): info for t, info in zip(tensors, program.table, strict=True) if t is not None}
    precision = Precision.of(program.options)
    optimizers = zip(program.optimizers, program.runtime.optimizers, strict=True)
    known = {
        handle: bytes_of_states(optimizer, infos, precision)
        for handle, optimizer in ((handle, alive()) for handle, alive in optimizers)
        if optimizer is not None
    }
    for handle, parameter in updates(program.gm.graph):
        found[parameter] += known.get(handle, {}).get(id(tensors[parameter]), 0.0)
    return found


def _gradient_bytes(program: Program) -> int:
    """Return the most bytes of gradients at once, averaged or not, whole or shards."""
    graph, ranks = program.gm.graph, program.function.communicator.world_size
    pieces = pieces_of(graph, program.table, ranks, sockets=not program.options.peer_memory)
    return max(alive(pieces, len(graph.nodes)).get("gradients", ()), default=0)


def _errors(program: Program) -> list[tuple[str, str]]:
    """Return a row for what is kept of what wires of gradients lose, if it is."""
    found = errors(program.gm.graph.nodes, program.table)
    size = size_text(sum(map(value_bytes, found)))
    return [("kept per rank of what wires lose", size)] if found else []


def kept_bytes(program: Program) -> int:
    """Return the bytes of parameters that this rank keeps on its device."""
    if program.options.stage < 3:
        return sum(info.nbytes for info in program.table)
    shards = sum(info.kept.shard_numel * info.dtype.itemsize for info in program.table)
    shards += sum(map(hinted_bytes, refills(program.gm.graph.nodes)))
    return shards - on_host_bytes(program)


def on_host_bytes(program: Program) -> int:
    """Return the bytes of parameters that this rank keeps in host memory."""
    roles = map(input_role, placeholders(program.gm.graph, "parameter"))
    infos = (program.table[role.parameter] for role in roles if role.on_host)
    return sum(info.kept.shard_numel * info.dtype.itemsize for info in infos)
