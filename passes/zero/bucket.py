"""Lay parameters out in buckets, so that what is used together travels together."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from zerofx.accelerator import is_accelerator
from zerofx.ir import ops
from zerofx.ir.aliases import aliased_inputs
from zerofx.ir.graph import Builder, is_backward
from zerofx.ir.interface import input_role, note_decisions, placeholders
from zerofx.ir.parameters import ParameterInfo, ParameterTable, Place, shard_numel
from zerofx.ir.reach import reached
from zerofx.ir.roles import Role, parameter_of, role
from zerofx.passes.base import Counts, PassContext
from zerofx.passes.schedule.placement import stagger_waits
from zerofx.passes.zero.elementwise import CASTS

aten = torch.ops.aten

ALIGNMENT_BYTES = 16
"""The alignment of parameters and shards on a CPU: its vectors take what is not aligned as well."""

ALIGNMENT = 128
"""That on an accelerator, in elements: 128 bytes at least of whatever travels, as NCCL, cuBLAS and
the widest loads of a thread like it."""

SPARED_BYTES, SPARED_SHARE = 64 * 2**10, 64
"""Biases join their weights, though backward does not read them, up to this size or share.

A collective of its own takes 0.3 ms on gloo, in which 300 kB travel.
"""


def bucket(gm: fx.GraphModule, ctx: PassContext) -> Counts:
    """Give the parameters of one layer a common flat layout, up to ``bucket_bytes``.

    The program stays as it is; the shard passes then move a bucket with one collective::

        without   w: gather, gather, reduce-scatter    b: gather, gather, reduce-scatter
        with      [w, b]: gather, gather, reduce-scatter

    Parameters stand in the order of their first use.  A bucket holds parameters of one dtype
    and device that are used in the same dtypes, all trained or all frozen.  A larger parameter
    has a bucket of its own, and one that a model has been bound with keeps its place.

    At stage 0 there is no shard pass, and the all-reduces of a bucket's gradients become one here,
    as soon as the last of these is there::

        g = wait(all_reduce_start(a, "mean"));  h = wait(all_reduce_start(b, "mean"))

        flat = wait(all_reduce_bucket_start([a, b], [0, 1], 16, "mean"))
        g = flat[0:8].view(2, 4);  h = flat[8:12].view(4)

    Each gradient has the values and the layout that it had: ranks' values are added in their order,
    element by element, but on NCCL, which has an order of its own for each buffer.
    """
    places = ctx.decided.layout
    if places is None:
        places = _by_layer(gm.graph, ctx)
    note_decisions(gm.graph, layout=places)
    ctx.table.assign(places)
    counts = {
        "buckets": len({info.place.bucket for info in ctx.table if info.shares_bucket}),
        "parameters in them": sum(info.shares_bucket for info in ctx.table),
    }
    if ctx.options.stage == 0 and ctx.world_size > 1:
        counts["all-reduces"] = _reduce_together(gm, ctx)
    return counts


def _reduce_together(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Make the all-reduces of a bucket's gradients one; return how many all-reduces are left."""
    builder, pairs = Builder(gm, "bucket", ctx.table), []
    waits = gm.graph.find_nodes(op="call_function", target=ops.wait)
    waits = [node for node in waits if role(node) == Role.REDUCE_GRADIENT and node.users]
    for group in travelling_together(waits, ctx.table):
        start, wait = group[0].args[0], group[0]
        if len(group) > 1:
            start, wait = _all_reduce_bucket(builder, ctx.table, group)
        pairs.append((start, wait))
    stagger_waits(pairs)
    return len(pairs)


def _all_reduce_bucket(
    builder: Builder, table: ParameterTable, group: list[fx.Node]
) -> tuple[fx.Node, fx.Node]:
    """One all-reduce of a bucket's gradients, each then a range of its result, in its shape."""
    members = sorted(group, key=lambda wait: table[parameter_of(wait)].place.offset)
    infos = [table[parameter_of(wait)] for wait in members]
    indices, numel = [info.index for info in infos], infos[0].place.shard_numel
    starts = [wait.args[0] for wait in members]
    given = ([start.args[0] for start in starts], indices, numel * infos[0].world_size)
    first_reader = min(user for wait in members for user in wait.users)
    origin = {"role": Role.REDUCE_GRADIENT, **builder.serving(indices), "like": max(starts)}
    with builder.before(min(max(starts), first_reader), **origin) as call:
        start = call(ops.all_reduce_bucket_start, *given, starts[0].args[1], **starts[0].kwargs)
        reduced = call(ops.wait, start)
    for wait, info in zip(members, infos, strict=True):
        origin = {"role": Role.REDUCED_GRADIENT, "parameter": info.index, "like": wait}
        with builder.before(min(wait.users), **origin) as call:
            begin = info.place.offset
            part = call(aten.slice.Tensor, reduced, 0, begin, begin + info.numel)
            whole = call(aten.view.default, part, list(info.shape), role=Role.WHOLE)
        wait.replace_all_uses_with(whole)
        builder.graph.erase_node(wait)
    for member in starts:
        builder.graph.erase_node(member)
    return start, reduced


