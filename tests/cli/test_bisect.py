"""``python -m zerofx bisect``: it names the pass that a command fails of, or why it names none."""

import os
import re
import signal
import sys
import threading
import time
import traceback
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import zerofx.__main__ as command_line
from tests.kit.covering import each_value, first
from tests.kit.ranks import Ranks
from zerofx.cli.bisect import NEEDED
from zerofx.cli.training_runs import SWITCHED, Command, furthest
from zerofx.compiler import rewrite
from zerofx.options import turned_off
from zerofx.passes.pipeline import PIPELINE

ROOT = Path(__file__).resolve().parents[2]
LOSS = r"loss ([-+.\w]+)"


@pytest.fixture
def bisect(tmp_path, monkeypatch, capsys):
    """``bisect(code, *options)``: the exit status and what is printed, for a script of this code.

    In it ``on`` are the passes that are on, needed ones too, and ``runs`` is how many runs there
    were before.
    """
    monkeypatch.chdir(tmp_path)
    variables = {name: next(iter(turned_off([name]))) for name in SWITCHED}
    prelude = f"""
import os, sys, time
from pathlib import Path
on = [name for name, variable in {variables}.items() if os.environ.get(variable) != "0"]
needed, last = {("data_parallel", *NEEDED)}, os.environ.get("ZEROFX_STOP_AFTER")
needed = needed[: needed.index(last) + 1 if last else None]
Path("runs").open("a").write("x")
runs = len(Path("runs").read_text()) - 1
"""

    def of(code, *options):
        (tmp_path / "train.py").write_text(prelude + code)
        words = ["bisect", *options, "--", sys.executable, "-S", "train.py"]
        status = command_line.main(words)
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return of


def endings(text):
    """What the table says of each run's end."""
    return re.findall(r"exit \d+|SIG\w+|timed out", text.split("\n\n")[0])


@pytest.mark.parametrize("name", first(2, SWITCHED))
def test_the_pass_that_a_run_fails_of_is_named(name, bisect):
    status, text, _ = bisect(f"sys.exit({name!r} in on)")
    assert status == 0
    assert f"Behind {name} the run begins to fail." in text
    assert f"go on with ZEROFX_{name.upper()}=0." in text
    assert endings(text)[:2] == ["exit 1", "exit 0"]
    without, with_it = re.findall(r"^  (.*) -S train.py$", text, re.M)
    off = set(without.split()) - set(with_it.split())
    assert off == {f"ZEROFX_{name.upper()}=0"}


@pytest.mark.parametrize(("name", "has_metric"), first(2, each_value(NEEDED, (False, True))))
def test_a_pass_that_has_no_switch_is_named(name, has_metric, bisect):
    code = f"bad = {name!r} in needed\n"
    if has_metric:
        status, text, _ = bisect(f"{code}print('loss', 0.5 + bad)", "--metric", LOSS)
        assert f"Behind {name} the run prints other numbers." in text
    else:
        status, text, _ = bisect(f"{code}sys.exit(bad)")
        assert f"Behind {name} the run begins to fail." in text
        assert endings(text)[:3] == ["exit 1", "exit 1", "exit 0"]
    assert status == 0 and f"{name} has no switch" in text
    without, _ = re.findall(r"^  (.*) -S train.py$", text, re.M)
    before = ("data_parallel", *NEEDED)[NEEDED.index(name)]
    assert f"ZEROFX_STOP_AFTER={before}" in without.split()


@pytest.mark.parametrize("number", first(1, ("0.5 + 1e-4", "float('nan')", "float('inf')")))
def test_the_pass_that_changes_a_number_is_named(number, bisect):
    code = f"print('loss', {number} if 'bucket' in on else 0.5)"
    assert "Behind bucket the run prints other numbers." in bisect(code, "--metric", LOSS)[1]
    status, _, error = bisect(code, "--metric", LOSS, "--tolerance", "1e-3")
    if "1e-4" in number:
        assert status == 1 and "the numbers are the same to 0.0002" in error
    else:
        assert status == 0


