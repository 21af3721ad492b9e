"""Flat shards and the whole tensors they are cut from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from zerofx.plan import ParameterInfo, shard_bounds, storage_order

# Small tensors travel to the other ranks together, in messages of at most this size.
_COALESCED_BYTES = 4 * 1024 * 1024


@contextlib.contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Make what is created here usable by any later step.

    The first call may be an evaluation under ``torch.inference_mode()``, whose tensors can
    never be updated afterwards.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield


def take_shard(whole: torch.Tensor, info: ParameterInfo, rank: int) -> torch.Tensor:
    """Return a copy of the range that ``rank`` owns, flat and padded with zeros.

    Shapes: ``info.shape`` -> ``[info.shard_numel]``, in storage order.
    """
    shard = torch.zeros(info.shard_numel, dtype=whole.dtype, device=info.device)
    copy_range(shard, whole, info, rank)
    return shard


def copy_range(shard: torch.Tensor, whole: torch.Tensor, info: ParameterInfo, rank: int) -> None:
    """Write the range of ``whole`` that ``rank`` owns into its shard; padding stays as it is."""
    start, stop = shard_bounds(info.numel, rank, info.world_size)
    flat = whole.detach().permute(info.storage_order).reshape(-1)
    shard[: stop - start].copy_(flat[start:stop])


def whole_from_flat(flat: torch.Tensor, info: ParameterInfo) -> torch.Tensor:
    """View a gathered flat buffer as the parameter, with its strides.

    Shapes: ``[info.padded_numel]`` or ``[info.numel]`` -> ``info.shape``.
    """
    return flat.as_strided(info.shape, info.stride)


def gather(shard: torch.Tensor, info: ParameterInfo, communicator: Any) -> torch.Tensor:
    """Return the whole tensor that every rank holds a shard of.  Collective.

    It travels as bytes: gloo has no complex numbers, nor all of the small floats.

    Shapes: ``[info.shard_numel]`` -> ``info.shape``, in memory of its own.
    """
    if info.numel == 0:
        return shard.new_empty_strided(info.shape, info.stride)
    flat = communicator.gather_whole(shard.view(torch.uint8)).view(shard.dtype)
    whole = whole_from_flat(flat, info)
    # Without padding in its storage (which torch.save would write out), and never the shard.
    owned = flat.numel() == info.numel and flat.data_ptr() != shard.data_ptr()
    return whole if owned else whole.clone(memory_format=torch.preserve_format)


def _memory_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a dense tensor's memory as flat bytes.  Raises: ValueError if it is not dense."""
    order = storage_order(tuple(tensor.shape), tensor.stride())
    return tensor.detach().permute(order).view(-1).view(torch.uint8)


def make_equal(tensors: Iterable[torch.Tensor], communicator: Any) -> None:
    """Overwrite every tensor with rank 0's, small ones together.  Collective."""
    if communicator.world_size == 1:
        return
    pending: list[torch.Tensor] = []

    def flush() -> None:
        if not pending:
            return
        message = torch.cat(pending)
        communicator.broadcast(message)
        for data, received in zip(pending, message.split([len(d) for d in pending]), strict=True):
            data.copy_(received)
        pending.clear()

    for tensor in tensors:
        try:
            data = _memory_bytes(tensor)
        except ValueError:  # a buffer with holes or overlaps; parameters were checked before
            packed = tensor.detach().contiguous()
            communicator.broadcast(_memory_bytes(packed))
            tensor.copy_(packed)
            continue
        if len(data) >= _COALESCED_BYTES:
            communicator.broadcast(data)
            continue
        bytes_after = sum(map(len, pending)) + len(data)
        if pending and (bytes_after > _COALESCED_BYTES or pending[0].device != data.device):
            flush()
        if len(data):
            pending.append(data)
    flush()


def without_storage(info: ParameterInfo) -> torch.Tensor:
    """Return a tensor of the parameter's shape and strides that has no memory."""
    tensor = torch.empty_strided(info.shape, info.stride, dtype=info.dtype, device=info.device)
    tensor.untyped_storage().resize_(0)
    return tensor
