"""Dumped programs run again: what the file computes is what the program in memory computes."""

import copy
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import zerofx.__main__ as command_line
from tests.kit import models
from tests.kit.coded_reductions import wide_mlp
from tests.kit.dumps import programs_in, write_dump
from tests.kit.programs import (
    assert_bitwise,
    capture,
    clone,
    context_of,
    evaluation,
    mlp_step,
    smallest_step,
)
from zerofx.cli import run
from zerofx.errors import CommandError
from zerofx.ir.mesh import Mesh
from zerofx.options import OPTIONAL_PASSES
from zerofx.replay import random_run
from zerofx.replay.in_process_group import alone, in_turns
from zerofx.replay.reference import Reference, Updates
from zerofx.report.folder import DumpFolder
from zerofx.report.read import read
from zerofx.report.write import ProgramDump

EVERYTHING = dict.fromkeys(OPTIONAL_PASSES, True)


@functools.cache
def language_step(layers=2):
    """A checkpointed GPT with a tied head under autocast, clipped, AdamW with two groups."""
    torch.manual_seed(0)
    model = models.Gpt(layers=layers, checkpoint=True)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.002}]
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(0.01), betas=(0.8, 0.9))

    def step(*batch):
        with torch.autocast("cpu", torch.bfloat16):
            loss = models.language_loss(model, *batch)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return capture(step, *models.tokens(0, 2), world_size=2)


@functools.cache
def two_optimizers_step():
    """Convolutions with batch norm and dropout; Muon on whole matrices, a Lion on the rest."""
    torch.manual_seed(0)
    model = nn.Sequential(models.ConvNet(), nn.Dropout(0.2), nn.Linear(3, 4, bias=False))
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    muon, lion = torch.optim.Muon(matrices, lr=0.02), models.Lion(others)
    offset = torch.tensor([0.5, float("inf"), 1 / 3, -0.0])

    def step(images, targets):
        loss = (model(images) - torch.minimum(offset, targets.sum())).pow(2).mean()
        loss.backward()
        muon.step()
        lion.step()
        return loss

    return capture(step, *models.images(0, 2), world_size=2)


STEPS = {
    "mlp": mlp_step,
    "wide": wide_mlp,
    "language": language_step,
    "two optimizers": two_optimizers_step,
}

FORMS = {
    **{f"stage {stage}": {"stage": stage} for stage in range(4)},
    "states on the host": {"offload": "optimizer"},
    "states in files": {"offload": "optimizer", "offload_tier": "nvme", "offload_dir": "scratch"},
    "parameters on the host": {"offload": "optimizer,params"},
    "activations on the host": {"offload": "activations"},
    "in few bits": {"gather_dtype": "int8", "reduce_wire": "int4", "error_feedback": 1},
}


def parametrized(names, cases, quick, nightly):
    """Every pair; all but the ``quick`` and the ``nightly`` ones are exhaustive."""
    pairs = [(name, case) for name in STEPS for case in cases]
    # Muon's updates cannot run on the host.
    refused = ("states on the host", "states in files", "parameters on the host")
    unknown = [("two optimizers", form) for form in refused]
    tier_of = {True: pytest.mark.nightly, False: pytest.mark.exhaustive}
    return pytest.mark.parametrize(
        names,
        [
            pytest.param(*pair, marks=() if pair in quick else tier_of[pair in nightly])
            for pair in pairs
            if pair not in unknown
        ],
    )


QUICK_FORMS = [
    ("wide", "in few bits"),
]
NIGHTLY_FORMS = [
    ("mlp", "stage 0"),
    ("mlp", "states in files"),
    ("two optimizers", "stage 1"),
    ("mlp", "parameters on the host"),
    ("language", "stage 3"),
    ("language", "in few bits"),
]
QUICK_STAGES, NIGHTLY_STAGES = [("mlp", 2)], [("language", 3), ("two optimizers", 1)]


