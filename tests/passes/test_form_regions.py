"""form_regions: runs of compute between our operators have numbers, and views of their own."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from tests.kit.programs import clone, context_of, mlp_step, rewritten, run_passes
from zerofx.errors import GraphError
from zerofx.ir import ops
from zerofx.ir.aliases import aliased_inputs, mutated_inputs
from zerofx.ir.interface import (
    InputRole,
    mark_gradient,
    region_of,
    set_input_role,
    set_region,
)
from zerofx.ir.regions import numbered
from zerofx.ir.roles import Provenance, Role
from zerofx.passes.fuse.form_regions import form_regions
from zerofx.verify.verifier import verify

aten = torch.ops.aten
FACTS = {"averaged_gradients", "sharded_updates"}


def _inputs(graph: fx.Graph, *names: str) -> list[fx.Node]:
    inputs = [graph.placeholder(name) for name in names]
    for node in inputs:
        set_input_role(node, InputRole("other"))
    return inputs


@pytest.fixture
def program():
    program = rewritten(mlp_step(), stage=3, bucket=True)
    form_regions(program.gm, None)
    return program


def test_every_run_of_compute_is_a_region(program):
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    for node in nodes:
        assert (region_of(node) is None) == ops.is_ours(node.target) or mutated_inputs(node)
    numbers = [region_of(node) for node in nodes if region_of(node) is not None]
    assert numbers == sorted(numbers) and len(set(numbers)) > 2
    verify(program.gm, program.table, FACTS)


def test_a_view_is_taken_where_it_is_read():
    graph = fx.Graph()
    x, box = _inputs(graph, "x", "box")
    sine = graph.call_function(aten.sin.default, (x,))
    turned = graph.call_function(aten.t.default, (sine,))
    written = graph.call_function(aten.zero_.default, (box,))
    twice = graph.call_function(aten.mul.Tensor, (turned, 2))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(2, 2)
    graph.output((twice,))
    assert form_regions(fx.GraphModule({}, graph), None) == {"regions": 2}
    (own,) = aliased_inputs(twice) or [twice.args[0]]
    assert own.target is aten.t.default and region_of(own) == region_of(twice)
    assert region_of(twice) != region_of(sine) and region_of(written) is None
    assert turned not in graph.nodes


def test_what_backward_computes_again_begins_a_region():
    graph = fx.Graph()
    (x,) = _inputs(graph, "x")
    sine = graph.call_function(aten.sin.default, (x,))
    loss = graph.call_function(aten.cos.default, (sine,))
    again = graph.call_function(aten.sin.default, (x,))
    after = graph.call_function(aten.mul.Tensor, (again, loss))
    last = graph.call_function(aten.sin.default, (after,))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(2, 2)
    graph.output((last,))
    for node in (again, last):
        node.meta["zerofx"] = Provenance(Role.RECOMPUTE, -1, "test")
    for node in (again, after, last):
        node.meta["autograd_backward"] = True
    assert form_regions(fx.GraphModule({}, graph), None) == {"regions": 2}
    assert region_of(sine) == region_of(loss) != region_of(again)
    assert region_of(again) == region_of(after) == region_of(last)


@pytest.mark.parametrize("late, regions", [(True, 2), (False, 1)], ids=["late", "at once"])
@pytest.mark.parametrize("is_cast", [True, False], ids=["cast", "uncast"])
def test_a_sum_of_gradients_of_products_long_done_begins_a_region(late, regions, is_cast):
    graph = fx.Graph()
    (x,) = _inputs(graph, "x")
    first, *others = (graph.call_function(aten.mm.default, (x, x)) for _ in range(3))
    term = graph.call_function(aten.t.default, (first if late else others[0],))
    if is_cast:
        term = graph.call_function(aten._to_copy.default, (term,), {"dtype": torch.float64})
    total = graph.call_function(aten.add.Tensor, (term, others[1]))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(2, 2)
    mark_gradient(total, 0)
    graph.output((first, total))
    assert form_regions(fx.GraphModule({}, graph), None) == {"regions": regions}


def test_nothing_is_done_without_inductor():
    program = clone(mlp_step())
    reports = run_passes(program, stage=1, until="form_regions", bucket=True)
    assert "needs inductor" in reports["form_regions"].skipped
    assert all(region_of(node) is None for node in program.graph.nodes)


def test_a_region_that_begins_again_is_rejected(program):
    first, *_, last = [node for node in program.graph.nodes if region_of(node) is not None]
    set_region(last, region_of(first))
    with pytest.raises(GraphError, match="which has ended before it"):
        verify(program.gm, program.table, FACTS)


def test_an_operator_of_ours_in_a_region_is_rejected(program):
    gather = next(node for node in program.graph.nodes if node.target is ops.all_gather_start)
    set_region(gather, 10_000)
    with pytest.raises(GraphError, match="and is none of its compute"):
        verify(program.gm, program.table, FACTS)


def test_the_same_step_has_the_same_regions(program):
    again = rewritten(mlp_step(), stage=3, bucket=True)
    form_regions(again.gm, context_of(again))
    assert list(map(region_of, again.graph.nodes)) == list(map(region_of, program.graph.nodes))


def test_one_of_several_results_stays_with_what_made_them_though_it_is_taken_again():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(1, 4)
    made = graph.call_function(aten.native_layer_norm.default, (x, [4], None, None, 1e-5))
    made.meta["val"] = aten.native_layer_norm.default(x.meta["val"], [4], None, None, 1e-5)
    again = graph.call_function(operator.getitem, (made, 0))
    again.meta["val"] = made.meta["val"][0]
    again.meta["zerofx"] = Provenance(Role.RECOMPUTE, -1, "recompute")
    graph.output((again,))
    assert [number for _, number in numbered([made, again])] == [0, 0]


def _layers(graph: fx.Graph, box: fx.Node, x: fx.Node, value: fx.Node) -> list[fx.Node]:
    """Three regions that read a value, with a write to ``box`` between them."""
    found = []
    for _ in range(3):
        x = graph.call_function(aten.mul.Tensor, (x, value))
        graph.call_function(aten.zero_.default, (box,))
        found.append(x)
    graph.output((x,))
    for node in graph.nodes:
        node.meta.setdefault("val", torch.empty(2, 2))
    return found


@pytest.mark.parametrize("value", ["of the batch", "of a constant", "of a view"])
def test_what_layers_share_is_computed_before_the_first(value):
    graph = fx.Graph()
    tokens, box, weight = _inputs(graph, "tokens", "box", "weight")
    set_input_role(weight, InputRole("parameter", 0))
    x = graph.call_function(aten.sin.default, (weight,))
    graph.call_function(aten.zero_.default, (box,))
    source = {
        "of the batch": lambda: tokens,
        "of a constant": lambda: graph.call_function(aten.arange.default, (2,)),
        "of a view": lambda: graph.call_function(aten.t.default, (tokens,)),
    }[value]()
    angles = graph.call_function(aten.cos.default, (source,))
    turned = graph.call_function(aten.t.default, (angles,))
    first, *others = _layers(graph, box, x, turned)
    form_regions(fx.GraphModule({}, graph), None)
    assert region_of(angles) == region_of(x) != region_of(first)
    regions = [
        [n for n in graph.nodes if region_of(n) == region_of(one)] for one in (first, *others)
    ]
    assert len({tuple(str(node.target) for node in nodes) for nodes in regions}) == 1


def test_several_results_of_which_layers_share_one_are_moved_together():
    """A region returns tensors, and no tuple of them."""
    graph = fx.Graph()
    tokens, box, weight = _inputs(graph, "tokens", "box", "weight")
    set_input_role(weight, InputRole("parameter", 0))
    x = graph.call_function(aten.sin.default, (weight,))
    graph.call_function(aten.zero_.default, (box,))
    largest = graph.call_function(aten.max.dim, (tokens, 1))
    largest.meta["val"] = torch.empty(2), torch.empty(2, dtype=torch.int64)
    values, places = (graph.call_function(operator.getitem, (largest, at)) for at in (0, 1))
    x = graph.call_function(aten.mul.Tensor, (x, places))
    _layers(graph, box, x, values)
    form_regions(fx.GraphModule({}, graph), None)
    assert region_of(largest) == region_of(values) == region_of(places) != region_of(x)


def _of_a_parameter(graph, tokens, box, weight):
    return graph.call_function(aten.cos.default, (weight,))


def _drawn(graph, tokens, box, weight):
    return graph.call_function(aten.rand_like.default, (tokens,))


def _written_to_meanwhile(graph, tokens, box, weight):
    return graph.call_function(aten.cos.default, (box,))


@pytest.mark.parametrize("made", [_of_a_parameter, _drawn, _written_to_meanwhile])
def test_nothing_else_is_moved(made):
    graph = fx.Graph()
    tokens, box, weight = inputs = _inputs(graph, "tokens", "box", "weight")
    set_input_role(weight, InputRole("parameter", 0))
    x = graph.call_function(aten.sin.default, (weight,))
    graph.call_function(aten.zero_.default, (box,))
    value = made(graph, *inputs)
    first, *_ = _layers(graph, box, x, value)
    form_regions(fx.GraphModule({}, graph), None)
    assert region_of(value) == region_of(first) != region_of(x)


def test_what_one_layer_and_its_backward_read_stays():
    graph = fx.Graph()
    tokens, box, weight = _inputs(graph, "tokens", "box", "weight")
    set_input_role(weight, InputRole("parameter", 0))
    x = graph.call_function(aten.sin.default, (weight,))
    graph.call_function(aten.zero_.default, (box,))
    value = graph.call_function(aten.cos.default, (tokens,))
    first = graph.call_function(aten.mul.Tensor, (x, value))
    graph.call_function(aten.zero_.default, (box,))
    graph.output((graph.call_function(aten.mul.Tensor, (first, value)),))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(2, 2)
    form_regions(fx.GraphModule({}, graph), None)
    assert region_of(value) == region_of(first) != region_of(x)
