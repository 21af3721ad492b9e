"""What a rank holds between steps and during one, counted on the tensors that are really alive.

In the formulas Ψ is the number of parameters (fp32) and N the number of ranks.
"""

from __future__ import annotations

import gc
import itertools
import time
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
from tests.kit.allocations import Allocations
from tests.kit.covering import each_value, exhaustive, first
from tests.kit.persistent import persistent_bytes
from tests.kit.ranks import ranks_fixture, ranks_on_sockets_fixture  # noqa: F401
from tests.kit.traffic import traffic_of
from zerofx.runtime.comm.communication import Communicator
from zerofx.runtime.memory.pages import BufferPool
from zerofx.runtime.optimizer.update import OptimizerRunner

STAGES = (0, 1, 2, 3)
TIMEOUT_S = 600.0


def storages() -> dict[int, int]:
    """Bytes of every CPU storage that a live tensor refers to, by its identity.

    Of storages over the same memory the largest counts.
    """
    gc.collect()
    found = {}
    memory = []
    for thing in gc.get_objects():
        if not issubclass(type(thing), torch.Tensor) or thing.device.type != "cpu":
            continue
        if isinstance(thing, torch._subclasses.FakeTensor):
            continue
        storage = torch.Tensor.untyped_storage(thing)
        found[storage._cdata] = storage.nbytes()
        memory.append((storage.data_ptr(), -storage.nbytes(), storage._cdata))
    end = 0
    for start, negative, key in sorted(set(memory)):
        if start - negative <= end:
            del found[key]
        end = max(end, start - negative)
    return found


# Between steps.


class OneLarge(nn.Module):
    """Nearly all of it is one weight of 4.1 MiB; 7 outputs leave padding on 2 and 3 ranks."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(510, 2101), nn.Linear(2101, 7)

    def forward(self, x):
        return self.head(F.gelu(self.body(x)))


def evaluate(model, x):
    with torch.no_grad():
        return model(x).square().mean()


def update(model, optimizer, x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@dataclass
class Held:
    """What one rank held, and allocated, over the first steps of ``OneLarge``."""

    elements: int
    tensors: int
    largest: int  # bytes of the largest parameter
    held: int  # bytes of all storages alive between steps that were not before
    largest_left: int
    reported: dict[str, int]
    in_updates: list[int]
    """The largest allocation while states were made and used, at each step."""
    full_size: list[int]
    """How many allocations of the largest parameter's size or more each step made."""


def hold(stage: int) -> Held:
    torch._dynamo.reset()
    x = torch.randn(2, 510)
    before = storages()
    bound_before = persistent_bytes()
    model = OneLarge()
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"stage": stage, "lowering": "eager"}
    # An evaluation binds the model, so that the first step has nothing else to allocate whole.
    torch.compile(evaluate, backend="zero", options={"lowering": "eager", **options})(model, x)
    step = torch.compile(update, backend="zero", options={"lowering": "eager", **options})
    spans: list[tuple[int, int]] = []
    run = OptimizerRunner.run

    def timed_run(*arguments):
        start = time.time_ns()
        result = run(*arguments)
        spans.append((start, time.time_ns()))
        return result

    infos = [tuple(p.shape) for p in model.parameters()]
    in_updates, full_size = [], []
    largest = max(4 * torch.Size(shape).numel() for shape in infos)
    with mock.patch.object(OptimizerRunner, "run", timed_run):
        for _ in range(3):
            spans.clear()
            with Allocations() as allocations:
                step(model, optimizer, x)
            assert len(spans) == len(infos)
            in_updates.append(max(allocations.sizes(spans)))
            full_size.append(sum(nbytes >= largest for nbytes in allocations.sizes()))
    del allocations
    after = storages()
    held = {key: nbytes for key, nbytes in after.items() if before.get(key) != nbytes}
    reported = persistent_bytes([optimizer])
    return Held(
        elements=sum(torch.Size(shape).numel() for shape in infos),
        tensors=len(infos),
        largest=largest,
        held=sum(held.values()),
        largest_left=max(held.values()),
        reported={kind: nbytes - bound_before[kind] for kind, nbytes in reported.items()},
        in_updates=in_updates,
        full_size=full_size,
    )


