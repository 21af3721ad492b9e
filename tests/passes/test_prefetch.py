"""prefetch: each gather is in flight while the one before it is used, and only one of them."""

import functools
from itertools import pairwise
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.kit.covering import each_value, first, only
from tests.kit.programs import (
    assert_program,
    assert_same_numerics,
    capture,
    clone,
    context_of,
    evaluation,
    execute,
    gathers_of,
    listing,
    mlp_step,
    nodes_of,
    parameter_named,
    rewritten,
    rewritten_by_rank,
    run_passes,
    smallest_step,
)
from zerofx import GraphError
from zerofx.cost.program import live_bytes
from zerofx.ir import ops
from zerofx.ir.graph import program_order
from zerofx.ir.interface import input_role
from zerofx.ir.roles import provenance
from zerofx.passes import base
from zerofx.passes.manager import run_pipeline
from zerofx.passes.pipeline import PIPELINE
from zerofx.passes.schedule import prefetch
from zerofx.passes.schedule.start_times import bytes_of, chain_of

aten = torch.ops.aten


def without(captured, **options):
    return rewritten(captured, prefetch=False, **options)


def gathers(captured):
    """(start, wait) of every all-gather, in order of the waits."""
    waits = nodes_of(captured, ops.wait)
    return [(w.args[0], w) for w in waits if w.args[0].target is ops.all_gather_start]


@functools.cache
def autocast_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return capture(step, torch.randn(3, 5), world_size=2)


def test_starts_each_gather_after_the_wait_for_the_one_before():
    assert_program(
        rewritten(evaluation()),
        """
        0_weight: shard of parameter [10]
        0_bias: shard of parameter [2]
        input: other [2, 5]
        2_weight: shard of parameter [6]
        2_bias: shard of parameter [2]
        all_gather_start = zerofx.all_gather_start(0_weight, 2)
        wait = zerofx.wait(all_gather_start)
        all_gather_start_1 = zerofx.all_gather_start(0_bias, 2)
        view = view(wait, [4, 5])
        t = t(view)
        wait_1 = zerofx.wait(all_gather_start_1)
        all_gather_start_2 = zerofx.all_gather_start(2_weight, 2)
        view_1 = view(wait_1, [4])
        addmm = addmm(view_1, input, t)
        zerofx.free(wait_1)
        zerofx.free(wait)
        relu = relu(addmm)
        wait_2 = zerofx.wait(all_gather_start_2)
        all_gather_start_3 = zerofx.all_gather_start(2_bias, 2)
        view_2 = view(wait_2, [3, 4])
        t_1 = t(view_2)
        wait_3 = zerofx.wait(all_gather_start_3)
        slice = slice(wait_3, 0, 0, 3)
        view_3 = view(slice, [3])
        addmm_1 = addmm(view_3, relu, t_1)
        zerofx.free(wait_3)
        zerofx.free(wait_2)
        sum = sum(addmm_1)
        return [sum]
        """,
    )


@pytest.mark.slow(reason="whole programs are rewritten and run")
def test_moves_nothing_but_starts_and_their_casts():
    for captured in (mlp_step(4, clip=True), autocast_step()):
        before, after = listing_without_starts(without(captured)), rewritten(captured)
        assert listing_without_starts(after) == before


def listing_without_starts(captured):
    """The order of everything that prefetch leaves in place."""
    moved = set()
    for start, _ in gathers(captured):
        moved |= {start, *start.all_input_nodes}
    return [
        node.name
        for node in captured.graph.nodes
        if node not in moved or node.op == "placeholder" or node.target is ops.update
    ]


@pytest.mark.parametrize("stage", only((1, 3), [1, 2, 3]))
def test_at_most_one_gather_is_in_flight_ahead_of_the_one_in_use(stage):
    for captured in (mlp_step(4), autocast_step()):
        in_flight, most = 0, 0
        for node in rewritten(captured, stage=stage).graph.nodes:
            in_flight += node.target is ops.all_gather_start
            assert in_flight <= 1
            most = max(most, in_flight)
            waits = node.target is ops.wait and node.args[0].target is ops.all_gather_start
            in_flight -= waits
        assert most == 1


def test_every_gather_but_the_first_overlaps_with_what_stands_before_its_wait():
    program = rewritten(mlp_step(4))
    order = program_order(program.graph)
    for (_, previous), (start, wait) in pairwise(gathers(program)):
        assert order[start] == order[previous] + 1
        assert order[wait] > order[start] + 1


