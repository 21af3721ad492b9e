"""Buckets at run time: what lies in one between steps, across functions; on 2 and 3 gloo ranks."""

from __future__ import annotations

import gc
import pickle
from collections import defaultdict
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
from tests.kit import models
from tests.kit.covering import exhaustive, only
from tests.kit.models import squared_loss
from tests.kit.persistent import persistent_bytes
from tests.kit.ranks import ranks_fixture  # noqa: F401
from zerofx.runtime.access import full_params, unshard
from zerofx.runtime.parameters.buckets import Buckets
from zerofx.runtime.parameters.guarded import ShardedParameter
from zerofx.runtime.parameters.registry import REGISTRY


@pytest.fixture(params=[2, exhaustive(3)])
def world(request, ranks):  # noqa: F811
    return ranks(request.param)


class Net(nn.Module):
    """Two numbered layers and a head; their sizes divide by no world size here."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(models.FEATURES, 11), nn.Linear(11, 11)])
        self.head = nn.Linear(11, 3)

    def forward(self, x):
        for layer in self.layers:
            x = F.gelu(layer(x))
        return self.head(x)


def rank_and_world_size() -> tuple[int, int]:
    if not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-3)


def train_step(model, optimizer, x, y):
    loss = squared_loss(model, x, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def evaluate(model, x):
    with torch.no_grad():
        return model(x).sum()


class Pair:
    """A model that is trained on this rank's rows, and an eager twin on everyone's."""

    def __init__(self, stage: int, **options):
        torch._dynamo.reset()
        self.options = {"stage": stage, **options}
        self.rank, self.world_size = rank_and_world_size()
        torch.manual_seed(self.rank)
        self.model = Net()
        self.optimizer = adamw(self.model.parameters())
        torch.manual_seed(0)
        self.twin = Net()
        self.twin_optimizer = adamw(self.twin.parameters())
        self.step = self.compiled(train_step)

    def compiled(self, function, **options):
        options = {**self.options, **options}
        return torch.compile(function, backend="zero", options={"lowering": "eager", **options})

    def batch(self, number: int, dtype: torch.dtype = torch.float32):
        whole = [tensor.to(dtype) for tensor in models.features(number, 4 * self.world_size)]
        return [tensor.chunk(self.world_size)[self.rank] for tensor in whole], whole

    def train(self, *numbers: int) -> None:
        for number in numbers:
            mine, whole = self.batch(number)
            self.step(self.model, self.optimizer, *mine)
            train_step(self.twin, self.twin_optimizer, *whole)

    def assert_alike(self, **tolerance) -> None:
        assert_close(self.model.state_dict(), self.twin.state_dict(), **tolerance)
        mine, other = self.optimizer.state_dict(), self.twin_optimizer.state_dict()
        assert mine["state"].keys() == other["state"].keys()
        for number, state in other["state"].items():
            assert_close(mine["state"][number], state, **tolerance)


def assert_close(mine: dict, other: dict, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    assert mine.keys() == other.keys()
    for key, value in other.items():
        torch.testing.assert_close(mine[key], value, rtol=rtol, atol=atol)


def bounds_by_bucket(model: nn.Module) -> list[list]:
    found = defaultdict(list)
    for parameter in model.parameters():
        bound = REGISTRY.lookup(parameter)
        found[id(bound.bucket if bound.bucket is not None else bound)].append(bound)
    return list(found.values())


def check_state_dicts(stage: int) -> None:
    pair = Pair(stage)
    pair.train(0, 1, 2)
    pair.assert_alike()
    assert [len(own) for own in bounds_by_bucket(pair.model)] == [2, 2, 2]
    saved = pickle.dumps((pair.model.state_dict(), pair.optimizer.state_dict()))
    pair.train(3)
    load(saved, pair.model, pair.optimizer)
    load(saved, pair.twin, pair.twin_optimizer)
    pair.train(4, 5)
    pair.assert_alike()

    other = Pair(stage, bucket=False)  # what was saved knows no layout
    other.train(0)
    load(saved, other.model, other.optimizer)
    load(saved, other.twin, other.twin_optimizer)
    other.train(4, 5)
    other.assert_alike()
    assert_close(other.model.state_dict(), pair.model.state_dict())


def load(saved: bytes, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load a copy: an optimizer keeps what it is given, and counts steps in place."""
    of_model, of_optimizer = pickle.loads(saved)
    model.load_state_dict(of_model)
    optimizer.load_state_dict(of_optimizer)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", only((3,), [1, 2, 3]))
