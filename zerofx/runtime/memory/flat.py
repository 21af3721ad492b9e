"""Flat shards and the whole tensors they are cut from."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar

import torch

from zerofx.ir.parameters import ParameterInfo, storage_order
from zerofx.ir.wires import gaps
from zerofx.runtime.memory.pages import BufferPool

T = TypeVar("T")

# Small tensors travel to the other ranks together, in messages of at most this size.
COALESCED_BYTES = 4 * 1024 * 1024


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
    start, stop = info.extent_of(rank)
    shard = torch.zeros(stop - start, dtype=whole.dtype, device=info.device)
    copy_range(shard, whole, info, rank)
    return shard


def copy_range(shard: torch.Tensor, whole: torch.Tensor, info: ParameterInfo, rank: int) -> None:
    """Write the range of ``whole`` that ``rank`` owns into its shard; padding stays as it is."""
    start, stop = info.owned_by(rank)
    flat = whole.detach().permute(info.storage_order).reshape(-1)
    shard[: stop - start].copy_(flat[start:stop])


def whole_from_shard(shard: torch.Tensor, info: ParameterInfo, rank: int) -> torch.Tensor:
    """Return a whole tensor that holds ``rank``'s range of it, and zeros elsewhere.

    Shapes: ``[info.shard_numel]`` -> ``info.shape``, with its strides.
    """
    start, stop = info.owned_by(rank)
    flat = shard.new_zeros(info.numel)
    flat[start:stop].copy_(shard[: stop - start])
    return whole_from_flat(flat, info)


def pack(shards: Sequence[torch.Tensor], infos: Sequence[ParameterInfo]) -> torch.Tensor:
    """Return this rank's shard of a bucket, which holds these parameters' shards of it.

    That is the memory they are views of, if they are: parameters in their bucket's buffer are
    packed without a copy.  What no shard covers is zero.

    Shapes: ``[info.shard_numel]`` each -> ``[place.shard_numel]``.
    """
    start = start_in_storage(shards, infos)
    if start is not None:
        return view_of_pack(shards, infos, start)
    numel = infos[0].place.shard_numel
    buffer = torch.zeros(numel, dtype=shards[0].dtype, device=shards[0].device)
    for shard, info in zip(shards, infos, strict=True):
        buffer.narrow(0, info.position_in_shard, info.shard_numel).copy_(shard)
    return buffer


def start_in_storage(shards: Sequence[torch.Tensor], infos: Sequence[ParameterInfo]) -> int | None:
    """Return where in their storage the bucket's shard begins that shards are views of, or None."""
    numel = infos[0].place.shard_numel
    parts = [(s, info) for s, info in zip(shards, infos, strict=True) if s.numel()]
    if not parts:
        return None
    first, position = parts[0][0], parts[0][1].position_in_shard
    start = first.storage_offset() - position
    address = first.data_ptr() - position * first.itemsize
    in_place = all(
        shard.storage_offset() == start + info.position_in_shard
        and shard.data_ptr() == address + info.position_in_shard * first.itemsize
        for shard, info in parts
    )
    is_whole = first.untyped_storage().nbytes() == numel * first.itemsize or numel == sum(
        shard.numel() for shard, _ in parts
    )
    return start if in_place and is_whole else None


def view_of_pack(
    shards: Sequence[torch.Tensor], infos: Sequence[ParameterInfo], start: int
) -> torch.Tensor:
    """View the bucket's shard that begins at ``start`` of these shards' storage."""
    first = next(shard for shard in shards if shard.numel())
    return first.as_strided((infos[0].place.shard_numel,), (1,), start)


def without_gaps(flat: torch.Tensor, infos: Sequence[ParameterInfo]) -> torch.Tensor:
    """Return a bucket's flat buffer, or shards of it, with zeros where these parameters are not.

    The buffer itself if they fill it, or if there are none.
    """
    ranges = gaps(infos, flat.numel()) if infos else []
    if ranges:
        flat = flat.clone()
    for start, stop in ranges:
        flat[start:stop].zero_()
    return flat


def filled_up(flat: torch.Tensor, infos: Sequence[ParameterInfo], numel: int) -> torch.Tensor:
    """Return a copy of a bucket's flat buffer, or shards of it, with zeros besides these.

    Shapes: [n] -> [numel], at least as many.
    """
    filled = flat.new_zeros(numel)
    filled[: flat.numel()] = flat
    for start, stop in gaps(infos, flat.numel()):
        filled[start:stop].zero_()
    return filled


def kept_ranges(infos: Sequence[ParameterInfo], numel: int) -> list[tuple[int, int]]:
    """Return the ranges of a bucket's flat buffer, or of shards of it, that hold these.

    What is behind the last whole shard fills the buffer up.
    """
    found, end = [], 0
    numel -= numel % infos[0].place.shard_numel if numel else 0
    for start, stop in [*gaps(infos, numel), (numel, numel)]:
        if end < start:
            found.append((end, start))
        end = stop
    return found


