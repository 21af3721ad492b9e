"""A trace says what is predicted of a step and what its memory holds, kind by kind, and no more."""

import dataclasses
import functools
import itertools
import json
from collections import defaultdict

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.kit.covering import first
from tests.kit.programs import (
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
from zerofx.hardware import of
from zerofx.ir import ops
from zerofx.ir.graph import updates
from zerofx.report.memory import KINDS, LOWERED_BY, alive, parameters_of, phases_of, pieces_of
from zerofx.report.timeline import LANES, PREDICTED, duration, trace_of

HARDWARE = "latency_s=1e-6 bytes_per_s=1e9 flops_per_s=1e9 memory_bytes_per_s=1e9"
AWAY = {"offload": "optimizer,activations,params", "update_in_backward": True}
FILED = {**AWAY, "offload_tier": "nvme", "offload_dir": "scratch"}
STATE_BYTES = 8.0


def facts_of(program: Captured, hardware=HARDWARE):
    return dataclasses.replace(context_of(program), figures=of(hardware))


def traced(program: Captured, **options):
    """The trace of a program after its passes, with Adam's states in float32."""
    kept = dict.fromkeys(updates(program.graph), STATE_BYTES)
    options = {"state_bytes": kept, **options}
    return trace_of(program.graph, facts_of(program), **options)


def pieces(program: Captured, **options):
    kept = dict.fromkeys(updates(program.graph), STATE_BYTES)
    options = {"state_bytes": kept, **options}
    return pieces_of(program.graph, program.table, program.world_size, **options)


def memory(program: Captured, place="device", **options):
    """Bytes by kind while each node runs."""
    return alive(pieces(program, **options), len(program.graph.nodes), place)


def events(trace, phase):
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def by_lane(trace):
    """Spans by lane, in order of time, in whole nanoseconds: (begin, end, event)."""
    lanes = defaultdict(list)
    for event in events(trace, "X"):
        begin, took = round(event["ts"] * 1000), round(event["dur"] * 1000)
        lanes[LANES[event["tid"] - 1]].append((begin, begin + took, event))
    return {lane: sorted(spans, key=lambda span: span[:2]) for lane, spans in lanes.items()}


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
    """A block that is checkpointed, which backward computes again."""
    torch.manual_seed(0)
    block = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.GELU(), torch.nn.Linear(7, 5))
    optimizer = torch.optim.AdamW(block.parameters())

    def step(x):
        checkpoint(block, x, use_reentrant=False).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return capture(step, torch.randn(4, 5), world_size=2)


PROGRAMS = [
    pytest.param(
        lambda: rewritten(mlp_step(clip=True), stage=0), id="stage 0", marks=pytest.mark.nightly
    ),
    pytest.param(
        lambda: rewritten(mlp_step(clip=True), stage=1), id="stage 1", marks=pytest.mark.nightly
    ),
    pytest.param(
        lambda: rewritten(mlp_step(clip=True), stage=2, bucket=True),
        id="stage 2",
        marks=pytest.mark.nightly,
    ),
    pytest.param(lambda: rewritten(mlp_step(clip=True), bucket=True), id="stage 3"),
    pytest.param(lambda: rewritten(mlp_step(), **AWAY), id="offload", marks=pytest.mark.nightly),
    pytest.param(lambda: rewritten(mlp_step(), **FILED), id="files"),
    pytest.param(lambda: mlp_step(), id="captured", marks=pytest.mark.nightly),
    pytest.param(accumulating, id="two backwards"),
    pytest.param(lambda: rewritten(recomputing()), id="checkpointed"),
    pytest.param(lambda: rewritten(evaluation()), id="evaluation", marks=pytest.mark.nightly),
]

