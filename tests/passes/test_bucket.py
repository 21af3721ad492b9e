"""bucket: parameters of one layer lie in one flat buffer, of which every rank owns one range."""

import dataclasses
import functools
import itertools
import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from tests.kit.covering import each_pair, only
from tests.kit.programs import (
    assert_program,
    assert_same_numerics,
    capture,
    clone,
    context_of,
    evaluation,
    execute,
    gathered_bytes,
    listing,
    mlp_step,
    nodes_of,
    rewritten,
    rewritten_by_rank,
    run_passes,
)
from zerofx import GraphError
from zerofx.cost.traffic import wire_bytes
from zerofx.ir import ops
from zerofx.ir.aliases import aliases
from zerofx.ir.collectives import schedule
from zerofx.ir.graph import program_order
from zerofx.ir.interface import InputRole, set_input_role
from zerofx.ir.mesh import Mesh
from zerofx.ir.parameters import ParameterInfo, ParameterTable, Place
from zerofx.ir.roles import role
from zerofx.options import resolve
from zerofx.passes.base import PassContext
from zerofx.passes.manager import run_pipeline
from zerofx.passes.pipeline import PIPELINE
from zerofx.passes.zero.bucket import ALIGNMENT_BYTES, bucket, lay_out, layer_of
from zerofx.verify.verifier import verify

aten = torch.ops.aten

STAGES = (1, 2, 3)


# Layout


def describe(name, *shape, **facts):
    """A parameter that is all but its place in a table."""
    value = torch.empty(shape)
    defaults = dict(
        index=-1,
        name=name,
        shape=shape,
        stride=value.stride(),
        dtype=torch.float32,
        device=torch.device("cpu"),
        requires_grad=True,
        world_size=2,
    )
    return ParameterInfo(**{**defaults, **facts})


def bucketed(*parameters, reads=None, casts=(), bound=(), world_size=2, **options):
    """The table after the pass over a program that reads these parameters in this order.

    ``casts`` are (name, dtype): what else is read of a parameter.
    """
    infos = [
        dataclasses.replace(info, index=index, world_size=world_size)
        for index, info in enumerate(parameters)
    ]
    graph, nodes = fx.Graph(), {}
    for info in infos:
        nodes[info.name] = graph.placeholder(info.name.replace(".", "_"))
        nodes[info.name].meta["val"] = torch.empty(info.shape, dtype=info.dtype, device="meta")
        set_input_role(nodes[info.name], InputRole("parameter", info.index))
    for name in nodes if reads is None else reads:
        if name not in dict(casts):
            graph.call_function(aten.relu.default, (nodes[name],))
    for name, dtype in casts:
        cast = graph.call_function(aten._to_copy.default, (nodes[name],), {"dtype": dtype})
        cast.meta["val"] = nodes[name].meta["val"].to(dtype)
    graph.output(())
    table = ParameterTable(tuple(infos))
    settled = frozenset(info.index for info in infos if info.name in bound)
    before = str(graph)
    ctx = PassContext(resolve(options, {}), table, Mesh.flat(world_size), 1, settled)
    counts = bucket(fx.GraphModule({}, graph), ctx)
    assert str(graph) == before, "the program stays as it is"
    shared = [info for info in table if info.shares_bucket]
    buckets = {info.place.bucket for info in shared}
    assert counts == {"buckets": len(buckets), "parameters in them": len(shared)}
    return table


def shared(table):
    """The names in every bucket of several parameters, as they lie in it."""
    numbers = {info.place.bucket for info in table if info.shares_bucket}
    return [[info.name for info in table.bucket(number)] for number in sorted(numbers)]


def test_parameters_lie_in_the_order_of_their_first_use():
    parameters = [describe(name, 4) for name in ("m.a", "m.b", "m.c")]
    assert shared(bucketed(*parameters)) == [["m.a", "m.b", "m.c"]]
    table = bucketed(*parameters, reads=["m.c", "m.a", "m.c", "m.b", "m.a"])
    assert shared(table) == [["m.c", "m.a", "m.b"]]


@pytest.mark.parametrize(
    "name, layer",
    [
        ("h.3.attn.weight", "h.3"),
        ("h.3.mlp.0.weight", "h.3"),
        ("model.layers.12.q", "model.layers.12"),
        ("0.weight", "0"),
        ("wte.weight", "wte"),
        ("a.b.weight", "a.b"),
        ("weight", ""),
        ("heads.0", "heads"),
        ("block2.weight", "block2"),
    ],
)
def test_a_layer_is_what_is_numbered_or_the_module(name, layer):
    assert layer_of(name) == layer


def test_layers_have_buckets_of_their_own():
    names = ["h.0.a", "h.0.b.w", "h.1.a", "h.1.b.w", "head.w", "head.b", "scale", "shift", "e.w"]
    assert shared(bucketed(*(describe(name, 4) for name in names))) == [
        ["h.0.a", "h.0.b.w"],
        ["h.1.a", "h.1.b.w"],
        ["head.w", "head.b"],
        ["scale", "shift"],
    ]


def test_a_layer_that_is_used_here_and_there_stays_together():
    names = ["h.0.a", "h.1.a", "h.0.b", "h.1.b"]
    table = bucketed(*(describe(name, 4) for name in names))
    assert shared(table) == [["h.0.a", "h.0.b"], ["h.1.a", "h.1.b"]]


@pytest.mark.parametrize(
    "facts",
    [
        {"dtype": torch.bfloat16},
        {"dtype": torch.float64},
        {"device": torch.device("meta")},
        {"requires_grad": False},
    ],
    ids=str,
)
def test_what_differs_is_not_mixed(facts):
    plain = [describe(f"m.{name}", 4) for name in "ab"]
    other = [describe(f"m.{name}", 4, **facts) for name in "cd"]
    table = bucketed(*itertools.chain(*zip(plain, other, strict=True)))
    assert shared(table) == [["m.a", "m.b"], ["m.c", "m.d"]]