def flatten_bucket(
    wholes: Sequence[torch.Tensor], infos: Sequence[ParameterInfo], buffers: BufferPool
) -> torch.Tensor:
    """Return a bucket's flat buffer with a copy of these tensors, each in storage order.

    Shapes: ``info.shape`` each -> ``[place.shard_numel * world_size]``; padding is zero.
    """
    buffer = buffers.empty(infos[0].place.shard_numel * infos[0].world_size, wholes[0])
    dtype, end, pieces = buffer.dtype, 0, []
    for whole, info in zip(wholes, infos, strict=True):
        if numel := info.numel:
            is_next = info.place.offset == end and whole.dtype is dtype
            if not (is_next and whole.stride() == info.stride and whole.numel() == numel):
                end = _copy_apart(wholes, infos, buffer)
                break
            pieces.append(whole.as_strided((numel,), (1,)))
            end += numel
    else:  # on a device, one kernel for all
        torch.cat(pieces, out=buffer[:end])
    if end < buffer.numel():
        buffer[end:].zero_()
    return buffer


def _copy_apart(
    wholes: Sequence[torch.Tensor], infos: Sequence[ParameterInfo], buffer: torch.Tensor
) -> int:
    """Copy tensors to a bucket's buffer one by one; return where the last of them ends."""
    end = 0
    for whole, info in zip(wholes, infos, strict=True):
        start, stop = info.place.offset, info.place.offset + info.numel
        buffer[end:start].zero_()
        whole_from_flat(buffer[start:stop], info).copy_(whole)
        end = max(end, stop)  # one of no elements may come after its neighbour at the same place
    return end


def flat_pieces(
    wholes: Sequence[torch.Tensor], infos: Sequence[ParameterInfo]
) -> tuple[list[torch.Tensor], list[int]]:
    """Return the tensors that make up a bucket's flat buffer, each flat, and where they lie in it.

    They are contiguous: views where a tensor is dense in its parameter's storage order, else
    copies.  Those without elements are left out.
    """
    pieces, offsets = [], []
    for whole, info in zip(wholes, infos, strict=True):
        if info.numel:
            pieces.append(in_storage_order(whole.to(wholes[0].dtype), info))
            offsets.append(info.place.offset)
    return pieces, offsets


def whole_from_flat(flat: torch.Tensor, info: ParameterInfo) -> torch.Tensor:
    """View a flat buffer that begins with a parameter's elements as the parameter.

    Shapes: at least ``[info.numel]`` -> ``info.shape``, with its strides.
    """
    return flat.as_strided(info.shape, info.stride, flat.storage_offset())


def in_storage_order(whole: torch.Tensor, info: ParameterInfo) -> torch.Tensor:
    """Return a whole tensor's elements, flat and contiguous: a view if they lie so.

    Shapes: ``info.shape`` -> ``[info.numel]``.
    """
    # contiguous() too: reshape keeps the stride of what has one dimension.
    return whole.detach().permute(info.storage_order).reshape(-1).contiguous()


def with_own_storage(flat: torch.Tensor, info: ParameterInfo) -> torch.Tensor:
    """View a parameter's elements as the parameter, in a storage object of just this memory.

    As bytes: numpy and DLPack know fewer dtypes than torch.  As a capsule: ``__dlpack__`` refuses
    devices that aren't current, and those of PrivateUse1.

    Shapes: ``[info.numel]``, not empty -> ``info.shape``, with its strides.
    """
    capsule = torch.utils.dlpack.to_dlpack(flat.view(torch.uint8))
    return whole_from_flat(torch.from_dlpack(capsule).view(flat.dtype), info)