@pytest.fixture(name="held", scope="module")
def held_fixture(ranks):
    """``held(stage, world_size)``: every rank's record, made once."""
    known: dict[tuple[int, int], list[Held]] = {}

    def of(stage: int, world_size: int) -> list[Held]:
        key = (stage, world_size)
        if key not in known:
            known[key] = ranks(world_size).run(hold, stage, timeout_s=TIMEOUT_S)
        return known[key]

    return of


def formula(stage: int, elements: int, world_size: int) -> float:
    if stage == 0:
        return 12 * elements
    if stage == 3:
        return 12 * elements / world_size
    return 4 * elements + 8 * elements / world_size


SHORT = ((0, 2), (1, 3), (2, 2), (3, 1), (3, 3))


def worlds(stages, world_size):
    """Their product; the tests of the default run share ``held`` of a few."""
    cells = itertools.product(stages, world_size)
    return [cell if cell in SHORT else exhaustive(*cell) for cell in cells]


@pytest.mark.nightly
@pytest.mark.parametrize("stage, world_size", worlds(STAGES, (1, 2, 3)))
def test_between_steps_a_rank_holds_what_the_formula_says(held, stage, world_size):
    for rank in held(stage, world_size):
        expected = formula(stage, rank.elements, world_size)
        # Padding: 16 bytes a tensor, and of each kind.  Adam counts steps in a float each.
        assert expected <= rank.held <= expected + (3 * 16 + 4) * rank.tensors
        assert sum(rank.reported.values()) == rank.held
        assert rank.reported["gradients"] == 0


# During the first step.


@pytest.mark.nightly
@pytest.mark.parametrize("stage, world_size", first(1, worlds((1, 2, 3), (2, 3))))
def test_updates_allocate_shards_only_even_where_states_are_made(held, stage, world_size):
    for rank in held(stage, world_size):
        # A rank's range of a layer may hold more of a weight than its share, and less of a bias.
        assert max(rank.in_updates) <= 4 * rank.elements / world_size + 16 < rank.largest
    for rank in held(0, world_size):  # what the largest allocation would be otherwise
        assert rank.in_updates[0] == rank.largest


@pytest.mark.nightly
@pytest.mark.parametrize("stage, world_size", worlds((1, 2, 3), (2, 3)))
def test_the_first_step_allocates_no_more_whole_buffers_than_the_others(held, stage, world_size):
    """Compilation included: gradients and gathered parameters are whole, moments never."""
    for rank in held(stage, world_size):
        first, *others = rank.full_size
        assert [first] * len(others) == others
    for rank in held(0, world_size):
        first, *others = rank.full_size
        assert [first - 2] * len(others) == others, "two moments at stage 0"


# Gathered parameters at stage 3.


class LiveGathers:
    """Which gathered buffers exist, by their storages, whoever refers to them.

    ``differences`` lists (counted, alive) bytes wherever, as a gather starts or the block ends,
    they are not the same.
    """

    PATIENCE_S = 5.0  # gloo's thread lets go of a buffer a moment after the wait has returned

    def __enter__(self) -> LiveGathers:
        self.storages: list[tuple[StorageWeakRef, int]] = []
        self.communicator: Communicator | None = None
        self.differences: list[tuple[int, int]] = []
        self.starts = 0
        start = Communicator.all_gather_start

        def watched_start(communicator, shard, world_size, into=None):
            self.communicator = communicator
            self._compare()
            self.starts += 1
            result = start(communicator, shard, world_size, into)
            storage = result.untyped_storage()
            self.storages.append((StorageWeakRef(storage), storage.nbytes()))
            return result

        self.patch = mock.patch.object(Communicator, "all_gather_start", watched_start)
        self.patch.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self.patch.__exit__(*error)
        self._compare()

    def _compare(self) -> None:
        counted = traffic_of(self.communicator).gathered_bytes
        deadline = time.monotonic() + self.PATIENCE_S
        while (alive := self._alive_bytes()) > counted and time.monotonic() < deadline:
            if self.differences:
                break  # patient once
            time.sleep(1e-3)
        if alive != counted:
            self.differences.append((counted, alive))

    def _alive_bytes(self) -> int:
        self.storages = [entry for entry in self.storages if not entry[0].expired()]
        return sum(nbytes for _, nbytes in self.storages)


