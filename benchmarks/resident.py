"""Compare what plans say that a process takes with its resident memory (Linux).

    python benchmarks/resident.py
    python benchmarks/resident.py --lowering eager --ranks 1 2

The ranks train under ``MALLOC_MMAP_THRESHOLD_``: glibc keeps freed blocks otherwise, of up to
32 MiB each.  Resident memory counts above what was there when everything was imported, at its most
in the third and the fourth step; of ranks the one with most.  A plan's is the peak, what lies
outside the program, and what compiling leaves in host memory.

The exit status says whether all plans of 1 GiB and more are within 5%.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys

import torch
from foresight import training_of
from memory import GIB, bytes_at_most, bytes_now, reset_peak
from models import Sizes
from ranks import on_ranks
from tabulate import tabulate

import zerofx

CPU = torch.device("cpu")
CASES = (
    (Sizes("gpt", 4096, 1024, 6), 2, 256),
    (Sizes("gpt", 8192, 512, 6), 16, 512),
    (Sizes("plain llama", 4096, 1024, 6), 2, 256),
)
STAGES = (0, 1, 2, 3)
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
WITHIN = 0.05
FIGURES = "latency_s=1e-4 bytes_per_s=1e9 overlaps=0 flops_per_s=1e11 memory_bytes_per_s=1e10"
"""Any: ranks and plans choose alike by them."""


def taken(rank: int, num_ranks: int, case: int, options: dict) -> int:
    """Return the bytes that a later step takes at its most, above what imports take."""
    sizes, rows, length = CASES[case]
    sizes.num_parameters()  # imports what the model needs
    gc.collect()
    before = bytes_now(CPU)
    step, given = training_of(sizes, rows, length, rank)
    compiled = torch.compile(step, backend="zero", options=options, dynamic=False)
    for _ in range(2):
        compiled(*given)
    reset_peak(CPU)
    for _ in range(2):
        compiled(*given)
    return bytes_at_most(CPU) - before


def planned(case: int, num_ranks: int, options: dict) -> tuple[int, int]:
    """Return the peak of the program, and the bytes of the process."""
    torch.compiler.reset()
    torch.set_num_threads(1)
    given = {name: value for name, value in options.items() if name != "stage"}
    step, arguments = training_of(*CASES[case], 0)
    made = zerofx.plan(step, arguments, ranks=num_ranks, stages=[options["stage"]], options=given)
    (of,) = made.forecasts.values()
    return sum(of.peak.values()), of.device_bytes + of.outside["compiling"].nbytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--lowering", nargs="+", choices=("eager", "inductor"), default=["eager", "inductor"]
    )
    arguments = parser.parse_args()
    rows, worst = [], 0.0
    cases = itertools.product(range(len(CASES)), arguments.lowering, arguments.ranks, STAGES)
    for case, lowering, num_ranks, stage in cases:
        if num_ranks == 1 and stage:
            continue
        options = {"stage": stage, "lowering": lowering, "hardware": FIGURES}
        peak, process = planned(case, num_ranks, options)
        found = on_ranks(taken, num_ranks, case, options, environment=ENVIRONMENT)
        error = process / max(found) - 1
        worst = max(worst, abs(error)) if peak >= GIB else worst
        sizes, batch, length = CASES[case]
        rows.append(
            (
                f"{sizes.model} {sizes.width} x {sizes.layers}, {batch} x {length}",
                lowering,
                num_ranks,
                stage,
                *(f"{nbytes / GIB:.3f}" for nbytes in (peak, process, max(found))),
                f"{error:+.1%}",
            )
        )
        print(*rows[-1], file=sys.stderr, flush=True)
    headers = ("model", "lowering", "ranks", "stage", "peak", "planned", "resident, GiB", "error")
    print(tabulate(rows, headers=headers, disable_numparse=True))
    print(f"plans of 1 GiB and more are off by {worst:.1%} at most")
    return worst > WITHIN


if __name__ == "__main__":
    raise SystemExit(main())