def test_all_numbers_count_in_any_order(bisect):
    """Ranks print when they come to it; a run that has stopped early prints too few."""
    ranks = "numbers = ['loss 1.0', 'loss 2.0', 'loss 3.0']\nif runs % 2: numbers.reverse()\n"
    status, _, error = bisect(f"{ranks}print(*numbers, sep=os.linesep)", "--metric", LOSS)
    assert status == 1 and "no run differs" in error
    code = f"{ranks}print(*numbers[: 2 if 'prefetch' in on else 3], sep=os.linesep)"
    status, text, _ = bisect(code, "--metric", LOSS)
    assert status == 0 and "Behind prefetch" in text and " inf" in text


def test_numbers_are_compared_by_size():
    nan, inf = float("nan"), float("inf")
    assert furthest([1.0, 2.0], [2.0, 1.01]) == pytest.approx(0.01, rel=0.02)
    assert furthest([nan, 1.0], [1.0, nan]) == 0.0 and furthest([0.0], [-0.0]) == 0.0
    assert furthest([nan], [1.0]) == furthest([1.0], [inf]) == furthest([], [1.0]) == inf
    assert furthest([inf], [inf]) == 0.0


def test_a_fault_that_two_passes_have_is_told_from_one_that_a_switch_ends(bisect):
    status, text, _ = bisect("sys.exit('prefetch' in on or 'bucket' in on)")
    assert status == 0 and "With bucket alone turned off it does so too (run" in text


def test_the_error_and_the_pass_that_raises_it_are_told(bisect):
    status, text, _ = bisect(
        "if 'bucket' in on:\n"
        "    print('[rank1]: zerofx.errors.GraphError: it is broken')\n"
        "    sys.exit(\"in pass 'shard_optimizer' of zerofx\")\n"
    )
    assert status == 0 and "Behind bucket" in text
    assert "It says: zerofx.errors.GraphError: it is broken\n" in text
    assert "It is raised in another pass, shard_optimizer" in text


# Where no pass can be named


@pytest.mark.parametrize(
    ("code", "options", "told"),
    (
        ("pass", (), "the command succeeds as it is"),
        ("print('ValueError: x'); sys.exit(3)", (), r"fails \(exit 3\) with every optional pass "),
        (
            "print('ValueError: x'); sys.exit(3)",
            (),
            r"It says: ValueError: x\. Try ZEROFX_VALIDATE=1",
        ),
        ("sys.exit(3)", ("--metric", LOSS), "with every optional pass off too"),
        ("os.kill(os.getpid(), 11)", (), r"fails \(SIGSEGV\)"),
        ("print('loss 1')", ("--metric", LOSS), "no run differs: .* the same to 0, and"),
        ("print('lost 1')", ("--metric", LOSS), "finds nothing in what the command printed: zero"),
        (
            "print('loss one')",
            ("--metric", LOSS),
            r"no number in zerofx-bisect/run1.txt: \['one'\]",
        ),
        ("time.sleep(60)", ("--timeout", "0.2"), r"fails \(timed out\) with every"),
    ),
)
def test_what_no_pass_is_to_blame_for_is_said(code, options, told, bisect):
    status, _, error = bisect(code, *options)
    assert status == 1 and re.search(told, error), error


@pytest.mark.parametrize("is_last", (True, False))
def test_a_run_that_does_not_end_alike_twice_names_no_pass(is_last, bisect):
    """Either of the two runs that decide: the last with the pass on, and the last without."""
    code = (
        "key = 'on ' + ' '.join(on) + ';'\n"
        "seen = Path('seen').read_text().split(';') if Path('seen').exists() else []\n"
        "Path('seen').open('a').write(key)\n"
        "again = key[:-1] in seen\n"
        f"sys.exit(('bucket' in on) != (again and ('bucket' in on) == {is_last}))\n"
    )
    status, text, error = bisect(code)
    assert status == 1
    assert re.search(r"runs (\d) and \d have the same passes on and do not end alike", error)
    assert "again" in text