def test_what_travels_in_other_dtypes_is_not_mixed():
    """Under autocast, norms are read in float32 and products in bfloat16."""
    narrow, half = torch.bfloat16, torch.float16
    parameters = [describe(f"m.{name}", 4) for name in ("a", "b", "c", "d", "e", "f", "g")]
    casts = [("m.a", narrow), ("m.c", narrow), ("m.d", half), ("m.e", narrow), ("m.e", half)]
    casts += [("m.f", half), ("m.f", narrow)]
    table = bucketed(*parameters, casts=casts)
    assert shared(table) == [["m.a", "m.c"], ["m.b", "m.g"], ["m.e", "m.f"]]


def test_a_bucket_ends_where_the_next_parameter_does_not_fit():
    parameters = [describe(f"m.{name}", 8) for name in "abcde"]
    assert shared(bucketed(*parameters, bucket_bytes=64)) == [["m.a", "m.b"], ["m.c", "m.d"]]
    assert shared(bucketed(*parameters, bucket_bytes=95)) == [["m.a", "m.b"], ["m.c", "m.d"]]
    assert shared(bucketed(*parameters, bucket_bytes=96)) == [
        ["m.a", "m.b", "m.c"],
        ["m.d", "m.e"],
    ]
    assert shared(bucketed(*parameters, bucket_bytes=1)) == []


def test_alignment_counts_into_a_buckets_bytes():
    parameters = [describe(f"m.{name}", 1) for name in "abcd"]
    assert shared(bucketed(*parameters, bucket_bytes=32)) == [["m.a", "m.b"], ["m.c", "m.d"]]


@pytest.mark.parametrize("names", ["aBc", "Bac", "acB"])
def test_a_parameter_larger_than_a_bucket_is_alone(names):
    sizes = {"a": 4, "c": 4, "B": 1000}
    table = bucketed(*(describe(f"m.{n}", sizes[n]) for n in names), bucket_bytes=64)
    (large,) = [info for info in table if info.name == "m.B"]
    assert not large.shares_bucket
    assert large.place == Place(large.index, 0, 1000, 500)


def test_the_default_is_64_mib():
    large = [describe(f"m.{name}", 2**23) for name in "abc"]  # 32 MiB each
    assert shared(bucketed(*large)) == [["m.a", "m.b"]]


def test_a_parameter_alone_keeps_the_layout_that_it_has_without_the_pass():
    (info,) = bucketed(describe("m.a", 5, 3))
    assert not info.shares_bucket and info.place == Place(0, 0, 16, 8)


def test_a_parameter_that_nobody_reads_is_alone():
    table = bucketed(*(describe(f"m.{name}", 4) for name in "abc"), reads=["m.a", "m.c"])
    assert shared(table) == [["m.a", "m.c"]]


def test_empty_and_0_dim_parameters_take_part():
    table = bucketed(
        describe("m.a", 0, 3), describe("m.b"), describe("m.c", 5), describe("m.d", 0),
        world_size=3,
    )  # fmt: skip
    assert len(shared(table)[0]) == 4
    assert [info.place.offset for info in table] == [0, 0, 4, 12]
    assert_every_element_has_one_owner(list(table))


def test_a_bucket_of_nothing_has_no_elements():
    table = bucketed(describe("m.a", 0), describe("m.b", 2, 0))
    assert [info.place.shard_numel for info in table] == [0, 0]
    assert_every_element_has_one_owner(list(table))


def test_a_bound_parameter_keeps_its_place_and_its_company():
    """Another program has laid out b alone and (c, d) together; a and e are new."""
    there = Place(bucket=2, offset=8, extent=8, shard_numel=8)
    first = dataclasses.replace(there, offset=0)
    parameters = [describe("m.a", 4), describe("m.b", 4), describe("m.c", 4, assigned=first)]
    parameters += [describe("m.d", 4, assigned=there), describe("m.e", 4)]
    table = bucketed(*parameters, bound=["m.b", "m.c", "m.d"])
    assert [table[i].assigned for i in (1, 2, 3)] == [None, first, there]
    assert shared(table) == [["m.a", "m.e"], ["m.c", "m.d"]]


def assert_every_element_has_one_owner(infos):
    """The definition of a bucket: padded parameters one after the other, cut equally."""
    place, world_size = infos[0].place, infos[0].world_size
    alignment = max(ALIGNMENT_BYTES // infos[0].dtype.itemsize, 1)
    assert place.shard_numel % alignment == 0, "shards begin aligned"
    end = 0
    for info in infos:
        assert info.place.offset % alignment == 0, "parameters begin aligned"
        assert info.place.offset == end and info.place.extent >= info.numel
        end += info.place.extent
        assert info.place.bucket == infos[0].index
        assert info.place.shard_numel == place.shard_numel
    assert end == place.shard_numel * world_size
    holder = torch.full((end,), -1)
    for rank in range(world_size):
        position = 0
        for info in infos:
            mine = dataclasses.replace(info, rank=rank)
            start, stop = mine.extent_of(rank)
            part = holder[info.place.offset + start : info.place.offset + stop]
            assert part.eq(-1).all(), "an element has two owners"
            part.fill_(rank)
            assert mine.shard_numel == stop - start == len(part)
            if stop > start:
                assert mine.position_in_shard == position, "shards lie one after the other"
            assert 0 <= mine.position_in_shard <= place.shard_numel - mine.shard_numel
            position += stop - start
            owned = mine.owned_by(rank)
            assert owned == (min(start, info.numel), min(stop, info.numel))
        assert position == place.shard_numel
    assert torch.equal(holder, torch.arange(world_size).repeat_interleave(place.shard_numel))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex128], ids=str
)
def test_every_element_has_exactly_one_owner(world_size, dtype):
    generator = random.Random(world_size)
    for count in (2, 3, 5, 9):
        for largest in (1, 5, 40, 300):
            sizes = [generator.randrange(largest + 1) for _ in range(count)]
            infos = [
                describe(f"m.{i}", size, dtype=dtype, index=i, world_size=world_size)
                for i, size in enumerate(sizes)
            ]
            table = ParameterTable(tuple(infos))
            table.assign(lay_out(infos))
            assert_every_element_has_one_owner(list(table))


