"""A program's predicted seconds: compute and the link side by side, what is late exposed."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from tests.kit.covering import each_pair
from tests.kit.programs import mlp_step, rewritten, rewritten_by_rank
from zerofx.cost.program import flops, seconds
from zerofx.cost.timeline import LANES, Timeline, predict
from zerofx.hardware import Hardware, Link, with_links
from zerofx.ir import ops
from zerofx.ir.interface import InputRole, recorded, set_input_role
from zerofx.ir.mesh import Mesh
from zerofx.ir.parameters import ParameterTable

aten = torch.ops.aten
NONE = ParameterTable(())

# Values are of 1 KiB: an operator of one operand takes a second, and so does a gather on 2 ranks.
FIGURES = Hardware(latency_s=0.0, bytes_per_s=512.0, memory_bytes_per_s=2048.0)
READ_LATE = Hardware(latency_s=0.0, bytes_per_s=512.0, memory_bytes_per_s=2048.0, overlaps=False)


def predicted(program: str, figures: Hardware = FIGURES, world_size: int = 2) -> Timeline:
    """Of statements: ``compute``, or ``start`` and ``wait`` of a gather with a name."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    set_input_role(x, InputRole("other"))
    x.meta["val"] = torch.empty(256)
    started: dict[str, fx.Node] = {}
    for statement in program.split(";"):
        what, *name = statement.split()
        if what == "compute":
            node = graph.call_function(aten.relu.default, (x,))
        elif what == "start":
            node = started[name[0]] = graph.call_function(ops.all_gather_start, (x, world_size))
        else:
            node = graph.call_function(ops.wait, (started[name[0]],))
        node.meta["val"] = torch.empty(256)
    graph.output(())
    return predict(graph, figures, NONE, world_size)


def exposed(timeline: Timeline) -> list[float]:
    return [transfer.exposed_s for transfer in timeline.transfers.values()]


def test_what_is_waited_for_at_once_is_exposed():
    timeline = predicted("start a; wait a; compute")
    assert (timeline.compute_s, timeline.transfer_s, timeline.exposed_s) == (1.0, 1.0, 1.0)


def test_compute_in_between_hides_as_much_as_it_takes():
    assert predicted("start a; compute; wait a").exposed_s == 0.0
    assert predicted("start a; compute; compute; wait a").exposed_s == 0.0
    slow = Hardware(latency_s=0.5, bytes_per_s=512.0, memory_bytes_per_s=2048.0)
    assert exposed(predicted("start a; compute; wait a", slow)) == [0.5]


def test_the_link_carries_one_after_the_other():
    timeline = predicted("start a; start b; compute; wait a; wait b; compute")
    assert exposed(timeline) == [0.0, 1.0]
    # A wait for the second is one for both: its own second is what it is charged with.
    timeline = predicted("start a; start b; wait b; wait a")
    assert exposed(timeline) == [0.0, 1.0] and timeline.exposed_s == 2.0


def test_time_spent_waiting_hides_the_next():
    assert exposed(predicted("start a; wait a; start b; compute; wait b")) == [1.0, 0.0]
    assert exposed(predicted("start a; start b; wait a; compute; wait b")) == [1.0, 0.0]


def test_without_overlap_everything_happens_at_the_wait():
    timeline = predicted("start a; compute; compute; wait a", READ_LATE)
    assert exposed(timeline) == [1.0]


def test_alone_nothing_travels():
    timeline = predicted("start a; wait a; compute", world_size=1)
    assert (timeline.transfer_s, timeline.exposed_s, timeline.compute_s) == (0.0, 0.0, 1.0)


def test_it_is_said_in_words():
    assert str(predicted("start a; wait a; compute")) == (
        "1e+03 ms of compute, 1e+03 ms of transfers, 1e+03 ms of them exposed"
    )
    (hidden,) = predicted("start a; compute; wait a").transfers.values()
    assert str(hidden) == "1e+03 ms of transfer, hidden behind compute"


def test_lanes_say_what_each_has_to_do_and_which_has_most():
    timeline = predicted("start a; start b; start c; compute; wait a; compute; wait b; wait c")
    assert (timeline.lanes["compute"], timeline.lanes["link"]) == (2.0, 3.0)
    assert timeline.busiest == "link" and timeline.step_s == 3.0
    assert set(timeline.lanes) == set(LANES)


