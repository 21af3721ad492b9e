"""``diff`` says what a person would: planted edits of dumped programs, passes, ranks and runs."""

import re
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import zerofx.__main__ as command_line
from tests.kit.dumps import programs_in, write_dump
from tests.kit.programs import capture, mlp_step
from zerofx.cli.diff import report
from zerofx.report.read import read
from zerofx.report.text import FORMAT


@pytest.fixture(scope="module")
def dumped(tmp_path_factory):
    """A dump of three layers, with buckets, by rank."""
    folder = tmp_path_factory.mktemp("dump")
    for rank in (0, 1):
        write_dump(mlp_step(num_layers=3, width=4), folder, rank=rank, bucket=True)
    return folder


@pytest.fixture
def program(dumped):
    """The last program of rank 0, as a path."""
    return programs_in(dumped / "rank0" / "step0_0")[-1]


def edited(path, tmp_path, edit):
    """A copy of a dumped program whose lines ``edit`` has changed in place."""
    lines = path.read_text().splitlines()
    edit(lines)
    copy = tmp_path / path.name
    copy.write_text("\n".join(lines) + "\n")
    return copy


def line_of(lines, name):
    return next(i for i, line in enumerate(lines) if line.startswith(f"    {name}: "))


def difference(first, second, full=False):
    """The counts of inserted, removed, moved and changed statements, and the lines that differ."""
    counts, *lines = report(read(first), read(second), full)
    *found, _ = map(int, re.findall(r"\d+", counts))
    return found, lines


def changes(lines):
    """Statements in a difference without what they are: ``+ free_bucket0``."""
    found = (re.match(r"([-+])    (\w+): ", line) for line in lines)
    return [f"{match[1]} {match[2]}" for match in found if match]


def test_a_program_does_not_differ_from_itself(program, capsys):
    assert difference(program, program) == ([0, 0, 0, 0], [])
    assert command_line.main(["diff", str(program), str(program)]) == 0
    assert "0 inserted, 0 removed, 0 moved, 0 changed" in capsys.readouterr().out


def test_a_moved_statement_is_all_that_is_reported(program, tmp_path):
    def move(lines):
        line = lines.pop(line_of(lines, "gelu_1"))
        lines.insert(line_of(lines, "addmm"), line)

    found, lines = difference(program, edited(program, tmp_path, move))
    assert found == [0, 0, 1, 0]
    assert changes(lines) == ["+ gelu_1", "- gelu_1"]


def test_what_is_inserted_and_removed_is_said(program, tmp_path):
    def change(lines):
        at = line_of(lines, "gelu")
        lines.insert(at, "    # prefetch: free 2.weight; planted")
        lines.insert(at + 1, '    planted: "" = zerofx.free(addmm)')
        del lines[line_of(lines, "gelu_1")]

    found, lines = difference(program, edited(program, tmp_path, change))
    assert found == [1, 1, 0, 0] and changes(lines) == ["+ planted", "- gelu_1"]
    assert "+    # prefetch: free 2.weight; planted" in lines


def test_what_reads_or_calls_something_else_has_changed(program, tmp_path):
    def change(lines):
        at = line_of(lines, "gelu")
        lines[at] = lines[at].replace("gelu.default(addmm)", "gelu.default(addmm_1)")
        at = next(i for i, line in enumerate(lines) if "all_gather_start" in line)
        lines[at] = lines[at].replace("world_size=2", "world_size=4")
        at = next(i for i, line in enumerate(lines) if line.startswith("    return "))
        lines[at] = "    return (gelu,)"

    found, lines = difference(program, edited(program, tmp_path, change))
    assert found == [0, 0, 0, 3]
    assert changes(lines)[2:] == ["- gelu", "+ gelu"] and "+    return (gelu,)" in lines


def test_what_a_statement_deletes_is_no_difference(program, tmp_path):
    def change(lines):
        at = next(i for i, line in enumerate(lines) if ";  del " in line)
        lines[at] = lines[at].split(";  del ")[0]

    assert difference(program, edited(program, tmp_path, change)) == ([0, 0, 0, 0], [])


def test_every_statement_is_shown_if_asked_for(program, tmp_path):
    copy = edited(program, tmp_path, lambda lines: lines.pop(line_of(lines, "gelu_1")))
    short, full = (difference(program, copy, full)[1] for full in (False, True))
    assert len(short) < 20 and len(full) > len(copy.read_text().splitlines())


