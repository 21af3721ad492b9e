"""merge_updates: updates of one optimizer that follow one another are one, and no others."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import nn

from tests.kit.programs import capture, clone, context_of, mlp_step, nodes_of, rewritten
from tests.passes.test_fold_gradient_work import Program
from zerofx.errors import GraphError
from zerofx.ir import ops
from zerofx.ir.aliases import aliases, mutated_inputs
from zerofx.ir.graph import updates
from zerofx.ir.offload import operands_of_updates
from zerofx.passes.fuse.fold_gradient_work import fold_gradient_work
from zerofx.passes.fuse.merge_updates import merge_updates
from zerofx.passes.manager import run_pipeline
from zerofx.passes.pipeline import PIPELINE
from zerofx.verify.verifier import verify

aten = torch.ops.aten
FACTS = {"averaged_gradients", "sharded_updates"}


@pytest.fixture
def program():
    return Program()


@pytest.fixture
def shards(program):
    """Two shards of parameters, and a gradient for each."""
    p, q = (program.input(name, 6, kind="parameter") for name in "pq")
    return p, q, program.input("g", 6), program.input("h", 6)


def merged(program, *results):
    program.output(results)
    counts = merge_updates(program.module(), None)
    program.lint()
    return counts, program.updates()


def test_neighbours_are_one_call_whose_results_are_theirs(program, shards):
    p, q, g, h = shards
    one, other = program.update(p, g), program.update(q, h, 1)
    counts, (together,) = merged(program, one, other)
    assert counts == {"updates": 2, "calls": 1}
    assert together.args[:4] == ([p, q], [g, h], 1, [0, 1])
    parts = program.output_node().args[0]
    assert [part.args for part in parts] == [(together, 0), (together, 1)]
    assert {part.target for part in parts} == {operator.getitem}


def test_a_part_is_the_memory_of_its_own_shard_alone(program, shards):
    p, q, g, h = shards
    _, (together,) = merged(program, program.update(p, g), program.update(q, h, 1))
    first, second = program.output_node().args[0]
    assert mutated_inputs(together) == [p, q]
    assert first in aliases(p) and second not in aliases(p)


def test_a_view_of_a_gradient_may_stand_between(program, shards):
    p, q, g, h = shards
    one = program.update(p, g)
    part = program.call(aten.view.default, h, [6])
    _, (together,) = merged(program, one, program.update(q, part, 1))
    assert together.args[1] == [g, part]


def test_compute_between_them_keeps_updates_apart(program, shards):
    p, q, g, h = shards
    one = program.update(p, g)
    doubled = program.call(aten.mul.Tensor, h, 2)
    counts, _ = merged(program, one, program.update(q, doubled, 1))
    assert counts == {"updates": 2, "calls": 2}


def test_what_reads_a_new_value_is_behind_it(program, shards):
    p, q, g, h = shards
    one = program.update(p, g)
    counts, _ = merged(program, program.update(q, program.call(aten.view.default, one, [6]), 1))
    assert counts["calls"] == 2


def test_optimizers_keep_their_updates_apart(program, shards):
    p, q, g, h = shards
    one = program.call(ops.update, p, g, 1, 0, None)
    other = program.call(ops.update, q, h, 2, 1, None)
    assert merged(program, one, other)[0]["calls"] == 2


def test_other_work_on_the_gradient_keeps_updates_apart(program, shards):
    p, q, g, h = shards
    half = program.input("half")
    one = program.update(p, program.call(aten.mul.Tensor, g, half))
    other = program.update(q, program.call(aten.div.Tensor, h, half), 1)
    program.output((one, other))
    fold_gradient_work(program.module(), None)
    counts = merge_updates(program.module(), None)
    assert counts == {"updates": 2, "calls": 2}


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_step_has_the_updates_that_it_had(stage):
    program = rewritten(mlp_step(), stage=stage, bucket=True, update_in_backward=True)
    before = updates(program.graph)
    operands = [u.parameter for node in program.graph.nodes for u in operands_of_updates(node)]
    assert merge_updates(program.gm, context_of(program, stage=stage))["updates"] == len(operands)
    assert updates(program.graph) == before and not nodes_of(program, ops.update)
    verify(program.gm, program.table, FACTS if stage else {"averaged_gradients"})


def test_an_evaluation_is_left_alone():
    model = nn.Linear(4, 2)
    program = rewritten(capture(lambda x: model(x).detach(), torch.ones(3, 4)), stage=3)
    assert merge_updates(program.gm, None) == {"updates": 0, "calls": 0}


def test_a_read_of_an_old_value_behind_them_is_rejected():
    program = rewritten(mlp_step(), stage=3, bucket=True)
    merge_updates(program.gm, None)
    together = nodes_of(program, ops.update_together)[-1]
    with program.graph.inserting_after(together):
        read = program.graph.call_function(aten.neg.default, (together.args[0][0],))
    read.meta["val"] = together.args[0][0].meta["val"]
    with pytest.raises(GraphError, match="after .* has overwritten it|as if it were whole"):
        verify(program.gm, program.table, FACTS)


def test_requires_averaged_gradients():
    (alone,) = [step for step in PIPELINE if step.name == "merge_updates"]
    program = clone(mlp_step())
    with pytest.raises(GraphError, match="'merge_updates' requires averaged_gradients"):
        run_pipeline(program.gm, context_of(program, lowering="inductor"), [alone])
