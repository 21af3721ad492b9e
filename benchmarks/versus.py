"""Compare two checkouts of zerofx on one step, in turns, and print the ratio of their times.

    python benchmarks/versus.py ../before . --rows 1 --length 64
    python benchmarks/versus.py ../before . --first-call --layers 24 --length 32

Speed: each checkout has rank processes of its own, which sleep while the other's run.  A round is a
few steps of each, the first of them in turns too; what disturbs one disturbs its neighbour.  First
call: each round starts new processes, with a compile cache that the first round has filled.

Of the rounds' ratios (second checkout to first) it prints the median and its 95% interval, by
10,000 resamplings.  Exit status 1 if the median is above 1.02 or the interval's end above 1.04.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import torch
import torch.distributed as dist
from models import Sizes, batches_of

MEDIAN_AT_MOST = 1.02
INTERVAL_AT_MOST = 1.04


class Checkout:
    """The rank processes that run one checkout's zerofx."""

    def __init__(self, tree: Path, cache: str, arguments: list[str], num_ranks: int):
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.ranks = [
            subprocess.Popen(
                [sys.executable, __file__, *arguments, "--serve", str(rank)],
                env={
                    **os.environ,
                    "PYTHONPATH": str(tree.resolve()),
                    "TORCHINDUCTOR_CACHE_DIR": f"{cache}/{tree.resolve().name}{rank}",
                    "STORE_PORT": str(self.store.port),
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(num_ranks)
        ]

    def round_s(self) -> float:
        """Have all ranks run a round; return the seconds of the slowest."""
        for rank in self.ranks:
            rank.stdin.write("go\n")
            rank.stdin.flush()
        return max(float(rank.stdout.readline()) for rank in self.ranks)

    def close(self) -> None:
        for rank in self.ranks:
            rank.stdin.close()
        for rank in self.ranks:
            if rank.wait():
                sys.exit(f"a rank ended with exit code {rank.returncode}")


def serve(rank: int, sizes: Sizes, arguments: argparse.Namespace) -> None:
    """Run the first step, then a round of steps for each line of the input; print seconds."""
    from systems import SYSTEMS, zerofx  # the checkout's, whose folder comes first

    assert Path(zerofx.__file__).is_relative_to(os.environ["PYTHONPATH"]), zerofx.__file__
    store = dist.TCPStore("127.0.0.1", int(os.environ["STORE_PORT"]), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=arguments.ranks)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // arguments.ranks))
    batches = batches_of(sizes, arguments.rows, arguments.length, rank, torch.device("cpu"))
    torch.manual_seed(0)
    step = SYSTEMS[arguments.system](sizes.build())
    for number, _ in enumerate(sys.stdin):
        dist.barrier()
        started = time.perf_counter()
        for index in range(arguments.steps if number else 1):
            step(batches[index % len(batches)]).item()
        dist.barrier()
        print(time.perf_counter() - started, flush=True)
    dist.destroy_process_group()


def rounds(
    trees: list[Path], arguments: argparse.Namespace, passed_on: list[str]
) -> Iterator[list[float]]:
    """Yield the seconds of each round, by checkout."""
    with tempfile.TemporaryDirectory() as cache, ExitStack() as running:

        def started(tree: Path) -> Checkout:
            return Checkout(tree, cache, passed_on, arguments.ranks)

        if not arguments.first_call:
            kept = [running.enter_context(closing(started(tree))) for tree in trees]
            for _ in range(2):  # the first compiles
                for checkout in kept:
                    checkout.round_s()
        else:
            for tree in trees:
                with closing(started(tree)) as checkout:
                    checkout.round_s()
        for number in range(arguments.rounds):
            took = [0.0, 0.0]
            for which in (0, 1) if number % 2 else (1, 0):
                if not arguments.first_call:
                    took[which] = kept[which].round_s()
                else:
                    with closing(started(trees[which])) as checkout:
                        took[which] = checkout.round_s()
            yield took


def interval(ratios: list[float]) -> tuple[float, float]:
    """Return the 95% interval of the median, by resampling."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(10_000))
    return medians[250], medians[9749]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trees", nargs=2, type=Path, metavar="CHECKOUT", help="before and after")
    Sizes.add_arguments(parser)
    parser.add_argument("--system", default="zerofx 3")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=4, help="of one rank's batch")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=3, help="of one checkout in one round")
    parser.add_argument("--first-call", action="store_true", help="new processes in every round")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sizes = Sizes.of(arguments)
    if arguments.serve is not None:
        serve(arguments.serve, sizes, arguments)
        return 0
    took = []
    for number, of_round in enumerate(rounds(arguments.trees, arguments, sys.argv[1:])):
        took.append(of_round)
        print(f"round {number + 1}: {of_round[0]:.3f} s, {of_round[1]:.3f} s", flush=True)
    ratios = [after / before for before, after in took]
    low, high = interval(ratios)
    median = statistics.median(ratios)
    steps = 1 if arguments.first_call else arguments.steps
    before, after = (1e3 * statistics.median(column) / steps for column in zip(*took, strict=True))
    what = "first call" if arguments.first_call else "step"
    print(
        f"{sizes}; {arguments.system}, {arguments.ranks} ranks, {arguments.rows} x "
        f"{arguments.length} tokens each; torch {torch.__version__}\n"
        f"{what}: {before:.1f} ms before, {after:.1f} ms after; ratio {median:.3f}, 95% interval "
        f"{low:.3f} to {high:.3f}, {len(ratios)} rounds"
    )
    return int(median > MEDIAN_AT_MOST or high > INTERVAL_AT_MOST)


if __name__ == "__main__":
    raise SystemExit(main())
