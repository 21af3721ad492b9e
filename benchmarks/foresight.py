"""Compare what plans say that a step takes with what it takes, by one calibration.

    python benchmarks/foresight.py --ranks 2
    python benchmarks/foresight.py --ranks 4 --keep calibration.json

The ranks calibrate, as ``python -m zerofx calibrate`` does, and then train every configuration
(models x batches x stages) in turns of a few steps: what disturbs one disturbs its neighbours.  Of
each the faster half of its steps counts; its time is their average, of the average rank.  This
process then plans the configurations by the file that was measured, and without ranks.

Prints a row for each, and of all: the median and the 90th percentile of errors, Kendall's tau, the
share of intervals that contain what was measured, and the median width of intervals.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from models import Sizes, batches_of, loss_of
from ranks import on_ranks
from tabulate import tabulate

import zerofx
from zerofx.planning.calibrate import as_json, calibrate
from zerofx.runtime.comm.communication import Communicator

MODELS = (
    Sizes("gpt", 1024, 192, 3),
    Sizes("gpt", 512, 320, 2),
    Sizes("plain llama", 1024, 192, 3),
)
BATCHES = ((2, 64), (8, 128))
STAGES = (0, 1, 2, 3)
SHORTEST_TURN_S = 0.25


def configurations() -> Iterator[tuple[Sizes, int, int, int]]:
    for sizes, (rows, length), stage in itertools.product(MODELS, BATCHES, STAGES):
        yield sizes, rows, length, stage


def training_of(sizes: Sizes, rows: int, length: int, rank: int) -> tuple[Callable, tuple]:
    """Return a step and its arguments."""
    torch.manual_seed(0)
    model = sizes.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(model, optimizer, tokens):
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    tokens = batches_of(sizes, rows, length, rank, torch.device("cpu"))[0]
    return step, (model, optimizer, tokens)


def measured(rank: int, num_ranks: int, lowering: str, rounds: int) -> tuple[dict, list[float]]:
    """Return the calibration, and the seconds of a step of each configuration on this rank."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})  # or they meet on one, and part again
    compiles = lowering == "inductor"
    figures = calibrate(Communicator.of(None), torch.device("cpu"), with_inductor=compiles)
    steps = []
    for sizes, rows, length, stage in configurations():
        step, given = training_of(sizes, rows, length, rank)
        options = {"stage": stage, "lowering": lowering, "hardware": figures}
        compiled = torch.compile(step, backend="zero", options=options, dynamic=False)
        for _ in range(3):
            compiled(*given)
        steps.append((compiled, given))
        if rank == 0:
            print(f"compiled {len(steps)}", file=sys.stderr, flush=True)
    taken: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds):
        for (compiled, given), seconds in zip(steps, taken, strict=True):
            once_s = seconds[-1] if seconds else SHORTEST_TURN_S
            times = torch.tensor(max(2, round(SHORTEST_TURN_S / once_s)))
            dist.all_reduce(times, dist.ReduceOp.MAX)
            seconds += turn(partial(compiled, *given), int(times))
    found = []
    for seconds in taken:
        half = sorted(seconds)[: -(-len(seconds) // 2)]
        found.append(statistics.fmean(half))
    return as_json(figures), found


def turn(step: Callable, times: int) -> list[float]:
    """Return the seconds of some steps, of the average rank."""
    seconds = []
    for _ in range(times + 1):
        dist.barrier()
        begun = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begun)
    average_s = torch.tensor(seconds[1:])  # the first has memory that others have had
    dist.all_reduce(average_s)
    return (average_s / dist.get_world_size()).tolist()


def planned(path: str, num_ranks: int, lowering: str) -> Iterator[tuple[float, float, float]]:
    """Yield the interval of each configuration and what is expected, in their order."""
    for sizes, (rows, length) in itertools.product(MODELS, BATCHES):
        torch.compiler.reset()  # shapes of the last one would be taken to change
        step, given = training_of(sizes, rows, length, 0)
        options = {"lowering": lowering, "hardware": path}
        made = zerofx.plan(step, given, ranks=num_ranks, stages=STAGES, options=options)
        for stage in STAGES:
            of = made.forecasts[str(stage)].step_time
            yield of.low_s, of.expected_s, of.high_s


def kendall(one: list[float], other: list[float]) -> float:
    """Return how much of the order of one list the other has: 1 if all, -1 if the reverse.

    Pairs that are equal in one of them count for neither.  Source: Kendall 1945, tau-b.
    """
    signs = [
        (math.copysign(one[a] != one[b], one[a] - one[b]),
         math.copysign(other[a] != other[b], other[a] - other[b]))
        for a, b in itertools.combinations(range(len(one)), 2)
    ]  # fmt: skip
    told_apart = math.prod(sum(map(abs, of)) for of in zip(*signs, strict=True))
    return sum(x * y for x, y in signs) / math.sqrt(told_apart)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--lowering", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="keep the calibration there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.keep or Path(folder) / "calibration.json"
        found = on_ranks(measured, arguments.ranks, arguments.lowering, arguments.rounds)
        path.write_text(json.dumps(found[0][0]))
        plans = list(planned(str(path), arguments.ranks, arguments.lowering))
    steps = [statistics.fmean(ranks) for ranks in zip(*(steps for _, steps in found), strict=True)]
    rows = [
        (
            f"{sizes.model} {sizes.width} x {sizes.layers}",
            f"{rows} x {length}",
            stage,
            f"{1e3 * step_s:.1f}",
            f"{1e3 * expected_s:.1f}",
            f"{1e3 * low_s:.1f} to {1e3 * high_s:.1f}",
            f"{expected_s / step_s:.2f}",
        )
        for (sizes, rows, length, stage), step_s, (low_s, expected_s, high_s) in zip(
            configurations(), steps, plans, strict=True
        )
    ]
    headers = ("model", "batch", "stage", "ms", "planned", "interval", "ratio")
    print(tabulate(rows, headers=headers, disable_numparse=True))
    errors = [abs(of[1] / step_s - 1) for of, step_s in zip(plans, steps, strict=True)]
    inside = [low <= step_s <= high for (low, _, high), step_s in zip(plans, steps, strict=True)]
    widths = [(high - low) / 2 / expected for low, expected, high in plans]
    print(
        f"{arguments.ranks} ranks, {arguments.lowering}, {len(steps)} configurations: error "
        f"{statistics.median(errors):.1%} (median), {percentile(errors, 0.9):.1%} (90th "
        f"percentile); Kendall's tau {kendall(steps, [of[1] for of in plans]):.2f}; "
        f"{statistics.fmean(inside):.0%} within their intervals, of a width of +-"
        f"{statistics.median(widths):.0%} (median)"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
