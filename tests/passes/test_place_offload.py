"""The pass ``place_offload``: updates on the host, moves as nodes, at most a few under way."""

import pytest
import torch
from torch import nn

from tests.kit.covering import each_pair, only
from tests.kit.offloaded_programs import (
    FACTS,
    MOVES,
    OFFLOADED,
    STEPS,
    bucket_to_device,
    bucket_to_host,
    refused,
    wait_of_copy,
    wait_of_update,
)
from tests.kit.programs import (
    assert_program,
    assert_same_numerics,
    capture,
    clone,
    evaluation,
    execute,
    listing,
    mlp_step,
    nodes_of,
    rewritten,
    rewritten_by_rank,
    smallest_step,
)
from zerofx import StepError
from zerofx.cost.program import live_bytes
from zerofx.cost.timeline import predict
from zerofx.cost.traffic import moved_bytes
from zerofx.hardware import NOMINAL, Hardware
from zerofx.ir import ops
from zerofx.ir.graph import program_order, updates
from zerofx.ir.offload import operands_of_updates, slot_of
from zerofx.passes.offload.place_offload import UPDATES_UNDER_WAY
from zerofx.verify.verifier import verify

aten = torch.ops.aten

EITHER_WAY = (bucket_to_host, bucket_to_device)


def test_rewrites_the_smallest_program():
    program = rewritten(smallest_step(), stage=3, **OFFLOADED)
    assert_program(
        program,
        """
        ...
        wait_1 = zerofx.wait(reduce_scatter_start)
        copy_start = zerofx.copy_start([w], [0], 'host', 0)
        copy_start_1 = zerofx.copy_start([wait_1], [0], 'host', 1)
        update_start = zerofx.update_start(copy_start, copy_start_1, SGD, [0], None)
        wait_2 = zerofx.wait(copy_start)
        wait_3 = zerofx.wait(copy_start_1)
        wait_4 = zerofx.wait(update_start)
        copy_start_2 = zerofx.copy_start([wait_4], [0], 'cpu')
        wait_5 = zerofx.wait(copy_start_2)
        slice = slice(wait_5, 0, 0, 4)
        copy_ = copy_(w, slice)
        return []
        """,
    )


def test_without_the_option_nothing_is_moved():
    program = rewritten(mlp_step(), stage=3, bucket=True)
    assert nodes_of(program, *MOVES) == []


def test_leaves_a_program_without_updates_alone():
    program = rewritten(evaluation(), stage=3, **OFFLOADED)
    assert listing(program) == listing(rewritten(evaluation(), stage=3, bucket=True))


OPTIONS = ({}, {"prefetch": True}, {"update_in_backward": False})


@pytest.mark.parametrize(
    "name, stage, world_size, options", each_pair(STEPS, (1, 2, 3), (1, 2), OPTIONS), ids=str
)
def test_computes_bitwise_what_it_did(name, stage, world_size, options):
    step = STEPS[name]()
    before = rewritten_by_rank(step, world_size, stage=stage, **options)
    after = rewritten_by_rank(step, world_size, stage=stage, **{**OFFLOADED, **options})
    assert nodes_of(after[0], *MOVES)
    assert_same_numerics(execute(before), execute(after))


@pytest.mark.parametrize("stage", only((3,), (1, 2, 3)))
@pytest.mark.parametrize("name", STEPS)
def test_every_update_runs_on_the_host(name, stage):
    program = rewritten(STEPS[name](), stage=stage, **OFFLOADED)
    before = rewritten(STEPS[name](), stage=stage)
    assert not nodes_of(program, ops.update) and updates(program.graph) == updates(before.graph)
    for start in nodes_of(program, ops.update_start):
        for operands in operands_of_updates(start):
            assert operands.parameter in start.args[3]


