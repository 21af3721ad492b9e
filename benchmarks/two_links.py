"""Train on a mesh whose outer link is slow, one form after the other, and compare with predictions.

    python benchmarks/two_links.py
    python benchmarks/two_links.py --ratios 10 --layers 2 --width 128 --bytes-per-s 1e7
    python benchmarks/two_links.py --forms "3 two hops" "gpu 3, node 0"

Four ranks of this machine are 2 nodes of 2.  They talk over gloo's sockets; what goes to the other
node then waits for a link that is --ratios times slower than the inner one, which is measured
first (tests/kit/slow_link.py).  On a machine with other load give the inner link's --bytes-per-s:
it is slowed too, so that waiting counts and not computing.  Both links are measured as zerofx does
it at a first call, but more often and not rounded; every form is given these figures.

"predicted" is the step by the cost model, with these figures, where every operator that computes
takes so much longer that a step of ranks that do not communicate takes what it does: their models
are small, and most of that is the host's.  They take turns too.  "measured" is the median of
rounds, in each of which every form takes a turn; what else the machine does only adds to "fastest".

Exit status 1 if two forms are predicted in the other order than measured, where one takes more than
1.05 times what the other does: the median of the rounds' ratios, and the lower end of its 95%
interval by 10,000 resamplings.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from models import Sizes, batches_of, loss_of
from ranks import on_ranks
from tabulate import tabulate
from torch import fx
from torch.distributed.device_mesh import init_device_mesh
from versus import interval

from zerofx.backend import zero
from zerofx.compiler.program import Program
from zerofx.cost import timeline
from zerofx.cost.program import seconds
from zerofx.cost.traffic import wire_bytes
from zerofx.hardware import Hardware, Link, with_links
from zerofx.ir.parameters import ParameterTable
from zerofx.options import resolve
from zerofx.runtime.comm.communication import Communicator
from zerofx.runtime.comm.measure import own_compute, own_link
from zerofx.runtime.comm.peer_memory import PeerMemory

ROOT = Path(__file__).resolve().parent.parent
AXES = ("node", "gpu")
SHAPE = (2, 2)
DIFFERENT = 1.05
TIMES = 3

_SECOND: dict[str, Any] = {"stage": 3, "secondary_shard": "gpu"}

OTHERS: dict[str, dict[str, Any]] = {
    "3 flat": {"stage": 3, "process_group": None},
    "3, second shard": _SECOND,
    "3, int8 gathers": {"stage": 3, "gather_dtype": "int8"},
    "3, int4 reductions": {"stage": 3, "reduce_wire": {"node": "int4"}},
    "ZeRO++": _SECOND | {"gather_dtype": "int8", "reduce_wire": {"node": "int4"}},
}
"""Forms beside the pairs of stages: options by name, without a group those of one link."""


def forms() -> dict[str, dict[str, Any]]:
    """Options by name: all pairs of stages that there are, and ``OTHERS``."""
    found: dict[str, dict[str, Any]] = {"0": {"stage": 0}}
    for inner, outer in itertools.product((3, 2, 1), range(4)):
        name = f"{inner} two hops" if inner == outer else f"gpu {inner}, node {outer}"
        found[name] = {"stage": {"gpu": inner, "node": outer}}
    pairs = {name: options for name, options in found.items() if _is_legal(options)}
    return pairs | OTHERS


def _is_legal(options: Mapping[str, Any]) -> bool:
    try:
        resolve({**options, "process_group": SimpleNamespace(mesh_dim_names=AXES)}, {})
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class Result:
    """The step of a form.  Units: seconds of each round; bytes a rank sends over the outer link."""

    form: str
    predicted_s: float
    rounds_s: Sequence[float]
    outer_bytes: int

    @property
    def measured_s(self) -> float:
        return statistics.median(self.rounds_s)


@dataclass(frozen=True)
class Results:
    """One rank's figures and results; ``alone_s`` is the median step without communication."""

    figures: Hardware
    alone_s: float
    overhead_s: float
    of_forms: list[Result]


