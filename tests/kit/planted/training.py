"""A training run of two ranks whose compiler has a planted bug, as a command that bisect runs."""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.nn.utils import clip_grad_norm_

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
from tests.kit import models
from tests.kit.planted.bugs import bugs
from tests.kit.planted.steps import SLOW
from tests.kit.ranks import Ranks
from zerofx.compiler import rewrite
from zerofx.passes.offload import offload_activations
from zerofx.passes.pipeline import PIPELINE

LOSS = r"loss ([-+.\w]+)"

OFFLOADED = {
    "offload": "optimizer,params,activations",
    "offload_tier": "nvme",
    "recompute": False,
    "bucket_bytes": 200,
    "hardware": SLOW,
}
GATHERED = {"bucket_bytes": 20_000}
OF_PASS = {"recompute": GATHERED, "hoist_casts": GATHERED}
"""The options of a training for a bug of these passes; all others have ``OFFLOADED``."""


def plant(inserted_by: str, kind: str, number: int) -> None:
    """Give a pass of this process a bug: one of this kind, of those that its program can have."""

    def faulty(gm: fx.GraphModule, ctx: Any, run: Any) -> Any:
        counts = run(gm, ctx)
        found = [bug for bug in bugs(gm.graph, inserted_by) if bug.kind == kind]
        found[number % len(found)].plant(gm.graph)
        return counts

    rewrite.PIPELINE = tuple(
        replace(step, run=lambda gm, ctx, run=step.run: faulty(gm, ctx, run))
        if step.name == inserted_by
        else step
        for step in PIPELINE
    )


def train(inserted_by: str, scratch: str) -> None:
    """Three steps of SGD, which is what its gradients are; rank 0 prints its losses."""
    offload_activations.SMALLEST_BYTES = 1
    options = OF_PASS.get(inserted_by, {**OFFLOADED, "offload_dir": scratch})
    is_language = inserted_by in OF_PASS
    torch.manual_seed(0)
    if is_language:
        model: nn.Module = models.Gpt(layers=1, checkpoint=True)
    else:
        model = nn.Sequential(nn.Linear(5, 5), nn.GELU(), nn.Linear(5, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

    def step(*batch: torch.Tensor) -> torch.Tensor:
        if is_language:
            with torch.autocast("cpu", torch.bfloat16):
                loss = models.language_loss(model, *batch)
        else:
            loss = (model(batch[0]) - batch[0]).pow(2).mean()
        loss.backward()
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    compiled = torch.compile(step, backend="zero", options={"lowering": "eager", **options})
    for number in range(3):
        batch = models.tokens(number, 2) if is_language else (torch.randn(3, 5),)
        loss = compiled(*batch).item()
        if dist.get_rank() == 0:
            print("loss", loss, flush=True)


def status(
    bug: tuple[str, str, int], scratch: str, variables: Mapping[str, str], output: str
) -> int:
    """The exit status of such a run with these variables, which appends to ``output``."""
    ranks = Ranks(2)
    try:
        return max(ranks.run(_run, bug, scratch, dict(variables), output))
    except Exception as error:  # one rank has failed while another waits
        with open(output, "a") as file:
            print(f"{type(error).__name__}: {error}", file=file)
        return 1
    finally:
        ranks.kill()


def _run(bug: tuple[str, str, int], scratch: str, variables: dict[str, str], output: str) -> int:
    os.environ.update({k: v for k, v in variables.items() if k.startswith("ZEROFX_")})
    with open(output, "a") as file, redirect_stdout(file):
        try:
            plant(*bug)
            train(bug[0], scratch)
        except Exception:
            traceback.print_exc(file=file)
            return 1
    return 0
