"""The least part of two programs that differs: what is cut out, and what has to come along."""

import torch

from tests.kit.programs import clone, context_of, mlp_step, nodes_of, rewritten, smallest_step
from zerofx.ir import ops
from zerofx.ir.interface import input_role, placeholders
from zerofx.replay.minimal import compare_by_name, cut_out, minimal
from zerofx.replay.replayed import ObservedProgram

aten = torch.ops.aten


def names(gm):
    return [node.name for node in gm.graph.nodes if node.op != "output"]


def observed(program):
    """Both ranks' programs, as they were captured: with no optimizer to be rebuilt."""
    known = dict.fromkeys(program.optimizers, {"class": "SGD", "omitted": ["all"]})
    return [ObservedProgram.of(program.gm, context_of(program, rank), known) for rank in (0, 1)]


def test_what_leads_from_given_values_to_the_end_is_all_there_is():
    program = mlp_step(2)
    gelu, last = nodes_of(program, aten.gelu.default)[0], nodes_of(program, aten.addmm.default)[1]
    cut = cut_out(program.gm, last.name, {gelu.name: True})
    cut.graph.lint()
    inputs = {node.name: input_role(node).kind for node in placeholders(cut.graph)}
    assert inputs == {
        "parameter_2_weight": "parameter",
        "parameter_2_bias": "parameter",
        gelu.name: "buffer",  # the same on all ranks, as a buffer is
    }
    assert sorted(set(names(cut)) - set(inputs)) == sorted([last.name, last.args[2].name])


def test_a_value_of_a_ranks_own_stays_one():
    program = mlp_step(2)
    gelu, last = nodes_of(program, aten.gelu.default)[0], nodes_of(program, aten.addmm.default)[1]
    cut = cut_out(program.gm, last.name, {gelu.name: False})
    (own,) = [node for node in placeholders(cut.graph) if node.name == gelu.name]
    assert input_role(own).kind == "other"


def test_what_is_written_to_is_no_input_and_its_writer_comes_along():
    program = rewritten(smallest_step(), stage=1)
    (cut,), (update,) = (nodes_of(program, target) for target in (ops.take_shard, ops.update))
    (gather,) = nodes_of(program, ops.all_gather_start)
    least = cut_out(program.gm, gather.name, {cut.name: False, update.name: False})
    assert {cut.name, update.name} <= set(names(least)) - {
        node.name for node in placeholders(least.graph)
    }


def test_two_programs_that_agree_have_no_such_part():
    program = clone(mlp_step(2))
    both = observed(program), observed(program)
    first, given = compare_by_name(*both, rank=0, same=torch.equal)
    assert first is None and len(given) > 10
    gelu = next(n for n in program.graph.nodes if n.target is aten.gelu.default)
    assert minimal(*both, gelu, given, torch.equal) is None


def test_the_part_differs_as_the_whole_does():
    program = clone(mlp_step(2))
    before = observed(program)
    mul = next(n for n in program.graph.nodes if n.target is aten.gelu.default)
    with program.graph.inserting_after(mul):
        twice = program.graph.call_function(aten.mul.Tensor, (mul, 2.0))
    twice.meta = dict(mul.meta)
    mul.replace_all_uses_with(twice, delete_user_cb=lambda user: user is not twice)
    after = observed(program)
    first, given = compare_by_name(before, after, rank=0, same=torch.equal)
    assert first is not None and first.target is aten.addmm.default
    parts = minimal(before, after, first, given, torch.equal)
    assert parts is not None
    one, other = (len(names(everyone[0].module())) for everyone in parts)
    assert other == one + 1 and one <= 5
