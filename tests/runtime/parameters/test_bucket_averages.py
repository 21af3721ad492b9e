"""Gradients of a bucket that are averaged together, at stage 0, on gloo ranks."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
from tests.kit.models import features, squared_loss
from tests.kit.ranks import ranks_either_way_fixture  # noqa: F401
from tests.kit.traffic import traffic_of
from zerofx.ir.parameters import ParameterInfo, ParameterTable
from zerofx.passes.zero.bucket import lay_out
from zerofx.runtime.comm.communication import Communicator
from zerofx.runtime.comm.transport import NativeTransport
from zerofx.runtime.parameters.buckets import Buckets

SHAPES = ((5, 3), (), (4, 2, 3, 3), (0, 2), (7,))


def table_of(world_size: int) -> ParameterTable:
    """One bucket; the parameter of four dimensions is channels last."""
    infos = []
    for index, shape in enumerate(SHAPES):
        like = torch.empty(shape)
        if like.dim() == 4:
            like = like.to(memory_format=torch.channels_last)
        facts = (like.dtype, like.device, True, world_size)
        infos.append(ParameterInfo(index, f"p{index}", tuple(shape), like.stride(), *facts))
    table = ParameterTable(tuple(infos))
    table.assign(lay_out(infos))
    return table


def check_averages(is_native: bool) -> None:
    """Each has the bits, and the layout, that it has when it travels alone."""
    communicator = Communicator(dist.group.WORLD) if is_native else Communicator.of(None)
    if is_native:
        communicator._transports["cpu"] = NativeTransport(dist.group.WORLD)
    world_size = communicator.world_size
    table = table_of(world_size)
    buckets = Buckets(communicator, table, [], ())
    torch.manual_seed(communicator.rank)
    gradients = [torch.randn(shape) for shape in SHAPES]
    gradients[0] = torch.randn(3, 5).t()
    gradients[2] = gradients[2].to(memory_format=torch.channels_last)
    before = [gradient.clone() for gradient in gradients]
    place = table[0].place
    numel = place.shard_numel * world_size
    indices = list(range(len(SHAPES)))
    started = buckets.all_reduce_bucket_start(gradients, indices, numel, "mean")
    assert started.shape == (numel,)
    flat = communicator.wait(started)
    covered = torch.zeros(numel, dtype=torch.bool)
    for info, gradient, was in zip(table, gradients, before, strict=True):
        start, stop = info.place.offset, info.place.offset + info.numel
        alone = communicator.wait(communicator.all_reduce_start(gradient, "mean"))
        torch.testing.assert_close(flat[start:stop].view(info.shape), alone, rtol=0, atol=0)
        assert torch.equal(gradient, was), "what was given has changed"
        covered[start:stop] = True
    assert not flat[~covered].any()
    buckets.end_call()
    communicator.buffers.clear()


@pytest.mark.parametrize("world_size", (2, 3))
def test_a_bucket_is_averaged_as_its_gradients_are_one_by_one(ranks, world_size):  # noqa: F811
    ranks(world_size).run(check_averages, False)


def test_a_backends_own_all_reduce_takes_a_bucket_too(ranks):  # noqa: F811
    ranks(2).run(check_averages, True)  # of two ranks there is one order


def backward(model, x, y):
    squared_loss(model, x, y).backward()


def check_left_behind() -> None:
    """``p.grad`` is an ordinary tensor with a storage of its own, though a bucket was averaged."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    batches = [features(rank, 4) for rank in range(dist.get_world_size())]
    width = batches[0][0].shape[1]
    model = nn.Sequential(nn.Linear(width, 5), nn.Tanh(), nn.Linear(5, batches[0][1].shape[1]))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    communicator = Communicator.of(None)
    traffic = traffic_of(communicator)
    options = {"stage": 0, "lowering": "eager"}
    step = torch.compile(backward, backend="zero", options=options)
    for _ in range(2):  # the second adds to the first
        traffic.reset()
        step(model, *batches[dist.get_rank()])
        assert traffic.snapshot()["collectives"]["all_reduce"] == 2  # layers
        for parameter in model.parameters():
            assert type(parameter.grad) is torch.Tensor and parameter.grad._base is None
            assert parameter.grad.untyped_storage().nbytes() == 4 * math.prod(parameter.shape)
    model_alone = nn.Sequential(nn.Linear(width, 5), nn.Tanh(), nn.Linear(5, model[2].out_features))
    model_alone.load_state_dict(state)
    for batch in 2 * batches:
        (squared_loss(model_alone, *batch) / len(batches)).backward()
    for mine, its in zip(model.parameters(), model_alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad)


@pytest.mark.nightly
def test_what_a_call_leaves_in_grad_knows_nothing_of_its_bucket(ranks):  # noqa: F811
    ranks(2).run(check_left_behind)