NUMBER = (int, float)
FIELDS = {
    "M": {"name": str, "args": dict},
    "X": {"name": str, "cat": str, "ts": NUMBER, "dur": NUMBER, "args": dict},
    "C": {"name": str, "ts": NUMBER, "args": dict},
    "s": {"name": str, "cat": str, "id": int, "ts": NUMBER},
    "f": {"name": str, "cat": str, "id": int, "ts": NUMBER, "bp": str},
}
"""The fields that viewers need of an event, by its phase (the format's document of 2016)."""


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_event_is_one_that_viewers_read(program):
    trace = json.loads(json.dumps(traced(program()), allow_nan=False))
    assert trace["displayTimeUnit"] == "ms"
    named = {event["tid"] for event in events(trace, "M") if event["name"] == "thread_name"}
    for event in trace["traceEvents"]:
        for field, kind in FIELDS[event["ph"]].items():
            assert isinstance(event[field], kind), event
        assert event["pid"] == PREDICTED
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0
        assert event["tid"] in (0, *named)
    for event in events(trace, "C"):
        assert all(type(value) is int and value >= 0 for value in event["args"].values())
        assert set(event["args"]) <= {"bytes", *KINDS[event["name"].split()[0]]}


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_counters_highest_value_is_the_predicted_peak_to_the_byte(program):
    program = program()
    trace = traced(program)
    for place in KINDS:
        columns = list(zip(*memory(program, place).values(), strict=True))
        for name, value in ((f"{place} memory", "bytes"), (f"{place} memory by kind", None)):
            counted = [event for event in events(trace, "C") if event["name"] == name]
            totals = [sum(event["args"].values()) for event in counted]
            assert max(totals, default=0) == max(map(sum, columns), default=0)
            assert not value or all(set(event["args"]) == {value} for event in counted)
            times = [event["ts"] for event in counted]
            assert times == sorted(times)
    # What is always there aside, it is the peak that plans and budgets are checked against.
    always = [p for p in pieces(program) if _is_always_there(program, p)]
    highest = max(map(sum, zip(*memory(program).values(), strict=True)))
    constant = sum(piece.nbytes for piece in always if piece.place == "device")
    assert highest - constant == max(live_bytes(program.graph, program.world_size))


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("sockets", (False, True))
def test_kinds_of_memory_add_up_to_what_the_compiler_counts(program, sockets):
    program = program()
    found = [0] * len(program.graph.nodes)
    for piece in pieces(program, sockets=sockets):
        if piece.place == "device" and not _is_always_there(program, piece):
            for position in range(piece.begin, piece.end + 1):
                found[position] += piece.nbytes
    assert found == live_bytes(program.graph, program.world_size, sockets=sockets)


def _is_always_there(program, piece):
    return piece.node.op == "placeholder" or piece.kind == "optimizer states"


@pytest.mark.parametrize("program", PROGRAMS)
def test_lanes_are_busy_for_as_long_as_predicted_and_with_one_thing_at_a_time(program):
    program = program()
    trace = traced(program)
    timeline = predict(program.graph, of(HARDWARE), program.table, program.world_size)
    lanes = by_lane(trace)
    for lane in LANES:
        if lane == "host":  # of what is measured
            continue
        spans = lanes.pop(lane, [])
        expected = timeline.exposed_s if lane == "waiting" else timeline.lanes[lane]
        assert sum(end - begin for begin, end, _ in spans) == pytest.approx(
            expected * 1e9, abs=1 + len(spans)
        )
        for (_, end, _), (begin, _, _) in itertools.pairwise(spans):
            assert begin >= end  # to the nanosecond, which is what viewers nest by
    assert not lanes
    assert trace["zerofx"]["step_s"] == timeline.step_s


def test_compute_and_waiting_share_one_clock():
    lanes = by_lane(traced(rewritten(mlp_step(clip=True), bucket=True)))
    spans = sorted((*lanes["compute"], *lanes["waiting"]), key=lambda span: span[0])
    for (_, end, _), (begin, _, _) in itertools.pairwise(spans):
        assert abs(begin - end) <= 1
    assert {event["cat"] for _, _, event in lanes["compute"]} <= {
        "forward",
        "backward",
        "recompute",
        "update",
    }


def test_without_overlap_a_transfer_is_drawn_where_it_is_waited_for():
    program = rewritten(mlp_step())
    late = facts_of(program, HARDWARE + " overlaps=0")
    lanes = by_lane(trace_of(program.graph, late))
    on_link, waiting = ([span[:2] for span in lanes[lane]] for lane in ("link", "waiting"))
    assert on_link and on_link == waiting


