"""Measure what operators, collectives and whole steps take on this machine's ranks.

Small models train, compiled operator by operator, in turns.  In some steps each call of a node is
timed; others run as they are.  What a node took, over its bytes and operations, gives its
operator's cost; what steps took of what their nodes add up to says how far that goes.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn

from zerofx.accelerator import is_accelerator
from zerofx.backend import ZeroBackend
from zerofx.calibration import OTHERS, Calibration, Cost, Point, fitted
from zerofx.compiler.program import Program
from zerofx.cost.program import is_view, name_of, work
from zerofx.cost.timeline import count_collectives, predict
from zerofx.hardware import NOMINAL, Hardware
from zerofx.ir import ops
from zerofx.runtime.comm.communication import Communicator
from zerofx.runtime.comm.measure import measured, own_compute

HEAD_WIDTH = 32


@dataclass(frozen=True)
class Training:
    """One of the trainings that are measured: a model's width, a batch, a stage."""

    width: int
    rows: int
    length: int
    stage: int
    lowering: str = "eager"
    vocabulary: int = 512


# Small and large tensors, in a cache and not, of which plans' lie between.
TRAININGS = (
    Training(64, 2, 64, 3),
    Training(384, 1, 32, 0),
    Training(320, 2, 64, 2),
    Training(256, 8, 128, 3),
)
COMPILED = Training(128, 4, 64, 3, lowering="inductor")
"""The one that says how much less steps take whose operators Inductor fuses."""

SECONDS = 10.0
"""So long trainings are compiled and take turns; a turn is a few steps of either kind."""

LEAST_ROUNDS = 3
"""Each training has so many turns at least, however long they take."""

SHORTEST_TURN_S = 0.1

LEAST_SPREAD = 1.1
"""No interval is narrower: the same steps take 7% more or less an hour later (docs/measured.md)."""


