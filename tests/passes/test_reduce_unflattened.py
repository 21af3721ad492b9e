"""reduce_unflattened: a buffer that only its reduction reads is left to the reduction."""

from __future__ import annotations

import pytest

from tests.kit.programs import clone, context_of, mlp_step, nodes_of, rewritten, run_passes
from zerofx.cost.traffic import wire_bytes
from zerofx.errors import GraphError
from zerofx.ir import ops
from zerofx.passes.fuse.reduce_unflattened import reduce_unflattened
from zerofx.passes.manager import run_pipeline
from zerofx.passes.pipeline import PIPELINE
from zerofx.verify.verifier import verify

FACTS = {"averaged_gradients", "sharded_updates"}


@pytest.fixture
def program():
    return rewritten(mlp_step(), stage=2, bucket=True)


def test_a_bucket_is_reduced_from_where_its_gradients_lie(program):
    flats = {start: start.args[0] for start in nodes_of(program, ops.reduce_scatter_start)}
    gradients = [list(flat.args[0]) for flat in flats.values()]
    names = [start.name for start in flats]
    sent = wire_bytes(program.gm, program.world_size)
    counts = reduce_unflattened(program.gm, None)
    starts = nodes_of(program, ops.reduce_bucket_start)
    assert counts == {"buckets": len(flats)} and not nodes_of(program, ops.flatten_bucket)
    assert [list(start.args[0]) for start in starts] == gradients
    assert [start.name for start in starts] == names
    assert wire_bytes(program.gm, program.world_size) == sent
    verify(program.gm, program.table, FACTS)


def test_a_buffer_that_something_else_reads_stays(program):
    flat = nodes_of(program, ops.flatten_bucket)[0]
    output = program.graph.output_node()
    output.args = ((*output.args[0], flat),)
    reduce_unflattened(program.gm, None)
    assert nodes_of(program, ops.flatten_bucket) == [flat]


def test_parameters_without_buckets_are_left_alone():
    program = rewritten(mlp_step(), stage=2, bucket=False)
    before = len(nodes_of(program, ops.reduce_scatter_start))
    reduce_unflattened(program.gm, None)
    assert len(nodes_of(program, ops.reduce_scatter_start)) == before > 0


def test_gradients_of_another_bucket_are_rejected(program):
    reduce_unflattened(program.gm, None)
    one, other = nodes_of(program, ops.reduce_bucket_start)[:2]
    one.args, other.args = (other.args[0], *one.args[1:]), (one.args[0], *other.args[1:])
    with pytest.raises(GraphError, match="as if it were the gradient of|of one bucket"):
        verify(program.gm, program.table, FACTS)


def test_a_budget_counts_the_buffer():
    program = clone(mlp_step())
    reports = run_passes(
        program, stage=3, until="reduce_unflattened", bucket=True, memory_budget=1 << 20
    )
    assert "memory_budget" in reports["reduce_unflattened"].skipped


def test_requires_averaged_gradients():
    (alone,) = [step for step in PIPELINE if step.name == "reduce_unflattened"]
    program = clone(mlp_step())
    with pytest.raises(GraphError, match="'reduce_unflattened' requires averaged_gradients"):
        run_pipeline(program.gm, context_of(program), [alone])
