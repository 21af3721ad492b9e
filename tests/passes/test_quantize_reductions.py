"""quantize_reductions: gradients travel as wires, and each rank sums what it is sent in float32."""

import functools
import itertools
import math

import pytest
import torch
from torch import nn

from tests.ir.test_mesh_programs import PAIRS, step_on
from tests.kit.coded_reductions import AXES, NODES, by_the_formula, wide_mlp
from tests.kit.covering import each_pair, each_value, first, nightly, only
from tests.kit.programs import (
    assert_program,
    assert_same_numerics,
    capture,
    clone,
    execute,
    listing,
    mlp_step,
    nodes_of,
    rewritten,
    rewritten_by_rank,
    run_passes,
    smallest_step,
)
from zerofx import GraphError
from zerofx.compiler.choices import choose, stopped
from zerofx.cost.program import live_bytes
from zerofx.cost.traffic import gathered_peak, wire_bytes
from zerofx.ir import ops
from zerofx.ir.collectives import schedule
from zerofx.ir.roles import Role, role
from zerofx.ir.wires import quantized_bytes, wire_length
from zerofx.verify.verifier import verify

aten = torch.ops.aten

CODES = ("bfloat16", "int8", "int4")
FACTS = frozenset({"averaged_gradients", "sharded_updates"})
LEFT = "reduced as before: "


def coded(captured, **options):
    return execute(rewritten_by_rank(captured, **options))


def assert_is_the_formula(captured, monkeypatch, code="int8", **options):
    found = coded(captured, reduce_wire=code, **options)
    wanted = by_the_formula(captured, monkeypatch, {"data": code}, **options)
    assert_same_numerics(wanted, found)


def test_wires_are_sent_and_summed():
    assert_program(
        rewritten(one_matrix(), stage=2, reduce_wire="int8"),
        """
        ...
        quantize = zerofx.quantize(view, 'int8', 2, [0])
        all_to_all_start = zerofx.all_to_all_start(quantize, 2)
        wait = zerofx.wait(all_to_all_start)
        dequantize_sum = zerofx.dequantize_sum(wait, 'int8', 2, 800, 'mean', torch.float32)
        take_shard = zerofx.take_shard(w, 0, 800)
        update = zerofx.update(take_shard, dequantize_sum, SGD, 0, None)
        ...
        """,
    )


@functools.cache
def one_matrix(dtype=torch.float32, world_size=2):
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(40, 40).to(dtype))
    optimizer = torch.optim.SGD([w], lr=0.1)

    def step(x):
        (x @ w).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return capture(step, torch.randn(3, 40).to(dtype), world_size=world_size)


def test_in_bfloat16_there_are_no_scales():
    program = rewritten(one_matrix(), stage=2, reduce_wire="bfloat16")
    (start,) = nodes_of(program, ops.all_to_all_start)
    assert start.args[0].target is aten._to_copy.default
    assert start.meta["val"].dtype is torch.bfloat16
    assert not nodes_of(program, ops.quantize)


@pytest.mark.parametrize(("code", "stage"), each_pair(CODES, (1, 2, 3)))
def test_computes_the_formula(code, stage, monkeypatch):
    assert_is_the_formula(wide_mlp(), monkeypatch, code, stage=stage)


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", (3, 4))
def test_more_ranks_compute_the_formula(world_size, monkeypatch):
    assert_is_the_formula(wide_mlp(world_size), monkeypatch, "int4", stage=3)


@pytest.mark.parametrize(
    ("code", "dtype"),
    each_pair(CODES, (torch.bfloat16, torch.float16), default=[("int8", torch.float16)]),
    ids=str,
)
def test_narrow_gradients_are_summed_in_float32(dtype, code, monkeypatch):
    assert_is_the_formula(one_matrix(dtype), monkeypatch, code, stage=2)
    program = rewritten(one_matrix(dtype), stage=2, reduce_wire=code)
    (total,) = nodes_of(program, ops.dequantize_sum)
    assert total.meta["val"].dtype is dtype