class Trained:
    """A model that one form of the step trains, given figures of a mesh's links or of one link."""

    def __init__(
        self,
        sizes: Sizes,
        options: Mapping[str, Any],
        rank: int,
        on_mesh: Hardware | None = None,
        flat: Hardware | None = None,
    ) -> None:
        is_flat = options.get("process_group") is None or options["stage"] == 0
        figures = flat if is_flat else on_mesh
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
        options = {"lowering": "eager", "peer_memory": False, "hardware": figures, **options}
        self.step = torch.compile(step, backend="zero", options=options)
        for _ in range(2):  # the second traces updates once more, of states that are there
            self.step(next(self.batches))
        (self.function,) = (each for each in zero.functions if each not in known)

    @property
    def program(self) -> Program:
        return self.function.programs[-1]

    def predicted_s(self, figures: Hardware, overhead_s: float) -> float:
        """Predict a step, with so much more for every operator that computes something."""

        def longer_s(node: fx.Node, figures: Hardware, table: ParameterTable) -> float:
            found_s = seconds(node, figures, table)
            return found_s + overhead_s if found_s else 0.0

        ranks = self.function.communicator.world_size
        with mock.patch.object(timeline, "seconds", longer_s):
            return timeline.predict(
                self.program.gm.graph, figures, self.program.table, ranks
            ).step_s

    @property
    def num_computing(self) -> int:
        """The number of operators that compute something."""
        program = self.program
        nodes = program.gm.graph.nodes
        return sum(seconds(node, program.figures, program.table) > 0 for node in nodes)

    def measured_s(self) -> float:
        """Take a step together with the other ranks; return its seconds on this one."""
        batch = next(self.batches)
        dist.barrier()
        started_s = time.perf_counter()
        self.step(batch)
        return time.perf_counter() - started_s


def measured(groups: Mapping[str, dist.ProcessGroup]) -> dict[str, Link]:
    """Measure links as zerofx does, ``TIMES`` times; return the best of the slowest rank of all."""
    found = {}
    for axis, group in groups.items():
        probe, device = Communicator(group), torch.device("cpu")
        tries = [own_link(probe, device) for _ in range(TIMES)]
        latency_s, bytes_per_s = (
            min(each.latency_s for each in tries),
            max(each.bytes_per_s for each in tries),
        )
        worst = torch.tensor([latency_s, -bytes_per_s], dtype=torch.float64)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        latency_s, negative = worst.tolist()
        found[axis] = Link(latency_s, -negative)
    return found


def results(
    rank: int,
    ranks: int,
    sizes: Sizes,
    chosen: Sequence[str],
    ratio: float,
    bytes_per_s: float | None,
    rounds: int,
) -> Results:
    """Train on one rank; every round takes a step of each form."""
    sys.path.insert(0, str(ROOT))  # the slow link is that of the tests
    from tests.kit.slow_link import TokenBucket, slow_between_nodes

    mesh = init_device_mesh("cpu", SHAPE, mesh_dim_names=AXES)
    groups = [dist.new_group([one]) for one in range(ranks)]
    for name in AXES:
        PeerMemory.decline(mesh.get_group(name))
    inner = measured({"gpu": mesh.get_group("gpu")})["gpu"]
    known = forms()
    inside = TokenBucket(0.0, bytes_per_s) if bytes_per_s else None
    outer = inner.latency_s, (bytes_per_s or inner.bytes_per_s) / ratio
    with slow_between_nodes(mesh, *outer, inside=inside):
        links = measured({name: mesh.get_group(name) for name in AXES})
        together = measured({"": dist.group.WORLD})[""]
        of_ranks = _computed()
        figures = with_links(links, **of_ranks)
        flat = Hardware(**asdict(together), **of_ranks)
        alone = Trained(sizes, {"stage": 0, "process_group": groups[rank]}, rank)
        trained = {
            name: Trained(sizes, {"process_group": mesh, **known[name]}, rank, figures, flat)
            for name in chosen
        }
        times: dict[str, list[float]] = {name: [] for name in ("", *chosen)}
        for number in range(rounds):
            turns = list({"": alone, **trained}.items())
            for name, each in turns if number % 2 else reversed(turns):
                times[name].append(each.measured_s())
        # A step is over when the last rank's is.
        longest = torch.tensor(list(times.values()), dtype=torch.float64)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
    of_alone, *of_forms = longest.tolist()
    alone_s = statistics.median(of_alone)
    overhead_s = (alone_s - alone.predicted_s(figures, 0.0)) / alone.num_computing
    found = []
    for (name, each), rounds_s in zip(trained.items(), of_forms, strict=True):
        sent = wire_bytes(each.program.gm, ranks, "node").total
        if not each.function.communicator.mesh.outer:  # two thirds of what goes to the others
            sent = wire_bytes(each.program.gm, ranks).total * (ranks - SHAPE[1]) // (ranks - 1)
        predicted_s = each.predicted_s(each.program.figures, overhead_s)
        found.append(Result(name, predicted_s, rounds_s, sent))
    return Results(figures, alone_s, overhead_s, found)


