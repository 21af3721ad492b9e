"""Dumped programs are numbered Python files that say what made them and where lines come from."""

import ast
import re

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import zerofx
from tests.kit.covering import only
from tests.kit.dumps import programs_in, write_dump
from tests.kit.programs import (
    capture,
    clone,
    evaluation,
    mlp_step,
    nodes_of,
    run_passes,
    smallest_step,
)
from zerofx.ir import ops
from zerofx.ir.roles import provenance
from zerofx.options import OPTIONAL_PASSES
from zerofx.passes.pipeline import PIPELINE, rewrites
from zerofx.report.folder import MARKER
from zerofx.report.text import FORMAT


@pytest.fixture
def dumped(tmp_path):
    """``dumped(captured, **options)`` -> the folder, after running the passes."""

    def dump(captured, **options):
        return write_dump(captured, tmp_path, **options)

    return dump


IN_FILES = {"offload": "optimizer,activations", "offload_tier": "nvme", "offload_dir": "scratch"}


def files(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != MARKER)


def test_programs_are_numbered_in_the_order_of_the_passes(dumped):
    names = ["captured", *(step.name for step in rewrites(PIPELINE))]
    expected = [f"{number:02d}_{name}.py" for number, name in enumerate(names)]
    wires = {"gather_dtype": "int8", "reduce_wire": "int8"}
    everything = {**dict.fromkeys(OPTIONAL_PASSES, True), **IN_FILES, **wires, "loss": "global"}
    assert files(dumped(mlp_step(), **everything)) == [*expected, "summary.txt"]


def test_passes_that_did_not_run_leave_no_file(dumped):
    assert files(dumped(mlp_step(), stage=1, prefetch=False, recompute=False)) == [
        "00_captured.py",
        "01_normalize.py",
        "02_chunk_loss.py",
        "03_data_parallel.py",
        "04_shard_optimizer.py",
        "summary.txt",
    ]


def test_what_runs_is_dumped_as_the_other_programs_are(dumped):
    options = {"lowering": "inductor", "until": "form_regions"}
    folder = dumped(mlp_step(clip=True), bucket=True, **options)
    names = [path.name[3:] for path in programs_in(folder)]
    assert names[-4:] == [
        "fold_gradient_work.py",
        "merge_updates.py",
        "reduce_unflattened.py",
        "form_regions.py",
    ]
    text = programs_in(folder)[-1].read_text()
    assert 'work="' in text.replace("'", '"') and "zerofx.update_together([" in text
    assert "zerofx.reduce_bucket_start([" in text
    assert "OBSTACLES = []" in text  # to running it again


def test_ranks_and_functions_have_folders_of_their_own(dumped, tmp_path):
    dumped(smallest_step(), rank=1)
    dumped(smallest_step(), rank=0)
    dumped(evaluation(), rank=0, function="step1_0")
    folders = {path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("*/*")}
    assert folders == {"rank0/step0_0", "rank0/step1_0", "rank1/step0_0"}


def test_every_program_is_python(dumped):
    for path in programs_in(dumped(mlp_step(clip=True))):
        tree = ast.parse(path.read_text())
        functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        assert functions == ["program"]


def test_the_first_lines_name_versions_the_pass_and_what_it_did(dumped):
    folder = dumped(mlp_step())
    lines = (folder / "04_data_parallel.py").read_text().splitlines()
    assert lines[:3] == [
        f"# zerofx dump {FORMAT}, torch {torch.__version__}, zerofx {zerofx.__version__}",
        "# 04 data_parallel, rank 0 of 2, stage 3",
        "# averaged: 6, sums averaged once: 0",
    ]
    costs = {re.split(r"\s{2,}", line)[0]: re.split(r"\s{2,}", line)[1:] for line in lines[4:10]}
    assert costs["# per rank and step"] == ["before", "after"]
    assert costs["# collectives"] == ["0", "6"]
    # Three matrices [5, 5] and biases [5] of f32, twice half of them sent.
    assert costs["# sent"] == ["0 B", "360 B"]
    before, after = costs["# allocated at most"]
    assert before.endswith(" B") and after.endswith(" B")


def test_shapes_dtypes_and_the_users_lines_are_shown(dumped):
    text = (dumped(mlp_step()) / "00_captured.py").read_text()
    assert re.search(r'addmm: "f32\[3, 5\]cpu" = aten\.addmm\.default\(', text)
    assert re.search(r't: "f32\[5, 5\]\[1, 5\]cpu" = aten\.t\.default\(', text)
    source = r"    # from \S*programs.py:\d+ \(model\.0\): loss = model\(x\)\.pow\(2\)\.mean\(\)\n"
    assert re.search(source + r"    t: ", text)


def explained(folder, *names):
    """What the last program says about a node, in place: the comments above it, as one line."""
    lines = programs_in(folder)[-1].read_text().splitlines()
    found = []
    for position, line in enumerate(lines):
        if re.match(rf"    (?:{'|'.join(names)}): ", line):
            comments = []
            while lines[position - 1].startswith("    # "):
                position -= 1
                comments.insert(0, lines[position][6:])
            found.append(re.sub(r"\s+", " ", " ".join(comments)))
    return found


def test_what_serves_a_bucket_names_its_parameters(dumped):
    folder = dumped(mlp_step(), bucket=True)
    (start, *_) = explained(folder, r"gather_start_bucket0\w*")
    assert re.search(r"\w+: gather 0.weight, 0.bias \(bucket 0\); .* MB ", start)


