"""write_back: buckets that may be written before the program's last copies, and no others."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from tests.kit.programs import Captured, capture, clone, context_of, mlp_step, nodes_of, rewritten
from zerofx.errors import GraphError
from zerofx.ir import ops
from zerofx.ir.graph import Builder
from zerofx.ir.interface import input_role, placeholders
from zerofx.passes.fuse.write_back import write_back
from zerofx.passes.manager import run_pipeline
from zerofx.passes.pipeline import PIPELINE
from zerofx.verify.verifier import verify

aten = torch.ops.aten


@pytest.fixture(params=[1, 2])
def program(request):
    return rewritten(mlp_step(), stage=request.param, bucket=True, update_in_backward=True)


def written_back(program: Captured) -> Captured:
    """A copy of the program after the pass."""
    copy = clone(program)
    write_back(copy.gm, context_of(copy, stage=1, bucket=True))
    return copy


def found_in(program: Captured) -> set[frozenset[int]]:
    return {frozenset(node.args[2]) for node in nodes_of(written_back(program), ops.write_back)}


def one_bucket(program: Captured) -> tuple[frozenset[int], list[fx.Node]]:
    """The parameters of some bucket, and the copies into them."""
    copies = {input_role(n.args[0]).parameter: n for n in nodes_of(program, aten.copy_.default)}
    bucket = min(all_buckets(program), key=sorted)
    return bucket, [copy for parameter, copy in copies.items() if parameter in bucket]


def all_buckets(program: Captured) -> set[frozenset[int]]:
    numbers = {info.place.bucket for info in program.table}
    return {frozenset(i.index for i in program.table if i.place.bucket == n) for n in numbers}


def value_of(program: Captured, parameter: int) -> fx.Node:
    values = placeholders(program.graph, "parameter")
    return next(node for node in values if input_role(node).parameter == parameter)


def update_of(program: Captured, parameter: int) -> fx.Node:
    return next(node for node in nodes_of(program, ops.update) if node.args[3] == parameter)


def return_too(program: Captured, node: fx.Node) -> None:
    output = program.graph.output_node()
    output.args = ((*output.args[0], node),)


def test_every_bucket_of_an_ordinary_step_is_found(program):
    assert found_in(program) == all_buckets(program)


@pytest.mark.parametrize("stage", [0, 3])
def test_stages_without_whole_parameters_and_shards_have_none(stage):
    assert not found_in(rewritten(mlp_step(), stage=stage, bucket=True))


def test_clipping_by_the_norm_of_all_gradients_does_not_matter():
    program = rewritten(mlp_step(clip=True), stage=2, bucket=True, update_in_backward=True)
    assert found_in(program) == all_buckets(program)


@pytest.mark.parametrize("through", ["the value", "a view", "another cut"])
def test_who_reads_the_old_value_after_the_update_keeps_its_bucket_out(program, through):
    builder = Builder(program.gm, "test", program.table)
    seen, update = value_of(program, 0), update_of(program, 0)
    with program.graph.inserting_before(update):
        if through == "a view":
            seen = builder.call(aten.alias.default, seen, role="test")
        elif through == "another cut":
            numel = program.table[0].shard_numel
            seen = builder.call(ops.take_shard, seen, 0, numel, role="test")
    with program.graph.inserting_after(update):
        return_too(program, builder.call(aten.neg.default, seen, role="test"))
    assert found_in(program) == {b for b in all_buckets(program) if 0 not in b}


def test_who_reads_the_old_value_before_the_update_does_not_matter(program):
    builder = Builder(program.gm, "test", program.table)
    with program.graph.inserting_before(update_of(program, 0)):
        return_too(program, builder.call(aten.neg.default, value_of(program, 0), role="test"))
    assert found_in(program) == all_buckets(program)


def test_a_gathered_value_that_leaves_the_program_keeps_its_bucket_out(program):
    bucket, writes = one_bucket(program)
    return_too(program, writes[0].args[1])
    assert found_in(program) == all_buckets(program) - {bucket}


def test_a_write_to_a_gathered_value_keeps_its_bucket_out(program):
    bucket, writes = one_bucket(program)
    builder = Builder(program.gm, "test", program.table)
    with program.graph.inserting_after(writes[-1]):
        builder.call(aten.mul_.Tensor, writes[0].args[1], 2, role="test")
    assert found_in(program) == all_buckets(program) - {bucket}


def test_a_part_of_a_bucket_is_none():
    """Of a layer whose weight and bias have optimizers of their own, each is gathered alone."""
    torch.manual_seed(0)
    layer = nn.Linear(5, 3)
    weights = torch.optim.SGD([layer.weight], lr=0.1)
    biases = torch.optim.SGD([layer.bias], lr=0.1)

    def step(x):
        loss = layer(x).pow(2).mean()
        loss.backward()
        weights.step()
        half = layer(x).pow(2).mean()
        biases.step()
        return loss, half

    program = rewritten(capture(step, torch.randn(4, 5), world_size=2), stage=2, bucket=True)
    assert {info.place.bucket for info in program.table} == {0}
    assert not found_in(program)


def test_two_updates_of_a_parameter_keep_its_bucket_out():
    torch.manual_seed(0)
    layer = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def step(x):
        for _ in range(2):
            optimizer.zero_grad()
            loss = layer(x).pow(2).mean()
            loss.backward()
            optimizer.step()
        return loss

    program = rewritten(capture(step, torch.randn(4, 5), world_size=2), stage=2, bucket=True)
    assert len(nodes_of(program, ops.update)) == 4 and not found_in(program)


def test_one_node_stands_for_the_copies_of_a_bucket(program):
    after = written_back(program)
    assert not nodes_of(after, aten.copy_.default)
    for node in nodes_of(after, ops.write_back):
        gathered, wholes, parameters = node.args
        assert gathered.target is ops.wait
        assert [input_role(whole).parameter for whole in wholes] == parameters
    verify(after.gm, after.table, {"averaged_gradients", "sharded_updates"})


def test_a_read_of_the_old_value_behind_the_update_is_rejected(program):
    after = written_back(program)
    builder = Builder(after.gm, "test", after.table)
    with after.graph.inserting_after(update_of(after, 0)):
        return_too(after, builder.call(aten.neg.default, value_of(after, 0), role="test"))
    with pytest.raises(GraphError, match="may have written it in place"):
        verify(after.gm, after.table, {"averaged_gradients"})


def test_a_parameter_of_another_bucket_is_rejected(program):
    after = written_back(program)
    one, other = nodes_of(after, ops.write_back)[:2]
    one.args, other.args = (one.args[0], *other.args[1:]), (other.args[0], *one.args[1:])
    with pytest.raises(GraphError, match="does not write back the parameters that"):
        verify(after.gm, after.table, {"averaged_gradients"})


def test_a_value_for_another_parameter_is_rejected(program):
    after = written_back(program)
    node = next(n for n in nodes_of(after, ops.write_back) if len(n.args[2]) > 1)
    node.args = (node.args[0], list(reversed(node.args[1])), node.args[2])
    with pytest.raises(GraphError, match="does not write to the parameters that it names"):
        verify(after.gm, after.table, {"averaged_gradients"})


def test_requires_sharded_updates():
    (alone,) = [step for step in PIPELINE if step.name == "write_back"]
    program = rewritten(mlp_step(), stage=1, until="data_parallel")
    with pytest.raises(GraphError, match="'write_back' requires sharded_updates"):
        run_pipeline(program.gm, context_of(program, stage=1, bucket=True), [alone])
