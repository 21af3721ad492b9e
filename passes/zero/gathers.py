"""Place the gathers of a sharded value: how many, where each begins and is freed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliases import aliases, writers
from zerofx.ir.graph import Builder, is_backward, last_use, program_order
from zerofx.ir.interface import note_decisions
from zerofx.ir.mesh import Mesh
from zerofx.ir.parameters import ParameterInfo
from zerofx.ir.roles import Role, bucket_of, parameter_of
from zerofx.ir.wires import is_quantizable, quantized_bytes
from zerofx.passes.base import PassContext
from zerofx.passes.memory.decisions import decide, with_cuts

aten = torch.ops.aten


Use = tuple[fx.Node, fx.Node]
"""A reader, and what it reads of the sharded value."""


@dataclass(eq=False)
class GatherSource:
    """A flat shard and who needs its whole value.

    ``uses`` are (reader, what it reads): the source itself or one of ``chain``, the views and
    casts of it that are repeated on every gathered copy.  ``regather`` allows several gathers;
    without it the whole value is gathered once and lives from its first reader to its last.
    With ``cast_to`` the shard is cast before each gather.  One that ``is_joined`` is gathered over
    the outer axis of a mesh alone, to what a rank keeps of a parameter: ``node`` is that.
    """

    node: fx.Node
    parameter: ParameterInfo
    shard: fx.Node
    regather: bool = False
    cast_to: torch.dtype | None = None
    shape: tuple[int, ...] | None = None
    is_joined: bool = False
    uses: list[Use] = field(default_factory=list)
    chain: set[fx.Node] = field(default_factory=set)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which it travels."""
        return self.cast_to or self.shard.meta["val"].dtype


@dataclass(eq=False)
class GatherUnit:
    """Sources that travel together: shards of one bucket, or one source alone.

    ``second_shard`` is what of them the rank's node keeps together, once it is there.  What travels
    may be a wire in some ``code``, made of it behind this pass.
    """

    sources: list[GatherSource]
    code: str | None = None
    second_shard: fx.Node | None = None

    @property
    def regather(self) -> bool:
        return self.sources[0].regather

    @property
    def nbytes(self) -> int:
        source = self.sources[0]
        place, ranks = source.parameter.place, source.parameter.world_size
        if source.is_joined:
            ranks = source.parameter.parts
        return place.shard_numel * ranks * source.dtype.itemsize

    @property
    def indices(self) -> list[int]:
        """The parameters, in the order in which they lie in their bucket."""
        places = sorted((s.parameter.place.offset, s.parameter.index) for s in self.sources)
        return [index for _, index in places]

    @property
    def own_wire_bytes(self) -> int:
        """Bytes of this rank's wire, which it keeps from one gather to the next."""
        if self.code is None or not is_quantizable(self.sources[0].dtype):
            return 0
        return quantized_bytes(self.sources[0].parameter.place.shard_numel, self.code)

    @property
    def held_bytes(self) -> int:
        """Bytes that a gather holds on the device: the whole, and the wires that it is made of."""
        return self.nbytes + self.own_wire_bytes * self.sources[0].parameter.world_size

    @property
    def name(self) -> str:
        """Name what it gathers, and the dtype in which it travels: the same on all ranks."""
        names = ", ".join(source.parameter.name for source in self.sources)
        return f"{names} {self.sources[0].dtype}"

    @cached_property
    def owner(self) -> dict[Use, GatherSource]:
        return {use: source for source in self.sources for use in source.uses}


@dataclass
class GatherSpan:
    """Program positions of the first and last reader of one gathered copy."""

    first: int
    last: int
    uses: list[Use]

    def joined(self, after: GatherSpan) -> GatherSpan:
        """The span of one copy that serves this one's readers and those of a later one."""
        return GatherSpan(self.first, after.last, self.uses + after.uses)


