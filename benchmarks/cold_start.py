"""Measure how soon a training starts, and starts again: in fresh processes, at first with no cache.

    python benchmarks/cold_start.py
    python benchmarks/cold_start.py --systems "zerofx 3" "FSDP2 + compile" --starts 2 --seconds 0
    python benchmarks/cold_start.py --systems "zerofx 3" "zerofx 3 at once" --layers 4 --rounds 1

Systems take turns, each time with an empty TORCHINDUCTOR_CACHE_DIR that its ranks share; a second
start has what the first has left there.  Seconds from the first call, on the rank that is latest,
medians over the rounds:

first        the end of the first step
second       the end of the second
full speed   the end of the first of three steps that take no more than 1.2 times the last ones'
step         of the last five, the median
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from models import Sizes, batches_of
from ranks import device_of, on_ranks
from systems import COMPILED_UPDATE, SYSTEMS
from tabulate import tabulate

LENGTH = 32
LAST = 5
AS_FAST = 1.2
IN_A_ROW = 3


class Start(NamedTuple):
    """Seconds of one system in one round, on one rank."""

    first_s: float
    second_s: float
    full_speed_s: float
    step_s: float


def train(rank: int, num_ranks: int, name: str, sizes: Sizes, seconds: float) -> list[float]:
    """Train for so long; return when each step ended, from the first call on."""
    device = device_of(rank, num_ranks)
    batch = batches_of(sizes, 1, LENGTH, rank, device)[0]
    torch.manual_seed(0)
    step = SYSTEMS[name](sizes.build().to(device))
    ends: list[float] = []
    goes_on = torch.ones((), device=device)
    started = time.perf_counter()
    while len(ends) < 2 + LAST or goes_on:
        step(batch).item()
        ends.append(time.perf_counter() - started)
        goes_on.fill_(ends[-1] < seconds)
        dist.broadcast(goes_on, 0)
    return ends


def start_of(ends: list[float]) -> Start:
    """Read a start off the ends of its steps."""
    lasts = [end - before for before, end in zip([0.0, *ends], ends, strict=False)]
    step_s = statistics.median(lasts[-LAST:])
    is_fast = [last <= AS_FAST * step_s for last in lasts]
    at = next(i for i in range(len(ends)) if all(is_fast[i : i + IN_A_ROW]))
    return Start(ends[0], ends[1], ends[at], step_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    Sizes.add_arguments(parser, nargs="+", default=[4])
    systems = ["zerofx 3", "zerofx 3 at once", "FSDP2 + compile", "DDP + compile", COMPILED_UPDATE]
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=systems)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--starts", type=int, default=1, help="one after the other, in one cache")
    parser.add_argument("--seconds", type=float, default=90.0, help="how long each trains at least")
    arguments = parser.parse_args()
    rows = []
    for layers in arguments.layers:
        sizes = Sizes(arguments.model, arguments.vocabulary, arguments.width, layers)
        numbers = range(1, arguments.starts + 1)
        found: dict[tuple[str, int], list[Start]] = {
            (name, number): [] for name in arguments.systems for number in numbers
        }
        for _ in range(arguments.rounds):
            for name in arguments.systems:
                with tempfile.TemporaryDirectory() as folder:
                    environment = {"TORCHINDUCTOR_CACHE_DIR": folder}
                    given = name, sizes, arguments.seconds
                    for number in numbers:
                        ranks = on_ranks(train, arguments.ranks, *given, environment=environment)
                        slowest = Start(*map(max, zip(*map(start_of, ranks), strict=True)))
                        found[name, number].append(slowest)
                        print(f"# {layers} {name}, start {number}: {slowest}", flush=True)
        for (name, number), starts_of in found.items():
            medians = map(statistics.median, zip(*starts_of, strict=True))
            rows.append((name, number, layers, *(f"{each:.2f}" for each in medians)))
    print(
        f"\n{arguments.model} {arguments.width} wide, {arguments.ranks} ranks, 1 x {LENGTH} tokens "
        f"each, AdamW, fp32; torch {torch.__version__}\n"
    )
    headers = ("system", "start", "layers", "first s", "second s", "full speed s", "step s")
    print(tabulate(rows, headers=headers, disable_numparse=True))


if __name__ == "__main__":
    main()
