"""Programs of a mesh of two axes: what they compute, what travels where, and what is refused."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

from tests.kit.covering import each_pair, each_value, first, nightly, only
from tests.kit.programs import (
    assert_same_numerics,
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

PAIRS = [(inner, outer) for inner in (1, 2, 3) for outer in range(inner + 1)]
"""The stages over the inner and the outer axis."""

NODES = (("node", 2), ("gpu", 2))
aten = torch.ops.aten
AVERAGED = frozenset({"averaged_gradients"})


def whole_numbers(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape) % 5 - 2


def step_on(axes=(), num_batches: int = 1, outer_stage: int = 0):
    """A step whose sums over ranks are exact: gradients are small integers."""
    return captured_on(axes, num_batches, outer_stage)


@functools.cache
def captured_on(axes, num_batches: int, outer_stage: int):
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


@functools.cache
def one_of_several_calls(axes=(), outer_stage: int = 0, updates: bool = False):
    """A micro-batch that is a call of its own; ``p.grad`` comes in, whole numbers too."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, bias=False))
    for parameter in model.parameters():
        parameter.data = whole_numbers(*parameter.shape)
        parameter.grad = 12 * whole_numbers(*parameter.shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)

    def step(x):
        model(x).sum().backward()
        if updates:
            optimizer.step()

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


@pytest.mark.parametrize(
    ("stages", "axes", "num_batches"),
    each_pair(
        PAIRS,
        (NODES, (("node", 2), ("gpu", 3)), (("node", 3), ("gpu", 1))),
        (1, 2),
        default=[((2, 0), NODES, 2), ((3, 3), NODES, 1)],
    ),
)
def test_computes_bitwise_what_one_axis_does(stages, axes, num_batches):
    stage, outer_stage = stages
    meshed = step_on(axes, num_batches, outer_stage)
    flat = step_on((("data", meshed.world_size),), num_batches)
    wanted = execute(rewritten_by_rank(flat, stage=stage), integer_inputs(flat))
    found = execute(rewritten_by_rank(meshed, stage=stage), integer_inputs(meshed))
    for name, values in wanted.parameters.items():
        for value, other in zip(values, found.parameters[name], strict=True):
            assert torch.equal(value, other), name


@pytest.mark.parametrize(
    ("num_batches", "pair"),
    each_pair((1, 2, 4), PAIRS, default=[(1, (1, 0)), (2, (2, 2)), (1, (3, 1))]),
    ids=str,
)
def test_bytes_along_each_axis_are_the_formulas(num_batches, pair):
    stage, outer_stage = pair
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


@pytest.mark.parametrize(
    ("stages", "axes", "updates"),
    each_pair(
        PAIRS[2:],
        (NODES, (("node", 3), ("gpu", 2))),
        (False, True),
        default=[((2, 1), NODES, True), ((3, 3), NODES, False)],
    ),
)
def test_adds_up_over_calls_bitwise_as_one_axis_does(stages, axes, updates):
    stage, outer_stage = stages
    meshed = one_of_several_calls(axes, outer_stage, updates)
    flat = one_of_several_calls((("data", meshed.world_size),), 0, updates)
    wanted = execute(rewritten_by_rank(flat, stage=stage), integer_inputs(flat))
    found = execute(rewritten_by_rank(meshed, stage=stage), integer_inputs(meshed))
    for these, others in (
        (wanted.parameters, found.parameters),
        (wanted.gradients, found.gradients),
    ):
        assert these.keys() == others.keys()
        for name, values in these.items():
            for value, other in zip(values, others[name], strict=True):
                assert torch.equal(value, other), name


@pytest.mark.nightly
@pytest.mark.parametrize("stage", (2, 3))
def test_adds_up_over_calls_so_in_another_dtype(stage):
    options = {"stage": stage, "reduce_dtype": torch.float64}
    meshed, flat = (
        one_of_several_calls(axes, outer, True) for axes, outer in ((NODES, 1), ((), 0))
    )
    wanted = execute(rewritten_by_rank(flat, **options), integer_inputs(flat))
    found = execute(rewritten_by_rank(meshed, **options), integer_inputs(meshed))
    for name, values in wanted.parameters.items():
        for value, other in zip(values, found.parameters[name], strict=True):
            assert torch.equal(value, other), name