def test_state_dicts_are_whole_and_can_be_loaded_into_another_layout(world, stage):
    world.run(check_state_dicts, stage)


def check_full_params_and_unshard(stage: int) -> None:
    pair = Pair(stage)
    pair.train(0, 1)
    with full_params(pair.model), torch.no_grad():
        for mine, other in zip(pair.model.parameters(), pair.twin.parameters(), strict=True):
            torch.testing.assert_close(mine.data, other.data)
            mine.mul_(0.5).add_(1)
            other.mul_(0.5).add_(1)
    pair.assert_alike()
    pair.train(2)
    pair.assert_alike()

    unshard(pair.model, pair.optimizer)
    for parameter in pair.model.parameters():
        assert type(parameter) is nn.Parameter and REGISTRY.lookup(parameter) is None
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
    _, whole = pair.batch(3)
    for model, optimizer in ((pair.model, pair.optimizer), (pair.twin, pair.twin_optimizer)):
        train_step(model, optimizer, *whole)
    pair.assert_alike()
    pair.train(4)  # sharded again, in the same buckets
    assert [len(own) for own in bounds_by_bucket(pair.model)] == [2, 2, 2]
    pair.assert_alike()


@pytest.mark.slow(reason="ranks compile and train")
@pytest.mark.parametrize("stage", only((3,), [1, 2, 3]))
def test_whole_parameters_are_written_given_back_and_sharded_again(world, stage):
    world.run(check_full_params_and_unshard, stage)


def check_each_rank_keeps_its_own_range() -> None:
    pair = Pair(3)
    pair.train(0)
    with full_params(pair.model), torch.no_grad():
        for parameter in pair.model.parameters():
            parameter.fill_(pair.rank)
    for name, value in pair.model.state_dict().items():
        info = REGISTRY.lookup(pair.model.get_parameter(name)).info
        expected = torch.cat(
            [torch.full((b - a,), float(r)) for r in range(pair.world_size)
             for a, b in [info.owned_by(r)]]
        )  # fmt: skip
        assert torch.equal(value.view(-1), expected)


@pytest.mark.nightly
def test_each_rank_keeps_its_own_range_of_what_it_writes(world):
    world.run(check_each_rank_keeps_its_own_range)


def check_evaluation_first(stage: int) -> None:
    pair = Pair(stage)
    mine, whole = pair.batch(0)
    score = pair.compiled(evaluate)
    score(pair.model, mine[0])
    layout = {b.name: b.info.place for own in bounds_by_bucket(pair.model) for b in own}
    pair.train(1, 2)
    pair.assert_alike()
    after = {b.name: b.info.place for own in bounds_by_bucket(pair.model) for b in own}
    assert after == layout
    torch.testing.assert_close(score(pair.model, mine[0]), evaluate(pair.twin, mine[0]))
    with torch.inference_mode():
        torch.testing.assert_close(score(pair.model, mine[0]), evaluate(pair.twin, mine[0]))
    pair.train(3)
    pair.assert_alike()


@pytest.mark.nightly
@pytest.mark.parametrize("stage", only((3,), [1, 3]))
def test_training_keeps_the_layout_of_an_evaluation_before_it(world, stage):
    world.run(check_evaluation_first, stage)


def read_a_bias(model):
    with torch.no_grad():
        return model.layers[1].bias * 2


