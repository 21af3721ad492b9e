"""``python -m zerofx plan``: a script is run up to its first compiled call, and planned."""

from __future__ import annotations

import atexit
import json
import os
import re
import resource
import subprocess
import sys
import textwrap
from unittest import mock

import pytest
import torch

import zerofx
import zerofx.__main__ as command_line
from tests.kit.covering import first, nightly
from zerofx.backend import zero
from zerofx.cost.traffic import size_text
from zerofx.planning import script
from zerofx.planning.plan import axes_of, plan_of
from zerofx.planning.script import call_of

SCRIPT = """
    import os, sys
    import torch, torch.distributed as dist
    import zerofx

    dist.init_process_group("gloo")
    assert (dist.get_rank(), dist.get_world_size()) == (0, int(os.environ["WORLD_SIZE"]))
    assert os.environ["LOCAL_WORLD_SIZE"] == "4", os.environ["LOCAL_WORLD_SIZE"]
    layers = [torch.nn.Linear(64, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 8)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    assert zerofx.resume("nowhere", model, optimizer) == {}
    zerofx.save("nowhere", model, optimizer).wait()
    assert zerofx.load("nowhere", model).get("step", 0) == 0

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = torch.compile(step, backend="zero", options={"lowering": "eager"})
    rows = torch.randint(9, (4,)).float().unsqueeze(1) * torch.ones(4, int(sys.argv[1]))
    try:
        step(rows)
    except Exception:
        print("held up")
    print("has gone on")
"""


@pytest.fixture
def planned(tmp_path, capsys, monkeypatch):
    """``planned(code, *words)``: the exit status and what is printed, for a script of this code."""
    monkeypatch.chdir(tmp_path)

    def of(code, *words, arguments=()):
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(code))
        status = command_line.main(["plan", *words, str(path), *arguments])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return of


@pytest.fixture
def captured(tmp_path, monkeypatch):
    """``captured(code)``: the call that a script of this code is stopped at, on two nodes of 4."""
    monkeypatch.chdir(tmp_path)

    def of(code, device=None):
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(code))
        return call_of(path, ["64"], 8, 4, device)

    return of


def test_a_script_is_planned_up_to_its_first_compiled_call(planned, tmp_path):
    before = dict(os.environ), list(sys.argv), list(sys.path), zerofx.save
    status, out, err = planned(SCRIPT, "--ranks", "8", "--mesh", "2x4", arguments=["64"])
    assert status == 0, err
    assert "step on 8 rank(s): 4 parameters, 299016 elements" in out
    assert "gpu:3,node:1" in out
    assert "held up" not in out and "has gone on" not in out
    assert (dict(os.environ), list(sys.argv), list(sys.path), zerofx.save) == before
    assert zero.stop is None and not torch.distributed.is_initialized()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]