@pytest.mark.slow(reason="whole programs are written and run")
@parametrized(("name", "form"), FORMS, QUICK_FORMS, NIGHTLY_FORMS)
def test_every_program_computes_from_its_file_what_it_does_in_memory(name, form, tmp_path):
    watched = []
    options = {**EVERYTHING, "bucket": True, **FORMS[form]}
    folder = write_dump(STEPS[name](), tmp_path, watched=watched, **options)
    paths = programs_in(folder)
    assert len(paths) == len(watched) > 2
    for path, in_memory in zip(paths, watched, strict=True):
        program = read(path)
        inputs = list(random_run.random_inputs(program, seed=1).values())
        own = copy.deepcopy(inputs)
        exchange = alone(program.world_size)
        updates = Updates(program.table(), random_run.optimizers_of(program))
        torch.manual_seed(1)
        reference = Reference(program.table(), program.mesh, exchange, updates)
        actual = random_run.call(program, reference, inputs)
        torch.manual_seed(1)
        expected = in_memory.run(program.rank, exchange, own)
        assert len(actual) == len(expected) > 0
        for got, wanted in zip([*actual, *inputs], [*expected, *own], strict=True):
            if isinstance(wanted, torch.Tensor):
                assert_bitwise(got, wanted, f"{path.name} computes something else")
                assert got.stride() == wanted.stride()
            else:
                assert got == wanted


@parametrized(("name", "stage"), range(4), QUICK_STAGES, NIGHTLY_STAGES)
def test_every_program_of_a_step_computes_what_the_captured_one_does(name, stage, tmp_path):
    """On two ranks with batches of their own, whose parameters are cut from the same tensors."""
    step = STEPS[name]()
    options = {**EVERYTHING, "bucket": True, "stage": stage}
    folders = [write_dump(step, tmp_path, rank=rank, **options) for rank in (0, 1)]
    first = None
    for paths in zip(*map(programs_in, folders), strict=True):
        everyone = run.all_ranks(read(paths[0]))
        results = in_turns(
            [
                lambda exchange, one=one: random_run.run_random(one, exchange, seed=3, sgd=False)
                for one in everyone
            ]
        )
        first = first or results
        for program, result, wanted in zip(everyone, results, first, strict=True):
            assert result.after.keys() == wanted.after.keys()
            pairs = [(value, wanted.after[name]) for name, value in result.after.items()]
            for position, value in enumerate(result.returned):
                if position not in program.facts["GRADIENTS"]:  # which are shards, or not
                    pairs.append((value, wanted.returned[position]))
            assert len(pairs) > len(result.after)
            for got, value in pairs:
                assert value.isfinite().all()
                torch.testing.assert_close(got, value, rtol=1e-5, atol=1e-6)


def test_an_evaluation_and_a_step_without_results_run(tmp_path, capsys):
    for function, step in (("evaluate0_0", evaluation()), ("step1_0", smallest_step())):
        folder = write_dump(step, tmp_path, function=function)
        for path in programs_in(folder):
            run.run_fake(read(path))
            random_run.run_random(read(path), alone(2), seed=0, sgd=False)


