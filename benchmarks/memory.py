"""Measure the memory that systems take to train one model, each in processes of its own.

    python benchmarks/memory.py
    python benchmarks/memory.py --parameters 200e6 --systems "FSDP2 + compile" "zerofx 3" \\
        --kept-at-most inf --peak-at-most 0.8

Everything counts from a baseline after the imports and the start of the process group.  On a CPU
these are the operating system's figures (Linux only), on a GPU those of torch's allocator; per
rank, the largest of the ranks.  The exit status says whether the last system keeps at most
``--kept-at-most`` times what the first one does between steps, peaks at at most
``--peak-at-most`` times, and ends with the same loss.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import tempfile
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from models import Sizes, batches_of
from ranks import device_of, on_ranks
from systems import SYSTEMS, losses_differ
from tabulate import tabulate

LENGTH = 32  # tokens of a sequence, one a rank: activations must not blur what parameters cost
STEPS = 3
GIB = 2**30


@dataclass(frozen=True)
class Footprint:
    """What training took on one rank.  Bytes are above ``baseline``.

    ``kept`` is what is there between steps, ``in_step`` the most during a later step, ``at_most``
    the most of all: construction, sharding, compilation and first step included.  ``compile_s``
    is the first call less a later one.
    """

    baseline: int
    kept: int
    in_step: int
    at_most: int
    compile_s: float
    loss: float


def bytes_now(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else _resident_bytes("VmRSS")


def bytes_at_most(device: torch.device) -> int:
    """The most since the last ``reset_peak``."""
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else _resident_bytes("VmHWM")


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")


def _resident_bytes(kind: str) -> int:
    with open("/proc/self/status") as status:
        (line,) = [line for line in status if line.startswith(kind + ":")]
    return int(line.split()[1]) * 1024


def train(rank: int, num_ranks: int, name: str, sizes: Sizes) -> Footprint:
    """Build one model on this rank and train it for a few steps."""
    device = device_of(rank, num_ranks)
    batches = batches_of(sizes, 1, LENGTH, rank, device)
    sizes.num_parameters()  # imports what the model needs
    reset_peak(device)
    baseline = bytes_now(device)

    torch.manual_seed(0)
    step = SYSTEMS[name](sizes.build().to(device))
    started = time.perf_counter()
    step(batches[0]).item()
    first_s = time.perf_counter() - started
    at_most = bytes_at_most(device)
    reset_peak(device)
    started = time.perf_counter()
    for batch in batches[1:STEPS]:
        loss = step(batch).item()
    later_s = (time.perf_counter() - started) / (STEPS - 1)
    in_step = bytes_at_most(device)
    gc.collect()
    dist.barrier()
    kept = bytes_now(device)
    above = (value - baseline for value in (kept, in_step, max(at_most, in_step)))
    return Footprint(baseline, *above, compile_s=max(first_s - later_s, 0), loss=loss)


def measure(name: str, sizes: Sizes, num_ranks: int) -> Footprint:
    """Train in fresh processes with an empty compile cache; return the first rank's loss, and of
    everything else the largest of all ranks."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {"TORCHINDUCTOR_CACHE_DIR": f"{cache}/{{rank}}"}
        found = on_ranks(train, num_ranks, name, sizes, environment=environment)
    fields = [field for field in Footprint.__dataclass_fields__ if field != "loss"]
    most = {field: max(getattr(footprint, field) for footprint in found) for field in fields}
    return Footprint(**most, loss=found[0].loss)


def formula(name: str, num_parameters: int, num_ranks: int) -> str:
    """GiB that a rank of a ``zerofx <stage>`` keeps: fp32 parameters and Adam's two moments."""
    system, stage = name.split()[:2]
    if system != "zerofx":
        return ""
    whole = {0: 12, 1: 4, 2: 4, 3: 0}[int(stage)]
    return f"{num_parameters * (whole + (12 - whole) / num_ranks) / GIB:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    Sizes.add_arguments(parser)
    parser.add_argument("--parameters", type=float, default=400e6, help="at least, by its width")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--systems", nargs="+", default=["zerofx 0", "zerofx 3"], choices=SYSTEMS)
    parser.add_argument("--kept-at-most", type=float, default=0.65, help="times the first's")
    parser.add_argument("--peak-at-most", type=float, default=math.inf, help="times the first's")
    arguments = parser.parse_args()

    sizes = Sizes.of(arguments).widened(arguments.parameters)
    found = {name: measure(name, sizes, arguments.ranks) for name in arguments.systems}
    first, last = found[arguments.systems[0]], found[arguments.systems[-1]]
    print(
        f"{sizes}, {arguments.ranks} ranks, 1 x {LENGTH} tokens each, AdamW, fp32; "
        f"torch {torch.__version__}\n"
        f"GiB per rank above {first.baseline / GIB:.2f} after imports and process group\n"
    )
    rows = [
        (
            name,
            formula(name, sizes.num_parameters(), arguments.ranks),
            *(f"{n / GIB:.2f}" for n in (each.kept, each.in_step, each.at_most)),
            f"{each.loss:.5f}",
        )
        for name, each in found.items()
    ]
    headers = ("system", "formula", "kept", "peak of a later step", "peak of all", "last loss")
    print(tabulate(rows, headers=headers, disable_numparse=True))
    kept, peak = last.kept / first.kept, last.at_most / first.at_most
    in_step = last.in_step / first.in_step
    print(f"\nlast to first: kept {kept:.2f}x, later peak {in_step:.2f}x, peak {peak:.2f}x")
    if kept > arguments.kept_at_most:
        sys.exit(f"kept: {kept:.2f}x is more than {arguments.kept_at_most:g}x")
    if peak > arguments.peak_at_most:
        sys.exit(f"peak: {peak:.2f}x is more than {arguments.peak_at_most:g}x")
    if losses_differ({name: each.loss for name, each in found.items()}):
        sys.exit("the losses differ")


if __name__ == "__main__":
    main()
