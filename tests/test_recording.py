"""A record says what the timeline predicts and what memory holds, kind by kind, and no more."""

import functools
import itertools

import pytest
import torch

from tests.models import Gpt, language_loss, tokens
from tests.programs import (
    Captured,
    capture,
    context_of,
    evaluation,
    gathered_bytes,
    mlp_step,
    nodes_of,
    rewritten,
)
from zerofx.cost.program import live_bytes
from zerofx.cost.timeline import predict
from zerofx.hardware import parse
from zerofx.ir import ops
from zerofx.ir.graph import updates
from zerofx.report.timeline.record import LANES, StepRecord
from zerofx.report.timeline.recording import record_of

LINK = "latency_s=1e-6 bytes_per_s=1e9 flops_per_s=1e9 memory_bytes_per_s=1e9"
AWAY = {"offload": "optimizer,activations,params", "update_in_backward": True}
FILED = {**AWAY, "offload_tier": "nvme", "offload_dir": "scratch"}
STATE_BYTES = 8.0


def recorded(program: Captured, **options) -> StepRecord:
    """The record of a program after its passes, with Adam's states in float32."""
    ctx = context_of(program)
    kept = dict.fromkeys(updates(program.graph), STATE_BYTES)
    return record_of(
        program.graph, program.table, parse(LINK), ctx.world_size, state_bytes=kept, **options
    )