def test_a_run_that_takes_too_long_has_failed_and_leaves_nothing_behind(bisect, tmp_path):
    code = """
if "prefetch" in on:
    child = os.fork()
    Path("pids").open("a").write(f"{os.getpid()} ")
    time.sleep(600)
"""
    status, text, _ = bisect(code, "--timeout", "2")
    assert status == 0 and "Behind prefetch the run begins to fail." in text
    assert endings(text)[:2] == ["timed out", "exit 0"]
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) >= 6
    give_up = time.monotonic() + 30
    while any(map(is_alive, pids)):  # what has been killed takes its time to end
        assert time.monotonic() < give_up
        time.sleep(0.05)


def is_alive(pid):
    """Whether a process still runs: one that has ended and nobody has asked for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def heeded(request):
    """A signal as a shell's foreground has it: in the background, or under nohup, it is ignored."""
    number = request.param
    default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    before = signal.signal(number, default)
    yield number
    signal.signal(number, before)


@pytest.mark.parametrize("heeded", (signal.SIGINT, signal.SIGTERM, signal.SIGHUP), indirect=True)
def test_what_ends_the_search_ends_its_run_and_shows_what_there_was(heeded, bisect, tmp_path):
    number = heeded
    begun = tmp_path / "begun"

    def interrupt():
        while not begun.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    code = """
if not on:
    Path("begun").write_text(str(os.getpid()))
    time.sleep(600)
sys.exit(1)
"""
    handler = signal.getsignal(number)
    status, text, _ = bisect(code)
    thread.join()
    assert signal.getsignal(number) is handler
    assert status == 130
    assert endings(text) == ["exit 1"] and "Interrupted: no pass is named." in text
    assert not is_alive(int(begun.read_text()))


@pytest.mark.parametrize("word", ("no-such-command", "train.py"))
def test_a_command_that_cannot_be_started_is_said(word, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    word = word if word == "no-such-command" else "./train.py"
    assert command_line.main(["bisect", "--", word]) == 1
    assert f"cannot start {word!r}: " in capsys.readouterr().err


def test_no_command_is_said(capsys):
    for words in ([], ["--"], ["--timeout", "3"]):
        assert command_line.main(["bisect", *words]) == 1
        assert "give it behind --" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "told"),
    (
        ("--metric", "(", "is no regular expression"),
        ("--tolerance", "-1", "'-1' is no number from 0 on"),
        ("--tolerance", "nan", "'nan' is no number from 0 on"),
        ("--timeout", "0", "a time limit is more than 0 seconds"),
        ("--timeout", "soon", "'soon' is no number from 0 on"),
    ),
)
def test_what_an_option_cannot_be_is_said(option, value, told, capsys):
    with pytest.raises(SystemExit) as stop:
        command_line.main(["bisect", f"{option}={value}", "--", "true"])
    assert stop.value.code == 2 and told in capsys.readouterr().err


def test_another_search_replaces_what_the_last_has_written(bisect, tmp_path):
    bisect("sys.exit('prefetch' in on)")
    (tmp_path / "zerofx-bisect" / "run-notes.txt").write_text("mine")
    bisect("pass")
    names = {path.name for path in (tmp_path / "zerofx-bisect").glob("run*.txt")}
    assert names == {"run1.txt", "run-notes.txt"}


# A step with a faulty pass


