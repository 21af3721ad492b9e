"""Throttled lanes: a step takes what its schedule's critical path does, and that is near the best.

Sleeps dominate: a step takes a second or more, of which the machine computes a small part.
"""

import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
from benchmarks.simulate import simulated
from tests.kit.models import VOCABULARY, Gpt
from tests.kit.ranks import ranks_fixture  # noqa: F401
from zerofx import backend
from zerofx.cost.timeline import predict
from zerofx.hardware import Hardware
from zerofx.worker import Worker

FREE = 1e30
SECONDS = 1.0  # of compute
LAYERS = 8
ENOUGH = 1.05  # times what was predicted

# What lanes have to do, as multiples of compute: copies to the host, updates, the link.
COMPUTE, UPDATES, COPIES, EVEN = (0.3, 0.5, 0.1), (0.4, 2.5, 0.1), (3.0, 0.4, 0.1), (1.0, 1.0, 0.1)
BOTTLENECKS = {COMPUTE: "compute", UPDATES: "updates", COPIES: "to host"}


def step(model, optimizer, tokens):
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


class Trained:
    """A GPT at a stage, with as many buckets as it has halves of layers."""

    def __init__(self, stage: int, layers: int = LAYERS):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Gpt(layers=layers, width=30)
        self.pair = model, torch.optim.AdamW(model.parameters(), lr=1e-2)
        nbytes = sum(parameter.nbytes for parameter in model.parameters())
        options = {"stage": stage, "lowering": "eager", "offload": "optimizer", "recompute": False}
        options |= {
            "bucket_bytes": nbytes // (2 * layers),
            "hardware": "latency_s=1e-6 bytes_per_s=1",
        }
        self.compiled = torch.compile(step, backend="zero", options=options)
        self.losses = [self(), self()]  # the second traces updates of states that are there
        functions = [f for f in backend.zero.functions if f.code is step.__code__ and f.programs]
        self.function = max(functions, key=lambda function: function.number)
        (self.program,) = self.function.programs
        self.ranks = self.function.communicator.world_size

    def __call__(self) -> float:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(VOCABULARY, (2, 17), generator=generator)
        return self.compiled(*self.pair, tokens).item()

    def figures(self, copies: float, updates: float, link: float) -> Hardware:
        unit = Hardware(1e-9, 1.0, True, 1.0, FREE, 1.0, 1.0)
        work = predict(self.program.gm.graph, unit, self.program.table, self.ranks).lanes
        return Hardware(
            latency_s=1e-9,
            bytes_per_s=work["link"] / (link * SECONDS) or FREE,
            flops_per_s=work["compute"] / SECONDS,
            memory_bytes_per_s=FREE,
            copy_bytes_per_s=work["to host"] / (copies * SECONDS),
            host_bytes_per_s=work["updates"] / (updates * SECONDS),
        )

    def simulate(self, regime):
        """The fastest of a few steps, and what was predicted of them: others at work only add.

        One that takes what was predicted is enough.
        """
        with simulated(self.function, self.figures(*regime)) as (timeline,):
            times = []
            for _ in range(3):
                begun = time.perf_counter()
                self.losses.append(self())
                times.append(slowest_s(time.perf_counter() - begun))
                if times[-1] <= ENOUGH * timeline.step_s:
                    break
        lane = timeline.busiest
        return min(times), timeline.step_s, lane, timeline.lanes[lane], timeline.bound_s


def slowest_s(seconds: float) -> float:
    """The most of any rank: all go on, or none."""
    if not dist.is_initialized():
        return seconds
    most = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item()


def simulate_all(stage, regimes):
    trained = Trained(stage)
    return [trained.simulate(regime) for regime in regimes]


def check(found, regime):
    measured_s, predicted_s, lane, busiest_s, bound_s = found
    assert measured_s == pytest.approx(predicted_s, rel=0.1)
    assert busiest_s <= bound_s * (1 + 1e-9) and bound_s <= predicted_s * (1 + 1e-9)
    if regime in BOTTLENECKS:
        assert lane == BOTTLENECKS[regime]
        assert predicted_s <= 1.25 * busiest_s
    else:  # no lane can begin before the first gradient is there: 1.4 of the busiest
        assert predicted_s <= 1.25 * bound_s


@pytest.mark.nightly
def test_a_step_takes_what_is_predicted():
    regimes = (COMPUTE, UPDATES, COPIES, EVEN)
    for found, regime in zip(simulate_all(3, regimes), regimes, strict=True):
        check(found, regime)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", (3, pytest.param(2, marks=pytest.mark.exhaustive)))
def test_on_two_ranks_too(stage, ranks):
    regimes = (COMPUTE, UPDATES, COPIES)
    for of_rank in ranks(2).run(simulate_all, stage, regimes, timeout_s=500.0):
        for found, regime in zip(of_rank, regimes, strict=True):
            check(found, regime)


@pytest.mark.nightly
def test_it_computes_what_it_does_without():
    simulated_one = Trained(3, layers=2)
    for _ in range(2):
        simulated_one.simulate((0.2, 0.2, 0.1))
    assert len(simulated_one.function.programs) == 1, "what was slowed is what has run"
    alone = Trained(3, layers=2)  # forgets what was compiled: only now
    while len(alone.losses) < len(simulated_one.losses):
        alone.losses.append(alone())
    assert simulated_one.losses == alone.losses and len(set(alone.losses)) >= 4
    found, expected = (dict(one.pair[0].state_dict()) for one in (simulated_one, alone))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.nightly
def test_what_waits_where_it_is_started_is_seen():
    """The measure is no tautology: an update that runs in the step's thread takes longer."""
    trained = Trained(3, layers=2)
    original = Worker.start

    def waited_for(self, job):
        started = original(self, job)
        if self.name == "updates":
            started.result()
        return started

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, "start", waited_for)
        measured_s, predicted_s, *_ = trained.simulate((0.1, 1.5, 0.1))
    assert measured_s > 1.15 * predicted_s
    runtime, copies = trained.program.runtime, trained.function.copies
    before = runtime.program, copies.updates, copies.workers
    with pytest.raises(ZeroDivisionError):
        with simulated(trained.function, trained.figures(*COMPUTE)):
            assert runtime.program is not before[0]
            raise ZeroDivisionError
    assert (runtime.program, copies.updates, copies.workers) == before, "it is over"