def test_no_schedule_beats_the_bound():
    # What is gathered is all read from the start, and nothing follows from it.
    assert predicted("start a; start b; compute; wait a; wait b").bound_s == 2.0
    graph = fx.Graph()
    x = graph.placeholder("x")
    set_input_role(x, InputRole("other"))
    before = graph.call_function(aten.relu.default, (x,))
    starts = [graph.call_function(ops.all_gather_start, (before, 2)) for _ in range(3)]
    waits = [graph.call_function(ops.wait, (start,)) for start in starts]
    after = [graph.call_function(aten.relu.default, (wait,)) for wait in waits]
    graph.output(after)
    for node in graph.nodes:
        node.meta["val"] = torch.empty(256)
    timeline = predict(graph, FIGURES, NONE, 2)
    # A second until the link can begin, three there, and one for what the last has brought.
    assert (timeline.bound_s, timeline.lanes["link"], timeline.lanes["compute"]) == (5.0, 3.0, 4.0)
    assert timeline.step_s >= timeline.bound_s


# Two links: values are gathered over 2 ranks of either axis, in a second inside a node, in four
# between nodes, and over all 4 at the pace of the slower link.

MESH = Mesh((("node", 2), ("gpu", 2)))
AXES = with_links({"node": Link(0.0, 128.0), "gpu": Link(0.0, 512.0)}, memory_bytes_per_s=2048.0)


