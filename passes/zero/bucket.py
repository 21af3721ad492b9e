"""Lay parameters out in buckets, so that what is used together travels together."""

from __future__ import annotations

from torch import fx

from zerofx.accelerator import is_accelerator
from zerofx.ir.aliases import aliased_inputs
from zerofx.ir.graph import is_backward
from zerofx.ir.interface import input_role, note_decisions, placeholders
from zerofx.ir.parameters import ParameterInfo, Place, shard_numel
from zerofx.passes.base import Counts, PassContext
from zerofx.passes.zero.elementwise import CASTS

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
    """
    places = ctx.decided.layout
    if places is None:
        places = _by_layer(gm.graph, ctx)
    note_decisions(gm.graph, layout=places)
    ctx.table.assign(places)
    return {
        "buckets": len({info.place.bucket for info in ctx.table if info.shares_bucket}),
        "parameters in them": sum(info.shares_bucket for info in ctx.table),
    }


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
    pending = [parameter]
    while pending:
        node = pending.pop()
        for user in node.users:
            if is_backward(user):
                return True
            if user.target in CASTS or node in aliased_inputs(user):
                pending.append(user)
    return False


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
