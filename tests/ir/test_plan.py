"""Every element of a parameter has one owner, and its flat form is a view of its memory."""

import itertools

import pytest
import torch

from zerofx.ir.parameters import ParameterInfo, ParameterTable, shard_numel, storage_order

WORLDS = (1, 2, 3, 4, 7)
LENGTHS = (0, 1, 2, 3, 6, 7, 8, 29)


def describe(tensor: torch.Tensor, world_size: int = 4) -> ParameterInfo:
    return ParameterInfo(
        index=0,
        name="w",
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        dtype=tensor.dtype,
        device=tensor.device,
        requires_grad=True,
        world_size=world_size,
    )


def of_length(numel: int, world_size: int) -> ParameterInfo:
    return describe(torch.empty(numel), world_size)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("numel", LENGTHS)
def test_every_element_has_exactly_one_owner(numel, world_size):
    ranges = [of_length(numel, world_size).owned_by(rank) for rank in range(world_size)]
    assert list(itertools.chain(*(range(*bounds) for bounds in ranges))) == list(range(numel))


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("numel", LENGTHS)
def test_shards_are_equal_and_pad_less_than_one_element_per_rank(numel, world_size):
    per_rank = shard_numel(numel, world_size)
    assert 0 <= per_rank * world_size - numel < world_size
    for rank in range(world_size):
        start, stop = of_length(numel, world_size).owned_by(rank)
        assert stop - start <= per_rank
        assert start == min(rank * per_rank, numel)


def test_the_last_ranks_may_own_only_padding():
    assert [of_length(5, 4).owned_by(rank) for rank in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]
    assert [of_length(1, 3).owned_by(rank) for rank in range(3)] == [(0, 1), (1, 1), (1, 1)]


@pytest.mark.parametrize("rank", [-1, 4, 5])
def test_a_rank_outside_the_world_is_refused(rank):
    with pytest.raises(ValueError, match=rf"rank {rank} is outside \[0, 4\)"):
        of_length(8, 4).owned_by(rank)


def test_sizes_of_a_parameter_count_padding_only_where_they_say_so():
    info = describe(torch.empty(3, 5, dtype=torch.bfloat16), world_size=4)
    assert (info.numel, info.nbytes) == (15, 30)
    assert (info.shard_numel, info.place.extent) == (4, 16)


def test_a_scalar_and_an_empty_parameter_have_shards():
    scalar, empty = describe(torch.empty(())), describe(torch.empty(3, 0))
    assert (scalar.numel, scalar.shard_numel, scalar.place.extent) == (1, 1, 4)
    assert (empty.numel, empty.shard_numel, empty.place.extent) == (0, 0, 0)
    assert scalar.is_contiguous and empty.is_contiguous


DENSE = {
    "scalar": torch.empty(()),
    "vector": torch.empty(5),
    "matrix": torch.empty(3, 4),
    "transposed": torch.empty(3, 4).t(),
    "permuted": torch.empty(2, 3, 4).permute(2, 0, 1),
    "channels last": torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels last, one channel": torch.empty(2, 1, 4, 5).to(memory_format=torch.channels_last),
    "channels last, 1x1": torch.empty(6, 3, 1, 1).to(memory_format=torch.channels_last),
    "volume": torch.empty(2, 3, 2, 2, 2).to(memory_format=torch.channels_last_3d),
    "ones": torch.empty(1, 1, 1),
    "row": torch.empty(1, 7),
    "odd stride of a size-one dimension": torch.empty(4).as_strided((4, 1), (1, 99)),
    "size one in the middle": torch.empty(2, 3).as_strided((3, 1, 2), (1, 50, 3)),
    "empty": torch.empty(0, 3),
}


@pytest.mark.parametrize("tensor", DENSE.values(), ids=DENSE)
def test_flattening_in_storage_order_is_a_view(tensor):
    order = storage_order(tuple(tensor.shape), tensor.stride())
    assert sorted(order) == list(range(tensor.dim()))
    flat = tensor.permute(order).view(-1)  # view raises if that needed a copy
    assert tensor.numel() < 2 or flat.stride() == (1,)


@pytest.mark.parametrize("name", ["matrix", "row", "ones", "scalar", "empty"])
def test_a_contiguous_parameter_keeps_its_order(name):
    info = describe(DENSE[name])
    assert info.is_contiguous
    assert info.storage_order == tuple(range(len(info.shape)))


@pytest.mark.parametrize("name", ["transposed", "channels last", "permuted", "volume"])
def test_a_permuted_parameter_is_not_called_contiguous(name):
    assert not describe(DENSE[name]).is_contiguous


def test_strides_of_size_one_dimensions_do_not_change_the_order():
    assert describe(DENSE["channels last, one channel"]).is_contiguous
    assert describe(DENSE["odd stride of a size-one dimension"]).is_contiguous


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(1).expand(5),
        torch.empty(3, 1).expand(3, 4),
        torch.empty(3, 8)[:, ::2],
        torch.empty(3, 8)[:, :5],
        torch.empty(9).as_strided((3, 3), (2, 1)),
    ],
    ids=["expanded", "expanded matrix", "strided", "sliced", "overlapping"],
)
def test_a_parameter_with_holes_or_overlaps_is_refused(tensor):
    with pytest.raises(ValueError, match="is not dense"):
        storage_order(tuple(tensor.shape), tensor.stride())


def test_a_table_is_read_by_index_and_in_order():
    infos = tuple(describe(torch.empty(n)) for n in (1, 2, 3))
    table = ParameterTable(infos)
    assert len(table) == 3
    assert tuple(table) == infos
    assert table[1] is infos[1]
