"""Ranks rewrite alike: no order in a program comes from memory addresses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from tests.kit import models
from tests.kit.covering import each_value, first
from tests.kit.dumps import write_dump
from tests.kit.programs import capture, clone, run_passes
from zerofx.ir.collectives import schedule
from zerofx.options import OPTIONAL_PASSES

STAGES = (1, 2, 3)


def leaving_gradients():
    """Ten gradients leave the step as zeros, computed from shards and gathered at stage 1."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss

    return capture(step, torch.randn(2, 4), world_size=2)


@pytest.mark.slow(reason="whole programs are rewritten and run")
@pytest.mark.parametrize("stage, bucket", first(1, each_value(STAGES, (False, True))))
def test_the_schedule_is_the_same_every_time(stage, bucket):
    captured = leaving_gradients()
    seen, held = set(), []
    for number in range(12):
        held.append([object() for _ in range(17 * number)])  # other addresses for the next nodes
        program = clone(captured)
        run_passes(program, stage=stage, bucket=bucket, update_in_backward=True)
        seen.add(schedule(program.gm, program.table, stage))
        held.append(program)
    assert len(seen) == 1


def write_programs(folder: str) -> None:
    """Dump every program of a clipped, checkpointed GPT as both ranks make them."""

    def step(*batch):
        with torch.autocast("cpu", torch.bfloat16):
            loss = models.language_loss(model, *batch)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    torch.manual_seed(0)
    model = models.Gpt(layers=2, checkpoint=True)
    optimizer = torch.optim.AdamW(model.parameters())
    captured = capture(step, *models.tokens(0, 2), world_size=2)
    for stage in STAGES:
        for rank in (0, 1):
            watched = []
            options = {"stage": stage, **dict.fromkeys(OPTIONAL_PASSES, True)}
            dumped = write_dump(captured, folder, rank, f"stage{stage}", watched, **options)
            lines = "\n".join(schedule(watched[-1].gm, watched[-1].table, stage))
            (dumped / "schedule.txt").write_text(lines)
            (dumped / "summary.txt").unlink()  # which has times


@pytest.mark.nightly
def test_programs_do_not_depend_on_how_python_hashes(tmp_path):
    """Each process has its own seed of hashes of text unless it is told one."""
    written = []
    for seed in ("1", "2"):
        folder = tmp_path / seed
        code = "import sys; from tests.passes.test_determinism import write_programs as write; "
        root = Path(__file__).parents[2]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", code + "write(sys.argv[1])", str(folder)]
        subprocess.run(command, cwd=root, env=environment, check=True)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        written.append({str(path.relative_to(folder)): path.read_text() for path in files})
    first, second = written
    assert first.keys() == second.keys()
    for stage in STAGES:
        names = [name for name in first if f"stage{stage}" in name]
        assert len(names) > 2 * len(OPTIONAL_PASSES) and f"rank1/stage{stage}/schedule.txt" in names
        # Ranks differ in sizes of shards, never in what they communicate.
        assert (
            first[f"rank0/stage{stage}/schedule.txt"] == first[f"rank1/stage{stage}/schedule.txt"]
        )
    for name, text in first.items():
        assert text == second[name], name