def on_an_accelerator(*parameters):
    cuda = torch.device("cuda", 0)
    return [dataclasses.replace(p, index=i, device=cuda) for i, p in enumerate(parameters)]


def test_parameters_and_shards_on_an_accelerator_are_aligned_as_they_travel():
    """128 bytes of what has one byte an element; one alone too, unless it is so anyway."""
    infos = on_an_accelerator(describe("m.a", 5), describe("m.b", 300))
    places = lay_out(infos)
    assert [places[i].offset for i in (0, 1)] == [0, 128] and places[0].shard_numel == 256
    assert lay_out(infos[:1])[0] == Place(bucket=0, offset=0, extent=256, shard_numel=128)
    assert not lay_out(on_an_accelerator(describe("m.c", 512)))


def test_a_layer_on_an_accelerator_is_one_bucket_by_default():
    large = [describe(f"h.{i}.w", 2**13, 2**13) for i in (0, 0, 1)]  # 256 MiB each
    infos = [dataclasses.replace(p, name=f"{p.name}{i}") for i, p in enumerate(large)]
    assert shared(bucketed(*on_an_accelerator(*infos))) == [["h.0.w0", "h.0.w1"]]
    assert shared(bucketed(*infos)) == []


def test_a_bucket_on_an_accelerator_counts_the_bytes_that_travel():
    infos = on_an_accelerator(describe("h.0.a", 2**10), describe("h.0.b", 2**10))
    limited = {"bucket_bytes": 4 * 2**10, "reads": ["h.0.a", "h.0.b"]}
    assert shared(bucketed(*infos, **limited)) == []
    casts = [(info.name, torch.bfloat16) for info in infos]
    assert shared(bucketed(*infos, casts=casts, **limited)) == [["h.0.a", "h.0.b"]]


def test_the_layout_is_the_same_on_every_rank_and_every_time():
    def places(rank):
        program = clone(mlp_step(4), 3)
        run_passes(program, rank=rank, until="bucket", bucket=True)
        return [info.place for info in program.table]

    first = places(0)
    assert first == places(0) == places(1) == places(2)
    assert len(set(first)) == 8


# The pass in the pipeline


@functools.cache
def linear_step(clip=None):
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        model(x).pow(2).mean().backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=clip)
        optimizer.step()
        optimizer.zero_grad()

    return capture(step, torch.randn(4, 5), world_size=2)


def test_without_buckets_every_parameter_travels_alone():
    assert_program(
        rewritten(linear_step()),
        """
        weight: shard of parameter [8]
        bias: shard of parameter [2]
        input: other [4, 5]
        all_gather_start = zerofx.all_gather_start(weight, 2)
        wait = zerofx.wait(all_gather_start)
        all_gather_start_1 = zerofx.all_gather_start(bias, 2)
        slice = slice(wait, 0, 0, 15)
        view = view(slice, [3, 5])
        t = t(view)
        wait_1 = zerofx.wait(all_gather_start_1)
        slice_1 = slice(wait_1, 0, 0, 3)
        view_1 = view(slice_1, [3])
        addmm = addmm(view_1, input, t)
        zerofx.free(wait_1)
        zerofx.free(wait)
        ...
        reduce_scatter_start = zerofx.reduce_scatter_start(constant_pad_nd, 'mean', 2)
        ...
        reduce_scatter_start_1 = zerofx.reduce_scatter_start(constant_pad_nd_1, 'mean', 2)
        wait_3 = zerofx.wait(reduce_scatter_start_1)
        update = zerofx.update(weight, wait_3, SGD, 0, None)
        update_1 = zerofx.update(bias, wait_2, SGD, 1, None)
        return []
        """,
    )


@pytest.mark.parametrize("rank, weight, bias", [(0, 12, 0), (1, 4, 8)])
def test_a_layer_travels_together(rank, weight, bias):
    """15 elements are padded to 16, 3 fill up the 24 of two ranks: the second rank has them."""
    assert_program(
        rewritten_by_rank(linear_step())[rank],
        f"""
        weight: shard of parameter [{weight}]
        bias: shard of parameter [{bias}]
        input: other [4, 5]
        pack = zerofx.pack([weight, bias], [0, 1], 12)
        all_gather_start = zerofx.all_gather_start(pack, 2)
        wait = zerofx.wait(all_gather_start)
        slice = slice(wait, 0, 0, 15)
        view = view(slice, [3, 5])
        t = t(view)
        slice_1 = slice(wait, 0, 16, 19)
        view_1 = view(slice_1, [3])
        addmm = addmm(view_1, input, t)
        zerofx.free(wait)
        ...
        flatten_bucket = zerofx.flatten_bucket([t_3, view_2], [0, 1], 24)
        reduce_scatter_start = zerofx.reduce_scatter_start(flatten_bucket, 'mean', 2)
        wait_1 = zerofx.wait(reduce_scatter_start)
        slice_2 = slice(wait_1, 0, 0, {weight})
        update = zerofx.update(weight, slice_2, SGD, 0, None)
        slice_3 = slice(wait_1, 0, {weight}, 12)
        update_1 = zerofx.update(bias, slice_3, SGD, 1, None)
        return []
        """,
    )


@pytest.mark.parametrize("stage", [1, 2])
def test_new_values_of_a_layer_travel_together_below_stage_3(stage):
    assert_program(
        rewritten_by_rank(linear_step(), stage=stage)[1],
        """
        weight: parameter [3, 5]
        bias: parameter [3]
        ...
        flatten_bucket = zerofx.flatten_bucket([t_3, view], [0, 1], 24)
        reduce_scatter_start = zerofx.reduce_scatter_start(flatten_bucket, 'mean', 2)
        wait = zerofx.wait(reduce_scatter_start)
        take_shard = zerofx.take_shard(weight, 0, 4)
        slice = slice(wait, 0, 0, 4)
        update = zerofx.update(take_shard, slice, SGD, 0, None)
        take_shard_1 = zerofx.take_shard(bias, 1, 8)
        slice_1 = slice(wait, 0, 4, 12)
        update_1 = zerofx.update(take_shard_1, slice_1, SGD, 1, None)
        pack = zerofx.pack([update, update_1], [0, 1], 12)
        all_gather_start = zerofx.all_gather_start(pack, 2)
        wait_1 = zerofx.wait(all_gather_start)
        slice_2 = slice(wait_1, 0, 0, 15)
        view_1 = view(slice_2, [3, 5])
        copy_ = copy_(weight, view_1)
        slice_3 = slice(wait_1, 0, 16, 19)
        view_2 = view(slice_3, [3])
        copy__1 = copy_(bias, view_2)
        zerofx.free(wait_1)
        return []
        """,
    )


