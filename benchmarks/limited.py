"""Train, under a limit of memory for each process, models that are too large for one process.

    python benchmarks/limited.py
    python benchmarks/limited.py --gib 0.5 --width 1024
    python benchmarks/limited.py --directory /mnt/nvme0 --only "files, deferred"

Every try has processes of its own, each under RLIMIT_DATA (Linux): ``--gib`` above what it had
taken when everything was imported and something small had been trained.  Parameters and AdamW's
states in fp32, 12 bytes a parameter, are ``--times`` the limit, and ``--times-in-files`` where they
are offloaded to files.

Constructed under ``zerofx.deferred_init`` both have to train, to be saved, and, by other processes
under the same limit, to be resumed and trained on.  Controls have to run out of memory:
the first model trained plainly in one process, the second constructed plainly by each rank.  The
exit status says whether all of this is so.
"""

from __future__ import annotations

import argparse
import math
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from memory import GIB
from models import Sizes, batches_of, loss_of
from ranks import device_of, on_ranks
from tabulate import tabulate
from torch import nn

import zerofx
from zerofx.runtime.parameters.registry import REGISTRY

STATES = 3  # a parameter and two moments
STEPS = 3
AFTER = {"step": STEPS}  # what is saved with the checkpoint
STACK_BYTES = 2**20  # of each thread that moves files: they count as data, by default 8 MiB each


# Data is what a process has of the system, used or not.  Without this glibc keeps blocks up to
# 32 MiB that have been freed, between smaller ones: training 4 GiB of parameters and states in
# files, with 0.4 GiB of them in memory, took 4.3 GiB of data instead of 1.3 (one process,
# 2026-11-22).
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}


@dataclass(frozen=True)
class Case:
    """One row.  ``times`` is what parameters and states take, in limits."""

    name: str
    ranks: int
    times: float
    must_train: bool
    is_deferred: bool
    options: dict[str, object] | None
    saves_to: str | None = None
    resumes_from: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What one rank came to.  Bytes are above what was there before; ``failed_in`` None if all ran.

    ``resident`` and ``data`` (what the limit is of) are the most there has been.
    """

    failed_in: str | None
    resident: int
    data: int
    shards: int
    made_s: float
    first_s: float
    step_s: float
    losses: tuple[float, ...]


class Watch:
    """The most that a process's data has taken, looked at every few milliseconds."""

    def __init__(self, every_s: float = 0.005) -> None:
        self.most = 0
        self._every_s = every_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._is_over.wait(self._every_s):
            self.most = max(self.most, status_bytes("VmData"))

    def stop(self) -> int:
        self._is_over.set()
        self._thread.join()
        return self.most


def status_bytes(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    with open("/proc/self/status", encoding="ascii") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines[name].split()[0]) * 1024


def run(
    rank: int,
    num_ranks: int,
    case: Case,
    sizes: Sizes,
    limit: int,
    rows: int,
    length: int,
    directory: str,
) -> Outcome:
    batches = batches_of(sizes, rows, length, rank, device_of(rank, num_ranks))
    threading.stack_size(STACK_BYTES)
    train_something_small(case.options, f"{directory}/{case.name}")  # imports what a step needs
    before, resident = status_bytes("VmData"), status_bytes("VmRSS")
    resource.setrlimit(resource.RLIMIT_DATA, (before + limit, before + limit))
    watch = Watch()
    stage, seconds, losses = "construction", [], []
    shards, started = 0, time.perf_counter()
    made_s = math.nan
    try:
        torch.manual_seed(0)
        if case.is_deferred:
            with zerofx.deferred_init():
                model = sizes.build()
        else:
            model = sizes.build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        made_s = time.perf_counter() - started
        if case.resumes_from is not None:
            stage = "resuming"
            if zerofx.resume(case.resumes_from, model, optimizer) != AFTER:
                sys.exit(f"there is nothing to resume from: {case.name!r} needs the row before it")
        stage = "training"
        step = training_step(model, optimizer, case.options)
        for batch in batches[:STEPS]:
            started = time.perf_counter()
            losses.append(step(batch).item())
            seconds.append(time.perf_counter() - started)
        states = (value for state in optimizer.state.values() for value in state.values())
        shards = sum(bound.shard.nbytes for bound in REGISTRY if bound.shard is not None)
        tensors = [value for value in states if isinstance(value, torch.Tensor)]
        shards += sum(value.untyped_storage().nbytes() for value in tensors)  # 0 in files
        if case.saves_to is not None:
            stage = "saving"
            zerofx.save(f"{case.saves_to}/checkpoint", model, optimizer, AFTER)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
    else:
        stage = ""
    return Outcome(
        stage or None,
        status_bytes("VmHWM") - resident,
        watch.stop() - before,
        shards,
        made_s,
        seconds[0] if seconds else math.nan,
        min(seconds[1:], default=math.nan),
        tuple(losses),
    )


