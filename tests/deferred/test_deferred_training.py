"""Models constructed under deferred_init and trained: like plain ones, and in less memory."""

from __future__ import annotations

import copy
import gc
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
import zerofx
from tests.deferred.test_deferred_init import PUT_OFF
from tests.kit.covering import only
from tests.kit.models import ConvNet, Gpt, Mlp, features, language_loss, squared_loss, tokens
from tests.kit.models import images as images_of
from tests.kit.ranks import ranks_fixture  # noqa: F401
from zerofx.backend import zero
from zerofx.deferred import replay
from zerofx.deferred.guards import DeferredParameter
from zerofx.deferred.ledger import LEDGER
from zerofx.runtime.parameters.guarded import ShardedParameter
from zerofx.runtime.parameters.registry import REGISTRY

STEPS = 3
EAGER = {"lowering": "eager"}
OFFLOAD = {"offload": "optimizer,params"}


def compiled(model, optimizer, options, loss_of=squared_loss):
    def step(inputs, targets):
        loss = loss_of(model, inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return torch.compile(step, backend="zero", options={**EAGER, **options})


def trained(make_late, options, make=Mlp, batch=features, loss_of=squared_loss):
    """Losses and final values; with ``make_late`` the model is constructed under deferred_init."""
    torch._dynamo.reset()
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    if make_late:
        with zerofx.deferred_init(exact=True):
            model = make()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    identities = list(map(id, model.parameters()))
    step = compiled(model, optimizer, options, loss_of)
    losses = [step(*batch(2 * number + rank, 4)).item() for number in range(STEPS)]
    assert list(map(id, model.parameters())) == identities
    assert len(LEDGER) == 0
    values = {name: value.clone() for name, value in model.state_dict().items()}
    return losses, values


def check_same(one, other):
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    assert all(torch.equal(one[1][name], other[1][name]) for name in one[1])


@pytest.mark.nightly
@pytest.mark.parametrize("stage", only((3,), [1, 3]))
def test_alone_a_model_with_tied_weights_trains_like_a_plain_one(stage):
    how = {"stage": stage}, Gpt, tokens, language_loss
    check_same(trained(False, *how), trained(True, *how))


@pytest.mark.slow(reason="ranks compile and train")
@pytest.mark.parametrize("stage", only((3,), range(4)))
def test_two_ranks_train_like_those_of_a_plain_model(ranks, stage):
    plain = ranks(2).run(trained, False, {"stage": stage})
    late = ranks(2).run(trained, True, {"stage": stage})
    for one, other in zip(plain, late, strict=True):
        check_same(one, other)


@pytest.mark.nightly
def test_first_values_are_the_same_for_all_world_sizes_and_stages(ranks):
    """By default too."""
    alone = first_values(0, seeds=(0,))
    for world_size, stage in ((1, 3), (2, 0), (2, 1), (2, 2), (2, 3), (3, 3)):
        for values in ranks(world_size).run(first_values, stage, (0,)):
            assert all(torch.equal(alone[name], values[name]) for name in alone)


@pytest.mark.parametrize("stage", only((3,), [1, 3]))
def test_ranks_with_different_seeds_start_from_rank_0s_values(ranks, stage):
    alone = first_values(0, seeds=(5,))
    for values in ranks(2).run(first_values, stage, (5, 6)):
        assert all(torch.equal(alone[name], values[name]) for name in alone)


def first_values(stage, seeds):
    """A model's values after its first zero-compiled call, which only evaluates."""
    torch._dynamo.reset()
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(seeds[rank % len(seeds)])
    with zerofx.deferred_init():
        model = Mlp()

    def evaluate(x, y):
        return squared_loss(model, x, y)

    evaluate = torch.compile(evaluate, backend="zero", options={"stage": stage, **EAGER})
    with torch.no_grad():
        evaluate(*features(0, 4))
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.nightly
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_shards_that_leave_the_device_are_the_same(ranks, tier, tmp_path):
    offload = dict(OFFLOAD)
    if tier == "nvme":
        offload |= {"offload_tier": "nvme", "offload_dir": [str(tmp_path)]}
    plain = ranks(2).run(trained, False, {"stage": 3})
    late = ranks(2).run(trained, True, {"stage": 3, **offload})
    for one, other in zip(plain, late, strict=True):
        check_same(one, other)


# How much is whole


class Wide(nn.Module):
    """Layers of 4 MiB, so that each travels alone."""

    def __init__(self, layers=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def most_whole(make_late, options):
    """The most bytes of parameters' storages, and of shards in host memory, while a model binds."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    if make_late:
        with zerofx.deferred_init():
            model = Wide()
    else:
        model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    step = compiled(model, optimizer, options)
    seen = []
    free = type(REGISTRY)._guard_again

    def look(registry, bound):
        free(registry, bound)
        whole = sum(p.untyped_storage().nbytes() for p in model.parameters())
        seen.append((whole, REGISTRY.host.nbytes))

    REGISTRY.host.peak_nbytes = 0
    with mock.patch.object(type(REGISTRY), "_guard_again", look):
        step(torch.ones(2, 1024), torch.zeros(2, 1024))
    assert len(seen) == 8
    return seen


@pytest.mark.nightly
def test_one_parameter_is_whole_at_a_time(ranks):
    largest = 4 * 1024 * 1024
    for seen in ranks(2).run(most_whole, True, {"stage": 3}):
        assert max(whole for whole, _ in seen) <= largest + 4096
    for seen in ranks(2).run(most_whole, False, {"stage": 3}):  # a plain one shrinks as it binds
        wholes = [whole for whole, _ in seen]
        assert wholes == sorted(wholes, reverse=True) and wholes[-1] == 0


@pytest.mark.nightly
def test_shards_are_in_their_file_before_the_next_are_made(ranks, tmp_path):
    options = {"stage": 3, **OFFLOAD, "offload_tier": "nvme", "offload_dir": [str(tmp_path)]}
    cache = 13 * 1024 * 1024  # two of the largest buckets, which are of a layer's states
    options |= {"offload_cache_bytes": cache, "bucket_bytes": 4 * 1024 * 1024}
    layer = 4 * 1024 * 1025 // 2  # of which a rank has half
    for seen in ranks(2).run(most_whole, True, options):
        assert max(host for _, host in seen) <= cache + 2 * layer


# What a step may find


def test_only_what_a_function_uses_is_made():
    torch.manual_seed(0)
    with zerofx.deferred_init():
        model = nn.ModuleDict({"used": nn.Linear(6, 3), "other": nn.Linear(6, 3)})
    optimizer = torch.optim.SGD(model["used"].parameters(), lr=0.1)
    step = compiled(model["used"], optimizer, {"stage": 3})
    step(*features(0, 4))
    assert type(model["used"].weight) is ShardedParameter
    assert type(model["other"].weight) is DeferredParameter
    with pytest.raises(RuntimeError, match=PUT_OFF):
        model["other"](torch.ones(6))
    zerofx.materialize(model)
    assert type(model["used"].weight) is ShardedParameter
    assert model["other"](torch.ones(6)).shape == (3,)


@pytest.mark.nightly
def test_the_first_call_compiles_for_later_ones_too():
    torch._dynamo.reset()
    before = set(zero.functions)
    with zerofx.deferred_init():
        model = Mlp()
    step = compiled(model, torch.optim.SGD(model.parameters(), lr=0.1), {"stage": 3})
    for number in range(STEPS):
        step(*features(number, 4))
    (function,) = set(zero.functions) - before
    assert len(function.programs) == 1


@pytest.mark.nightly
def test_buffers_and_batch_norm_train():
    def losses(late):
        torch.manual_seed(0)
        if late:
            with zerofx.deferred_init(exact=True):
                model = ConvNet()
        else:
            model = ConvNet()
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        step = compiled(model, optimizer, {"stage": 3})
        return [step(*images_of(number, 4)).item() for number in range(STEPS)]

    assert losses(True) == losses(False)


def test_a_step_that_cannot_be_compiled_leaves_the_model_deferred():
    with zerofx.deferred_init():
        model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bad = compiled(model, optimizer, {"stage": 3}, lambda *_: print("no") or torch.ones(()))
    with pytest.raises(Exception, match="compiles the whole step"):
        bad(*features(0, 4))
    assert type(model.weight) is DeferredParameter
    good = compiled(model, optimizer, {"stage": 3})
    assert good(*features(0, 4)).item() > 0


def test_what_can_no_longer_be_made_is_an_error_before_anything_changes():
    source = torch.ones(600, 600)
    with zerofx.deferred_init():
        model = nn.Linear(600, 600)
        model.weight.data.copy_(source)
    source.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compiled(model, optimizer, {"stage": 3})
    batch = torch.ones(2, 600), torch.zeros(2, 600)
    with pytest.raises(zerofx.StepError, match="has been written to since it was recorded"):
        step(*batch)
    assert all(type(one) is DeferredParameter for one in model.parameters())
    with torch.no_grad():
        model.weight.copy_(torch.ones(600, 600))
    assert step(*batch).item() > 0


def test_two_parameters_in_the_same_memory_are_refused():
    with zerofx.deferred_init():
        model = nn.Linear(6, 6)
        model.other = nn.Parameter(model.weight.detach())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model, x, y):
        return (model(x) @ model.other).sum()

    with pytest.raises(Exception, match="share memory|over the same memory"):
        compiled(model, optimizer, {"stage": 3}, loss)(*features(0, 4))


def test_a_buffer_in_a_parameters_memory_is_refused():
    with zerofx.deferred_init():
        model = nn.Linear(6, 6)
        model.register_buffer("alias", model.weight.detach())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model, x, y):
        return (model(x) @ model.alias).sum()

    with pytest.raises(Exception, match="shares memory with parameter"):
        compiled(model, optimizer, {"stage": 3}, loss)(*features(0, 4))


def test_a_step_in_the_block_is_refused():
    with zerofx.deferred_init():
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = compiled(model, optimizer, {"stage": 3})
        with pytest.raises(Exception, match="dispatch mode"):
            step(*features(0, 4))


def test_deepcopy_in_the_block_makes_two_models():
    torch.manual_seed(0)
    with zerofx.deferred_init(exact=True):
        model = nn.Linear(6, 3)
        twin = copy.deepcopy(model)
    zerofx.materialize(model)
    zerofx.materialize(twin)
    assert torch.equal(model.weight, twin.weight)
    assert model.weight.data_ptr() != twin.weight.data_ptr()


def test_rank_0_alone_makes_what_is_sent():
    """With other ranks there, what they would make is overwritten."""
    with zerofx.deferred_init():
        model = nn.Linear(6, 3)
    with mock.patch.object(replay, "replay") as made:
        for parameter in model.parameters():
            LEDGER.make(parameter, with_values=False)
    assert not made.called
    gc.collect()
    assert len(LEDGER) == 0
