"""The pass ``offload_activations``: what leaves between forward and backward, and when."""

import functools
import operator
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.kit.covering import each_pair, exhaustive, first, nightly, only
from tests.kit.models import ConvNet, Gpt, images, language_loss, squared_loss, tokens
from tests.kit.offloaded_programs import (
    ACTIVATION_MOVES,
    FACTS,
    MOVES,
    bucket_to_host,
    refused,
    value_to_device,
    value_to_host,
    wait_of_copy,
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
    run_passes,
)
from zerofx import StepError
from zerofx.cost.program import live_bytes
from zerofx.cost.timeline import predict
from zerofx.cost.traffic import moved_bytes
from zerofx.hardware import of
from zerofx.ir import ops
from zerofx.ir.aliases import aliases
from zerofx.ir.graph import is_backward, program_order
from zerofx.ir.interface import why_kept
from zerofx.ir.offload import slot_of
from zerofx.ir.roles import provenance
from zerofx.ir.sizes import hinted_bytes
from zerofx.passes.offload import offload_activations
from zerofx.passes.offload.activations import Activation, _makes_a_value, saved_activations
from zerofx.passes.offload.offload_schedule import MOST_LEAVING, Lanes, fit, worth_it
from zerofx.verify.verifier import verify

aten = torch.ops.aten

SLOW = "latency_s=1e-4 bytes_per_s=1e9 flops_per_s=1e6 memory_bytes_per_s=1e6 copy_bytes_per_s=1e8"
"""Compute so slow that all copies of a small step hide behind it."""
NARROW = SLOW.replace("copy_bytes_per_s=1e8", "copy_bytes_per_s=2e5")
"""Copies that take about as long as what is computed meanwhile."""
OFFLOADED = {"offload": "activations", "hardware": SLOW}


@pytest.fixture(autouse=True)
def small_values_move_too(monkeypatch):
    monkeypatch.setattr(offload_activations, "SMALLEST_BYTES", 1)


def step_of(model, loss_of, *batch, times=1, clip=False, autocast=False):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(*batch):
        for _ in range(times):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = loss_of(model, *batch)
            loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return capture(step, *batch, world_size=2)


@functools.cache
def gpt_step(**options):
    torch.manual_seed(0)
    return step_of(Gpt(layers=1, checkpoint=options.pop("checkpoint", False)), language_loss,
                   *tokens(0, 2), **options)  # fmt: skip


@functools.cache
def convolution_step():
    torch.manual_seed(0)
    return step_of(ConvNet(), squared_loss, *images(0, 2))


@functools.cache
def dropout_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Dropout(0.5), nn.Linear(7, 3))
    return step_of(model, lambda model, x: model(x).square().mean(), torch.randn(4, 5))


STEPS = {
    "layers": mlp_step,
    "clipped": lambda: mlp_step(clip=True),
    "gpt": gpt_step,
    "checkpointed": lambda: gpt_step(checkpoint=True),
    "accumulated": lambda: gpt_step(times=2),
    "autocast": lambda: gpt_step(autocast=True),
    "convolution": convolution_step,
    "dropout": dropout_step,
}


@functools.cache
def small_step():
    """What the first product gives lies idle while the second is made, and undone."""
    torch.manual_seed(0)
    w, v = (nn.Parameter(torch.randn(*shape)) for shape in ((4, 2), (2, 64)))
    optimizer = torch.optim.SGD([w, v], lr=0.1)

    def step(x):
        ((x @ w).sin() @ v).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return capture(step, torch.randn(3, 4), world_size=2)


@functools.cache
def deep_step(num_layers=6, rows=60, width=9, times=1):
    """Activations outweigh the parameters."""
    torch.manual_seed(0)
    layers = [[nn.Linear(width, width), nn.GELU()] for _ in range(num_layers)]
    return step_of(
        nn.Sequential(*sum(layers, [])),
        lambda model, x: model(x).square().mean(),
        torch.randn(rows, width),
        times=times,
    )


def test_rewrites_the_smallest_program():
    program = rewritten(small_step(), stage=0, **OFFLOADED)
    assert_program(
        program,
        """
        ...
        mm = mm(input, w)
        sin = sin(mm)
        copy_start = zerofx.copy_start([mm], [], 'host', 0)
        mm_1 = mm(sin, v)
        wait = zerofx.wait(copy_start)
        ...
        mm_2 = mm(t, expand)
        ...
        copy_start_1 = zerofx.copy_start([wait], [], 'cpu')
        mm_3 = mm(expand, t_1)
        ...
        wait_1 = zerofx.wait(copy_start_1)
        cos = cos(wait_1)
        ...
        """,
    )