def test_an_arrow_leads_from_each_transfer_to_the_wait_that_it_holds_up():
    trace = traced(rewritten(mlp_step(), bucket=True))
    lanes, waits_for = by_lane(trace), trace["zerofx"]["waits_for"]
    begins, ends = ({e["id"]: e for e in events(trace, phase)} for phase in "sf")
    assert begins.keys() == ends.keys() and len(begins) == len(lanes["waiting"]) > 0

    def at(event):
        place = round(event["ts"] * 1000)
        spans = lanes[LANES[event["tid"] - 1]]
        (found,) = [e["name"] for begin, end, e in spans if begin <= place < end]
        return found

    for number, begin in begins.items():
        assert at(begin) == waits_for[at(ends[number])]


@pytest.mark.nightly
def test_gathered_memory_is_that_of_the_gathers():
    program = rewritten(mlp_step(num_layers=4), bucket=True)
    gathered = memory(program)["gathered parameters"]
    freed = {p for p, node in enumerate(program.graph.nodes) if node.target is ops.free}
    for position, expected in enumerate(gathered_bytes(program)):
        if position not in freed:  # which still reads it
            assert gathered[position] == expected
    assert max(gathered) > 0


def test_activations_are_made_in_forward_and_gone_at_the_end():
    program = rewritten(mlp_step())
    nodes = list(program.graph.nodes)
    phases = phases_of(nodes)
    last = len(nodes) - 1  # which returns the loss
    activations = [p for p in pieces(program) if p.kind == "activations" and p.end != last]
    assert {phases[piece.node] for piece in activations} == {"forward"}
    assert {phases[nodes[piece.end]] for piece in activations} == {"backward"}
    column = memory(program)["activations"]
    assert column[-1] == 4 < max(column)


@pytest.mark.parametrize("stage", first(2, (1, 3, 0, 2)))
def test_what_is_kept_is_a_shard_from_the_stage_on_that_shards_it(stage):
    program = rewritten(mlp_step(width=8), stage=stage)
    whole = sum(info.nbytes for info in program.table)
    found = memory(program)
    assert set(found["parameters"]) == {whole if stage < 3 else whole / 2}
    of_adam = STATE_BYTES / 4
    assert set(found["optimizer states"]) == {of_adam * (whole if stage < 1 else whole / 2)}


@pytest.mark.nightly
def test_from_stage_2_on_gradients_are_shards_as_soon_as_they_are_there():
    most = [max(memory(rewritten(mlp_step(6, 8), stage=s))["gradients"]) for s in (1, 2)]
    assert most[0] >= sum(info.nbytes for info in mlp_step(6, 8).table) > most[1]


def test_gradients_are_told_from_other_memory_of_backward():
    program = mlp_step()
    about = parameters_of(program.graph.nodes, program.table)
    made = [piece for piece in pieces(program) if piece.kind == "gradients"]
    for info in program.table:
        local, marked = (piece for piece in made if about[piece.node] == {info.index})
        assert local.nbytes == marked.nbytes == info.nbytes
        assert marked.node.target is ops.gradient


def test_phases_follow_the_users_code():
    program = mlp_step(clip=True)
    phases = phases_of(program.graph.nodes)
    is_returned = (torch.ops.aten.detach.default, "output")  # the loss
    found = [phases[node] for node in program.graph.nodes if node.target not in is_returned]
    assert [phase for phase, _ in itertools.groupby(found)] == ["forward", "backward", "update"]


def test_a_second_forward_is_forward_again():
    aten = torch.ops.aten
    shown = (aten.addmm.default, aten.mm.default, ops.optimizer_step)
    phases = phases_of(accumulating().graph.nodes)
    found = [phases[node] for node in nodes_of(accumulating(), *shown)]
    assert [phase for phase, _ in itertools.groupby(found)] == [
        "forward", "backward", "forward", "backward", "update",
    ]  # fmt: skip


def test_what_backward_computes_again_is_told_apart():
    spans = by_lane(traced(rewritten(recomputing())))["compute"]
    again = [event for _, _, event in spans if event["cat"] == "recompute"]
    assert again and {event["args"]["pass"] for event in again} == {"recompute"}


def test_what_leaves_the_device_is_on_the_host_and_copies_have_lanes():
    program = rewritten(mlp_step(num_layers=4, width=300), **AWAY)
    assert set(memory(program, "host")) >= {"parameters", "optimizer states", "staging"}
    assert not {"parameters", "optimizer states"} & set(memory(program))
    lanes = by_lane(traced(program))
    assert {"to host", "to device", "updates"} <= set(lanes) and "files" not in lanes
    copies = (*lanes["to host"], *lanes["to device"])
    assert all(event["args"]["bytes"] > 0 for _, _, event in copies)


