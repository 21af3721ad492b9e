"""A region's memory is known before it runs: it is what torch's allocator counts when it does."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.kit.allocations import Allocations
from tests.kit.small_regions import every_region_is_compiled  # noqa: F401
from zerofx import compat
from zerofx.cost.program import Lifetime
from zerofx.ir.interface import InputRole, set_input_role
from zerofx.lower import rehearsal
from zerofx.lower.regions import CompiledRegion
from zerofx.passes.fuse.form_regions import form_regions

aten = torch.ops.aten


def region_of(function, *inputs, donated=()) -> CompiledRegion:
    """The region that computes a function of such inputs."""
    traced = make_fx(function, tracing_mode="fake")(*inputs)
    graph = fx.Graph()
    values = graph.placeholder("values")
    compat.inductor.mark_emptied(values)
    copies = {}
    for at, node in enumerate(traced.graph.find_nodes(op="placeholder")):
        copies[node] = graph.call_function(operator.getitem, (values, at))
        copies[node].meta = dict(node.meta)
    for node in traced.graph.nodes:
        if node.op == "call_function":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    (results,) = traced.graph.output_node().args
    graph.output(fx.node.map_arg(results, copies.__getitem__))
    return CompiledRegion(fx.GraphModule({}, graph), list(donated))


def most_of(trace) -> int:
    """The most bytes that are there at once of what a region makes."""
    last = trace.num_moments

    def alive(at: int) -> int:
        ends = [last if of.end is None else of.end for of in trace.made]
        pairs = zip(trace.made, ends, strict=True)
        return sum(of.nbytes for of, end in pairs if of.begin <= at <= end)

    return max(map(alive, range(last)))


def counted(region, inputs) -> int:
    """The most bytes that torch's allocator counts in a second run, above what was there."""
    for _ in range(2):
        values = [value.clone() for value in inputs]
        with Allocations() as allocations:
            region(values)
    return allocations.peak_nbytes


def normed(x, weight):
    y = torch.tanh(F.layer_norm(x @ weight, (64,)))
    return ((y @ weight).sin() + y,)


def attended(x, weight):
    heads = (x @ weight).view(4, 16, 4, 16).transpose(1, 2)
    result = aten._scaled_dot_product_flash_attention_for_cpu(heads, heads, heads)
    return result[0].transpose(1, 2).reshape(64, 64) @ weight, result[1]