def check_parts_of_buckets(stage: int, first: bool) -> None:
    """Functions that read, or train, only some parameters of a bucket."""
    pair = Pair(stage)
    read = pair.compiled(read_a_bias)
    if first:
        read(pair.model)
    pair.train(0)
    sizes = [len(own) for own in bounds_by_bucket(pair.model)]
    assert sizes == ([2, 1, 1, 2] if first else [2, 2, 2])
    torch.testing.assert_close(read(pair.model), read_a_bias(pair.twin), rtol=1e-5, atol=1e-6)

    head = pair.compiled(lambda model, x: F.linear(x, model.head.weight).detach())
    x = torch.ones(2, 11)
    torch.testing.assert_close(
        head(pair.model, x), F.linear(x, pair.twin.head.weight).detach(), rtol=1e-5, atol=1e-6
    )
    for model in (pair.model, pair.twin):
        for layer in (*model.layers, model.head):
            layer.weight.requires_grad_(False)
    pair.train(1)
    for model in (pair.model, pair.twin):
        model.requires_grad_(True)
    pair.train(2)
    pair.assert_alike()


@pytest.mark.nightly
@pytest.mark.parametrize("first", only((True,), [False, True]))
@pytest.mark.parametrize("stage", only((3,), [2, 3]))
def test_functions_that_use_parts_of_buckets(world, stage, first):
    world.run(check_parts_of_buckets, stage, first)


def check_bfloat16(part: bool) -> None:
    """All of a bucket, or one of its two parameters, changes its dtype."""
    pair = Pair(3)
    pair.train(0)
    before = pair.model.state_dict()
    with full_params(pair.model):
        for model in (pair.model, pair.twin):
            if part:
                model.head.bias.data = model.head.bias.data.to(torch.bfloat16)
            else:
                model.to(torch.bfloat16)
    for name, value in pair.model.state_dict().items():
        changed = not part or name == "head.bias"
        assert value.dtype is (torch.bfloat16 if changed else torch.float32)
        assert torch.equal(value, before[name].to(value.dtype))
        bound = REGISTRY.lookup(pair.model.get_parameter(name))
        assert type(bound.parameter) is ShardedParameter and bound.shard.dtype is value.dtype
    pair.twin.load_state_dict(pair.model.state_dict())

    def loss_of(model, x):
        for layer in model.layers:
            x = F.gelu(layer(x))
        return (F.linear(x, model.head.weight).float() + model.head.bias.float()).pow(2).mean()

    def step(model, optimizer, x):
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    dtype = torch.float32 if part else torch.bfloat16
    mine, whole = pair.batch(1, dtype)
    sgd = torch.optim.SGD(pair.model.parameters(), lr=0.1)
    pair.compiled(step)(pair.model, sgd, mine[0])
    step(pair.twin, torch.optim.SGD(pair.twin.parameters(), lr=0.1), whole[0])
    for name, value in pair.model.state_dict().items():
        other = pair.twin.state_dict()[name]
        rounding = {"rtol": 2e-2, "atol": 2e-2} if value.dtype is torch.bfloat16 else {}
        torch.testing.assert_close(value, other, **rounding)


@pytest.mark.nightly
@pytest.mark.parametrize("part", only((True,), [False, True]))
def test_a_new_dtype_of_whole_parameters(world, part):
    world.run(check_bfloat16, part)


def check_nothing_is_copied() -> None:
    pair = Pair(3)
    packed = []

    def recording(buckets, shards, parameters, numel, own=Buckets.pack):
        result = own(buckets, shards, parameters, numel)
        packed.append((result, [s for s in shards if s.numel()]))
        return result

    with mock.patch.object(Buckets, "pack", recording):
        pair.train(0)  # compiles, and binds what packs
        packed.clear()
        pair.train(1)
    assert len(packed) >= 3
    memory = set()
    for own in bounds_by_bucket(pair.model):
        place = own[0].info.place
        storages = {b.shard.untyped_storage().data_ptr() for b in own}
        assert len(storages) == 1, "one storage per bucket"
        memory |= storages
        assert own[0].shard.untyped_storage().nbytes() == 4 * place.shard_numel
        positions = [(b.shard.storage_offset(), b.shard.numel()) for b in own if b.shard.numel()]
        end = 0
        for offset, numel in sorted(positions):
            assert offset == end
            end += numel
        assert end == place.shard_numel
    for result, shards in packed:
        assert result.untyped_storage().data_ptr() in memory, "packed without a copy"
        assert {s.untyped_storage().data_ptr() for s in shards} <= {
            result.untyped_storage().data_ptr()
        }
        assert result.storage_offset() == 0 and result.untyped_storage().nbytes() == result.nbytes


