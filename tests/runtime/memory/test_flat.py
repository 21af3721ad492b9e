"""Buckets' flat buffers: made of their gradients, and taken where their shards lie."""

import weakref

import pytest
import torch

from zerofx.ir.parameters import ParameterInfo, ParameterTable, Place
from zerofx.runtime.comm.communication import Communicator
from zerofx.runtime.memory.flat import Seen, adjoin, flatten_bucket, layout, pack
from zerofx.runtime.memory.pages import BufferPool
from zerofx.runtime.parameters.buckets import Buckets

SHAPES = ((3, 4), (0, 2), (5,), (2, 3, 2))


def infos(gap=0, rank=0, world_size=2):
    """The layouts of parameters one behind the other, with so many elements between them."""
    made, offset = [], 0
    total = sum(torch.Size(shape).numel() + gap for shape in SHAPES)
    for index, shape in enumerate(SHAPES):
        numel = torch.Size(shape).numel()
        place = Place(0, offset, numel + gap, -(-total // world_size))
        stride = torch.empty(shape).stride()
        made.append(
            ParameterInfo(
                index=index,
                name=str(index),
                shape=shape,
                stride=stride,
                dtype=torch.float32,
                device=torch.device("cpu"),
                requires_grad=True,
                world_size=world_size,
                rank=rank,
                assigned=place,
            )
        )
        offset += numel + gap
    return made


def transposed(whole):
    return whole.mT.contiguous().mT if whole.dim() > 1 else whole


def halves(whole):
    return torch.stack((whole, whole), -1)[..., 0]


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("lie", [lambda whole: whole, transposed, halves])
@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16])
def test_a_bucket_is_its_gradients_in_order_and_zeros(gap, lie, first):
    wholes = [lie(torch.randn(shape)) for shape in SHAPES]
    wholes[0] = wholes[0].to(first)
    table = infos(gap)
    pool = BufferPool()
    pool.empty(table[0].place.shard_numel * 2, wholes[0]).fill_(7)  # what is given out again
    expected = torch.zeros(table[0].place.shard_numel * 2, dtype=first)
    for whole, info in zip(wholes, table, strict=True):
        start = info.place.offset
        expected[start : start + info.numel] = whole.reshape(-1)
    for order in (range(4), (3, 1, 2, 0)):
        chosen = [wholes[i] for i in order], [table[i] for i in order]
        if order[0] == 0 or first is torch.float32:
            flat = flatten_bucket(*chosen, pool)
            assert flat.dtype is first and torch.equal(flat, expected)


def test_shards_that_were_packed_where_they_lay_may_have_moved():
    table = infos()
    buckets = Buckets(Communicator.of(None), ParameterTable(tuple(table)), [], ())
    flat = torch.arange(float(table[0].place.shard_numel))
    shards = [flat.narrow(0, info.position_in_shard, info.shard_numel) for info in table]
    indices = list(range(len(table)))

    def packed():
        result = buckets.pack(shards, indices, len(flat))
        assert torch.equal(result, pack(shards, table))
        return result.data_ptr() == flat.data_ptr()

    assert packed() and packed()
    shards[0].data = shards[0] * 2
    assert not packed() and not packed()
    shards[0] = flat.narrow(0, 0, table[0].shard_numel)
    assert packed()
    shards = [shard + 1 for shard in shards]
    assert not packed()


def test_what_was_seen_is_not_held_and_is_known_again_where_it_lay():
    flat = torch.arange(12.0)
    tensors = [flat[:4], flat[4:12]]
    seen = Seen(tensors)
    assert seen.again(tensors)
    assert not seen.again([tensors[0], flat[4:12]])
    assert not seen.again([tensors[0], None])
    for changed in (flat[5:12], torch.arange(8.0), flat[4:12].view(torch.int32), flat[4:10]):
        was, tensors[1].data = tensors[1].detach(), changed
        assert not seen.again(tensors)
        tensors[1].data = was
        assert seen.again(tensors)
    known = weakref.ref(tensors.pop())
    assert known() is None
    assert not seen.again([tensors[0], None])


@pytest.mark.parametrize("rank", [0, 1])
def test_shards_are_packed_where_they_lie_if_they_are_their_buckets(rank):
    table = infos(gap=1, rank=rank)
    flat = torch.arange(float(table[0].place.shard_numel))
    shards = [flat.narrow(0, info.position_in_shard, info.shard_numel) for info in table]
    covered = sum(shard.numel() for shard in shards)
    assert pack(shards, table).data_ptr() == flat.data_ptr()
    for place, shard in enumerate(shards):
        moved = [*shards[:place], shard.clone(), *shards[place + 1 :]]
        packed = pack(moved, table)
        assert torch.equal(packed[:covered], flat[:covered])
        assert (packed.data_ptr() == flat.data_ptr()) is (shard.numel() == 0)


def test_layouts_are_equal_where_the_same_tensors_adjoin():
    flat = torch.arange(12.0)
    parts = flat.split([3, 0, 4, 5])
    again = torch.arange(20.0)[8:].split([3, 0, 4, 5])
    assert layout(parts) == layout(again)
    other_memory = [*parts[:3], parts[3].clone()]
    shorter = flat.split([3, 0, 3, 6])
    of_two = flat.to(torch.float64).split([3, 0, 4, 5])
    for other in (other_memory, shorter, of_two, parts[::-1], flat[1:].split([3, 0, 4, 4])):
        assert layout(other) != layout(parts)
    assert adjoin(*parts) and not adjoin(*other_memory) and not adjoin(*parts[::-1])
