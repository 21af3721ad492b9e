"""``accumulate="local"``: between calls a gradient is each rank's own, and travels once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
from tests.kit.covering import each_value, exhaustive, only
from tests.kit.models import Mlp, features, squared_loss
from tests.kit.programs import capture, run_passes
from tests.kit.ranks import ranks_either_way_fixture, ranks_fixture  # noqa: F401
from tests.kit.traffic import traffic_of
from zerofx.errors import GraphError
from zerofx.ir import ops
from zerofx.ir.interface import recorded
from zerofx.runtime.access import unshard
from zerofx.runtime.comm.communication import Communicator
from zerofx.runtime.parameters.guarded import UnreducedGradient
from zerofx.runtime.parameters.registry import REGISTRY
from zerofx.verify.verifier import verify

STAGES = (0, 1, 2, 3)
MICRO_BATCHES = 3
LOCAL = {"accumulate": "local"}


def collect(model, *batch):
    loss = squared_loss(model, *batch) / MICRO_BATCHES
    loss.backward()
    return loss.detach()


def update(model, optimizer):
    norm = clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return norm


def compiled(function, stage: int, lowering: str = "eager", **options):
    options = {"stage": stage, "lowering": lowering, **options}
    return torch.compile(function, backend="zero", options=options)


def new_model(seed: int = 0) -> nn.Module:
    torch._dynamo.reset()
    torch.manual_seed(seed)
    return Mlp()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def micro_batches(number: int, rank: int, world_size: int):
    """One rank's share of the micro-batches of one update."""
    for micro in range(MICRO_BATCHES):
        batch = features(MICRO_BATCHES * number + micro, 4 * world_size)
        yield [tensor.chunk(world_size)[rank] for tensor in batch]


# Training.


def train(stage: int, accumulate: str, lowering: str) -> tuple[dict, list[dict]]:
    """The state dict after three updates, and what each call has sent."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = new_model(rank)
    optimizer = adamw(model)
    options = {"accumulate": accumulate}
    accumulating = compiled(collect, stage, lowering, **options)
    updating = compiled(update, stage, lowering, **options)
    communicator = Communicator.of(None)
    sent = []
    for number in range(3):
        for batch in micro_batches(number, rank, world_size):
            traffic_of(communicator).reset()
            accumulating(model, *batch)
            sent.append(traffic_of(communicator).snapshot())
        traffic_of(communicator).reset()
        updating(model, optimizer)
        sent.append(traffic_of(communicator).snapshot())
    return model.state_dict(), sent[-MICRO_BATCHES - 1 :]


def expected_state(world_size: int) -> dict:
    """The same in one eager process, on all ranks' batches."""
    model = new_model()
    optimizer = adamw(model)
    for number in range(3):
        for batch in micro_batches(number, 0, 1) if world_size == 1 else joined(number, world_size):
            collect(model, *batch)
        update(model, optimizer)
    return model.state_dict()


def joined(number: int, world_size: int):
    for micro in range(MICRO_BATCHES):
        yield features(MICRO_BATCHES * number + micro, 4 * world_size)


def reduced(sent: dict) -> tuple[int, int]:
    """Bytes and number of what was reduced, norms apart."""
    collectives = sent["collectives"]
    scalars = 1 if sent["sent_bytes"].get("scalar") else 0
    number = collectives.get("reduce_scatter", 0) + collectives.get("all_reduce", 0) - scalars
    return sent["sent_bytes"].get("reduce", 0), number


# Of 113 elements, on two ranks: what leaves a rank of everything, padding included, and in how many
# collectives.  An all-reduce sends half of it twice; at stage 0 there is one for each layer.
ALL_REDUCED, IN_BUCKETS, REDUCE_SCATTERED = (464, 4), (480, 2), (240, 2)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("stage", "lowering"),
    [
        *((stage, "eager") for stage in STAGES),
        exhaustive(0, "inductor"),
        (3, "inductor"),
    ],
)
def test_gradients_travel_once_per_update(stage, lowering, ranks):  # noqa: F811
    local = ranks(2).run(train, stage, "local", lowering)
    sharded = ranks(2).run(train, stage, "sharded", lowering)
    expected = expected_state(2)
    for rank, (state, sent) in enumerate(local):
        nothing = [(0, 0)] * MICRO_BATCHES
        once = IN_BUCKETS if stage == 0 else REDUCE_SCATTERED
        assert list(map(reduced, sent)) == [*nothing, once]
        each = ALL_REDUCED if stage == 1 else once
        assert list(map(reduced, sharded[rank][1])) == [each] * MICRO_BATCHES + [(0, 0)]
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(sharded[rank][0][name], state[name], rtol=1e-5, atol=1e-6)
            assert torch.equal(state[name], local[0][0][name])


