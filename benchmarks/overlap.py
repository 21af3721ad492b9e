"""Compare a step's time with its predicted one, and that with what no schedule can beat.

    python benchmarks/overlap.py
    python benchmarks/overlap.py --ranks 2 --stage 2 --seconds 3
    python benchmarks/overlap.py --regimes even --layers 24
    python benchmarks/overlap.py --offload optimizer,params --directory /mnt/nvme0 --regimes files

The step runs for real, with optimizer states in host memory (or what --offload names, and in files
of --directory if that is given), but every lane takes the time that its
bytes or flops take at figures made up for a regime (benchmarks/simulate.py): compute --seconds, and
each other lane the multiple of it that REGIMES says.  "predicted" is the critical path of the
schedule, "busiest" the lane that has most to do; "bound" counts what must come before its first
work and after its last, too.  "measured" is the fastest of --rounds steps.

Exit status 1 if a measured time is off by more than 10%, or a predicted one is above 1.25 times
both the busiest lane and the bound.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from models import Sizes, batches_of, loss_of
from ranks import on_ranks
from simulate import simulated
from tabulate import tabulate

from zerofx.backend import zero
from zerofx.cost.timeline import predict
from zerofx.hardware import Hardware

# What each lane has to do, in units of what compute has: copies to the host, updates, the link,
# files (with --directory).
REGIMES: dict[str, Mapping[str, float]] = {
    "compute": {"to host": 0.3, "updates": 0.5, "link": 0.1},
    "updates": {"to host": 0.4, "updates": 2.5, "link": 0.1},
    "copies": {"to host": 3.0, "updates": 0.4, "link": 0.1},
    "even": {"to host": 1.0, "updates": 1.0, "link": 0.1},
    "files": {"to host": 0.3, "updates": 0.5, "link": 0.1, "files": 2.5},
}
WITHOUT_FILES = [name for name, parts in REGIMES.items() if "files" not in parts]
FREE = 1e30  # bytes per second, of what a regime is not about


@dataclass(frozen=True)
class Result:
    """One regime's step.  Units: seconds."""

    regime: str
    measured_s: float
    predicted_s: float
    busiest: str
    busiest_s: float
    bound_s: float

    @property
    def error(self) -> float:
        return self.measured_s / self.predicted_s - 1

    @property
    def is_good(self) -> bool:
        """Whether the schedule is: against all that the lane has to do, or what can be proven."""
        return self.predicted_s <= 1.25 * max(self.busiest_s, self.bound_s)


def results(
    rank: int,
    ranks: int,
    sizes: Sizes,
    stage: int,
    seconds: float,
    rounds: int,
    regimes: Sequence[str],
    offload: str,
    directory: str | None,
) -> list[Result]:
    """Train a model on one rank, once per regime and round."""
    torch.manual_seed(0)
    model = sizes.build()
    optimizer = torch.optim.AdamW(model.parameters())
    batches = batches_of(sizes, 2, 16, rank, torch.device("cpu"))

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    options = {
        "stage": stage,
        "lowering": "eager",
        "offload": offload,
        "recompute": False,
        "bucket_bytes": max(sum(p.nbytes for p in model.parameters()) // (2 * sizes.layers), 4),
        "hardware": "latency_s=1e-6 bytes_per_s=1e9",
    }
    if directory is not None:
        options |= {"offload_tier": "nvme", "offload_dir": directory}
    compiled = torch.compile(step, backend="zero", options=options)
    for batch in batches[:2]:  # the second traces updates once more, of states that are there
        compiled(batch)
    (function,) = (f for f in zero.functions if f.code is step.__code__ and f.programs)
    (program,) = function.programs
    # At one unit a second, what each lane has to do is its seconds.
    unit = Hardware(1e-9, 1.0, True, 1.0, FREE, 1.0, 1.0, 1.0)
    work = predict(program.gm.graph, unit, program.table, ranks).lanes
    found = []
    for regime in regimes:
        speed = {lane: work[lane] / (part * seconds) for lane, part in REGIMES[regime].items()}
        if "files" in speed and not speed["files"]:
            raise SystemExit(f"regime {regime!r} is about files: give --directory")
        figures = Hardware(
            latency_s=1e-9,
            bytes_per_s=speed["link"] or FREE,
            flops_per_s=work["compute"] / seconds,
            memory_bytes_per_s=FREE,
            copy_bytes_per_s=speed["to host"],
            host_bytes_per_s=speed["updates"] or FREE,
            file_bytes_per_s=speed.get("files", FREE),
        )
        with simulated(function, figures) as (timeline,):
            times = [_timed(compiled, batches[number % 8]) for number in range(rounds)]
        busiest_s = timeline.lanes[timeline.busiest]
        measured_s = min(times)  # others at work only add
        found.append(
            Result(
                regime,
                measured_s,
                timeline.step_s,
                timeline.busiest,
                busiest_s,
                timeline.bound_s,
            )
        )
    return found


def _timed(compiled, tokens: torch.Tensor) -> float:
    begun_s = time.perf_counter()
    compiled(tokens)
    return time.perf_counter() - begun_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    Sizes.add_arguments(parser, default=10)
    parser.set_defaults(width=64, vocabulary=64)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of compute in a step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=WITHOUT_FILES)
    parser.add_argument("--offload", default="optimizer", help="the option of that name")
    parser.add_argument("--directory", help="keep what it names in files there")
    arguments = parser.parse_args()
    settings = (arguments.stage, arguments.seconds, arguments.rounds, arguments.regimes)
    settings += (arguments.offload, arguments.directory)
    found = on_ranks(results, arguments.ranks, Sizes.of(arguments), *settings)[0]
    rows = [
        (
            result.regime,
            f"{result.measured_s:.3f}",
            f"{result.predicted_s:.3f}",
            f"{result.error:+.1%}",
            result.busiest,
            f"{result.predicted_s / result.busiest_s:.2f}",
            f"{result.predicted_s / result.bound_s:.2f}",
        )
        for result in found
    ]
    headers = ("regime", "measured s", "predicted s", "off by", "busiest", "to busiest", "to bound")
    print(tabulate(rows, headers=headers))
    fails = [result for result in found if abs(result.error) > 0.1 or not result.is_good]
    return 1 if fails else 0


if __name__ == "__main__":
    sys.exit(main())