def test_layers_of_one_parameter_are_left_alone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 3, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    captured = capture(step, torch.randn(2, 5), world_size=2)
    assert listing(rewritten(captured, bucket=True)) == listing(rewritten(captured))


def test_leaves_a_program_without_parameters_alone():
    captured = capture(lambda x: x * 2, torch.randn(3), world_size=2)
    reports = run_passes(clone(captured), bucket=True)
    assert reports["bucket"].counts == {"buckets": 0, "parameters in them": 0}
    assert listing(rewritten(captured, bucket=True)) == listing(captured)


def test_can_be_turned_off():
    program = clone(mlp_step())
    assert run_passes(program, bucket=False)["bucket"].skipped == "turned off"
    assert not any(info.shares_bucket for info in program.table)


def test_requires_averaged_gradients():
    program = clone(mlp_step())
    with pytest.raises(GraphError, match="'bucket' requires averaged_gradients"):
        passes = [step for step in PIPELINE if step.name == "bucket"]
        run_pipeline(program.gm, context_of(program, bucket=True), passes)


def test_counts_what_it_did():
    reports = run_passes(clone(mlp_step()), bucket=True)
    assert reports["bucket"].counts == {"buckets": 3, "parameters in them": 6}


@pytest.mark.parametrize("stage", only((3,), STAGES))
def test_one_collective_per_bucket(stage):
    """Four layers: weights and biases, and at stage 3 the two inner layers for backward."""

    def starts(program):
        targets = ops.all_gather_start, ops.reduce_scatter_start
        return tuple(len(nodes_of(program, target)) for target in targets)

    (first, *_) = rewritten_by_rank(mlp_step(4), stage=stage)
    alone = {1: (8, 8), 2: (8, 8), 3: (10, 8)}[stage]
    assert starts(rewritten(mlp_step(4), stage=stage)) == alone
    assert starts(first) == {1: (4, 4), 2: (4, 4), 3: (6, 4)}[stage]


@pytest.mark.parametrize(
    "stage, world_size", each_pair(STAGES, (2, 3, 4, 7), default=[(1, 7), (3, 4)])
)
def test_bytes_on_the_wire_grow_only_by_padding(stage, world_size):
    """And, at stage 3, by the biases that are gathered for backward with their weights."""
    captured = mlp_step(4, width=33)
    alone = rewritten(captured, world_size, stage=stage)
    together = rewritten(captured, world_size, stage=stage, bucket=True)
    before, after = (wire_bytes(p.gm, world_size) for p in (alone, together))
    padding = 4 * (2 + world_size) * ALIGNMENT_BYTES  # in front of parameters and of shards
    assert 0 <= after.reductions - before.reductions <= padding
    biases = 2 * 33 * 4 if stage == 3 else 0
    rounds = 2 if stage == 3 else 1
    assert after.gathers - before.gathers <= rounds * padding + biases
    assert after.scalars == before.scalars


def test_gathered_bytes_alive_are_at_most_two_consecutive_layers():
    program = rewritten(mlp_step(4, width=33), bucket=True)
    whole = program.table[0].place.shard_numel * 2 * 4
    assert max(gathered_bytes(program)) == 2 * whole
    assert gathered_bytes(program)[-1] == 0


def test_a_reduction_starts_when_its_buckets_last_gradient_is_there():
    program = rewritten(mlp_step(4), bucket=True)
    for start in nodes_of(program, ops.reduce_scatter_start):
        last, node = max(start.args[0].args[0]), start
        while (node := node.prev) is not last:
            assert role(node) in ("reduce_gradient", "flatten"), f"{node} delays {start}"


def test_every_rank_has_the_same_schedule():
    captured = captured_step("clipped")
    programs = rewritten_by_rank(captured, 3, stage=3)
    assert len({schedule(p.gm, p.table, 3) for p in programs}) == 1
    text = "\n".join(schedule(programs[0].gm, programs[0].table, 3))
    assert "all_gather 0.weight, 0.bias torch.float32" in text
    assert "reduce_scatter 2.weight, 2.bias torch.float32" in text
    alone = rewritten(captured, 3)
    assert schedule(alone.gm, alone.table, 3) != schedule(programs[0].gm, programs[0].table, 3)


# Numerics


def trained(model, loss_of, *args, optimizer=None, after_backward=lambda: None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(*args):
        loss = loss_of(model, *args)
        loss.backward()
        after_backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return capture(step, *args, world_size=2)


def squares(model, x):
    return model(x).pow(2).mean()


def several_norms():
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    norms = []

    def measure():
        norms.append([model.weight.grad.norm(), model.bias.grad.abs().max()])

    def step(x):
        squares(model, x).backward()
        return model.weight.grad * 2, model.bias.grad.norm(), model.bias.grad.abs().max()

    return capture(step, torch.randn(4, 5), world_size=2)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, 5))
        self.middle = nn.Parameter(torch.randn(5, 5))
        self.shift = nn.Parameter(torch.randn(7))

    def forward(self, tokens):
        hidden = torch.tanh(F.embedding(tokens, self.table) @ self.middle)
        return F.linear(hidden, self.table, self.shift)


def tied_weights():
    torch.manual_seed(0)
    return trained(Tied(), squares, torch.arange(6))


