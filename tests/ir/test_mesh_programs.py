"""Programs of a mesh of two axes: what they compute, what travels where, and what is refused."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.kit.programs import (
    capture,
    clone,
    context_of,
    execute,
    rewritten,
    rewritten_by_rank,
)
from zerofx.cost.traffic import wire_bytes
from zerofx.errors import GraphError, StepError
from zerofx.ir import ops
from zerofx.ir.collectives import schedule
from zerofx.ir.mesh import Mesh
from zerofx.ir.roles import Role, role
from zerofx.verify.verifier import verify

PAIRS = [(inner, outer) for inner in (1, 2, 3) for outer in range(inner + 1)]
"""The stages over the inner and the outer axis."""

NODES = (("node", 2), ("gpu", 2))
aten = torch.ops.aten
AVERAGED = frozenset({"averaged_gradients"})


def whole_numbers(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape) % 5 - 2


@functools.cache
def step_on(axes=(), num_batches: int = 1, outer_stage: int = 0):
    """A step whose sums over ranks are exact: gradients are small integers."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, bias=False))
    for parameter in model.parameters():
        parameter.data = whole_numbers(*parameter.shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)

    def step(x):
        for rows in x.chunk(num_batches):
            model(rows).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    ranks = torch.Size([size for _, size in axes]).numel() if axes else 4
    return capture(step, whole_numbers(4, 5), world_size=ranks, axes=axes, outer_stage=outer_stage)


def integer_inputs(captured):
    """Every rank's batch, of integers."""
    batches = [
        torch.roll(whole_numbers(4, 5), rank, 0) * (rank + 1) for rank in range(captured.world_size)
    ]
    return [
        [batch if value.shape == (4, 5) else value.detach().clone() for value in captured.inputs]
        for batch in batches
    ]


def test_ranks_are_told_apart_by_their_places():
    mesh = Mesh((("node", 2), ("gpu", 3)), rank=4)
    assert (mesh.world_size, mesh.num_shards) == (6, 3)
    assert (mesh.shard, mesh.replica_among(3)) == (1, (1, 2))
    assert list(mesh.ranks_along("gpu")) == [3, 4, 5]
    assert list(mesh.ranks_along("node")) == [1, 4]
    assert list(mesh.ranks_along("node,gpu")) == list(range(6))
    assert [mesh.size(axis) for axis in mesh.names] == [2, 3, 6]


def test_operators_along_the_only_axis_do_not_name_it():
    program = rewritten(step_on(), stage=3, bucket=True)
    assert all("axis" not in node.kwargs for node in program.graph.nodes)
    assert "node" not in "".join(schedule(program.gm, program.table, stage=3))


@pytest.mark.parametrize("num_batches", (1, 2))
@pytest.mark.parametrize("axes", (NODES, (("node", 2), ("gpu", 3)), (("node", 3), ("gpu", 1))))
@pytest.mark.parametrize("stage, outer_stage", PAIRS)
def test_computes_bitwise_what_one_axis_does(stage, outer_stage, axes, num_batches):
    meshed = step_on(axes, num_batches, outer_stage)
    flat = step_on((("data", meshed.world_size),), num_batches)
    inputs = integer_inputs(flat)
    wanted = execute(rewritten_by_rank(flat, stage=stage), inputs)
    found = execute(rewritten_by_rank(meshed, stage=stage), inputs)
    for name, values in wanted.parameters.items():
        for value, other in zip(values, found.parameters[name], strict=True):
            assert torch.equal(value, other), name


@pytest.mark.parametrize("num_batches", (1, 2, 4))
@pytest.mark.parametrize("stage, outer_stage", PAIRS)
def test_bytes_along_each_axis_are_the_formulas(stage, outer_stage, num_batches):
    nodes, gpus = 2, 3
    axes = (("node", nodes), ("gpu", gpus))
    program = rewritten(step_on(axes, num_batches, outer_stage), stage=stage, bucket=True)
    buckets = {info.place.bucket: info for info in program.table}.values()
    whole = 4 * sum(info.place.shard_numel * info.world_size for info in buckets)
    inside = [node for node in program.graph.nodes if role(node) == Role.GATHER]
    num_gathers = sum(map(ops.is_collective, inside)) / len(buckets)
    inner, outer = (wire_bytes(program.gm, 6, axis) for axis in ("gpu", "node"))
    assert inner.gathers == num_gathers * whole * (gpus - 1) / gpus
    assert inner.reductions == whole * (gpus - 1) / gpus
    assert outer.scalars == inner.scalars == 0
    if outer_stage:
        num_gathers = 1 if stage == 3 and outer_stage < 3 else num_gathers
        assert outer.gathers == num_gathers * whole / gpus * (nodes - 1) / nodes
        assert outer.reductions == whole / gpus * (nodes - 1) / nodes, "whatever num_batches is"
    else:
        assert outer.gathers == 0
        assert outer.reductions == 2 * whole / gpus * (nodes - 1) / nodes
    assert wire_bytes(program.gm, 6).total == inner.total + outer.total


def reductions(program, axis):
    return [
        node
        for node in program.graph.nodes
        if ops.is_collective(node)
        and role(node) == Role.REDUCE_GRADIENT
        and ops.argument(node, "axis") == axis
    ]


def refused(program, words: str) -> None:
    with pytest.raises(GraphError, match=words):
        verify(program.gm, program.table, AVERAGED)


