"""Programs of a mesh of two axes: what they compute, what travels where, and what is refused."""

from __future__ import annotations

import functools
from dataclasses import replace
from unittest import mock

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
from zerofx.cost.timeline import predict
from zerofx.cost.traffic import wire_bytes
from zerofx.errors import GraphError, StepError
from zerofx.hardware import Link, with_links
from zerofx.ir import ops
from zerofx.ir.collectives import schedule
from zerofx.ir.interface import recorded
from zerofx.ir.mesh import Mesh
from zerofx.ir.roles import Role, bucket_of, role
from zerofx.passes.manager import run_pipeline
from zerofx.passes.memory import decisions
from zerofx.passes.memory.decisions import keep_gathered
from zerofx.passes.pipeline import PIPELINE, rewrites
from zerofx.verify.verifier import verify

NODES = (("node", 2), ("gpu", 2))
AVERAGED = frozenset({"averaged_gradients"})


def whole_numbers(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape) % 5 - 2


@functools.cache
def step_on(axes=(), num_batches: int = 1, is_cut: bool = False):
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
    return capture(step, whole_numbers(4, 5), world_size=ranks, axes=axes, is_cut=is_cut)


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
    assert (mesh.world_size, mesh.num_shards, mesh.num_replicas) == (6, 3, 2)
    assert (mesh.shard, mesh.replica) == (1, 1)
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
@pytest.mark.parametrize("is_cut", (False, True))
@pytest.mark.parametrize("stage", (1, 2, 3))
def test_computes_bitwise_what_one_axis_does(stage, is_cut, axes, num_batches):
    meshed = step_on(axes, num_batches, is_cut)
    flat = step_on((("data", meshed.world_size),), num_batches)
    inputs = integer_inputs(flat)
    wanted = execute(rewritten_by_rank(flat, stage=stage), inputs)
    found = execute(rewritten_by_rank(meshed, stage=stage), inputs)
    for name, values in wanted.parameters.items():
        for value, other in zip(values, found.parameters[name], strict=True):
            assert torch.equal(value, other), name


@pytest.mark.parametrize("num_batches", (1, 2, 4))
@pytest.mark.parametrize("is_cut", (False, True))
@pytest.mark.parametrize("stage", (1, 2, 3))
def test_bytes_along_each_axis_are_the_formulas(stage, is_cut, num_batches):
    nodes, gpus = 2, 3
    axes = (("node", nodes), ("gpu", gpus))
    program = rewritten(step_on(axes, num_batches, is_cut), stage=stage, bucket=True)
    buckets = {info.place.bucket: info for info in program.table}.values()
    whole = 4 * sum(info.place.shard_numel * info.world_size for info in buckets)
    inside = [node for node in program.graph.nodes if role(node) == Role.GATHER]
    num_gathers = sum(map(ops.is_collective, inside)) / len(buckets)
    inner, outer = (wire_bytes(program.gm, 6, axis) for axis in ("gpu", "node"))
    assert inner.gathers == num_gathers * whole * (gpus - 1) / gpus
    assert inner.reductions == whole * (gpus - 1) / gpus
    assert outer.scalars == inner.scalars == 0
    if is_cut:
        assert outer.gathers == num_gathers * whole / gpus * (nodes - 1) / nodes
        assert outer.reductions == whole / gpus * (nodes - 1) / nodes, "whatever num_batches is"
    else:
        assert outer.gathers == 0
        assert outer.reductions == 2 * whole / gpus * (nodes - 1) / nodes
    assert wire_bytes(program.gm, 6).total == inner.total + outer.total


# Plans by the figures of two links

COMPUTE = {"flops_per_s": 1e9, "memory_bytes_per_s": 1e9}
FAST, SLOW = Link(0.0, 1e12), Link(1e-5, 1e8)


def links(node: Link, gpu: Link):
    return with_links({"node": node, "gpu": gpu}, **COMPUTE)


@pytest.mark.parametrize("is_cut", (False, True))
@pytest.mark.parametrize("axes", (NODES, (("node", 2), ("gpu", 3)), (("node", 3), ("gpu", 1))))
def test_a_bucket_takes_the_time_that_plans_count_with(axes, is_cut):
    program = rewritten(step_on(axes, is_cut=is_cut), stage=3, bucket=True)
    ctx = replace(context_of(program), figures=links(SLOW, Link(1e-6, 3e9)))
    transfers = predict(program.graph, ctx.figures, program.table, ctx.world_size).transfers
    first = program.table[0]
    nbytes = 4 * first.place.shard_numel * first.world_size
    of_first = {start: each.seconds for start, each in transfers.items() if bucket_of(start) == 0}
    reduced = [seconds for at, seconds in of_first.items() if role(at) == Role.REDUCE_GRADIENT]
    assert len(reduced) == 2 and sum(reduced) == pytest.approx(ctx.travels_s(nbytes, reduces=True))
    waits = [n for n in program.graph.nodes if ops.is_wait(n) and role(n) == Role.GATHER]
    took = [sum(of_first[hop] for hop in ops.hops_of(w)) for w in waits if bucket_of(w) == 0]
    assert took == [pytest.approx(ctx.travels_s(nbytes, reduces=False))]


