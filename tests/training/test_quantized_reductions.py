"""Ranks whose gradients travel as wires train as one process does that rounds and sums them so."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
import zerofx
from tests.kit.coded_reductions import rounded, summed
from tests.kit.ranks import ranks_fixture, ranks_on_sockets_fixture  # noqa: F401
from tests.kit.trainings import program_of

STEPS = 4
ROWS = 3
AXES = ("node", "gpu")


@functools.cache
def mesh_of(nodes: int, gpus: int):
    return init_device_mesh("cpu", (nodes, gpus), mesh_dim_names=AXES)


def built(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(37, 43), nn.GELU(), nn.Linear(43, 41)).to(dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model, optimizer, x, y):
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def batch(number: int, rank: int):
    generator = torch.Generator().manual_seed(100 * number + rank)
    x = torch.randn(ROWS, 37, generator=generator)
    return x, torch.tanh(x @ torch.ones(37, 41) / 6)


def scattered(flats, code, divisor):
    """Each rank's part of the sum of these buffers, one of each rank."""
    parts = zip(*(flat.chunk(len(flats)) for flat in flats), strict=True)
    if code:
        return [summed(of_rank, code, divisor) for of_rank in parts]
    return [functools.reduce(torch.add, of_rank) / divisor for of_rank in parts]


def reduced(flats, shape, codes, is_cut):
    """The mean of all ranks' buffers: inside nodes, and between them."""
    nodes, gpus = shape
    if nodes == 1:
        return torch.cat(scattered(flats, codes.get("gpu"), gpus))
    by_node = [
        scattered(flats[node * gpus : (node + 1) * gpus], codes.get("gpu"), 1)
        for node in range(nodes)
    ]
    found = []
    for shards in zip(*by_node, strict=True):
        numel = shards[0].numel()
        missing = -numel % nodes
        padded = [torch.cat([shard, shard.new_zeros(missing)]) for shard in shards]
        parts = scattered(padded, codes.get("node"), nodes * gpus)
        if codes.get("node") and not is_cut:
            parts = [rounded(part, codes["node"]) for part in parts]
        found.append(torch.cat(parts)[:numel])
    return torch.cat(found)


def train_alone(places, num_shards, shape, codes, is_cut):
    """Train as these ranks do, with the gradients of each in buckets as they have them."""
    model, optimizer = built()
    named = dict(model.named_parameters())
    num_ranks = shape[0] * shape[1]
    losses = []
    for number in range(STEPS):
        of_ranks = []
        for rank in range(num_ranks):
            x, y = batch(number, rank)
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            losses.append(loss.item())
            buckets = {}
            for name, (bucket, offset, shard_numel) in places.items():
                flat = buckets.setdefault(bucket, torch.zeros(num_shards * shard_numel))
                flat[offset : offset + named[name].numel()] = named[name].grad.flatten()
            of_ranks.append(buckets)
            optimizer.zero_grad()
        for name, (bucket, offset, _) in places.items():
            mean = reduced([buckets[bucket] for buckets in of_ranks], shape, codes, is_cut)
            gradient = mean[offset : offset + named[name].numel()]
            named[name].grad = gradient.view_as(named[name]).clone()
        optimizer.step()
        optimizer.zero_grad()
    return [losses[rank::num_ranks] for rank in range(num_ranks)], model.state_dict()


def train_coded(shape, stages, wire, **options):
    """Return losses, parameters, places, what the pass has counted, and what explain says."""
    torch._dynamo.reset()
    if shape[0] > 1:
        stages = dict(zip(AXES, reversed(stages), strict=True))
        options = {"process_group": mesh_of(*shape), "stage": stages, **options}
    else:
        options = {"stage": stages[0], **options}
    model, optimizer = built()
    options = {"lowering": "eager", "reduce_wire": wire, **options}
    compiled = torch.compile(train, backend="zero", options=options)
    rank = dist.get_rank() if dist.is_initialized() else 0
    losses = [compiled(model, optimizer, *batch(n, rank)).item() for n in range(STEPS)]
    program = program_of(compiled)
    places = {
        info.name.removeprefix("model."): (
            info.place.bucket,
            info.place.offset,
            info.place.shard_numel,
        )
        for info in program.table
    }
    with zerofx.full_params(model):
        state = {name: value.detach().clone() for name, value in model.named_parameters()}
    counts = {r.name: dict(r.counts) for r in program.reports}["quantize_reductions"]
    return losses, state, places, counts, zerofx.explain(compiled)


