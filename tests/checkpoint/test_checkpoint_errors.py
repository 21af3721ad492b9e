"""Errors of wires in checkpoints: exact on the same mesh, and nothing is lost on another."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
import zerofx
from tests.kit.ranks import ranks_fixture  # noqa: F401
from tests.training.test_quantized_reductions import batch, built, mesh_of, train
from zerofx.deferred.tape import Source
from zerofx.ir.mesh import Mesh
from zerofx.ir.parameters import ParameterInfo, Place
from zerofx.runtime.parameters.errors import (
    SAVED_ERRORS,
    Extent,
    SavedError,
    SavedErrors,
    extent_of,
)
from zerofx.runtime.parameters.registry import REGISTRY

NODES = (("node", 2), ("gpu", 2))
NUMEL, SHARD = 100, 60
"""Of a parameter alone in its bucket, and of a shard of two."""


def info_of(mesh: Mesh, offset: int = 4) -> ParameterInfo:
    place = Place(0, offset, NUMEL + 5, 2 * SHARD // mesh.num_shards)
    return ParameterInfo(
        index=0,
        name="w",
        shape=(NUMEL,),
        stride=(1,),
        dtype=torch.float32,
        device=torch.device("cpu"),
        requires_grad=True,
        world_size=mesh.num_shards,
        rank=mesh.shard,
        assigned=place,
    )


def numel_over(mesh: Mesh, axis: str) -> int:
    """Elements that a rank reduces over an axis."""
    return 2 * SHARD // mesh.size(mesh.inner) if axis == mesh.outer else 2 * SHARD


def meshes(axes, outer_stage=0):
    of = torch.Size([size for _, size in axes]).numel()
    return [Mesh(axes, rank, outer_stage) for rank in range(of)]


def saved_on(axes, along, outer_stage=0):
    """Return each rank's errors over some axes of a mesh, and the mean of them all."""
    errors, mean = [], torch.zeros(NUMEL)
    for mesh in meshes(axes, outer_stage):
        for axis in along:
            extent = extent_of(info_of(mesh), numel_over(mesh, axis))
            values = torch.randn(extent.stop - extent.start)

            def read(order, start, stop, into, values=values):
                into.copy_(values[start:stop])

            source = Source(f"{mesh.rank} {axis}", read, lambda: None)
            errors.append(SavedError(axis, mesh, extent.start, extent.stop, source))
            mean[extent.start : extent.stop] += values / mesh.world_size
    return errors, mean


FLAT = (("data", 3),)


