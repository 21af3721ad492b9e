"""Measure what operators, collectives and whole steps take on this machine's ranks.

Small models train, compiled operator by operator, in turns.  In some steps each call of a node is
timed; others run as they are.  What a node took, over its bytes and operations, gives its
operator's cost; what steps took of what their nodes add up to says how far that goes.
"""

from __future__ import annotations

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
from zerofx.calibration import OTHERS, Calibration, Point, fitted
from zerofx.compiler.program import Program
from zerofx.cost.program import is_view, name_of, work
from zerofx.cost.timeline import predict
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


TRAININGS = (
    Training(64, 2, 32, 3),
    Training(128, 4, 64, 0),
    Training(192, 4, 64, 2),
    Training(256, 4, 128, 3),
)
COMPILED = Training(128, 4, 64, 3, lowering="inductor")
"""The one that says how much less steps take whose operators Inductor fuses."""

ROUNDS = 8
"""Each training has so many turns; a turn is a few steps of either kind."""

SHORTEST_TURN_S = 0.05

LEAST_SPREAD = 1.1
"""No interval is narrower: four trainings do not say more."""


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
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        x = x + self.down(F.gelu(self.up(x)))
        y = self.root_norm(x)
        return x + self.back(F.silu(self.gate(y)) * self.value(y))


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
    """A training under way on this rank, and the seconds of its steps and of its nodes' calls."""

    training: Training
    step: Callable[[], object]
    program: Program
    steps_s: list[float] = field(default_factory=list)
    timed_s: list[float] = field(default_factory=list)
    nodes_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, training: Training, device: torch.device, options: dict[str, Any]) -> Run:
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

        own = {"stage": training.stage, "lowering": training.lowering, **options}
        compiled = torch.compile(step, backend=backend, options=own, dynamic=False)
        for _ in range(3):
            compiled(tokens)
        (function,) = backend.functions
        return cls(training, lambda: compiled(tokens), function.programs[-1])

    def turn(self, times: int, communicator: Communicator, device: torch.device) -> None:
        """Run steps as they are, and as many with their nodes timed."""
        self.steps_s += self._steps(times, communicator, device)
        if self.training.lowering == "eager":
            with self._timed(device):
                self.timed_s += self._steps(times, communicator, device)

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
    def _timed(self, device: torch.device) -> Iterator[None]:
        runtime = self.program.runtime
        assert runtime is not None and isinstance(runtime.program, fx.GraphModule)
        plain = runtime.program
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        graph.output(graph.graph_copy(plain.graph, copies))
        for node, copy in copies.items():
            if copy.op == "call_function":
                copy.target = _timing(copy.target, self.nodes_s[node.name], device)
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
    """A training's medians over all ranks: of a step, and of each node by its name.

    A wait is that of the rank that came to it last, which waits for the transfer alone.
    """

    run: Run
    step_s: float
    nodes_s: dict[str, float]


def calibrate(
    communicator: Communicator, device: torch.device, *, with_inductor: bool = False
) -> Hardware:
    """Return figures of this machine's ranks, with a calibration; collective.

    All ranks return the same, those of all of them.
    """
    name, world_size = "zerofx calibrate", communicator.world_size
    figures = measured(communicator, device, name, timeout_s=300.0)
    if figures is None:
        figures = replace(NOMINAL, **own_compute(device))
    options = {"hardware": figures}
    chosen = (*TRAININGS, COMPILED) if with_inductor else TRAININGS
    runs = [Run.of(training, device, options) for training in chosen]
    for _ in range(ROUNDS):
        for run in runs:
            once_s = statistics.median(run.steps_s) if run.steps_s else 0.0
            times = _agreed(max(1, math.ceil(SHORTEST_TURN_S / once_s)) if once_s else 2)
            run.turn(times, communicator, device)
    found = [_measured(run) for run in runs]
    calibration = _calibration(
        [one for one in found if one.run.training.lowering == "eager"], world_size
    )
    title = "CPU" if device.type == "cpu" else torch.get_device_module(device).get_device_name()
    source = f"calibrated by {world_size} rank(s) of {title}, torch {torch.__version__}"
    figures = replace(figures, calibration=calibration, source=source)
    return _with_times(figures, found)


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
    names = [name for name, seconds in run.nodes_s.items() if seconds]
    waits = {node.name for node in run.program.gm.graph.nodes if ops.is_wait(node)}
    nodes_s: dict[str, float] = {}
    flat = [second for name in names for second in run.nodes_s[name]]
    columns = iter(_of_all_ranks(flat))
    for name in names:
        calls = [next(columns) for _ in run.nodes_s[name]]
        together = [min(call) if name in waits else statistics.fmean(call) for call in calls]
        nodes_s[name] = statistics.median(together)
    (steps_s,) = _of_all_ranks([statistics.median(run.steps_s)])
    return Measured(run, statistics.fmean(steps_s), nodes_s)


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
            if not did[1] and not ops.is_ours(node.target):
                others.append((*did, seconds))
        rest_s = one.step_s - sum(one.nodes_s.values())
        beside.append((len(program.table), 0.0, max(rest_s, 1e-6)))
    return Calibration(
        operators={OTHERS: fitted(others), **{name: fitted(of) for name, of in points.items()}},
        collectives={name: fitted(of) for name, of in sent.items()},
        step=fitted(beside),
        ranks=ranks,
    )


def _is_fixed(node: fx.Node) -> bool:
    return is_view(node) and not ops.is_ours(node.target)


def _with_times(figures: Hardware, found: Sequence[Measured]) -> Hardware:
    """Add what whole steps took of what is predicted for them, and how far these differ."""
    calibration, ratios = figures.calibration, defaultdict(list)
    assert calibration is not None
    for one in found:
        program = one.run.program
        given = program.gm.graph, figures, program.table, calibration.ranks
        ratios[one.run.training.lowering].append(one.step_s / predict(*given).step_s)
    times = {name: math.exp(statistics.fmean(map(math.log, of))) for name, of in ratios.items()}
    errors = [math.log(ratio / times["eager"]) for ratio in ratios["eager"]]
    spread = math.exp(WITHIN * math.sqrt(statistics.fmean(error**2 for error in errors)))
    return replace(
        figures,
        calibration=replace(calibration, times=times),
        spread=max(spread, LEAST_SPREAD),
    )


WITHIN = 1.64
"""Standard deviations around a mean of four within which the next one lies, at 80%: Student's."""


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