def test_a_gather_of_backward_starts_in_forward_if_it_comes_next():
    """The middle layer's second gather overlaps with the last layer and the loss."""
    program = rewritten(mlp_step(3))
    order = program_order(program.graph)
    (forward, backward) = [
        start
        for start, _ in gathers(program)
        if program.table[start.meta["zerofx"].parameter].name == "2.weight"
    ]
    (wait,) = backward.users
    assert order[forward] < order[backward] < order[nodes_of(program, aten.mean.default)[0]]
    assert order[wait] > order[nodes_of(program, aten.mean.default)[0]]


def test_waits_come_in_the_order_of_starts():
    """Collectives complete in order: a wait for a later one would wait for all before it."""
    for captured in (mlp_step(4, clip=True), autocast_step()):
        program = rewritten(captured)
        order = program_order(program.graph)
        starts = [order[start] for start, _ in gathers(program)]
        assert starts == sorted(starts)


def test_a_gather_of_an_updated_value_stays_behind_the_update():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(x):
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            return model(x).sum()

    captured = capture(step, torch.randn(3, 5), world_size=2)
    for stage in (1, 2, 3):
        program = rewritten(captured, stage=stage)
        order = program_order(program.graph)
        for start in nodes_of(program, ops.all_gather_start):
            for update in nodes_of(program, ops.update):
                same = update.meta["zerofx"].parameter == start.meta["zerofx"].parameter
                if same and start.args[0] is not update:
                    assert order[start] < order[update], "reads what the update overwrites"
        assert_same_numerics(execute(captured), execute(program))


def test_a_cast_moves_with_its_gather():
    program = rewritten(autocast_step())
    for (_, previous), (start, _) in pairwise(gathers(program)):
        assert start.args[0].target is aten._to_copy.default
        assert start.prev is start.args[0]
        assert start.args[0].prev is previous


def test_at_stage_1_the_next_parameter_is_gathered_while_one_is_written():
    program = rewritten(mlp_step(2), stage=1)
    order = program_order(program.graph)
    writes = nodes_of(program, aten.copy_.default)
    for write, (start, wait) in zip(writes, gathers(program)[1:], strict=False):
        assert order[start] < order[write] < order[wait]


def between(program, start, wait, *targets):
    order = program_order(program.graph)
    return [n for n in nodes_of(program, *targets) if order[start] < order[n] < order[wait]]


@pytest.mark.parametrize("stage", [1, 2])
def test_a_new_value_travels_while_others_are_computed_and_reduced(stage):
    captured = mlp_step(4)
    programs = rewritten_by_rank(captured, stage=stage, update_in_backward=True)
    for program in programs:
        order = program_order(program.graph)
        layers = gathers(program)
        assert len(layers) == 4
        for start, _ in layers:
            (update, *_) = sorted(start.args[0].args[0], reverse=True)
            assert update.target is ops.update
            # Nothing but the gather's packing and the arrival of the one before.
            assert order[start] - order[update] <= 3
        for start, wait in layers[:-1]:
            assert between(program, start, wait, ops.reduce_scatter_start)
            assert between(program, start, wait, ops.update)
        # At stage 1 nothing is reduced before the tail; at 2 a gradient is, one layer later.
        for start, wait in layers[:-2]:
            assert bool(between(program, start, wait, aten.mm.default)) == (stage == 2)
    assert_same_numerics(execute(captured), execute(programs))


@pytest.mark.parametrize("stage", [1, 2])
def test_behind_clipping_new_values_travel_while_others_are_updated(stage):
    program = rewritten(mlp_step(4, clip=True), stage=stage, update_in_backward=True)
    pairs = gathers(program)
    assert len(pairs) == 8
    for start, wait in pairs[:-1]:
        assert between(program, start, wait, ops.update)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("bucket", [False, True])
def test_one_new_value_is_in_flight_and_two_are_alive(stage, bucket):
    for program in rewritten_by_rank(mlp_step(4), stage=stage, bucket=bucket):
        in_flight = alive = most = 0
        for node in program.graph.nodes:
            arrives = node.target is ops.wait and node.args[0].target is ops.all_gather_start
            in_flight += (node.target is ops.all_gather_start) - arrives
            alive += (node.target is ops.all_gather_start) - (node.target is ops.free)
            most = max(most, alive)
            assert in_flight <= 1 and alive <= 2
        assert (in_flight, alive, most) == (0, 0, 2)


