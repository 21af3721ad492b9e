"""Measure the resident memory that stages 0 and 3 take to train one model, on gloo ranks.

    python benchmarks/memory.py
    python benchmarks/memory.py --parameters 100e6

Each stage has processes of its own, one stage after the other, and everything counts from a
baseline after the imports: the operating system's figures (Linux only), per rank, the largest of
the ranks.  The exit status says whether the last stage keeps at most ``--at-most`` times what the
first one does.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import queue
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from gpt import Gpt, loss_of
from torch import nn

import zerofx  # noqa: F401  # part of the baseline

HEAD_WIDTH = 64
LAYERS = 7
LENGTH = 32  # tokens of a sequence: activations must not blur what parameters cost
STEPS = 3
GIB = 2**30


def sizes_for(num_parameters: float) -> tuple[int, int]:
    """Return the vocabulary and width of a model of about this many parameters.

    A block has 12 width^2; the embedding of some 11 widths makes up the rest.
    """
    width = HEAD_WIDTH * max(1, round((num_parameters / (12 * LAYERS + 11)) ** 0.5 / HEAD_WIDTH))
    return max(2, round((num_parameters - 12 * LAYERS * width**2) / width)), width


def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> torch.Tensor:
    loss = loss_of(model, tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@dataclass(frozen=True)
class Growth:
    """Bytes of resident memory of one rank, above its baseline after the imports.

    ``kept`` is what is there between steps, ``in_step`` the most during a later step,
    ``at_most`` the most of all: construction, sharding, compilation and first step included.
    """

    num_parameters: int
    baseline: int
    kept: int
    in_step: int
    at_most: int


def resident_bytes(kind: str) -> int:
    """Read this process's ``VmRSS`` (now) or ``VmHWM`` (most since the last reset)."""
    with open("/proc/self/status") as status:
        (line,) = [line for line in status if line.startswith(kind + ":")]
    return int(line.split()[1]) * 1024


def reset_peak() -> None:
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")


def train(rank: int, port: int, arguments: argparse.Namespace, stage: int, answers) -> None:
    """Build one model on this rank, train it for a few steps and put a ``Growth``."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // arguments.ranks))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=arguments.ranks)
    reset_peak()
    baseline = resident_bytes("VmRSS")

    vocabulary, width = sizes_for(arguments.parameters)
    model = Gpt(vocabulary, width, LAYERS, width // HEAD_WIDTH, tied=True)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"stage": stage, "lowering": arguments.lowering}
    compiled = torch.compile(step, backend="zero", options=options)
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, vocabulary, (1, LENGTH + 1), generator=generator)

    compiled(model, optimizer, tokens)
    at_most = resident_bytes("VmHWM")
    reset_peak()
    for _ in range(STEPS - 1):
        loss = compiled(model, optimizer, tokens)
    in_step = resident_bytes("VmHWM")
    gc.collect()
    dist.barrier()
    kept = resident_bytes("VmRSS")
    if not torch.isfinite(loss):
        raise RuntimeError(f"the loss is {loss.item()}")
    growths = (value - baseline for value in (kept, in_step, max(at_most, in_step)))
    answers.put(Growth(num_parameters, baseline, *growths))
    dist.destroy_process_group()


def measure(stage: int, arguments: argparse.Namespace) -> Growth:
    """Train at one stage in fresh processes; return the largest figures of all ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    workers = [
        context.Process(target=train, args=(rank, store.port, arguments, stage, answers))
        for rank in range(arguments.ranks)
    ]
    for worker in workers:
        worker.start()
    growths: list[Growth] = []
    while len(growths) < len(workers):
        try:
            growths.append(answers.get(timeout=1.0))
        except queue.Empty:
            failed = [worker.exitcode for worker in workers if worker.exitcode]
            if failed:
                for worker in workers:
                    worker.kill()
                sys.exit(f"stage {stage}: a rank ended with exit code {failed[0]}")
    for worker in workers:
        worker.join()
    fields = Growth.__dataclass_fields__
    return Growth(**{name: max(getattr(growth, name) for growth in growths) for name in fields})


def formula_bytes(stage: int, num_parameters: int, num_ranks: int) -> float:
    """What a rank keeps of fp32 parameters and Adam's two moments."""
    whole = {0: 12, 1: 4, 2: 4, 3: 0}[stage]
    return num_parameters * (whole + (12 - whole) / num_ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--parameters", type=float, default=400e6, help="of the model (400e6)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 3], choices=range(4))
    parser.add_argument("--lowering", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--at-most", type=float, default=0.65, help="times the first stage's")
    arguments = parser.parse_args()

    found = {stage: measure(stage, arguments) for stage in arguments.stages}
    first, last = arguments.stages[0], arguments.stages[-1]
    print(
        f"{found[first].num_parameters / 1e6:.1f}M parameters, {arguments.ranks} gloo ranks, "
        f"AdamW, fp32; lowering {arguments.lowering}; torch {torch.__version__}"
    )
    print(f"GiB of resident memory per rank above {found[first].baseline / GIB:.2f} after imports")
    print("stage   formula   kept between steps   peak of a later step   peak of all")
    for stage, growth in found.items():
        formula = formula_bytes(stage, growth.num_parameters, arguments.ranks) / GIB
        kept, in_step, at_most = growth.kept / GIB, growth.in_step / GIB, growth.at_most / GIB
        print(f"{stage:5}{formula:10.2f}{kept:21.2f}{in_step:23.2f}{at_most:14.2f}")
    ratio = found[last].kept / found[first].kept
    peaks = found[last].in_step / found[first].in_step
    print(f"stage {last} to stage {first}: kept {ratio:.2f}x, peak of a later step {peaks:.2f}x")
    if ratio > arguments.at_most:
        sys.exit(f"kept: {ratio:.2f}x is more than {arguments.at_most:g}x")


if __name__ == "__main__":
    main()
