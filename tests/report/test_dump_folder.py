"""A run has its dump folder for itself, a rerun replaces it, and what goes wrong costs no step."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.kit.dumps import programs_in
from zerofx.backend import zero
from zerofx.report.folder import CLAIM, claim, run_of_this_process
from zerofx.report.write import file_name

PROGRAM = "rank0/step0_0/00_captured.py"


def let_go(folder):
    """Release a folder, as the end of the process does."""
    if folder._claim is not None:
        os.close(folder._claim)
        folder._claim = None


@pytest.fixture
def claimed():
    """``claimed(path, run)``, whose folders a dead process would have let go of in the end."""
    folders = []

    def claim_folder(path, run):
        folders.append(claim(path, run))
        return folders[-1]

    yield claim_folder
    for folder in folders:
        let_go(folder)


def warnings_in(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "zerofx"]


def test_a_rerun_replaces_all_that_the_run_before_has_written(claimed, tmp_path):
    first = claimed(tmp_path, "first")
    for name in (PROGRAM, "rank0/step1_0/00_captured.py", "rank3/step0_0/summary.txt"):
        first.write(name, "old")
    let_go(first)
    second = claimed(tmp_path, "second")
    assert second.path == tmp_path
    assert {path.name for path in tmp_path.iterdir()} == {CLAIM}
    second.write(PROGRAM, "new")
    assert (tmp_path / PROGRAM).read_text() == "new"


def test_a_rerun_removes_nothing_that_no_run_has_written(claimed, tmp_path):
    (tmp_path / "rank0" / "checkpoints").mkdir(parents=True)
    mine = [tmp_path / "notes.txt", tmp_path / "rank0" / "checkpoints" / "last.pt"]
    for path in mine:
        path.write_text("mine")
    first = claimed(tmp_path, "first")
    first.write(PROGRAM, "old")
    let_go(first)
    claimed(tmp_path, "second")
    assert all(path.read_text() == "mine" for path in mine)
    assert not (tmp_path / PROGRAM).exists()


def test_a_claim_that_is_no_text_is_nobodys(claimed, tmp_path):
    (tmp_path / CLAIM).write_bytes(b"\xff\x00")
    claimed(tmp_path, "the run").write(PROGRAM, "new")
    assert (tmp_path / CLAIM).read_text() == "the run"
    assert (tmp_path / PROGRAM).read_text() == "new"


def test_ranks_of_one_run_share_a_folder(claimed, tmp_path):
    first, second = (claimed(tmp_path, "the run") for _ in range(2))
    first.write(PROGRAM, "rank 0's")
    second.write("rank1/step0_0/00_captured.py", "rank 1's")
    assert claimed(tmp_path, "the run").path == tmp_path
    assert (tmp_path / PROGRAM).exists()


def test_two_runs_that_live_do_not_mix(claimed, tmp_path, caplog):
    first = claimed(tmp_path, "first")
    with caplog.at_level(logging.WARNING, logger="zerofx"):
        second, rank_1_of_it = (claimed(tmp_path, "second") for _ in range(2))
    assert second.path == rank_1_of_it.path == tmp_path / "run2"
    assert f"another run is writing its programs to {tmp_path};" in warnings_in(caplog)[0]
    first.write(PROGRAM, "first")
    second.write(PROGRAM, "second")
    assert (tmp_path / PROGRAM).read_text() == "first"
    assert (tmp_path / "run2" / PROGRAM).read_text() == "second"
    let_go(first)
    # A rank of the second that comes late stays with its run, though the folder is free by now.
    assert claimed(tmp_path, "second").path == tmp_path / "run2"
    assert (tmp_path / PROGRAM).read_text() == "first"
    for folder in (second, rank_1_of_it):
        let_go(folder)


def test_what_dead_runs_have_left_beside_each_other_goes_too(claimed, tmp_path):
    folders = [claimed(tmp_path, "first"), claimed(tmp_path, "second")]
    for folder in folders:
        folder.write(PROGRAM, "old")
    for folder in folders:
        let_go(folder)
    assert claimed(tmp_path, "third").path == tmp_path
    assert {path.name for path in tmp_path.iterdir()} == {CLAIM}


@pytest.mark.nightly
def test_a_process_that_was_killed_has_let_go(tmp_path):
    code = (
        "import os, signal, sys; from zerofx.report.folder import claim; "
        "claim(sys.argv[1], 'killed').write('rank0/f/x', 'old'); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=root, check=False)
    assert (tmp_path / "rank0" / "f" / "x").exists()
    folder = claim(tmp_path, "next")
    assert folder.path == tmp_path and not (tmp_path / "rank0").exists()
    let_go(folder)


def test_processes_without_a_group_are_runs_of_their_own():
    assert run_of_this_process() != run_of_this_process()


def test_ranks_find_their_run_through_their_store(monkeypatch):
    store = torch.distributed.HashStore()
    monkeypatch.setattr("zerofx.compat.tensors.world_store", lambda: store)
    assert run_of_this_process() == run_of_this_process()


def test_a_store_that_answers_nothing_costs_no_step(monkeypatch):
    """As that of the fake group does not."""
    monkeypatch.setattr("zerofx.compat.tensors.world_store", torch.distributed.Store)
    assert run_of_this_process() != run_of_this_process()


# Trouble


def trained(folder):
    """The loss of two steps that dump to a folder, and that of two that do not."""
    losses = []
    for options in ({"dump": str(folder)}, {}):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x, model=model, optimizer=optimizer):
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        compiled = torch.compile(step, backend="zero", options={"lowering": "eager", **options})
        losses.append([compiled(torch.ones(2, 4)).item() for _ in range(2)])
    for known in zero.dump_folders.values():
        let_go(known)
    zero.dump_folders.clear()
    return losses


def test_a_folder_that_cannot_be_made_costs_one_warning_and_no_step(tmp_path, caplog):
    (tmp_path / "dumps").write_text("in the way")
    with caplog.at_level(logging.WARNING, logger="zerofx"):
        dumping, plain = trained(tmp_path / "dumps")
    assert dumping == plain
    (warning,) = warnings_in(caplog)
    assert f"cannot write {tmp_path / 'dumps'}" in warning and "the step runs on" in warning


def test_a_full_disk_costs_one_warning_and_leaves_no_half_program(claimed, tmp_path, caplog):
    folder = claimed(tmp_path, "run")
    folder.write(PROGRAM, "fits")
    full = tmp_path / "rank0" / "step0_0" / "01_recompute.py"
    full.symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING, logger="zerofx"):
        folder.write("rank0/step0_0/01_recompute.py", "does not fit")
        folder.write("rank0/step0_0/02_data_parallel.py", "is not tried")
    (warning,) = warnings_in(caplog)
    assert "No space left on device" in warning and str(full) in warning
    assert [path.name for path in programs_in(full.parent)] == ["00_captured.py"]


def test_a_real_step_dumps_its_programs(tmp_path):
    dumping, plain = trained(tmp_path)
    assert dumping == plain
    (folder,) = (tmp_path / "rank0").iterdir()
    assert folder.name.startswith("step") and len(programs_in(folder)) > 4
    assert (folder / "summary.txt").exists()


def test_without_a_folder_nothing_is_written_or_described(monkeypatch):
    """Nor is a text made for nobody: there is no structured trace either."""

    def fail(*arguments, **options):
        raise AssertionError("a step that is not dumped pays for dumps")

    monkeypatch.setattr("zerofx.backend.claim", fail)
    for name in ("program.ProgramDump", "rewrite.describe", "program.explanation"):
        monkeypatch.setattr(f"zerofx.compiler.{name}", fail)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        model(x).sum().backward()
        optimizer.step()

    torch.compile(step, backend="zero", options={"lowering": "eager"})(torch.ones(2, 4))


def test_names_of_functions_make_names_of_folders():
    assert file_name("step0_0") == "step0_0"
    assert file_name("größe3_1") == "größe3_1"
    assert file_name("<lambda>4_0") == "_lambda_4_0"
    assert file_name("../../etc/passwd5_0") == "_.._etc_passwd5_0"


@pytest.mark.nightly
def test_torchs_structured_trace_has_the_same_programs(tmp_path):
    """``TORCH_TRACE``, which tlparse reads, with and without a folder to dump to."""
    code = (
        "import sys; from pathlib import Path; from tests.report.test_dump_folder import trained; "
        "trained(Path(sys.argv[1]))"
    )
    root, dumps, traces = Path(__file__).parents[2], tmp_path / "dumps", tmp_path / "traces"
    environment = {**os.environ, "TORCH_TRACE": str(traces)}
    # torch.compile finds the backend by its entry point, or as the tests' conftest registers it.
    command = [sys.executable, "-c", "import tests.conftest; " + code, str(dumps)]
    subprocess.run(command, cwd=root, env=environment, check=True, capture_output=True)
    payloads: dict[str, list[str]] = {}
    for trace in traces.iterdir():
        name = ""
        for line in trace.read_text().splitlines():
            if line.startswith("\t"):
                if name:
                    payloads[name][-1] += line[1:] + "\n"
                continue
            record = json.loads(line[line.index("{") :])
            name = record.get("artifact", {}).get("name", "")
            if name:
                payloads.setdefault(name, []).append("")
    (folder,) = (dumps / "rank0").iterdir()
    for path in programs_in(folder):
        with_folder, without = payloads[f"zerofx_{path.stem}"]
        assert with_folder.strip() == path.read_text().strip()
        assert "def program(" in without
    assert "data_parallel" in payloads["zerofx_summary"][1]