def training_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, options: dict[str, object] | None
) -> Callable[..., torch.Tensor]:
    """A step of plain torch, compiled by zerofx if there are options."""

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step if options is None else torch.compile(step, backend="zero", options=options)


def train_something_small(options: dict[str, object] | None, folder: str) -> None:
    """And save it and load it: what is imported and started once is there then."""
    sizes = Sizes("gpt", 8, 64, 1)
    model = sizes.build()
    optimizer = torch.optim.AdamW(model.parameters())
    step = training_step(model, optimizer, options)
    step(torch.zeros(1, 2, dtype=torch.long)).item()
    if options is not None:
        zerofx.save(f"{folder}/small", model, optimizer)
        zerofx.resume(folder, model, optimizer)


def cases(arguments: argparse.Namespace, directory: str) -> list[Case]:
    sharded: dict[str, object] = {"stage": 3, "lowering": arguments.lowering}
    cache = int(arguments.gib * GIB * arguments.cached)
    in_files = {
        **sharded,
        "offload": "optimizer,params",
        "offload_tier": "nvme",
        "offload_dir": [directory],
        "offload_cache_bytes": cache,
    }
    once, more = arguments.times, arguments.times_in_files
    saved, saved_in_files = f"{directory}/saved", f"{directory}/saved-in-files"
    ranks = arguments.ranks
    return [
        Case("sharded, deferred", ranks, once, True, True, sharded, saves_to=saved),
        Case("resumed", ranks, once, True, True, sharded, resumes_from=saved),
        Case("one process, plain", 1, once, False, False, None),
        Case("files, deferred", ranks, more, True, True, in_files, saves_to=saved_in_files),
        Case("files, resumed", ranks, more, True, True, in_files, resumes_from=saved_in_files),
        Case("files, plain", ranks, more, False, False, in_files),
    ]


def sizes_for(nbytes: float, arguments: argparse.Namespace) -> Sizes:
    """As many layers as parameters and states of at least ``nbytes`` take."""
    layers = 1
    while True:
        sizes = Sizes("gpt", arguments.vocabulary, arguments.width, layers)
        if sizes.num_parameters() * STATES * 4 >= nbytes:
            return sizes
        layers += 1


def row(case: Case, sizes: Sizes, outcomes: list[Outcome]) -> list[object]:
    worst = max(outcomes, key=lambda one: one.data)
    return [
        case.name,
        sizes.layers,
        f"{sizes.num_parameters() / 1e6:.0f}M",
        sizes.num_parameters() * STATES * 4 / GIB,
        worst.failed_in or "trains",
        worst.data / GIB,
        worst.resident / GIB,
        worst.shards / GIB,
        worst.made_s,
        worst.first_s,
        worst.step_s,
        " ".join(f"{loss:.3f}" for loss in worst.losses),
    ]


HEADERS = (
    "what, layers, parameters, with states GiB, fails in, data GiB, resident GiB, kept GiB, "
    "construct s, first s, step s, losses"
).split(", ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gib", type=float, default=6.0, help="the limit, above imports")
    parser.add_argument("--times", type=float, default=1.1)
    parser.add_argument("--times-in-files", type=float, default=4.0)
    parser.add_argument("--width", type=int, default=3072)
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--length", type=int, default=8)
    parser.add_argument("--lowering", default="eager", choices=("eager", "inductor"))
    parser.add_argument("--cached", type=float, default=0.4, help="of the limit, for files")
    parser.add_argument("--directory", help="for files, on a fast local disk; else a temporary one")
    parser.add_argument("--timeout-s", type=float, default=3600.0, help="of one row")
    parser.add_argument("--only", nargs="+", help="these rows")
    arguments = parser.parse_args()
    rows, is_as_it_must = [], True
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        for case in cases(arguments, directory):
            if arguments.only and case.name not in arguments.only:
                continue
            limit = int(arguments.gib * GIB)
            sizes = sizes_for(case.times * limit, arguments)
            how = case, sizes, limit, arguments.rows, arguments.length, directory
            outcomes = on_ranks(
                run, case.ranks, *how, environment=ENVIRONMENT, timeout_s=arguments.timeout_s
            )
            is_as_it_must &= case.must_train is all(one.failed_in is None for one in outcomes)
            rows.append(row(case, sizes, outcomes))
            print(tabulate([rows[-1]], HEADERS, floatfmt=".2f"), flush=True)
    print(f"Each process under {arguments.gib:g} GiB of data above what there was before.\n")
    print(tabulate(rows, HEADERS, floatfmt=".2f"))
    sys.exit(not is_as_it_must)


if __name__ == "__main__":
    main()
