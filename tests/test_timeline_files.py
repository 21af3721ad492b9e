"""Timelines lie next to dumped programs, and the command makes pages of them without the graphs."""

import json
import logging

import pytest
import torch

import zerofx.__main__ as command_line
from tests.programs import clone, context_of, mlp_step, run_passes
from tests.records import empty, large, nothing, small
from zerofx.ir.graph import updates
from zerofx.report.folder import MARKER, DumpFolder
from zerofx.report.timeline.files import TimelineDump, records_in
from zerofx.report.timeline.record import read


@pytest.fixture
def dumped(tmp_path):
    """``dumped(**options)`` -> the folder, after running the passes."""

    def dump(rank=0, folder=tmp_path / "dump", **options):
        program = clone(mlp_step())
        ctx = context_of(program, rank, dump=str(folder), **options)
        kept = dict.fromkeys(updates(program.graph), 8.0)
        timelines = TimelineDump(DumpFolder(folder), f"rank{rank}/step0_0", ctx, kept)
        run_passes(program, rank=rank, on_program=lambda name, gm, _: timelines.write(name, gm),
                   **options)  # fmt: skip
        timelines.finish()
        return folder / f"rank{rank}" / "step0_0"

    return dump


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != MARKER)


def test_every_program_has_a_record_and_the_last_a_page_and_a_picture(dumped):
    folder = dumped(stage=1, prefetch=False, recompute=False)
    assert names(folder) == [
        "00_captured.timeline.json",
        "01_data_parallel.timeline.json",
        "02_shard_optimizer.timeline.html",
        "02_shard_optimizer.timeline.json",
        "02_shard_optimizer.timeline.svg",
    ]
    programs = [read(path).program for path in records_in(folder)]
    assert programs == ["00_captured", "01_data_parallel", "02_shard_optimizer"]


def test_a_second_compilation_dumps_the_same_bytes(dumped, tmp_path):
    first = dumped(bucket=True)
    again = dumped(bucket=True, folder=tmp_path / "again")
    assert names(first) == names(again)
    for name in names(first):
        assert (first / name).read_bytes() == (again / name).read_bytes()


def test_ranks_differ_in_their_number_and_their_shards_alone(dumped):
    """Of which one may hold more, for the other's is padded."""
    for path, other in zip(*map(records_in, (dumped(rank=0), dumped(rank=1))), strict=True):
        one, two = read(path), read(other)
        assert (one.rank, two.rank) == (0, 1)
        assert one.spans == two.spans and one.step_s == two.step_s
        assert [n.name for n in one.nodes] == [n.name for n in two.nodes]


def test_a_folder_that_cannot_be_written_costs_one_warning(dumped, tmp_path, caplog):
    (tmp_path / "dump").write_text("in the way")
    with caplog.at_level(logging.WARNING, logger="zerofx"):
        dumped()
    (message,) = [r.getMessage() for r in caplog.records if r.name == "zerofx"]
    assert "cannot write" in message and "00_captured.timeline.json" in message


@pytest.fixture
def train(zero):
    def step(model, optimizer, x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def run(**options):
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 3)
        optimizer = torch.optim.AdamW(model.parameters())
        compiled = zero(step, **options)
        return [compiled(model, optimizer, torch.ones(rows, 5)) for rows in (4, 4)]

    return run


@pytest.fixture
def zero():
    def compiled(step, **options):
        torch._dynamo.reset()
        return torch.compile(step, backend="zero", options={"lowering": "eager", **options})

    return compiled


def test_a_training_run_that_dumps_leaves_timelines_and_trains_the_same(train, tmp_path):
    plain, watched = train(), train(dump=str(tmp_path))
    assert plain == watched
    (folder,) = tmp_path.glob("rank0/*")
    last = records_in(folder)[-1]
    assert last.with_name(last.name.replace(".json", ".html")).exists()
    states = {p.kind: p.nbytes for p in read(last).memory if p.kind == "optimizer states"}
    assert states  # what AdamW keeps is known before it has any


# The command


def timeline(*arguments):
    return command_line.main(["timeline", *map(str, arguments)])


def write(folder, *records):
    folder.mkdir(parents=True, exist_ok=True)
    for record in records:
        path = folder / f"{record.program}.timeline.json"
        path.write_text(record.to_json(), encoding="utf-8")
    return folder


def test_the_command_makes_a_page_and_a_picture_of_every_program(tmp_path, capsys):
    folder = write(tmp_path / "rank0" / "step0_0", empty(), small(program="01_bucket"), small())
    assert timeline(tmp_path) == 0
    pages = [name for name in names(folder) if name.endswith(".html")]
    assert pages == [f"{n}.timeline.html" for n in ("00_captured", "01_bucket", "03_prefetch")]
    assert len(names(folder)) == 9
    middle = (folder / "01_bucket.timeline.html").read_text()
    assert 'href="00_captured.timeline.html"' in middle
    assert 'href="03_prefetch.timeline.html"' in middle
    said = capsys.readouterr().out
    assert str(folder / "03_prefetch.timeline.html") in said
    assert "step0_0, rank 1 of 2: 03_prefetch" in said and "01_bucket" not in said
    assert "The peak is 16.0 MiB at 2 ms" in said and "train.py:7 loss = model(w)" in said
    assert "waits" in said


@pytest.mark.parametrize("record", (empty, nothing, lambda: large(2000)))
def test_the_command_copes_with_programs_of_any_size(record, tmp_path, capsys):
    write(tmp_path, record())
    assert timeline(tmp_path) == 0
    assert len(names(tmp_path)) == 3
    assert "A step is predicted to take" in capsys.readouterr().out


def test_one_file_can_be_named(tmp_path, capsys):
    write(tmp_path, small(), small(program="01_bucket"))
    assert timeline(tmp_path / "01_bucket.timeline.json") == 0
    assert "01_bucket" in capsys.readouterr().out
    assert "03_prefetch.timeline.html" not in names(tmp_path)


def refused(capsys, *arguments):
    assert timeline(*arguments) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("zerofx: ") and printed.err.count("\n") == 1
    return printed.err


def test_a_folder_without_dumps_is_refused(tmp_path, capsys):
    assert f"no dumped timeline (*.timeline.json) in {tmp_path}" in refused(capsys, tmp_path)
    assert "ZEROFX_DUMP" in refused(capsys, tmp_path)


def test_what_does_not_exist_and_what_is_no_timeline_is_refused(tmp_path, capsys):
    assert "does not exist" in refused(capsys, tmp_path / "nowhere")
    (tmp_path / "00_captured.py").write_text("")
    assert "is no timeline" in refused(capsys, tmp_path / "00_captured.py")


def test_a_record_of_another_version_is_refused_by_name(tmp_path, capsys):
    write(tmp_path, small())
    path = tmp_path / "03_prefetch.timeline.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "version": 99}))
    assert f"{path} is of version 99" in refused(capsys, tmp_path)


def test_a_page_that_cannot_be_written_is_an_error_in_a_line(tmp_path, capsys):
    write(tmp_path, small())
    (tmp_path / "03_prefetch.timeline.html").mkdir()
    assert "03_prefetch.timeline.html" in refused(capsys, tmp_path)


def test_a_full_disk_leaves_no_half_page_and_names_it(tmp_path, capsys):
    write(tmp_path, small())
    page = tmp_path / "03_prefetch.timeline.html"
    page.symlink_to("/dev/full")
    error = refused(capsys, tmp_path)
    assert "No space left on device" in error and str(page) in error
    assert not page.is_symlink()