@pytest.mark.parametrize("stage", only((2,), (2, 3)))
def test_with_stage_1_outside_only_the_update_sends_there(stage):
    nodes, gpus = 2, 3
    axes = (("node", nodes), ("gpu", gpus))

    def sent(outer_stage: int, updates: bool):
        captured = one_of_several_calls(axes, outer_stage, updates)
        program = rewritten(captured, stage=stage, bucket=True)
        buckets = {info.place.bucket: info for info in program.table}.values()
        whole = 4 * sum(info.place.shard_numel * info.world_size for info in buckets)
        outer = wire_bytes(program.gm, 6, "node")
        return outer.reductions / (whole / gpus * (nodes - 1) / nodes), outer.gathers > 0

    assert sent(1, updates=False) == (0, False)
    assert sent(1, updates=True) == (1, True)
    assert sent(2, updates=False) == (1, False)
    assert sent(2, updates=True) == (1, True)


def second_hops(program):
    return [start for start in reductions(program, "node") if start.args[0].target is ops.pack]


def never_averaged(program):
    start = second_hops(program)[-1]
    start.args = (start.args[0], "sum", start.args[2])


def not_added_to(program):
    pack = second_hops(program)[0].args[0]
    added = pack.args[0][0]
    pack.args = ([added.args[1].args[0], *pack.args[0][1:]], *pack.args[1:])


def of_another_parameter(program):
    pack = second_hops(program)[0].args[0]
    first, second = pack.args[0]
    pack.args = ([second, first], *pack.args[1:])


def over_the_inner_axis(program):
    second_hops(program)[0].kwargs = {"axis": "gpu"}


@pytest.mark.parametrize(
    "bug", (never_averaged, not_added_to, of_another_parameter, over_the_inner_axis)
)
@pytest.mark.parametrize("stage", only((2,), (2, 3)))
def test_what_adds_up_over_calls_is_averaged_outside(stage, bug):
    program = rewritten(one_of_several_calls(NODES, 1, True), stage=stage, bucket=True)
    verify(program.gm, program.table, AVERAGED)
    bug(program)
    refused(program, "not computed from the average of its gradient|as if it were the shard of")


# Plans by the figures of two links

COMPUTE = {"flops_per_s": 1e9, "memory_bytes_per_s": 1e9}
FAST, SLOW = Link(0.0, 1e12), Link(1e-5, 1e8)


def links(node: Link, gpu: Link):
    return with_links({"node": node, "gpu": gpu}, **COMPUTE)


@pytest.mark.parametrize("is_cut", (False, True))
@pytest.mark.parametrize(
    "axes", [NODES, nightly((("node", 2), ("gpu", 3))), nightly((("node", 3), ("gpu", 1)))]
)
def test_a_bucket_takes_the_time_that_plans_count_with(axes, is_cut):
    program = rewritten(step_on(axes, outer_stage=3 * is_cut), stage=3, bucket=True)
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
    ctx = context_of(step_on(NODES, outer_stage=3 * is_cut))
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

    return capture(step, torch.ones(8, 33), world_size=4, axes=NODES, outer_stage=3 * is_cut)


def test_how_early_a_gather_starts_is_the_matter_of_the_link_it_goes_over():
    """With the outer axis not cut no gather waits for the link between nodes."""
    fast = gathers_ahead(FAST, FAST, False)
    assert gathers_ahead(SLOW, FAST, False) == fast
    assert gathers_ahead(FAST, SLOW, False) != fast


@pytest.mark.nightly
def test_gathers_start_at_their_waits_if_the_inner_link_does_not_overlap():
    late = replace(FAST, overlaps=False)
    why = {reason for _, reason in gathers_ahead(SLOW, late, False).values()}
    assert why == {"where it is waited for, as it is read only then"}
    assert gathers_ahead(late, FAST, False) == gathers_ahead(FAST, FAST, False)


@pytest.mark.parametrize("is_cut", only((True,), (False, True)))
def test_keeping_gathered_saves_the_time_of_the_links_that_a_gather_goes_over(is_cut):
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 64, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(x):
        model(x).square().sum().backward()
        optimizer.step()

    program = capture(step, torch.ones(2, 8), world_size=4, axes=NODES, outer_stage=3 * is_cut)
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


