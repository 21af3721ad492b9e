"""Parameters that live in their bucket's memory, at stages 1 and 2, on gloo ranks."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
import zerofx.compiler.rewrite
from tests.kit.covering import nightly, only
from tests.kit.models import features, squared_loss
from tests.kit.ranks import ranks_fixture, ranks_on_sockets_fixture  # noqa: F401
from zerofx.runtime.access import unshard
from zerofx.runtime.parameters.registry import REGISTRY

FEATURES = features(0, 1)[0].shape[1]


@pytest.fixture(name="group", params=("ranks", nightly("ranks_on_sockets")))
def group_fixture(request):
    """``group(n)``: n ranks that read each other's memory, or do not."""
    return request.getfixturevalue(request.param)


class Alone:
    """This process instead of ranks."""

    def run(self, function: Callable, *arguments) -> None:
        function(*arguments)


@pytest.fixture(params=("alone", nightly("ranks"), nightly("ranks_on_sockets")))
def world(request):
    return Alone() if request.param == "alone" else request.getfixturevalue(request.param)(2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(FEATURES, 11), nn.Linear(11, 11)])
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(11, 3)

    def forward(self, x):
        for layer in self.layers:
            x = F.gelu(layer(x))
        return self.head(x) * self.scale


def train_step(model, optimizer, x, y):
    loss = squared_loss(model, x, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


class Trained:
    """A model that is trained on this rank's rows, eagerly lowered."""

    def __init__(self, stage: int, model: nn.Module | None = None):
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model = Net() if model is None else model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        options = {"stage": stage, "lowering": "eager"}
        self.step = torch.compile(train_step, backend="zero", options=options)

    def train(self, *numbers: int) -> list[float]:
        losses = []
        for number in numbers:
            rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
            batch = features(10 * number + rank, 4)
            dtype = next(self.model.parameters()).dtype
            batch = [tensor.to(dtype) for tensor in batch]
            losses.append(self.step(self.model, self.optimizer, *batch).item())
        return losses

    def values(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def memories_of(model: nn.Module) -> list:
    return [REGISTRY.lookup(parameter).memory for parameter in model.parameters()]


def assert_equal(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == other.keys()
    for name, value in other.items():
        assert torch.equal(mine[name], value), name


@contextlib.contextmanager
def all_copies_made() -> Iterator[None]:
    """Programs that first run in here make all their copies."""
    found = zerofx.compiler.rewrite.PIPELINE
    without = tuple(step for step in found if step.name != "write_back")
    zerofx.compiler.rewrite.PIPELINE = without
    try:
        yield
    finally:
        zerofx.compiler.rewrite.PIPELINE = found


def trained_with_copies(stage: int, *numbers: int) -> Trained:
    with all_copies_made():
        trained = Trained(stage)
        trained.train(*numbers)
    return trained


def check_same_values(stage: int) -> None:
    trained = Trained(stage)
    trained.train(0, 1, 2)
    assert_equal(trained.values(), trained_with_copies(stage, 0, 1, 2).values())
    for parameter in trained.model.parameters():
        memory = REGISTRY.lookup(parameter).memory
        start, end = memory.flat.data_ptr(), memory.flat.data_ptr() + memory.flat.nbytes
        assert start <= parameter.data_ptr() < end
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
        assert parameter._base is None and parameter.is_leaf


@pytest.mark.slow(reason="ranks compile and train")
@pytest.mark.parametrize("world_size, stage", only(((2, 2),), [(1, 1), (2, 1), (2, 2), (3, 2)]))
def test_training_without_copies_gives_the_same_bits(group, world_size, stage):
    group(world_size).run(check_same_values, stage)


def check_alias(stage: int) -> None:
    trained = Trained(stage)
    weight = trained.model.layers[0].weight
    alias, address = weight.detach(), weight.data_ptr()
    trained.train(0, 1)
    assert weight.data_ptr() == address and torch.equal(alias, weight)
    assert_equal(trained.values(), trained_with_copies(stage, 0, 1).values())
    del alias
    trained.train(2)
    assert weight.data_ptr() != address
    alias = weight.detach()  # taken where it lives now: stays up to date as in eager torch
    trained.train(3)
    assert torch.equal(alias, weight)
    assert_equal(trained.values(), trained_with_copies(stage, 0, 1, 2, 3).values())


@pytest.mark.nightly
@pytest.mark.parametrize("stage", only((2,), [1, 2]))
def test_a_parameter_that_somebody_looks_at_stays_where_it_is(world, stage):
    world.run(check_alias, stage)


def check_shared_between_processes() -> None:
    trained = Trained(1)
    weight = trained.model.head.weight
    weight.share_memory_()
    address = weight.data_ptr()
    trained.train(0)
    assert weight.is_shared() and weight.data_ptr() == address
    assert_equal(trained.values(), trained_with_copies(1, 0).values())


@pytest.mark.nightly
def test_memory_shared_with_other_processes_stays_shared(world):
    world.run(check_shared_between_processes)


def check_other_data(stage: int) -> None:
    """What ``p.data = ...`` and ``model.to`` put elsewhere comes home with its new values."""
    found = []
    for context in (contextlib.nullcontext, all_copies_made):
        with context():
            trained = Trained(stage)
            trained.train(0)
            trained.model.head.bias.data = torch.full((3,), 0.5)
            trained.train(1, 2)
            trained.model.to(torch.float64)
            for state in trained.optimizer.state.values():
                state.update({k: v.double() for k, v in state.items() if v.dim()})
            trained.train(3, 4)
        found.append(trained)
    moved, other = found
    assert_equal(moved.values(), other.values())
    assert all(memory.flat.dtype == torch.float64 for memory in memories_of(moved.model))


@pytest.mark.nightly
@pytest.mark.parametrize("stage", only((2,), [1, 2]))
def test_parameters_with_new_memory_move_in_again(world, stage):
    world.run(check_other_data, stage)


def check_saved() -> None:
    trained = Trained(2)
    trained.train(0)
    weight = trained.model.layers[0].weight
    file = io.BytesIO()
    torch.save(weight, file)
    assert len(file.getvalue()) < weight.nbytes + 2000
    twin = copy.deepcopy(trained.model)
    expected = trained.values()
    trained.train(1)
    assert_equal({n: v.clone() for n, v in twin.state_dict().items()}, expected)


@pytest.mark.slow(reason="a step is compiled, and ranks compile and train at night")
def test_saving_or_copying_a_parameter_takes_nothing_of_its_neighbours(world):
    world.run(check_saved)


def check_unshard(stage: int) -> None:
    trained = Trained(stage)
    trained.train(0)
    flats = [weakref.ref(memory.flat) for memory in memories_of(trained.model)]
    expected = trained.values()
    unshard(trained.model, trained.optimizer)
    assert_equal(trained.values(), expected)
    for parameter in trained.model.parameters():
        assert parameter.untyped_storage().resizable()  # torch's own
    gc.collect()
    assert not any(reference() is not None for reference in flats)
    trained.train(1)
    assert_equal(trained.values(), trained_with_copies(stage, 0, 1).values())


@pytest.mark.nightly
@pytest.mark.parametrize("stage", only((2,), [1, 2]))
def test_unshard_gives_parameters_memory_of_their_own(world, stage):
    world.run(check_unshard, stage)


def check_stale_graph() -> None:
    trained = Trained(1)
    trained.train(0)
    x, y = features(0, 4)
    loss = squared_loss(trained.model, x, y)
    trained.train(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.slow(reason="a step is compiled, and ranks compile and train at night")
def test_backward_through_a_graph_built_on_old_values_says_so(world):
    world.run(check_stale_graph)


def check_a_dropped_model_is_freed() -> None:
    trained = Trained(2)
    trained.train(0)
    flats = [weakref.ref(memory.flat) for memory in memories_of(trained.model)]
    step = trained.step
    del trained
    gc.collect()
    assert not any(reference() is not None for reference in flats)
    assert step is not None


@pytest.mark.slow(reason="a step is compiled, and ranks compile and train at night")
def test_the_memory_goes_with_the_model(world):
    world.run(check_a_dropped_model_is_freed)
