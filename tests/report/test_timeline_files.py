"""Traces lie next to dumped programs, and the command draws and tells them without the graphs."""

import json
import logging

import pytest
import torch
from matplotlib import image

import zerofx.__main__ as command_line
from tests.kit.programs import clone, context_of, mlp_step, run_passes
from tests.kit.records import empty, small
from zerofx.ir.graph import updates
from zerofx.report import picture
from zerofx.report.folder import MARKER, DumpFolder
from zerofx.report.timeline import read, span_event, text_of
from zerofx.report.write import ProgramDump


@pytest.fixture
def dumped(tmp_path):
    """``dumped(**options)`` -> the folder, after running the passes."""

    def dump(rank=0, folder=tmp_path / "dump", **options):
        program = clone(mlp_step())
        ctx = context_of(program, rank, dump=str(folder), **options)
        kept = dict.fromkeys(updates(program.graph), 8.0)
        dump = ProgramDump(DumpFolder(folder), "step0_0", ctx, {})

        def on_program(name, gm, report):
            dump.write(name, gm, report)
            dump.write_timeline(gm, kept)

        run_passes(program, rank=rank, on_program=on_program, **options)
        return folder / f"rank{rank}" / "step0_0"

    return dump


def names(folder):
    kept = (path.name for path in folder.iterdir() if path.suffix != ".py")
    return sorted(name for name in kept if name != MARKER)


def test_every_program_has_a_trace(dumped):
    folder = dumped(stage=1, prefetch=False, recompute=False)
    assert names(folder) == [
        "00_captured.trace.json",
        "01_normalize.trace.json",
        "02_chunk_loss.trace.json",
        "03_data_parallel.trace.json",
        "04_shard_optimizer.trace.json",
    ]
    titles = [read(folder / name)["zerofx"]["title"] for name in names(folder)]
    assert titles == [
        "step0_0: 00_captured, rank 0 of 2",
        "step0_0: 01_normalize, rank 0 of 2",
        "step0_0: 02_chunk_loss, rank 0 of 2",
        "step0_0: 03_data_parallel, rank 0 of 2",
        "step0_0: 04_shard_optimizer, rank 0 of 2",
    ]


@pytest.mark.nightly
def test_a_second_compilation_dumps_the_same_bytes(dumped, tmp_path):
    first = dumped(bucket=True)
    again = dumped(bucket=True, folder=tmp_path / "again")
    assert names(first) == names(again)
    for name in names(first):
        assert (first / name).read_bytes() == (again / name).read_bytes()


@pytest.mark.nightly
def test_ranks_differ_in_their_number_and_their_shards_alone(dumped):
    """The shard of one may be larger, for the other's is padded."""
    folders = dumped(rank=0), dumped(rank=1)
    for name in names(folders[0]):
        one, two = (read(folder / name) for folder in folders)
        assert "rank 0 of 2" in one["zerofx"]["title"] and "rank 1 of 2" in two["zerofx"]["title"]
        spans = [
            [(e["name"], e["tid"], e["ts"], e["dur"]) for e in t["traceEvents"] if e["ph"] == "X"]
            for t in (one, two)
        ]
        assert spans[0] == spans[1] and one["zerofx"]["step_s"] == two["zerofx"]["step_s"]
        assert one["zerofx"]["nodes"] == two["zerofx"]["nodes"]


def test_a_folder_that_cannot_be_written_costs_one_warning(dumped, tmp_path, caplog):
    (tmp_path / "dump").write_text("in the way")
    with caplog.at_level(logging.WARNING, logger="zerofx"):
        dumped()
    (message,) = [r.getMessage() for r in caplog.records if r.name == "zerofx"]
    assert "cannot write" in message and "00_captured.py" in message