@pytest.mark.parametrize("stage", only((3,), (2, 3)))
def test_an_update_goes_on_while_backward_does_and_the_next_has_started(stage):
    program = rewritten(mlp_step(8), stage=stage, **OFFLOADED)
    order = program_order(program.graph)
    starts = nodes_of(program, ops.update_start)
    for start, following in zip(starts[:-3], starts[1:], strict=False):
        (wait,) = start.users
        products = [order[product] for product in nodes_of(program, aten.mm.default)]
        assert any(order[start] < product < order[wait] for product in products)
        assert order[start] < order[following] < order[wait]


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_a_bucket_moves_at_once(stage):
    program = rewritten(mlp_step(), stage=stage, **OFFLOADED)
    buckets = {info.place.bucket for info in program.table}
    out, back = nodes_of(program, bucket_to_host), nodes_of(program, bucket_to_device)
    assert (len(out), len(back)) == (2 * len(buckets), len(buckets))
    for start in (*out, *back):
        members = program.table.bucket(program.table[start.args[1][0]].place.bucket)
        assert start.args[1] == [info.index for info in members]


def test_gradients_leave_while_backward_goes_on():
    program = rewritten(mlp_step(), stage=3, **OFFLOADED)
    order = program_order(program.graph)
    starts = [order[start] for start in nodes_of(program, bucket_to_host)]
    waits = [order[wait] for wait in nodes_of(program, wait_of_copy)]
    products = [order[product] for product in nodes_of(program, aten.mm.default)]
    assert starts[0] < max(products) and waits[0] > min(p for p in products if p > starts[0])


def test_the_copy_back_travels_while_backward_goes_on():
    program = rewritten(mlp_step(8), stage=3, **OFFLOADED)
    order = program_order(program.graph)
    for start in nodes_of(program, bucket_to_device)[:-5]:
        (wait,) = start.users
        between = [n for n in nodes_of(program, aten.mm.default) if order[start] < order[n]]
        assert any(order[node] < order[wait] for node in between)


@pytest.mark.parametrize("num_layers", only((8,), (6, 8, 10)))
@pytest.mark.parametrize("stage", only((3,), (1, 3)))
def test_staging_buffers_are_as_many_whatever_the_depth(num_layers, stage):
    program = rewritten(mlp_step(num_layers), stage=stage, **OFFLOADED)
    slots = {slot_of(start) for start in nodes_of(program, bucket_to_host)}
    # For what starts to leave, what is under way before it, and values on their way back.
    assert len(slots) == 2 + 2 * UPDATES_UNDER_WAY + 1


def test_at_most_one_bucket_is_on_its_way_back():
    program = rewritten(mlp_step(8), stage=3, **OFFLOADED)
    order = program_order(program.graph)
    spans = [
        (order[start], order[wait])
        for start in nodes_of(program, bucket_to_device)
        for wait in start.users
    ]
    assert all(landed < begun for (_, landed), (begun, _) in zip(spans, spans[1:], strict=False))


@pytest.mark.parametrize("stage", (1, 3))
def test_bytes_moved_are_those_of_values_and_gradients(stage):
    program = rewritten(mlp_step(), stage=stage, **OFFLOADED)
    shards = sum(info.shard_numel * 4 for info in program.table)
    moved = moved_bytes(program.gm)
    assert (moved.to_host, moved.to_device) == (2 * shards, shards)


def test_the_host_is_not_in_the_devices_memory():
    program = rewritten(mlp_step(), stage=3, **OFFLOADED)
    alive = live_bytes(program.graph, 2)
    before = live_bytes(rewritten(mlp_step(), stage=3, **{**OFFLOADED, "offload": None}).graph, 2)
    largest = max(info.place.shard_numel * 4 for info in program.table)
    assert max(alive) <= max(before) + 2 * largest


def test_the_timeline_has_the_moves():
    program = rewritten(mlp_step(), stage=3, **OFFLOADED)
    timeline = predict(program.graph, NOMINAL, program.table, 2)
    moves = nodes_of(program, *MOVES)
    assert all(timeline.transfers[move].seconds > 0 for move in moves)
    slow = Hardware(latency_s=1e-4, bytes_per_s=2.5e10, copy_bytes_per_s=1.0)
    exposed = predict(program.graph, slow, program.table, 2).exposed_s
    nbytes = moved_bytes(program.gm)
    assert exposed == pytest.approx(nbytes.to_host + nbytes.to_device, rel=0.5)


