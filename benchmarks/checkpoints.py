"""What a checkpoint takes: time, bytes of each rank, and what of it the training notices.

    python benchmarks/checkpoints.py
    python benchmarks/checkpoints.py --width 1024 --layers 8 --rows 8 --directory /mnt/nvme0

zerofx at stage 3 and FSDP2 with torch.distributed.checkpoint train the same model in the same
ranks, in turns: some steps, one with an asynchronous save before it, those until it is written, a
save that is waited for.  A ratio is the median over the rounds of that round's, to the round's
own plain steps.  The exit status says whether a step with a snapshot of zerofx's takes at most 1.1
times a plain one.
"""

from __future__ import annotations

import argparse
import copy
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import Sizes, batches_of, loss_of
from ranks import device_of, on_ranks
from tabulate import tabulate
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

import zerofx

MOST = 1.1
LR = 1e-4


@dataclass(frozen=True)
class System:
    """``step`` trains, ``save`` writes to a folder, ``begin`` does so behind and gives a wait."""

    step: Callable[[torch.Tensor], Any]
    save: Callable[[Path], object]
    begin: Callable[[Path], Callable[[], object]]
    is_done: Callable[[], bool]


def zerofx_stage_3(model: nn.Module) -> System:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)

    @torch.compile(backend="zero")
    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    running: list[zerofx.Saving] = []

    def begin(path: Path) -> Callable[[], object]:
        running[:] = [zerofx.save(path, model, optimizer, asynchronous=True)]
        return running[0].wait

    def save(path: Path) -> None:
        zerofx.save(path, model, optimizer)

    return System(step, save, begin, lambda: running[0].done())


def fsdp2(model: nn.Module) -> System:
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile()
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    group = dist.new_group(backend="gloo")  # as torch's recipe has it
    running: list[Any] = []

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def state() -> dict[str, Any]:
        parameters, states = get_state_dict(model, optimizer)
        return {"model": parameters, "optimizer": states}

    def save(path: Path) -> None:
        dcp.save(state(), checkpoint_id=path)

    def begin(path: Path) -> Callable[[], object]:
        running[:] = [dcp.async_save(state(), checkpoint_id=path, process_group=group)]
        return running[0].result

    return System(step, save, begin, lambda: running[0].done())


SYSTEMS = {"zerofx 3": zerofx_stage_3, "FSDP2 + DCP": fsdp2}


@dataclass
class Round:
    """One round of a system on one rank.  Units: seconds; bytes are of this rank's files."""

    step_s: float = 0.0
    snapshot_s: float = 0.0
    writing_s: list[float] = field(default_factory=list)
    behind_s: float = 0.0
    save_s: float = 0.0
    nbytes: int = 0


def together() -> float:
    """Wait for all ranks; the time."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()
    return time.perf_counter()


def measure(
    system: System, batches: list[torch.Tensor], steps: int, folder: Path, rank: int
) -> Round:
    found = Round()
    numbers = iter(range(10**6))

    def step() -> None:
        system.step(batches[next(numbers) % len(batches)])

    times = [together()]
    for _ in range(steps):
        step()
        times.append(together())
    found.step_s = statistics.median(b - a for a, b in zip(times, times[1:], strict=False))
    started = together()
    wait = system.begin(folder / "behind")
    step()
    at = together()
    found.snapshot_s = at - started
    is_done = torch.tensor(0)
    while not is_done:  # on all ranks, which train together
        step()
        now = together()
        found.writing_s.append(now - at)
        is_done = torch.tensor(int(system.is_done()))
        dist.all_reduce(is_done, dist.ReduceOp.MIN)
        at = together()
    wait()
    found.behind_s = together() - started
    started = together()
    system.save(folder / "plain")
    found.save_s = together() - started
    mine = (folder / "plain").glob(f"__{rank}_*.distcp")
    found.nbytes = sum(path.stat().st_size for path in mine)
    together()
    if rank == 0:
        shutil.rmtree(folder)
        folder.mkdir()
    together()
    return found


def take_turns(
    rank: int, num_ranks: int, sizes: Sizes, arguments: argparse.Namespace, directory: str
) -> dict[str, list[Round]]:
    device = device_of(rank, num_ranks)
    batches = batches_of(sizes, arguments.rows, arguments.length, rank, device)
    torch.manual_seed(0)
    model = sizes.build().to(device)
    systems = {name: SYSTEMS[name](copy.deepcopy(model)) for name in arguments.systems}
    for system in systems.values():
        for batch in batches[:2]:
            system.step(batch)
    found: dict[str, list[Round]] = {name: [] for name in systems}
    for _ in range(arguments.rounds):
        for name, system in systems.items():
            rounds = measure(system, batches, arguments.steps, Path(directory), rank)
            found[name].append(rounds)
    return found


def row(name: str, ranks: list[list[Round]]) -> list[object]:
    first = ranks[0]  # all take each other's time
    step_s = statistics.median(one.step_s for one in first)
    save_s = statistics.median(one.save_s for one in first)
    nbytes = [statistics.median(one.nbytes for one in rounds) for rounds in ranks]
    return [
        name,
        step_s * 1e3,
        ratio(first, lambda one: one.snapshot_s),
        ratio(first, lambda one: statistics.median(one.writing_s)),
        statistics.median(one.behind_s for one in first),
        save_s,
        max(nbytes) / 1e6,
        sum(nbytes) / 1e6 / save_s,
    ]


def ratio(rounds: list[Round], seconds: Callable[[Round], float]) -> float:
    return statistics.median(seconds(one) / one.step_s for one in rounds)


HEADERS = (
    "system, step ms, with snapshot x, while writing x, behind s, save s, MB a rank, MB/s"
).split(", ")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    Sizes.add_arguments(parser)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="plain ones, in each round")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--directory", help="for checkpoints; else a temporary one")
    arguments = parser.parse_args()
    sizes = Sizes.of(arguments)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        ranks = on_ranks(
            take_turns,
            arguments.ranks,
            sizes,
            arguments,
            directory,
            environment={"OMP_NUM_THREADS": "1"},
        )
    rows = [row(name, [found[name] for found in ranks]) for name in arguments.systems]
    print(f"{sizes}, {arguments.ranks} ranks, {arguments.rows} x {arguments.length} tokens each\n")
    print(tabulate(rows, HEADERS, floatfmt=".2f"))
    return int(any("zerofx" in str(name) and snapshot > MOST for name, _, snapshot, *_ in rows))


if __name__ == "__main__":
    sys.exit(main())
