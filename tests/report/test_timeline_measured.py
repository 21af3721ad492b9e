"""What torch's profiler has measured is drawn beside what was predicted, node by node."""

import gzip
import itertools
import json

import pytest
import torch

import zerofx
import zerofx.__main__ as command_line
from tests.kit.records import small
from zerofx import backend
from zerofx.errors import CommandError
from zerofx.inspecting import named_ranges
from zerofx.report.measured import RANGE, STEP_RANGE, add_measured
from zerofx.report.timeline import LANES, MEASURED, PREDICTED, read, span_event, text_of


def event(name, begin_us, took_us, **values):
    return {"ph": "X", "cat": "user_annotation", "name": name, "ts": begin_us, "dur": took_us,
            **values}  # fmt: skip


def step_at(us, wait_us=300):
    """The ranges of ``records.small``'s nodes in a step that begins then."""
    ranges = (("gather_w", 10, 20), ("wait", 30, wait_us), ("mm", 400, 500),
              ("mm_backward", 900, 600))  # fmt: skip
    return [event(STEP_RANGE, us, 2000)] + [
        event(RANGE + name, us + begin, took) for name, begin, took in ranges
    ]


@pytest.fixture
def trace(tmp_path):
    """``trace(events)`` -> the file of a trace with these, among others."""

    def write(*events):
        path = tmp_path / "mine.json"
        others = [{"ph": "M", "name": "process_name"}, event("aten::mm", 5, 7), "odd", 3]
        path.write_text(json.dumps({"traceEvents": [*others, *events]}))
        return path

    return write


def measured(path):
    """``records.small`` with what a profile has measured."""
    found = small()
    add_measured(found, path)
    return found


def spans(trace):
    """Return the measured spans: (node, lane) -> begin and end in microseconds."""
    return {
        (event["name"], LANES[event["tid"] - 1]): (
            round(event["ts"]),
            round(event["ts"] + event["dur"]),
        )
        for event in trace["traceEvents"]
        if event["ph"] == "X" and event["pid"] == MEASURED
    }


def test_ranges_are_drawn_from_the_first_on_and_transfers_until_their_wait_is_over(trace):
    found = measured(trace(*step_at(1000)))
    assert spans(found) == {
        ("gather_w", "compute"): (0, 20),
        ("gather_w", "link"): (0, 320),
        ("wait", "waiting"): (20, 320),
        ("mm", "compute"): (390, 890),
        ("mm_backward", "compute"): (890, 1490),
    }
    ours = [event for event in found["traceEvents"] if event["pid"] == MEASURED]
    (link,) = [e for e in ours if e["name"] == "gather_w" and e["cat"] == "gather"]
    assert link["args"] == {"bytes": 4 * 2**20, "parameters": "w"}
    process, *_ = ours
    assert process["args"]["name"] == "measured: step0_0: 03_prefetch, rank 1 of 2"
    assert json.dumps(found["traceEvents"]).count('"thread_name"') == 6


def test_measured_twice_is_measured_once(trace):
    found = measured(trace(*step_at(0)))
    again = json.loads(json.dumps(found))
    add_measured(again, trace(*step_at(1000)))
    assert again == json.loads(json.dumps(found))


def test_the_last_step_of_a_trace_counts(trace):
    path = trace(*step_at(9000, wait_us=111), *step_at(1000))
    assert spans(measured(path))["wait", "waiting"] == (20, 131)


def test_what_a_device_took_is_on_its_lanes_and_its_host_on_another(trace):
    on_device = {"cat": "gpu_user_annotation"}
    path = trace(
        *step_at(1000),
        event(STEP_RANGE, 1100, 5000, **on_device),
        event(RANGE + "gather_w", 1110, 250, **on_device),
        event(RANGE + "mm", 1500, 800, **on_device),
    )
    assert spans(measured(path)) == {
        ("gather_w", "host"): (0, 20),
        ("wait", "waiting"): (20, 320),
        ("mm", "host"): (390, 890),
        ("mm_backward", "host"): (890, 1490),
        ("gather_w", "link"): (100, 350),
        ("mm", "compute"): (490, 1290),
    }