def test_moves_are_named_after_what_they_move():
    program = rewritten(small_step(), stage=0, **OFFLOADED)
    start = nodes_of(program, value_to_host)[0]
    back = nodes_of(program, value_to_device)[-1]
    assert (start.name, back.name) == ("mm_to_host", "mm_to_device")
    assert re.match(r"2.4e-05 MB; .* of transfer, hidden behind compute", provenance(start).reason)


def test_without_the_option_nothing_is_moved():
    assert nodes_of(rewritten(mlp_step(), stage=3), *ACTIVATION_MOVES) == []
    program = rewritten(mlp_step(), stage=3, offload="optimizer")
    assert nodes_of(program, *ACTIVATION_MOVES) == [] != nodes_of(program, *MOVES)


def test_leaves_a_program_without_backward_alone():
    program = rewritten(evaluation(), stage=3, **OFFLOADED)
    assert listing(program) == listing(rewritten(evaluation(), stage=3))


EXHAUSTIVE = pytest.mark.exhaustive


@pytest.mark.parametrize("world_size", (pytest.param(1, marks=EXHAUSTIVE), 2))
@pytest.mark.parametrize(
    "stage", (0, pytest.param(1, marks=EXHAUSTIVE), pytest.param(2, marks=EXHAUSTIVE), 3)
)
@pytest.mark.parametrize("name", first(1, STEPS))
def test_computes_bitwise_what_it_did(name, stage, world_size):
    step = STEPS[name]()
    options = {"stage": stage, "hardware": SLOW, "update_in_backward": True, "prefetch": True}
    before = rewritten_by_rank(step, world_size, **options)
    targets = ("activations", "optimizer,activations")[: 1 + (stage > 0)]
    for offload in targets:
        after = rewritten_by_rank(step, world_size, **options, offload=offload)
        assert nodes_of(after[0], value_to_host)
        assert_same_numerics(execute(before), execute(after))


@pytest.mark.parametrize(
    "name", ["layers", nightly("gpt"), *map(exhaustive, sorted({*STEPS} - {"layers", "gpt"}))]
)
def test_regions_may_be_parted_there(name):
    options = {"stage": 0, "hardware": SLOW, "lowering": "inductor"}
    step = STEPS[name]()
    after = rewritten_by_rank(step, 2, **options, offload="activations")
    assert nodes_of(after[0], value_to_host)
    assert_same_numerics(execute(rewritten_by_rank(step, 2, **options)), execute(after))


# Which


def moved(program):
    return [start.args[0][0] for start in nodes_of(program, value_to_host)]


def candidates(captured):
    program = clone(captured)
    found = {a.value for a in saved_activations(program.graph, torch.device("cpu"))}
    return {value for value in found if value.meta["val"].dim()}, program


