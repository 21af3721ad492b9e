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
from zerofx.cli.diff import Difference, compare, report, short_place
from zerofx.report.read import read, statements
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


def difference(first, second):
    return compare(statements(read(first)), statements(read(second)))


def names(found):
    return [statement.name for statement in found]


def test_every_statement_is_read_with_what_is_said_of_it(program):
    text = program.read_text()
    found = statements(read(program))
    written = re.findall(r"^    (\w+): \"", text, re.M)
    assert names(found) == [*written, "return"]
    by_name = {statement.name: statement for statement in found}
    (start,) = [s for s in found if s.operator == "zerofx.all_gather_start" and s.bucket == 0][:1]
    assert (start.by, start.role) == ("shard_parameters", "gather")
    assert start.names == "0.weight, 0.bias" and "MB" in start.why
    assert by_name["addmm"].module == "model.0" and "loss = model(x)" in by_name["addmm"].place
    assert by_name[start.name].reads[0].startswith("pack_bucket0")
    assert sum(s.gradient_of == "4.weight" for s in found) >= 1


def is_empty(found):
    return found == Difference([], [], [], [], found.unchanged)


def test_a_program_does_not_differ_from_itself(program, capsys):
    assert is_empty(difference(program, program))
    assert command_line.main(["diff", str(program), str(program)]) == 0
    assert "0 inserted, 0 removed, 0 moved, 0 changed" in capsys.readouterr().out


def test_a_moved_statement_is_all_that_is_reported(program, tmp_path):
    def move(lines):
        line = lines.pop(line_of(lines, "gelu_1"))
        lines.insert(line_of(lines, "addmm"), line)

    copy = edited(program, tmp_path, move)
    found = difference(program, copy)
    assert not (found.inserted or found.removed or found.changed)
    ((moved, coming),) = found.moved
    assert (moved.name, coming) == ("gelu_1", "addmm")
    assert "> gelu_1 moved: now before addmm" in "\n".join(report(read(program), read(copy)))


def test_what_is_inserted_and_removed_is_said(program, tmp_path):
    def change(lines):
        at = line_of(lines, "gelu")
        lines.insert(at, "    # prefetch: free 2.weight; planted")
        lines.insert(at + 1, '    planted: "" = zerofx.free(addmm)')
        del lines[line_of(lines, "gelu_1")]

    copy = edited(program, tmp_path, change)
    found = difference(program, copy)
    assert (names(found.inserted), names(found.removed)) == (["planted"], ["gelu_1"])
    text = "\n".join(report(read(program), read(copy)))
    assert re.search(
        r"bucket \d+ \(2.weight, 2.bias\)\n  \+ free: planted  \(prefetch; planted\)", text
    )
    assert re.search(r"in model.3\n  - aten.gelu.default: gelu_1", text)


def test_changed_arguments_are_told_from_replaced_operands(program, tmp_path):
    def change(lines):
        at = line_of(lines, "gelu")
        lines[at] = lines[at].replace("gelu.default(addmm)", "gelu.default(addmm_1)")
        at = next(i for i, line in enumerate(lines) if "all_gather_start" in line)
        lines[at] = lines[at].replace("world_size=2", "world_size=4")

    copy = edited(program, tmp_path, change)
    found = difference(program, copy)
    assert "gelu" in [new.name for _, new in found.changed] and len(found.changed) == 2
    text = "\n".join(report(read(program), read(copy)))
    assert "~ gelu reads addmm_1 instead of addmm" in text
    assert re.search(r"\+ zerofx.all_gather_start\(\w+, world_size=4\)", text)


@pytest.mark.parametrize(
    ("passes", "expected"),
    [
        (
            ("00", "03"),
            r"0\.weight\n  - zerofx\.gradient: \w+\n"
            r"  \+ reduce_gradient: reduce_gradient_start_0_weight, .*\(data_parallel\)",
        ),
        (
            ("shard_gradients", "shard_parameters"),
            r"bucket 0 \(0\.weight, 0\.bias\)\n(?:  .*\n)*?"
            r"  - aten\.copy_\.default: copy_, copy__1\n"
            r"  - free: free_bucket0  \(shard_optimizer\)\n"
            r"  \+ pack: pack_bucket0_1.*  \(shard_parameters\)\n"
            r"(?:  .*\n)*?"
            r"  ~ input parameter_0_weight: f32\[4, 4\]cpu -> f32\[12\]cpu\n",
        ),
        (
            ("shard_parameters", "prefetch"),
            r"\n0 inserted, 0 removed, \d+ moved, 0 changed, \d+ as they were\n",
        ),
    ],
)
def test_what_passes_do_is_said_by_parameter(dumped, passes, expected, capsys):
    assert command_line.main(["diff", str(dumped), *passes]) == 0
    out = capsys.readouterr().out
    assert re.search(expected, out), out


def test_ranks_of_an_even_cut_differ_in_nothing(tmp_path, capsys):
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    captured = capture(step, torch.randn(2, 4), world_size=2)
    first, second = (programs_in(write_dump(captured, tmp_path, rank=rank))[-1] for rank in (0, 1))
    assert is_empty(difference(first, second))


def test_a_pass_that_is_turned_off_in_another_run_shows(dumped, tmp_path, capsys):
    other = write_dump(mlp_step(num_layers=3, width=4), tmp_path, bucket=True, prefetch=False)
    with_it, without = (programs_in(f)[-1] for f in (dumped / "rank0" / "step0_0", other))
    assert command_line.main(["diff", str(without), str(with_it)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"0 inserted, 0 removed, [1-9]\d* moved, 0 changed", out)
    assert re.search(r"> .*gather_start_bucket\d.* moved: now before \w+", out)


@pytest.mark.parametrize(
    "place, shown",
    [
        ("/home/me/train.py:7: loss = a / b", "train.py:7: loss = a / b"),
        ("/home/My runs/a/train me.py:7: loss = a / b:2", "train me.py:7: loss = a / b:2"),
        (r"C:\me\train.py:7: loss = a", "train.py:7: loss = a"),
        ("train.py:7", "train.py:7"),
        ("", ""),
    ],
)
def test_a_line_of_source_is_shown_with_its_files_name(place, shown):
    assert short_place(place) == shown


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
    assert is_empty(difference(program, other))


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


def test_odd_names_are_read_as_they_were_written(tmp_path):
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
    for path in programs_in(write_dump(captured, tmp_path)):
        program = read(path)
        assert sorted(program.facts["PARAMETERS"]) == sorted(odd)
        inserted = [s for s in statements(program) if s.role and s.role != "input"]
        shown = {s.names for s in inserted}
        assert "colon" not in " ".join(shown - {s for s in shown if s.startswith('"')})
        assert all(s.bucket == -1 for s in inserted)
    first, *_, last = programs_in(tmp_path / "rank0" / "step0_0")
    text = "\n".join(report(read(first), read(last)))
    for title in ("a/b", "größe", '"with space"', r'"quo\"te"', "x" * 300):
        assert f"\n{title}\n" in text
    assert '\n"colon: (bucket 3); x"\n' in text


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
        assert f"0 inserted, 0 removed, {moved} moved, 0 changed, {count - moved + 2}" in lines[3]
    assert seconds[1] < 40 * seconds[0]
    assert Path(paths[0]).stat().st_size > 2_000_000