def follower(updates: bool, is_alike: bool, outer_stage: int):
    """A step in whose course frozen copies of two weights follow them, or take their gradients.

    Copies that are not alike lie in their bucket in another order than the weights do in theirs.
    """
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(*shape)) for shape in ((6, 3), (3,))]
    copies = [nn.Parameter(w.detach().clone(), requires_grad=False) for w in weights]
    pairs = list(zip(copies, weights, strict=True))[:: 1 if is_alike else -1]
    optimizer = torch.optim.AdamW(weights, lr=0.1)

    def step(x):
        (x @ weights[0] * weights[1]).square().mean().backward()
        if updates:
            optimizer.step()
        with torch.no_grad():
            for copy, weight in pairs:
                if updates:
                    copy.lerp_(weight, 0.25)
                else:
                    copy.sub_(weight.grad)
        optimizer.zero_grad()

    return capture(step, torch.randn(4, 6), axes=NODES, outer_stage=outer_stage)


@pytest.mark.parametrize(
    ("updates", "is_alike", "outer_stage"),
    first(1, each_value((False, True), (False, True), (1, 2))),
)
def test_a_value_of_one_parameter_is_written_to_another_alone(updates, is_alike, outer_stage):
    captured = follower(updates, is_alike, outer_stage)
    found = execute(rewritten_by_rank(captured, stage=3))
    assert_same_numerics(execute(captured), found, bitwise=False)