@pytest.mark.parametrize(
    "options",
    [
        {"bucket": False},
        nightly({"prefetch": False}),
        {"update_in_backward": True},
        nightly({"bucket_bytes": 4000}),
        nightly({"memory_budget": 10**6}),
        nightly({"accumulate": "local"}),
        nightly({"offload": "optimizer", "update_in_backward": True}),
        {"offload": "params"},
        nightly({"offload": "activations"}),
    ],
    ids=str,
)
def test_other_options_change_no_bits(options, monkeypatch):
    assert_is_the_formula(wide_mlp(), monkeypatch, stage=3, **options)


@pytest.mark.parametrize("accumulate", only(("sharded",), (None, "sharded")))
def test_micro_batches_are_rounded_when_they_are_reduced(accumulate, monkeypatch):
    captured, options = wide_mlp(num_batches=2), {"stage": 2, "accumulate": accumulate}
    assert_is_the_formula(captured, monkeypatch, **options)
    exact, program = (
        rewritten(captured, bucket=True, **options, **wire)
        for wire in ({}, {"reduce_wire": "int8"})
    )
    found = nodes_of(program, ops.all_to_all_start)
    assert len(found) == len(nodes_of(exact, ops.reduce_scatter_start)) >= (4 if accumulate else 2)


def test_norms_are_of_rounded_gradients(monkeypatch):
    assert_is_the_formula(wide_mlp(clip=True), monkeypatch, stage=2)


WIRES = [
    {"gpu": "int8"},
    {"node": "int4"},
    {"gpu": "int8", "node": "int4"},
    {"gpu": "bfloat16", "node": "bfloat16"},
]


@pytest.mark.parametrize(
    ("codes", "stages"),
    each_pair(
        WIRES,
        [(1, 0), (2, 0), (3, 0), (2, 1), (3, 1), (3, 3)],
        default=[(WIRES[1], (3, 3)), (WIRES[2], (3, 0))],
    ),
    ids=str,
)
def test_each_axis_of_a_mesh_has_its_own(codes, stages, monkeypatch):
    stage, outer_stage = stages
    captured = wide_mlp(axes=NODES, outer_stage=outer_stage)
    found = coded(captured, stage=stage, reduce_wire=codes, process_group=AXES)
    assert_same_numerics(by_the_formula(captured, monkeypatch, codes, stage=stage), found)


@pytest.mark.parametrize(
    ("axes", "outer_stage"),
    first(1, each_value([(("node", 3), ("gpu", 2)), (("node", 2), ("gpu", 1))], (0, 1, 2, 3))),
    ids=str,
)
def test_shards_that_nodes_do_not_divide_are_filled_up(axes, outer_stage, monkeypatch):
    captured = wide_mlp(axes=axes, outer_stage=outer_stage)
    codes = {"gpu": "int8", "node": "int8"} if axes[1][1] > 1 else {"node": "int8"}
    found = coded(captured, stage=3, reduce_wire="int8")
    assert_same_numerics(by_the_formula(captured, monkeypatch, codes, stage=3), found)


def test_between_two_hops_the_sum_is_in_float32():
    """In bfloat16 it would be rounded once more, and between nodes again."""
    captured = wide_mlp(axes=NODES, dtype=torch.bfloat16)
    program = rewritten(captured, stage=2, bucket=True, reduce_wire="int8")
    inside = [n for n in nodes_of(program, ops.dequantize_sum) if n.args[4] == "sum"]
    assert inside and all(node.meta["val"].dtype is torch.float32 for node in inside)
    updates = nodes_of(program, ops.update)
    assert updates and all(node.args[1].meta["val"].dtype is torch.bfloat16 for node in updates)
    one = rewritten(captured, stage=2, bucket=True, reduce_wire={"gpu": "int8"}, process_group=AXES)
    for node in nodes_of(one, ops.dequantize_sum):
        assert node.meta["val"].dtype is torch.bfloat16, "what travels exactly does so as before"


@pytest.mark.parametrize("stage, outer_stage", only([(2, 1)], PAIRS))
def test_without_the_option_nothing_changes(stage, outer_stage):
    program = rewritten(step_on(NODES, 1, outer_stage), stage=stage, bucket=True)
    assert not nodes_of(program, ops.all_to_all_start, ops.dequantize_sum, ops.fill_up)
    reports = run_passes(clone(mlp_step()), bucket=True)
    assert reports["quantize_reductions"].skipped == "no reduce_wire"