def captured_forward(loss_of, *shapes):
    """A step of one weight, whose activations ``loss_of(x, w)`` makes."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(4, 4))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(x):
        loss, *rest = loss_of(x, weight)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return rest

    return capture(step, torch.randn(3, 4), world_size=2)


def test_an_input_is_none_and_what_is_made_of_it_is():
    found, program = candidates(captured_forward(lambda x, w: [(x @ w).sin().sum()]))
    assert found == set(nodes_of(program, aten.mm.default)[:1])


def test_what_the_step_returns_stays():
    def returned(x, w):
        y = x @ w
        return y.sin().sum(), y.detach()

    found, _ = candidates(captured_forward(returned))
    assert not found


def test_what_a_returned_view_looks_at_stays():
    def viewed(x, w):
        y = x @ w
        return y.sin().sum(), y.detach()[1]

    found, _ = candidates(captured_forward(viewed))
    assert not found


def test_what_only_parameters_are_computed_into_stays():
    found, program = candidates(captured_forward(lambda x, w: [(x @ (w * w).sin()).sum()]))
    assert not found


def test_what_is_recomputed_is_not_saved_and_stays():
    def blocks(x, w):
        return [checkpoint(lambda x: ((x @ w).sin() @ w).sin(), x, use_reentrant=False).sum()]

    program = rewritten(captured_forward(blocks), stage=0, **OFFLOADED)
    recomputed = [node for node in program.graph.nodes if "recompute" in str(provenance(node))]
    assert recomputed and not moved(program)


def test_what_a_recomputation_starts_from_may_leave():
    def blocks(x, w):
        y = x @ w
        y = checkpoint(lambda y: (y.sin() @ w).sin(), y, use_reentrant=False)
        return [(y @ w).sin().sum()]

    program = rewritten(captured_forward(blocks), stage=0, **OFFLOADED)
    assert moved(program)[0].target is aten.mm.default
    assert_same_numerics(execute(rewritten(captured_forward(blocks), stage=0)), execute(program))


def test_what_is_cheap_is_recomputed_and_what_that_reads_may_leave():
    """The recompute pass chooses first."""
    program = rewritten(gpt_step(), stage=0, lowering="inductor", **OFFLOADED)
    eager = rewritten(gpt_step(), stage=0, **OFFLOADED)
    gelus = [value for value in moved(eager) if value.target is aten.gelu.default]
    assert gelus and len(moved(program)) < len(moved(eager))
    assert all("in host memory" in why_kept(value) for value in moved(program))


def test_several_views_move_once_and_are_taken_of_what_comes_back():
    def viewed(x, w):
        y = x @ w
        return [(y.t().sin().sum() + y[1:].sin().sum() + y.flatten().sin().sum())]

    program = rewritten(captured_forward(viewed), stage=0, **OFFLOADED)
    (value,) = moved(program)
    (back,) = nodes_of(program, value_to_device)
    assert all(not is_backward(user) for view in aliases(value) for user in view.users)
    readers = {node.target for view in aliases(back) for node in view.users}
    assert aten.cos.default in readers
    assert_same_numerics(execute(rewritten(captured_forward(viewed), stage=0)), execute(program))


def test_of_several_results_of_one_operator_each_may_leave():
    program = rewritten(gpt_step(), stage=0, **OFFLOADED)
    makers = [value.args[0] for value in moved(program) if len(value.all_input_nodes) == 1]
    assert max(makers.count(maker) for maker in makers) > 1


def test_seeds_of_attention_stay():
    """With dropout it gives back seed and offset, which lie on the CPU whatever the fake says."""
    graph = torch.fx.Graph()
    query = graph.placeholder("query")
    query.meta["val"] = torch.empty(1, 2, 8, 8, device="meta")
    attend = aten._scaled_dot_product_efficient_attention.default
    made = graph.call_function(attend, (query, query, query, None, True, 0.1))
    made.meta["val"] = attend(*[query.meta["val"]] * 3, None, True, 0.1)
    for at, value in enumerate(made.meta["val"]):
        part = graph.call_function(operator.getitem, (made, at))
        part.meta["val"] = torch.empty(2, dtype=value.dtype, device="meta")
    parts = [node for node in made.users if _makes_a_value(node, torch.device("meta"))]
    assert [node.args[1] for node in parts] == [0, 1]


def test_small_values_stay(monkeypatch):
    monkeypatch.setattr(offload_activations, "SMALLEST_BYTES", 61)
    program = clone(mlp_step())
    run_passes(program, stage=0, **OFFLOADED)
    assert not moved(program)  # of 60 bytes each
    monkeypatch.setattr(offload_activations, "SMALLEST_BYTES", 60)
    run_passes(program := clone(mlp_step()), stage=0, **OFFLOADED)
    assert moved(program)


def test_what_cannot_be_hidden_stays():
    assert not moved(rewritten(mlp_step(), stage=0, offload="activations"))
    slow = rewritten(deep_step(), stage=0, offload="activations", hardware=NARROW)
    fast = rewritten(deep_step(), stage=0, **OFFLOADED)
    assert 0 < len(moved(slow)) < len(moved(fast))
    # What lies idle longest is what is made first.
    order = program_order(slow.graph)
    assert order[moved(slow)[0]] <= min(order[n] for n in nodes_of(slow, aten.addmm.default))


# When


@pytest.mark.parametrize(
    "stage, link, num_layers",
    each_pair((0, 1, 3), (SLOW, NARROW), (4, 6), default=[(1, NARROW, 6)]),
    ids=str,
)
def test_nobody_waits_for_a_copy(stage, link, num_layers):
    program = rewritten(deep_step(num_layers), stage=stage, offload="activations", hardware=link)
    transfers = predict(program.graph, of(link), program.table, 2).transfers
    ways = [transfers[move] for move in nodes_of(program, *ACTIVATION_MOVES)]
    assert ways and all(way.is_hidden for way in ways)


def test_a_value_starts_out_behind_its_last_reader_of_forward():
    program = rewritten(deep_step(), stage=0, **OFFLOADED)
    for start in nodes_of(program, value_to_host):
        readers = {user for view in aliases(start.args[0][0]) for user in view.users} - {start}
        before = max([*start.args[0], *(reader for reader in readers if reader < start)])
        while before.next is not start:
            before = before.next
            assert wait_of_copy(before) or value_to_host(before)


def test_it_comes_back_little_before_it_is_read():
    program = rewritten(deep_step(), stage=0, **OFFLOADED)
    order = program_order(program.graph)
    spans = [(order[s], order[w]) for s in nodes_of(program, value_to_device) for w in s.users]
    for _, wait in spans:
        assert sum(start < wait <= end for start, end in spans) <= 2


def test_few_are_leaving_at_once():
    program = rewritten(deep_step(), stage=0, offload="activations", hardware=NARROW)
    order = program_order(program.graph)
    spans = [(order[s], order[w]) for s in nodes_of(program, value_to_host) for w in s.users]
    assert spans
    for start, _ in spans:
        assert sum(begun <= start < end for begun, end in spans) <= MOST_LEAVING + 1


def test_staging_buffers_are_used_again_by_the_next_micro_batch():
    once, twice = (rewritten(deep_step(4, times=n), stage=0, **OFFLOADED) for n in (1, 2))
    assert len(moved(twice)) > 1.8 * len(moved(once))
    assert moved_bytes(twice.gm).staging < 1.1 * moved_bytes(once.gm).staging


def test_they_are_others_than_the_optimizers():
    offload = {**OFFLOADED, "offload": "optimizer,activations"}
    program = rewritten(mlp_step(), stage=3, **offload)
    of_values = {slot_of(start) for start in nodes_of(program, value_to_host)}
    assert of_values.isdisjoint(slot_of(start) for start in nodes_of(program, bucket_to_host))


@pytest.mark.parametrize("stage", (0, 3))
def test_what_is_alive_at_most_falls_by_what_is_away(stage):
    before = rewritten(deep_step(), stage=stage, hardware=SLOW)
    after = rewritten(deep_step(), stage=stage, **OFFLOADED)
    fallen = max(live_bytes(before.graph, 2)) - max(live_bytes(after.graph, 2))
    assert 0.3 * moved_bytes(after.gm).activations < fallen <= moved_bytes(after.gm).activations


@pytest.mark.nightly
def test_the_program_is_the_same_every_time():
    texts, held = set(), []
    for number in range(3):
        held.append([object() for _ in range(17 * number)])
        program = clone(gpt_step())
        run_passes(program, stage=3, bucket=True, **OFFLOADED)
        texts.add(listing(program))
        held.append(program)
    assert len(texts) == 1


# Within a budget


def peak_of(program):
    return max(live_bytes(program.graph, 2, sockets=False, table=program.table))


@pytest.mark.parametrize("stage", (0, 1, 3))
def test_with_room_for_all_nothing_leaves(stage):
    program = rewritten(deep_step(), stage=stage, memory_budget=10**9, **OFFLOADED)
    assert not moved(program)


BOTH = "optimizer,activations"


@pytest.mark.parametrize(
    "stage, offload",
    only(
        [(3, "activations")],
        [(0, "activations"), (1, "activations"), (3, "activations"), (2, BOTH), (3, BOTH)],
    ),
)
def test_as_many_leave_as_the_budget_demands(stage, offload):
    options = {"stage": stage, "hardware": SLOW, "prefetch": True, "offload": offload}
    plain = {**options, "offload": offload.removesuffix("activations").removesuffix(",") or None}
    step = deep_step()
    most = peak_of(rewritten(step, **plain))
    least = _least(step, **options)
    numbers = []
    for share in (0.0, 0.5, 0.9):
        budget = least + int(share * (most - least))
        program = rewritten(step, memory_budget=budget, **options)
        assert peak_of(program) <= budget
        numbers.append(len(moved(program)))
    assert numbers == sorted(numbers, reverse=True) and numbers[0] > numbers[-1]


def _least(step, **options):
    with pytest.raises(StepError, match="activations of") as caught:
        rewritten(step, memory_budget=1, **options)
    return int(re.search(r"this step allocates (\d+)", str(caught.value)).group(1))


@pytest.mark.parametrize("stage", (0, 3))
def test_a_budget_that_cannot_be_met_is_refused_with_numbers(stage):
    words = (
        r"memory_budget is 100 bytes, and this step allocates \d+ on this rank with \d+ activations"
        r" of \d+ bytes in host memory"
    )
    with pytest.raises(StepError, match=words):
        rewritten(mlp_step(), stage=stage, memory_budget=100, **OFFLOADED)


@pytest.mark.nightly
def test_what_cannot_be_hidden_leaves_too_if_the_budget_demands_it():
    # A device of figures that hide nothing here, and gradients without the padding of buckets.
    options = {"stage": 0, "offload": "activations", "bucket": False}
    least = _least(deep_step(), **options)
    program = rewritten(deep_step(), memory_budget=least, **options)
    assert moved(program) and peak_of(program) <= least
    before = rewritten_by_rank(deep_step(), 2, stage=0)
    after = rewritten_by_rank(deep_step(), 2, memory_budget=least, **options)
    assert_same_numerics(execute(before), execute(after))


# The lanes by themselves: a program of 100 positions, a second each; a copy takes its bytes' time


def lanes_of(others=(), length=100):
    return Lanes([float(at) for at in range(length + 1)], range(length), float, others)


def saved(leaves, returns, nbytes=1):
    return Activation(None, nbytes, leaves, returns, ())


def spans(trips):
    return [
        (trip.activation.leaves, trip.gone, trip.back, trip.activation.returns) for trip in trips
    ]


def test_a_trip_is_as_long_as_its_copies_allow():
    assert spans(worth_it(lanes_of(), [saved(10, 50, 5)])) == [(10, 15, 45, 50)]


def test_ways_that_take_longer_than_the_stay_are_not_worth_it():
    assert spans(worth_it(lanes_of(), [saved(10, 50, 10)])) == [(10, 20, 40, 50)]
    assert worth_it(lanes_of(), [saved(10, 50, 11)]) == []


def test_a_lane_carries_one_at_a_time():
    trips = worth_it(lanes_of(), [saved(10, 60, 5), saved(11, 59, 5)])
    assert spans(trips) == [(10, 15, 55, 60), (11, 20, 50, 59)]


def test_other_copies_to_the_device_occupy_the_lane():
    assert spans(worth_it(lanes_of([(50, 6)]), [saved(10, 50, 2)])) in (
        [(10, 12, 42, 50)],
        [(10, 12, 48, 50)],
    )


def test_what_lies_idle_longest_goes_first():
    wide = [saved(1, 99, 20), saved(2, 98, 20), saved(3, 97, 20)]
    assert [trip.activation for trip in worth_it(lanes_of(), wide)] == wide[:1]


def test_of_a_budget_as_few_as_can_be():
    activations = [saved(10 + at, 90 - at) for at in range(20)]
    alive = [sum(a.leaves <= at < a.returns for a in activations) for at in range(100)]
    trips, peak = fit(lanes_of(), activations, alive, budget=15)
    assert (len(trips), peak) == (5, 15)
    for at in range(100):
        there = sum(not trip.gone <= at < trip.back for trip in trips
                    if trip.activation.leaves <= at < trip.activation.returns)  # fmt: skip
        assert there + alive[at] - sum(
            t.activation.leaves <= at < t.activation.returns for t in trips
        ) <= max(15, peak)


def test_room_in_the_budget_is_used_to_hide_copies():
    activation = saved(10, 90, 5)
    alive = [5 * (10 <= at < 90) + 5 * (45 <= at < 55) for at in range(100)]
    assert spans(fit(lanes_of(), [activation], alive, 9)[0]) == [(10, 15, 85, 90)]
    alive = [5 * (10 <= at < 90) + 5 * (12 <= at < 88) for at in range(100)]
    assert spans(fit(lanes_of(), [activation], alive, 9)[0]) == [(10, 12, 88, 90)]


def test_what_cannot_be_met_says_how_near_it_came():
    alive = [7 if at == 5 else 3 for at in range(100)]
    assert fit(lanes_of(), [saved(10, 90, 1)], alive, 2)[1] == 7


# What the verifier sees


@pytest.fixture(params=(0, 3), name="program")
def program_fixture(request):
    return clone(rewritten(mlp_step(), stage=request.param, **OFFLOADED))


def test_the_program_is_as_it_should_be(program):
    verify(program.gm, program.table, FACTS)


@pytest.mark.parametrize("target", ACTIVATION_MOVES)
def test_a_deleted_wait_is_found(program, target):
    (wait,) = nodes_of(program, target)[0].users
    wait.replace_all_uses_with(wait.args[0])
    program.graph.erase_node(wait)
    refused(program, "must have one wait and no other reader")


def test_reading_what_is_coming_is_found(program):
    start = nodes_of(program, value_to_device)[0]
    with program.graph.inserting_after(start):
        program.graph.call_function(aten.neg.default, (start,)).meta["val"] = start.meta["val"]
    refused(program, "must have one wait")


def test_a_reader_of_what_has_left_is_found(program):
    """A view that was taken before is read after: the memory stays on the device for it."""
    start = nodes_of(program, value_to_host)[0]
    (back,) = nodes_of(program, value_to_device)[-1].users
    (value,) = start.args[0]
    with program.graph.inserting_after(value):
        view = program.graph.call_function(aten.alias.default, (value,))
        view.meta["val"] = value.meta["val"]
    reader = next(iter(back.users))
    with program.graph.inserting_before(reader):
        late = program.graph.call_function(aten.neg.default, (view,))
        late.meta["val"] = value.meta["val"]
    refused(program, "which has left the device at")


def test_a_view_that_is_moved_alone_is_found(program):
    start = nodes_of(program, value_to_host)[0]
    with program.graph.inserting_before(start):
        view = program.graph.call_function(aten.alias.default, (start.args[0][0],))
        view.meta["val"] = start.args[0][0].meta["val"]
    start.update_arg(0, [view])
    refused(program, "keeps its memory on the device")


def test_an_input_that_is_moved_is_found(program):
    start = nodes_of(program, value_to_host)[0]
    batch = next(n for n in program.graph.nodes if n.op == "placeholder" and n.name.startswith("a"))
    start.update_arg(0, [batch])
    refused(program, "which the caller keeps|is recorded as")


def test_a_staging_buffer_that_is_overwritten_before_it_is_read_is_found(program):
    first, second = nodes_of(program, value_to_host)[:2]
    second.update_arg(3, slot_of(first))
    refused(program, "which .* still uses")


def test_a_value_that_is_never_brought_back_is_found(program):
    start = nodes_of(program, value_to_device)[-1]
    (again,) = start.users
    again.replace_all_uses_with(start.args[0][0].args[0].args[0][0])
    program.graph.erase_node(again)
    program.graph.erase_node(start)
    refused(program, "to be brought back to the device once; nobody reads it")


def test_one_that_is_brought_back_twice_is_found(program):
    start = nodes_of(program, value_to_device)[0]
    (again,) = start.users
    with program.graph.inserting_after(again):
        copy = program.graph.node_copy(start)
    with program.graph.inserting_after(copy):
        copy_again = program.graph.call_function(ops.wait, (copy,))
        copy_again.meta["val"] = again.meta["val"]
    refused(program, "to be brought back to the device once")


def test_a_reader_on_the_device_of_host_memory_is_found(program):
    (wait,) = nodes_of(program, value_to_host)[0].users
    with program.graph.inserting_after(wait):
        program.graph.call_function(aten.neg.default, (wait,)).meta["val"] = wait.meta["val"]
    refused(program, "to be brought back to the device once")


def test_what_never_left_does_not_come_back(program):
    start = nodes_of(program, value_to_device)[0]
    start.update_arg(0, start.args[0][0].args[0].args[0])
    refused(program, "which has not left the device|to be brought back")


def test_a_write_under_a_move_is_found(program):
    start = nodes_of(program, value_to_host)[0]
    (value,) = start.args[0]
    with program.graph.inserting_after(start):
        write = program.graph.call_function(aten.copy_.default, (value, value))
        write.meta["val"] = value.meta["val"]
    refused(program, "while .* copies it")


def test_the_bytes_of_symbols_are_those_that_were_captured():
    program = rewritten(mlp_step(), stage=0, **OFFLOADED)
    assert all(hinted_bytes(value) == 60 for value in moved(program))


def test_attention_keeps_its_strides():
    """What attention saves is a transposed view of nothing: its own memory, in its own order."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(6, 18)

        def forward(self, x):
            q, k, v = self.qkv(x).view(2, 4, 3, 2, 3).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).sin()

    torch.manual_seed(0)
    step = step_of(Attention(), lambda model, x: model(x).sum(), torch.randn(2, 4, 6))
    program = rewritten(step, stage=0, **OFFLOADED)
    for start, back in zip(
        nodes_of(program, value_to_host), nodes_of(program, value_to_device)[::-1], strict=True
    ):
        assert start.meta["val"].stride() == start.args[0][0].meta["val"].stride()
        assert back.meta["val"].stride() == back.args[0][0].meta["val"].stride()
    assert any(not value.meta["val"].is_contiguous() for value in moved(program))
    assert_same_numerics(execute(rewritten(step, stage=0)), execute(program))