def convolved(x, weight):
    images = x.to(torch.bfloat16).view(4, 4, 16, 16)
    kernel = weight[:4, :36].reshape(4, 4, 3, 3).to(torch.bfloat16)
    once = aten.convolution(images, kernel, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    return (aten.convolution(once.relu(), kernel, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),)


def many_products(x, weight):
    found = [x @ weight for _ in range(3)]
    return torch.cat([one.exp() for one in found]).sum(0), found[0].amax(1)


@pytest.mark.slow(reason="kernels are compiled")
@pytest.mark.parametrize("function", (normed, attended, convolved, many_products))
def test_what_a_region_allocates_is_known_to_the_byte(function):
    inputs = torch.randn(64, 64), torch.randn(64, 64)
    region = region_of(function, *inputs)
    trace = rehearsal._traced(region)
    assert most_of(trace) == counted(region, inputs)


def swept(x, y):
    return ((x.exp() * y.sin() + 1).sum(0), x.cos() @ y)


def test_no_kernel_is_compiled_and_nothing_is_kept():
    region = region_of(swept, torch.randn(8, 8), torch.randn(8, 8))
    trace = rehearsal._traced(region)
    assert region.is_to_compile
    assert [place.in_input for place in trace.results] == [False, False]
    assert [of.nbytes for of in trace.made if of.end is None] == [8 * 4, 8 * 8 * 4]


@pytest.mark.usefixtures("every_region_is_compiled")
def test_a_result_lies_in_a_donated_input():
    def written_over(x):
        return (x.sin() * 2,)

    kept, given = (region_of(written_over, torch.randn(99), donated=d) for d in ((), (0,)))
    assert rehearsal._traced(kept).made == [Lifetime(0, None, 99 * 4)]
    trace = rehearsal._traced(given)
    assert trace.made == [] and trace.results == [(True, 0)]


def test_an_input_is_held_until_its_last_reader():
    def long(x, y):
        first = x @ y
        second = first @ first
        return (second @ second,)

    trace = rehearsal._traced(region_of(long, torch.randn(9, 9), torch.randn(9, 9)))
    # Two products are allocated and made; the third is written over the first.
    assert trace.made == [Lifetime(0, None, 4 * 81), Lifetime(2, 4, 4 * 81)]
    assert trace.held_until == [1, 1] and trace.num_moments == 5


def program_of(function, *inputs) -> fx.GraphModule:
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    for node in gm.graph.find_nodes(op="placeholder"):
        set_input_role(node, InputRole("other"))
    form_regions(gm, None)
    return gm


def layered(x, weight):
    for _ in range(20):
        x = torch.tanh((x @ weight).sin() * 2) + x
    return (x,)


def test_a_large_region_is_cut_between_layers_and_its_parts_are_alike(monkeypatch):
    monkeypatch.setattr(rehearsal, "MOST_OPERATORS", 40)
    monkeypatch.setattr(rehearsal, "_KNOWN", {})
    gm = program_of(layered, torch.randn(8, 8), torch.randn(8, 8))
    found = list(rehearsal.rehearsals_of(gm))
    assert [len(of.nodes) for of in found] == [25, 25, 25, 25]
    assert all(of.nodes[-1].target is aten.add.Tensor for of in found)
    assert len(rehearsal._KNOWN) == 2, "an input is not given away as a layer is"


def test_what_is_next_to_nothing_is_not_compiled(monkeypatch):
    monkeypatch.setattr(rehearsal, "_KNOWN", {})
    gm = program_of(lambda x: torch.linalg.vector_norm(x).sqrt(), torch.randn(1000, 1000))
    assert not list(rehearsal.rehearsals_of(gm)) and not rehearsal._KNOWN


def test_a_program_for_an_accelerator_is_compiled_for_the_cpu():
    def far(x):
        return (torch.arange(8, device=x.device) + x.sin().cos(),)

    with FakeTensorMode():
        region = region_of(far, torch.empty(8, 8, device="cuda"))
    trace = rehearsal._traced(region)
    assert trace.made == [Lifetime(0, None, 8 * 8 * 4)]


def test_what_inductor_cannot_compile_counts_operator_by_operator(monkeypatch):
    def refuse(*given):
        raise RuntimeError("no such thing")

    region = region_of(swept, torch.randn(8, 8), torch.randn(8, 8))
    compiled = rehearsal._traced(region)
    monkeypatch.setattr(rehearsal.compat.inductor, "compile_with_inductor", refuse)
    assert most_of(rehearsal._traced(region)) > most_of(compiled)


@torch.library.custom_op("tests::speechless", mutates_args=())
def speechless(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def test_a_region_that_does_not_run_without_memory_is_left_out(monkeypatch):
    """Its operator has no implementation for tensors without memory."""
    monkeypatch.setattr(rehearsal, "_KNOWN", {})
    graph = fx.Graph()
    x = graph.placeholder("x")
    set_input_role(x, InputRole("other"))
    node = graph.call_function(torch.ops.tests.speechless.default, (x,))
    sine = graph.call_function(aten.sin.default, (node,))
    graph.output((sine,))
    with FakeTensorMode():
        for each in (x, node, sine):
            each.meta["val"] = torch.empty(8)
    gm = fx.GraphModule({}, graph)
    form_regions(gm, None)
    assert list(rehearsal.rehearsals_of(gm)) == []
    assert list(rehearsal._KNOWN.values()) == [None]
