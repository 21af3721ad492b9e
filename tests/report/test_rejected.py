"""A program that validation or the verifier rejects is dumped first, to be looked at."""

from unittest import mock

import pytest
import torch
from torch import nn

import tests.conftest  # noqa: F401
import zerofx.__main__ as command_line
from tests.kit.covering import each_value
from zerofx.compiler import rewrite
from zerofx.errors import GraphError, ValidationError
from zerofx.passes.base import Pass
from zerofx.passes.pipeline import PIPELINE
from zerofx.report import write
from zerofx.report.read import read


def activation_doubled(gm, ctx):
    """A program that breaks no rule, and computes something else."""
    node = next(n for n in gm.graph.nodes if n.target is torch.ops.aten.gelu.default)
    with gm.graph.inserting_after(node):
        twice = gm.graph.call_function(torch.ops.aten.mul.Tensor, (node, 2.0))
    twice.meta = dict(node.meta)
    node.replace_all_uses_with(twice, delete_user_cb=lambda user: user is not twice)
    return {}


def reductions_forgotten(gm, ctx):
    """A program whose gradients nobody has averaged."""
    for node in [n for n in gm.graph.nodes if n.target is torch.ops.zerofx.wait.default]:
        node.replace_all_uses_with(node.args[0].args[0])
    return {}


def half_done(gm, ctx):
    """A pass that ends in the middle of its work."""
    activation_doubled(gm, ctx)
    raise KeyError("no such bucket")


def train(tmp_path, planted, **options):
    """One step of a small model, with this pass behind ``data_parallel``."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    pipeline = (*PIPELINE[:5], Pass(planted, "planted"), *PIPELINE[5:])
    options = {"stage": 1, "lowering": "eager", "dump": str(tmp_path), **options}
    with mock.patch.object(rewrite, "PIPELINE", pipeline):
        torch.compile(step, backend="zero", options=options)(torch.ones(2, 4))


def programs(tmp_path):
    (folder,) = tmp_path.glob("rank0/*")
    return folder, sorted(path.name for path in folder.glob("[0-9]*.py"))


def test_what_validation_rejects_is_dumped_and_its_file_named(tmp_path, capsys):
    with pytest.raises(ValidationError) as told:
        train(tmp_path, activation_doubled, validate=True)
    folder, names = programs(tmp_path)
    assert names == [
        "00_captured.py",
        "01_normalize.py",
        "02_chunk_loss.py",
        "03_recompute.py",
        "04_data_parallel.py",
        "05_planted.py",
    ]
    assert f"please report it with {folder / names[-1]} and the program before it" in str(
        told.value
    )
    assert (folder / "05_planted.trace.json").exists()
    assert command_line.main(["diff", str(folder), "data_parallel", "planted"]) == 0
    assert "+    mul_tensor: " in capsys.readouterr().out


BROKEN = {
    "the verifier": (
        reductions_forgotten,
        GraphError,
        "not computed from the average",
        "+    return (detach, t_8, view_1, t_5, view)",
    ),
    "the pass": (half_done, KeyError, "no such bucket", "+    mul_tensor: "),
}


@pytest.mark.parametrize("of, validate", each_value(("the verifier", "the pass"), (False, True)))
def test_what_breaks_a_rule_is_dumped_under_another_name(of, validate, tmp_path, capsys):
    planted, error, said, changed = BROKEN[of]
    with pytest.raises(error, match=said) as told:
        train(tmp_path, planted, validate=validate)
    folder, names = programs(tmp_path)
    assert names[-2:] == ["04_data_parallel.py", "05_planted.rejected.py"]
    assert told.value.__notes__[:2] == [
        "in pass 'planted' of zerofx",
        f"what it has left is in {folder / names[-1]}",
    ]
    program = read(folder / names[-1])
    assert program.title == "05 planted"
    assert said in program.text.splitlines()[2]
    assert command_line.main(["diff", str(folder), "3", "planted"]) == 0
    assert changed in capsys.readouterr().out


def test_what_is_no_program_any_more_is_dumped_as_a_list_of_nodes(tmp_path):
    original = write.ProgramText.file

    def file(text):
        if any(node.name == "mul_tensor" for node in text.gm.graph.nodes):
            raise AttributeError("no val")
        return original(text)

    with (
        mock.patch.object(write.ProgramText, "file", file),
        pytest.raises(KeyError, match="no such bucket"),
    ):
        train(tmp_path, half_done)
    folder, names = programs(tmp_path)
    lines = (folder / names[-1]).read_text().splitlines()
    assert "# No program can be made of it: AttributeError: no val" in lines
    assert any(line.startswith("#     %mul_tensor") for line in lines)


@pytest.mark.nightly
@pytest.mark.parametrize("fails", (RuntimeError("a fault of the dump's own"), OSError("no space")))
def test_a_dump_that_fails_hides_no_error(fails, tmp_path):
    with (
        mock.patch.object(write.ProgramDump, "write_rejected", side_effect=fails),
        pytest.raises(KeyError, match="no such bucket") as told,
    ):
        train(tmp_path, half_done)
    assert told.value.__notes__[0] == "in pass 'planted' of zerofx"
    assert "what it has left" not in " ".join(told.value.__notes__)
