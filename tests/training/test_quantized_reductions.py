"""Ranks whose gradients travel as wires train as one process does that rounds and sums them so."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
import zerofx
from tests.kit.coded_reductions import rounded, saves, summed
from tests.kit.ranks import ranks_fixture, ranks_on_sockets_fixture  # noqa: F401
from tests.kit.trainings import program_of
from zerofx.runtime.parameters.registry import REGISTRY

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


class Reductions:
    """Means of all ranks' buffers as ranks of this shape compute them, and what they lose.

    Over the axes in ``feedback`` what was lost of a bucket is added to what is sent next.
    """

    def __init__(self, shape, codes, is_cut, feedback):
        self.nodes, self.gpus = shape
        self.codes, self.is_cut, self.feedback = codes, is_cut, feedback
        self.lost = {}

    def mean(self, bucket, flats):
        """The mean of the ranks' buffers: summed inside nodes, and then between them."""
        if self.nodes == 1:
            return torch.cat(self.scattered(flats, "gpu", (bucket,), self.gpus))
        by_node = [
            self.scattered(flats[node * self.gpus : (node + 1) * self.gpus], "gpu", (bucket, node))
            for node in range(self.nodes)
        ]
        found = []
        for inner, shards in enumerate(zip(*by_node, strict=True)):
            numel = shards[0].numel()
            missing = -numel % self.nodes
            padded = [torch.cat([shard, shard.new_zeros(missing)]) for shard in shards]
            whole = self.nodes * self.gpus
            parts = self.scattered(padded, "node", (bucket, inner), whole)
            if self.has_wire("node", padded) and not self.is_cut:
                parts = [
                    self.sent_back(part, (bucket, inner), node) for node, part in enumerate(parts)
                ]
            found.append(torch.cat(parts)[:numel])
        return torch.cat(found)

    def has_wire(self, axis, flats):
        return axis in self.codes and saves(flats[0], self.codes[axis], len(flats))

    def scattered(self, flats, axis, where, divisor=1):
        """Each rank's part of the sum of these buffers, one of each rank along an axis."""
        if not self.has_wire(axis, flats):
            parts = zip(*(flat.chunk(len(flats)) for flat in flats), strict=True)
            return [functools.reduce(torch.add, of_rank) / divisor for of_rank in parts]
        code = self.codes[axis]
        if axis in self.feedback:
            lost = [self.lost.get((axis, *where, place), 0.0) for place in range(len(flats))]
            flats = [flat + error for flat, error in zip(flats, lost, strict=True)]
            for place, flat in enumerate(flats):
                back = torch.cat([rounded(part, code) for part in flat.chunk(len(flats))])
                self.lost[axis, *where, place] = flat - back
        parts = zip(*(flat.chunk(len(flats)) for flat in flats), strict=True)
        return [summed(of_rank, code, divisor) for of_rank in parts]

    def sent_back(self, part, where, place):
        back = rounded(part, self.codes["node"])
        if "node" in self.feedback:
            own = self.lost["node", *where, place][place * part.numel() :][: part.numel()]
            own += (part - back) * (self.nodes * self.gpus)
        return back


def train_alone(places, num_shards, shape, codes, is_cut, feedback=None):
    """Train as these ranks do, with the gradients of each in buckets as they have them."""
    model, optimizer = built()
    if feedback is None:
        feedback = [axis for axis in ("node",) if codes.get(axis, "bfloat16") != "bfloat16"]
    reductions = Reductions(shape, codes, is_cut, feedback)
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
        means = {
            bucket: reductions.mean(bucket, [buckets[bucket] for buckets in of_ranks])
            for bucket in of_ranks[0]
        }
        for name, (bucket, offset, _) in places.items():
            gradient = means[bucket][offset : offset + named[name].numel()]
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


def assert_trains_alike(results, shape, stages, codes, feedback=None):
    places = results[0][2]
    is_cut = shape[0] > 1 and stages[1] > 0
    num_shards = shape[1] * (shape[0] if is_cut else 1)
    losses, parameters = train_alone(places, num_shards, shape, codes, is_cut, feedback)
    for (found, state, _, counts, words), wanted in zip(results, losses, strict=True):
        assert any(what.startswith("in ") for what in counts)
        assert "quantize_reductions" in words
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
        for name, value in parameters.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-6)
            assert torch.equal(state[name], results[0][1][name]), name


