"""Compare what ``plan="auto"`` chooses with what else could be chosen, measured.

    python benchmarks/choice.py --ranks 2

The ranks calibrate, and compile each model's step in 24 ways: every stage with each size of
buckets, and stage 3 with a ``memory_budget`` for some of the gathers and for all.  They
compile it once more with ``plan="auto"`` and memory for everything.  All take turns of a few steps;
of each the faster half counts.

Prints a row for each model: the best of the 24, today's choice of what stays gathered (stage 3 with
all the memory there is), what was chosen, and how much slower it is than each of these.
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

from zerofx.backend import zero
from zerofx.planning.calibrate import Calibrator
from zerofx.runtime.comm.communication import Communicator

MODELS = (
    (Sizes("gpt", 1024, 192, 3), 2, 64),
    (Sizes("gpt", 512, 320, 2), 8, 128),
    (Sizes("plain llama", 1024, 192, 3), 2, 64),
    (Sizes("plain llama", 512, 320, 2), 4, 128),
)
BUCKETS = (None, 2**20, 2**23, 2**26)
EVERYTHING = 2**40


def candidates(parameter_bytes: int) -> list[dict[str, Any]]:
    stages = [{"stage": stage} for stage in (0, 1, 2, 3)]
    half = {"stage": 3, "memory_budget": 3 * parameter_bytes}
    forms = [*stages, half, {"stage": 3, "memory_budget": EVERYTHING}]
    pairs = itertools.product(forms, BUCKETS)
    return [{**form, **({"bucket_bytes": size} if size else {})} for form, size in pairs]


def measured(rank: int, num_ranks: int, rounds: int) -> list[tuple]:
    """Return of each model the seconds of all candidates, of the choice, and its words."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    calibrator = Calibrator(Communicator.of(None), torch.device("cpu"), with_inductor=False)
    for _ in range(4):
        calibrator.turn()
    figures = calibrator.calibrated()
    found = []
    for sizes, rows, length in MODELS:
        ways: list[dict[str, Any]] = [{"plan": "auto", "memory_limit": EVERYTHING}]
        nbytes = sum(p.nbytes for p in training_of(sizes, rows, length, rank)[1][0].parameters())
        ways += candidates(nbytes)
        steps = []
        for way in ways:
            step, given = training_of(sizes, rows, length, rank)
            options = {"lowering": "eager", "hardware": figures, **way}
            compiled = torch.compile(step, backend="zero", options=options, dynamic=False)
            for _ in range(2):
                compiled(*given)
            steps.append(partial(compiled, *given))
            if rank == 0:
                print(f"compiled {way}", file=sys.stderr, flush=True)
        choosers = [function for function in zero.functions if function.choice is not None]
        choice = max(choosers, key=lambda function: function.number).choice
        taken: list[list[float]] = [[] for _ in steps]
        for _ in range(rounds):
            for step, seconds in zip(steps, taken, strict=True):
                once_s = seconds[-1] if seconds else SHORTEST_TURN_S
                times = torch.tensor(max(2, round(SHORTEST_TURN_S / once_s)))
                dist.all_reduce(times, dist.ReduceOp.MAX)
                seconds += turn(step, int(times))
        faster = [statistics.fmean(sorted(each)[: -(-len(each) // 2)]) for each in taken]
        found.append((faster[0], ways[1:], faster[1:], str(choice.form)))
        del steps, compiled, step  # models and their states
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()
    table = []
    found = on_ranks(measured, arguments.ranks, arguments.rounds)[0]
    for (sizes, rows, length), (chosen_s, ways, seconds, words) in zip(MODELS, found, strict=True):
        best_s, best = min(zip(seconds, map(str, ways), strict=True))
        greedy_s = seconds[ways.index({"stage": 3, "memory_budget": EVERYTHING})]
        default_s = seconds[ways.index({"stage": 3})]
        table.append(
            (
                f"{sizes.model} {sizes.width} x {sizes.layers}, {rows} x {length}",
                f"{1e3 * best_s:.1f} {best}",
                f"{1e3 * chosen_s:.1f} {words}",
                f"{chosen_s / best_s:.3f}",
                f"{chosen_s / greedy_s:.3f}",
                f"{chosen_s / default_s:.3f}",
            )
        )
    headers = ("model", "best, ms", "chosen, ms", "of best", "of greedy", "of the default")
    print(tabulate(table, headers=headers, disable_numparse=True))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