def assert_trains_alike(results, shape, stages, codes):
    places = results[0][2]
    is_cut = shape[0] > 1 and stages[1] > 0
    num_shards = shape[1] * (shape[0] if is_cut else 1)
    losses, parameters = train_alone(places, num_shards, shape, codes, is_cut)
    for (found, state, _, counts, words), wanted in zip(results, losses, strict=True):
        assert any(what.startswith("in ") for what in counts)
        assert "quantize_reductions" in words
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
        for name, value in parameters.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-6)
            assert torch.equal(state[name], results[0][1][name]), name


@pytest.mark.parametrize("code", ("int8", pytest.param("int4", marks=pytest.mark.nightly)))
def test_two_ranks_train_as_one_process_that_rounds(ranks, code):
    shape, stages = (1, 2), (3, 0)
    results = ranks(2).run(train_coded, shape, stages, code)
    assert_trains_alike(results, shape, stages, {"gpu": code})


@pytest.mark.nightly
@pytest.mark.parametrize("stage", (1, 2, 3))
def test_over_sockets_they_train_alike(ranks_on_sockets, stage):
    shape, stages = (1, 3), (stage, 0)
    results = ranks_on_sockets(3).run(train_coded, shape, stages, "bfloat16")
    assert_trains_alike(results, shape, stages, {"gpu": "bfloat16"})


WIRES = (
    {"node": "int4"},
    {"gpu": "int8", "node": "int4"},
    {"gpu": "bfloat16", "node": "int8"},
)


@pytest.mark.nightly
@pytest.mark.parametrize("codes", WIRES, ids=str)
@pytest.mark.parametrize("stages", ((1, 0), (2, 0), (3, 0), (3, 1), (2, 2), (3, 3)))
def test_four_ranks_on_a_mesh_train_as_one_process_that_rounds(ranks, stages, codes):
    results = ranks(4).run(train_coded, (2, 2), stages, codes)
    assert_trains_alike(results, (2, 2), stages, codes)


@pytest.mark.nightly
@pytest.mark.parametrize("stages", ((3, 0), (3, 3)))
def test_nodes_that_do_not_divide_shards_train_alike_over_sockets(ranks_on_sockets, stages):
    results = ranks_on_sockets(6).run(train_coded, (3, 2), stages, "int8")
    assert_trains_alike(results, (3, 2), stages, {"gpu": "int8", "node": "int8"})


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [
        {"bucket": False},
        {"prefetch": False},
        {"memory_budget": 10**7},
        {"offload": "optimizer"},
        {"offload": "optimizer,params"},
        {"offload": "activations"},
        {"validate": True},
        {"check_order": True},
        {"update_in_backward": False},
    ],
    ids=str,
)
def test_other_options_train_alike(ranks, options):
    results = ranks(4).run(functools.partial(train_coded, **options), (2, 2), (3, 0), "int8")
    assert_trains_alike(results, (2, 2), (3, 0), {"gpu": "int8", "node": "int8"})


@pytest.mark.nightly
def test_compiled_they_train_nearly_alike(ranks):
    """Kernels round otherwise, and a code may then be the next one."""
    train = functools.partial(train_coded, lowering="inductor")
    results = ranks(4).run(train, (2, 2), (3, 0), "int8")
    losses, _ = train_alone(results[0][2], 2, (2, 2), {"gpu": "int8", "node": "int8"}, False)
    for result, wanted in zip(results, losses, strict=True):
        torch.testing.assert_close(result[0], wanted, rtol=0, atol=1e-3)
        assert all(torch.equal(result[1][name], results[0][1][name]) for name in result[1])