@pytest.mark.parametrize(
    ("passes", "expected"),
    [
        (
            ("00", "04"),
            r"\n-    \w+: .* = zerofx\.gradient\((?:.*\n)*"
            r"\+    # data_parallel: reduce_gradient 0\.weight.*\n"
            r"(?:\+    # .*\n)*\+    reduce_gradient_start_0_weight: ",
        ),
        (
            ("shard_gradients", "shard_parameters"),
            r"\n-# collectives +6 +6\n\+# allocated.*\n\+# sent.*\n\+# collectives +6 +7\n"
            r"(?:.*\n)*?"
            r'-    parameter_0_weight: "f32\[4, 4\]cpu",\n(?:.*\n)*?'
            r'\+    parameter_0_weight: "f32\[12\]cpu",\n(?:.*\n)*?'
            r"\+    # shard_parameters: pack 0\.weight, 0\.bias \(bucket 0\)\n"
            r"\+    pack_bucket0_1: ",
        ),
        (
            ("shard_parameters", "prefetch"),
            r"0 inserted, 0 removed, [1-9]\d* moved, 0 changed, \d+ as they were\n",
        ),
    ],
)
def test_what_passes_do_is_shown_with_what_they_say_of_it(dumped, passes, expected, capsys):
    assert command_line.main(["diff", str(dumped), *passes]) == 0
    out = capsys.readouterr().out
    assert re.search(expected, out), out


def test_ranks_of_an_even_cut_differ_in_nothing_but_their_number(tmp_path):
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    captured = capture(step, torch.randn(2, 4), world_size=2)
    first, second = (programs_in(write_dump(captured, tmp_path, rank=rank))[-1] for rank in (0, 1))
    found, lines = difference(first, second)
    assert found == [0, 0, 0, 0]
    assert [line for line in lines[2:] if line[0] == "+" and "rank 1" not in line] == ["+RANK = 1"]