def test_transfers_that_overlap_are_drawn_one_after_the_other(trace):
    """Viewers nest bars of one lane, and cannot show two that cross."""
    of_two = small()
    of_two["zerofx"]["nodes"] += ["gather_v", "wait_v"]
    of_two["zerofx"]["waits_for"]["wait_v"] = "gather_v"
    of_two["traceEvents"].append(span_event(PREDICTED, "link", "gather_v", "gather", 1e-3, 2e-3))
    path = trace(
        event(STEP_RANGE, 0, 2000),
        *(event(RANGE + name, us, 10) for name, us in (
            ("gather_w", 0), ("gather_v", 20), ("wait", 100), ("wait_v", 300))),
    )  # fmt: skip
    add_measured(of_two, path)
    assert spans(of_two)["gather_w", "link"] == (0, 110)
    assert spans(of_two)["gather_v", "link"] == (110, 310)


def test_a_compressed_trace_is_read(trace, tmp_path):
    path = tmp_path / "profile.json.gz"
    path.write_bytes(gzip.compress(trace(*step_at(0)).read_bytes()))
    assert ("mm", "compute") in spans(measured(path))


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "is no trace"),
        (b"\xff", "is no trace"),
        (b"\x1f\x8b but not compressed", "is no trace"),
        (b"{}", "it has no traceEvents"),
        (b'{"traceEvents": []}', "has no range of a zerofx step"),
        (b'[{"ph": "X", "name": "zerofx step", "ts": "soon", "dur": 1}]', "has no range"),
    ],
)
def test_what_is_no_trace_is_refused_with_the_remedy(content, words, tmp_path):
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(CommandError) as refused:
        measured(path)
    assert words in str(refused.value) and "named_ranges" in str(refused.value)


def test_the_trace_of_another_program_is_refused(trace):
    with pytest.raises(CommandError, match="2 of its 6 ranges are no nodes of that, bmm for one"):
        measured(trace(*step_at(0), event(RANGE + "bmm", 1, 1), event(RANGE + "cat", 2, 1)))


def test_it_is_said_in_words(trace):
    assert measured(trace(*step_at(0)))["zerofx"]["measured"] == (
        "Measured, it took 1.49 ms, 300 µs of it waiting: 0.497 times what was predicted."
    )


def write(folder, program="03_prefetch"):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{program}.trace.json"
    path.write_text(text_of(small(program)), encoding="utf-8")
    return path


@pytest.mark.nightly
def test_the_command_puts_it_into_the_last_programs_trace(trace, tmp_path, capsys):
    first, last = write(tmp_path / "rank0", "01_bucket"), write(tmp_path / "rank0")
    path = trace(*step_at(0))
    for _ in range(2):  # as often as one likes
        assert command_line.main(["timeline", str(tmp_path), "--measured", str(path)]) == 0
        assert capsys.readouterr().out.count("Measured, it took 1.49 ms") == 1
        assert spans(read(last)) and not spans(read(first))
    assert sorted(p.name for p in last.parent.iterdir()) == [
        "01_bucket.trace.json", "03_prefetch.png", "03_prefetch.trace.json",
    ]  # fmt: skip


def test_a_trace_is_for_one_rank(trace, tmp_path, capsys):
    write(tmp_path / "rank0")
    write(tmp_path / "rank1")
    path = trace(*step_at(0))
    assert command_line.main(["timeline", str(tmp_path), "--measured", str(path)]) == 1
    assert f"give the folder of one, as {tmp_path / 'rank0'}" in capsys.readouterr().err


# A real profile


def step(model, optimizer, x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def profiled(tmp_path, lowering):
    """A profiled run's record and trace, and the losses with and without the profiler."""
    torch._dynamo.reset()
    runs = []
    for is_profiled in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.GELU(), torch.nn.Linear(7, 3))
        optimizer = torch.optim.AdamW(model.parameters())
        options = {"lowering": lowering, "dump": str(tmp_path / "dump")}
        compiled = torch.compile(step, backend="zero", options=options)
        losses = [compiled(model, optimizer, torch.ones(4, 5))]
        if is_profiled:
            with named_ranges(compiled), torch.profiler.profile() as profiler:
                losses += [compiled(model, optimizer, torch.ones(4, 5)) for _ in range(2)]
            profiler.export_chrome_trace(str(tmp_path / "profile.json"))
        else:
            losses += [compiled(model, optimizer, torch.ones(4, 5)) for _ in range(2)]
        runs.append((losses, compiled(model, optimizer, torch.ones(4, 5))))
    assert runs[0] == runs[1]
    *_, path = sorted((tmp_path / "dump").rglob("*.trace.json"))
    trace = read(path)
    add_measured(trace, tmp_path / "profile.json")
    return trace


