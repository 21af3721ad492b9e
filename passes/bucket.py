"""Lay parameters out in buckets, so that what is used together travels together."""

from __future__ import annotations

import torch
from torch import fx

from zerofx.graph import input_role, placeholders, program_order
from zerofx.passes.base import Counts, PassContext
from zerofx.passes.elementwise import CASTS
from zerofx.plan import ParameterInfo, Place, shard_numel

ALIGNMENT_BYTES = 16
"""What parameters and shards begin at a multiple of: the widest load of a GPU's thread."""


def bucket(gm: fx.GraphModule, ctx: PassContext) -> Counts:
    """Give the parameters of one layer a common flat layout, up to ``bucket_bytes``.

    The program stays as it is; the shard passes then move a bucket with one collective::

        without   w: gather, gather, reduce-scatter    b: gather, gather, reduce-scatter
        with      [w, b]: gather, gather, reduce-scatter

    Parameters stand in the order of their first use.  A bucket holds parameters of one dtype
    and device that are used in the same dtypes, all trained or all frozen.  A larger parameter
    has a bucket of its own, and one that a model has been bound with keeps its place.
    """
    order = program_order(gm.graph)
    used = [
        (min(order[user] for user in node.users), node)
        for node in placeholders(gm.graph, "parameter")
        if node.users
    ]
    members: dict[tuple, list[ParameterInfo]] = {}
    places: dict[int, Place] = {}
    for _, node in sorted(used, key=lambda pair: pair[0]):
        info = ctx.table[input_role(node).parameter]
        if info.index in ctx.bound:
            continue
        travels_as = frozenset(_dtype_of_use(user, info) for user in node.users)
        key = (layer_of(info.name), info.dtype, info.device, info.requires_grad, travels_as)
        full = members.setdefault(key, [])
        if full and sum(map(_extent_bytes, full)) + _extent_bytes(info) > ctx.bucket_bytes:
            places |= lay_out(full)
            full = members[key] = []
        full.append(info)
    for left in members.values():
        places |= lay_out(left)
    ctx.table.assign(places)
    return {
        "buckets": len({place.bucket for place in places.values()}),
        "parameters in them": len(places),
    }


def _dtype_of_use(user: fx.Node, info: ParameterInfo) -> torch.dtype:
    return user.meta["val"].dtype if user.target in CASTS else info.dtype


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
    """Places, by index, of parameters one after the other; none for a parameter alone."""
    if len(parameters) < 2:
        return {}
    first = parameters[0]
    alignment = max(ALIGNMENT_BYTES // first.dtype.itemsize, 1)
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