@pytest.mark.parametrize(
    "axes, along, outer_stage",
    [
        ((("data", 2),), ("data",), 0),
        (NODES, ("node",), 0),
        (NODES, ("gpu", "node"), 2),
        ((("node", 3), ("gpu", 2)), ("node",), 0),
        ((("node", 2), ("gpu", 1)), ("node",), 1),
        ((("node", 2), ("gpu", 4)), ("gpu",), 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("before", ((NODES, ("gpu", "node")), (FLAT, ("data",))), ids=str)
def test_on_another_mesh_ranks_share_what_all_had_lost(before, axes, along, outer_stage):
    torch.manual_seed(0)
    errors, mean = saved_on(*before, outer_stage=1 if axes == NODES and outer_stage == 0 else 0)
    found = torch.zeros(NUMEL)
    for mesh in meshes(axes, outer_stage):
        parameter, saved = nn.Parameter(torch.zeros(NUMEL)), SavedErrors()
        saved.replace(parameter, errors)
        for axis in along:
            extent = extent_of(info_of(mesh), numel_over(mesh, axis))
            takes_all = axis == mesh.outer or mesh.outer not in along
            for part in saved.take(parameter, mesh, axis, takes_all, extent):
                found[extent.start : extent.stop] += part / mesh.world_size
        assert not saved.left(parameter)
    torch.testing.assert_close(found, mean, rtol=0, atol=1e-5)
    assert mean.abs().max() > 0.1


@pytest.mark.parametrize("along", (("node",), ("gpu", "node")))
def test_on_the_same_mesh_each_rank_has_its_own(along):
    errors, _ = saved_on(NODES, along)
    for mesh in meshes(NODES):
        parameter, saved = nn.Parameter(torch.zeros(NUMEL)), SavedErrors()
        saved.replace(parameter, errors)
        for axis in along:
            extent = extent_of(info_of(mesh), numel_over(mesh, axis))
            (part,) = saved.take(parameter, mesh, axis, axis == "node", extent)
            (mine,) = (e for e in errors if (e.mesh.rank, e.axis) == (mesh.rank, axis))
            assert torch.equal(part, mine.read(mine.start, mine.stop))
        assert not saved.left(parameter)


@pytest.mark.parametrize("along", (("node",), ("gpu", "node")))
def test_on_the_same_mesh_with_other_buckets_ranks_share_what_they_had_lost(along):
    """Another ``bucket_bytes`` has a rank reduce other elements between nodes."""
    errors, mean = saved_on(NODES, along)
    found = torch.zeros(NUMEL)
    for mesh in meshes(NODES):
        parameter, saved = nn.Parameter(torch.zeros(NUMEL)), SavedErrors()
        saved.replace(parameter, errors)
        for axis in along:
            extent = extent_of(info_of(mesh, offset=10), numel_over(mesh, axis))
            for part in saved.take(parameter, mesh, axis, axis == "node", extent):
                found[extent.start : extent.stop] += part / mesh.world_size
        assert not saved.left(parameter)
    torch.testing.assert_close(found, mean, rtol=0, atol=1e-5)


def test_a_parameter_is_where_its_bucket_has_it():
    (first, second, *_) = meshes(NODES)
    assert extent_of(info_of(first), SHARD) == Extent(4, 0, 56)
    assert extent_of(info_of(second), SHARD) == Extent(0, 56, 100)
    assert extent_of(info_of(second), SHARD + 1) == Extent(0, 56, 100), "it is filled up"
    assert extent_of(info_of(second), 2 * SHARD) == Extent(4, 0, 100)


# With ranks


def trainer(shape=None, **options):
    torch._dynamo.reset()
    if shape is not None:
        options = {"process_group": mesh_of(*shape), "stage": {"gpu": 3, "node": 0}, **options}
    options = {"lowering": "eager", "reduce_wire": "int4", "error_feedback": 1, **options}
    return *built(), torch.compile(train, backend="zero", options=options)


def steps(model, optimizer, compiled, numbers):
    rank = dist.get_rank() if dist.is_initialized() else 0
    losses = [compiled(model, optimizer, *batch(n, rank)).item() for n in numbers]
    with zerofx.full_params(model):
        whole = [p.detach().clone() for p in model.parameters()]
    return losses, whole, errors_of(model)


def errors_of(model):
    return {
        (name, axis): error.clone()
        for name, parameter in model.named_parameters()
        for axis, error in REGISTRY.lookup(parameter).errors.items()
    }


def save_and_go_on(path, shape, asynchronous=False):
    model, optimizer, compiled = trainer(shape)
    steps(model, optimizer, compiled, range(2))
    saving = zerofx.save(path, model, optimizer, asynchronous=asynchronous)
    found = steps(model, optimizer, compiled, range(2, 4))
    saving.wait()
    return found


def load_and_go_on(path, shape, is_running):
    model, optimizer, compiled = trainer(shape)
    if is_running:
        steps(model, optimizer, compiled, range(7, 8))
    zerofx.load(path, model, optimizer)
    return steps(model, optimizer, compiled, range(2, 4))


def load_and_save(path, other):
    """In one process, of which no gradient travels."""
    model, optimizer, compiled = trainer()
    zerofx.load(path, model, optimizer)
    assert any(SAVED_ERRORS.left(parameter) for parameter in model.parameters())
    zerofx.save(other, model, optimizer)


def assert_same(results, wanted):
    for (losses, whole, errors), (its, others, lost) in zip(results, wanted, strict=True):
        assert losses == its
        assert all(map(torch.equal, whole, others))
        assert errors.keys() == lost.keys() and lost
        assert all(torch.equal(errors[key], lost[key]) for key in lost)


@pytest.mark.nightly
def test_two_ranks_go_on_where_they_were(ranks, tmp_path):
    path = str(tmp_path / "saved")
    wanted = ranks(2).run(save_and_go_on, path, None)
    assert_same(ranks(2).run(load_and_go_on, path, None, False), wanted)


@pytest.mark.nightly
@pytest.mark.parametrize("asynchronous", (False, True))
@pytest.mark.parametrize("is_running", (False, True))
def test_a_mesh_goes_on_where_it_was(ranks, tmp_path, is_running, asynchronous):
    path = str(tmp_path / "saved")
    wanted = ranks(4).run(save_and_go_on, path, (2, 2), asynchronous)
    assert_same(ranks(4).run(load_and_go_on, path, (2, 2), is_running), wanted)


@pytest.mark.nightly
def test_one_process_hands_on_what_it_cannot_add(ranks, tmp_path):
    path, other = str(tmp_path / "saved"), str(tmp_path / "other")
    wanted = ranks(4).run(save_and_go_on, path, (2, 2))
    ranks(1).run(load_and_save, path, other)
    assert_same(ranks(4).run(load_and_go_on, other, (2, 2), False), wanted)


def load_on_other_ranks(path, shape):
    """The parameters' errors that each rank adds, in elements of the whole."""
    model, optimizer, compiled = trainer(shape)
    zerofx.load(path, model, optimizer)
    saved = {name: SAVED_ERRORS.left(p) for name, p in model.named_parameters()}
    mean = {
        name: functools.reduce(torch.add, [e.share_in(0, p.numel()) for e in saved[name]])
        for name, p in model.named_parameters()
        if saved[name]
    }
    added = {}
    take = SavedErrors.take

    def noted(self, parameter, mesh, axis, takes_all, extent):
        for part in take(self, parameter, mesh, axis, takes_all, extent):
            whole = added.setdefault(id(parameter), torch.zeros(parameter.numel()))
            whole[extent.start : extent.stop] += part / mesh.world_size
            yield part

    SavedErrors.take = noted
    try:
        steps(model, optimizer, compiled, range(2, 3))
    finally:
        SavedErrors.take = take
    return mean, {name: added[id(p)] for name, p in model.named_parameters() if id(p) in added}


@pytest.mark.nightly
@pytest.mark.parametrize("of, shape", ((2, None), (6, (3, 2)), (4, None)))
def test_other_ranks_add_what_was_lost(ranks, tmp_path, of, shape):
    path = str(tmp_path / "saved")
    ranks(4).run(save_and_go_on, path, (2, 2))
    results = ranks(of).run(load_on_other_ranks, path, shape)
    mean = results[0][0]
    assert mean
    for name, expected in mean.items():
        found = functools.reduce(torch.add, [added[name] for _, added in results])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        assert expected.abs().max() > 1e-6
