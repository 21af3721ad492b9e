"""Tensors that every rank has a shard of, computed with by one rank each, their owner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from zerofx.ir.parameters import ParameterInfo
from zerofx.runtime.comm.communication import Communicator
from zerofx.runtime.memory.flat import whole_from_flat


def compute_on_owners(
    shards: Sequence[Tensor],
    infos: Sequence[ParameterInfo],
    owners: Sequence[int],
    dtypes: Sequence[torch.dtype],
    compute: Callable[[int, Tensor], Tensor],
    communicator: Communicator,
) -> list[Tensor]:
    """Gather each tensor on its owner, compute there, and scatter the results.  Collective.

    ``compute(position, whole)`` returns a tensor of the parameter's shape and of this ``dtypes``;
    the owner calls it.  ``infos`` say what each rank holds.  All tensors of one owner travel
    together, as bytes, without padding: an element goes to its owner once, and comes back once.

    Shapes: ``[info.shard_numel]`` each, in and out; padding comes out as zero.
    """
    rank, ranks = communicator.rank, range(communicator.world_size)
    mine = [position for position, owner in enumerate(owners) if owner == rank]
    parts = [shard[: _length(info, rank)] for shard, info in zip(shards, infos, strict=True)]
    received = _exchanged(
        [[parts[i] for i, owner in enumerate(owners) if owner == other] for other in ranks],
        [[(_length(infos[i], other), shards[i].dtype) for i in mine] for other in ranks],
        shards[0],
        communicator,
    )
    results: dict[int, Tensor] = {}
    for number, position in enumerate(mine):
        flat = torch.cat([received[other][number] for other in ranks])
        made = compute(position, whole_from_flat(flat, infos[position]))
        results[position] = made.permute(infos[position].storage_order).reshape(-1)
    returned = _exchanged(
        [[results[i][slice(*infos[i].owned_by(other))] for i in mine] for other in ranks],
        [
            [
                (_length(infos[i], rank), dtypes[i])
                for i, owner in enumerate(owners)
                if owner == other
            ]
            for other in ranks
        ],
        shards[0],
        communicator,
    )
    pieces = {owner: iter(found) for owner, found in enumerate(returned)}
    return [
        _padded(next(pieces[owner]), shard.numel())
        for shard, owner in zip(shards, owners, strict=True)
    ]


def _length(info: ParameterInfo, rank: int) -> int:
    start, stop = info.owned_by(rank)
    return stop - start


def _exchanged(
    sent: Sequence[Sequence[Tensor]],
    expected: Sequence[Sequence[tuple[int, torch.dtype]]],
    like: Tensor,
    communicator: Communicator,
) -> list[list[Tensor]]:
    """Send flat tensors to each rank; return those that each has sent here, as announced."""
    pieces = [[tensor.contiguous().view(torch.uint8) for tensor in part] for part in sent]
    nothing = torch.empty(0, dtype=torch.uint8, device=like.device)
    flat = torch.cat([nothing, *(piece for part in pieces for piece in part)])
    sizes = [[numel * dtype.itemsize for numel, dtype in part] for part in expected]
    received = communicator.all_to_all(
        flat, [sum(map(len, part)) for part in pieces], [sum(part) for part in sizes]
    )
    starts = accumulate((size for part in sizes for size in part), initial=0)
    return [
        [
            _of_dtype(received[start : start + numel * dtype.itemsize], dtype)
            for (numel, dtype), start in zip(part, starts, strict=False)
        ]
        for part in expected
    ]


def _of_dtype(data: Tensor, dtype: torch.dtype) -> Tensor:
    """View bytes as numbers; a copy where they do not begin at a multiple of a number's size."""
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype)


def _padded(data: Tensor, length: int) -> Tensor:
    if len(data) == length:
        return data
    padded = data.new_zeros(length)
    padded[: len(data)] = data
    return padded
