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
from zerofx.ir.interface import mark_gradient, region_of, set_region
from zerofx.ir.regions import numbered
from zerofx.ir.roles import Provenance, Role
from zerofx.passes.fuse.form_regions import form_regions
from zerofx.verify.verifier import verify

aten = torch.ops.aten
FACTS = {"averaged_gradients", "sharded_updates"}


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
    x, box = graph.placeholder("x"), graph.placeholder("box")
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
    x = graph.placeholder("x")
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
    x = graph.placeholder("x")
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