class Seen:
    """Remembers where tensors lay when they were last looked at.  It holds none of them."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._seen = [
            (weakref.ref(t), t.data_ptr(), t.storage_offset(), t.numel(), t.dtype) for t in tensors
        ]

    def are(self, tensors: Iterable[Any]) -> bool:
        """Return whether these are the same tensors."""
        pairs = zip(tensors, self._seen, strict=True)
        return all(tensor is not None and tensor is seen[0]() for tensor, seen in pairs)

    def again(self, tensors: Iterable[Any]) -> bool:
        """Return whether these are the same tensors, where they were.

        Those that were in one storage still are: none other begins at its address.
        """
        for tensor, (known, address, offset, numel, dtype) in zip(tensors, self._seen, strict=True):
            was = known()
            if was is None or tensor is not was or was.data_ptr() != address:
                return False
            if was.storage_offset() != offset or was.numel() != numel or was.dtype is not dtype:
                return False
        return True


def adjoin(*tensors: torch.Tensor) -> bool:
    """Return whether each flat tensor begins where the one before it ends, in the same memory.

    Those without elements may stand anywhere.
    """
    start = end = -1
    for tensor in tensors:
        if numel := tensor.numel():
            address, itemsize = tensor.data_ptr(), tensor.itemsize
            begins = address - tensor.storage_offset() * itemsize  # of its storage
            if end >= 0 and (address != end or begins != start):
                return False
            start, end = begins, address + numel * itemsize
    return True


def layout(tensors: Sequence[torch.Tensor]) -> list[tuple]:
    """Return how flat tensors lie to each other: equal where the same ones of them ``adjoin``."""
    first = next((tensor for tensor in tensors if tensor.numel()), tensors[0])
    address, offset = first.data_ptr(), first.storage_offset()
    return [
        (t.dtype, numel, t.data_ptr() - address, t.storage_offset() - offset)
        if (numel := t.numel())
        else (t.dtype,)
        for t in tensors
    ]


def join(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """View flat tensors, each of which begins where the one before it ends, as one.

    Those without elements may stand anywhere.
    """
    first, total = pieces[0], 0
    for piece in pieces:
        length = piece.numel()
        if length and not total:
            first = piece
        total += length
    return first.detach().as_strided((total,), (1,))


def gather(shard: torch.Tensor, info: ParameterInfo, communicator: Any) -> torch.Tensor:
    """Return the whole tensor that every rank holds a shard of.  Collective.

    It travels as bytes: gloo has no complex numbers, nor all of the small floats.

    Shapes: ``[info.shard_numel]`` -> ``info.shape``, in memory of its own.
    """
    if info.numel == 0:
        return shard.new_empty_strided(info.shape, info.stride)
    if info.shares_bucket:
        flat = _from_owners(shard, info, communicator)
    else:
        flat = communicator.gather_whole(shard.view(torch.uint8)).view(shard.dtype)
    whole = whole_from_flat(flat, info)
    # Without padding in its storage (which torch.save would write out), and never the shard.
    owned = flat.numel() == info.numel and flat.data_ptr() != shard.data_ptr()
    return whole if owned else whole.clone(memory_format=torch.preserve_format)


def _from_owners(shard: torch.Tensor, info: ParameterInfo, communicator: Any) -> torch.Tensor:
    """Each rank sends what it owns: ranges of a shared bucket differ in length."""
    flat = shard.new_empty(info.numel)
    for owner in range(info.world_size):
        start, stop = info.owned_by(owner)
        if start == stop:
            continue
        part = flat[start:stop]
        if owner == info.rank:
            part.copy_(shard[: stop - start])
        communicator.broadcast(part.view(torch.uint8), communicator.mesh.rank_of(owner))
    return flat


def in_batches(items: Iterable[T], nbytes_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Cut a list where what has come together is worth a message; what is large is alone."""
    batch: list[T] = []
    nbytes = 0
    for item in items:
        if batch and nbytes + nbytes_of(item) > COALESCED_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(item)
        nbytes += nbytes_of(item)
    if batch:
        yield batch


def make_equal(tensors: Iterable[torch.Tensor], communicator: Any) -> None:
    """Overwrite every tensor with rank 0's, small ones together.  Collective."""
    if communicator.world_size == 1:
        return
    values = (_without_repeats(tensor.detach()) for tensor in tensors if tensor.numel())
    for _, on_one_device in groupby(values, lambda tensor: tensor.device):
        for batch in in_batches(on_one_device, lambda tensor: tensor.nbytes):
            dense = list(map(_dense, batch))
            parts = [one.permute(_order(one)).view(-1).view(torch.uint8) for one in dense]
            message = parts[0] if len(parts) == 1 else torch.cat(parts)
            communicator.broadcast(message)
            if len(parts) > 1:
                for part, received in zip(parts, message.split(list(map(len, parts))), strict=True):
                    part.copy_(received)
            for tensor, one in zip(batch, dense, strict=True):
                if one is not tensor:
                    tensor.copy_(one)


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """View one of the elements that an expanded tensor shows several times: it is written once."""
    for dim in reversed(range(tensor.dim())):
        if tensor.stride(dim) == 0:
            tensor = tensor.select(dim, 0)
    return tensor


def _order(tensor: torch.Tensor) -> tuple[int, ...]:
    return storage_order(tuple(tensor.shape), tensor.stride())


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of a buffer with holes or overlaps; parameters were checked before."""
    try:
        _order(tensor)
    except ValueError:
        return tensor.contiguous()
    return tensor


def without_storage(
    shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """Return a tensor that has no memory.  To make it takes the memory for a moment."""
    with ordinary_tensors():
        tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        tensor.untyped_storage().resize_(0)
        return tensor


def in_memory_of_its_own(
    tensor: torch.Tensor, info: ParameterInfo, users: Mapping[int, int]
) -> torch.Tensor:
    """The tensor with the parameter's strides and dtype, in memory that nothing else looks at.

    ``users`` counts the tensors over a storage, by its address.  A copy, if it is not so already.
    """
    storage = tensor.untyped_storage()
    is_own = users[storage.data_ptr()] == 1 and storage.nbytes() == info.nbytes
    if is_own and tensor.stride() == info.stride and tensor.dtype == info.dtype:
        return tensor
    with ordinary_tensors():
        own = torch.empty_strided(info.shape, info.stride, dtype=info.dtype, device=info.device)
        return own.copy_(tensor)


def without_base(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a tensor that is no view: Dynamo would guard a view's base."""
    if tensor._base is None:
        return tensor
    with ordinary_tensors():
        return tensor.new_empty(0).set_(tensor)