class Block(nn.Module):
    """Has the operators that layers of transformers are made of, of two families."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.root_norm = nn.LayerNorm(width), nn.RMSNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.value = nn.Linear(width, 2 * width, bias=False)
        self.back = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        heads = self.attention(self.norm(x)).view(rows, length, 3, -1, HEAD_WIDTH)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        query, key = rotated(query), rotated(key)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        x = x + self.down(F.gelu(self.up(x)))
        y = self.root_norm(x)
        return x + self.back(F.silu(self.gate(y)) * self.value(y))


def rotated(heads: Tensor) -> Tensor:
    """Turn pairs of features by their position.  Shapes: [rows, heads, length, features]."""
    length, features = heads.shape[-2:]
    powers = torch.arange(0, features, 2, device=heads.device, dtype=torch.float32) / features
    positions = torch.arange(length, device=heads.device, dtype=torch.float32)
    angles = positions[:, None] * 10_000.0**-powers
    cos, sin = angles.cos(), angles.sin()
    one, other = heads.chunk(2, dim=-1)
    return torch.cat((one * cos - other * sin, other * cos + one * sin), dim=-1)


class Sample(nn.Module):
    def __init__(self, training: Training) -> None:
        super().__init__()
        self.embedding = nn.Embedding(training.vocabulary, training.width)
        self.block = Block(training.width)
        self.head = nn.Linear(training.width, training.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.block(self.embedding(tokens[:, :-1])))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@dataclass
class Run:
    """A training under way on this rank: the seconds of steps, of as many that were timed, and in
    these of the calls of nodes, by name."""

    training: Training
    step: Callable[[], object]
    program: Program
    steps_s: list[float] = field(default_factory=list)
    timed_s: list[float] = field(default_factory=list)
    nodes_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, training: Training, device: torch.device, figures: Hardware) -> Run:
        """Compile a training, and run its first steps."""
        torch.manual_seed(0)
        backend = ZeroBackend()
        model = Sample(training).to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        shape = (training.rows, training.length + 1)
        tokens = torch.randint(training.vocabulary, shape, device=device)

        def step(tokens: Tensor) -> Tensor:
            loss = model(tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        own = {"stage": training.stage, "lowering": training.lowering, "hardware": figures}
        compiled = torch.compile(step, backend=backend, options=own, dynamic=False)
        for _ in range(3):
            compiled(tokens)
        (function,) = backend.functions
        return cls(training, lambda: compiled(tokens), function.programs[-1])

    def turn(self, times: int, communicator: Communicator, device: torch.device) -> None:
        """Run steps as they are, and as many with their nodes timed.

        But of each kind one comes first that does not count: others have had its memory.
        """
        self.steps_s += self._steps(times + 1, communicator, device)[1:]
        if self.training.lowering == "eager":
            nodes_s: dict[str, list[float]] = defaultdict(list)
            with self._timed(nodes_s, device):
                self.timed_s += self._steps(times + 1, communicator, device)[1:]
            for name, seconds in nodes_s.items():
                self.nodes_s[name] += seconds[1:]

    def _steps(self, times: int, communicator: Communicator, device: torch.device) -> list[float]:
        seconds = []
        for _ in range(times):
            if communicator.group is not None:
                dist.barrier(communicator.group)
            finish(device)
            started = time.perf_counter()
            self.step()
            finish(device)
            seconds.append(time.perf_counter() - started)
        return seconds

    @contextmanager
    def _timed(self, seconds: dict[str, list[float]], device: torch.device) -> Iterator[None]:
        runtime = self.program.runtime
        assert runtime is not None and isinstance(runtime.program, fx.GraphModule)
        plain = runtime.program
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        graph.output(graph.graph_copy(plain.graph, copies))
        for node, copy in copies.items():
            if copy.op == "call_function":
                copy.target = _timing(copy.target, seconds[node.name], device)
        runtime.program = fx.GraphModule(plain, graph)
        try:
            yield
        finally:
            runtime.program = plain


def _timing(target: Any, seconds: list[float], device: torch.device) -> Callable:
    def run(*args: Any, **kwargs: Any) -> Any:
        finish(device)
        started = time.perf_counter()
        result = target(*args, **kwargs)
        finish(device)
        seconds.append(time.perf_counter() - started)
        return result

    run.__name__ = getattr(target, "__name__", "run")
    return run


def finish(device: torch.device) -> None:
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


@dataclass(frozen=True)
class Measured:
    """What a training took: its steps, each node by its name, and what is beside nodes.

    All are averages of the faster half of the steps, so that nodes add up, and of ranks.  But a
    wait is that of the rank that came to it last, which waits for the transfer alone.
    """

    run: Run
    step_s: float
    nodes_s: dict[str, float]
    beside_s: float


class Calibrator:
    """Trains what is measured, in turns; collective.

    ``figures`` are those that programs are made with, ``calibrated`` the same with what has been
    measured so far; all ranks have the same.
    """

    def __init__(
        self, communicator: Communicator, device: torch.device, *, with_inductor: bool = False
    ) -> None:
        self.communicator, self.device = communicator, device
        figures = measured(communicator, device, "zerofx calibrate", timeout_s=300.0)
        self.figures = figures or replace(NOMINAL, **own_compute(device))
        chosen = (*TRAININGS, COMPILED) if with_inductor else TRAININGS
        self.runs = [Run.of(training, device, self.figures) for training in chosen]

    def turn(self) -> None:
        """Run some steps of each training."""
        for run in self.runs:
            once_s = run.steps_s[-1] if run.steps_s else SHORTEST_TURN_S / 2
            times = _agreed(max(2, math.ceil(SHORTEST_TURN_S / once_s)))
            run.turn(times, self.communicator, self.device)

    def calibrated(self) -> Hardware:
        """Return the figures with a calibration, of all turns so far."""
        ranks, device = self.communicator.world_size, self.device
        title = "CPU" if device.type == "cpu" else torch.get_device_module(device).get_device_name()
        source = f"calibrated by {ranks} rank(s) of {title}, torch {torch.__version__}"
        found = [_measured(run) for run in self.runs]
        made = [_with_whole(replace(self.figures, source=source), found, ranks)]
        if self.communicator.group is not None:  # ranks' shards differ, and so do their fits
            dist.broadcast_object_list(made, group=self.communicator.group, group_src=0)
        return made[0]


def calibrate(
    communicator: Communicator, device: torch.device, *, with_inductor: bool = False
) -> Hardware:
    """Return figures of this machine's ranks, with a calibration; collective.

    All ranks return the same, those of all of them, after some ``SECONDS``.
    """
    began_s = time.perf_counter()
    calibrator = Calibrator(communicator, device, with_inductor=with_inductor)
    for rounds in itertools.count(1):
        turn_began_s = time.perf_counter()
        calibrator.turn()
        now_s = time.perf_counter()
        next_ends_s = now_s - began_s + now_s - turn_began_s
        if max(_of_all_ranks([next_ends_s])[0]) > SECONDS and rounds >= LEAST_ROUNDS:
            break
    return calibrator.calibrated()


def _agreed(times: int) -> int:
    """Return what all ranks do: the most that one of them wants."""
    return int(max(_of_all_ranks([float(times)])[0]))


def _of_all_ranks(numbers: Sequence[float]) -> list[list[float]]:
    """Return for each number what every rank has in its place."""
    if not dist.is_initialized():
        return [[number] for number in numbers]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, list(numbers))
    return [list(column) for column in zip(*found, strict=True)]


def _measured(run: Run) -> Measured:
    """Put together what the ranks have measured of one training."""
    step_s, _ = _faster_half(run.steps_s)
    if not run.timed_s:
        return Measured(run, step_s, {}, 0.0)
    _, chosen = _faster_half(run.timed_s)
    waits = {node.name for node in run.program.gm.graph.nodes if ops.is_wait(node)}
    columns = iter(_of_all_ranks([of[at] for of in run.nodes_s.values() for at in chosen]))
    nodes_s: dict[str, float] = {}
    for name in run.nodes_s:
        of_ranks: Callable[[list[float]], float] = min if name in waits else statistics.fmean
        nodes_s[name] = statistics.fmean(of_ranks(next(columns)) for _ in chosen)
    beside = [run.timed_s[at] - sum(of[at] for of in run.nodes_s.values()) for at in chosen]
    return Measured(
        run, step_s, nodes_s, statistics.fmean(map(statistics.fmean, _of_all_ranks(beside)))
    )


def _faster_half(steps_s: Sequence[float]) -> tuple[float, list[int]]:
    """Return the average of the faster half of steps, by the average rank, and which these are."""
    averages_s = list(map(statistics.fmean, _of_all_ranks(steps_s)))
    chosen = sorted(range(len(averages_s)), key=averages_s.__getitem__)[: -(-len(averages_s) // 2)]
    return statistics.fmean(averages_s[at] for at in chosen), chosen


def _calibration(found: Sequence[Measured], ranks: int) -> Calibration:
    """Return the costs of operators, and of collectives whose transfers a step waits for."""
    points: dict[str, list[Point]] = defaultdict(list)
    sent: dict[str, list[Point]] = defaultdict(list)
    others: list[Point] = []
    beside: list[Point] = []
    for one in found:
        program = one.run.program
        for node in program.gm.graph.nodes:
            seconds = one.nodes_s.get(node.name)
            if seconds is None or ops.is_wait(node):
                continue
            if ops.is_collective(node):
                (wait,) = [user for user in node.users if ops.is_wait(user)]
                nbytes = ops.rules(node).rounds(node) * ops.rules(node).sends(node)
                seconds += one.nodes_s.get(wait.name, 0.0)
                sent[name_of(node)].append((nbytes * (ranks - 1) / ranks, 0.0, seconds))
                continue
            did = (0.0, 0) if _is_fixed(node) else work(node, program.table)
            points[name_of(node)].append((*did, seconds))
            if not (did[1] or _is_fixed(node) or ops.is_ours(node.target)):
                others.append((*did, seconds))
        beside.append((len(program.table), 0.0, one.beside_s))
    return Calibration(
        operators={OTHERS: fitted(others), **{name: fitted(of) for name, of in points.items()}},
        collectives={name: fitted(of) for name, of in sent.items()},
        step=fitted(beside),
        ranks=ranks,
    )


def _is_fixed(node: fx.Node) -> bool:
    return is_view(node) and not ops.is_ours(node.target)


def _with_whole(figures: Hardware, found: Sequence[Measured], ranks: int) -> Hardware:
    """Add costs, what whole steps took of what these add up to, and how far that is off.

    How far, by what the trainings' own steps differ from their fit: the prediction interval of one
    more step.
    """
    nodes = [one for one in found if one.run.training.lowering == "eager"]
    known = replace(figures, calibration=_calibration(nodes, ranks))
    steps = [_added_up(one, known, ranks) for one in nodes]
    eager = _whole(steps)
    whole = {"eager": eager}
    for one in found:
        if one not in nodes:
            waits, seconds, step_s = _added_up(one, known, ranks)
            rest_s = max(step_s - eager.seconds(waits), 0.0)
            whole[one.run.training.lowering] = replace(eager, flop_s=rest_s / seconds)
    errors = [math.log(step_s / eager.seconds(waits, seconds)) for waits, seconds, step_s in steps]
    spread = spread_of(errors, sum(part > 0 for part in (eager.byte_s, eager.flop_s)))
    assert known.calibration is not None
    calibration = replace(known.calibration, whole=whole)
    return replace(known, calibration=calibration, spread=max(spread, LEAST_SPREAD))


def spread_of(errors: Sequence[float], num_fitted: int) -> float:
    """Return the factor within which one more step lies: ``errors`` are logarithms, of a fit.

    Source: the prediction interval of a regression with so many parameters.
    """
    freedom = max(len(errors) - num_fitted, 1)
    deviation = math.sqrt(sum(error**2 for error in errors) / freedom)
    within = WITHIN[min(freedom, len(WITHIN)) - 1]
    return math.exp(within * deviation * math.sqrt(1 + 1 / len(errors)))


def _added_up(one: Measured, figures: Hardware, ranks: int) -> Point:
    """Return a step's collectives, the seconds that it adds up to, and those that it took."""
    program = one.run.program
    graph = program.gm.graph
    expected_s = predict(graph, figures, program.table, ranks).step_s
    return count_collectives(graph.nodes, ranks), expected_s, one.step_s


def _whole(steps: Sequence[Point]) -> Cost:
    cost = fitted(steps, call=0.0)
    if cost.flop_s:
        return cost
    ratios = [math.log(step_s / expected_s) for _, expected_s, step_s in steps]
    return Cost(flop_s=math.exp(statistics.fmean(ratios)))


WITHIN = (3.08, 1.89, 1.64)
"""Standard deviations within which the next one lies, at 80%, by degrees of freedom: Student's t.

What operators cost is fitted to the same steps, so that it is too few by some: see LEAST_SPREAD.
"""


def as_json(figures: Hardware) -> dict[str, Any]:
    """Return figures as the file has them that the option ``hardware`` reads."""
    links = {axis: asdict(link) for axis, link in figures.links.items()}
    values: dict[str, Any] = {
        name: value for name, value in asdict(figures).items() if value is not None
    }
    for name in ("links", "calibration"):
        values.pop(name, None)
    if links:
        for name in ("latency_s", "bytes_per_s", "overlaps"):
            values.pop(name)
    assert figures.calibration is not None
    return {**values, **links, "calibration": figures.calibration.as_json()}
