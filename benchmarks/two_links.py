"""Train on a mesh whose outer link is slow, one form after the other, and compare with predictions.

    python benchmarks/two_links.py
    python benchmarks/two_links.py --ratios 10 50 --layers 4 --width 256 --rounds 7
    python benchmarks/two_links.py --forms "3 two hops" "gpu 3, node 0"

Four ranks of this machine are 2 nodes of 2.  Ranks of a node talk over gloo's sockets; what goes to
the other node goes there too, and then waits for a link of so many bytes a second that is --ratios
times slower than the inner one, which is measured first (tests/kit/slow_link.py).  zerofx measures
the links itself, at its first call.

"predicted" is the step by the cost model, with these figures; its compute is scaled by how much
longer than predicted the step takes on ranks that do not communicate, measured at the same time on
all.  "measured" is the median of rounds, in each of which every form takes a turn.

Exit status 1 if two forms whose measured times differ by more than 5% are predicted in the other
order.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from models import Sizes, batches_of, loss_of
from ranks import on_ranks
from tabulate import tabulate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zerofx.backend import zero
from zerofx.compiler.program import Program
from zerofx.cost.timeline import predict
from zerofx.cost.traffic import wire_bytes
from zerofx.hardware import Hardware, Link
from zerofx.options import resolve
from zerofx.runtime.comm.communication import Communicator
from zerofx.runtime.comm.measure import figures_of_axes
from zerofx.runtime.comm.peer_memory import PeerMemory

ROOT = Path(__file__).resolve().parent.parent
AXES = ("node", "gpu")
SHAPE = (2, 2)
DIFFERENT = 0.05

OTHERS: dict[str, dict[str, Any]] = {}
"""Forms beside the pairs of stages: options by name.  What is refused is left out."""


def forms() -> dict[str, dict[str, Any]]:
    """Options by name: all pairs of stages that there are, and ``OTHERS``."""
    found: dict[str, dict[str, Any]] = {"0": {"stage": 0}}
    for inner, outer in itertools.product((3, 2, 1), range(4)):
        name = f"{inner} two hops" if inner == outer else f"gpu {inner}, node {outer}"
        found[name] = {"stage": {"gpu": inner, "node": outer}}
    return {name: options for name, options in (found | OTHERS).items() if _is_known(options)}


def _is_known(options: Mapping[str, Any]) -> bool:
    try:
        resolve({**options, "process_group": SimpleNamespace(mesh_dim_names=AXES)}, {})
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class Result:
    """The step of a form.  Units: seconds, and bytes that a rank sends over the outer link."""

    form: str
    predicted_s: float
    measured_s: float
    outer_bytes: int


@dataclass(frozen=True)
class Results:
    """What one rank has found; ``slowdown`` is of compute, against what is predicted of it."""

    inner: Link
    figures: Hardware
    slowdown: float
    of_forms: list[Result]


class Trained:
    """A model that one form of the step trains."""

    def __init__(self, sizes: Sizes, options: Mapping[str, Any], rank: int):
        torch.manual_seed(0)
        model = sizes.build()
        optimizer = torch.optim.AdamW(model.parameters())
        self.batches = itertools.cycle(batches_of(sizes, 1, 16, rank, torch.device("cpu")))

        def step(tokens: torch.Tensor) -> torch.Tensor:
            loss = loss_of(model, tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        known = set(zero.functions)
        options = {"lowering": "eager", "peer_memory": False, **options}
        self.step = torch.compile(step, backend="zero", options=options)
        for _ in range(2):  # the second traces updates once more, of states that are there
            self.step(next(self.batches))
        (self.function,) = (each for each in zero.functions if each not in known)

    @property
    def program(self) -> Program:
        return self.function.programs[-1]

    def predicted_s(self, figures: Hardware) -> float:
        ranks = self.function.communicator.world_size
        return predict(self.program.gm.graph, figures, self.program.table, ranks).step_s

    def measured_s(self) -> float:
        """Take a step together with the other ranks; return its seconds on this one."""
        batch = next(self.batches)
        dist.barrier()
        started_s = time.perf_counter()
        self.step(batch)
        return time.perf_counter() - started_s


def inner_link(mesh: DeviceMesh) -> Link:
    """Measure the link inside nodes, over sockets as the forms do; return the slowest rank's."""
    group = mesh.get_group("gpu")
    PeerMemory.decline(group)
    probe = Communicator(group)
    found = figures_of_axes({"gpu": probe}, torch.device("cpu")).along("gpu")
    worst = torch.tensor([found.latency_s, -found.bytes_per_s], dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    latency_s, negative = worst.tolist()
    return Link(latency_s, -negative)


def results(
    rank: int, ranks: int, sizes: Sizes, chosen: Sequence[str], ratio: float, rounds: int
) -> Results:
    """Train on one rank; every round takes a step of each form."""
    sys.path.insert(0, str(ROOT))  # the slow link is that of the tests
    from tests.kit.slow_link import slow_between_nodes

    mesh = init_device_mesh("cpu", SHAPE, mesh_dim_names=AXES)
    groups = [dist.new_group([one]) for one in range(ranks)]
    inner = inner_link(mesh)
    known = forms()
    with slow_between_nodes(mesh, inner.latency_s, inner.bytes_per_s / ratio):
        alone = Trained(sizes, {"stage": 0, "process_group": groups[rank]}, rank)
        trained = {
            name: Trained(sizes, {**known[name], "process_group": mesh}, rank) for name in chosen
        }
        times: dict[str, list[float]] = {name: [] for name in ("", *chosen)}
        for number in range(rounds):
            turns = list({"": alone, **trained}.items())
            for name, each in turns if number % 2 else reversed(turns):
                times[name].append(each.measured_s())
        # A step is over when the last rank's is.
        longest = torch.tensor(list(times.values()), dtype=torch.float64)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
    alone_s, *measured_s = (statistics.median(row) for row in longest.tolist())
    of_one = next(iter(trained.values())).program.figures
    slowdown = alone_s / alone.predicted_s(_of_compute(of_one))
    found = []
    for (name, each), seconds in zip(trained.items(), measured_s, strict=True):
        figures = _slowed(each.program.figures, slowdown)
        sent = wire_bytes(each.program.gm, ranks, "node").total
        if not each.function.communicator.mesh.outer:  # two thirds of what goes to the others
            sent = wire_bytes(each.program.gm, ranks).total * (ranks - SHAPE[1]) // (ranks - 1)
        found.append(Result(name, each.predicted_s(figures), seconds, sent))
    shown = next((t.program.figures for t in trained.values() if t.program.figures.links), of_one)
    return Results(inner, shown, slowdown, found)


def _of_compute(figures: Hardware) -> Hardware:
    """Return the figures without those of links, which one rank has none of."""
    return replace(figures, links={}, **asdict(Link(0.0, 1.0)))


def _slowed(figures: Hardware, slowdown: float) -> Hardware:
    """Return the same with ranks that compute more slowly."""
    float32 = figures.float32_flops_per_s
    return replace(
        figures,
        flops_per_s=figures.flops_per_s / slowdown,
        memory_bytes_per_s=figures.memory_bytes_per_s / slowdown,
        float32_flops_per_s=float32 and float32 / slowdown,
    )


def misplaced(found: Sequence[Result]) -> Iterator[tuple[Result, Result]]:
    """Yield pairs whose measured times differ, the faster one first, predicted otherwise."""
    ordered = sorted(found, key=lambda result: result.measured_s)
    for fast, slow in itertools.combinations(ordered, 2):
        differ = slow.measured_s > (1 + DIFFERENT) * fast.measured_s
        if differ and fast.predicted_s >= slow.predicted_s:
            yield fast, slow


def table(found: Sequence[Result]) -> str:
    """Return a row for each form, the fastest first."""

    def ms(seconds: float) -> str:
        return f"{seconds * 1e3:.0f} ms"

    rows = [
        (
            result.form,
            f"{result.outer_bytes / 1e6:.2f} MB",
            ms(result.predicted_s),
            ms(result.measured_s),
            f"{result.measured_s / result.predicted_s:.2f}",
        )
        for result in sorted(found, key=lambda result: result.measured_s)
    ]
    headers = ("stages", "sent to other nodes", "predicted", "measured", "measured / predicted")
    return tabulate(rows, headers=headers, disable_numparse=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    Sizes.add_arguments(parser)
    parser.set_defaults(width=256, layers=4, vocabulary=512)
    parser.add_argument("--ratios", type=float, nargs="+", default=[10.0, 50.0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--forms", nargs="+", choices=forms(), default=list(forms()))
    arguments = parser.parse_args()
    sizes = Sizes.of(arguments)
    print(f"{sizes}, 2 nodes of 2 ranks, {arguments.rounds} rounds")
    is_wrong = False
    for ratio in arguments.ratios:
        work: Callable[..., Results] = results
        given = (sizes, arguments.forms, ratio, arguments.rounds)
        first, *_ = on_ranks(work, 4, *given, timeout_s=900)
        wrong = list(misplaced(first.of_forms))
        is_wrong |= bool(wrong)
        print(f"\nThe outer link is {ratio:g} times slower than the inner one, {first.inner}.")
        print(f"Found: {first.figures}; compute takes {first.slowdown:.2f} times what it says.\n")
        print(table(first.of_forms))
        print(
            f"\nThe order is predicted {'wrongly' if wrong else 'right'} where times differ by 5%"
        )
        for fast, slow in wrong:
            print(f"  {fast.form} is faster than {slow.form}, and was predicted slower")
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
