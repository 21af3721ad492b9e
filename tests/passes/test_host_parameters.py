"""Shards of parameters in host memory: brought where they are read, stored when written."""

import functools

import pytest
import torch
from torch import nn

from tests.kit.covering import nightly, only
from tests.kit.offloaded_programs import (
    MOVES,
    STEPS,
    bucket_to_device,
    bucket_to_host,
    refused,
    wait_of_copy,
)
from tests.kit.programs import (
    assert_program,
    assert_same_numerics,
    capture,
    clone,
    context_of,
    evaluation,
    execute,
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
from zerofx.hardware import NOMINAL
from zerofx.ir import ops
from zerofx.ir.aliases import aliased_inputs, aliases, heirs_in, is_kept_on_host
from zerofx.ir.graph import program_order
from zerofx.ir.interface import placeholders
from zerofx.passes.offload.host_parameters import keep_on_host, place_parameters
from zerofx.passes.schedule.start_times import chain_of
from zerofx.verify.verifier import verify

aten = torch.ops.aten

PLACED = {"offload": "params", "update_in_backward": True, "bucket": True}
WITH_STATES = {**PLACED, "offload": "optimizer,params"}
BOTH = pytest.mark.parametrize("options", (PLACED, WITH_STATES), ids=("params", "all"))


@functools.cache
def arithmetic_step():
    """A penalty, an average of a parameter, a write after the update, a parameter copied."""
    torch.manual_seed(0)
    one, other, average, frozen = (nn.Parameter(torch.randn(5, 5)) for _ in range(4))
    for parameter in (average, frozen):
        parameter.requires_grad_(False)
    optimizer = torch.optim.AdamW([one, other], lr=0.1)

    def step(x):
        loss = ((x @ one).relu() @ other @ frozen).square().mean() + 0.1 * one.square().sum()
        loss.backward()
        old = other.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            average.copy_(0.9 * average + 0.1 * one)
            one.mul_(0.5)
            frozen.copy_(other)
        return loss + (old - other.detach()).abs().sum()

    return capture(step, torch.randn(3, 5), world_size=2)


ALL_STEPS = {**STEPS, "arithmetic": arithmetic_step}


EXHAUSTIVE = pytest.mark.exhaustive
CASES = [
    *((name, 2, {}) for name in ("smallest", "arithmetic")),
    *(nightly(name, 2, {}) for name in ("clipped", "tied", "twice")),
    *(nightly(name, 1, {}) for name in ("smallest", "tied", "twice")),
    nightly("tied", 3, {"prefetch": False, "bucket": False}),
    nightly("arithmetic", 2, {"update_in_backward": False, "bucket": False}),
    *(
        pytest.param(name, world_size, options, marks=EXHAUSTIVE)
        for name in ALL_STEPS
        for world_size, options in (
            (2, {"update_in_backward": False}),
            (2, {"prefetch": False, "bucket": False}),
            (3, {}),
        )
    ),
]


@pytest.mark.parametrize("name, world_size, variant", CASES)
def test_computes_bitwise_what_it_did(name, world_size, variant):
    step = ALL_STEPS[name]()
    bucket = variant.get("bucket", True)
    before = execute(rewritten_by_rank(step, world_size, stage=3, bucket=bucket))
    for options in (PLACED, WITH_STATES):
        after = rewritten_by_rank(step, world_size, stage=3, **{**options, **variant})
        assert nodes_of(after[0], bucket_to_device)
        assert_same_numerics(before, execute(after))


def test_rewrites_the_smallest_program():
    program = rewritten(smallest_step(), stage=3, **PLACED)
    assert_program(
        program,
        """
        input: other [3, 4]
        w: shard of parameter [4]
        copy_start = zerofx.copy_start([w], [0], 'cpu')
        wait = zerofx.wait(copy_start)
        slice = slice(wait, 0, 0, 4)
        all_gather_start = zerofx.all_gather_start(slice, 2)
        wait_1 = zerofx.wait(all_gather_start)
        view = view(wait_1, [4, 2])
        mm = mm(input, view)
        zerofx.free(wait_1)
        ...
        reduce_scatter_start = zerofx.reduce_scatter_start(view_1, 'mean', 2)
        copy_start_1 = zerofx.copy_start([w], [0], 'cpu')
        wait_2 = zerofx.wait(reduce_scatter_start)
        wait_3 = zerofx.wait(copy_start_1)
        slice_1 = slice(wait_3, 0, 0, 4)
        update = zerofx.update(slice_1, wait_2, SGD, 0, None)
        copy_start_2 = zerofx.copy_start([update], [0], [w])
        wait_4 = zerofx.wait(copy_start_2)
        getitem = getitem(wait_4, 0)
        return []
        """,
    )


def test_an_update_on_the_host_moves_nothing_but_its_gradient():
    program = rewritten(smallest_step(), stage=3, **WITH_STATES)
    assert_program(
        program,
        """
        ...
        wait_2 = zerofx.wait(reduce_scatter_start)
        copy_start_1 = zerofx.copy_start([wait_2], [0], 'host', 0)
        update_start = zerofx.update_start([w], copy_start_1, SGD, [0], None)
        wait_3 = zerofx.wait(copy_start_1)
        wait_4 = zerofx.wait(update_start)
        getitem = getitem(wait_4, 0)
        return []
        """,
    )


def test_an_evaluation_brings_each_bucket_once_and_stores_nothing():
    program = rewritten(evaluation(), stage=3, **PLACED)
    gathers = nodes_of(program, ops.all_gather_start)
    assert len(nodes_of(program, bucket_to_device)) == len(gathers) > 1
    assert nodes_of(program, ops.copy_start_shards, bucket_to_host) == []


def test_without_parameters_on_the_host_nothing_is_brought():
    program = rewritten(mlp_step(), stage=3, bucket=True)
    before = [node.name for node in program.graph.nodes]
    ctx = context_of(program)
    keep_on_host(program.gm, ctx)
    assert place_parameters(program.gm, ctx) == {}
    assert [node.name for node in program.graph.nodes] == before


@BOTH
def test_every_parameter_is_on_the_host_and_nothing_else_reads_it(options):
    program = rewritten(arithmetic_step(), stage=3, **options)
    for parameter in placeholders(program.graph, "parameter"):
        assert is_kept_on_host(parameter)
        readers = {user.target for alias in aliases(parameter) for user in alias.users}
        assert ops.all_gather_start not in readers and aten.copy_.default not in readers


@BOTH
def test_bytes_moved_are_those_of_gathers_and_one_way_of_updates(options):
    program = rewritten(mlp_step(), stage=3, **options)
    shards = sum(info.shard_numel * 4 for info in program.table)
    gathered = sum(
        node.args[0].meta["val"].nbytes for node in nodes_of(program, ops.all_gather_start)
    )
    moved = moved_bytes(program.gm)
    updated_there = "optimizer" in options["offload"]
    assert moved.to_host == shards
    assert moved.to_device == gathered + (0 if updated_there else shards)


def gathers_in_order(program):
    """Each gather's move, start and wait, and where they stand."""
    order = program_order(program.graph)
    found = []
    for start in nodes_of(program, ops.all_gather_start):
        (wait,) = start.users
        found.append((order[chain_of(wait)[-1]], order[start], order[wait]))
    return found


def test_copy_gather_and_compute_are_a_pipeline():
    """While one bucket is used the next is gathered and the one after it copied."""
    program = rewritten(mlp_step(6), stage=3, **PLACED, prefetch=True)
    gathers = gathers_in_order(program)
    for (_, start, wait), (move, next_start, _) in zip(gathers, gathers[1:], strict=False):
        assert start < move < wait < next_start


@pytest.mark.nightly
def test_in_a_world_of_one_the_copy_alone_is_ahead():
    program = rewritten(mlp_step(6), world_size=1, stage=3, **PLACED, prefetch=True)
    gathers = gathers_in_order(program)
    for (_, start, wait), (move, next_start, _) in zip(gathers, gathers[1:], strict=False):
        assert start < move < wait < next_start
    largest = max(info.place.shard_numel * 4 for info in program.table)
    alive = max(live_bytes(program.graph, 1))
    before = max(live_bytes(rewritten(mlp_step(6), world_size=1, bucket=True).graph, 1))
    assert alive <= before + 5 * largest


def test_without_prefetch_everything_is_where_it_is_used():
    program = rewritten(mlp_step(6), stage=3, **PLACED, prefetch=False)
    for start in nodes_of(program, bucket_to_device):
        if start.meta["zerofx"].role == "shard_to_device":
            assert wait_of_copy(start.next)


SLOW_COPIES = "latency_s=1e-6 bytes_per_s=1e12 copy_bytes_per_s=1e6"
FAST_COPIES = "latency_s=1e-6 bytes_per_s=1e12 copy_bytes_per_s=1e18"


@pytest.mark.parametrize("options", [PLACED, nightly(WITH_STATES)], ids=("params", "all"))
@pytest.mark.parametrize("room", only((200,), (0, 200)))
def test_with_a_budget_copies_start_as_early_as_they_need_and_it_allows(options, room):
    step = mlp_step(6)
    budget = least_budget(step, options) + room
    program = rewritten(step, stage=3, **options, memory_budget=budget, hardware=SLOW_COPIES)
    alive = live_bytes(program.graph, 2, sockets=False, table=program.table)
    assert max(alive) <= budget
    late = rewritten(step, stage=3, **options, memory_budget=budget, hardware=FAST_COPIES)
    slow, fast = gathers_in_order(program), gathers_in_order(late)
    assert len(slow) == len(fast)
    assert sum(start - move for move, start, _ in slow) > sum(
        start - move for move, start, _ in fast
    )


def least_budget(step, options):
    with pytest.raises(StepError, match=r"allocates (\d+)") as raised:
        rewritten(clone(step), stage=3, **options, memory_budget=1, hardware=SLOW_COPIES)
    return int(str(raised.value).split("allocates ")[1].split()[0])


@BOTH
def test_at_most_one_bucket_is_being_stored(options):
    program = rewritten(mlp_step(6), stage=3, **options)
    order = program_order(program.graph)
    spans = [
        (order[start], order[wait])
        for start in nodes_of(program, ops.copy_start_shards)
        for wait in start.users
    ]
    assert all(done < begun for (_, done), (begun, _) in zip(spans, spans[1:], strict=False))
    assert bool(spans) is ("optimizer" not in options["offload"])


@BOTH
def test_the_timeline_has_the_moves(options):
    program = rewritten(mlp_step(), stage=3, **options)
    timeline = predict(program.graph, NOMINAL, program.table, 2)
    assert all(timeline.transfers[move].seconds > 0 for move in nodes_of(program, *MOVES))
    slow = NOMINAL.__class__(latency_s=1e-4, bytes_per_s=2.5e10, copy_bytes_per_s=1.0)
    exposed = predict(program.graph, slow, program.table, 2).exposed_s
    nbytes = moved_bytes(program.gm)
    assert exposed == pytest.approx(nbytes.to_host + nbytes.to_device, rel=0.5)


# What the verifier sees


@pytest.fixture(params=(PLACED, WITH_STATES), ids=("params", "all"), name="program")
def program_fixture(request):
    return clone(rewritten(mlp_step(), stage=3, **request.param))


@pytest.fixture(name="placed")
def placed_fixture():
    return clone(rewritten(mlp_step(), stage=3, **PLACED))


def test_the_program_is_as_it_should_be(program):
    verify(program.gm, program.table, frozenset({"averaged_gradients"}))


def test_who_takes_a_shard_s_memory_is_among_its_aliases(program):
    """A part of what a wait returns too, whose memory is the start's operand, not the wait's."""
    pairs = [(node, source) for node in program.graph.nodes for source in aliased_inputs(node)]
    assert any(source not in node.all_input_nodes for node, source in pairs)
    for heirs in (None, heirs_in(program.graph)):
        assert all(node in aliases(source, heirs) for node, source in pairs)


def test_a_deleted_wait_is_found(program):
    (wait,) = nodes_of(program, bucket_to_device)[0].users
    wait.replace_all_uses_with(wait.args[0])
    program.graph.erase_node(wait)
    refused(program, "must have one wait and no other reader")


def test_a_deleted_wait_for_a_store_is_found(placed):
    (wait,) = nodes_of(placed, ops.copy_start_shards)[0].users
    for stored in list(wait.users):
        placed.graph.erase_node(stored)
    placed.graph.erase_node(wait)
    refused(placed, "must have one wait and no other reader, .* it has nobody")


def test_a_second_store_is_found(placed):
    start = nodes_of(placed, ops.copy_start_shards)[0]
    (wait,) = start.users
    with placed.graph.inserting_after(wait):
        again = placed.graph.node_copy(start)
    with placed.graph.inserting_after(again):
        placed.graph.node_copy(wait, lambda node: again)
    refused(placed, "stored in host memory 2 times|after .* has overwritten it")


def test_a_gather_of_what_is_on_the_host_is_found(program):
    piece = next(n for n in program.graph.nodes if n.target is ops.pack).args[0][0]
    source = piece.args[0].args[0]
    shard = source.args[0][source.args[1].index(piece.meta["zerofx"].parameter)]
    piece.replace_all_uses_with(shard)
    refused(program, "nobody reads it there|which is in host memory")


def test_an_update_of_a_shard_that_has_not_been_brought_is_found(placed):
    update = nodes_of(placed, ops.update)[0]
    piece = update.args[0]
    move = piece.args[0].args[0]
    update.update_arg(0, move.args[0][move.args[1].index(update.args[3])])
    refused(placed, "nobody reads it there|which is in host memory|one operand in host memory")


def test_an_update_that_is_not_stored_is_found(placed):
    start = nodes_of(placed, ops.copy_start_shards)[0]
    (wait,) = start.users
    for node in (*wait.users, wait, start):
        placed.graph.erase_node(node)
    refused(placed, "stored in host memory 0 times")


def test_a_new_value_that_is_read_on_the_device_is_found(placed):
    update = nodes_of(placed, ops.update)[0]
    with placed.graph.inserting_after(update):
        placed.graph.call_function(aten.neg.default, (update,)).meta["val"] = update.meta["val"]
    refused(placed, "it must be stored once, and read from there")


def test_values_stored_in_each_others_place_are_found(placed):
    start = nodes_of(placed, ops.copy_start_shards)[0]
    values, indices, shards = start.args
    start.args = (values, indices, shards[::-1])
    refused(placed, "as if it were of")


@pytest.mark.parametrize("which", (0, -1))
def test_a_swapped_order_of_pieces_is_found(program, which):
    start = nodes_of(program, bucket_to_device)[which]
    pieces, *rest = start.args
    start.args = (pieces[::-1], *rest)
    refused(program, "as if it were the shard of")


def test_a_shard_of_another_bucket_is_found(program):
    one, other, *_ = nodes_of(program, bucket_to_device)
    one.update_arg(0, other.args[0])
    refused(program, "as if it were the shard of|is recorded as")


def test_a_store_while_the_shard_is_still_copied_is_found(placed):
    """The wait of a copy for the update has sunk behind the store."""
    start = nodes_of(placed, ops.copy_start_shards)[0]
    shard = start.args[2][0]
    index = start.args[1][0]
    builder_like = next(n for n in nodes_of(placed, bucket_to_device) if n.args[1] == start.args[1])
    with placed.graph.inserting_before(start):
        late = placed.graph.node_copy(builder_like)
    (wait,) = builder_like.users
    with placed.graph.inserting_after(start):
        arrived = placed.graph.node_copy(wait, lambda node: late)
    pieces = [piece for piece in wait.users]
    for piece in pieces:
        with placed.graph.inserting_after(arrived):
            copied = placed.graph.node_copy(piece, lambda node: arrived)
        with placed.graph.inserting_after(copied):
            reader = placed.graph.call_function(aten.neg.default, (copied,))
            reader.meta["val"] = copied.meta["val"]
    assert shard in late.args[0] and index in late.args[1]
    refused(placed, "while .* copies it")


def test_an_update_that_may_begin_while_its_shards_are_copied_is_found():
    """A shard is still copied to the device when its gradients leave, but not at the update."""
    program = clone(rewritten(mlp_step(), stage=3, **WITH_STATES))
    update = nodes_of(program, ops.update_start_shards)[0]
    gradients = update.args[1]
    move = next(n for n in nodes_of(program, bucket_to_device) if n.args[1] == update.args[3])
    (wait,) = move.users
    with program.graph.inserting_before(gradients):
        late = program.graph.node_copy(move)
    with program.graph.inserting_before(update):
        arrived = program.graph.node_copy(wait, lambda node: late)
        for piece in wait.users:
            copied = program.graph.node_copy(piece, lambda node: arrived)
            reader = program.graph.call_function(aten.neg.default, (copied,))
            reader.meta["val"] = copied.meta["val"]
    assert gradients < arrived < update
    refused(program, f"{update.name} .*overwrites .* while .* copies it")


def test_reading_a_shard_after_it_has_been_stored_is_found(placed):
    """A copy for a gather stands behind the store of what the update has made."""
    store = nodes_of(placed, ops.copy_start_shards)[-1]
    late = next(n for n in nodes_of(placed, bucket_to_device) if n.args[1] == store.args[1])
    (wait,) = late.users
    chain = [late, wait, *wait.users]
    with placed.graph.inserting_before(placed.graph.output_node()):
        copies = {}
        for node in chain:
            copies[node] = placed.graph.node_copy(node, lambda n: copies.get(n, n))
        for piece in wait.users:
            reader = placed.graph.call_function(aten.neg.default, (copies[piece],))
            reader.meta["val"] = piece.meta["val"]
    refused(placed, "after .* has overwritten it")


def test_reading_gathered_memory_after_it_was_freed_is_found(program):
    free = nodes_of(program, ops.free)[0]
    (start,) = [user for user in free.args[0].args]
    assert start.target is ops.all_gather_start
    reader = next(user for user in free.args[0].users if user.target is not ops.free)
    free.append(reader.prev) if reader.prev.op == "placeholder" else reader.prepend(free)
    refused(program, "whose memory .* has freed before")


def test_the_host_values_of_an_update_are_its_own(program):
    """An update of one parameter with the shard of another."""
    kept = nodes_of(program, ops.update_start_shards)
    if kept:
        mine = list(kept[0].args[0])
        kept[0].update_arg(0, [mine[1], mine[0], *mine[2:]])
        refused(program, "another parameter|is recorded as|refuses its operands")
    else:
        one, other = nodes_of(program, ops.update)[:2]
        its = other.args[0]
        other.update_arg(0, one.args[0])
        one.update_arg(0, its)
        refused(program, "another parameter|is recorded as|refuses its operands")