def test_every_inserted_node_is_explained_in_place(dumped):
    program = clone(mlp_step(clip=True))
    run_passes(program)
    folder = dumped(mlp_step(clip=True))
    inserted = [node for node in program.graph.nodes if provenance(node)]
    assert inserted
    for node in inserted:
        origin = provenance(node)
        (comment,) = explained(folder, node.name)
        assert f"{origin.inserted_by}: {origin.role}" in comment
        if origin.parameter >= 0:
            assert f"{origin.role} {program.table[origin.parameter].name}" in comment
    for start in nodes_of(program, ops.all_gather_start):
        (comment,) = explained(folder, start.name)
        assert "; " in comment  # why it is there


def test_local_gradients_say_whose_they_are(dumped):
    lines = (dumped(mlp_step()) / "04_data_parallel.py").read_text().splitlines()
    marked = [line.strip() for line in lines if "this rank's gradient of" in line]
    assert sorted(marked) == sorted(
        f"# this rank's gradient of {index}.{of}"
        for index in (0, 2, 4)
        for of in ("weight", "bias")
    )


def test_dumping_changes_nothing_in_the_program(tmp_path):
    plain, watched = clone(mlp_step()), []
    run_passes(plain)
    write_dump(mlp_step(), tmp_path, watched=watched)
    assert watched[-1].gm.code == plain.gm.code


def test_dumping_adds_no_guard(tmp_path):
    x = torch.randn(6, 4)
    torch._dynamo.mark_dynamic(x, 0)
    captured = capture(lambda x: (x * 2).sum(0), x)
    symbol = next(n.meta["val"] for n in captured.graph.nodes if n.name == "mul").shape[0]
    before = list(symbol.node.shape_env.guards)
    write_dump(captured, tmp_path)
    assert symbol.node.shape_env.guards == before


def test_the_summary_has_a_line_per_pass(dumped):
    text = (dumped(mlp_step(), stage=1) / "summary.txt").read_text()
    lines = text.split("\n\n")[0].splitlines()
    assert re.split(r"\s{2,}", lines[0].strip()) == [
        *("pass", "collectives", "sent", "peak before", "after", "seconds")
    ]
    rows = {re.search(r"[a-z]\w+", line)[0]: line for line in lines[2:]}
    assert list(rows) == ["captured", *(step.name for step in rewrites(PIPELINE))]
    assert re.match(
        r"04  data_parallel +6 .* \d+ B +\d+ B +0\.\d{4} +averaged: 6", rows["data_parallel"]
    )
    assert rows["shard_parameters"].endswith("off: stage 1 (needs 3)")


def test_the_same_step_gives_the_same_bytes_again_but_for_the_time(dumped, tmp_path):
    folders = [dumped(mlp_step(clip=True), function=name) for name in ("first", "second")]
    for paths in zip(*map(programs_in, folders), strict=True):
        assert paths[0].read_bytes() == paths[1].read_bytes()


@pytest.mark.nightly
def test_ranks_dump_the_same_but_for_their_numbers(dumped):
    """Of tensors that are cut evenly; else the lengths of shards differ."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x):
        model(x).sum().backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    captured = capture(step, torch.randn(2, 4), world_size=2)
    folders = [dumped(captured, rank=rank) for rank in (0, 1)]
    for first, second in zip(*map(programs_in, folders), strict=True):
        text = first.read_text().replace("rank 0 of", "rank 1 of").replace("RANK = 0", "RANK = 1")
        assert text == second.read_text()


def test_optimizers_are_numbered_by_the_program_that_uses_them(dumped):
    """A handle is a number of the process: the second compilation of a script has others."""
    w = nn.Parameter(torch.randn(4))
    texts = []
    for _ in range(2):
        optimizer = torch.optim.SGD([w], lr=0.1)

        def step(x, optimizer=optimizer):
            (x * w).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        folder = dumped(capture(step, torch.randn(4)), function=f"step{len(texts)}")
        texts.append(programs_in(folder)[-1].read_text())
    assert texts[0] == texts[1]
    assert "optimizer=0" in texts[0]


def test_a_line_of_source_in_any_alphabet_is_written(dumped):
    def step(x):
        größe = x * 2
        return größe.sum()

    text = (dumped(capture(step, torch.randn(3)), stage=0) / "00_captured.py").read_bytes()
    assert "größe = x * 2" in text.decode("utf-8")


@pytest.mark.parametrize(
    "folder",
    only(
        ("line\nbreak", "line 3, in b"),
        ("My runs", "a, b (c)", 'quo"te', "line\nbreak", "line 3, in b"),
    ),
)
def test_where_a_line_is_from_is_told_from_the_line_whatever_they_are_called(
    folder, dumped, tmp_path
):
    path = tmp_path / folder / "my train.py"
    path.parent.mkdir()
    path.write_text("def step(x):\n    Filed = x * 2\n    return Filed.sum() / 2\n")
    names = {}
    exec(compile(path.read_text(), path, "exec"), names)
    text = programs_in(dumped(capture(names["step"], torch.randn(3)), stage=0))[0].read_text()
    shown = " ".join(str(path).splitlines())
    assert re.findall(r"^    # from (.*)$", text, re.M) == [
        f"{shown}:2: Filed = x * 2",
        f"{shown}:3: return Filed.sum() / 2",
    ]


def test_gathers_say_why_they_are_there(dumped):
    without = "\n".join(explained(dumped(mlp_step(num_layers=4)), r"gather_start\w*"))
    assert re.search(r"MB again for backward: .* no memory_budget is set; ", without)
    assert re.search(r" ms of transfer, exposed; starts one gather ahead$", without, re.M)
    folder = dumped(mlp_step(num_layers=4), memory_budget=10**9)
    least = "\n".join(explained(folder, r"gather_start\w*"))
    assert "again for backward" not in least
    assert re.search(r"MB once for forward and backward: it fits memory_budget", least)
