"""Train one model with zerofx and with its peers, interleaved in one run, and print ratios.

    python benchmarks/speed.py
    python benchmarks/speed.py --systems "zerofx 3" "FSDP2 + compile" --rows 1 --length 64

Every system has its own copy of the model in the same processes, one per rank of this machine.
Rounds go through all systems in turn, a few steps each: what disturbs one disturbs its
neighbours, and the table gives medians over rounds and ratios to the first system that is not
zerofx.  ``compile`` is the time of the first call, less one step.  Exit status 1 if the losses of
two systems differ by more than 1e-4.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from gpt import Gpt, loss_of
from tabulate import tabulate
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

Step = Callable[[torch.Tensor], torch.Tensor]
LR = 1e-4


# Each system turns a model into a step.


def with_zerofx(stage: int, lowering: str, **more: int) -> Callable[[nn.Module], Step]:
    def build(model: nn.Module) -> Step:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)

        def step(model, optimizer, tokens):
            loss = loss_of(model, tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        options = {"stage": stage, "lowering": lowering, **more}
        compiled = torch.compile(step, backend="zero", options=options)
        return lambda tokens: compiled(model, optimizer, tokens)

    return build


def conventional(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def with_ddp(compiled: bool) -> Callable[[nn.Module], Step]:
    def build(model: nn.Module) -> Step:
        wrapped: nn.Module = DistributedDataParallel(model)
        if compiled:
            wrapped = torch.compile(wrapped)
        return conventional(wrapped, torch.optim.AdamW(model.parameters(), lr=LR, fused=True))

    return build


def with_zero_redundancy(model: nn.Module) -> Step:
    wrapped = torch.compile(DistributedDataParallel(model))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=LR)
    return conventional(wrapped, optimizer)


def with_fsdp2(compiled: bool) -> Callable[[nn.Module], Step]:
    def build(model: nn.Module) -> Step:
        for block in model.blocks:
            if compiled:
                block.compile()
            fully_shard(block)
        fully_shard(model)
        return conventional(model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True))

    return build


SYSTEMS: dict[str, Callable[[nn.Module], Step]] = {
    **{f"zerofx {stage}": with_zerofx(stage, "inductor") for stage in (1, 2, 3)},
    **{f"zerofx {stage} eager": with_zerofx(stage, "eager") for stage in (0, 1, 2, 3)},
    "zerofx 3 gathered once": with_zerofx(3, "inductor", memory_budget=2**40),
    "FSDP2 + compile": with_fsdp2(True),
    "FSDP2": with_fsdp2(False),
    "DDP + compile": with_ddp(True),
    "DDP": with_ddp(False),
    "DDP + compile + ZeroRedundancyOptimizer": with_zero_redundancy,
}


@dataclass
class Result:
    """What one rank saw of one system.  Seconds per step, by round."""

    name: str
    first_s: float
    rounds_s: list[float]
    losses: list[float]


def measure(rank: int, port: int, arguments: argparse.Namespace, answers) -> None:
    """Run every system on this rank, in turns."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // arguments.ranks))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=arguments.ranks)
    torch.manual_seed(0)
    model = Gpt(arguments.vocabulary, arguments.width, arguments.layers, arguments.heads)
    generator = torch.Generator().manual_seed(rank)
    shape = (arguments.rows, arguments.length + 1)
    batches = [torch.randint(0, arguments.vocabulary, shape, generator=generator) for _ in range(8)]
    results, steps = [], {}
    for name in arguments.systems:
        steps[name] = SYSTEMS[name](copy.deepcopy(model))
        dist.barrier()
        started = time.perf_counter()
        loss = steps[name](batches[0])
        results.append(Result(name, time.perf_counter() - started, [], [loss.item()]))
    for number in range(arguments.rounds):
        for result in results:
            dist.barrier()
            started = time.perf_counter()
            for index in range(arguments.steps):
                batch = batches[(number * arguments.steps + index + 1) % len(batches)]
                loss = steps[result.name](batch)
            dist.barrier()
            result.rounds_s.append((time.perf_counter() - started) / arguments.steps)
            result.losses.append(loss.item())
    if rank == 0:
        answers.put(results)
    dist.barrier()
    dist.destroy_process_group()


def table(results: list[Result], tokens_per_step: int) -> str:
    reference = next((r for r in results if not r.name.startswith("zerofx")), results[0])
    rows = []
    for result in results:
        ratios = [
            theirs / mine for theirs, mine in zip(reference.rounds_s, result.rounds_s, strict=True)
        ]
        step_s = statistics.median(result.rounds_s)
        rows.append(
            (
                result.name,
                f"{tokens_per_step / step_s:.0f}",
                f"{statistics.median(ratios):.2f}",
                f"{max(result.first_s - step_s, 0):.1f}",
                f"{result.losses[-1]:.5f}",
            )
        )
    headers = ("system", "tokens/s", f"against {reference.name}", "compile s", "last loss")
    return tabulate(rows, headers=headers, disable_numparse=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=4, help="of one rank's batch")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--width", type=int, default=320)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="of one system in one round")
    arguments = parser.parse_args()

    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answers = context.Queue()
    workers = [
        context.Process(target=measure, args=(rank, store.port, arguments, answers))
        for rank in range(arguments.ranks)
    ]
    for worker in workers:
        worker.start()
    results = answers.get()
    for worker in workers:
        worker.join()
    size = Gpt(arguments.vocabulary, arguments.width, arguments.layers, arguments.heads)
    millions = sum(p.numel() for p in size.parameters()) / 1e6
    tokens = arguments.rows * arguments.length * arguments.ranks
    print(
        f"GPT of {millions:.1f}M parameters, fp32, AdamW; {arguments.ranks} gloo ranks, "
        f"{arguments.rows} x {arguments.length} tokens each; torch {torch.__version__}\n"
    )
    print(table(results, tokens))
    last = [result.losses[-1] for result in results]
    return int(max(last) - min(last) > 1e-4 * abs(last[0]))


if __name__ == "__main__":
    raise SystemExit(main())
