"""Train one model with zerofx and with its peers, interleaved in one run, and print ratios.

    python benchmarks/speed.py
    python benchmarks/speed.py --model llama --width 256
    python benchmarks/speed.py --systems "zerofx 3" "FSDP2 + compile" --rows 1 --length 64

Two parts, one table.  Speed: every system has its own copy of the model in the same processes, one
per rank of this machine.  Rounds go through all systems in turn, a few steps each: what disturbs
one disturbs its neighbours; figures are medians over rounds, ratios too.  Footprint: every system
has processes of its own and an empty compile cache, for a model of as many layers and at least
``--memory-parameters``; that gives compile seconds and peak memory (see memory.py).

"sent" is what a rank sends in a step: for zerofx what its program says, which holds for any way its
ranks reach each other; for peers what the process writes to sockets.  "exposed" is the part of a
step in which the main thread does not compute: it is off the CPU, or in zerofx's communicator.
Both are for CPUs only.  Exit status 1 if two systems' losses differ by more than 1e-4.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from memory import GIB, LENGTH, Footprint
from memory import measure as measure_footprint
from models import Sizes, batches_of
from ranks import device_of, on_ranks
from systems import DEFAULT, SYSTEMS, ZEROFX, losses_differ, reference_of
from tabulate import tabulate

from zerofx.backend import zero
from zerofx.cost.traffic import wire_bytes
from zerofx.runtime.comm.communication import Communicator


@dataclass
class Speed:
    """What one rank saw of one system: for every round, per step."""

    rounds_s: list[float] = field(default_factory=list)
    exposed_s: list[float] = field(default_factory=list)
    sent_bytes: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def clock_communicator() -> Callable[[], float]:
    """Return a clock of the CPU seconds that this thread spends in zerofx's communicator."""
    spent_s = 0.0

    def clocked(method: Callable) -> Callable:
        def run(*args, **kwargs):
            nonlocal spent_s
            started = time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                spent_s += time.thread_time() - started

        return run

    for name in ("all_reduce_start", "reduce_scatter_start", "all_gather_start", "wait"):
        setattr(Communicator, name, clocked(getattr(Communicator, name)))
    return lambda: spent_s


def sent_in_a_step() -> int:
    """Bytes that a rank sends in a step of the zerofx program that was compiled last."""
    program = max(zero.functions, key=lambda function: function.number).programs[-1]
    sent = wire_bytes(program.gm, dist.get_world_size())
    return sent.gathers + sent.reductions + sent.scalars + sent.exchanges


def written() -> int:
    """Bytes that this process has written so far."""
    with open("/proc/self/io") as io:  # gloo sends with write(), and in a round nothing else does
        (line,) = [line for line in io if line.startswith("wchar:")]
    return int(line.split()[1])


def take_turns(
    rank: int, num_ranks: int, sizes: Sizes, arguments: argparse.Namespace
) -> dict[str, Speed]:
    """Run every system on this rank, in turns."""
    communicating_s = clock_communicator()
    device = device_of(rank, num_ranks)
    batches = batches_of(sizes, arguments.rows, arguments.length, rank, device)
    torch.manual_seed(0)
    model = sizes.build().to(device)
    found = {name: Speed() for name in arguments.systems}
    steps, known_bytes = {}, {}
    for name in found:
        steps[name] = SYSTEMS[name](copy.deepcopy(model))
        steps[name](batches[0])
        if name in ZEROFX:
            known_bytes[name] = sent_in_a_step()
    for number in range(arguments.rounds):
        for name, speed in found.items():
            _start_together(device)
            started, sent = time.perf_counter(), written()
            computing = time.thread_time() - communicating_s()
            for index in range(arguments.steps):
                loss = steps[name](batches[(number * arguments.steps + index + 1) % len(batches)])
            computed_s = time.thread_time() - communicating_s() - computing
            exposed_s = time.perf_counter() - started - computed_s
            sent = known_bytes.get(name, (written() - sent) / arguments.steps)
            _start_together(device)
            speed.rounds_s.append((time.perf_counter() - started) / arguments.steps)
            speed.exposed_s.append(exposed_s / arguments.steps)
            speed.sent_bytes.append(sent)
            speed.losses.append(loss.item())
    return found


def _start_together(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


@dataclass(frozen=True)
class Column:
    """One column of the table: values by system, one for every round."""

    header: str
    values: dict[str, list[float]]
    show: str = ".1f"

    def cell(self, name: str, reference: str) -> str:
        """The median, and that of the ratios to the reference in the same round."""
        pairs = zip(self.values[name], self.values[reference], strict=True)
        ratios = [value / base for value, base in pairs if base]
        ratio = f"{statistics.median(ratios):5.2f}x" if ratios else "     -"
        return f"{statistics.median(self.values[name]):{self.show}} {ratio}"


def table(speeds: dict[str, Speed], footprints: dict[str, Footprint], tokens_per_step: int) -> str:
    def by_round(of: Callable[[Speed], list[float]]) -> dict[str, list[float]]:
        return {name: of(speed) for name, speed in speeds.items()}

    columns = [
        Column("tokens/s", by_round(lambda s: [tokens_per_step / t for t in s.rounds_s]), ".0f")
    ]
    if footprints:
        compile_s = {name: [each.compile_s] for name, each in footprints.items()}
        peak_gib = {name: [each.at_most / GIB] for name, each in footprints.items()}
        columns += [Column("compile s", compile_s), Column("peak GiB", peak_gib, ".2f")]
    if not torch.cuda.is_available():
        columns += [
            Column("sent MB", by_round(lambda s: [sent / 1e6 for sent in s.sent_bytes])),
            Column("exposed ms", by_round(lambda s: [1e3 * t for t in s.exposed_s])),
        ]
    reference = reference_of(list(speeds))
    rows = [
        (name, *(column.cell(name, reference) for column in columns), f"{speed.losses[-1]:.5f}")
        for name, speed in speeds.items()
    ]
    headers = ("system", *(column.header for column in columns), "last loss")
    alignment = ("left", *("right" for _ in headers[1:]))
    return tabulate(rows, headers=headers, disable_numparse=True, colalign=alignment)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    Sizes.add_arguments(parser)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=DEFAULT)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--rows", type=int, default=4, help="of one rank's batch")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="of one system in one round")
    parser.add_argument(
        "--memory-parameters", type=float, default=200e6, help="0 leaves the footprint out"
    )
    arguments = parser.parse_args()

    sizes = Sizes.of(arguments)
    wide = sizes.widened(arguments.memory_parameters)
    speeds = on_ranks(take_turns, arguments.ranks, sizes, arguments)[0]
    footprints = {}
    if arguments.memory_parameters:
        footprints = {name: measure_footprint(name, wide, arguments.ranks) for name in speeds}
    print(
        f"{sizes}; {arguments.ranks} ranks, {arguments.rows} x {arguments.length} tokens each, "
        f"fp32, AdamW; torch {torch.__version__}"
    )
    if footprints:
        print(f"compile and peak: {wide}, 1 x {LENGTH} tokens, each system alone and cold")
    tokens = arguments.rows * arguments.length * arguments.ranks
    print(f"each with its ratio to {reference_of(list(speeds))}\n")
    print(table(speeds, footprints, tokens))
    losses = [{name: speed.losses[-1] for name, speed in speeds.items()}]
    losses += [{name: each.loss for name, each in footprints.items()}] if footprints else []
    return int(any(map(losses_differ, losses)))


if __name__ == "__main__":
    raise SystemExit(main())
