"""Train a small GPT with wires of fewer bits, and compare held-out losses.

    python benchmarks/wire_quality.py OUT
    python benchmarks/wire_quality.py OUT --steps 200 --seeds 0 --forms exact "int8 weights"

Four ranks of this machine are 2 nodes of 2, at stage 3 over both axes.  They train on Python's
standard library, byte by byte; every tenth file is held out.  Each form and seed is a training of
its own, whose result is kept in OUT: what is there already is not trained again.

"perturbed" is the control: exact wires, and parameters that begin 1e-6 times a random number apart.
The table has each form's loss on held-out text, the mean over seeds, and how far that is from the
exact one's.  It is the loss of the exact parameters, which is what checkpoints hold.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import Sizes, loss_of
from ranks import on_ranks
from tabulate import tabulate
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.lr_scheduler import LambdaLR

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
from corpus import read_bytes, source_files, split_files, text_batches  # noqa: E402

AXES = ("node", "gpu")
FORMS: dict[str, dict[str, Any]] = {
    "exact": {},
    "perturbed": {},
    "int8 weights": {"gather_dtype": "int8"},
    "int4 gradients": {"reduce_wire": {"node": "int4"}},
    "int4 gradients, no feedback": {"reduce_wire": {"node": "int4"}, "error_feedback": False},
    "both, second shard": {
        "gather_dtype": "int8",
        "reduce_wire": {"node": "int4"},
        "secondary_shard": "gpu",
    },
}
HELD_OUT_BATCHES = 64
WARMUP = 0.05
"""The share of steps in which the learning rate grows.  It ends at 0: at a constant rate the last
steps alone move the loss by more than the forms differ by."""


def train(
    rank: int, ranks: int, form: str, seed: int, steps: int, rows: int, seq: int, sizes: Sizes
) -> dict[str, float]:
    """Train as one rank; return the loss on held-out text before and after."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = sizes.build()
    if form == "perturbed":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 1e-6 * torch.randn_like(parameter))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = LambdaLR(optimizer, lambda number: schedule((number + 0.5) / steps))
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=AXES)
    options = {"process_group": mesh, "stage": 3, **FORMS[form]}

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    compiled = torch.compile(step, backend="zero", options=options)
    training, held_out = map(read_bytes, split_files(source_files()))
    cut = {"batch": rows * ranks, "seq": seq, "rank": rank, "world_size": ranks}
    batches = text_batches(training, **cut, seed=seed)
    for _ in range(steps):
        last = compiled(next(batches))
        scheduler.step()
    alone = sizes.build()
    alone.load_state_dict(model.state_dict())
    losses = torch.zeros((), dtype=torch.float64)
    unseen = text_batches(held_out, batch=16 * ranks, seq=seq, rank=rank, world_size=ranks, seed=1)
    with torch.no_grad():
        for _ in range(HELD_OUT_BATCHES // ranks):
            losses += loss_of(alone, next(unseen)).double()
    dist.all_reduce(losses)
    return {"held_out": float(losses) / HELD_OUT_BATCHES, "last": float(last)}


def schedule(done: float) -> float:
    """The share of the learning rate when so much of the training is done: up, and down to 0."""
    return min(done / WARMUP, 0.5 * (1 + math.cos(math.pi * done)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=5)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    sizes = Sizes("gpt", 256, given.width, given.layers)
    found: dict[str, dict[int, float]] = {form: {} for form in given.forms}
    for seed in given.seeds:
        for form in given.forms:
            path = given.out / f"{form.replace(',', '').replace(' ', '_')}-{seed}.json"
            settings = (given.steps, given.rows, given.seq, sizes)
            result = _kept(path, str(settings))
            if result is None:
                result, *_ = on_ranks(train, given.ranks, form, seed, *settings)
                path.write_text(json.dumps({"settings": str(settings), **result}))
            found[form][seed] = result["held_out"]
            print(f"{form}, seed {seed}: {result['held_out']:.5f}", flush=True)
    print(
        f"\n{sizes}, {given.steps} steps of {given.rows} x {given.seq} bytes on each of "
        f"{given.ranks} ranks\n"
    )
    print(table(found))
    return 0


def _kept(path: Path, settings: str) -> Mapping[str, Any] | None:
    """The result of an earlier run with these settings."""
    if not path.exists():
        return None
    kept = json.loads(path.read_text())
    return kept if kept["settings"] == settings else None


def table(found: Mapping[str, Mapping[int, float]]) -> str:
    """Losses by form and seed, and the means' distance from the exact one's."""
    exact = found.get("exact")
    rows = []
    for form, losses in found.items():
        mean = statistics.mean(losses.values())
        apart = ""
        if exact:
            apart = f"{mean / statistics.mean(exact.values()) - 1:+.2%}"
        rows.append([form, *(f"{loss:.4f}" for loss in losses.values()), f"{mean:.4f}", apart])
    seeds = next(iter(found.values()))
    headers = ["form", *(f"seed {seed}" for seed in seeds), "mean", "from exact"]
    return tabulate(rows, headers=headers, disable_numparse=True)


if __name__ == "__main__":
    sys.exit(main())