def planted(stage: int = 2, outer_stage: int = 0):
    program = rewritten(step_on(NODES, outer_stage=outer_stage), stage=stage, bucket=True)
    verify(program.gm, program.table, AVERAGED)
    return program


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_a_gradient_that_is_not_reduced_over_the_outer_axis_is_refused(stage):
    program = planted(stage)
    start = reductions(program, "node")[0]
    ops.wait_of(start).replace_all_uses_with(start.args[0])
    program.graph.erase_node(ops.wait_of(start))
    program.graph.erase_node(start)
    refused(program, "not computed from the average of its gradient")


@pytest.mark.parametrize("axis", ("gpu", "node,gpu"))
def test_a_second_reduction_over_another_axis_is_refused(axis):
    program = planted()
    start = reductions(program, "node")[0]
    start.kwargs = {"axis": axis}
    refused(program, "not computed from the average of its gradient")


def test_a_scatter_over_the_outer_axis_is_refused():
    program = planted()
    reductions(program, "gpu")[0].kwargs = {"axis": "node"}
    refused(program, "not computed from the average of its gradient")


@pytest.mark.parametrize("axes", (("gpu", "node"), ("gpu", "gpu"), ("node", "node")))
@pytest.mark.parametrize("stage", (2, 3))
def test_a_gather_in_another_order_than_shards_lie_is_refused(stage, axes):
    """On nodes of as many ranks as there are nodes all sizes are right."""
    program = planted(stage, outer_stage=stage)
    starts = [n for n in program.graph.nodes if ops.rules(n).gathers]
    for start, axis in zip(starts[:2], axes, strict=True):
        start.kwargs = {"axis": axis}
    refused(program, "gathers over .* what is cut over gpu, then node")


def kept_writes(program):
    return [
        node
        for node in program.graph.nodes
        if role(node) == Role.KEPT_SHARD and node.target is aten.copy_.default
    ]


def wrong_range(program):
    taken = next(n for n in program.graph.nodes if role(n) == Role.TAKE_SHARD)
    source, dim, begin, end = taken.args
    taken.args = (source, dim, begin + 1, end + 1)


def wrong_part(program):
    part = kept_writes(program)[0].args[1]
    part.args = (part.args[0], 0, part.args[2] + 1, part.args[3] + 1)


def wrong_axis(program):
    ops.hops_of(kept_writes(program)[-1].args[1])[0].kwargs = {"axis": "gpu"}


def stale(program):
    write = kept_writes(program)[-1]
    start = ops.hops_of(write.args[1])[0]
    start.replace_input_with(start.args[0], start.args[0].args[0])


def of_another(program):
    first, second = kept_writes(program)[:2]
    first.args, second.args = (second.args[0], first.args[1]), (first.args[0], second.args[1])


def not_written(program):
    program.graph.erase_node(kept_writes(program)[-1])


@pytest.mark.parametrize(
    "bug, words",
    (
        (wrong_range, "is not this rank's range of what it keeps"),
        (wrong_part, "does not read what the rank keeps"),
        (wrong_axis, "gathered along node, and them alone"),
        (stale, "is of the old values"),
        (of_another, "is not of values of|does not read what the rank keeps"),
        (not_written, "new values along node do not come to it"),
    ),
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("outer_stage", (1, 2))
def test_new_values_come_to_all_that_keep_them(outer_stage, bug, words):
    program = planted(3, outer_stage)
    bug(program)
    refused(program, words)


def test_a_reduction_between_nodes_first_is_refused():
    program = planted(outer_stage=2)
    inside, between = (reductions(program, axis)[0] for axis in ("gpu", "node"))
    inside.kwargs, between.kwargs = between.kwargs, inside.kwargs
    refused(program, "not computed from the average of its gradient")


def test_an_axis_that_is_not_there_is_refused():
    program = planted()
    reductions(program, "gpu")[0].kwargs = {"axis": "rack"}
    refused(program, "is over axis 'rack', and the mesh has 'node', 'gpu', 'node,gpu'")


@pytest.mark.parametrize("axis, reduction", (("gpu", "mean"), ("node", "sum")))
def test_a_sum_that_is_divided_twice_or_never_is_refused(axis, reduction):
    program = planted()
    start = reductions(program, axis)[0]
    flat, _, *others = start.args
    start.args = (flat, reduction, *others)
    refused(program, "not computed from the average of its gradient")


def test_an_update_by_a_value_that_differs_between_nodes_is_refused():
    """A coefficient has to be the same on all nodes."""
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(x):
        (weight * x).sum().backward()
        weight.grad.mul_(x.mean())
        optimizer.step()

    with pytest.raises(StepError, match="values that differ between ranks"):
        rewritten(capture(step, torch.ones(4), axes=NODES), stage=2)


def test_ranks_with_other_meshes_have_other_schedules():
    schedules = {
        schedule(program.gm, program.table, stage=2)
        for axes in (
            (("node", 2), ("gpu", 3)),
            (("node", 3), ("gpu", 2)),
            (("rack", 3), ("gpu", 2)),
        )
        for program in [rewritten(step_on(axes), stage=2, bucket=True)]
    }
    assert len(schedules) == 3


def test_the_second_reduction_goes_on_while_backward_does():
    program = planted()
    graph = program.graph
    order = {node: place for place, node in enumerate(graph.nodes)}
    first, second = sorted(reductions(program, "node"), key=order.__getitem__)
    following = sorted(reductions(program, "gpu"), key=order.__getitem__)[1]
    assert order[first] < order[following] < order[ops.wait_of(first)]
    assert order[ops.wait_of(following)] < order[second]


def test_the_mesh_is_that_of_the_rank():
    captured = step_on(NODES)
    assert [context_of(captured, rank).mesh.shard for rank in range(4)] == [0, 1, 0, 1]
    assert replace(context_of(captured).mesh, rank=3) == Mesh(NODES, 3)
    assert clone(captured).table[0].world_size == 2