@pytest.mark.nightly
def test_parameters_of_a_bucket_share_memory_and_are_packed_without_a_copy(world):
    world.run(check_nothing_is_copied)


def check_persistent_bytes() -> tuple[dict[str, int], int]:
    gc.collect()  # what other tests have left is not to go in between
    before = persistent_bytes()
    pair = Pair(3)
    pair.train(0)
    mine = persistent_bytes([pair.optimizer])
    elements = sum(own[0].info.place.shard_numel for own in bounds_by_bucket(pair.model))
    kept = {kind: nbytes - before[kind] for kind, nbytes in mine.items()}
    unshard(pair.model, pair.optimizer)
    return kept, elements


@pytest.mark.nightly
def test_every_rank_keeps_the_same_number_of_bytes(world):
    """Unlike shards of single parameters, buckets' are equal, and so are states but for steps."""
    for kept, elements in world.run(check_persistent_bytes):
        steps = 6 * 4
        assert kept == {
            "parameters": 4 * elements,
            "gradients": 0,
            "optimizer_states": 2 * 4 * elements + steps,
        }


def accumulate(model, x, y):
    loss = squared_loss(model, x, y)
    loss.backward()
    return loss


def check_gradients_between_calls(stage: int) -> None:
    pair = Pair(stage)
    collect = pair.compiled(accumulate)
    for number in (0, 1):
        mine, whole = pair.batch(number)
        collect(pair.model, *mine)
        accumulate(pair.twin, *whole)
    unshard(pair.model, pair.optimizer)
    for mine, other in zip(pair.model.parameters(), pair.twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_that_wait_between_calls_are_shards_of_buckets(world, stage):
    world.run(check_gradients_between_calls, stage)


def check_another_layout_after_unshard(stage: int) -> None:
    """Another function binds the model anew, in other buckets than the first is compiled for."""
    pair = Pair(stage)
    pair.train(0)
    unshard(pair.model, pair.optimizer)
    mine, _ = pair.batch(1)
    pair.compiled(evaluate, bucket=False)(pair.model, mine[0])
    before = pair.model.state_dict()
    with pytest.raises(ValueError, match="in other buckets. Call torch.compiler.reset()"):
        pair.step(pair.model, pair.optimizer, *mine)
    assert_close(pair.model.state_dict(), before, rtol=0, atol=0)
    torch.compiler.reset()
    pair.train(1)
    assert [len(own) for own in bounds_by_bucket(pair.model)] == [1] * 6
    pair.assert_alike()


def test_a_function_compiled_for_another_layout_is_refused():
    check_another_layout_after_unshard(3)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [1, 3])
def test_so_it_is_on_ranks(world, stage):
    world.run(check_another_layout_after_unshard, stage)


def check_sizes_of_buckets(bucket_bytes: int) -> int:
    pair = Pair(3, bucket_bytes=bucket_bytes)
    pair.train(0, 1)
    pair.assert_alike()
    return len(bounds_by_bucket(pair.model))


@pytest.mark.nightly
def test_bucket_bytes_says_how_much_travels_together(ranks):  # noqa: F811
    assert ranks(2).run(check_sizes_of_buckets, 2**20) == [3, 3]
    assert ranks(2).run(check_sizes_of_buckets, 4 * 66 + 64) == [4, 4]  # 11x11 is larger
    assert ranks(2).run(check_sizes_of_buckets, 1) == [6, 6]