def test_leaves_a_function_without_gradients_alone():
    captured = capture(lambda x: x * 2, torch.ones(3), world_size=2)
    assert listing(rewritten(captured, reduce_wire="int8")) == listing(rewritten(captured))


# What is reduced as before


def counts(captured, **options):
    return dict(run_passes(clone(captured), **options)["quantize_reductions"].counts)


def test_counts_what_it_did():
    assert counts(wide_mlp(), bucket=True, reduce_wire="int8") == {"in int8": 2}
    found = counts(wide_mlp(axes=NODES), bucket=True, reduce_wire="int4")
    assert found == {"in int4 over gpu": 2, "in int4 over node": 2}


def test_what_has_no_wire_is_counted_with_why(monkeypatch):
    assert counts(one_matrix(torch.float64), stage=2, reduce_wire="int8") == {
        f"{LEFT}no float32, bfloat16 or float16": 1
    }
    assert counts(smallest_step(), stage=2, reduce_wire="int8") == {f"{LEFT}in no fewer bytes": 1}
    assert counts(one_matrix(world_size=1), stage=2, reduce_wire="int8") == {
        f"{LEFT}of one rank": 1
    }
    for captured in (one_matrix(torch.float64), smallest_step(), one_matrix(world_size=1)):
        found = coded(captured, stage=2, reduce_wire="int8")
        assert_same_numerics(coded(captured, stage=2), found)


def test_a_gradient_that_stays_whole_is_counted():
    w, v = nn.Parameter(torch.randn(40, 40)), nn.Parameter(torch.randn(40, 40))
    optimizer = torch.optim.SGD([w], lr=0.1)

    def step(x):
        (x @ w @ v).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    captured = capture(step, torch.randn(3, 40), world_size=2)
    assert counts(captured, stage=1, reduce_wire="int8") == {
        "in int8": 1,
        f"{LEFT}whole on all ranks": 1,
    }
    assert counts(captured, stage=2, reduce_wire="int8") == {"in int8": 2}


# Bytes


@pytest.mark.parametrize("code", CODES)
def test_bytes_are_the_formulas(code):
    program = rewritten(wide_mlp(4), stage=2, bucket=True, reduce_wire=code)
    buckets = {info.place.bucket: info.place.shard_numel for info in program.table}.values()
    itemsize = 2 if code == "bfloat16" else 1
    each = [4 * wire_length(numel, code) * itemsize for numel in buckets]
    assert wire_bytes(program.gm, 4).reductions == sum(each) * 3 // 4


@pytest.mark.parametrize("code, most", (nightly("int8", 0.51), ("int4", 0.28)))
def test_codes_with_their_scales_are_a_fraction_of_bfloat16(code, most):
    torch.manual_seed(0)
    model = nn.Linear(600, 500).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    captured = capture(step, torch.randn(2, 600).bfloat16(), world_size=4)
    narrow = wire_bytes(rewritten(captured, stage=2, bucket=True).gm, 4)
    wires = wire_bytes(rewritten(captured, stage=2, bucket=True, reduce_wire=code).gm, 4)
    assert wires.reductions <= most * narrow.reductions
    assert wires.gathers == narrow.gathers
    assert wires.num_collectives == narrow.num_collectives