def test_a_copy_in_a_bucket_of_half_the_size_is_cut_otherwise():
    """A rank keeps as much of the copy as it updates of the weights' bucket, which is larger."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(16)) for _ in range(2)]
    copy = nn.Parameter(torch.randn(16), requires_grad=False)

    def step(x):
        (torch.tanh(x * weights[0]) * weights[1]).square().mean().backward()
        with torch.no_grad():
            copy.sub_(weights[0].grad)
        for weight in weights:
            weight.grad = None

    captured = capture(step, torch.randn(4, 16), axes=NODES, outer_stage=1)
    found = execute(rewritten_by_rank(captured, stage=3))
    assert_same_numerics(execute(captured), found, bitwise=False)


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


# A second shard


@functools.cache
def mesh_with_names():
    return SimpleNamespace(mesh_dim_names=("node", "gpu"))


SECOND = {"process_group": mesh_with_names(), "secondary_shard": "gpu"}


@functools.cache
def two_updates(axes=(), outer_stage: int = 0):
    """Parameters are gathered, updated, and gathered and updated again."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, bias=False))
    for parameter in model.parameters():
        parameter.data = whole_numbers(*parameter.shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(x):
        for _ in range(2):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return capture(step, whole_numbers(4, 5), axes=axes, outer_stage=outer_stage)


def refills(program):
    return [node for node in program.graph.nodes if node.target is ops.refill_start]


@pytest.mark.parametrize("make", only((two_updates,), (step_on, two_updates)))
def test_gathers_that_begin_with_a_second_shard_give_the_same(make):
    axes = {"axes": NODES, "outer_stage": 3}
    flat, meshed = make(), make(**axes)
    wanted = execute(rewritten_by_rank(flat, stage=3), integer_inputs(flat))
    found = execute(rewritten_by_rank(meshed, stage=3, **SECOND), integer_inputs(meshed))
    for name, values in wanted.parameters.items():
        for value, other in zip(values, found.parameters[name], strict=True):
            assert torch.equal(value, other), name


def test_the_outer_axis_is_gathered_over_once_for_each_update():
    program = rewritten(step_on(NODES, 2, 3), stage=3, bucket=True, **SECOND)
    buckets = {info.place.bucket: info for info in program.table}.values()
    whole = 4 * sum(info.place.shard_numel * info.world_size for info in buckets)
    inner, outer = (wire_bytes(program.gm, 4, axis).gathers for axis in ("gpu", "node"))
    assert outer == whole / 2 / 2
    assert inner >= 2 * whole / 2
    assert [ops.argument(node, "is_new") for node in refills(program)] == [False, False]
    again = refills(rewritten(two_updates(NODES, 3), stage=3, bucket=True, **SECOND))
    assert [ops.argument(node, "is_new") for node in again] == [False, False, True, True]


def old_for_new(program):
    refill = refills(program)[-1]
    refill.args = (*refill.args[:3], False)


def of_the_other(program):
    refill = refills(program)[-1]
    refill.args = (refill.args[0], [0], *refill.args[2:])


def along_the_inner_axis(program):
    refills(program)[0].kwargs = {"axis": "gpu"}


def kept_past_an_update(program):
    first, *_, last = refills(program)
    for reader in list(ops.wait_of(last).users):
        reader.replace_input_with(ops.wait_of(last), ops.wait_of(first))


@pytest.mark.parametrize(
    "bug, words",
    (
        (old_for_new, "before the program has written"),
        (of_the_other, "shards of the parameters that it names"),
        (along_the_inner_axis, "is not filled along node"),
        (kept_past_an_update, "has overwritten it|does not read what|gathers|not hold"),
    ),
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_second_shard_is_of_the_newest_values(bug, words):
    program = rewritten(two_updates(NODES, 3), stage=3, bucket=True, **SECOND)
    verify(program.gm, program.table, AVERAGED)
    bug(program)
    refused(program, words)


# Wires


@pytest.mark.parametrize(
    "outer_stage, options",
    [nightly(1, {}), nightly(2, {}), nightly(3, {}), (3, SECOND)],
    ids=("1", "2", "3", "second"),
)
def test_gathers_of_wires_give_the_same_however_parameters_are_cut(outer_stage, options):
    def run(gather_dtype):
        captured = two_updates(NODES, outer_stage)
        given = {**options, "gather_dtype": gather_dtype, "bucket": True}
        programs = rewritten_by_rank(captured, stage=3, **given)
        return programs[0], execute(programs, integer_inputs(captured))

    _, exact = run(None)
    program, rounded = run("int8")
    wires = [node for node in program.graph.nodes if node.target is ops.quantize]
    assert len(wires) == 4, "two buckets, before and behind their first update"
    for name, values in exact.parameters.items():
        largest = max(value.abs().max() for value in values)
        for value, other in zip(values, rounded.parameters[name], strict=True):
            torch.testing.assert_close(value, other, rtol=0, atol=float(largest) * 0.05)


@functools.cache
def wide_call():
    """A micro-batch of a model whose gradients are worth wires; ``p.grad`` comes in."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step(x):
        model(x).square().sum().backward()
        optimizer.step()

    return capture(step, torch.randn(4, 64), axes=NODES, outer_stage=1)


@pytest.mark.parametrize("stage", only((2,), (2, 3)))
def test_what_adds_up_over_calls_travels_outside_as_wires(stage):
    options = {"process_group": mesh_with_names(), "reduce_wire": {"node": "int4"}}
    programs = rewritten_by_rank(wide_call(), stage=stage, **options)
    sent = [node for node in programs[0].graph.nodes if node.target is ops.all_to_all_start]
    assert [ops.argument(node, "axis") for node in sent] == ["node"]
    exact = execute(rewritten_by_rank(wide_call(), stage=stage))
    rounded = execute(programs)
    for name, values in exact.gradients.items():
        largest = float(max(value.abs().max() for value in values))
        for value, other in zip(values, rounded.gradients[name], strict=True):
            torch.testing.assert_close(value, other, rtol=0, atol=largest / 6)
            assert not torch.equal(value, other), name


@functools.cache
def large_in_bfloat16():
    """Layers of 2 MiB, gathered for forward and for backward, between small ones."""
    layers = [nn.Embedding(4, 1024)]
    for _ in range(4):
        layers += [nn.Linear(1024, 1024, bias=False), nn.GELU()]
    model = nn.Sequential(*layers, nn.Linear(1024, 1)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return capture(step, torch.tensor([0, 1]), axes=NODES, outer_stage=3)


@pytest.mark.nightly
def test_wires_and_a_second_shard_send_a_quarter_between_nodes():
    """Of two gathers and a reduction in bfloat16: one gather in eight bits, and four bits."""

    def sent(**options):
        program = rewritten(large_in_bfloat16(), stage=3, bucket=True, **options)
        return wire_bytes(program.gm, 4, "node")

    before = sent()
    given = {**SECOND, "gather_dtype": "int8", "reduce_wire": {"node": "int4"}}
    after = sent(**given)
    assert before.gathers > 1.99 * before.reductions
    assert after.total <= 0.26 * before.total
    assert after.gathers <= 0.52 * before.gathers / 2
    assert after.reductions <= 0.28 * before.reductions
