"""Find the largest model that trains on one device, by system, and how fast it trains there.

    python benchmarks/largest.py --width 2048 --systems "zerofx 3" "zerofx 3 offload" \\
        "FSDP2 + compile" "FSDP2 + compile + CPUOffloadPolicy"

Layers are doubled and then halved in: each try has processes of its own, that train for a few
steps; one that runs out of memory, or dies, is too large.  A figure is of the last try that
trained.  Then all train the largest model that every one of them can: the last column.

``--limit-gib`` is what a rank may take: on a GPU of its memory, on a CPU of its process (Linux),
which is the host's too, so that offload gains nothing there.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from dataclasses import dataclass, replace

import torch
from memory import GIB, bytes_at_most, bytes_now, reset_peak
from models import Sizes, batches_of
from ranks import device_of, on_ranks
from systems import SYSTEMS
from tabulate import tabulate

STEPS = 6


@dataclass(frozen=True)
class Trained:
    """What a try took: bytes of the device above what was there before, seconds of a step."""

    sizes: Sizes
    peak: int
    step_s: float


def train(
    rank: int, num_ranks: int, name: str, sizes: Sizes, rows: int, length: int, limit: int
) -> Trained | None:
    """Train for a few steps; None if there is too little memory."""
    device = device_of(rank, num_ranks)
    if limit and device.type == "cuda":
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(limit / whole, 1.0), device)
    elif limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    sizes.num_parameters()  # imports what the model needs
    reset_peak(device)
    before = bytes_now(device)
    try:
        batches = batches_of(sizes, rows, length, rank, device)
        torch.manual_seed(0)
        with device:
            model = sizes.build()
        step = SYSTEMS[name](model)
        seconds = []
        for batch in batches[:STEPS]:
            started = time.perf_counter()
            step(batch).item()
            seconds.append(time.perf_counter() - started)
    except (torch.OutOfMemoryError, MemoryError):
        return None
    except RuntimeError as error:
        if "allocate memory" in str(error):  # torch's CPU allocator
            return None
        raise
    return Trained(sizes, bytes_at_most(device) - before, statistics.median(seconds[2:]))


def tried(name: str, sizes: Sizes, arguments: argparse.Namespace) -> Trained | None:
    how = arguments.rows, arguments.length, int(arguments.limit_gib * GIB)
    try:
        found = on_ranks(train, arguments.ranks, name, sizes, *how, timeout_s=arguments.timeout_s)
    except SystemExit as death:  # what runs out of memory in C++ may take the process along
        print(death)
        return None
    if any(each is None for each in found):
        return None
    return max(found, key=lambda each: each.peak)


def largest(name: str, sizes: Sizes, arguments: argparse.Namespace) -> Trained | None:
    """Try with ever more layers, then with fewer; return the largest that trained."""
    best, fits, too_many = None, 0, None
    while too_many is None or too_many - fits > max(1, fits // 16):
        layers = sizes.layers if not fits else 2 * fits
        if too_many is not None:
            layers = (fits + too_many) // 2
        if layers == fits or layers > arguments.most_layers:
            break
        found = tried(name, replace(sizes, layers=layers), arguments)
        print(f"{name}, {layers} layers: {'trains' if found else 'too large'}", flush=True)
        if found is None:
            too_many = layers
        else:
            best, fits = found, layers
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    Sizes.add_arguments(parser)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, required=True)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rows", type=int, default=1, help="of one rank's batch")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--limit-gib", type=float, default=0, help="of a rank; 0 is none")
    parser.add_argument("--timeout-s", type=float, default=180, help="of a try")
    parser.add_argument("--most-layers", type=int, default=4096)
    arguments = parser.parse_args()

    sizes = Sizes.of(arguments)
    found = {name: largest(name, sizes, arguments) for name in arguments.systems}
    trained = {name: best for name, best in found.items() if best is not None}
    common = min((best.sizes for best in trained.values()), key=lambda s: s.layers, default=None)
    rows = []
    for name in arguments.systems:
        best = trained.get(name)
        if best is None or common is None:
            rows.append((name, f"not even {sizes.layers} layers"))
            continue
        number = best.sizes.num_parameters()
        same = best if best.sizes == common else tried(name, common, arguments)
        tokens = arguments.rows * arguments.length * arguments.ranks
        rows.append(
            (
                name,
                f"{number / 1e6:.0f}",
                f"{best.peak / GIB:.2f}",
                f"{best.peak / number:.1f}",
                f"{tokens / best.step_s:.0f}",
                f"{tokens / same.step_s:.0f}" if same else "-",
            )
        )
    alike = f"tokens/s at {common.num_parameters() / 1e6:.0f}M" if common else "tokens/s"
    headers = ("system", "parameters, M", "peak GiB", "bytes each", "tokens/s", alike)
    print(f"\n{arguments.ranks} ranks; torch {torch.__version__}\n")
    print(tabulate(rows, headers=headers, disable_numparse=True))


if __name__ == "__main__":
    main()
