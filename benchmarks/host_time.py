"""Measure what a layer adds to the host's time of a step, with nothing computed or sent.

    python benchmarks/host_time.py
    python benchmarks/host_time.py ../before .

The plain Llama at stage 3 with Inductor, one bucket a layer, rank 0 of two that only pretend to
communicate as NCCL does: a collective returns at once.  Every region returns what it returned when
it first ran, and an update's Triton kernel, which is made on a CPU too, is not launched: what is
left is what zerofx does on a rank's main thread to start things.  Each checkout runs at each depth
in a process of its own; they take turns, a few steps each.  The time is the thread's on the
processor, which a busy machine lengthens less than the clock's; of a process the median over all
steps, of a layer the slope.

program    the lowered program alone: starts and waits, arguments of regions, updates
call       all of a call of the step: Dynamo's guards and the runtime around the program too

Exit status 1 if the last checkout's program takes more than 0.4 ms a layer and, where there are
two, more than 0.4 of the first one's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import Sizes, batches_of
from systems import with_zerofx
from tabulate import tabulate

DEPTHS = (16, 32)
MS_A_LAYER_AT_MOST = 0.4
OF_BEFORE_AT_MOST = 0.4
PARTS = ("program", "call")


class Unlaunched:
    """Stands for a Triton kernel: takes a grid and arguments, and does nothing."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: None


class Sent:
    """Stands for a collective that has been started."""

    def wait(self) -> None:
        pass


def pretend_to_communicate() -> None:
    """Be rank 0 of two, with all that the other rank would have to say as this one says it."""
    dist.init_process_group("fake", rank=0, world_size=2)
    for module in _modules_with("Agreement"):
        agreement = module.Agreement
        agreement.check = lambda *args, **kwargs: False
        agreement.exchange = lambda self, lines, value, timeout_s: [value] * self.world_size


def send_nothing() -> None:
    """Have tensors travel as NCCL's do, by collectives that return at once."""
    sent = Sent()
    names = ("start_all_gather", "start_reduce_scatter", "_all_gather", "_reduce_scatter")
    for name in (*names, "all_reduce"):
        for module in [*_modules_with(name), dist]:
            if callable(getattr(module, name, None)):
                setattr(module, name, lambda *args, **kwargs: sent)
    for module in _modules_with("_backend_for"):
        module._backend_for = lambda device, group: "nccl"


def launch_nothing() -> None:
    """Have updates take the way of Triton kernels, up to the launch."""
    for name, replacement in {
        "runs_triton": lambda device: True,
        "load_kernel": lambda source, name: Unlaunched(),
    }.items():
        for module in _modules_with(name):
            setattr(module, name, replacement)


def _modules_with(name: str) -> list[Any]:
    """zerofx's modules that have a name: where it is defined differs between checkouts."""
    modules = [module for key, module in sys.modules.items() if key.startswith("zerofx")]
    return [module for module in modules if hasattr(module, name)]


def compute_nothing() -> None:
    """Have every region run operator by operator once, and return the same from then on."""

    class Region:
        def __init__(self, gm: torch.fx.GraphModule, inputs: Any, donated: Any) -> None:
            self.gm, self.results = gm, None

        def __call__(self, values: list[Any]) -> Any:
            if self.results is None:
                self.results = tuple(self.gm(list(values)))
            values.clear()
            return self.results

    for module in _modules_with("compile_with_inductor"):
        module.compile_with_inductor = Region


class Step:
    """One model's compiled step; ``times`` are the seconds of each call's parts."""

    def __init__(self, layers: int) -> None:
        sizes = Sizes("plain llama", vocabulary=128, width=64, layers=layers)
        torch.manual_seed(0)
        options = {"stage": 3, "lowering": "inductor", "bucket_bytes": 1 << 30}
        self.step = with_zerofx(**options)(sizes.build())
        self.batch = batches_of(sizes, 1, 8, 0, torch.device("cpu"))[0]
        self.program_s = 0.0
        for _ in range(3):
            self()
        (runtime,) = self._runtimes()
        run = runtime.program

        def timed(*values: Any) -> Any:
            started = time.thread_time()
            results = run(*values)
            self.program_s = time.thread_time() - started
            return results

        runtime.program = timed

    def __call__(self) -> None:
        self.step(self.batch)

    def _runtimes(self) -> list[Any]:
        from zerofx.backend import zero

        programs = [program for function in zero.functions for program in function.programs]
        return [program.runtime for program in programs]

    def seconds(self) -> dict[str, float]:
        """Run once; return the seconds of the parts."""
        started = time.thread_time()
        self()
        return {"call": time.thread_time() - started, "program": self.program_s}


def serve(layers: int, steps: int) -> None:
    """Compile, then run a few steps for each line of the input; print their seconds."""
    import zerofx  # the checkout's, whose folder comes first
    import zerofx.backend

    assert Path(zerofx.__file__).is_relative_to(os.environ["PYTHONPATH"]), zerofx.__file__
    torch.set_num_threads(1)
    pretend_to_communicate()
    send_nothing()
    launch_nothing()
    compute_nothing()
    step = Step(layers)
    print(json.dumps([]), flush=True)
    for _ in sys.stdin:
        print(json.dumps([step.seconds() for _ in range(steps)]), flush=True)


class Process:
    """One checkout at one depth."""

    def __init__(self, tree: Path, layers: int, steps: int) -> None:
        command = [sys.executable, __file__, "--serve", str(layers), "--steps", str(steps)]
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(tree.resolve())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.known: list[dict[str, float]] = self._read()  # once it has compiled

    def _read(self) -> list[dict[str, float]]:
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"the process ended with exit code {self.process.wait()}")
        return json.loads(line)

    def run_round(self) -> None:
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        self.known += self._read()

    def median_ms(self, part: str) -> float:
        return 1e3 * statistics.median(seconds[part] for seconds in self.known)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trees", nargs="*", type=Path, metavar="CHECKOUT", help="before and after")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10, help="of one process in one round")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve(arguments.serve, arguments.steps)
        return 0
    trees = arguments.trees or [Path(__file__).parents[1]]
    with ExitStack() as running:
        processes = [
            [
                running.enter_context(closing(Process(tree, layers, arguments.steps)))
                for layers in DEPTHS
            ]
            for tree in trees
        ]
        for number in range(arguments.rounds):
            for of_tree in processes if number % 2 else reversed(processes):
                for process in of_tree:
                    process.run_round()
        table, slopes = [], {}
        for tree, (few, many) in zip(trees, processes, strict=True):
            for part in PARTS:
                ms = few.median_ms(part), many.median_ms(part)
                slope = slopes[tree, part] = (ms[1] - ms[0]) / (DEPTHS[1] - DEPTHS[0])
                ratio = slope / slopes[trees[0], part]
                table.append([tree, part, *ms, slope, ratio])
    headers = ["checkout", "part", *(f"{depth} layers, ms" for depth in DEPTHS), "ms a layer"]
    print(tabulate(table, [*headers, "of the first"], floatfmt=".3f"))
    slope = slopes[trees[-1], "program"]
    is_met = slope <= MS_A_LAYER_AT_MOST
    if len(trees) > 1:
        is_met |= slope <= OF_BEFORE_AT_MOST * slopes[trees[0], "program"]
    print(f"at most {MS_A_LAYER_AT_MOST} ms a layer or {OF_BEFORE_AT_MOST} of before: {is_met}")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