def on_mesh(program: str, figures: Hardware = AXES) -> Timeline:
    """The same where ``start a node`` names an axis too."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    set_input_role(x, InputRole("other"))
    started: dict[str, fx.Node] = {}
    for statement in program.split(";"):
        what, *name = statement.split()
        if what == "compute":
            graph.call_function(aten.relu.default, (x,))
        elif what == "start":
            axis = name[1].replace("both", MESH.everywhere)
            arguments = (x, MESH.size(axis), axis)
            started[name[0]] = graph.call_function(ops.all_gather_start, arguments)
        else:
            graph.call_function(ops.wait, (started[name[0]],))
    graph.output(())
    recorded(graph).mesh = MESH
    for node in graph.nodes:
        node.meta["val"] = torch.empty(256)
    return predict(graph, figures, NONE, MESH.world_size)


def test_a_collective_takes_the_time_of_its_axis():
    assert exposed(on_mesh("start a gpu; wait a; start b node; wait b")) == [1.0, 4.0]
    assert exposed(on_mesh("start a both; wait a")) == [6.0], (
        "three quarters, at 128 bytes a second"
    )


def test_each_link_carries_something_at_once():
    timeline = on_mesh("start a node; start b gpu; wait b; wait a; compute")
    assert exposed(timeline) == [3.0, 1.0] and timeline.exposed_s == 4.0
    assert (timeline.lanes["link"], timeline.lanes["outer link"]) == (1.0, 4.0)
    assert timeline.busiest == "outer link"
    lanes = {span.node.args[2]: span.lane for span in timeline.spans if len(span.node.args) > 2}
    assert lanes == {"node": "outer link", "gpu": "link"}


def test_between_all_ranks_both_links_are_taken():
    timeline = on_mesh("start a node; start b both; start c gpu; wait c; wait b; wait a")
    assert timeline.exposed_s == 4.0 + 6.0 + 1.0
    assert (timeline.lanes["link"], timeline.lanes["outer link"]) == (7.0, 10.0)
    assert timeline.bound_s == 10.0


def test_a_link_may_overlap_and_the_other_not():
    inner = Link(0.0, 512.0, overlaps=False)
    figures = with_links({**AXES.links, "gpu": inner}, memory_bytes_per_s=2048.0)
    assert exposed(on_mesh("start a gpu; compute; wait a", figures)) == [1.0]
    assert exposed(on_mesh("start a node; compute; wait a", figures)) == [3.0]


def test_one_link_is_that_of_both_axes_and_each_has_its_own_lane():
    timeline = on_mesh("start a node; start b gpu; wait a; wait b", FIGURES)
    assert timeline.exposed_s == 1.0


# Seconds of a node


def call(target, *operands, result=None) -> fx.Node:
    graph = fx.Graph()

    def placeholder(operand):
        if not isinstance(operand, torch.Tensor):
            return operand
        node = graph.placeholder("x")
        set_input_role(node, InputRole("other"))
        node.meta["val"] = operand
        return node

    node = graph.call_function(target, tuple(map(placeholder, operands)))
    node.meta["val"] = target(*operands) if result is None else result
    return node


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def test_a_product_takes_its_arithmetic_or_its_memory():
    node = call(aten.mm.default, meta(8, 16), meta(16, 4))
    assert flops(node) == 2 * 8 * 16 * 4
    nbytes = 4 * (8 * 16 + 16 * 4 + 8 * 4)
    slow_at_arithmetic = Hardware(0.0, 1.0, flops_per_s=1.0)
    slow_at_memory = Hardware(0.0, 1.0, memory_bytes_per_s=1.0)
    assert seconds(node, slow_at_arithmetic, NONE) == 2 * 8 * 16 * 4
    assert seconds(node, slow_at_memory, NONE) == nbytes


def test_attention_on_a_cpu_is_counted_whatever_torch_counts():
    q = torch.empty(2, 3, 5, 8)
    node = call(aten._scaled_dot_product_flash_attention_for_cpu.default, q, q, q)
    assert flops(node) == 2 * 2 * (2 * 3) * 5 * 5 * 8


@pytest.mark.parametrize("length, share", [(64, 1.0), (128, 1.0), (512, 0.625)])
def test_of_causal_attention_the_blocks_that_are_not_masked_count(length, share):
    q = torch.empty(1, 2, length, 8)
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    whole, causal = (call(forward, q, q, q, 0.0, masked) for masked in (False, True))
    assert flops(causal) == share * flops(whole) > 0
    made = causal.meta["val"]
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    whole, causal = (call(backward, q, q, q, q, *made, 0.0, masked) for masked in (False, True))
    assert flops(causal) == share * flops(whole) > 0


def test_a_convolutions_gradients_are_counted_though_one_is_not_wanted():
    dy, x, w = torch.empty(2, 5, 4, 4), torch.empty(2, 3, 6, 6), torch.empty(5, 3, 3, 3)
    sizes = ([5], [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    node = call(aten.convolution_backward.default, dy, x, w, *sizes, [False, True, True])
    assert node.meta["val"][0] is None
    assert flops(node) == 2 * (2 * 5 * 4 * 4) * (3 * 3 * 3)


def test_attention_with_fewer_heads_of_keys_counts_by_its_memory():
    q, k = torch.empty(2, 4, 5, 8), torch.empty(2, 2, 5, 8)
    node = call(
        aten._scaled_dot_product_flash_attention_for_cpu.default, q, k, k,
        result=(torch.empty_like(q), torch.empty(2, 4, 5)),
    )  # fmt: skip
    assert seconds(node, FIGURES, NONE) >= 4 * (2 * q.numel() + 2 * k.numel()) / 2048.0


def test_views_take_no_time():
    node = call(aten.view.default, meta(8, 4), [32])
    assert seconds(node, FIGURES, NONE) == 0.0


@pytest.mark.parametrize(
    "stage, clip", each_pair((1, 2, 3), (False, True), default=[(2, False), (3, True)])
)
def test_ranks_predict_alike_though_their_shards_differ(stage, clip):
    ranks = rewritten_by_rank(mlp_step(3, clip=clip), stage=stage, update_in_backward=True)
    shards = [[info.shard_numel for info in program.table] for program in ranks]
    assert shards[0] != shards[1]
    every = [
        [seconds(node, FIGURES, program.table) for node in program.graph.nodes] for program in ranks
    ]
    assert every[0] == every[1] and sum(every[0]) > 0


def test_an_update_counts_the_share_of_a_rank():
    alone = rewritten(mlp_step(3), stage=0)
    shared = rewritten(mlp_step(3), stage=2)
    times = [
        sum(seconds(n, FIGURES, p.table) for n in p.graph.nodes if n.target is ops.update)
        for p in (alone, shared)
    ]
    assert times[0] == pytest.approx(2 * times[1]) and times[1] > 0