@pytest.mark.nightly
def test_torchs_profiler_prints_nothing_between_the_tables(tmp_path):
    """It runs operators for their own bytes; Kineto reads its level once in a process."""
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    words = [sys.executable, "-m", "zerofx", "plan", "--ranks", "8", "--mesh", "2x4", str(path)]
    done = subprocess.run([*words, "64"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "of the peak" in done.stdout.lower()
    assert "profiler" not in done.stdout + done.stderr


@pytest.mark.nightly
def test_its_parameters_are_never_made(planned):
    """96 GiB of them and of AdamW's states."""
    code = SCRIPT.replace(
        "layers = [", "layers = [torch.nn.Linear(2**15, 2**15) for _ in range(8)]\n    _ = ["
    )
    code = code.replace('"4"', '"2"')
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    status, out, err = planned(code, "--ranks", "2", arguments=["32768"])
    assert status == 0, err
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20, "1 GiB"
    assert "8590196736 elements, 32.00 GiB" in out


@pytest.mark.nightly
@pytest.mark.parametrize(
    "before, after",
    [
        ("except Exception:", "except BaseException:"),
        ("except Exception:", "finally:\n    raise OSError('at the end')"),
        ("except Exception:", "finally:\n    sys.exit(1)"),
        ("model = ", "with zerofx.deferred_init(exact=True):\n    model = "),
        ("optimizer = ", "zerofx.materialize(model)\noptimizer = "),
    ],
)
def test_what_else_the_script_does_changes_nothing(planned, before, after):
    code = textwrap.dedent(SCRIPT)
    assert code.count(before) == 1
    code = code.replace(before, after)
    status, out, err = planned(code, "--ranks", "8", "--mesh", "2x4", arguments=["64"])
    assert status == 0 and "gpu:3,node:1" in out


SAVES = [
    "torch.save({'model': model.state_dict()}, 'a.pt')",
    "torch.save(torch.load('a.pt'), 'a.pt')",
    "torch.save(kept, 'a.pt')",
    "torch.serialization.save(model.state_dict(), 'a.pt')",
    "save_file(model.state_dict(), 'a.safetensors')",
    "safetensors.torch.save_model(model, 'a.safetensors')",
    "dcp.save({'kept': torch.ones(3)}, checkpoint_id='a')",
    "dcp.async_save({'model': model.state_dict()}, checkpoint_id='a').result()",
    "assert zerofx.export_safetensors('a.safetensors', model) == pathlib.Path('a.safetensors')",
]


@pytest.mark.parametrize(
    "before, after",
    first(
        1,
        [
            ("\ndef step", "\n".join(["", *SAVES, "", "def step"])),
            *(("except Exception:", f"finally:\n    {line}") for line in SAVES),
        ],
    ),
)
def test_no_checkpoint_of_it_is_written(captured, tmp_path, before, after):
    """Neither before its first compiled call nor by what it does when it is ended there."""
    st = pytest.importorskip("safetensors.torch")
    (tmp_path / "a").mkdir()
    torch.save({"kept": torch.arange(6.0)}, tmp_path / "a.pt")
    st.save_file({"kept": torch.arange(6.0)}, tmp_path / "a.safetensors")
    held = {path: path.read_bytes() for path in tmp_path.glob("a.*")}
    code = textwrap.dedent(SCRIPT).replace(before, after)
    code = code.replace(
        "import zerofx",
        "import pathlib, zerofx, safetensors.torch\nimport torch.distributed.checkpoint as dcp\n"
        "from safetensors.torch import save_file\nkept = torch.load('a.pt')",
    )
    captured(code)
    assert {path: path.read_bytes() for path in tmp_path.glob("a.*")} == held
    assert not list((tmp_path / "a").iterdir())


@pytest.mark.nightly
def test_no_checkpoint_of_it_is_written_when_the_process_ends(captured, tmp_path, monkeypatch):
    """A plan drops what the script registers, and keeps what libraries register."""
    (tmp_path / "ends.py").write_text("import atexit\natexit.register(print, 'of a module')")
    registered = []
    monkeypatch.setattr(atexit, "register", lambda *given: registered.append(given) or given[0])
    lines = (
        "import atexit, weakref, ends",
        "@atexit.register",
        "def end(): torch.save(model.state_dict(), 'a.pt')",
        "atexit.register(torch.save, {}, 'a.pt')",
        "exec(\"atexit.register(print, 'of a library')\", {'atexit': atexit})",
        "end()",
        "\n",
    )
    captured(textwrap.dedent(SCRIPT).replace("\ndef step", "\n".join(("", *lines, "def step"))))
    assert [given[1:] for given in registered if given[0] is print] == [("of a library",)]
    assert {"end", "save"}.isdisjoint(given[0].__name__ for given in registered)


@pytest.mark.nightly
def test_what_a_script_saves_it_can_load(captured, tmp_path):
    lines = (
        "torch.save({'model': model.state_dict(), 'rows': torch.arange(3.0)}, 'new.tmp')\n"
        "os.replace('new.tmp', 'new.pt')\n"
        "state = torch.load('new.pt', map_location='cpu')\n"
        "model.load_state_dict(state['model'])\n"
        "assert state['rows'].tolist() == [0, 1, 2]"
    )
    code = textwrap.dedent(SCRIPT).replace("\ndef step", f"\n{lines}\n\ndef step")
    captured(code)
    assert not (tmp_path / "new.pt").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("end", ["finally:", "except BaseException:"])
def test_what_a_script_does_when_it_is_ended_makes_no_values(captured, capsys, end):
    code = textwrap.dedent(SCRIPT).replace(
        "except Exception:", f"{end}\n    state = model.state_dict()\n    print('made', state)"
    )
    captured(code)
    assert "made" not in capsys.readouterr().out


@pytest.mark.nightly
def test_parameters_that_are_made_whole_fit_only_deferred(planned):
    """At stage 3 a rank of 8 never holds again the 256 MiB that it makes at first."""
    layers = "[torch.nn.Linear(2048, 2048) for _ in range(16)]"
    code = textwrap.dedent(SCRIPT).replace("layers = [", f"layers = {layers}\n_ = [")
    code = code.replace('"4"', '"8"')
    words = ["--ranks", "8", "--memory-limit", "0.2"]
    status, out, err = planned(code, *words, arguments=["2048"])
    assert status == 0, err
    assert "fits with deferred_init" in out and "whole at first (computed)" in out
    code = code.replace("layers = [torch", "with zerofx.deferred_init():\n  layers = [torch")
    status, out, err = planned(code, *words, arguments=["2048"])
    assert status == 0, err
    assert ", fits" in out and "deferred_init" not in out and "whole at first" not in out


@pytest.mark.nightly
def test_figures_and_a_limit_are_given(planned):
    words = ["--hardware", "latency_s=1e-3 bytes_per_s=1e6", "--memory-limit", "0.001"]
    status, out, err = planned(SCRIPT, "--ranks", "4", *words, arguments=["64"])
    assert status == 0, err
    assert "bytes_per_s=1e+06" in out and "too much" in out


@pytest.mark.nightly
def test_files_are_compared(planned, tmp_path, capsys):
    for ranks, name in (("4", "four.json"), ("8", "eight.json")):
        words = ["--ranks", ranks, "--json", str(tmp_path / name)]
        code = SCRIPT.replace('["LOCAL_WORLD_SIZE"] == "4"', f'["LOCAL_WORLD_SIZE"] == "{ranks}"')
        assert planned(code, *words, arguments=["64"])[0] == 0
    four = json.loads((tmp_path / "four.json").read_text())
    assert four["ranks"] == 4 and set(four["stages"]) == set("0123")
    files = [str(tmp_path / "four.json"), str(tmp_path / "eight.json")]
    assert command_line.main(["plan", "--compare", *files]) == 0
    out = capsys.readouterr().out
    assert "second: step on 8 rank(s)" in out
    row = next(line for line in out.splitlines() if line.startswith("3 "))
    assert size_text(sum(four["stages"]["3"]["keeps"].values())) + " -> " in row
    assert command_line.main(["plan", "--compare", files[0], files[0]]) == 0
    assert "->" not in capsys.readouterr().out
    del four["stages"]["2"]["device_bytes"]
    (tmp_path / "other.json").write_text(json.dumps(four))
    assert command_line.main(["plan", "--compare", files[0], str(tmp_path / "other.json")]) == 1
    assert "another version of zerofx: write it again" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, words",
    [
        ("ranks: 4", "is no plan: Expecting value"),
        ("{}", "is no plan: write it with plan --json"),
        ("[{}]", "has the plans of a --sweep, .* write it with plan --ranks N --json"),
    ],
)
def test_what_is_no_plan_is_not_compared(tmp_path, capsys, text, words):
    file = tmp_path / "other.json"
    file.write_text(text)
    assert command_line.main(["plan", "--compare", str(file), str(file)]) == 1
    assert re.search(words, capsys.readouterr().err)


@pytest.mark.nightly
def test_several_numbers_of_ranks(planned):
    code = SCRIPT.replace('os.environ["LOCAL_WORLD_SIZE"] == "4"', "True")
    status, out, err = planned(code, "--sweep", "ranks=2,4", "--mesh", "1x2", arguments=["64"])
    assert status == 0, err
    assert "on 2, 4 rank(s)" in out and "4        gpu:3,node:3" in out


def test_a_script_that_runs_once_in_a_process_needs_a_plan_for_each_number(planned, monkeypatch):
    runs = mock.Mock(side_effect=[{}, RuntimeError("context has already been set")])
    monkeypatch.setattr("zerofx.cli.plan._plan", runs)
    with pytest.raises(RuntimeError, match="already been set") as raised:
        planned("", "--sweep", "ranks=2,4")
    assert "plan each number of ranks on its own" in "".join(raised.value.__notes__)
    runs.side_effect = error = RuntimeError("of the first run")
    with pytest.raises(RuntimeError, match="first"):
        planned("", "--sweep", "ranks=2,4")
    assert not hasattr(error, "__notes__")


def test_what_is_missing_is_said(planned, capsys):
    assert planned(SCRIPT)[0] == 1
    assert command_line.main(["plan", "--ranks", "2"]) == 1
    assert "needs a training script" in capsys.readouterr().err


@pytest.mark.parametrize(
    "code, words, message",
    [
        ("import sys; sys.exit(3)", ["--ranks", "2"], "has ended with 3 before it called"),
        ("x = 1", ["--ranks", "2"], "called no zero-compiled function"),
        ("x = 1", ["--ranks", "0"], "a number from 1 on"),
        ("x = 1", ["--ranks", "8", "--mesh", "3x2"], "whose sizes multiply to the ranks"),
        *(
            ("x = 1", ["--ranks", "2", f"--memory-limit={limit}"], "give a number above 0")
            for limit in ("0", "-1", "nan", "inf", "1e-12")
        ),
    ],
)
def test_a_script_that_gets_nowhere(planned, code, words, message):
    status, out, err = planned(code, *words)
    assert status == 1 and message in err and not out


@pytest.mark.parametrize(
    "line, words",
    [
        ("x = model[0].weight.sum().item()", "reads what depends on the values of the parameter"),
        nightly(
            "print(model[0].weight)", "reads what depends on the values of the parameter '0.weight'"
        ),
        nightly("x = float(model(torch.ones(2, 64)).sum())", "reads what depends on the values of"),
        nightly("x = model[2].bias.detach().numpy()", "'2.bias' of shape (8,)"),
        nightly("model(torch.ones(2, 64)).sum().backward()", "backward() computes gradients of"),
        nightly(
            "x = torch.autograd.grad(model(torch.ones(2, 64)).sum(), list(model.parameters()))",
            "grad() computes gradients of",
        ),
        (
            "model[0].weight.grad = torch.zeros(4096, 64); optimizer.step()",
            "AdamW.step() updates the parameter '0.weight' of shape (4096, 64)",
        ),
    ],
)
def test_a_script_that_needs_its_parameters_is_told_where(planned, line, words):
    """It ends there, whatever it catches: the values would take the memory of the model."""
    code = textwrap.dedent(SCRIPT).replace(
        "\ndef step", f"\ntry:\n    {line}\nexcept Exception:\n    pass\n\ndef step"
    )
    status, out, err = planned(code, "--ranks", "8", "--mesh", "2x4", arguments=["64"])
    assert status == 1 and not out
    assert "train.py, line " in err and line in err, err
    assert words in err and "a plan never makes parameters" in err, err


@pytest.mark.nightly
def test_a_script_reads_what_is_computed_of_no_parameter(planned):
    code = textwrap.dedent(SCRIPT).replace(
        "\ndef step",
        "\nx = torch.arange(4.0)\nassert x.sum().item() == 6 and x.tolist()[1] == 1\n"
        "optimizer.step()\nprint(x)\n\ndef step",
    )
    status, out, err = planned(code, "--ranks", "8", "--mesh", "2x4", arguments=["64"])
    assert status == 0 and "tensor([0., 1., 2., 3.])" in out, err


def test_no_script(capsys):
    assert command_line.main(["plan", "--ranks", "2", "nowhere.py"]) == 1
    assert "nowhere.py is no file" in capsys.readouterr().err


@pytest.mark.parametrize("mesh", ("two", "2", "2x0", "-1x2", "2x2x2"))
def test_a_mesh_that_is_no_mesh(mesh, capsys):
    with pytest.raises(SystemExit):
        command_line.main(["plan", "--sweep", "ranks=2", f"--mesh={mesh}", "train.py"])
    assert "NODESxRANKS" in capsys.readouterr().err


def test_a_mesh_begins_the_process_group_itself(captured):
    mesh = "torch.distributed.init_device_mesh('cpu', (2, 4), mesh_dim_names=('node', 'gpu'))"
    before = torch.distributed.init_process_group
    captured(SCRIPT.replace('dist.init_process_group("gloo")', f"mesh = {mesh}"))
    assert torch.distributed.distributed_c10d.init_process_group is before
    assert not torch.distributed.is_initialized()


@pytest.mark.nightly
def test_objects_of_all_ranks_are_what_this_one_gives(captured):
    lines = """
        from torch.distributed import all_gather_object
        several, out, gathered = [1, {"a": 2}], [None], [None] * 8
        dist.broadcast_object_list(several, src=3)
        dist.scatter_object_list(out, [*range(8)], src=0)
        dist.gather_object("mine", gathered, dst=0)
        assert (several, out, gathered) == ([1, {"a": 2}], [0], ["mine"] * 8)
        all_gather_object(gathered, {"rank": dist.get_rank()})
        dist.gather_object("mine", dst=1)
        dist.scatter_object_list(out, None, src=1)
        assert gathered == [{"rank": 0}] * 8 and gathered[0] is not gathered[1] and out == [0]

        """
    code = textwrap.dedent(SCRIPT).replace("\ndef step", textwrap.dedent(lines) + "def step")
    modules = torch.distributed, script
    before = [dict(vars(module)) for module in modules]
    captured(code)
    assert [dict(vars(module)) for module in modules] == before


def test_tensors_of_all_ranks_are_what_this_one_gives(captured):
    lines = """
        other = dist.new_group(backend="nccl", timeout=None)
        dist.monitored_barrier()
        mine, sizes = torch.tensor([3]), [torch.zeros(1, dtype=torch.long) for _ in range(8)]
        dist.all_gather(sizes, mine, group=other)
        assert [int(one) for one in sizes] == [3] * 8
        for shape in (8,), (8, 1):
            out = torch.zeros(shape, dtype=torch.long)
            work = dist.all_gather_into_tensor(out, mine, None, True)
            assert work.wait() and out.flatten().tolist() == [3] * 8
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        dist.broadcast(mine, src=3)
        dist.gather(mine, sizes, dst=0)
        dist.gather(mine, dst=1)
        dist.scatter(mine, [torch.tensor([rank + 5]) for rank in range(8)], src=0)
        assert mine.item() == 5 and dist.scatter(mine, src=1) is None
        dist.reduce_scatter_tensor(mine, torch.arange(8))
        assert mine.item() == 0
        dist.reduce_scatter(mine, [torch.tensor([rank + 7]) for rank in range(8)])
        assert mine.item() == 7

        """
    code = textwrap.dedent(SCRIPT).replace("\ndef step", textwrap.dedent(lines) + "def step")
    captured(code)


def test_options_that_do_not_go_together_are_said_in_the_table(planned):
    words = "import zerofx\nos.environ['ZEROFX_OFFLOAD'] = 'auto'\n"
    code = textwrap.dedent(SCRIPT).replace("import zerofx\n", words)
    code = code.replace('{"lowering": "eager"}', '{"lowering": "eager", "memory_budget": 10**9}')
    status, out, err = planned(code, "--ranks", "4", "--memory-limit", "1", arguments=["64"])
    assert status == 0, err
    assert "Nothing can be chosen: " in out and "memory_budget" in out, out


@pytest.mark.parametrize(
    "call",
    first(
        1,
        [
            "mp.spawn(main, nprocs=2)",
            "mp.start_processes(main, nprocs=2)",
            "spawn(main, nprocs=2)",
        ],
    ),
)
def test_a_script_that_starts_its_ranks_itself_is_refused(planned, tmp_path, call):
    code = f"""
        import torch.multiprocessing as mp
        from torch.multiprocessing import spawn

        def main(rank):
            open("trained", "w").close()

        if __name__ == "__main__":
            try:
                {call}
            except Exception:
                pass
        """
    status, out, err = planned(code, "--ranks", "2")
    assert status == 1 and f"'{call}': it starts processes of its own" in err, err
    assert "as torchrun starts it" in err and not (tmp_path / "trained").exists()


def test_options_that_a_script_puts_into_the_environment_are_planned(captured):
    words = "os.environ['ZEROFX_OFFLOAD'] = 'optimizer'"
    call = captured(SCRIPT.replace("import zerofx\n", f"import zerofx\n    {words}\n"))
    assert "ZEROFX_OFFLOAD" not in os.environ
    forecasts = plan_of(call, axes_of(8, None), call.options, [3]).forecasts
    assert forecasts["3"].on_host > 0


@pytest.mark.nightly
def test_runs_of_a_script_begin_alike(captured, tmp_path):
    """With its own modules, folder and default dtype; and leave what others have imported."""
    (tmp_path / "sizes.py").write_text("import os\nranks = int(os.environ['RANKS'])\n")
    code = SCRIPT.replace(
        "dist.init",
        "import os, sizes\n    assert sizes.ranks == int(os.environ['RANKS'])\n"
        "    assert torch.get_default_dtype() is torch.float32\n"
        "    os.chdir('/'); torch.set_default_dtype(torch.bfloat16)\n    dist.init",
        1,
    ).replace(".float()", ".bfloat16()")
    for ranks in ("2", "4"):
        captured(
            code.replace("import torch,", f"os.environ['RANKS'] = '{ranks}'\n    import torch,")
        )
        assert os.getcwd() == str(tmp_path) and torch.get_default_dtype() is torch.float32
        assert "sizes" not in sys.modules


@pytest.mark.nightly
def test_a_module_of_a_package_is_planned(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("")
    (tmp_path / "mine" / "sizes.py").write_text("num_rows = 4")
    code = textwrap.dedent(SCRIPT).replace("import zerofx", "import zerofx\nfrom . import sizes")
    (tmp_path / "mine" / "train.py").write_text(code)
    words = ["plan", "--ranks", "4", "-m", "mine.train", "64"]
    assert command_line.main(words) == 0
    assert "step on 4 rank(s)" in capsys.readouterr().out and "mine" not in sys.modules
    code = code.replace("\ndef step", "\nprint(model[0].weight)\n\ndef step")
    (tmp_path / "mine" / "train.py").write_text(code)
    assert command_line.main(words) == 1
    assert "train.py, line " in capsys.readouterr().err