def group_sources(sources: list[GatherSource], code: str | None = None) -> list[GatherUnit]:
    """Put sources of one bucket together, if all have their shards before anyone reads one."""
    groups: dict[tuple, list[GatherSource]] = {}
    for source in sources:
        info = source.parameter
        is_new_value = source.shard.target is ops.update
        origin = source.shard.op if source.shard.op == "placeholder" else is_new_value
        shared = info.place.bucket if info.shares_bucket else source
        of_shard = (source.shard.meta["val"].dtype, info.place.shard_numel)
        key = (shared, origin, source.regather, source.is_joined, source.dtype, *of_shard)
        groups.setdefault(key, []).append(source)

    def first_read(source: GatherSource) -> fx.Node:
        return min(reader for reader, _ in source.uses)

    units: list[GatherUnit] = []
    for group in groups.values():
        unit: list[GatherSource] = []
        for source in sorted(group, key=first_read):
            is_there = any(other.parameter is source.parameter for other in unit)
            if not unit or is_there or not source.shard < first_read(unit[0]):
                unit = []
                units.append(GatherUnit(unit, code))
            unit.append(source)
    return units


def plan_spans(
    units: list[GatherUnit], order: dict[fx.Node, int], num_backwards: int
) -> dict[GatherUnit, list[GatherSpan]]:
    """Split each unit's readers into spans, each served by one gather.

    A parameter is gathered for forward and again for backward, never kept in between, unless
    nothing else would be gathered meanwhile (the last layer).  That leaves some parameters
    with a gather to spare within the two that stage 3 pays for; it is spent where the whole
    value would sit through most bytes of others (a tied embedding between its two ends).
    """
    regions = _regions(units, order)
    spans = {}
    for unit in units:
        uses = sorted(unit.owner, key=lambda use: order[use[0]])
        region = {use: regions[use[0]] if unit.regather else 0 for use in uses}
        runs = itertools.groupby(uses, region.__getitem__)
        spans[unit] = [_span(list(run), order) for _, run in runs]
    passing = [(span, unit) for unit, planned in spans.items() for span in planned]

    def bytes_between(unit: GatherUnit, start: int, stop: int) -> int:
        return sum(
            other.nbytes
            for span, other in passing
            if other is not unit and start < span.first and span.last < stop
        )

    planned = {}
    for unit, mine in spans.items():
        if unit.regather:
            between = partial(bytes_between, unit)
            allowed = max(len(mine), 2 * max(num_backwards, 1))
            mine = _split_widest(_merge_idle(mine, between), order, allowed, between)
        planned[unit] = mine
    return planned


def _span(uses: list[Use], order: dict[fx.Node, int]) -> GatherSpan:
    return GatherSpan(order[uses[0][0]], order[uses[-1][0]], uses)