def test_an_update_that_nothing_reads_is_refused():
    torch.manual_seed(0)
    weight, other = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))
    optimizer = torch.optim.SGD([weight, other], lr=0.1)

    def step(x):
        (x @ weight @ other).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            weight.copy_(other)

    captured = capture(step, torch.ones(2, 4))
    with pytest.raises(StepError, match="overwritten after its update.*stage 3"):
        rewritten(captured, stage=1, **OFFLOADED)
    rewritten(captured, stage=3, **OFFLOADED)


def test_an_update_of_whole_tensors_is_refused():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(4, 4))
    optimizer = torch.optim.Muon([weight])

    def step(x):
        (x @ weight).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with pytest.raises(StepError, match="updated as a whole tensor.*Leave offload out"):
        rewritten(capture(step, torch.randn(3, 4), world_size=2), stage=3, **OFFLOADED)


# What the verifier sees


@pytest.fixture(params=(1, 3), name="program")
def program_fixture(request):
    return clone(rewritten(mlp_step(), stage=request.param, **OFFLOADED))


def test_the_program_is_as_it_should_be(program):
    verify(program.gm, program.table, FACTS)


def wait_of(start):
    (wait,) = [user for user in start.users if ops.is_wait(user)]
    return wait


STARTED = (*EITHER_WAY, ops.update_start)


@pytest.mark.parametrize("target", STARTED)
def test_a_deleted_wait_is_found(program, target):
    wait = wait_of(nodes_of(program, target)[0])
    wait.replace_all_uses_with(wait.args[0])
    program.graph.erase_node(wait)
    refused(program, "must have one wait and no other reader")


@pytest.mark.parametrize("target", STARTED)
def test_a_doubled_start_is_found(program, target):
    start = nodes_of(program, target)[0]
    with program.graph.inserting_after(start):
        program.graph.node_copy(start)
    refused(program, "must have one wait|overwrites .* while")


@pytest.mark.parametrize("target", STARTED)
def test_a_second_wait_is_found(program, target):
    wait = wait_of(nodes_of(program, target)[0])
    with program.graph.inserting_after(wait):
        program.graph.node_copy(wait)
    refused(program, "must have one wait")


def test_reading_what_is_moving_is_found(program):
    start = nodes_of(program, bucket_to_device)[0]
    with program.graph.inserting_after(start):
        program.graph.call_function(aten.neg.default, (start,)).meta["val"] = start.meta["val"]
    refused(program, "must have one wait")


@pytest.mark.parametrize("position", (0, 1))
def test_a_swapped_order_of_pieces_is_found(program, position):
    start = nodes_of(program, bucket_to_host)[position]
    pieces, *rest = start.args
    start.args = (pieces[::-1], *rest)
    refused(program, "another parameter|as if it were|not computed from the average")


# At stage 3: before it, shards of whole parameters are taken where they leave.
@pytest.mark.parametrize("program", (3,), indirect=True)
def test_a_swapped_bucket_is_found(program):
    """What leaves is of another bucket than it says: values, whose pieces are all there before."""
    one, other, *_ = nodes_of(program, bucket_to_host)[::2]
    mine, its = one.args[0], other.args[0]
    one.update_arg(0, its)
    other.update_arg(0, mine)
    refused(program, "from the value of another parameter|is recorded as")


def test_gradients_of_another_bucket_are_found(program):
    one, other, *_ = nodes_of(program, bucket_to_host)[1::2]
    other.update_arg(0, one.args[0])
    refused(program, "not computed from the average")