@pytest.mark.parametrize(
    "is_cut, node, expected",
    [
        (False, Link(0.0, 1e12), 8),  # nine latencies of 10 us carry 1.8 MB inside a node
        (False, Link(1e-3, 1e9), 64),  # of 1 ms 16.5 MB: a bucket's half is sent twice over half
        (False, Link(1e-3, 1e8), 8),  # 1.8 MB
        (False, Link(1e-3, 1e7), 1),
        (True, Link(1e-3, 1e8), 8),  # 3.6 MB: its half is sent once
        (True, Link(1e-3, 5e8), 64),  # 16.5 MB
    ],
)
def test_a_bucket_is_as_large_as_its_way_over_both_links_asks_for(is_cut, node, expected):
    ctx = context_of(step_on(NODES, is_cut=is_cut))
    ctx = replace(ctx, figures=links(node, Link(1e-5, 1e10)))
    assert ctx.bucket_bytes == expected * 2**20


def gathers_ahead(node: Link, gpu: Link, is_cut: bool) -> dict[str, tuple[str, str]]:
    """Where gathers start with memory enough, and why."""
    program = clone(deep_on(is_cut))
    ctx = context_of(program, memory_budget=10**9, bucket=True)
    ctx = replace(ctx, figures=links(node, gpu))
    run_pipeline(program.gm, ctx, rewrites(PIPELINE))
    starts = recorded(program.graph).decisions.starts
    assert len(starts) == 4, "of each layer one, which stays gathered"
    return starts


@functools.cache
def deep_on(is_cut: bool):
    model = nn.Sequential(*(nn.Linear(33, 33) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(x):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return capture(step, torch.ones(8, 33), world_size=4, axes=NODES, is_cut=is_cut)


def test_how_early_a_gather_starts_is_the_matter_of_the_link_it_goes_over():
    """With the outer axis not cut no gather waits for the link between nodes."""
    fast = gathers_ahead(FAST, FAST, False)
    assert gathers_ahead(SLOW, FAST, False) == fast
    assert gathers_ahead(FAST, SLOW, False) != fast


def test_gathers_start_at_their_waits_if_the_inner_link_does_not_overlap():
    late = replace(FAST, overlaps=False)
    why = {reason for _, reason in gathers_ahead(SLOW, late, False).values()}
    assert why == {"where it is waited for, as it is read only then"}
    assert gathers_ahead(late, FAST, False) == gathers_ahead(FAST, FAST, False)


@pytest.mark.parametrize("is_cut", (False, True))
def test_keeping_gathered_saves_the_time_of_the_links_that_a_gather_goes_over(is_cut):
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 64, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(x):
        model(x).square().sum().backward()
        optimizer.step()

    program = capture(step, torch.ones(2, 8), world_size=4, axes=NODES, is_cut=is_cut)
    asked = []

    def spied(planned, alive, budget, ahead, transfer_s):
        asked.append([transfer_s(1000), ahead])
        return keep_gathered(planned, alive, budget, ahead, transfer_s)

    ctx = context_of(program, memory_budget=10**6, bucket=True)
    ctx = replace(ctx, figures=links(Link(1.0, 125.0, False), Link(0.5, 500.0)))
    with mock.patch.object(decisions, "keep_gathered", spied):
        run_pipeline(program.gm, ctx, rewrites(PIPELINE))
    inside, between = 0.5 + 1000 / 2 / 500, 1.0 + 500 / 2 / 125
    assert asked == [[inside + between if is_cut else inside, True]]


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


def planted(stage: int = 2, is_cut: bool = False):
    program = rewritten(step_on(NODES, is_cut=is_cut), stage=stage, bucket=True)
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
    program = planted(stage, is_cut=True)
    starts = [n for n in program.graph.nodes if ops.rules(n).gathers]
    for start, axis in zip(starts[:2], axes, strict=True):
        start.kwargs = {"axis": axis}
    refused(program, "gathers over .* what is cut over gpu, then node")


def test_a_reduction_between_nodes_first_is_refused():
    program = planted(is_cut=True)
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
