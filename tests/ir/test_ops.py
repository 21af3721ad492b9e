"""An operator's rules: complete for every operator, and enough for a new one to be known."""

import functools
import operator
from unittest import mock

import pytest
import torch
from torch import fx

from tests.kit.offloaded_programs import FACTS, OFFLOADED, refused
from tests.kit.programs import clone, mlp_step, nodes_of, rewritten
from zerofx.cost.program import live_bytes
from zerofx.cost.timeline import predict
from zerofx.cost.traffic import gathered_peak, wire_bytes
from zerofx.hardware import NOMINAL
from zerofx.ir import ops
from zerofx.ir.aliases import aliases, heirs_in
from zerofx.ir.collectives import schedule
from zerofx.ir.rules import _RULES, FILES, LINK, TO_DEVICE, TO_HOST, UPDATES, define
from zerofx.ir.sizes import value_bytes
from zerofx.replay.reference import Reference
from zerofx.report.python_text import target_text
from zerofx.runtime.file_operators import ProgramFiles
from zerofx.runtime.step import StepRuntime
from zerofx.verify.verifier import verify

aten = torch.ops.aten

TARGETS = tuple(_RULES)
OPERATORS = {target._schema.name: target for target in TARGETS}
REPLACED_BEFORE_A_PROGRAM_RUNS = (
    ops.gradient,
    ops.optimizer_step,
    ops.count,
    ops.loss_part,
    ops.over_ranks,
)


def test_thirty_five_operators_are_all():
    assert len(OPERATORS) == 35


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_has_a_meaning(name):
    assert callable(getattr(Reference, name.removeprefix("zerofx::")))


def test_every_operator_has_a_kernel_and_every_lane_a_wait():
    step, files = mock.MagicMock(), mock.MagicMock()
    files.kernels.side_effect = lambda: ProgramFiles.kernels(files)
    step.files = files
    kernels = StepRuntime.kernels(step)
    waits = {target for target in TARGETS if _RULES[target].waits}
    assert {one for one in kernels if not isinstance(one, tuple)} == {
        *set(TARGETS) - waits - set(REPLACED_BEFORE_A_PROGRAM_RUNS)
    }
    lanes = (LINK, TO_HOST, TO_DEVICE, UPDATES, FILES)
    assert {one for one in kernels if isinstance(one, tuple)} == {(ops.wait, at) for at in lanes}


def test_what_starts_is_waited_for_and_has_a_lane_and_bytes():
    program = rewritten(mlp_step(), stage=3, **OFFLOADED)
    starts = [node for node in program.graph.nodes if ops.starts(node)]
    assert {ops.lane(start) for start in starts} == {LINK, TO_HOST, TO_DEVICE, UPDATES}
    for start in starts:
        rules = ops.rules(start)
        assert rules.sends(start) > 0 or rules.carries(start, program.table) > 0
        assert [ops.waits_on(user) for user in start.users if ops.is_wait(user)] == [
            ops.lane(start)
        ]


@functools.cache
def gather_in_int8():
    """An operator that no file of the product knows: shards travel as a quarter of their bytes."""

    @define(
        "gather_in_int8_start(Tensor shard, int world_size, str axis='data') -> Tensor",
        lane=LINK,
        starts=True,
        gathers=True,
        uniform=True,
        sends=lambda node: value_bytes(node) // 4,
        traffic=lambda node: "gathers",
        holds="gathered parameters",
    )
    def gather_in_int8_start(shard, world_size, axis="data"):
        return shard.new_empty(shard.shape[0] * world_size)

    return gather_in_int8_start


@pytest.fixture
def programs():
    """A program, and one that gathers in int8."""
    new = gather_in_int8()
    before = rewritten(mlp_step(), stage=3, bucket=True)
    after = clone(before)
    for start in nodes_of(after, ops.all_gather_start):
        start.target = new
    return before, after


def test_a_new_operator_is_verified_by_its_definition_alone(programs):
    _, program = programs
    verify(program.gm, program.table, FACTS)
    start = nodes_of(program, gather_in_int8())[0]
    (wait,) = start.users
    wait.replace_all_uses_with(start)
    program.graph.erase_node(wait)
    refused(program, "must have one wait and no other reader")


def test_a_new_operator_costs_what_its_definition_says(programs):
    before, after = programs
    bytes_before, bytes_after = wire_bytes(before.gm, 2), wire_bytes(after.gm, 2)
    assert bytes_after.gathers * 4 == bytes_before.gathers > 0
    assert bytes_after.num_collectives == bytes_before.num_collectives
    assert gathered_peak(after.gm, after.table) == gathered_peak(before.gm, before.table)
    assert live_bytes(after.graph, 2) == live_bytes(before.graph, 2)
    whole, quarter = (predict(p.graph, NOMINAL, p.table, 2) for p in programs)
    assert quarter.transfer_s < whole.transfer_s


def test_a_new_operator_is_agreed_on_and_printed_by_its_name(programs):
    _, program = programs
    start = nodes_of(program, gather_in_int8())[0]
    lines = schedule(program.gm, program.table, 3)
    assert any(line.startswith("gather_in_int8 ") for line in lines)
    assert target_text(start.target) == "zerofx.gather_in_int8_start"
    assert start in aliases(start.args[0], heirs_in(start.graph))  # as in a world of one


@pytest.mark.parametrize("unsafe", (aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default))
def test_parts_of_an_unsafe_split_share_its_memory(unsafe):
    graph = fx.Graph()
    x = graph.placeholder("x")
    parts = graph.call_function(unsafe, (x, 2))
    part = graph.call_function(operator.getitem, (parts, 0))
    assert part in aliases(x, heirs_in(graph))


def test_a_collective_names_the_axis_whose_ranks_it_is_between(programs):
    before, _ = programs
    (start, *_) = nodes_of(before, ops.all_gather_start)
    assert ops.argument(start, "axis") == ops.DATA
    start.kwargs = {"axis": "node"}
    refused(before, "is over axis 'node', and the mesh has 'data'")
    with pytest.raises(ValueError, match="say which, with str axis='data'"):
        define("gather_of_nobody_start(Tensor shard) -> Tensor", lane=LINK, starts=True)(None)
