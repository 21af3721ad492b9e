"""quantize_gathers: parameters travel as codes and scales, and all ranks compute with the same."""

import functools
import math

import pytest
import torch
from torch import nn

from tests.ir.test_mesh_programs import NODES, SECOND, step_on
from tests.kit import programs
from tests.kit.covering import nightly, only
from tests.kit.offloaded_programs import tied_step, twice_step
from tests.kit.programs import (
    Captured,
    assert_program,
    assert_same_numerics,
    capture,
    clone,
    context_of,
    evaluation,
    execute,
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
from zerofx.codegen.wires.blocks import dequantize, quantize
from zerofx.compiler.choices import choose
from zerofx.cost.program import live_bytes
from zerofx.cost.traffic import gathered_peak, wire_bytes
from zerofx.ir import ops
from zerofx.ir.aliases import shard_of
from zerofx.ir.roles import Role, role
from zerofx.ir.sizes import value_bytes
from zerofx.ir.wires import quantized_bytes
from zerofx.passes.wire.quantize_gathers import quantize_gathers
from zerofx.verify.verifier import verify

INT8 = {"gather_dtype": "int8"}
FACTS = frozenset({"averaged_gradients", "sharded_updates"})


def quantised(captured, **options):
    return rewritten_by_rank(captured, stage=3, **INT8, **options)


def fake_quantised(captured, monkeypatch, **options):
    """What the program without the pass computes where each gather rounds what it is given.

    It is given exact shards, which the program casts after the gather.
    """
    exact = programs._Reference.all_gather_start

    def rounded(reference, shard, world_size, axis="data"):
        if axis in ("data", reference.mesh.hops[-1]):  # the first hop
            there = shard.nan_to_num(0.0)  # what nothing has packed is NaN here
            shard = dequantize(quantize(there, "int8"), "int8", 1, shard.numel(), shard.dtype)
        return exact(reference, shard, world_size, axis)

    with monkeypatch.context() as patched:
        patched.setattr(programs._Reference, "all_gather_start", rounded)
        return execute(rewritten_by_rank(captured, stage=3, hoist_casts=False, **options))


def assert_is_fake_quantised(captured, monkeypatch, **options):
    found = execute(quantised(captured, **options))
    assert_same_numerics(fake_quantised(captured, monkeypatch, **options), found)


def test_it_rounds_and_by_little():
    captured = plain_step(torch.float32, 2)
    found, exact = (
        execute(rewritten_by_rank(captured, stage=3, **options)) for options in (INT8, {})
    )
    for one, other in zip(exact.tensors(), found.tensors(), strict=True):
        assert not torch.equal(one, other)
        torch.testing.assert_close(one, other, rtol=0, atol=0.02 * one.abs().max().item())


@functools.cache
def autocast_step() -> Captured:
    """Parameters that are used in bfloat16 and, by a norm, as they are."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return capture(step, torch.randn(4, 6), world_size=2)


@functools.cache
def plain_step(dtype: torch.dtype, world_size: int = 2) -> Captured:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 11), nn.Linear(11, 5)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)

    def step(x):
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return capture(step, torch.randn(4, 7, dtype=dtype), world_size=world_size)


@functools.cache
def wide_step(dtype: torch.dtype = torch.float32) -> Captured:
    """Layers of 90,000 elements, for bytes."""
    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return capture(step, torch.randn(2, 300), world_size=4)


def test_a_wire_travels_and_what_comes_back_is_used():
    program = rewritten(smallest_step(), **INT8)
    assert_program(
        program,
        """
        input: other [3, 4]
        w: shard of parameter [4]
        quantize = zerofx.quantize(w, 'int8', 1, [0])
        all_gather_start = zerofx.all_gather_start(quantize, 2)
        wait = zerofx.wait(all_gather_start)
        dequantize = zerofx.dequantize(wait, 'int8', 2, 4, torch.float32)
        zerofx.free(wait)
        view = view(dequantize, [4, 2])
        mm = mm(input, view)
        zerofx.free(dequantize)
        ...
        """,
    )


def test_a_wire_serves_forward_and_backward():
    program = rewritten(mlp_step(), **INT8, bucket=True)
    starts = nodes_of(program, ops.all_gather_start)
    wires = nodes_of(program, ops.quantize)
    assert (len(starts), len(wires)) == (4, 3)
    assert sorted(len(wire.users) for wire in wires) == [1, 1, 2]


def test_without_the_option_nothing_changes():
    for stage in range(4):
        program = rewritten(mlp_step(), stage=stage, bucket=True)
        assert not nodes_of(program, ops.quantize, ops.dequantize)
    other = clone(mlp_step())
    reports = run_passes(other, bucket=True)
    assert reports["quantize_gathers"].skipped == "no gather_dtype"


def test_leaves_a_function_without_parameters_alone():
    captured = capture(lambda x: x * 2, torch.ones(3), world_size=2)
    assert listing(rewritten(captured, **INT8)) == listing(rewritten(captured))


def test_counts_what_it_did():
    program = clone(mlp_step())
    reports = run_passes(program, bucket=True, **INT8)
    assert reports["quantize_gathers"].counts == {"wires": 3, "quantised gathers": 4}


@pytest.mark.parametrize("world_size", only((2,), (1, 2, 3, 4)))
def test_computes_what_rounding_gathers_would(world_size, monkeypatch):
    assert_is_fake_quantised(plain_step(torch.float32, world_size), monkeypatch)


@pytest.mark.parametrize(
    "dtype", only((torch.bfloat16,), (torch.float64, torch.bfloat16, torch.float16)), ids=str
)
def test_parameters_of_any_dtype_are_rounded(dtype, monkeypatch):
    assert_is_fake_quantised(plain_step(dtype), monkeypatch)


@pytest.mark.parametrize("is_cut", only((True,), (False, True)))
@pytest.mark.parametrize(
    "axes",
    [NODES, nightly((("node", 2), ("gpu", 3))), nightly((("node", 3), ("gpu", 1)))],
    ids=str,
)
def test_a_mesh_computes_what_rounding_gathers_would(axes, is_cut, monkeypatch):
    captured = step_on(axes, 1, 3 * is_cut)
    found = execute(quantised(captured))
    assert_same_numerics(fake_quantised(captured, monkeypatch), found)


def test_a_cast_is_dropped_for_the_exact_shard_is_quantised(monkeypatch):
    captured = autocast_step()
    program = rewritten(captured, bucket=True, **INT8)
    cast = rewritten(captured, bucket=True)
    assert any(role(node) == Role.GATHER_CAST for node in cast.graph.nodes)
    assert not any(role(node) == Role.GATHER_CAST for node in program.graph.nodes)
    taken = {node.args[0].meta["val"].dtype for node in nodes_of(program, ops.quantize)}
    used = {node.meta["val"].dtype for node in nodes_of(program, ops.dequantize)}
    assert taken == {torch.float32} and used == {torch.float32, torch.bfloat16}
    assert_is_fake_quantised(captured, monkeypatch)


def test_a_write_to_the_shard_makes_a_new_wire(monkeypatch):
    captured = twice_step()
    program = rewritten(captured, bucket=True, **INT8)
    wires = nodes_of(program, ops.quantize)
    updates = nodes_of(program, ops.update)
    assert len(wires) == 2 and wires[0] < min(updates) < wires[1]
    assert_is_fake_quantised(captured, monkeypatch)


@pytest.mark.nightly
def test_tied_and_frozen_weights_are_rounded_too(monkeypatch):
    assert_is_fake_quantised(tied_step(), monkeypatch)


def test_an_evaluation_is_rounded_as_training_is(monkeypatch):
    assert_is_fake_quantised(evaluation(), monkeypatch)


@pytest.mark.parametrize(
    "options",
    [
        nightly({"prefetch": False}),
        nightly({"bucket_bytes": 300}),
        nightly({"memory_budget": 10**6}),
        {"bucket": False},
    ],
    ids=str,
)
def test_other_options_change_no_bits(options, monkeypatch):
    captured = mlp_step(3, 20)
    assert_is_fake_quantised(captured, monkeypatch, **options)


@pytest.mark.parametrize("offload", only(("params",), ("params", "optimizer,params")))
def test_what_is_kept_on_the_host_is_brought_once_for_its_wire(offload, monkeypatch):
    captured = mlp_step(3, 20)
    found = execute(quantised(captured, offload=offload, update_in_backward=True))
    assert_same_numerics(fake_quantised(captured, monkeypatch), found)
    program = rewritten(captured, bucket=True, **INT8, offload=offload)
    bring = [n for n in nodes_of(program, ops.copy_start) if role(n) == Role.SHARD_TO_DEVICE]
    assert len(bring) == len(nodes_of(program, ops.quantize)) == 3


@pytest.mark.nightly
@pytest.mark.parametrize("offload", ("optimizer", "activations"))
def test_what_else_leaves_the_device_changes_no_bits(offload, monkeypatch):
    captured = mlp_step(3, 20)
    found = execute(quantised(captured, offload=offload))
    assert_same_numerics(fake_quantised(captured, monkeypatch), found)


# What travels as before


def left(captured) -> dict[str, int]:
    reports = run_passes(clone(captured), bucket=True, **INT8)
    counts = reports["quantize_gathers"].counts
    prefix = "travel as before: "
    return {k.removeprefix(prefix): v for k, v in counts.items() if k.startswith(prefix)}


def test_integers_travel_as_before():
    table = nn.Parameter(torch.arange(12).view(4, 3), requires_grad=False)

    def step(x):
        with torch.no_grad():
            return x @ table.float()

    captured = capture(step, torch.randn(2, 4), world_size=2)
    assert left(captured) == {"no floating point numbers": 1}
    exact = execute(rewritten_by_rank(captured, stage=3))
    assert_same_numerics(exact, execute(quantised(captured)))


def test_what_becomes_a_new_value_is_exact():
    weight = nn.Parameter(torch.randn(6, 6))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(x):
        (x @ weight).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            weight.copy_(weight.cumsum(0))  # which no shard can compute

    captured = capture(step, torch.randn(2, 6), world_size=2)
    assert left(captured) == {"a parameter's new value is computed of it": 1}
    exact = execute(rewritten_by_rank(captured, stage=3))
    assert_same_numerics(exact, execute(quantised(captured)))


def test_what_is_computed_of_shards_travels_as_before():
    weight = nn.Parameter(torch.randn(6, 6))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(x):
        old = weight.detach().clone()  # a shard until it is read, behind the update
        (x @ weight).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return old

    captured = capture(step, torch.randn(2, 6), world_size=2)
    assert left(captured) == {"computed of shards, and no parameter": 1}
    for (old,) in execute(quantised(captured)).results:
        assert torch.equal(old, captured.tensors[0])


def test_what_the_caller_is_given_itself_is_exact():
    program = rewritten(evaluation(), until="shard_parameters", stage=3)
    output = program.graph.output_node()
    whole = next(n for n in program.graph.nodes if role(n) == Role.WHOLE)
    program.graph.erase_node(nodes_of(program, ops.free)[0])
    output.args = ((*output.args[0], whole),)
    ctx = context_of(program, **INT8)
    counts = quantize_gathers(program.gm, ctx)
    assert counts == {"travel as before: the caller's": 1, "wires": 3, "quantised gathers": 3}


def test_averages_of_weights_are_of_exact_ones():
    """In buffers of the user's, which a checkpoint has; what comes of activations is no such."""
    torch.manual_seed(0)
    model = nn.Linear(9, 9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    averages = [p.detach().clone() for p in model.parameters()]
    model.register_buffer("last", torch.zeros(4, 9))

    def step(x):
        y = model(x).relu() + model.bias
        model.last.copy_(y.detach())
        loss = y.pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for average, parameter in zip(averages, model.parameters(), strict=True):
                average.lerp_(parameter, 0.5)

    captured = capture(step, torch.randn(4, 9), world_size=2)
    assert left(captured) == {"a tensor of the caller's is written with it": 1}
    program = rewritten(captured, bucket=True, **INT8)
    exact = [n for n in nodes_of(program, ops.all_gather_start) if n.args[0].target is ops.pack]
    assert len(exact) == 1 and exact[0] > max(nodes_of(program, ops.update))
    assert len(nodes_of(program, ops.dequantize)) == 1


@pytest.mark.parametrize("in_pieces", only((True,), (False, True)))
def test_a_flat_average_of_weights_is_of_exact_ones(in_pieces):
    torch.manual_seed(0)
    model = nn.Linear(9, 9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    model.register_buffer("average", torch.zeros(90))

    def step(x):
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            if in_pieces:
                model.average[:81].lerp_(model.weight.view(-1), 0.5)
                model.average[81:].lerp_(model.bias, 0.5)
            else:
                model.average.lerp_(nn.utils.parameters_to_vector(model.parameters()), 0.5)

    captured = capture(step, torch.randn(4, 9), world_size=2)
    assert left(captured) == {"a tensor of the caller's is written with it": 1}
    assert len(nodes_of(rewritten(captured, bucket=True, **INT8), ops.dequantize)) == 1


def test_what_goes_over_the_outer_axis_once_is_exact_for_all_that_read_it():
    """A second shard serves backward, and an average that has to be of exact weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 9, bias=False), nn.Linear(9, 9, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    average = model[0].weight.detach().clone()

    def step(x):
        model(x).pow(2).mean().backward()
        with torch.no_grad():
            average.lerp_(model[0].weight, 0.5)
        optimizer.step()
        optimizer.zero_grad()

    captured = capture(step, torch.randn(4, 9), axes=NODES, outer_stage=3)
    program = rewritten(captured, stage=3, **INT8, **SECOND)
    of_first, of_second = (
        [node for node in nodes_of(program, ops.quantize) if node.args[3] == [index]]
        for index in (0, 1)
    )
    assert not of_first and of_second


# Bytes


def test_gathers_send_half_of_what_they_do_in_bfloat16():
    narrow = wire_bytes(rewritten(wide_step(), bucket=True).gm, 4)
    coded = wire_bytes(rewritten(wide_step(), bucket=True, **INT8).gm, 4)
    assert narrow.gathers > 3 * 2**16
    assert 0.5 * narrow.gathers < coded.gathers <= 0.52 * narrow.gathers
    assert coded.reductions == narrow.reductions
    assert coded.num_collectives == narrow.num_collectives


def test_bytes_are_the_formulas():
    program = rewritten(wide_step(), bucket=True, **INT8)
    for start in nodes_of(program, ops.all_gather_start):
        (info, *_) = program.table.bucket(start.meta["zerofx"].bucket)
        assert ops.rules(start).sends(start) == 4 * quantized_bytes(info.place.shard_numel, "int8")


@pytest.mark.nightly
@pytest.mark.parametrize("is_cut", (False, True))
def test_bytes_along_each_axis_of_a_mesh_are_the_wires(is_cut):
    nodes, gpus = 2, 3
    axes = (("node", nodes), ("gpu", gpus))
    program = rewritten(step_on(axes, 1, 3 * is_cut), stage=3, bucket=True, **INT8)
    buckets = {info.place.bucket: info for info in program.table}.values()
    each = [quantized_bytes(info.place.shard_numel, "int8") * info.world_size for info in buckets]
    gathers = [n for n in nodes_of(program, ops.all_gather_start) if role(n) == Role.GATHER]
    times = len(gathers) / len(buckets)
    inner, outer = (wire_bytes(program.gm, 6, axis) for axis in ("gpu", "node"))
    assert inner.gathers == times * sum(each) * (gpus - 1) / gpus
    assert outer.gathers == (times * sum(each) / gpus * (nodes - 1) / nodes if is_cut else 0)


def test_wires_and_what_comes_of_them_are_counted_as_memory():
    exact, coded = (rewritten(wide_step(), bucket=True, **more) for more in ({}, INT8))
    wire = 4 * quantized_bytes(90_300 // 4, "int8")
    before, after = (gathered_peak(p.gm, p.table).nbytes for p in (exact, coded))
    assert before < after <= before + 2 * wire
    nodes = list(coded.graph.nodes)
    alive = dict(zip(nodes, live_bytes(coded.graph, 4), strict=True))
    for values in nodes_of(coded, ops.dequantize):
        assert alive[values] >= wire + value_bytes(values)
        assert alive[values] - alive[values.next.next] >= 0.9 * wire, "it is freed there"


# Bugs


def planted(captured=None, **options):
    program = rewritten(captured or mlp_step(), bucket=True, **INT8, **options)
    verify(program.gm, program.table, FACTS)
    return program


def refused(program, words):
    with pytest.raises(GraphError, match=words):
        verify(program.gm, program.table, FACTS)


def test_a_stale_wire_is_refused():
    program = planted(twice_step())
    first, second = nodes_of(program, ops.quantize)
    second.replace_all_uses_with(first)
    refused(program, "has written to it since")


def test_a_wire_that_is_made_before_an_update_and_read_after_it_is_refused():
    program = planted(twice_step())
    second = nodes_of(program, ops.quantize)[1]
    pack = second.args[0]
    for position, update in enumerate(pack.args[0]):
        pack.replace_input_with(update, update.args[0])
        assert shard_of(pack.args[0][position]) == pack.args[1][position]
    first_update = min(nodes_of(program, ops.update))
    first_update.prepend(pack)
    first_update.prepend(second)
    refused(program, "has written to it since")


def test_a_read_before_the_wait_is_refused():
    program = planted()
    values = nodes_of(program, ops.dequantize)[0]
    values.replace_input_with(values.args[0], values.args[0].args[0])
    refused(program, "must have one wait and no other reader")


def test_a_wire_that_is_read_after_it_is_freed_is_refused():
    program = planted()
    values = nodes_of(program, ops.dequantize)[0]
    free = next(user for user in values.args[0].users if user.target is ops.free)
    values.prepend(free)
    refused(program, "has freed before")


def test_values_that_are_read_after_they_are_freed_are_refused():
    program = planted()
    values = nodes_of(program, ops.dequantize)[0]
    free = next(user for user in values.users if user.target is ops.free)
    values.append(free)
    refused(program, "has freed before")


@pytest.mark.parametrize("which", (ops.quantize, ops.dequantize))
def test_values_and_wires_that_are_never_freed_are_refused(which):
    program = planted()
    values = nodes_of(program, ops.dequantize)[0]
    of = values.args[0] if which is ops.quantize else values
    program.graph.erase_node(next(user for user in of.users if user.target is ops.free))
    refused(program, "memory is freed 0 times")


def test_another_code_is_refused():
    program = planted()
    values = nodes_of(program, ops.dequantize)[0]
    values.update_arg(1, "int4")
    refused(program, "as int4 in 2 parts of 20, and it is int8 in 2 parts of 20")


@pytest.mark.parametrize("parts, numel", ((1, 40), (4, 10), (1, 20), (2, 25)))
def test_other_parts_are_refused(parts, numel):
    program = planted()
    values = nodes_of(program, ops.dequantize)[0]
    values.args = (*values.args[:2], parts, numel, *values.args[4:])
    refused(program, f"as int8 in {parts} parts of {numel}, and it is int8 in 2 parts of 20")


def test_bytes_are_not_computed_with():
    program = planted()
    wait = nodes_of(program, ops.dequantize)[0].args[0]
    with program.graph.inserting_after(wait):
        cast = program.graph.call_function(torch.ops.aten._to_copy.default, (wait,))
        cast.meta["val"] = wait.meta["val"]
    refused(program, "which is a wire of")


def test_what_nothing_has_quantised_is_not_dequantised():
    program = planted()
    values = nodes_of(program, ops.dequantize)[0]
    wire = nodes_of(program, ops.quantize)[0]
    values.args[0].args[0].replace_input_with(wire, wire.args[0])
    refused(program, "which nothing has quantised|refuses its operands|computes")


def test_a_wire_names_what_it_holds():
    program = planted()
    wire = nodes_of(program, ops.quantize)[0]
    wire.update_arg(3, [0])
    refused(program, "does not name the parameters that .* has")
    program = planted(smallest_step())
    wire = nodes_of(program, ops.quantize)[0]
    wire.update_arg(3, [])
    verify(program.gm, program.table, FACTS)


def test_an_update_of_rounded_values_is_refused():
    program = planted(smallest_step())
    (update,) = nodes_of(program, ops.update)
    values = nodes_of(program, ops.dequantize)[0]
    free = next(user for user in values.users if user.target is ops.free)
    index = parameter_named(program, "w").index
    with program.graph.inserting_before(free):
        shard = program.graph.call_function(
            ops.take_shard, (nodes_of(program, torch.ops.aten.view.default)[0], index, 4)
        )
        shard.meta = {"val": update.meta["val"], "zerofx": update.meta["zerofx"]}
    update.replace_input_with(update.args[0], shard)
    refused(program, "is rounded, and a parameter's new value is computed of it")


def test_a_write_of_rounded_values_is_refused():
    program = planted(smallest_step())
    values = nodes_of(program, ops.dequantize)[0]
    view = nodes_of(program, torch.ops.aten.view.default)[0]
    free = next(user for user in values.users if user.target is ops.free)
    weight = next(n for n in program.graph.nodes if n.op == "placeholder" and shard_of(n) == 0)
    like = nodes_of(program, ops.update)[0]
    with program.graph.inserting_before(free):
        shard = program.graph.call_function(ops.take_shard, (view, 0, 4))
        write = program.graph.call_function(torch.ops.aten.copy_.default, (weight, shard))
        for node in (shard, write):
            node.meta = {"val": like.meta["val"], "zerofx": like.meta["zerofx"]}
    like.replace_input_with(weight, write)
    refused(program, "is rounded, and a parameter's new value is computed of it")


# Options


@pytest.mark.parametrize("stage", (0, 1, 2))
def test_stages_that_keep_whole_parameters_refuse_it(stage):
    with pytest.raises(ValueError, match=f"needs stage 3.*at stage {stage} ranks keep whole"):
        choose({"stage": stage, **INT8}, {})


@pytest.mark.parametrize(
    "value, words",
    [
        ("int4", "gather_dtype must be int8, not int4: a weight with seven levels"),
        ("int2", "gather_dtype must be one of int8, not 'int2'"),
        ("bfloat16", "gather_dtype must be one of int8"),
    ],
)
def test_other_codes_are_refused(value, words):
    with pytest.raises(ValueError, match=words):
        choose({"gather_dtype": value}, {})
    with pytest.raises(ValueError, match="ZEROFX_GATHER_DTYPE must be"):
        choose({}, {"ZEROFX_GATHER_DTYPE": value})


def test_what_is_no_name_is_refused():
    with pytest.raises(TypeError, match="gather_dtype must be 'int8', not 8 of type int"):
        choose({"gather_dtype": 8}, {})


@pytest.mark.parametrize("value", ("int8", torch.int8))
def test_a_dtype_is_its_name(value):
    assert choose({"gather_dtype": value}, {}).gather_dtype == "int8"
    assert choose({"gather_dtype": None}, {}).gather_dtype is None
    assert choose({}, {"ZEROFX_GATHER_DTYPE": "int8"}).gather_dtype == "int8"
    assert choose({"gather_dtype": value}, {"ZEROFX_GATHER_DTYPE": ""}).gather_dtype is None


def test_a_nan_in_a_parameter_reaches_all_that_shares_its_block():
    weight = nn.Parameter(torch.ones(4, 2))
    weight.data[0, 0] = math.nan

    def step(x):
        with torch.no_grad():
            return x @ weight

    captured = capture(step, torch.ones(3, 4), world_size=1)
    for options, columns in (({}, [True, False]), (INT8, [True, True])):
        ((result,),) = execute(rewritten_by_rank(captured, stage=3, **options)).results
        assert result.isnan().all(0).tolist() == columns