@pytest.mark.nightly
def test_a_profiled_run_is_the_same_run_and_names_every_node_that_computes(tmp_path):
    trace = profiled(tmp_path, "eager")
    found = {name for name, _ in spans(trace)}
    predicted = {e["name"] for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] != MEASURED}
    merged = {name for name in predicted if name.startswith("flatten_bucket")}  # into a reduction
    assert predicted - merged and predicted - merged <= found
    assert 0 < max(end for _, end in spans(trace).values()) < 60e6
    lanes = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            begin, took = round(event["ts"] * 1000), round(event["dur"] * 1000)
            lanes.setdefault((event["pid"], event["tid"]), []).append((begin, begin + took))
    for bars in lanes.values():
        for (_, end), (begin, _) in itertools.pairwise(sorted(bars)):
            assert begin >= end


def test_what_is_profiled_is_what_ran_before_afterwards(tmp_path):
    torch._dynamo.reset()
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters())
    known = set(backend.zero.functions)
    compiled = torch.compile(step, backend="zero", options={"lowering": "eager"})
    with pytest.raises(ValueError, match="has no zero-compiled program yet"), named_ranges(step):
        pass
    compiled(model, optimizer, torch.ones(4, 5))
    (function,) = [f for f in backend.zero.functions if f not in known]
    (program,) = function.programs
    plain = program.runtime.program
    with pytest.raises(RuntimeError, match="stop"), named_ranges(compiled):
        assert program.runtime.program is not plain
        raise RuntimeError("stop")
    assert program.runtime.program is plain
    with named_ranges(compiled):
        with pytest.raises(ValueError, match="named already"), zerofx.profile(compiled, tmp_path):
            pass
        compiled(model, optimizer, torch.ones(4, 5))
    assert program.runtime.program is plain


def trained(dump=None):
    """A step that has been compiled, and how to call it again."""
    torch._dynamo.reset()
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters())

    def step(model, optimizer, x):
        model(x).square().mean().backward()
        optimizer.step()

    options = {"lowering": "eager", "dump": dump}
    compiled = torch.compile(step, backend="zero", options=options)

    def call():
        compiled(model, optimizer, torch.ones(4, 5))

    for _ in range(3):  # of which the second finds gradients
        call()
    return compiled, call


def test_what_is_profiled_lies_beside_the_dump_and_is_drawn(tmp_path, capsys):
    compiled, call = trained(str(tmp_path))
    with zerofx.profile(compiled):
        call()
    (profile,) = tmp_path.rglob("profile.json")
    assert profile.parent.name.endswith("_1")  # beside the program that ran
    assert command_line.main(["timeline", str(tmp_path)]) == 0
    _, first, second = capsys.readouterr().out.split(".png\n")
    assert "Measured, it took" not in first and "Measured, it took" in second


def test_what_is_profiled_goes_to_the_path_that_is_given(tmp_path):
    compiled, call = trained()
    with pytest.raises(ValueError, match="set ZEROFX_DUMP before its first call"):
        with zerofx.profile(compiled):
            call()
    with zerofx.profile(compiled, tmp_path / "mine.json") as profiler:
        call()
    assert STEP_RANGE in (tmp_path / "mine.json").read_text()
    assert any(event.key == STEP_RANGE for event in profiler.key_averages())
    with pytest.raises(ValueError, match="no step has run within"):
        with zerofx.profile(compiled, tmp_path / "none.json"):
            pass
    for path in (tmp_path / "none" / "trace.json", tmp_path):
        with pytest.raises(OSError, match=str(path)), zerofx.profile(compiled, path):
            call()


@pytest.mark.nightly
def test_regions_and_updates_that_run_together_have_the_name_of_their_first(tmp_path):
    trace = profiled(tmp_path, "inductor")
    operators = {
        e["name"]: e["args"].get("operator")
        for e in trace["traceEvents"]
        if e["ph"] == "X" and e["pid"] != MEASURED
    }
    names = {name for name, _ in spans(trace)}
    products = {name for name, of in operators.items() if of in ("aten.mm", "aten.addmm")}
    assert "addmm" in names and 0 < len(names & products) < len(products)
    updates = {name for name, of in operators.items() if of == "zerofx.update"}
    assert len(updates) == 4
    assert names & updates == {"update_2_bias", "update_0_bias"}  # each first of its bucket


def test_a_compiled_module_is_explained_and_ranged():
    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = torch.nn.Linear(2, 1)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

        def forward(self, x):
            self.model(x).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    step = torch.compile(Step(), backend="zero", options={"lowering": "eager", "stage": 0})
    step(torch.ones(1, 2))
    assert "passes" in zerofx.explain(step)
    with named_ranges(step):
        step(torch.ones(1, 2))