def test_a_parameter_is_written_behind_the_last_reader_of_its_old_value():
    """What the last layer was, read when backward has long updated it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(x):
        loss = model(x).pow(2).mean()
        loss.backward()
        was = model[2].weight.detach().exp().sum() * loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return was

    captured = capture(step, torch.randn(3, 5), world_size=2)
    program = rewritten(captured, stage=2, update_in_backward=True)
    order = program_order(program.graph)
    (reader,) = nodes_of(program, aten.exp.default)
    writes = {input_role(w.args[0]).parameter: w for w in nodes_of(program, aten.copy_.default)}
    read = parameter_named(program, "2.weight").index
    (start,) = gathers_of(program, "2.weight")
    # The update too is behind the reader: the shard may be the parameter's own memory.
    assert order[reader] < order[start] < order[writes[read]]
    assert any(order[write] < order[reader] for write in writes.values())
    assert_same_numerics(execute(captured), execute(program))


def test_leaves_a_single_gather_alone():
    reports = run_passes(clone(smallest_step()))
    assert reports["prefetch"].counts == {"prefetched": 0}
    assert listing(rewritten(smallest_step())) == listing(without(smallest_step()))


def test_leaves_a_program_without_gathers_alone():
    def double(x):
        return x * 2

    captured = capture(double, torch.randn(3), world_size=2)
    assert listing(rewritten(captured)) == listing(captured)


def test_does_nothing_at_stage_0():
    reports = run_passes(clone(mlp_step()), stage=0)
    assert "needs 1" in reports["prefetch"].skipped


def test_can_be_turned_off():
    program = clone(mlp_step())
    reports = run_passes(program, prefetch=False)
    assert reports["prefetch"].skipped == "turned off"
    for start, wait in gathers(program):
        assert start.next is wait


def test_requires_sharded_updates():
    program = clone(mlp_step())
    passes = [step for step in PIPELINE if step.name in ("data_parallel", "prefetch")]
    with pytest.raises(GraphError, match="'prefetch' requires sharded_updates"):
        run_pipeline(program.gm, context_of(program), passes)


@pytest.mark.slow(reason="whole programs are rewritten and run")
@pytest.mark.parametrize("stage", only((3,), [1, 2, 3]))
def test_is_bitwise_the_program_before_it(stage):
    for captured in (mlp_step(4, clip=True), autocast_step(), tied_step()):
        before = without(captured, stage=stage)
        assert_same_numerics(execute(before), execute(rewritten(captured, stage=stage)))


@functools.cache
def tied_step():
    torch.manual_seed(0)
    embedding, middle = nn.Embedding(7, 4), nn.Linear(4, 4)
    optimizer = torch.optim.SGD([*embedding.parameters(), *middle.parameters()], lr=0.1)

    def step(tokens):
        hidden = torch.tanh(middle(embedding(tokens)))
        F.linear(hidden, embedding.weight).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return capture(step, torch.arange(6), world_size=2)


def test_the_second_gather_of_a_tied_weight_starts_after_the_first_was_freed():
    program = rewritten(tied_step())
    order = program_order(program.graph)
    tied = [
        (start, wait) for start, wait in gathers(program) if start.meta["zerofx"].parameter == 0
    ]
    (_, first), (second, _) = tied
    (free,) = [user for user in first.users if user.target is ops.free]
    assert order[free] < order[second]


def test_counts_what_it_moved():
    program = clone(mlp_step(4))
    reports = run_passes(program)
    # Weights and biases of four layers, and two inner weights for backward.
    assert len(gathers(program)) == 10
    assert reports["prefetch"].counts == {"prefetched": 9}


# On an accelerator: ahead by bytes.


def on_accelerator(captured, **options):
    """The program that an accelerator's parameters would have; the layout is the CPU's."""
    program = clone(captured)
    with mock.patch.object(base, "is_accelerator", lambda device: True):
        run_passes(program, **{"bucket_bytes": 4096, **options})
    return program


def test_small_gathers_start_together_while_they_take_no_more_than_the_largest():
    """80 bytes are the first's, and all that the other three take."""
    assert_program(
        on_accelerator(evaluation()),
        """
        0_weight: shard of parameter [10]
        0_bias: shard of parameter [2]
        input: other [2, 5]
        2_weight: shard of parameter [6]
        2_bias: shard of parameter [2]
        all_gather_start = zerofx.all_gather_start(0_weight, 2)
        wait = zerofx.wait(all_gather_start)
        all_gather_start_1 = zerofx.all_gather_start(0_bias, 2)
        all_gather_start_2 = zerofx.all_gather_start(2_weight, 2)
        all_gather_start_3 = zerofx.all_gather_start(2_bias, 2)
        view = view(wait, [4, 5])
        t = t(view)
        wait_1 = zerofx.wait(all_gather_start_1)
        view_1 = view(wait_1, [4])
        addmm = addmm(view_1, input, t)
        zerofx.free(wait_1)
        zerofx.free(wait)
        relu = relu(addmm)
        wait_2 = zerofx.wait(all_gather_start_2)
        view_2 = view(wait_2, [3, 4])
        t_1 = t(view_2)
        wait_3 = zerofx.wait(all_gather_start_3)
        slice = slice(wait_3, 0, 0, 3)
        view_3 = view(slice, [3])
        addmm_1 = addmm(view_3, relu, t_1)
        zerofx.free(wait_3)
        zerofx.free(wait_2)
        sum = sum(addmm_1)
        return [sum]
        """,
    )