def test_a_pass_that_is_turned_off_in_another_run_shows(dumped, tmp_path, capsys):
    other = write_dump(mlp_step(num_layers=3, width=4), tmp_path, bucket=True, prefetch=False)
    with_it, without = (programs_in(f)[-1] for f in (dumped / "rank0" / "step0_0", other))
    assert command_line.main(["diff", str(without), str(with_it)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"0 inserted, 0 removed, [1-9]\d* moved, 0 changed", out)
    assert re.search(r"^-    gather_start_bucket2_1: ", out, re.M)
    assert re.search(r"^\+    gather_start_bucket2_1: ", out, re.M)


# Bad input


def failing(capsys, *arguments):
    assert command_line.main([*map(str, arguments)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("zerofx: ") and "Traceback" not in error
    return error


def test_another_format_is_refused_with_words(program, tmp_path, capsys):
    first = f"# zerofx dump {FORMAT}, "

    def age(lines):
        assert lines[0].startswith(first)
        lines[0] = lines[0].replace(first, f"# zerofx dump {FORMAT + 1}, ")

    other = edited(program, tmp_path, age)
    for arguments in (("diff", program, other), ("run", other)):
        error = failing(capsys, *arguments)
        assert f"is a dump of format {FORMAT + 1}" in error and "dump the step again" in error


def test_another_torch_is_refused_by_run_and_not_by_diff(program, tmp_path, capsys):
    def age(lines):
        lines[0] = lines[0].replace(f"torch {torch.__version__}", "torch 2.9.1+cpu")

    other = edited(program, tmp_path, age)
    assert "was dumped with torch 2.9" in failing(capsys, "run", other, "--random")
    assert difference(program, other)[0] == [0, 0, 0, 0]


def test_what_is_no_dump_is_refused_with_words(program, dumped, tmp_path, capsys):
    assert "is no program that zerofx has dumped" in failing(capsys, "run", __file__)
    assert "No such file" in failing(capsys, "run", tmp_path / "nothing.py")
    assert "is a folder" in failing(capsys, "run", dumped)
    lines = program.read_text().splitlines()
    for end in (10, lines.index("def program(") + 30):
        cut = edited(program, tmp_path, lambda lines, end=end: lines.__delitem__(slice(end, None)))
        assert "is not whole" in failing(capsys, "diff", program, cut)
    noise = tmp_path / "noise.py"
    noise.write_bytes(b"\xff\xfe\x00")
    assert "is no program" in failing(capsys, "run", noise)


def test_wrong_folders_passes_and_functions_are_told_what_there_is(dumped, tmp_path, capsys):
    assert "does not exist" in failing(capsys, "diff", tmp_path / "none", "0", "1")
    assert "no dump of rank 0" in failing(capsys, "diff", tmp_path, "0", "1")
    error = failing(capsys, "diff", dumped, "0", "no_such_pass")
    assert "has no program 'no_such_pass'; it has 00_captured, 01_normalize" in error
    assert "two passes, or two files" in failing(capsys, "diff", dumped)
    write_dump(mlp_step(num_layers=3, width=4), tmp_path, function="step0_0", stage=0)
    write_dump(mlp_step(num_layers=3, width=4), tmp_path, function="step1_0", stage=0)
    error = failing(capsys, "diff", tmp_path, "0", "1")
    assert "step0_0, step1_0: name one with --function" in error
    assert command_line.main(["diff", str(tmp_path), "0", "1", "--function", "step1_0"]) == 0
    assert "no function 'step2_0'; there is step0_0, step1_0" in failing(
        capsys, "diff", tmp_path, "0", "1", "--function", "step2_0"
    )


def test_a_program_that_was_edited_wrongly_fails_with_its_line(program, tmp_path, capsys):
    copy = edited(program, tmp_path, lambda lines: lines.insert(-8, "    x = ("))
    assert f"{copy}, line " in failing(capsys, "run", copy)


@pytest.mark.nightly
def test_odd_names_are_shown_as_they_were_written(tmp_path):
    """Python allows any string without a dot as a parameter's name, and more in a step's source."""
    odd = ["a/b", "größe", "with space", 'quo"te', "colon: (bucket 3); x", "back\\slash", "x" * 300]
    model = nn.Module()
    for name in odd:
        model.register_parameter(name, nn.Parameter(torch.randn(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        sum((p * x).sum() for p in model.parameters()).backward()
        optimizer.step()
        optimizer.zero_grad()

    captured = capture(step, torch.randn(4), world_size=2)
    paths = programs_in(write_dump(captured, tmp_path))
    for path in paths:
        assert sorted(read(path).facts["PARAMETERS"]) == sorted(odd)
    _, lines = difference(paths[0], paths[-1])
    text = re.sub(r"\n\+    #     ", " ", "\n".join(lines))
    for name in ("a/b", "größe", '"with space"', r'"quo\"te"', '"colon: (bucket 3); x"', "x" * 300):
        assert re.search(rf"\+    # shard_parameters: gather {re.escape(name)}[;\n]", text), name


def written(count, tmp_path, order=None):
    """A program of so many statements, as a dump writes it."""
    body = [
        f'    node_{i}: "f32[4]cpu" = aten.add.Tensor(node_{i - 1}, {i % 7});  del node_{i - 1}'
        for i in range(1, count + 1)
    ]
    if order:
        order(body)
    head = [
        f"# zerofx dump {FORMAT}, torch {torch.__version__}, zerofx 0",
        "# 00 captured, rank 0 of 1, stage 0",
        *("RANK = 0", "WORLD_SIZE = 1", "STAGE = 0", "PARAMETERS = {}", "OPTIMIZERS = []"),
        "INPUTS = {'node_0': {'kind': 'other', 'shape': (4,)}}",
        *("GRADIENTS = {}", "SHARDED_RESULTS = []", "OBSTACLES = []"),
        *("def program(", '    node_0: "f32[4]cpu",', "):"),
    ]
    path = tmp_path / f"{len(list(tmp_path.iterdir())):02d}_captured.py"
    path.write_text("\n".join([*head, *body, f"    return (node_{count},)", ""]))
    return path


def test_ten_times_the_statements_take_little_more_than_ten_times_as_long(tmp_path):
    def reverse_a_tenth(body):
        tenth = len(body) // 10
        body[:tenth] = reversed(body[:tenth])

    seconds = []
    for count in (4_000, 40_000):
        paths = written(count, tmp_path), written(count, tmp_path, reverse_a_tenth)
        started = time.process_time()
        lines = list(report(*map(read, paths)))
        seconds.append(time.process_time() - started)
        moved = count // 10 - 1
        assert f"0 inserted, 0 removed, {moved} moved, 0 changed, {count - moved + 2}" in lines[0]
    assert seconds[1] < 40 * seconds[0]
    assert Path(paths[0]).stat().st_size > 2_000_000
