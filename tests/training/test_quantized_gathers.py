"""A step that gathers in eight bits trains as one process does that rounds its parameters so."""

import copy
import functools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call

import zerofx
from tests.kit.models import features
from tests.kit.ranks import ranks_fixture, ranks_on_sockets_fixture  # noqa: F401
from tests.kit.trainings import (
    built,
    plain,
    program_of,
    run,
    zero,
)
from zerofx.__main__ import main
from zerofx.codegen.kernel import UpdateKernel
from zerofx.codegen.wires.blocks import dequantize, quantize

STEPS = 4
INT8 = {"gather_dtype": "int8"}


def rounded(values, places, num_shards):
    """Round whole values as their buckets' shards are, by the places that the program has given."""
    buckets = {}
    for name, (bucket, offset, shard_numel) in places.items():
        flat = buckets.setdefault(bucket, torch.zeros(num_shards * shard_numel))
        flat[offset : offset + values[name].numel()] = values[name].flatten()
    for bucket, flat in buckets.items():
        numel = flat.numel() // num_shards
        wire = quantize(flat, "int8", num_shards)
        buckets[bucket] = dequantize(wire, "int8", num_shards, numel, flat.dtype)
    return {
        name: buckets[bucket][offset:][: values[name].numel()].view(values[name].shape)
        for name, (bucket, offset, _) in places.items()
    }


class Rounding(torch.nn.Module):
    """Computes with rounded parameters, and hands gradients to the exact ones as they are."""

    def __init__(self, model, places, num_shards):
        super().__init__()
        self.model, self.places, self.num_shards = model, places, num_shards

    def forward(self, x):
        exact = dict(self.model.named_parameters())
        with torch.no_grad():
            near = rounded(exact, self.places, self.num_shards)
        there = {name: value + (near[name] - value).detach() for name, value in exact.items()}
        for name in there:  # the sum above may round once more
            there[name].data = near[name]
        return functional_call(self.model, there, (x,))


def train_alone(places, of: int, num_shards: int):
    """Train as ``of`` ranks would, with gradients that are added in their order."""
    model, optimizer = built()
    rounding = Rounding(model, places, num_shards)
    losses = []
    for number in range(STEPS):
        of_ranks = [part.chunk(of) for part in features(number, 8)]
        gradients = []
        for x, y in zip(*of_ranks, strict=True):
            loss = torch.nn.functional.mse_loss(rounding(x), y)
            loss.backward()
            losses.append(loss.item())
            gradients.append([p.grad for p in model.parameters()])
            optimizer.zero_grad()
        for parameter, *parts in zip(model.parameters(), *gradients, strict=True):
            if parts[0] is not None:
                parameter.grad = functools.reduce(torch.add, parts) / of
        optimizer.step()
        optimizer.zero_grad()
    return [losses[rank::of] for rank in range(of)], model.state_dict()


def train_coded(options, step=plain, steps=STEPS):
    """Return losses, exact parameters, as a state dict and in ``full_params``, and places."""
    torch._dynamo.reset()
    pair = built()
    compiled = zero(step, **{**INT8, **options})
    losses = run(compiled, pair, range(steps))
    table = program_of(compiled).table
    places = {
        info.name.removeprefix("model."): (
            info.place.bucket,
            info.place.offset,
            info.place.shard_numel,
        )
        for info in table
    }
    state = copy.deepcopy(pair[0].state_dict())
    with zerofx.full_params(pair[0]):
        whole = {name: value.detach().clone() for name, value in pair[0].named_parameters()}
    counts = {r.name: dict(r.counts) for r in program_of(compiled).reports}["quantize_gathers"]
    return losses, state, whole, places, counts, zerofx.explain(compiled)


def train_on_mesh(stages):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "gpu"))
    return train_coded({"process_group": mesh, "stage": dict(stages)})


def assert_trains_alike(results, num_shards=None):
    losses, parameters = train_alone(results[0][3], len(results), num_shards or len(results))
    for (found, state, whole, _, counts, _), wanted in zip(results, losses, strict=True):
        assert counts["quantised gathers"] >= counts["wires"] > 0
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
        for name, value in parameters.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-6)
            assert torch.equal(state[name], whole[name])
            assert torch.equal(state[name], results[0][1][name])


@pytest.mark.slow(reason="ranks compile and train")
def test_two_ranks_train_as_one_that_rounds(ranks):
    results = ranks(2).run(train_coded, {})
    assert_trains_alike(results)
    _, _, _, places, _, words = results[0]
    assert "quantize_gathers" in words and "quantised gathers: " in words
    assert len({bucket for bucket, *_ in places.values()}) < len(places)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [
        {"bucket": False},
        {"prefetch": False},
        {"bucket_bytes": 600},
        {"memory_budget": 10**6},
        {"lowering": "inductor"},
        {"offload": "optimizer"},
        {"offload": "params"},
        {"offload": "optimizer,params"},
        {"offload": "activations"},
        {"check_order": True},
        {"update_in_backward": False},
    ],
    ids=str,
)
def test_other_options_train_alike(ranks, options):
    assert_trains_alike(ranks(2).run(train_coded, options))


@pytest.mark.nightly
@pytest.mark.parametrize("outer, num_shards", ((0, 2), (3, 4)))
def test_a_mesh_trains_alike(ranks, outer, num_shards):
    results = ranks(4).run(train_on_mesh, (("node", outer), ("gpu", 3)))
    assert_trains_alike(results, num_shards)


@pytest.mark.nightly
def test_over_sockets_they_train_alike(ranks_on_sockets):
    assert_trains_alike(ranks_on_sockets(2).run(train_coded, {}))


@pytest.mark.nightly
def test_with_files_it_trains_alike(tmp_path):
    options = {"offload": "optimizer,params", "offload_tier": "nvme", "offload_dir": str(tmp_path)}
    assert_trains_alike([train_coded(options)])


@pytest.mark.nightly
def test_kernels_of_wires_train_alike(monkeypatch):
    made = []
    monkeypatch.setattr("zerofx.codegen.wires.kernels.FEWEST_COMPILED", 1)
    original = UpdateKernel.__call__

    def counted(kernel, *values):
        made.append(kernel.program.optimizer)
        return original(kernel, *values)

    monkeypatch.setattr(UpdateKernel, "__call__", counted)
    assert_trains_alike([train_coded({"lowering": "inductor"})])
    assert set(made) == {"quantize", "dequantize"}


@pytest.mark.nightly
def test_a_dumped_program_runs_again(tmp_path, capsys):
    train_coded({"dump": str(tmp_path)}, steps=1)
    (file,) = tmp_path.glob("rank0/*/*_quantize_gathers.py")
    assert "quantised gathers: " in file.read_text()
    assert main(["run", str(file), "--random"]) == 0
    assert "head.weight" in capsys.readouterr().out


@pytest.mark.nightly
def test_alone_the_only_rank_rounds_too():
    assert_trains_alike([train_coded({})])