@functools.cache
def small_first_step():
    """Its largest gather is the last: what comes before starts with the first."""
    torch.manual_seed(0)
    sizes = (3, 3, 4, 4, 20)
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x):
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return capture(step, torch.randn(3, 3), world_size=2)


def test_gathers_that_all_fit_start_with_the_first():
    program = on_accelerator(small_first_step())
    order = program_order(program.graph)
    started = [order[start] for start, _ in gathers(program)]
    first_wait = order[gathers(program)[0][1]]
    assert sum(at < first_wait for at in started) > 2
    assert provenance(gathers(program)[1][0]).reason.endswith("with at most 320 bytes ahead")


@functools.cache
def stepped_twice():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(x):
        for _ in range(2):
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return capture(step, torch.randn(3, 5), world_size=2)


STEPS = {
    "layers": lambda: mlp_step(4),
    "clipped": lambda: mlp_step(4, clip=True),
    "autocast": autocast_step,
    "tied": tied_step,
    "small first": small_first_step,
    "twice": stepped_twice,
    "evaluation": evaluation,
}


@pytest.mark.slow(reason="whole programs are rewritten and run")
@pytest.mark.parametrize(("name", "stage"), first(1, each_value(STEPS, (3, 2))))
def test_bytes_ahead_are_bounded_and_nothing_else_changes(name, stage):
    captured = STEPS[name]()
    for options in ({}, {"bucket": True, "update_in_backward": True}):
        options |= {"stage": stage}
        with mock.patch.object(
            prefetch, "_bytes_ahead", lambda waits: prefetch._one_ahead(waits, captured.world_size)
        ):
            one_by_rank = [on_accelerator(captured, rank=rank, **options) for rank in range(2)]
        by_rank = [on_accelerator(captured, rank=rank, **options) for rank in range(2)]
        assert_same_numerics(execute(tuple(one_by_rank)), execute(tuple(by_rank)))
        one_ahead, program = one_by_rank[0], by_rank[0]
        before, after = gathers(one_ahead), gathers(program)
        assert [start.name for start, _ in before] == [start.name for start, _ in after]
        if not after:
            continue
        most = max(bytes_of(chain_of(wait)) for _, wait in after)
        assert most_in_flight(program) <= most
        peaks = [max(live_bytes(one.graph, one.world_size)) for one in (one_ahead, program)]
        assert peaks[1] <= peaks[0] + most
        order = program_order(program.graph)
        starts = [order[start] for start, _ in after]
        assert starts == sorted(starts)


def most_in_flight(program) -> int:
    """The most bytes of gathers, and of what prepares them, that are not waited for."""
    in_flight = most = 0
    for node in program.graph.nodes:
        if node.target is ops.all_gather_start:
            in_flight += bytes_of(chain_of(next(iter(node.users))))
        most = max(most, in_flight)
        if node.target is ops.wait and node.args[0].target is ops.all_gather_start:
            in_flight -= bytes_of(chain_of(node))
    return most


def test_what_is_gathered_again_starts_behind_its_free():
    program = on_accelerator(tied_step())
    order = program_order(program.graph)
    tied = [pair for pair in gathers(program) if pair[0].meta["zerofx"].parameter == 0]
    (free,) = [user for user in tied[0][1].users if user.target is ops.free]
    assert order[free] < order[tied[1][0]]


def test_what_comes_from_the_host_first_is_one_gather_ahead():
    """Each has to arrive before its gather: together, nothing would hide the copies."""
    for captured in (mlp_step(3), small_first_step()):
        options = {"offload": "optimizer,params"}
        program = on_accelerator(captured, **options)
        assert listing(program) == listing(rewritten(captured, bucket_bytes=4096, **options))