class Layer(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class SixLayers(nn.Module):
    def __init__(self, tied: bool, vocabulary: int, width: int = 47):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(6))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def units(self) -> list[nn.Module]:
        """What one gather would serve, in the order of forward."""
        return [self.embedding, *self.layers, self.norm, self.head]


def padded_bytes(module: nn.Module, world_size: int) -> int:
    """Bytes of a unit: its parameters and their sum per rank are multiples of 16 bytes."""
    together = sum(-(-p.numel() // 4) * 4 for p in module.parameters())
    return 4 * world_size * -(-together // (4 * world_size)) * 4


def predict(model, tokens):
    with torch.no_grad():
        return model(tokens).mean()


def learn(model, optimizer, tokens):
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@dataclass
class Gathered:
    """Bytes gathered on one rank.  ``bound`` is the largest sum of two consecutive units."""

    bound: int
    largest: int
    in_step: int
    in_evaluation: int
    starts: int
    differences: list[tuple[int, int]]


def gathered(tied: bool, vocabulary: int, lowering: str) -> Gathered:
    torch._dynamo.reset()
    world_size = dist.get_world_size()
    model = SixLayers(tied, vocabulary)
    sizes = [padded_bytes(unit, world_size) for unit in model.units()]
    largest = max(padded_bytes(nn.ParameterList([p]), world_size) for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    communicator = Communicator.of(None)  # kept: only a living one is the step's own
    traffic = traffic_of(communicator)
    options = {"stage": 3, "lowering": lowering}
    step = torch.compile(learn, backend="zero", options={"lowering": "eager", **options})
    evaluation = torch.compile(predict, backend="zero", options={"lowering": "eager", **options})
    tokens = torch.randint(0, vocabulary, (1, 3))
    # What the program frees: not what is kept to be given out again (test_buffers.py).
    fresh = mock.patch.object(BufferPool, "empty", lambda self, numel, like: like.new_empty(numel))
    with fresh, LiveGathers() as live:
        step(model, optimizer, tokens)
        evaluation(model, tokens)
        traffic.reset_peak()
        step(model, optimizer, tokens)
        in_step = traffic.peak_gathered_bytes
        traffic.reset_peak()
        evaluation(model, tokens)
        in_evaluation = traffic.peak_gathered_bytes
    return Gathered(
        bound=max(one + two for one, two in zip(sizes, sizes[1:], strict=False)),
        largest=largest,
        in_step=in_step,
        in_evaluation=in_evaluation,
        starts=live.starts,
        differences=live.differences,
    )


def check_gathered(ranks, world_size: int, *arguments) -> None:
    for rank in ranks(world_size).run(gathered, *arguments, timeout_s=TIMEOUT_S):
        assert rank.largest <= rank.in_evaluation <= rank.bound
        assert rank.largest <= rank.in_step <= rank.bound
        assert rank.starts > 0
        assert rank.differences == [], "what the program freed is alive, or the reverse"


# A layer has 27 thousand elements.  With the larger vocabulary an embedding has twice as many.
@pytest.mark.nightly
@pytest.mark.parametrize("tied, vocabulary", first(1, each_value((False, True), (101, 1201))))
def test_at_most_two_consecutive_units_are_gathered_at_once(ranks_on_sockets, tied, vocabulary):
    check_gathered(ranks_on_sockets, 2, tied, vocabulary, "eager")


@pytest.mark.nightly
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_compiled_lowering_gathers_as_little(ranks_on_sockets, tied):
    check_gathered(ranks_on_sockets, 3, tied, 601, "inductor")
