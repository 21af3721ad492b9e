"""Dumped programs are numbered Python files that say what made them and where lines come from."""

import ast
import logging
import re

import pytest
import torch

from tests.programs import (
    capture,
    clone,
    evaluation,
    mlp_step,
    nodes_of,
    run_passes,
    smallest_step,
)
from zerofx import ops
from zerofx.dump import ProgramDump
from zerofx.graph import provenance
from zerofx.options import OPTIONAL_PASSES
from zerofx.passes.pipeline import PIPELINE


@pytest.fixture
def dumped(tmp_path):
    """``dumped(captured, **options)`` -> the folder, after running the passes."""

    def dump(captured, rank=0, function="step0_0", **options):
        program = clone(captured)
        writer = ProgramDump(str(tmp_path), rank, function, program.table)
        reports = run_passes(program, rank=rank, on_program=writer.write, **options)
        writer.write_summary(list(reports.values()))
        return tmp_path / f"rank{rank}" / function

    return dump


IN_FILES = {"offload": "optimizer,activations", "offload_tier": "nvme", "offload_dir": "scratch"}


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_programs_are_numbered_in_the_order_of_the_passes(dumped):
    names = ["captured", *(step.name for step in PIPELINE)]
    expected = [f"{number:02d}_{name}.py" for number, name in enumerate(names)]
    everything = {**dict.fromkeys(OPTIONAL_PASSES, True), **IN_FILES}
    assert files(dumped(mlp_step(), **everything)) == [*expected, "summary.txt"]


def test_passes_that_did_not_run_leave_no_file(dumped):
    assert files(dumped(mlp_step(), stage=1, prefetch=False, recompute=False)) == [
        "00_captured.py",
        "01_data_parallel.py",
        "02_shard_optimizer.py",
        "summary.txt",
    ]


def test_ranks_and_functions_have_folders_of_their_own(dumped, tmp_path):
    dumped(smallest_step(), rank=1)
    dumped(smallest_step(), rank=0)
    dumped(evaluation(), rank=0, function="step1_0")
    folders = {path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("*/*")}
    assert folders == {"rank0/step0_0", "rank0/step1_0", "rank1/step0_0"}


def test_every_program_is_python(dumped):
    folder = dumped(mlp_step(clip=True))
    for name in files(folder)[:-1]:
        tree = ast.parse((folder / name).read_text())
        (module,) = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        assert "forward" in [getattr(node, "name", None) for node in module.body]


def test_a_program_can_be_run_from_its_file(dumped):
    folder = dumped(evaluation(), stage=0)
    namespace = {"torch": torch, "device": torch.device}
    exec((folder / "00_captured.py").read_text(), namespace)
    (module,) = [
        value
        for value in namespace.values()
        if isinstance(value, type) and issubclass(value, torch.nn.Module)
    ]
    actual = module()(*evaluation().inputs)
    torch.testing.assert_close(actual, evaluation().gm(*evaluation().inputs), rtol=0, atol=0)


def test_the_first_lines_name_the_pass_and_what_it_did(dumped):
    folder = dumped(mlp_step())
    first, second = (folder / "02_data_parallel.py").read_text().splitlines()[:2]
    assert first == "# 02 data_parallel"
    assert second == "# averaged: 6, sums averaged once: 0"
    assert (folder / "00_captured.py").read_text().startswith("# 00 captured\n")


def test_shapes_dtypes_and_the_users_lines_are_shown(dumped):
    text = (dumped(mlp_step()) / "00_captured.py").read_text()
    assert re.search(r'addmm: "f32\[3, 5\]cpu" = torch\.ops\.aten\.addmm', text)
    assert "code: loss = model(x).pow(2).mean()" in text


def explanations(folder):
    """What the last program says about the nodes that passes have inserted."""
    last = max(folder.glob("*.py"))
    _, explained = last.read_text().split("# Inserted by zerofx:\n")
    return explained