def plant(how):
    """Make the optional pass ``update_in_backward`` of this process faulty."""

    def faulty(gm, ctx, run):
        counts = run(gm, ctx)
        if how == "raises":
            raise RuntimeError("planted")
        node = next(n for n in gm.graph.nodes if n.target is torch.ops.aten.gelu.default)
        with gm.graph.inserting_after(node):
            twice = gm.graph.call_function(torch.ops.aten.mul.Tensor, (node, 2.0))
        twice.meta = dict(node.meta)
        node.replace_all_uses_with(twice, delete_user_cb=lambda user: user is not twice)
        return counts

    rewrite.PIPELINE = tuple(
        replace(step, run=lambda gm, ctx, run=step.run: faulty(gm, ctx, run))
        if step.name == "update_in_backward"
        else step
        for step in PIPELINE
    )


def train(how):
    """Three steps with the faulty pass; prints its losses."""
    plant(how)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x):
        loss = (model(x) - x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = torch.compile(step, backend="zero", options={"lowering": "eager", "stage": 1})
    for _ in range(3):
        print("loss", step(torch.randn(4, 6)).item(), flush=True)


def _in_environment(how, variables, output):
    os.environ.update({k: v for k, v in variables.items() if k.startswith("ZEROFX_")})
    with open(output, "a") as file, redirect_stdout(file):
        try:
            train(how)
        except Exception:
            traceback.print_exc(file=file)
            return 1
    return 0


@pytest.mark.nightly
@pytest.mark.parametrize("how", ("raises", "doubles"))
def test_the_faulty_pass_of_a_step_is_found_and_shown(how, tmp_path, monkeypatch, capsys):
    """A rank stands in for the command, a new one for every run: what it imports takes seconds."""

    def status(command, variables, file):
        ranks = Ranks(1)
        try:
            return ranks.run(_in_environment, how, dict(variables), file.name)[0]
        finally:
            ranks.kill()

    monkeypatch.setattr(Command, "_status", status)
    monkeypatch.chdir(tmp_path)
    metric = ["--metric", LOSS] if how == "doubles" else []
    assert command_line.main(["bisect", *metric, "--", "train"]) == 0
    text = capsys.readouterr().out
    assert "With update_in_backward alone turned off it does not" in text
    if how == "raises":
        assert "Behind update_in_backward the run begins to fail." in text
        assert "RuntimeError: planted" in text
        assert re.search(r"zerofx diff \S+ \S+_update_in_backward\.rejected\.py\n", text)
        assert (tmp_path / "zerofx-bisect/dumps/rank0/step0_0/00_captured.py").exists()
        return
    assert "Behind update_in_backward the run prints other numbers." in text
    assert re.search(r"Validation \(run 9\): pass 'update_in_backward' has changed", text)
    assert "The first result that differs is that node 'addmm_1'" in text
    paths = re.findall(r"python -m zerofx run (\S+) --random", text)
    assert [Path(path).name[:7] for path in paths] == ["minimal", "minimal"]
    least = text[text.index("The least that shows it, before") : text.index("What it changes")]
    assert least.count(" = ") == 5 and "aten.mul.Tensor(gelu, 2.0);  del gelu" not in least
    ((before, after),) = re.findall(r"python -m zerofx diff (\S+) (\S+)", text)
    assert command_line.main(["diff", before, after]) == 0
    assert "+    mul_tensor: " in capsys.readouterr().out
    for pair in (paths, (before, after)):
        checksums = []
        for path in pair:
            assert command_line.main(["run", path, "--random"]) == 0
            checksums.append(capsys.readouterr().out.split("what it returns:")[1])
        assert checksums[0] != checksums[1]


@pytest.mark.nightly
def test_the_faulty_pass_of_two_processes_is_found(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    code = "import tests.conftest\nfrom tests.cli.test_bisect import train\ntrain('doubles')\n"
    (tmp_path / "train.py").write_text(code)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    torchrun += ["--local-ranks-filter", "0"]  # two that print write into each other's lines
    words = ["bisect", "--metric", LOSS, "--timeout", "120", "--", *torchrun, "train.py"]
    assert command_line.main(words) == 0
    text = capsys.readouterr().out
    assert "Behind update_in_backward the run prints other numbers." in text
    assert "pass 'update_in_backward' has changed what the step computes" in text