@pytest.mark.nightly
@pytest.mark.parametrize("stage", (exhaustive(1), 3))
def test_three_ranks_train_as_one_process(stage, ranks):  # noqa: F811
    expected = expected_state(3)
    for state, _ in ranks(3).run(train, stage, "local", "eager"):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


# Between calls.


def collected(stage: int, calls: int = 2) -> nn.Module:
    model = new_model()
    accumulating = compiled(collect, stage, **LOCAL)
    for number in range(calls):
        accumulating(model, *features(number, 4))
    return model


@pytest.mark.parametrize("stage", only((3,), STAGES))
def test_reading_between_calls_is_an_error_with_words(stage):
    model = collected(stage)
    gradient = model.body.weight.grad
    assert type(gradient) is UnreducedGradient and gradient.shape == (11, 6)
    assert repr(gradient).startswith("UnreducedGradient('body.weight'")
    for read in (
        lambda: gradient.norm(),
        lambda: gradient + 1,
        lambda: gradient.clone(),
        lambda: gradient.mul_(0.5),
        lambda: gradient.tolist(),
    ):
        with pytest.raises(RuntimeError, match="not yet averaged over the ranks") as caught:
            read()
        assert "accumulate='local'" in str(caught.value) and "body.weight" in str(caught.value)


@pytest.mark.parametrize("stage", only((2,), (0, 2)))
def test_an_eager_backward_into_one_is_explained(stage):
    model = collected(stage)
    with pytest.raises(RuntimeError, match="eager backward.*'head.*accumulate='local'"):
        squared_loss(model, *features(0, 4)).backward()
    model.zero_grad()
    squared_loss(model, *features(0, 4)).backward()


@pytest.mark.nightly
@pytest.mark.parametrize("stage, set_to_none", each_value(STAGES, (True, False)))
def test_zero_grad_forgets_what_was_collected(stage, set_to_none):
    model = collected(stage)
    model.zero_grad(set_to_none=set_to_none)
    accumulating = compiled(collect, stage, **LOCAL)
    for number in (5, 6):
        accumulating(model, *features(number, 4))
    kept = {name: REGISTRY.lookup(p).gradient for name, p in model.named_parameters()}
    twin = new_model()
    for number in (5, 6):
        collect(twin, *features(number, 4))
    for name, parameter in twin.named_parameters():
        assert torch.equal(kept[name], parameter.grad), name


def test_sums_are_made_in_place():
    model = collected(2, calls=1)
    before = {name: REGISTRY.lookup(p).gradient for name, p in model.named_parameters()}
    compiled(collect, 2, **LOCAL)(model, *features(1, 4))
    for name, parameter in model.named_parameters():
        assert REGISTRY.lookup(parameter).gradient.data_ptr() == before[name].data_ptr()


@pytest.mark.parametrize("stage", only((0, 3), STAGES))
def test_gradients_that_are_one_tensor_are_kept_apart(stage):
    """Backward of ``a + b`` hands both the same memory, and that of ``a * b`` the other's."""
    torch._dynamo.reset()
    values = [torch.randn(4, 5) for _ in range(4)]
    parameters = nn.ParameterList(nn.Parameter(value.clone()) for value in values)

    def step(parameters, x):
        a, b, c, d = parameters
        (((a + b) * x).sum() + (c * d).sum()).backward()

    x = torch.randn(4, 5)
    compiled(step, stage, **LOCAL)(parameters, x)
    bounds = [REGISTRY.lookup(parameter) for parameter in parameters]
    parameters[0].grad.zero_()
    expected = (torch.zeros_like(x), x, values[3], values[2])
    for bound, value in zip(bounds, expected, strict=True):
        # What depends on parameters alone is an average already: at stage 3, a shard of one.
        assert torch.equal(bound.gradient.flatten()[:20], value.flatten())
    pointers = [p.untyped_storage().data_ptr() for p in (*parameters, x) if p.numel()]
    kept = [bound.gradient.untyped_storage().data_ptr() for bound in bounds]
    assert len(set(kept)) == 4 and not set(kept) & (set(pointers) - {0})


def unsharded(stage: int) -> dict:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = new_model()
    accumulating = compiled(collect, stage, **LOCAL)
    for batch in micro_batches(0, rank, world_size):
        accumulating(model, *batch)
    unshard(model)
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.slow(reason="ranks compile and train")
@pytest.mark.parametrize("stage", only((3,), (0, 3)))
def test_unshard_averages_what_was_collected(stage, ranks):  # noqa: F811
    twin = new_model()
    for batch in joined(0, 2):
        collect(twin, *batch)
    for gradients in ranks(2).run(unsharded, stage):
        for name, parameter in twin.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-6)


# Functions that read.