def test_what_serves_a_bucket_names_its_parameters(dumped):
    explained = explanations(dumped(mlp_step(), bucket=True, prefetch_across_steps=True))
    assert re.search(
        r"#   gather_start_bucket0\w*: gather 0.weight, 0.bias \(\w+: .* MB .*\)\n", explained
    )
    assert "#   carry_start_bucket0: carry 0.weight, 0.bias (prefetch_across_steps)\n" in explained
    assert "#   carry_bucket0: carry 0.weight, 0.bias (prefetch_across_steps)\n" in explained
    assert re.search(r"#   flatten_bucket\w+: flatten 2.weight, 2.bias \(\w+\)\n", explained)


def test_every_inserted_node_is_explained(dumped):
    program = clone(mlp_step(clip=True))
    run_passes(program)
    explained = explanations(dumped(mlp_step(clip=True)))
    inserted = [node for node in program.graph.nodes if provenance(node)]
    assert len(explained.splitlines()) == len(inserted) > 0
    for start in nodes_of(program, ops.all_gather_start):
        name = program.table[provenance(start).parameter].name
        assert f"#   {start.name}: gather {name} (shard_parameters: " in explained
    assert re.search(r"#   \w+: reduce_scalar \(shard_optimizer\)", explained)


def test_dumping_changes_nothing_in_the_program(dumped, tmp_path):
    plain, watched = clone(mlp_step()), clone(mlp_step())
    run_passes(plain)
    writer = ProgramDump(str(tmp_path), 0, "watched", watched.table)
    run_passes(watched, on_program=writer.write)
    assert watched.gm.code == plain.gm.code
    for node in watched.graph.nodes:
        assert "custom_comment" not in node.meta


def test_the_summary_has_a_line_per_pass(dumped):
    lines = (dumped(mlp_step(), stage=1) / "summary.txt").read_text().splitlines()
    assert re.split(r"\s{2,}", lines[0]) == ["pass", "what it did", "ms"]
    rows = {line.split()[0]: line for line in lines[2:]}
    assert list(rows) == [step.name for step in PIPELINE]
    assert "averaged: 6" in rows["data_parallel"]
    assert "stage 1 (needs 3)" in rows["shard_parameters"]
    assert all(re.search(r"\d+(\.\d+)?$", line) for line in rows.values())


def test_a_folder_that_cannot_be_written_costs_a_warning(dumped, tmp_path, caplog):
    (tmp_path / "rank0").write_text("in the way")
    with caplog.at_level(logging.WARNING, logger="zerofx"):
        program = clone(smallest_step())
        writer = ProgramDump(str(tmp_path), 0, "step0_0", program.table)
        everything = {**dict.fromkeys(OPTIONAL_PASSES, True), **IN_FILES}
        reports = run_passes(program, on_program=writer.write, **everything)
        writer.write_summary(list(reports.values()))
    assert nodes_of(program, ops.update_on_host_start)
    messages = [record.getMessage() for record in caplog.records if record.name == "zerofx"]
    assert len(messages) == len(PIPELINE) + 2
    assert str(tmp_path / "rank0" / "step0_0" / "00_captured.py") in messages[0]


def test_a_line_of_source_in_any_alphabet_is_written(dumped):
    def step(x):
        größe = x * 2
        return größe.sum()

    text = (dumped(capture(step, torch.randn(3)), stage=0) / "00_captured.py").read_bytes()
    assert "größe = x * 2" in text.decode("utf-8")


def test_gathers_say_why_they_are_there(dumped):
    without = explanations(dumped(mlp_step(num_layers=4)))
    assert re.search(r"MB again for backward: .* no memory_budget is set; ", without)
    assert re.search(r"gather_start.* ms of transfer, exposed; starts one gather ahead\)", without)
    least = explanations(dumped(mlp_step(num_layers=4), memory_budget=10**9))
    assert "again for backward" not in least
    assert re.search(r"MB once for forward and backward: it fits memory_budget", least)
