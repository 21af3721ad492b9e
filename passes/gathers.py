"""When a sharded value is needed whole: how many gathers, where each begins and is freed."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from torch import fx

from zerofx import ops
from zerofx.graph import Builder, aliases, is_backward, last_use, parameter_of, program_order
from zerofx.passes.base import PassContext
from zerofx.plan import ParameterInfo

aten = torch.ops.aten


@dataclass(eq=False)
class GatherSource:
    """A flat shard and who needs its whole value.

    ``uses`` are (reader, what it reads): the source itself or one of ``chain``, the views and
    casts of it that are repeated on every gathered copy.  ``regather`` allows several gathers;
    without it the whole value is gathered once and lives from its first reader to its last.
    With ``cast_to`` the shard is cast before each gather.
    """

    node: fx.Node
    parameter: ParameterInfo
    shard: fx.Node
    regather: bool = False
    cast_to: torch.dtype | None = None
    shape: tuple[int, ...] | None = None
    uses: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)
    chain: set[fx.Node] = field(default_factory=set)

    @property
    def nbytes(self) -> int:
        dtype = self.cast_to or self.shard.meta["val"].dtype
        return self.parameter.padded_numel * dtype.itemsize


@dataclass
class GatherSpan:
    """Program positions of the first and last reader of one gathered copy."""

    first: int
    last: int
    uses: list[tuple[fx.Node, fx.Node]]


def plan_spans(
    sources: list[GatherSource], order: dict[fx.Node, int], num_backwards: int
) -> dict[GatherSource, list[GatherSpan]]:
    """Split each source's readers into spans, each served by one gather.

    A parameter is gathered for forward and again for backward, never kept in between, unless
    nothing else would be gathered meanwhile (the last layer).  That leaves some parameters
    with a gather to spare within the two that stage 3 pays for; it is spent where the whole
    value would sit through most bytes of others (a tied embedding between its two ends).
    """
    regions = _regions(sources, order)
    spans = {}
    for source in sources:
        uses = sorted(source.uses, key=lambda use: order[use[0]])
        spans[source] = _by_region(uses, order, regions) if source.regather else _one(uses, order)
    passing = [(span, source) for source, planned in spans.items() for span in planned]

    def bytes_between(source: GatherSource, start: int, stop: int) -> int:
        return sum(
            other.nbytes
            for span, other in passing
            if other is not source and start < span.first and span.last < stop
        )

    planned = {}
    for source, mine in spans.items():
        if not source.regather:
            planned[source] = mine
            continue
        allowed = max(len(mine), 2 * max(num_backwards, 1))
        mine = _merge_idle(mine, lambda a, b, s=source: bytes_between(s, a, b))
        planned[source] = _split_widest(
            mine, order, allowed, lambda a, b, s=source: bytes_between(s, a, b)
        )
    return planned


def _one(uses, order) -> list[GatherSpan]:
    return [GatherSpan(order[uses[0][0]], order[uses[-1][0]], uses)] if uses else []


def _regions(sources: list[GatherSource], order: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """Number the stretches of forward and backward that the readers of all sources lie in."""
    readers = sorted({use[0] for source in sources for use in source.uses}, key=order.__getitem__)
    regions: dict[fx.Node, int] = {}
    region = 0
    for previous, reader in zip([None, *readers], readers, strict=False):
        if previous is not None and is_backward(previous) != is_backward(reader):
            region += 1
        regions[reader] = region
    return regions


def _by_region(uses, order, regions) -> list[GatherSpan]:
    spans = []
    for _, group in itertools.groupby(uses, key=lambda use: regions[use[0]]):
        spans += _one(list(group), order)
    return spans


def _merge_idle(spans: list[GatherSpan], bytes_between) -> list[GatherSpan]:
    merged: list[GatherSpan] = []
    for span in spans:
        if merged and bytes_between(merged[-1].last, span.first) == 0:
            merged[-1] = GatherSpan(merged[-1].first, span.last, merged[-1].uses + span.uses)
        else:
            merged.append(span)
    return merged


def _split_widest(spans, order, allowed, bytes_between) -> list[GatherSpan]:
    spans = list(spans)
    while len(spans) < allowed:
        widest, where = 0, None
        for index, span in enumerate(spans):
            for cut in range(1, len(span.uses)):
                gap = bytes_between(order[span.uses[cut - 1][0]], order[span.uses[cut][0]])
                if gap > widest:
                    widest, where = gap, (index, cut)
        if where is None:
            return spans
        index, cut = where
        left, right = spans[index].uses[:cut], spans[index].uses[cut:]
        spans[index : index + 1] = [*_one(left, order), *_one(right, order)]
    return spans


def insert_gathers(builder: Builder, sources: list[GatherSource], ctx: PassContext) -> int:
    """Gather, rebuild what readers read, free after the last of them; return the count."""
    wanted = [source for source in sources if source.uses]
    if not wanted:
        return 0
    spans = plan_spans(wanted, program_order(builder.graph), ctx.num_backwards)
    gathered = []
    for source in wanted:
        for span in spans[source]:
            gathered.append(_gather(builder, source, span))
    order = program_order(builder.graph)
    for wait in gathered:
        last = last_use(aliases(wait), order)
        if last.op == "output":
            continue  # the caller's now
        with builder.graph.inserting_after(last):
            builder.call(
                ops.free,
                wait,
                role="free",
                parameter=parameter_of(wait),
                like=last,
            )
    return len(gathered)


def _gather(builder: Builder, source: GatherSource, span: GatherSpan) -> fx.Node:
    """Insert one gather before the span's first reader; return its ``wait``."""
    graph, info = builder.graph, source.parameter
    reader = span.uses[0][0]
    origin = {"parameter": info.index, "like": reader}
    with graph.inserting_before(reader):
        shard = source.shard
        if source.cast_to is not None:
            shard = builder.call(
                aten._to_copy.default, shard, dtype=source.cast_to, role="gather_cast", **origin
            )
        start = builder.call(ops.all_gather_start, shard, info.world_size, role="gather", **origin)
        wait = builder.call(ops.wait, start, role="gather", **origin)
        whole = unflatten(builder, wait, info, source.shape or info.shape, **origin)
    rebuilt = {source.node: whole}
    for reader, wanted in span.uses:
        with graph.inserting_before(reader):
            reader.replace_input_with(wanted, _rebuild(builder, wanted, source, rebuilt, reader))
    return wait


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
    rebuilt[node] = builder.copy(node, lambda operand: rebuilt.get(operand, operand))
    if is_backward(reader):
        rebuilt[node].meta["autograd_backward"] = True
    return rebuilt[node]