def no_gradient():
    """One parameter is frozen, one is read without a gradient, one is not read at all."""
    torch.manual_seed(0)
    model = nn.Module()
    for name in ("a", "b", "frozen", "also_frozen", "unused", "detached"):
        model.register_parameter(name, nn.Parameter(torch.randn(5, 5)))
    model.frozen.requires_grad_(False)
    model.also_frozen.requires_grad_(False)

    def loss_of(m, x):
        hidden = (x @ m.a).tanh() @ m.frozen + m.also_frozen[0]
        return (hidden @ m.b @ m.detached.detach()).pow(2).mean()

    return trained(model, loss_of, torch.randn(3, 5))


def several_optimizers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    first = torch.optim.AdamW([model[0].weight, model[2].bias], lr=0.01)
    second = torch.optim.SGD(
        [{"params": [model[0].bias], "lr": 0.5}, {"params": [model[2].weight]}], lr=0.1
    )

    def step(x):
        model(x).pow(2).mean().backward()
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()

    return capture(step, torch.randn(3, 5), world_size=2)


def two_backwards():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batches):
        for i in range(2):
            model(batches[i]).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return capture(step, torch.randn(2, 3, 5), world_size=2)


def autocast():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3))

    def loss_of(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().pow(2).mean()

    return trained(model, loss_of, torch.randn(3, 8))


def channels_last():
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    images = torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last)
    return trained(model, squares, images)


def odd_shapes():
    """Empty, 0-dim and one-element parameters."""
    torch.manual_seed(0)
    model = nn.Module()
    for name, shape in {"scale": (), "none": (0, 5), "one": (1,), "w": (5, 3)}.items():
        model.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def loss_of(m, x):
        return (x @ m.w * m.scale + m.one + m.none.sum()).pow(2).mean()

    return trained(model, loss_of, torch.randn(4, 5))


def read_after_the_update():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(x):
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            return model(x).sum(), model[0].bias.sum()

    return capture(step, torch.randn(3, 5), world_size=2)


def accumulated_before():
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return trained(
        model,
        squares,
        torch.randn(4, 5),
        after_backward=lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    )


def left_behind():
    """Gradients leave the step in ``p.grad``."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)

    def step(x):
        loss = squares(model, x)
        loss.backward()
        return loss

    return capture(step, torch.randn(4, 5), world_size=2)


def only_some_are_updated():
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD([model.bias], lr=0.1)
    return trained(model, squares, torch.randn(4, 5), optimizer=optimizer)


def some_are_updated_and_read_again(after_all=False):
    """Of each bucket the biases are updated; the weights are gathered behind that."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
    weights = torch.optim.SGD([model[0].weight, model[1].weight], lr=0.5)
    biases = torch.optim.SGD([model[0].bias, model[1].bias], lr=0.5)

    def step(x):
        model(x).pow(2).mean().backward()
        if after_all:
            weights.step()
        results = []
        for _ in range(2 if after_all else 1):
            biases.step()
            with torch.no_grad():
                results.append(model(x).sum())
        model.zero_grad()
        return results

    return capture(step, torch.randn(3, 5), world_size=2)


def neighbours_are_combined():
    """Two parameters of one shape have shards of different ranges of it."""
    torch.manual_seed(0)
    model = nn.Module()
    for name in ("a", "b", "mean"):
        model.register_parameter(name, nn.Parameter(torch.randn(5, 3)))
    model.mean.requires_grad_(False)
    optimizer = torch.optim.SGD([model.a, model.b], lr=0.1)

    def step(x):
        ((x @ model.a) * (x @ model.b)).pow(2).mean().backward()
        both = (model.a.grad + model.b.grad).abs().sum()
        model.a.grad.mul_(model.b.grad)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.mean.mul_(0.9).add_(model.a, alpha=0.1)
            model.b.copy_(model.a)
        return both

    return capture(step, torch.randn(4, 5), world_size=2)


STEPS = {
    "linear": linear_step,
    "mlp": mlp_step,
    "evaluation": evaluation,
    "tied weights": tied_weights,
    "no gradient": no_gradient,
    "several optimizers": several_optimizers,
    "autocast": autocast,
    "channels last": channels_last,
    "odd shapes": odd_shapes,
    "read after the update": read_after_the_update,
    "left behind": left_behind,
    "only some are updated": only_some_are_updated,
    "some are updated and read again": some_are_updated_and_read_again,
    "some are updated twice": functools.partial(some_are_updated_and_read_again, after_all=True),
}
SUMMED_IN_ANOTHER_ORDER = {
    "clipped": functools.partial(mlp_step, clip=True),
    "clipped by the 3-norm": functools.partial(linear_step, 3.0),
    "gradients read": several_norms,
    "two backwards": two_backwards,
    "accumulated before": accumulated_before,
    "neighbours are combined": neighbours_are_combined,
}


@functools.cache
def captured_step(name):
    return {**STEPS, **SUMMED_IN_ANOTHER_ORDER}[name]()


@functools.cache
def expected(name, world_size):
    return execute(clone(captured_step(name), world_size))


def check_numerics(name, stage, world_size, bitwise, **options):
    programs = rewritten_by_rank(captured_step(name), world_size, stage=stage, **options)
    assert any(info.shares_bucket for info in programs[0].table)
    assert_same_numerics(expected(name, world_size), execute(programs), bitwise=bitwise)


@pytest.mark.parametrize(
    "name, stage",
    only(
        [
            *((name, 3) for name in ("linear", "tied weights", "autocast", "odd shapes")),
            *((name, 3) for name in ("read after the update", "only some are updated")),
        ],
        itertools.product(STEPS, STAGES),
    ),
)
def test_two_ranks_compute_bitwise_what_was_captured(name, stage):
    check_numerics(name, stage, 2, bitwise=True)


@pytest.mark.parametrize(
    "name, stage, world_size",
    each_pair(
        STEPS,
        STAGES,
        (1, 3, 4),
        default=[
            ("mlp", 2, 3),
            ("evaluation", 3, 4),
            ("no gradient", 2, 3),
            ("several optimizers", 3, 4),
            ("channels last", 3, 3),
            ("left behind", 2, 3),
            ("some are updated and read again", 1, 1),
            ("some are updated twice", 2, 3),
        ],
    ),
)
def test_computes_what_was_captured(name, stage, world_size):
    check_numerics(name, stage, world_size, bitwise=False)