def _computed() -> dict[str, float]:
    """Return what every rank computes in a second, all at the same time."""
    found = own_compute(torch.device("cpu"))
    worst = torch.tensor(list(found.values()), dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MIN)
    return dict(zip(found, worst.tolist(), strict=True))


def misplaced(found: Sequence[Result]) -> Iterator[tuple[Result, Result]]:
    """Yield pairs whose measured times differ, the faster one first, predicted otherwise."""
    for fast, slow in itertools.permutations(found, 2):
        if fast.predicted_s < slow.predicted_s:
            continue
        rounds = zip(fast.rounds_s, slow.rounds_s, strict=True)
        if interval([slower / faster for faster, slower in rounds])[0] > DIFFERENT:
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
            ms(min(result.rounds_s)),
            f"{result.measured_s / result.predicted_s:.2f}",
        )
        for result in sorted(found, key=lambda result: result.measured_s)
    ]
    headers = (
        "stages",
        "sent to other nodes",
        "predicted",
        "measured",
        "fastest",
        "measured / predicted",
    )
    return tabulate(rows, headers=headers, disable_numparse=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    Sizes.add_arguments(parser)
    parser.set_defaults(width=256, layers=4, vocabulary=512)
    parser.add_argument("--ratios", type=float, nargs="+", default=[10.0, 50.0])
    parser.add_argument("--bytes-per-s", type=float, help="slow the inner link to that, too")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--forms", nargs="+", choices=forms(), default=list(forms()))
    arguments = parser.parse_args()
    sizes = Sizes.of(arguments)
    print(f"{sizes}, 2 nodes of 2 ranks, {arguments.rounds} rounds")
    is_wrong = False
    for ratio in arguments.ratios:
        work: Callable[..., Results] = results
        given = (sizes, arguments.forms, ratio, arguments.bytes_per_s, arguments.rounds)
        first, *_ = on_ranks(work, 4, *given, timeout_s=900)
        wrong = list(misplaced(first.of_forms))
        is_wrong |= bool(wrong)
        print(f"\nThe outer link carries {ratio:g} times fewer bytes a second than the inner one.")
        print(f"Measured: {first.figures}.")
        print(
            f"A step without communication takes {first.alone_s * 1e3:.0f} ms, "
            f"{first.overhead_s * 1e6:.0f} us more than predicted for each operator.\n"
        )
        print(table(first.of_forms))
        how = "wrongly" if wrong else "right"
        print(f"\nThe order is predicted {how} where times differ by more than 5%.")
        for fast, slow in wrong:
            print(f"  {fast.form} is faster than {slow.form}, and was predicted slower")
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