def travelling_together(waits: Iterable[fx.Node], table: ParameterTable) -> list[list[fx.Node]]:
    """Gradients of one bucket that are all there before anyone reads one; in program order."""
    groups: list[list[fx.Node]] = []
    open_groups: dict[tuple, list[fx.Node]] = {}
    for wait in sorted(waits, key=lambda wait: min(wait.users)):
        gradient = wait.args[0].args[0]
        info = table[parameter_of(wait)]
        key = (info.place.bucket, gradient.meta["val"].dtype, wait.args[0].args[1])
        group = open_groups.get(key)
        if group is not None:
            seen = any(parameter_of(other) == info.index for other in group)
            if seen or not gradient < min(min(other.users) for other in group):
                group = None
        if group is None:
            group = open_groups[key] = []
            groups.append(group)
        group.append(wait)
    return groups


def _by_layer(graph: fx.Graph, ctx: PassContext) -> dict[int, Place]:
    used = [node for node in placeholders(graph, "parameter") if node.users]
    members: dict[tuple, list[ParameterInfo]] = {}
    forward_only: set[int] = set()
    for node in sorted(used, key=lambda node: min(node.users)):
        info = ctx.table[input_role(node).parameter]
        if info.index in ctx.bound:
            continue
        if not _is_read_in_backward(node):
            forward_only.add(info.index)
        travels_as = frozenset(
            user.meta["val"].dtype if user.target in CASTS else info.dtype for user in node.users
        )
        key = (layer_of(info.name), info.dtype, info.device, info.requires_grad, travels_as)
        members.setdefault(key, []).append(info)
    places: dict[int, Place] = {}
    for (_, dtype, device, _, travels_as), layer in members.items():
        limit = ctx.bucket_bytes
        if is_accelerator(device):  # of what travels, such as bf16 under autocast
            limit *= dtype.itemsize / max(one.itemsize for one in travels_as)
        for group in filter(None, _of_one_lifetime(layer, forward_only)):
            for full in _filled(group, limit):
                places |= lay_out(full)
    return places


def _is_read_in_backward(parameter: fx.Node) -> bool:
    def same_values(node: fx.Node) -> list[fx.Node]:
        users = node.users
        return [user for user in users if user.target in CASTS or node in aliased_inputs(user)]

    return any(
        is_backward(user) for node in reached([parameter], same_values) for user in node.users
    )


def _of_one_lifetime(
    layer: list[ParameterInfo], forward_only: set[int]
) -> list[list[ParameterInfo]]:
    """Split off what only forward reads, lest it is gathered again for backward.

    Unless it is next to nothing: a collective more costs more than the biases it would spare.
    """
    short = [info for info in layer if info.index in forward_only]
    rest = [info for info in layer if info.index not in forward_only]
    nbytes = sum(map(_extent_bytes, short))
    if nbytes <= max(SPARED_BYTES, sum(map(_extent_bytes, rest)) // SPARED_SHARE):
        return [layer]
    return [rest, short]


def _filled(group: list[ParameterInfo], limit: float) -> list[list[ParameterInfo]]:
    """Cut a list, in its order, into buckets of at most ``limit`` bytes each."""
    buckets: list[list[ParameterInfo]] = [[]]
    for info in group:
        full = buckets[-1]
        if full and sum(map(_extent_bytes, full)) + _extent_bytes(info) > limit:
            buckets.append(full := [])
        full.append(info)
    return buckets


def layer_of(name: str) -> str:
    """The layer that a parameter belongs to, by its name: what is numbered, or its module.

    ``h.3.attn.weight`` is of ``h.3``; ``wte.weight`` of ``wte``.
    """
    parts = name.split(".")
    for position, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: position + 1])
    return ".".join(parts[:-1])


def lay_out(parameters: list[ParameterInfo]) -> dict[int, Place]:
    """Places, by index, of parameters one after the other.

    None for one alone, but on an accelerator if its equal shares would not be aligned.
    """
    first = parameters[0]
    alignment = max(ALIGNMENT_BYTES // first.dtype.itemsize, 1)
    if is_accelerator(first.device):
        alignment = ALIGNMENT
    if len(parameters) < 2 and (alignment < ALIGNMENT or not first.share_numel % alignment):
        return {}
    offsets = [0]
    for info in parameters:
        offsets.append(offsets[-1] + _aligned(info.numel, alignment))
    per_rank = _aligned(shard_numel(offsets[-1], first.world_size), alignment)
    offsets[-1] = per_rank * first.world_size  # the last one holds the padding
    return {
        info.index: Place(first.index, start, stop - start, per_rank)
        for info, start, stop in zip(parameters, offsets, offsets[1:], strict=False)
    }


def _aligned(numel: int, alignment: int) -> int:
    return -(-numel // alignment) * alignment


def _extent_bytes(info: ParameterInfo) -> int:
    return _aligned(info.nbytes, ALIGNMENT_BYTES)