def unflatten(
    builder: Builder, flat: fx.Node, info: ParameterInfo, shape: tuple[int, ...], **origin
) -> fx.Node:
    """View a gathered flat buffer as the whole tensor: unpad, shape, undo the storage order."""
    node = flat
    if info.padded_numel != info.numel:
        node = builder.call(aten.slice.Tensor, node, 0, 0, info.numel, role="whole", **origin)
    if info.is_contiguous or shape != info.shape:
        return builder.call(aten.view.default, node, list(shape), role="whole", **origin)
    permuted = [info.shape[dim] for dim in info.storage_order]
    node = builder.call(aten.view.default, node, permuted, role="whole", **origin)
    inverse = [info.storage_order.index(dim) for dim in range(len(info.shape))]
    return builder.call(aten.permute.default, node, inverse, role="whole", **origin)


def flatten(builder: Builder, whole: fx.Node, info: ParameterInfo, **origin) -> fx.Node:
    """Lay a whole tensor out flat in storage order, padded for ``reduce_scatter``."""
    node = whole
    if not info.is_contiguous:
        node = builder.call(
            aten.permute.default, node, list(info.storage_order), role="flatten", **origin
        )
    value = node.meta["val"]
    target = aten.view.default if value.is_contiguous() else aten.reshape.default
    node = builder.call(target, node, [info.numel], role="flatten", **origin)
    padding = info.padded_numel - info.numel
    if padding:
        node = builder.call(
            aten.constant_pad_nd.default, node, [0, padding], 0.0, role="flatten", **origin
        )
    return node