def train(**options):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(model, optimizer, x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = torch.compile(step, backend="zero", options={"lowering": "eager", **options})
    return [step(model, optimizer, torch.ones(4, 5)) for _ in range(2)]


def test_a_training_run_that_dumps_leaves_traces_and_trains_the_same(tmp_path):
    plain, watched = train(), train(dump=str(tmp_path))
    assert plain == watched
    (folder,) = tmp_path.glob("rank0/*")
    *_, last = sorted(folder.glob("*.trace.json"))
    counted = [e["args"] for e in read(last)["traceEvents"] if e["ph"] == "C"]
    assert any(args.get("optimizer states") for args in counted)  # known before AdamW has any


# The command


def timeline(*arguments):
    return command_line.main(["timeline", *map(str, arguments)])


def write(folder, *programs, make=small):
    folder.mkdir(parents=True, exist_ok=True)
    for program in programs:
        path = folder / f"{program}.trace.json"
        path.write_text(text_of(make(program)), encoding="utf-8")
    return folder


def test_the_command_draws_and_tells_the_last_program_of_each_function(tmp_path, capsys):
    folders = [write(tmp_path / f"rank{rank}" / "step0_0", "01_bucket", "03_prefetch")
               for rank in (0, 1)]  # fmt: skip
    assert timeline(tmp_path) == 0
    said = capsys.readouterr().out
    for folder in folders:
        assert names(folder) == [
            "01_bucket.trace.json", "03_prefetch.png", "03_prefetch.trace.json",
        ]  # fmt: skip
        assert f"{folder / '03_prefetch.trace.json'}\n{folder / '03_prefetch.png'}\n" in said
    assert "step0_0: 03_prefetch, rank 1 of 2" in said and "01_bucket" not in said
    assert "A step is predicted to take 3 ms.\nThe peak is 16.00 MiB.\n" in said


def test_the_picture_shows_memory_and_lanes_in_their_colours(tmp_path):
    write(tmp_path, "03_prefetch")
    assert timeline(tmp_path) == 0
    pixels = image.imread(tmp_path / "03_prefetch.png")[..., :3]
    assert 300 < pixels.shape[0] < 900 and pixels.shape[1] == 1100
    of_memory = ("parameters", "activations", "temporaries")
    of_lanes = ("forward", "backward", "waiting", "gather")
    colours = [picture.MEMORY[kind] for kind in of_memory]
    for colour in [*colours, *(picture.WORK[kind] for kind in of_lanes)]:
        wanted = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        assert (abs(pixels - wanted).max(-1) < 0.01).sum() > 500, colour


@pytest.mark.parametrize("make", (empty, lambda _: many(2000)), ids=("nothing", "many spans"))
def test_the_command_copes_with_programs_of_any_size(make, tmp_path, capsys):
    write(tmp_path, "00_captured", make=make)
    assert timeline(tmp_path) == 0
    assert (tmp_path / "00_captured.png").stat().st_size > 5_000
    assert "A step is predicted to take" in capsys.readouterr().out


def many(count):
    trace = small()
    spans = (span_event(1, "compute", f"n{n}", "update", n * 1e-6, (n + 1) * 1e-6)
             for n in range(3000, 3000 + count))  # fmt: skip
    return {**trace, "traceEvents": [*trace["traceEvents"], *spans]}


def test_one_file_can_be_named(tmp_path, capsys):
    write(tmp_path, "01_bucket", "03_prefetch")
    assert timeline(tmp_path / "01_bucket.trace.json") == 0
    assert "01_bucket" in capsys.readouterr().out
    assert "03_prefetch.png" not in names(tmp_path) and "01_bucket.png" in names(tmp_path)


def test_without_matplotlib_all_but_the_picture_is_there(tmp_path, capsys, monkeypatch):
    write(tmp_path, "03_prefetch")
    monkeypatch.setitem(command_line.sys.modules, "matplotlib.figure", None)
    assert timeline(tmp_path) == 0
    said = capsys.readouterr().out
    assert "matplotlib is not installed (pip install 'zerofx[pictures]')" in said
    assert "The peak is 16.00 MiB." in said and names(tmp_path) == ["03_prefetch.trace.json"]


def refused(capsys, *arguments):
    assert timeline(*arguments) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("zerofx: ") and printed.err.count("\n") == 1
    return printed.err


def test_a_folder_without_dumps_is_refused(tmp_path, capsys):
    error = refused(capsys, tmp_path)
    assert f"no dumped timeline (*.trace.json) in {tmp_path}" in error and "ZEROFX_DUMP" in error


def test_what_does_not_exist_and_what_is_no_timeline_is_refused(tmp_path, capsys):
    assert "does not exist" in refused(capsys, tmp_path / "nowhere")
    (tmp_path / "00_captured.py").write_text("")
    assert "is no timeline" in refused(capsys, tmp_path / "00_captured.py")


@pytest.mark.parametrize(
    "content, told",
    [
        (b"", "is no timeline of zerofx (JSONDecodeError: "),
        (b"\xff", "is no timeline of zerofx (UnicodeDecodeError: "),
        (b"[]", "is no timeline of zerofx"),
        (b'{"traceEvents": []}', "is no timeline of zerofx"),
        (b'{"zerofx": {"version": 1}}', "is no timeline of zerofx"),
        (b'{"zerofx": {"version": 99}, "traceEvents": []}', "is of version 99"),
    ],
)
def test_what_is_no_trace_is_refused_by_name_with_the_remedy(content, told, tmp_path, capsys):
    path = tmp_path / "03_prefetch.trace.json"
    path.write_bytes(content)
    error = refused(capsys, tmp_path)
    assert f"{path} {told}" in error and "Dump the program again" in error


def test_a_picture_that_cannot_be_written_is_an_error_in_a_line(tmp_path, capsys):
    write(tmp_path, "03_prefetch")
    (tmp_path / "03_prefetch.png").mkdir()
    assert "03_prefetch.png" in refused(capsys, tmp_path)
    assert names(tmp_path) == ["03_prefetch.png", "03_prefetch.trace.json"]  # and no part of one


def test_names_in_any_alphabet_survive(tmp_path):
    odd = "</script>größe\u2028\\'\udc80"
    folder = DumpFolder(tmp_path)
    folder.write("00.trace.json", text_of(small(name=odd)))
    trace = read(tmp_path / "00.trace.json")
    assert trace["zerofx"]["nodes"][0] == f"gather_{odd}"
    assert json.dumps(trace) == json.dumps(small(name=odd))