def _regions(units: list[GatherUnit], order: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """Number the stretches of forward and backward that the readers of all sources lie in."""
    readers = sorted({use[0] for unit in units for use in unit.owner}, key=order.__getitem__)
    runs = enumerate(itertools.groupby(readers, is_backward))
    return {reader: number for number, (_, run) in runs for reader in run}


def _merge_idle(spans: list[GatherSpan], bytes_between) -> list[GatherSpan]:
    merged: list[GatherSpan] = []
    for span in spans:
        if merged and bytes_between(merged[-1].last, span.first) == 0:
            merged[-1] = merged[-1].joined(span)
        else:
            merged.append(span)
    return merged


def _split_widest(spans, order, allowed, bytes_between) -> list[GatherSpan]:
    spans = list(spans)
    while len(spans) < allowed:
        gaps = {
            (index, cut): bytes_between(order[span.uses[cut - 1][0]], order[span.uses[cut][0]])
            for index, span in enumerate(spans)
            for cut in range(1, len(span.uses))
        }
        if not any(gaps.values()):
            break
        index, cut = max(gaps, key=gaps.__getitem__)
        uses = spans[index].uses
        spans[index : index + 1] = [_span(uses[:cut], order), _span(uses[cut:], order)]
    return spans


def insert_gathers(
    builder: Builder, sources: list[GatherSource], ctx: PassContext
) -> dict[str, int]:
    """Gather, rebuild what readers read, free after the last of them; return counts."""
    wanted = [source for source in sources if source.uses]
    if not wanted:
        return {"gathers": 0}
    order = program_order(builder.graph)
    units = group_sources(wanted, ctx.options.gather_dtype)
    spans = plan_spans(units, order, ctx.num_backwards)
    planned = sum(map(len, spans.values()))
    decides = ctx.options.memory_budget is not None or ctx.decided.residency
    if decides and any(unit.regather for unit in units):
        rebuilt = {node for source in wanted for node in (source.node, *source.chain)}
        residency = ctx.decided.residency or decide(builder.graph, ctx, spans, rebuilt)
        note_decisions(builder.graph, residency=residency)
        if residency.kept_gathered is not None:
            spans = with_cuts(spans, residency.kept_gathered.cuts)
    gathered = []
    for unit in units:
        there = unit
        for number, span in enumerate(spans[unit]):
            reason = _why_gathered(unit, span, number, ctx.options.memory_budget)
            readable = _readable(unit, span)
            if readable != there.sources:
                there = GatherUnit(readable, unit.code)
            gathered.append(_gather(builder, there, span, reason, ctx.options.secondary_shard))
    for wait in gathered:
        last = last_use(aliases(wait))
        if last.op == "output":
            continue  # the caller's now
        origin = {"parameter": parameter_of(wait), "bucket": bucket_of(wait), "like": last}
        with builder.before(last.next, role=Role.FREE, **origin) as call:
            call(ops.free, wait)
    return {"gathers": len(gathered), "kept from forward to backward": planned - len(gathered)}


def _readable(unit: GatherUnit, span: GatherSpan) -> list[GatherSource]:
    """Return the sources of a unit that a span's gather may read.

    One that is written to before the span has lost its value, and is left out: if only others of
    its bucket are read there, they are gathered without it.
    """
    first, read = span.uses[0][0], {unit.owner[use] for use in span.uses}

    def is_overwritten(source: GatherSource) -> bool:
        return any(writer < first for writer in writers(source.shard))

    return [source for source in unit.sources if source in read or not is_overwritten(source)]


def _why_gathered(unit: GatherUnit, span: GatherSpan, number: int, budget: int | None) -> str:
    """In words of the dump: why here, and why it is not gathered once for all its readers."""
    size = f"{unit.nbytes / 1e6:.3g} MB"
    directions = {is_backward(reader) for reader, _ in span.uses}
    readers = "forward and backward" if len(directions) > 1 else "backward"
    readers = readers if True in directions else "forward"
    if number:
        limit = "no memory_budget is set" if budget is None else "it does not fit memory_budget"
        return f"{size} again for {readers}: to keep it since its last gather, {limit}"
    if len(directions) > 1 and unit.regather and budget is not None:
        return f"{size} once for {readers}: it fits memory_budget, or nothing lies between"
    return f"{size} for {readers}"


def _gather(
    builder: Builder, unit: GatherUnit, span: GatherSpan, reason: str, keeps_second: str | None
) -> fx.Node:
    """Insert one gather before the span's first reader; return its ``wait``."""
    source = unit.sources[0]
    origin = builder.serving([source.parameter.index])
    with builder.before(span.uses[0][0], role=Role.GATHER, **origin) as call:
        mesh, is_cut_twice = builder.mesh, False
        if mesh.is_cut:
            is_cut_twice = source.parameter.world_size == mesh.num_shards
        shard = unit.second_shard or pack_shards(call, unit, mesh)
        if source.cast_to is not None and unit.second_shard is None:
            cast = {"dtype": source.cast_to, "role": Role.GATHER_CAST}
            shard = call(aten._to_copy.default, shard, **cast)
        if is_cut_twice and unit.second_shard is None:
            hop = partial(call, role=Role.GATHER_SHARD)
            over, size = mesh.over(mesh.outer), mesh.size(mesh.outer)
            if keeps_second and unit.regather:
                is_new = any(each.shard.op != "placeholder" for each in unit.sources)
                start = hop(ops.refill_start, shard, unit.indices, size, is_new, **over)
                wait = shard = unit.second_shard = hop(ops.wait, start)
            else:
                start = hop(ops.all_gather_start, shard, size, **over)
                wait = shard = hop(ops.wait, start)
        if not source.is_joined:
            size = mesh.size(mesh.inner) if mesh.outer else source.parameter.world_size
            over = mesh.over(mesh.inner)
            start = call(ops.all_gather_start, shard, size, **over, reason=reason)
            wait = call(ops.wait, start)
    rebuilt: dict[fx.Node, fx.Node] = {}
    for reader, wanted in span.uses:
        source = unit.owner[reader, wanted]
        with builder.graph.inserting_before(reader):
            if source.node not in rebuilt:
                rebuilt[source.node] = _taken_from(builder, wait, source, reader)
            reader.replace_input_with(wanted, _rebuild(builder, wanted, source, rebuilt, reader))
    return wait


def pack_shards(call: Callable[..., fx.Node], unit: GatherUnit, mesh: Mesh) -> fx.Node:
    """This rank's shard of what the unit gathers: its one shard, or its bucket's."""
    sources = sorted(unit.sources, key=lambda source: source.parameter.place.offset)
    info = sources[0].parameter
    if not info.shares_bucket:
        return sources[0].shard
    shards = [source.shard for source in sources]
    indices = [source.parameter.index for source in sources]
    over = mesh.cut_in(info.world_size)
    return call(ops.pack, shards, indices, info.place.shard_numel, **over, role=Role.PACK)


def _taken_from(builder: Builder, wait: fx.Node, source: GatherSource, reader: fx.Node) -> fx.Node:
    """Return a source's whole value, or its kept shard, as a part of the gathered buffer."""
    info = source.parameter
    if not source.is_joined:
        whole = unflatten(builder, wait, info, source.shape or info.shape, reader)
        return _laid_out_like(builder, whole, source, reader)
    begin, numel = info.kept.position_in_shard, info.kept.shard_numel
    if not info.shares_bucket:
        return wait
    origin = {"role": Role.KEPT_SHARD, "parameter": info.index, "like": reader}
    return builder.call(aten.slice.Tensor, wait, 0, begin, begin + numel, **origin)


def _laid_out_like(
    builder: Builder, whole: fx.Node, source: GatherSource, reader: fx.Node
) -> fx.Node:
    """Return a gathered value in the layout that what reads it was traced for.

    That of a gradient may be another than its parameter's, in whose order shards are cut.
    """
    wanted, given = source.node.meta["val"], whole.meta["val"]
    if source.node.op == "placeholder" or _layout(wanted) == _layout(given):
        return whole
    origin = {"role": Role.WHOLE, "parameter": source.parameter.index, "like": reader}
    layout = (list(given.shape), list(wanted.stride()))
    empty = builder.call(aten.new_empty_strided.default, whole, *layout, **origin)
    return builder.call(aten.copy.default, empty, whole, **origin)


def _layout(value: torch.Tensor) -> list[int]:
    """Return the strides of the dimensions along which a step is ever taken."""
    return [step for size, step in zip(value.shape, value.stride(), strict=True) if size > 1]


def _rebuild(
    builder: Builder,
    node: fx.Node,
    source: GatherSource,
    rebuilt: dict[fx.Node, fx.Node],
    reader: fx.Node,
) -> fx.Node:
    """Repeat on the gathered copy the views and casts between the source and ``node``."""
    if node in rebuilt:
        return rebuilt[node]
    for operand in node.all_input_nodes:
        if operand in source.chain or operand is source.node:
            _rebuild(builder, operand, source, rebuilt, reader)
    rebuilt[node] = builder.copy(node, rebuilt)
    if is_backward(reader):
        rebuilt[node].meta["autograd_backward"] = True
    return rebuilt[node]


def unflatten(
    builder: Builder, flat: fx.Node, info: ParameterInfo, shape: tuple[int, ...], like: fx.Node
) -> fx.Node:
    """View a gathered flat buffer as the whole tensor: cut, shape, undo the storage order."""
    view = partial(builder.call, role=Role.WHOLE, parameter=info.index, like=like)
    start = info.place.offset
    if flat.meta["val"].shape[0] != info.numel:
        flat = view(aten.slice.Tensor, flat, 0, start, start + info.numel)
    if info.is_contiguous or shape != info.shape:
        return view(aten.view.default, flat, list(shape))
    permuted = view(aten.view.default, flat, [info.shape[dim] for dim in info.storage_order])
    inverse = [info.storage_order.index(dim) for dim in range(len(info.shape))]
    return view(aten.permute.default, permuted, inverse)


def flatten(builder: Builder, whole: fx.Node, info: ParameterInfo, like: fx.Node) -> fx.Node:
    """Lay a whole tensor out flat in storage order, padded for ``reduce_scatter``."""
    call = partial(builder.call, role=Role.FLATTEN, parameter=info.index, like=like)
    if not info.is_contiguous:
        whole = call(aten.permute.default, whole, list(info.storage_order))
    is_contiguous = whole.meta["val"].is_contiguous()
    reshape = aten.view.default if is_contiguous else aten.reshape.default
    flat = call(reshape, whole, [info.numel])
    padding = info.place.extent - info.numel
    return call(aten.constant_pad_nd.default, flat, [0, padding], 0.0) if padding else flat