@pytest.mark.parametrize("outer_stage", only((0, 2), (0, 1, 2, 3)))
def test_bytes_along_each_axis_are_the_formulas(outer_stage):
    captured = wide_mlp(axes=(("node", 3), ("gpu", 2)), outer_stage=outer_stage)
    exact = rewritten(captured, stage=3, bucket=True)
    program = rewritten(captured, stage=3, bucket=True, reduce_wire="int8")
    buckets = {info.place.bucket: info for info in program.table}.values()
    inner = outer = 0
    for info in buckets:
        shard = info.place.shard_numel * info.world_size // 2  # of the inner axis
        inner += 2 * quantized_bytes(shard, "int8") * 1 // 2
        ways = 1 if outer_stage else 2
        outer += ways * (3 * quantized_bytes(-(-shard // 3), "int8") * 2 // 3)
    assert wire_bytes(program.gm, 6, "gpu").reductions == inner
    assert wire_bytes(program.gm, 6, "node").reductions == outer
    for axis in ("gpu", "node"):
        assert wire_bytes(program.gm, 6, axis).gathers == wire_bytes(exact.gm, 6, axis).gathers


def test_memory_of_wires_is_counted_and_gathers_are_not_longer():
    exact, wires = (
        rewritten(wide_mlp(axes=NODES), stage=3, bucket=True, **more)
        for more in ({}, {"reduce_wire": "int8"})
    )
    assert gathered_peak(exact.gm, exact.table) == gathered_peak(wires.gm, wires.table)
    alive = dict(zip(wires.graph.nodes, live_bytes(wires.graph, 4), strict=True))
    for start in nodes_of(wires, ops.all_to_all_start):
        wire, flat = start.args[0], start.args[0].args[0]
        nbytes = (node.meta["val"].nbytes for node in (wire, start, flat))
        assert alive[wire] >= flat.meta["val"].nbytes + wire.meta["val"].nbytes
        assert alive[start] >= sum(nbytes) - flat.meta["val"].nbytes


# Values that are none


@pytest.mark.parametrize(
    ("code", "value"),
    each_pair(CODES, (math.inf, -math.inf, math.nan), default=[("int4", math.nan)]),
)
def test_a_gradient_that_is_not_finite_arrives_so(code, value):
    """In its block at least, and on all ranks."""
    w = nn.Parameter(torch.ones(40, 40))
    optimizer = torch.optim.SGD([w], lr=1.0)

    def step(x):
        (x * w).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for axes, stages in (((), {}), (NODES, {})):
        captured = capture(step, torch.ones(40, 40), world_size=4, axes=axes, **stages)
        inputs = []
        for rank in range(4):
            inputs.append([one.detach().clone() for one in captured.inputs])
            if rank == 3:
                for one, given in zip(inputs[-1], captured.inputs, strict=True):
                    if not isinstance(given, nn.Parameter):
                        one[20, 30] = value
        program = rewritten_by_rank(captured, stage=2, reduce_wire=code)
        for found in execute(program, inputs).parameters["w"]:
            assert not found[20, 30].isfinite()
            assert found[0, 0].isfinite()


# Placement


def test_the_second_hop_goes_on_while_backward_does():
    program = rewritten(wide_mlp(axes=NODES), stage=2, bucket=True, reduce_wire="int8")
    order = {node: place for place, node in enumerate(program.graph.nodes)}
    over = {
        axis: [n for n in nodes_of(program, ops.all_to_all_start) if n.kwargs["axis"] == axis]
        for axis in ("gpu", "node")
    }
    (first, second), (_, following) = over["node"], over["gpu"]
    assert order[first] < order[following] < order[ops.wait_of(first)]
    assert order[ops.wait_of(following)] < order[second]


def test_starts_and_waits_are_where_they_were():
    """Compute between them is the same."""

    def between(program):
        starts = [n for n in program.graph.nodes if role(n) == Role.REDUCE_GRADIENT]
        order = list(program.graph.nodes)
        return [
            sum(
                not ops.is_ours(node.target)
                for node in order[order.index(start) : order.index(ops.wait_of(start))]
            )
            for start in starts
            if ops.is_collective(start)
        ]

    exact = rewritten(wide_mlp(), stage=2, bucket=True)
    program = rewritten(wide_mlp(), stage=2, bucket=True, reduce_wire="int8")
    assert between(exact) == between(program)


def test_ranks_with_other_wires_have_other_schedules():
    schedules = {
        schedule(program.gm, program.table, stage=2)
        for code in (None, *CODES)
        for program in [rewritten(wide_mlp(), stage=2, bucket=True, reduce_wire=code)]
    }
    assert len(schedules) == 4


# Bugs


def planted(code="int8", axes=(), **options):
    program = rewritten(
        wide_mlp(axes=axes, outer_stage=options.pop("outer_stage", 0)),
        stage=2,
        bucket=True,
        reduce_wire=code,
        **options,
    )
    verify(program.gm, program.table, FACTS)
    return program


def refused(program, words):
    with pytest.raises(GraphError, match=words):
        verify(program.gm, program.table, FACTS)


def test_parts_that_are_not_summed_are_refused():
    program = planted("bfloat16")
    total = nodes_of(program, ops.dequantize_sum)[0]
    with program.graph.inserting_before(total):
        part = program.graph.call_function(aten.slice.Tensor, (total.args[0], 0, 0, total.args[3]))
        cast = program.graph.call_function(aten._to_copy.default, (part,), {"dtype": torch.float32})
        part.meta = {**total.meta, "val": total.args[0].meta["val"][: total.args[3]]}
        cast.meta = dict(total.meta)
    total.replace_all_uses_with(cast)
    program.graph.erase_node(total)
    refused(program, "reads .*, which is of parts that are yet to be summed")


@pytest.mark.parametrize("position, value", ((1, "int4"), (2, 4), (3, 100)))
def test_another_code_or_other_parts_are_refused(position, value):
    program = planted()
    total = nodes_of(program, ops.dequantize_sum)[0]
    total.update_arg(position, value)
    refused(program, "and it is int8 in 2 parts of")


def test_parts_for_other_ranks_than_there_are_are_refused():
    program = planted()
    wire = nodes_of(program, ops.quantize)[0]
    wire.update_arg(2, 1)
    refused(program, "has .* elements, and needs")


def test_a_wire_without_scales_is_refused():
    program = planted()
    start = nodes_of(program, ops.all_to_all_start)[0]
    wire = start.args[0]
    codes = wire.meta["val"][: wire.meta["val"].shape[0] // 260 * 256]
    with program.graph.inserting_before(start):
        cut = program.graph.call_function(aten.slice.Tensor, (wire, 0, 0, codes.shape[0]))
        cut.meta = {**wire.meta, "val": codes}
    start.replace_input_with(wire, cut)
    refused(program, "sends .*, which is no wire of a gradient|reads .*, which is a wire of")


def test_a_gradient_that_is_sent_as_it_is_is_refused():
    program = planted()
    start = nodes_of(program, ops.all_to_all_start)[0]
    start.replace_input_with(start.args[0], start.args[0].args[0])
    refused(program, "is sent 0 times|which is no wire of a gradient")


def test_a_sum_of_what_was_not_sent_is_refused():
    program = planted()
    total = nodes_of(program, ops.dequantize_sum)[0]
    total.replace_input_with(total.args[0], total.args[0].args[0].args[0])
    refused(program, "which ranks have not sent each other|reads .*, which is a wire of")


@pytest.mark.parametrize("axis, reduction", (("gpu", "mean"), ("node", "sum")))
def test_a_sum_that_is_divided_twice_or_never_is_refused(axis, reduction):
    program = planted(axes=NODES)
    totals = nodes_of(program, ops.dequantize_sum)
    total = next(n for n in totals if n.args[0].args[0].kwargs["axis"] == axis)
    total.update_arg(4, reduction)
    refused(program, "not computed from the average of its gradient")


@pytest.mark.parametrize(
    "axis, other", [*itertools.permutations(("gpu", "node", "node,gpu"), 2)][:4]
)
def test_another_axis_is_refused(axis, other):
    program = planted(axes=NODES, outer_stage=2)
    for start in nodes_of(program, ops.all_to_all_start):
        if start.kwargs["axis"] == axis:
            start.kwargs = {"axis": other}
            refused(program, "average of its gradient|parts to 4 ranks|adds errors over node")
            break


def test_a_wire_of_another_buckets_names_is_refused():
    program = planted()
    wires = nodes_of(program, ops.quantize)
    wire = next(n for n in wires if n.args[0].target is ops.flatten_bucket)
    wire.update_arg(3, [0])
    refused(program, "does not name the parameters that .* has")


# Over an outer axis of stage 0


def comes_back(**options):
    program = planted(axes=NODES, **options)
    (gather,) = [
        n
        for n in nodes_of(program, ops.all_gather_start)
        if role(n) == Role.REDUCE_GRADIENT and "0" in n.name
    ][:1]
    return program, gather


def test_a_sum_that_does_not_come_back_is_refused():
    program, gather = comes_back()
    total = gather.args[0].args[0]
    values = next(iter(ops.wait_of(gather).users))
    with program.graph.inserting_before(values):
        parts = program.graph.call_function(ops.fill_up, (total, [], values.meta["val"].shape[0]))
        parts.meta = {**values.meta}
    values.replace_all_uses_with(parts)
    refused(program, "which no other rank has")


def test_an_owner_that_computes_with_the_exact_sum_is_refused():
    program, gather = comes_back()
    total = gather.args[0].args[0]
    reader = nodes_of(program, ops.update)[0]
    with program.graph.inserting_before(reader):
        more = program.graph.call_function(aten.sum.default, (total,))
        more.meta = {"val": total.meta["val"].sum()}
    refused(program, f"reads {total.name}, which no other rank has")


def test_a_sum_that_is_gathered_over_another_axis_is_refused():
    program, gather = comes_back()
    gather.kwargs = {"axis": "gpu"}
    refused(program, "gathers over gpu between 2 ranks what is summed over node")


@pytest.mark.parametrize("position, value", ((1, "int4"), (2, 4), (3, 11)))
def test_values_of_another_code_are_refused(position, value):
    program, gather = comes_back()
    values = next(iter(ops.wait_of(gather).users))
    values.update_arg(position, value)
    refused(program, "and it is int8 in 2 parts of")


# Options


@pytest.mark.parametrize(
    "options, words",
    [
        ({"reduce_wire": "int2"}, "reduce_wire must be one of bfloat16, int8, int4, not 'int2'"),
        ({"reduce_wire": "float16"}, "reduce_wire must be one of bfloat16, int8, int4"),
        ({"reduce_wire": {"node": "int2"}}, "reduce_wire of axis 'node' must be one of"),
        ({"reduce_wire": {0: "int8"}}, "must give axes of a mesh, by name, their wires"),
        ({"reduce_wire": 8}, "reduce_wire must be 'bfloat16', 'int8' or 'int4', or a dict"),
        (
            {"reduce_wire": {"rack": "int8"}, "process_group": AXES},
            "names rack, and the mesh in process_group has the axes node, gpu",
        ),
        ({"reduce_wire": {"node": "int8"}}, "process_group is none: give one value for all ranks"),
        (
            {"reduce_wire": {"node": "int8"}, "process_group": object()},
            "process_group is not one with names",
        ),
        (
            {"reduce_wire": "int8", "reduce_dtype": torch.bfloat16},
            "reduce_wire and reduce_dtype=torch.bfloat16 exclude each other",
        ),
        ({"reduce_wire": "int8", "stage": 0}, "reduce_wire needs stage 1, 2 or 3.*at stage 0 each"),
    ],
    ids=range(10),
)
def test_what_cannot_be_is_refused_in_words(options, words):
    with pytest.raises((TypeError, ValueError), match=words):
        choose(options, {})


def test_each_axis_may_be_given_its_own():
    options = {"process_group": AXES, "reduce_wire": {"node": "int4"}}
    given = choose(options, {})
    assert (given.reduce_wire, given.outer_wire) == (None, "int4")
    assert choose({"process_group": AXES}, {"ZEROFX_REDUCE_WIRE": "node:int4"}) == given
    both = choose({"process_group": AXES, "reduce_wire": torch.int8}, {})
    assert (both.reduce_wire, both.outer_wire) == ("int8", "int8")
    off = choose({"reduce_wire": "int8"}, {"ZEROFX_REDUCE_WIRE": ""})
    assert not off.quantizes_reductions


def test_a_step_that_stops_before_the_pass_reduces_exactly():
    options = choose({"reduce_wire": "int8", "stop_after": "shard_gradients"}, {})
    assert not stopped(options).quantizes_reductions
    options = choose({"reduce_wire": "int8", "stop_after": "quantize_reductions"}, {})
    assert stopped(options).quantizes_reductions and stopped(options).stage == 2