@pytest.mark.slow(reason="ranks compile and train")
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


# Error feedback


@pytest.mark.nightly
@pytest.mark.parametrize("stages", ((1, 0), (3, 0), (3, 1), (3, 3)))
@pytest.mark.parametrize("feedback", ({"gpu": 1, "node": 1}, {"gpu": 1, "node": 0}, 0), ids=str)
def test_four_ranks_keep_what_their_wires_lose(ranks, stages, feedback):
    codes = {"gpu": "int8", "node": "int4"}
    train = functools.partial(train_coded, error_feedback=feedback)
    results = ranks(4).run(train, (2, 2), stages, codes)
    on = [axis for axis in AXES if feedback and feedback[axis]]
    assert_trains_alike(results, (2, 2), stages, codes, on)


def errors_of(model):
    found = {}
    for name, parameter in model.named_parameters():
        bound = REGISTRY.lookup(parameter)
        found[name] = bound and bound.errors.get("data")
    return found


def share_and_drop():
    """Two functions of a model, which then is a plain one for a while."""
    torch._dynamo.reset()
    model, optimizer = built()
    options = {"lowering": "eager", "reduce_wire": "int4", "error_feedback": 1}

    def other(x, y):
        loss = nn.functional.mse_loss(model(x), y) * 2.0
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    one, two = (torch.compile(step, backend="zero", options=options) for step in (train, other))
    one(model, optimizer, *batch(0, dist.get_rank()))
    first = errors_of(model)
    values = {name: error.clone() for name, error in first.items()}
    two(*batch(1, dist.get_rank()))
    second = errors_of(model)
    is_shared = all(first[name] is second[name] for name in first)
    has_changed = all(not torch.equal(values[name], second[name]) for name in first)
    in_one_bucket = first["0.weight"] is first["0.bias"] is not first["2.weight"]
    zerofx.unshard(model, optimizer)
    none = errors_of(model)
    one(model, optimizer, *batch(2, dist.get_rank()))
    third = errors_of(model)
    is_new = all(third[name] is not first[name] for name in first)
    return is_shared, has_changed, in_one_bucket, not any(none.values()), is_new


@pytest.mark.nightly
def test_functions_of_a_model_share_errors_until_it_is_whole(ranks):
    assert ranks(2).run(share_and_drop) == [(True,) * 5] * 2


def train_scaled(shape, scale, overflows):
    """Train with a loss scale; the last losses, and the errors."""
    torch._dynamo.reset()
    model, optimizer = built()
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**6)

    def step(x, y):
        loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    options = {"lowering": "eager", "reduce_wire": "int4", "process_group": mesh_of(*shape)}
    compiled = torch.compile(step, backend="zero", options={**options, "stage": 2})
    losses = []
    for number in range(STEPS):
        if number == overflows:
            x, y = batch(number, dist.get_rank())
            before = [p.detach().clone() for p in model.parameters()]
            kept = {k: e.clone() for k, e in errors_by_axis(model).items()}
            compiled(x * (float("inf") if dist.get_rank() == 1 else 1.0), y)
            after = errors_by_axis(model)
            assert kept.keys() == after.keys() and kept
            assert all(torch.equal(kept[key], after[key]) for key in kept)
            assert all(map(torch.equal, before, model.parameters()))
            scaler._scale.fill_(scale)
        losses.append(compiled(*batch(number, dist.get_rank())).item())
    return losses


def errors_by_axis(model):
    return {
        (name, axis): error
        for name, parameter in model.named_parameters()
        for axis, error in REGISTRY.lookup(parameter).errors.items()
    }


@pytest.mark.nightly
def test_a_loss_scale_of_a_power_of_two_changes_nothing(ranks):
    plain, scaled, skipped = (
        ranks(4).run(train_scaled, (2, 2), scale, overflows)
        for scale, overflows in ((1.0, None), (1024.0, None), (1024.0, 2))
    )
    assert plain == scaled == skipped
