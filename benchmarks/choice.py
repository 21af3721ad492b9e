"""Compare what ``plan="auto"`` chooses with what else could be chosen, measured.

    python benchmarks/choice.py --ranks 2

For each model ranks begin, calibrate, and compile its step in 24 ways: every stage with each size
of buckets, and stage 3 with a ``memory_budget`` for half of the gathers and for all.  They compile
it twice more with ``plan="auto"`` and memory for everything.  All take turns of a few steps.

Which way is best is told by every other round, and the seconds by the rounds between: the least of
24 noisy figures is too low.  Of a way's steps the faster half counts.

Prints a row for each model: the best of the 24, what was chosen, and how much slower that is than
the best, than stage 3 with all the memory there is (what ``memory_budget`` keeps gathered), and
than stage 3 alone.  The last column is noise: what the two with ``plan="auto"`` differ by.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from foresight import SHORTEST_TURN_S, training_of, turn
from models import Sizes
from ranks import on_ranks
from tabulate import tabulate

from zerofx.backend import CompiledFunction, zero
from zerofx.cost.program import live_bytes
from zerofx.planning.calibrate import Calibrator
from zerofx.runtime.comm.communication import Communicator

MODELS = (
    (Sizes("gpt", 1024, 192, 3), 2, 64),
    (Sizes("gpt", 512, 320, 2), 8, 128),
    (Sizes("plain llama", 1024, 192, 3), 2, 64),
    (Sizes("plain llama", 512, 320, 2), 4, 128),
    (Sizes("gpt", 256, 64, 8), 1, 32),
    (Sizes("gpt", 4096, 256, 4), 1, 32),
)
BUCKETS = (None, 2**20, 2**23, 2**26)
EVERYTHING = 2**40
CHOSEN: dict[str, Any] = {"plan": "auto", "memory_limit": EVERYTHING}
ALL_GATHERED = {"stage": 3, "memory_budget": EVERYTHING}
HALF = -1
"""Stands for the ``memory_budget`` half way between no gather that is kept and all."""


def candidates() -> list[dict[str, Any]]:
    stages = [{"stage": stage} for stage in (0, 1, 2, 3)]
    forms = [*stages, {"stage": 3, "memory_budget": HALF}, ALL_GATHERED]
    pairs = itertools.product(forms, BUCKETS)
    return [{**form, **({"bucket_bytes": size} if size else {})} for form, size in pairs]


def latest() -> CompiledFunction:
    return max(zero.functions, key=lambda function: function.number)


def half_of_the_gathers() -> int:
    """Return the budget for the step that was compiled last, which keeps none gathered."""
    program = latest().programs[-1]
    alive = live_bytes(program.gm.graph, program.function.communicator.world_size, sockets=True)
    return max(alive) + sum(info.nbytes for info in program.table) // 2


def measured(rank: int, num_ranks: int, model: int, rounds: int) -> tuple[list[float], ...]:
    """Return the seconds of all ways in the one half of rounds and in the other, and the choice."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    calibrator = Calibrator(Communicator.of(None), torch.device("cpu"), with_inductor=False)
    for _ in range(4):
        calibrator.turn()
    figures = calibrator.calibrated()
    steps, words, half = [], "", 0
    for way in (CHOSEN, *candidates(), CHOSEN):
        step, given = training_of(*MODELS[model], rank)
        options = {"lowering": "eager", "hardware": figures, **way}
        if way.get("memory_budget") == HALF:
            options["memory_budget"] = half
        compiled = torch.compile(step, backend="zero", options=options, dynamic=False)
        for _ in range(2):
            compiled(*given)
        steps.append(partial(compiled, *given))
        choice = latest().choice
        words = str(choice.form) if choice is not None else words
        if way == {"stage": 3}:
            half = half_of_the_gathers()
        if rank == 0:
            print(f"compiled {way}", file=sys.stderr, flush=True)
    taken: tuple[list[list[float]], ...] = [[] for _ in steps], [[] for _ in steps]
    for number in range(2 * rounds):
        for step, seconds in zip(steps, taken[number % 2], strict=True):
            once_s = seconds[-1] if seconds else SHORTEST_TURN_S
            times = torch.tensor(max(2, round(SHORTEST_TURN_S / once_s)))
            dist.all_reduce(times, dist.ReduceOp.MAX)
            seconds += turn(step, int(times))
    first, second = ([fast(seconds) for seconds in of] for of in taken)
    return first, second, words


def fast(seconds: list[float]) -> float:
    """Return the mean of the faster half."""
    return statistics.fmean(sorted(seconds)[: -(-len(seconds) // 2)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="of each half")
    arguments = parser.parse_args()
    ways, table = candidates(), []
    for model, (sizes, rows, length) in enumerate(MODELS):
        found = on_ranks(measured, arguments.ranks, model, arguments.rounds)
        first, second, words = found[0]
        best = min(range(len(ways)), key=first[1:-1].__getitem__)
        seconds = second[1:-1]
        chosen_s = (second[0] + second[-1]) / 2
        table.append(
            (
                f"{sizes.model} {sizes.width} x {sizes.layers}, {rows} x {length}",
                f"{1e3 * seconds[best]:.1f} {ways[best]}",
                f"{1e3 * chosen_s:.1f} {words}",
                f"{chosen_s / seconds[best]:.3f}",
                f"{chosen_s / seconds[ways.index(ALL_GATHERED)]:.3f}",
                f"{chosen_s / seconds[ways.index({'stage': 3})]:.3f}",
                f"{max(second[0], second[-1]) / min(second[0], second[-1]) - 1:.1%}",
            )
        )
        print(*table[-1], sep=" | ", file=sys.stderr, flush=True)
    headers = ("model", "best, ms", "chosen, ms", "of best", "of greedy", "of stage 3", "noise")
    print(tabulate(table, headers=headers, disable_numparse=True))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