def test_another_buckets_return_is_found(program):
    one, other, *_ = (
        [piece for wait in start.users for piece in wait.users]
        for start in nodes_of(program, bucket_to_device)
    )
    for mine, its in zip(one, other, strict=True):
        its.replace_all_uses_with(mine)
    refused(program, "nobody reads it there|of another parameter|as if it were")


def test_a_value_stored_in_its_neighbour_is_found():
    program = clone(rewritten(mlp_step(), stage=3, **OFFLOADED))
    (wait,) = nodes_of(program, bucket_to_device)[0].users
    stores = [store for piece in wait.users for store in piece.users]
    first, second = (store.args for store in stores)
    stores[0].args, stores[1].args = (first[0], second[1]), (second[0], first[1])
    refused(program, "of another parameter|is recorded as|refuses its operands")


def test_a_range_read_from_elsewhere_is_found(program):
    (wait,) = nodes_of(program, bucket_to_device)[0].users
    piece = next(iter(wait.users))
    piece.args = (piece.args[0], 0, piece.args[2] + 1, piece.args[3] + 1)
    refused(program, "is not the range of a parameter")


def test_a_lost_return_is_found(program):
    """Nobody stores a new value."""
    (wait,) = nodes_of(program, bucket_to_device)[0].users
    for piece in list(wait.users):
        for user in list(piece.users):
            if user.target is aten.copy_.default:
                user.replace_all_uses_with(user.args[0])
                program.graph.erase_node(user)
    if not any(piece.users for piece in wait.users):
        refused(program, "nobody reads it there")


def test_a_staging_buffer_in_use_is_found(program):
    starts = nodes_of(program, bucket_to_host)
    starts[1].update_arg(3, slot_of(starts[0]))
    refused(program, "which .* still uses")


def test_a_write_under_a_move_is_found():
    program = clone(rewritten(mlp_step(), stage=3, **OFFLOADED))
    start = nodes_of(program, bucket_to_host)[0]
    parameter = start.args[0][0]
    with program.graph.inserting_after(start):
        write = program.graph.call_function(aten.copy_.default, (parameter, parameter))
        write.meta["val"] = parameter.meta["val"]
    refused(program, "while .* copies it")


def test_a_write_under_an_update_is_found(program):
    start = nodes_of(program, ops.update_start)[0]
    wait = wait_of(start.args[1])
    with program.graph.inserting_after(wait):
        write = program.graph.call_function(aten.copy_.default, (wait, wait))
        write.meta["val"] = wait.meta["val"]
    refused(program, "while .* reads it|which is in host memory")


def test_a_gradient_left_on_the_device_is_found(program):
    start = nodes_of(program, ops.update_start)[0]
    start.update_arg(1, start.args[1].args[0][0])
    refused(program, "must have one wait")


def test_a_gradient_that_is_let_go_of_only_behind_its_update_is_found(program):
    start = nodes_of(program, ops.update_start)[0]
    (update,) = start.users
    update.append(wait_of(start.args[1]))
    refused(program, "is waited for before what it reads")


def test_an_update_of_other_parameters_than_have_arrived_is_found(program):
    one, other, *_ = nodes_of(program, ops.update_start)
    mine, its = one.args[3], other.args[3]
    one.update_arg(3, its)
    other.update_arg(3, mine)
    refused(program, "which is of another parameter")


def test_the_same_gradients_twice_are_found(program):
    one, other, *_ = nodes_of(program, ops.update_start)
    other.update_arg(1, one.args[1])
    refused(program, "must have one wait")


def test_what_an_update_makes_must_come_back(program):
    start = nodes_of(program, bucket_to_device)[0]
    start.update_arg(0, [start.args[0][0].args[0]])
    refused(program, "must have one wait")


def test_a_reader_on_the_device_of_host_memory_is_found(program):
    wait = nodes_of(program, wait_of_update)[0]
    with program.graph.inserting_after(wait):
        program.graph.call_function(aten.neg.default, (wait,)).meta["val"] = wait.meta["val"]
    refused(program, "which is in host memory")