@functools.cache
def accumulating() -> Captured:
    """Two microbatches, whose gradients are added up before one update."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.GELU(), torch.nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x, y):
        for batch in (x, y):
            model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return capture(step, torch.randn(4, 5), torch.randn(4, 5), world_size=2)


@functools.cache
def recomputing() -> Captured:
    model = Gpt(layers=2, checkpoint=True)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(inputs, targets):
        loss = language_loss(model, inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return capture(step, *tokens(0, 4), world_size=2)


PROGRAMS = [
    pytest.param(lambda: rewritten(mlp_step(clip=True), stage=0), id="stage 0"),
    pytest.param(lambda: rewritten(mlp_step(clip=True), stage=1), id="stage 1"),
    pytest.param(lambda: rewritten(mlp_step(clip=True), stage=2, bucket=True), id="stage 2"),
    pytest.param(lambda: rewritten(mlp_step(clip=True), bucket=True), id="stage 3"),
    pytest.param(lambda: rewritten(mlp_step(), prefetch_across_steps=True), id="across steps"),
    pytest.param(lambda: rewritten(mlp_step(), **AWAY), id="offload"),
    pytest.param(lambda: rewritten(mlp_step(), **FILED), id="files"),
    pytest.param(lambda: mlp_step(), id="captured"),
    pytest.param(accumulating, id="two backwards"),
    pytest.param(lambda: rewritten(recomputing()), id="checkpointed"),
    pytest.param(lambda: rewritten(evaluation()), id="evaluation"),
]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("sockets", (False, True))
def test_kinds_of_memory_add_up_to_what_the_compiler_counts(program, sockets):
    program = program()
    record = recorded(program, sockets=sockets)
    found = [0] * len(record.nodes)
    for piece in record.memory:
        if piece.place == "device" and not _is_always_there(record, piece):
            for position in range(piece.begin, piece.end + 1):
                found[position] += piece.nbytes
    assert found == live_bytes(program.graph, program.world_size, sockets=sockets)


def _is_always_there(record, piece):
    is_input = record.nodes[piece.node].role == "" and "zerofx" not in (
        record.nodes[piece.node].operator
    )
    is_input = is_input and piece.begin == 0 and piece.end == len(record.nodes) - 1
    return is_input or piece.kind == "optimizer states"


@pytest.mark.parametrize("program", PROGRAMS)
def test_lanes_are_busy_for_as_long_as_predicted_and_with_one_thing_at_a_time(program):
    program = program()
    record = recorded(program)
    timeline = predict(program.graph, parse(LINK), program.table, program.world_size)
    for lane in LANES:
        spans = sorted((s.begin_s, s.end_s) for s in record.spans if s.lane == lane)
        expected = timeline.exposed_s if lane == "waiting" else timeline.lanes[lane]
        assert sum(end - begin for begin, end in spans) == pytest.approx(expected, abs=1e-12)
        for (_, end), (begin, _) in itertools.pairwise(spans):
            assert begin >= end - 1e-12
    assert record.step_s == timeline.step_s <= record.end_s
    issued = [node.issued_s for node in record.nodes]
    assert issued == sorted(issued) and issued[-1] <= record.step_s


def test_compute_and_waiting_share_one_clock():
    record = recorded(rewritten(mlp_step(clip=True), bucket=True))
    spans = sorted((s for s in record.spans if s.lane in ("compute", "waiting")),
                   key=lambda span: span.begin_s)  # fmt: skip
    for before, after in itertools.pairwise(spans):
        assert after.begin_s == pytest.approx(before.end_s)
    assert {span.lane for span in spans} == {"compute", "waiting"}


def test_without_overlap_a_transfer_is_drawn_where_it_is_waited_for():
    program = rewritten(mlp_step())
    late = parse(LINK + " overlaps=0")
    record = record_of(program.graph, program.table, late, 2)
    on_link = [(s.begin_s, s.end_s) for s in record.spans if s.lane == "link"]
    waiting = [(s.begin_s, s.end_s) for s in record.spans if s.lane == "waiting"]
    assert on_link and on_link == waiting


def test_gathered_memory_is_that_of_the_gathers():
    program = rewritten(mlp_step(num_layers=4), bucket=True)
    record = recorded(program)
    gathered = record.alive()["gathered parameters"]
    freed = {p for p, node in enumerate(program.graph.nodes) if node.target is ops.free}
    for position, expected in enumerate(gathered_bytes(program)):
        if position not in freed:  # which still reads it
            assert gathered[position] == expected
    assert max(gathered) > 0


def test_activations_are_made_in_forward_and_gone_at_the_end():
    record = recorded(rewritten(mlp_step()))
    last = len(record.nodes) - 1  # which returns the loss
    activations = [p for p in record.memory if p.kind == "activations" and p.end != last]
    assert {record.nodes[piece.node].phase for piece in activations} == {"forward"}
    assert {record.nodes[piece.end].phase for piece in activations} == {"backward"}
    assert record.alive()["activations"][-1] == 4 < max(record.alive()["activations"])


@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_what_is_kept_is_a_shard_from_the_stage_on_that_shards_it(stage):
    program = rewritten(mlp_step(width=8), stage=stage)
    record = recorded(program)
    whole = sum(info.nbytes for info in program.table)
    alive = record.alive()
    assert set(alive["parameters"]) == {whole if stage < 3 else whole / 2}
    of_adam = STATE_BYTES / 4
    assert set(alive["optimizer states"]) == {of_adam * (whole if stage < 1 else whole / 2)}


def test_from_stage_2_on_gradients_are_shards_as_soon_as_they_are_there():
    most = [max(recorded(rewritten(mlp_step(6, 8), stage=s)).alive()["gradients"]) for s in (1, 2)]
    assert most[0] >= sum(info.nbytes for info in mlp_step(6, 8).table) > most[1]


def test_gradients_are_told_from_other_memory_of_backward():
    program = mlp_step()
    record = recorded(program)
    made = [piece for piece in record.memory if piece.kind == "gradients"]
    for info in program.table:
        local, marked = (p for p in made if record.nodes[p.node].parameters == (info.index,))
        assert local.nbytes == marked.nbytes == info.nbytes
        assert record.nodes[marked.node].operator == "zerofx.gradient"


def test_phases_follow_the_users_code():
    record = recorded(mlp_step(clip=True))
    is_returned = ("aten.detach", "output")  # the loss
    phases = [node.phase for node in record.nodes if node.operator not in is_returned]
    assert [phase for phase, _ in itertools.groupby(phases)] == ["forward", "backward", "update"]


def test_a_second_forward_is_forward_again():
    phases = [node.phase for node in recorded(accumulating()).nodes
              if node.operator in ("aten.addmm", "aten.mm", "zerofx.optimizer_step")]  # fmt: skip
    assert [phase for phase, _ in itertools.groupby(phases)] == [
        "forward", "backward", "forward", "backward", "update",
    ]  # fmt: skip


def test_what_backward_computes_again_is_told_apart():
    record = recorded(rewritten(recomputing()))
    again = [node for node in record.nodes if node.phase == "recompute"]
    assert again and {node.role for node in again} == {"recompute"}


def test_what_leaves_the_device_is_on_the_host_and_copies_have_lanes():
    record = recorded(rewritten(mlp_step(num_layers=4, width=300), **AWAY))
    on_host = record.alive("host")
    assert set(on_host) >= {"parameters", "optimizer states", "staging"}
    assert "parameters" not in record.alive() and "optimizer states" not in record.alive()
    assert {"to host", "to device", "updates"} <= set(record.lanes)
    assert "files" not in record.lanes
    assert all(span.nbytes > 0 for span in record.spans if span.lane in ("to host", "to device"))


def test_states_in_files_are_in_host_memory_while_they_are_used():
    record = recorded(rewritten(mlp_step(num_layers=4), **FILED))
    assert "files" in record.lanes
    states = record.alive("host")["optimizer states"]
    assert states[0] == states[-1] == 0 < max(states)
    assert max(states) < STATE_BYTES / 4 * sum(info.nbytes for info in mlp_step(4).table)


def test_nodes_say_for_whom_they_are_and_whose_line_they_come_from():
    record = recorded(rewritten(mlp_step(), bucket=True))
    by_name = {node.name: node for node in record.nodes}
    gather = next(node for node in record.nodes if node.operator == "zerofx.all_gather_start")
    assert gather.bucket >= 0 and record.for_whom(gather).startswith(f"bucket {gather.bucket}: ")
    assert gather.why.startswith("shard_parameters: ")
    waits = [node for node in record.nodes if node.operator == "zerofx.wait"]
    assert waits and all(record.nodes[wait.waits_for].operator.endswith("_start") for wait in waits)
    product = by_name["addmm"]
    assert record.for_whom(product) == "0.weight, 0.bias"
    assert "programs.py" in product.source and "loss = model(x)" in product.source
    assert product.value == "f32[3, 5]" and product.waits_for == -1


def test_what_goes_over_the_link_has_its_bytes():
    program = rewritten(mlp_step(width=8))
    record = recorded(program)
    gathers = [span for span in record.spans if span.lane == "link"
               and record.nodes[span.node].operator == "zerofx.all_gather_start"]  # fmt: skip
    starts = nodes_of(program, ops.all_gather_start)
    assert [span.nbytes for span in gathers] == [start.meta["val"].nbytes for start in starts]


def test_the_same_program_has_the_same_record():
    first, second = (recorded(rewritten(mlp_step(), bucket=True)) for _ in range(2))
    assert first.to_json() == second.to_json()


def test_recording_adds_no_guard_on_a_symbolic_size():
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    batch = torch.randn(6, 5)
    torch._dynamo.mark_dynamic(batch, 0)
    program = capture(step, batch, world_size=2)
    values = [node.meta.get("val") for node in program.graph.nodes]
    values = [value for value in values if isinstance(value, torch.Tensor)]
    assert any(isinstance(size, torch.SymInt) for value in values for size in value.shape)
    environment = values[0].fake_mode.shape_env
    before = len(environment.guards)
    record = recorded(program)
    assert len(environment.guards) == before
    assert any(node.value == "f32[6, 3]" for node in record.nodes)
    assert max(record.total()) > 0