def read_and_clip(stage: int) -> tuple:
    """Norms of a function that only reads, and of one that clips twice without an update."""
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def norms(model):
        return [p.grad.norm() for p in model.parameters()]

    def clip(model):
        return clip_grad_norm_(model.parameters(), 1e-2)

    model = new_model()
    optimizer = adamw(model)
    accumulating, reading, clipping, updating = (
        compiled(function, stage, **LOCAL) for function in (collect, norms, clip, update)
    )
    found = []
    for batch in micro_batches(0, rank, world_size):
        accumulating(model, *batch)
        found.append(torch.stack(reading(model)))
    found.append(clipping(model))
    accumulating(model, *next(micro_batches(1, rank, world_size)))
    found.append(torch.stack(reading(model)))
    updating(model, optimizer)
    return found, model.state_dict()


@pytest.mark.slow(reason="ranks compile and train")
@pytest.mark.parametrize("stage", only((3,), STAGES))
def test_any_function_that_reads_sees_the_average(stage, ranks):  # noqa: F811
    twin = new_model()
    optimizer = adamw(twin)
    expected = []

    def norms():
        return torch.stack([p.grad.norm() for p in twin.parameters()])

    for batch in joined(0, 2):
        collect(twin, *batch)
        expected.append(norms())
    expected.append(clip_grad_norm_(twin.parameters(), 1e-2))
    collect(twin, *next(joined(1, 2)))
    expected.append(norms())
    update(twin, optimizer)
    for found, state in ranks(2).run(read_and_clip, stage):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        for name, value in twin.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.slow(reason="steps are compiled and run")
@pytest.mark.parametrize("stage", only((3,), STAGES))
def test_a_function_without_the_option_refuses_them(stage):
    model = collected(stage)
    optimizer = adamw(model)
    before = {name: REGISTRY.lookup(p).gradient for name, p in model.named_parameters()}
    for function, arguments in ((update, (model, optimizer)), (collect, (model, *features(0, 4)))):
        with pytest.raises(RuntimeError, match="options=.'accumulate': 'local'.") as caught:
            compiled(function, stage)(*arguments)
        assert "'body.weight'" in str(caught.value)
    for name, parameter in model.named_parameters():
        assert REGISTRY.lookup(parameter).gradient is before[name]
    compiled(update, stage, **LOCAL)(model, optimizer)


@pytest.mark.parametrize("stage", only((0,), (0, 1)))
def test_a_whole_average_is_not_added_to(stage):
    """It would stay readable as ``p.grad``, and be an average no more."""
    model = new_model()
    compiled(collect, stage)(model, *features(0, 4))
    before = model.body.weight.grad.clone()
    with pytest.raises(RuntimeError, match="without accumulate='local', as a whole average"):
        compiled(collect, stage, **LOCAL)(model, *features(1, 4))
    assert torch.equal(model.body.weight.grad, before)


def sharded_then_local(stage: int) -> dict:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = new_model()
    functions = [compiled(collect, stage), *2 * [compiled(collect, stage, **LOCAL)]]
    batches = micro_batches(0, rank, world_size)
    for function, batch in zip(functions, batches, strict=True):
        function(model, *batch)
    unshard(model)
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.nightly
@pytest.mark.parametrize("stage, world_size", each_value((2, 3), (2, 3)))
def test_shards_of_an_average_are_added_to(stage, world_size, ranks):  # noqa: F811
    twin = new_model()
    for batch in joined(0, world_size):
        collect(twin, *batch)
    for gradients in ranks(world_size).run(sharded_then_local, stage):
        for name, parameter in twin.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-6)


# Programs.


def accumulating_program(world_size: int = 2):
    model = new_model()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return capture(lambda *batch: collect(model, *batch), *features(0, 4), world_size=world_size)


@pytest.mark.parametrize("stage", only((0, 3), STAGES))
def test_collecting_takes_no_reduction(stage):
    captured = accumulating_program()
    reports = run_passes(captured, stage=stage, **LOCAL)
    assert reports["data_parallel"].counts["left unreduced"] == 4
    targets = [node.target for node in captured.graph.nodes]
    assert ops.reduce_scatter_start not in targets and ops.all_reduce_start not in targets
    assert targets.count(torch.ops.aten.add_.Tensor) == 4
    assert torch.ops.aten.copy_.default not in targets


def test_a_gradient_that_is_not_declared_unreduced_is_found():
    captured = accumulating_program()
    run_passes(captured, stage=2, **LOCAL)
    facts = frozenset({"averaged_gradients"})
    verify(captured.gm, captured.table, facts)
    assert recorded(captured.graph).gradients
    recorded(captured.graph).unreduced.clear()
    with pytest.raises(GraphError, match="neither averaged over the ranks nor declared"):
        verify(captured.gm, captured.table, facts)