@pytest.mark.parametrize(
    "name, stage, world_size",
    each_pair(
        SUMMED_IN_ANOTHER_ORDER,
        STAGES,
        (1, 2, 3, 4),
        default=[("clipped", 3, 3), ("two backwards", 1, 4), ("neighbours are combined", 3, 2)],
    ),
)
def test_computes_what_was_captured_but_for_the_order_of_sums(name, stage, world_size):
    check_numerics(name, stage, world_size, bitwise=False)


@pytest.mark.parametrize(
    "norm, stage, world_size",
    each_pair(
        (math.inf, -math.inf), STAGES, (2, 3, 4, 7), default=[(math.inf, 3, 4), (-math.inf, 2, 3)]
    ),
)
def test_a_rank_with_an_empty_shard_has_no_say_in_the_largest_gradient(norm, stage, world_size):
    """Its identity is the smallest there is; the padding of others' shards is not looked at."""
    captured = linear_step(norm)
    programs = rewritten_by_rank(captured, world_size, stage=stage)
    assert 0 in {info.shard_numel for program in programs for info in program.table}
    before = execute(clone(captured, world_size))
    assert_same_numerics(before, execute(programs), bitwise=world_size == 2)


@pytest.mark.parametrize("stage", only((3,), STAGES))
def test_micro_batches_that_are_reduced_one_by_one(stage):
    check_numerics("two backwards", stage, 3, bitwise=False, accumulate="sharded")


@pytest.mark.parametrize("stage", only((3,), STAGES))
def test_gradients_that_travel_in_another_dtype(stage):
    """As without buckets; padding and neighbours do not leak into the sums."""
    options = dict(stage=stage, reduce_dtype=torch.bfloat16)
    alone = rewritten_by_rank(mlp_step(), 2, bucket=False, **options)
    together = rewritten_by_rank(mlp_step(), 2, **options)
    assert_same_numerics(execute(alone), execute(together))


@pytest.mark.parametrize("bucket_bytes", only((64,), [1, 64, 224, 10**9]))
def test_the_size_of_buckets_does_not_change_what_is_computed(bucket_bytes):
    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.ParameterList(nn.Parameter(torch.randn(5, 5)) for _ in range(6))

    def loss_of(model, x):
        for weight in model.layers:
            x = torch.tanh(x @ weight)
        return x.pow(2).mean()

    captured = trained(model, loss_of, torch.randn(3, 5))
    programs = rewritten_by_rank(captured, bucket_bytes=bucket_bytes)
    count = {1: 0, 64: 0, 224: 3, 10**9: 1}[bucket_bytes]
    assert len({i.place.bucket for i in programs[0].table if i.shares_bucket}) == count
    assert_same_numerics(execute(captured), execute(programs))


@pytest.mark.nightly
def test_prefetching_changes_nothing():
    for name in ("mlp", "tied weights", "autocast", "neighbours are combined"):
        plain = rewritten_by_rank(captured_step(name), prefetch=False)
        assert_same_numerics(execute(plain), execute(rewritten_by_rank(captured_step(name))))


def test_shards_of_neighbours_of_one_shape_are_not_added():
    """They would be the sum of other elements than the user's, or not even of one size."""
    (first, *_) = rewritten_by_rank(captured_step("neighbours are combined"))
    a, b, *_ = first.table
    assert a.shape == b.shape and not a.lies_like(b) and a.lies_like(a)