@pytest.mark.nightly
def test_states_in_files_are_in_host_memory_while_they_are_used():
    program = rewritten(mlp_step(num_layers=4), **FILED)
    assert "files" in by_lane(traced(program))
    states = memory(program, "host")["optimizer states"]
    assert states[0] == states[-1] == 0 < max(states)
    assert max(states) < STATE_BYTES / 4 * sum(info.nbytes for info in mlp_step(4).table)


def test_spans_say_what_they_serve_and_whose_line_they_come_from():
    program = rewritten(mlp_step(), bucket=True)
    lanes = by_lane(traced(program))
    gathers = [event for _, _, event in lanes["link"] if event["cat"] == "gather"]
    gather = gathers[0]["args"]
    assert gather["operator"] == "zerofx.all_gather_start"
    assert gather["parameters"] == "bucket 0: 0.weight, 0.bias"
    assert gather["pass"] == "shard_parameters" and gather["why"]
    (product,) = [e["args"] for _, _, e in lanes["compute"] if e["name"] == "addmm"]
    assert product["parameters"] == "0.weight, 0.bias" and product["operator"] == "aten.addmm"
    assert "programs.py" in product["source"] and "loss = model(x)" in product["source"]
    assert product["value"] == "f32[3, 5]cpu" and "pass" not in product


def test_what_goes_over_the_link_has_its_bytes():
    program = rewritten(mlp_step(width=8))
    spans = by_lane(traced(program))["link"]
    gathers = [event["args"]["bytes"] for _, _, event in spans if event["cat"] == "gather"]
    starts = nodes_of(program, ops.all_gather_start)
    assert gathers == [start.meta["val"].nbytes for start in starts]


def test_the_same_program_has_the_same_trace():
    first, second = (traced(rewritten(mlp_step(), bucket=True)) for _ in range(2))
    assert json.dumps(first) == json.dumps(second)


def test_tracing_adds_no_guard_on_a_symbolic_size():
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
    trace = json.loads(json.dumps(traced(program)))
    assert len(environment.guards) == before
    assert max(e["args"]["bytes"] for e in events(trace, "C") if "bytes" in e["args"]) > 0


# In words


def words(program, **options):
    return "\n".join(traced(program, **options)["zerofx"]["words"])


def test_the_peak_its_largest_tensors_and_the_waits_are_told():
    program = rewritten(mlp_step(num_layers=4, width=8), bucket=True)
    text = words(program)
    columns = memory(program)
    totals = [sum(column) for column in zip(*columns.values(), strict=True)]
    peak = totals.index(max(totals))
    node = list(program.graph.nodes)[peak]
    assert f"while {node.name} runs in {phases_of(program.graph.nodes)[node]} (programs.py:" in text
    assert f"The peak is {max(totals) / 1024:.2f} KiB at " in text
    largest = max(columns, key=lambda kind: columns[kind][peak])
    share = columns[largest][peak] / max(totals)
    assert f"It is {share:.1%} {largest} (" in text and f"Most of it is {largest}: " in text
    table, waits = text.split("\n\n")[1:]
    assert len(table.splitlines()) == 2 + 10 and "programs.py:" in table and "0.weight" in table
    assert waits.splitlines()[2].split()[2] in [n.name for n in nodes_of(program, ops.wait)]


def test_a_program_with_nothing_in_memory_says_so():
    graph = torch.fx.Graph()
    graph.output(())
    trace = trace_of(graph, facts_of(rewritten(evaluation())))
    assert trace["zerofx"]["words"] == [
        "A step is predicted to take 0 µs, all of it compute.",
        "Nothing is in memory on the device at any time.",
    ]
    assert not events(trace, "X") and not events(trace, "C")


def test_every_kind_of_memory_has_a_remedy():
    assert set(LOWERED_BY) == set(KINDS["device"]) >= set(KINDS["host"])


def test_times_have_three_digits():
    assert [duration(s) for s in (0, 1.234e-7, 2.5e-4, 0.01234, 12.34)] == [
        "0 µs", "0.123 µs", "250 µs", "12.3 ms", "12.3 s",
    ]  # fmt: skip