@pytest.mark.nightly
def test_sizes_that_are_symbols_run_as_they_were_when_captured(tmp_path):
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x, scale):
        (model(x).mean(0) * scale / x.shape[0]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return x.shape[0] * 2

    x = torch.randn(5, 4)
    torch._dynamo.mark_dynamic(x, 0)
    for path in programs_in(write_dump(capture(step, x, 7, world_size=2), tmp_path)):
        program = read(path)
        assert "s" in path.read_text().split("def program(")[1]
        shapes = [of.get("shape", of.get("value")) for of in program.facts["INPUTS"].values()]
        assert 5 in shapes and (5, 4) in shapes
        run.run_fake(program)
        random_run.run_random(program, alone(2), seed=0, sgd=False)


def test_larger_constants_lie_beside_the_program(tmp_path):
    table = torch.arange(300.0).tolist()

    def step(x):
        return (x * torch.tensor(table)).sum()

    folder = write_dump(capture(step, torch.ones(300)), tmp_path, stage=0)
    path = folder / "00_captured.py"
    assert "299" not in path.read_text().split("def program(")[0]
    program = read(path)
    results = random_run.call(
        program, Reference(program.table(), Mesh.flat(4), alone(4), None), [torch.ones(300)]
    )
    assert results[0].item() == sum(table)
    (folder / "constants.pt").unlink()
    with pytest.raises(CommandError, match="constants.pt, which is not there"):
        run.run_fake(read(path))


def test_an_optimizer_that_nothing_can_import_is_refused_with_the_remedy(tmp_path):
    class Own(torch.optim.SGD):
        pass

    w = nn.Parameter(torch.randn(4))
    optimizer = Own([w], lr=0.1)

    def step(x):
        (x * w).sum().backward()
        optimizer.step()

    path = write_dump(capture(step, torch.randn(4)), tmp_path, stage=0) / "00_captured.py"
    with pytest.raises(CommandError, match=r"Own cannot be imported here.*--sgd"):
        random_run.run_random(read(path), alone(4), seed=0, sgd=False)
    run.run_fake(read(path))
    results = random_run.run_random(read(path), alone(4), seed=0, sgd=True)
    assert results.after["parameter w"].shape == (4,)


# The command


def ran(capsys, *arguments):
    assert command_line.main(["run", *map(str, arguments)]) == 0
    return capsys.readouterr().out


@pytest.mark.nightly
def test_one_process_runs_all_ranks_if_their_dumps_are_there(tmp_path, capsys):
    paths = [write_dump(mlp_step(), tmp_path, rank=rank) / "00_captured.py" for rank in (0, 1)]
    together = [ran(capsys, path, "--random", "--seed", "5") for path in paths]
    assert "rank 1 of 2, which ran in turns" in together[1]
    losses = [re.search(r"^0 .*$", text, re.M)[0] for text in together]
    assert losses[0] != losses[1]  # of batches of their own
    after = [text.split("and leaves behind:")[1] for text in together]
    assert after[0] == after[1] and "parameter 4.weight  f32[5, 5]cpu" in after[0]
    assert ran(capsys, paths[0], "--random", "--seed", "5") == together[0]
    assert ran(capsys, paths[0], "--random", "--seed", "6") != together[0]
    paths[1].unlink()
    alone_text = ran(capsys, paths[0], "--random", "--seed", "5")
    assert "rank 0 alone: each of 2 ranks holds what it does" in alone_text
    assert alone_text.split("and leaves behind:")[1] != after[0]


@pytest.mark.nightly
def test_a_file_runs_by_itself(tmp_path):
    path = write_dump(smallest_step(), tmp_path) / "00_captured.py"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, str(path)],
        env={**os.environ, "PYTHONPATH": str(root)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "00 captured runs on shapes alone" in done.stdout


def test_a_program_for_a_device_that_is_not_here_runs_on_shapes_alone(tmp_path, capsys):
    path = write_dump(smallest_step(), tmp_path)
    path = programs_in(path)[-1]
    path.write_text(path.read_text().replace("'device': 'cpu'", "'device': 'cuda:99'"))
    assert command_line.main(["run", str(path), "--random"]) == 1
    error = capsys.readouterr().err
    assert "is for cuda:99, which is not here" in error and "on shapes alone" in error
    assert "runs on shapes alone" in ran(capsys, path)


def test_a_program_that_a_file_cannot_hold_is_written_and_says_why_it_cannot_run(tmp_path, capsys):
    program = clone(mlp_step())
    (addmm,) = [node for node in program.graph.nodes if node.name == "addmm"]
    addmm.kwargs = {"beta": object()}
    writer = ProgramDump(DumpFolder(tmp_path), "step0_0", context_of(program), {})
    writer.write("captured", program.gm, None)
    path = tmp_path / "rank0" / "step0_0" / "00_captured.py"
    assert "object object" in path.read_text() and " at 0x" not in path.read_text()
    assert command_line.main(["run", str(path)]) == 1
    error = capsys.readouterr().err
    assert "can be read, but not run: one of its arguments is of type object" in error


def test_ranks_that_do_not_exchange_alike_are_told_and_do_not_hang():
    def once(exchange):
        return exchange(torch.ones(1))

    def twice(exchange):
        exchange(torch.ones(1))
        return exchange(torch.ones(1))

    with pytest.raises(RuntimeError, match="do not exchange as often"):
        in_turns([once, twice])
    with pytest.raises(RuntimeError, match="do not exchange as often"):
        in_turns([twice, once])

    def fails(exchange):
        raise KeyError("planted")

    with pytest.raises(KeyError, match="planted"):
        in_turns([twice, fails])


def test_ranks_in_turns_draw_numbers_of_their_own_and_the_same_again():
    def draws(exchange):
        torch.manual_seed(7)
        first = torch.randn(2)
        exchange(first)
        return torch.cat([first, torch.randn(2)])

    torch.manual_seed(0)
    one, two = in_turns([draws, draws])
    assert torch.equal(one, two)  # though the other drew in between
    assert torch.equal(torch.randn(3), torch.randn(3, generator=torch.Generator().manual_seed(0)))