def test_parameters_that_lie_alike_are_combined_on_shards():
    """A moving average of a model: its layers have buckets of the same layout."""
    torch.manual_seed(0)
    model, mean = nn.Linear(5, 3), nn.Linear(5, 3).requires_grad_(False)
    both = nn.ModuleDict({"model": model, "mean": mean})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        both["model"](x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for average, new in zip(mean.parameters(), model.parameters(), strict=True):
                average.mul_(0.9).add_(new, alpha=0.1)

    captured = capture(step, torch.randn(4, 5), world_size=2)
    programs = rewritten_by_rank(captured)
    assert len(nodes_of(programs[0], ops.all_gather_start)) == 1  # of the forward pass
    assert_same_numerics(execute(captured), execute(programs))


def test_a_second_program_keeps_the_layout_of_the_first():
    """Its own would be another, as it reads bias first; the two share optimizer states."""
    captured = clone(linear_step())
    mine = ParameterTable(tuple(captured.table))
    mine.assign(lay_out([mine[1], mine[0]]))
    programs = []
    for rank in range(2):
        program = clone(linear_step())
        program.table.parameters = tuple(dataclasses.replace(i, rank=rank) for i in mine)
        ctx = dataclasses.replace(context_of(program, rank, bucket=True), bound=frozenset({0, 1}))
        run_pipeline(program.gm, ctx, [each for each in PIPELINE if not each.lowers])
        assert [info.place for info in program.table] == [info.place for info in mine]
        programs.append(program)
    assert [info.place.offset for info in mine] == [4, 0]
    assert_same_numerics(execute(linear_step()), execute(programs))


def test_a_program_that_reads_only_some_of_a_bound_bucket():
    """It gathers the whole bucket, and looks at its own range of it."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    captured = capture(lambda x: x + model.bias.detach(), torch.randn(4, 3), world_size=2)
    (bias,) = captured.table
    assigned = Place(bucket=0, offset=16, extent=8, shard_numel=12)
    programs = []
    for rank in range(2):
        program = clone(captured)
        program.table.parameters = (dataclasses.replace(bias, rank=rank, assigned=assigned),)
        ctx = dataclasses.replace(context_of(program, rank, bucket=True), bound=frozenset({0}))
        run_pipeline(program.gm, ctx, PIPELINE)
        programs.append(program)
    (start,) = nodes_of(programs[0], ops.all_gather_start)
    assert start.meta["val"].shape == (24,)
    assert_same_numerics(execute(captured), execute(programs))


# What the verifier and the simulator see


FACTS = frozenset(
    {"averaged_gradients", "sharded_updates", "sharded_gradients", "sharded_parameters"}
)


def shifted_gradient(program):
    """Another range of the reduced bucket, of the right size if there is one."""
    for part in program.graph.nodes:
        if role(part) == "reduced_gradient" and part.meta["val"].numel():
            reduced, dim, start, stop = part.args
            shift = -1 if start else 1
            part.args = (reduced, dim, start + shift, stop + shift)
            return


def neighbours_gradient(program):
    one, other = [n for n in program.graph.nodes if role(n) == "reduced_gradient"][:2]
    one.args, other.args = other.args, one.args


def packed_without_one(program):
    pack = nodes_of(program, ops.pack)[1]
    pack.args = (pack.args[0][:1], pack.args[1][:1], pack.args[2])


def packed_in_the_wrong_order(program):
    pack = nodes_of(program, ops.pack)[1]
    pack.args = (pack.args[0][::-1], *pack.args[1:])


def packed_under_wrong_names(program):
    pack = nodes_of(program, ops.pack)[1]
    pack.args = (pack.args[0], pack.args[1][::-1], pack.args[2])


def packed_from_another_layer(program):
    one, other = nodes_of(program, ops.pack)[:2]
    one.args, other.args = (other.args[0], *one.args[1:]), (one.args[0], *other.args[1:])


def another_layers_bucket(program):
    one, other = nodes_of(program, ops.pack)[:2]
    one.args, other.args = other.args, one.args


def packed_twice(program):
    pack = nodes_of(program, ops.pack)[1]
    pack.args = ([*pack.args[0], pack.args[0][0]], [*pack.args[1], pack.args[1][0]], pack.args[2])


def packed_too_large(program):
    pack = nodes_of(program, ops.pack)[1]
    pack.args = (*pack.args[:2], pack.args[2] + 4)


def gradients_swapped(program):
    flat = nodes_of(program, ops.flatten_bucket)[1]
    flat.args = (flat.args[0][::-1], *flat.args[1:])


def gradient_of_another_layer(program):
    """Of the same shape, so that nothing but the meaning is wrong."""
    one, other = nodes_of(program, ops.flatten_bucket)[:2]
    other.args = ([one.args[0][0], *other.args[0][1:]], *other.args[1:])


def gradient_left_out(program):
    flat = nodes_of(program, ops.flatten_bucket)[1]
    flat.args = (flat.args[0][:1], flat.args[1][:1], flat.args[2])


def read_from_the_wrong_offset(program):
    whole = [n for n in program.graph.nodes if role(n) == "whole" and len(n.args) == 4][2]
    gathered, dim, start, stop = whole.args
    whole.args = (gathered, dim, start + 1, stop + 1)


def freed_too_early(program):
    free = nodes_of(program, ops.free)[1]
    order = program_order(program.graph)
    readers = {user for alias in aliases(free.args[0]) for user in alias.users} - {free}
    max(readers, key=order.__getitem__).prepend(free)


def never_freed(program):
    program.graph.erase_node(nodes_of(program, ops.free)[1])


def summed(program):
    start = nodes_of(program, ops.reduce_scatter_start)[1]
    start.args = (start.args[0], "sum", *start.args[2:])


MUTATIONS = (
    shifted_gradient,
    neighbours_gradient,
    packed_without_one,
    packed_in_the_wrong_order,
    packed_under_wrong_names,
    packed_from_another_layer,
    another_layers_bucket,
    packed_twice,
    packed_too_large,
    gradients_swapped,
    gradient_of_another_layer,
    gradient_left_out,
    read_from_the_wrong_offset,
    freed_too_early,
    never_freed,
    summed,
)
HARMLESS = (never_freed, packed_twice)


@functools.cache
def good_programs(world_size):
    return rewritten_by_rank(mlp_step(3, width=4), world_size)


@pytest.mark.parametrize(
    "mutate, world_size",
    each_pair(MUTATIONS, (2, 3), default=[(mutate, 2) for mutate in MUTATIONS]),
)
def test_a_broken_bucket_is_refused_on_every_rank(mutate, world_size):
    for good in good_programs(world_size):
        verify(good.gm, good.table, FACTS)
        program = clone(good)
        mutate(program)
        program.gm.graph.lint()
        with pytest.raises(GraphError):
            verify(program.gm, program.table, FACTS)


@pytest.mark.nightly
@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_a_broken_bucket_shows_in_the_numerics(mutate):
    """The judge judges: none of the mutants above is harmless but where it says so."""
    programs = [clone(good) for good in good_programs(2)]
    for program in programs:
        mutate(program)
    before = execute(mlp_step(3, width=4))
    if mutate in HARMLESS:
        assert_same_numerics(before, execute(programs))
        return
    with pytest.raises((AssertionError, RuntimeError)):
        assert_same_numerics(before, execute(programs))


def test_at_stage_0_the_gradients_of_a_layer_are_averaged_together():
    """Each is a part of the buffer, of its own shape; the update is of the whole parameter."""
    assert_program(
        rewritten_by_rank(linear_step(), stage=0)[1],
        """
        weight: parameter [3, 5]
        bias: parameter [3]
        ...
        all_reduce_bucket_start = zerofx.all_reduce_bucket_start([t_3, view], [0, 1], 24, 'mean')
        wait = zerofx.wait(all_reduce_bucket_start)
        slice = slice(wait, 0, 0, 15)
        view_1 = view(slice, [3, 5])
        update = zerofx.update(weight, view_1, SGD, 0, None)
        slice_1 = slice(wait, 0, 16, 19)
        view_2 = view(slice_1, [3])
        update_1 = zerofx.update(bias, view_2, SGD, 1, None)
        return []
        """,
    )


def test_at_stage_0_one_rank_has_nothing_to_average_together():
    (program,) = rewritten_by_rank(linear_step(), 1, stage=0)
    assert not nodes_of(program, ops.all_reduce_bucket_start)


def test_at_stage_0_an_all_reduce_starts_when_its_buckets_last_gradient_is_there():
    (program, _) = rewritten_by_rank(mlp_step(4), stage=0)
    starts = nodes_of(program, ops.all_reduce_bucket_start)
    assert len(starts) == 4 and not nodes_of(program, ops.all_reduce_start)
    for start in starts:
        node = start
        while (node := node.prev) is not max(start.args[0]):
            assert role(node) == "reduced_gradient" or node.target is ops.wait, node


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
def test_at_stage_0_bytes_on_the_wire_grow_only_by_padding(world_size):
    captured = mlp_step(4, width=33)
    alone = rewritten(captured, world_size, stage=0, bucket=False)
    together = rewritten(captured, world_size, stage=0, bucket=True)
    before, after = (wire_bytes(p.gm, world_size) for p in (alone, together))
    assert (before.num_collectives, after.num_collectives) == (8, 4)
    padding = 2 * 4 * (2 + world_size) * ALIGNMENT_BYTES
    assert 0 <= after.reductions - before.reductions <= padding


@pytest.mark.parametrize(
    ("name", "world_size"),
    each_pair(
        [*STEPS, *SUMMED_IN_ANOTHER_ORDER],
        [2, 3],
        default=[
            ("tied weights", 3),
            ("odd shapes", 2),
            ("read after the update", 3),
            ("clipped", 2),
            ("two backwards", 3),
            ("accumulated before", 2),
        ],
    ),
)
def test_at_stage_0_buckets_change_no_bit(name, world_size):
    check_no_bit_changes(name, world_size)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name, options",
    [
        ("two backwards", {"accumulate": "sharded"}),
        ("mlp", {"reduce_dtype": torch.bfloat16}),
    ],
)
def test_at_stage_0_buckets_change_no_bit_of_other_averages(name, options):
    check_no_bit_changes(name, 3, **options)


def check_no_bit_changes(name, world_size, **options):
    """Ranks' values are added in their order, element by element; norms are of whole gradients."""
    captured = captured_step(name)
    alone = rewritten_by_rank(captured, world_size, stage=0, bucket=False, **options)
    together = rewritten_by_rank(captured, world_size, stage=0, **options)
    has_none = name in ("evaluation", "some are updated and read again")
    assert nodes_of(together[0], ops.all_reduce_bucket_start) or has_none
    assert_same_numerics(execute(alone), execute(together))


def range_of_a_neighbour(program):
    """Of the same length."""
    parts = [n for n in program.graph.nodes if role(n) == "reduced_gradient"]
    part = next(part for part in parts if part.args[2])
    part.args = (*part.args[:2], 0, part.args[3] - part.args[2])


def all_reduced_in_the_wrong_order(program):
    start = nodes_of(program, ops.all_reduce_bucket_start)[1]
    start.args = (start.args[0][::-1], *start.args[1:])


def all_reduced_without_one(program):
    start = nodes_of(program, ops.all_reduce_bucket_start)[1]
    start.args = (start.args[0][:1], start.args[1][:1], *start.args[2:])


def all_reduced_as_a_sum(program):
    start = nodes_of(program, ops.all_reduce_bucket_start)[1]
    start.args = (*start.args[:3], "sum")


@pytest.mark.parametrize(
    "mutate",
    [
        range_of_a_neighbour,
        all_reduced_in_the_wrong_order,
        all_reduced_without_one,
        all_reduced_as_a_sum,
    ],
    ids=lambda mutate: mutate.__name__,
)
def test_at_stage_0_a_broken_bucket_is_refused(mutate):
    programs = [clone(p) for p in rewritten_by_rank(mlp_step(3, width=4), stage=0)]
    for program in programs:
        verify(program.gm, program.table, {"averaged_gradients"})
        mutate(program)
        with pytest.raises(GraphError):
            verify(program.gm, program.table, {"averaged_gradients"})
    with pytest.raises((AssertionError, RuntimeError)):
        assert_same_numerics(execute(mlp_step(3, width=4)), execute(programs))


def test_a_gradient_of_the_right_shape_but_another_parameter_is_refused():
    torch.manual_seed(0)
    model = nn.Module()
    model.q, model.k = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))
    captured = trained(model, lambda m, x: ((x @ m.q) * (x @ m.k)).mean(), torch.randn(3, 4))
    for options in ({}, {"reduce_dtype": torch.bfloat16}):
        program = rewritten(captured, bucket=True, **options)
        (flat,) = nodes_of(program, ops.flatten_bucket)
        flat.args = (flat.args[0][::-1], *flat.args[1:])
        with pytest.raises(GraphError, match="as if it were the gradient of '[qk]'"):
            verify(program.gm, program.table, FACTS)


def test_the_simulator_wants_each_ranks_own_program():
    program = rewritten(mlp_step(), bucket=True)
    with pytest.raises(AssertionError, match="each rank's own program"):
        execute(program)
    with pytest.raises(AssertionError, match="programs are not by rank"):
        execute([program, clone(program)])
    with pytest.raises(AssertionError, match="schedules differ"):
        execute([program, rewritten(mlp_step(), rank=1)])


@pytest.mark.nightly
def test_the_simulator_sees_an_update_of_a_bucket_that_travels():
    """Shards are parts of the bucket's memory: who writes one while it is sent is found."""
    programs = [clone(program) for program in rewritten_by_rank(read_after_the_update())]
    for program in programs:
        (start, *_) = nodes_of(program, ops.all_gather_start)
        (wait,) = start.users
        update = nodes_of(program, ops.update)[0]
        with program.graph.inserting_before(update):
            pack = program.graph.node_copy(start.args[0])
            late = program.graph.node_copy(
                start, lambda n, p=pack, s=start: p if n is s.args[0] else n
            )
        with program.graph.inserting_after(nodes_of(program, ops.update)[-1]):
            program.graph.node_copy(wait, lambda n, x=late: x).meta = dict(wait.meta)
        pack.meta, late.meta = dict(start.args[0].meta), dict(start.meta)
    with pytest.raises(AssertionError, match="the input of .* changed before"):
        execute(programs)
