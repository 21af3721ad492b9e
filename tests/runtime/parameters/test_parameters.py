"""Parameters between steps: guards, whole values, state dicts; alone and on 2 and 3 gloo ranks."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.kit.covering import nightly
from tests.kit.persistent import persistent_bytes
from tests.kit.ranks import ranks_fixture  # noqa: F401
from zerofx.ir.parameters import ParameterInfo
from zerofx.runtime.access import full_params, unshard
from zerofx.runtime.comm.communication import Communicator
from zerofx.runtime.memory import flat
from zerofx.runtime.memory.flat import take_shard, whole_from_flat
from zerofx.runtime.optimizer.state_dict import attach_optimizer
from zerofx.runtime.parameters import registry
from zerofx.runtime.parameters.guarded import ShardedGradient, ShardedParameter
from zerofx.runtime.parameters.registry import REGISTRY

EXPLAINED = "keeps only this rank's shard"


def info_of(
    parameter: torch.Tensor, name: str, world_size: int, index: int = 0, rank: int = 0
) -> ParameterInfo:
    return ParameterInfo(
        index,
        name,
        tuple(parameter.shape),
        tuple(parameter.stride()),
        parameter.dtype,
        parameter.device,
        parameter.requires_grad,
        world_size,
        rank,
    )


def bind(model: nn.Module, stage: int = 3, communicator: Communicator | None = None):
    communicator = communicator or Communicator.of(None)
    table = [
        (parameter, info_of(parameter, name, communicator.world_size, index, communicator.rank))
        for index, (name, parameter) in enumerate(model.named_parameters())
    ]
    return REGISTRY.bind(table, list(model.buffers()), communicator, stage)


class Tied(nn.Module):
    """Every kind of parameter at once; 17 and 33 divide by no world size here."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(33, 17)
        self.head = nn.Linear(17, 33, bias=False)
        self.head.weight = self.embedding.weight
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.scalar = nn.Parameter(torch.tensor(1.25))
        self.one = nn.Parameter(torch.tensor([2.5]))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.bfloat = nn.Parameter(torch.randn(7, dtype=torch.bfloat16))
        self.wide = nn.Parameter(torch.randn(3, 5, dtype=torch.float64))
        self.phase = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("holes", torch.arange(8.0)[::2])


def built(seed: int = 0) -> Tied:
    torch.manual_seed(seed)
    return Tied()


def assert_same(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert value.stride() == other[key].stride(), key
        assert torch.equal(value, other[key]), key


def weight(stage: int = 3) -> tuple[nn.Linear, nn.Parameter]:
    model = nn.Linear(5, 3)
    bind(model, stage)
    return model, model.weight


@pytest.fixture(params=[2, nightly(3)])
def world(request, ranks):  # noqa: F811
    return ranks(request.param)


# Every one of these needs values. x is the parameter, m its module.
NEEDS_VALUES = (
    """
x + 1 | 1 + x | -x | x @ x.T | x == x | x[0] | x.T | x.real | x.view(-1) | x.clone() | x.detach()
x.data | x.sum() | x.norm() | x.max() | x.item() | float(x) | bool(x) | list(x) | x.tolist()
1 in x | x.numpy() | numpy.asarray(x) | numpy.from_dlpack(x) | torch.from_dlpack(x) | x.data_ptr()
x.to("meta") | x.half() | x.to("cpu", copy=True) | x.type(torch.float16)
x.share_memory_() | x.pin_memory() | x.storage()
x.add_(1) | x.fill_(0) | x.resize_(0) | nn.init.zeros_(x) | x.__setitem__(0, 1)
x.copy_(x) | torch.ones(3, 5).copy_(x) | torch.ones(3, 5) + x | torch.sum(input=x)
torch.stack([x, x]) | torch.where(x > 0, x, x) | torch.equal(x, x) | torch.empty_like(x)
torch._foreach_norm([x]) | F.linear(torch.ones(1, 5), x) | torch.ops.aten.add.Tensor(x, 1)
torch.Tensor.add(x, 1) | torch.add(torch.ones(3, 5), 1, out=x) | torch.nn.Parameter(x)
setattr(x, "data", torch.ones(3, 5)) | copy.copy(x) | copy.deepcopy(x) | copy.deepcopy(m)
pickle.dumps(x) | torch.save(x, io.BytesIO()) | torch.save(m, io.BytesIO())
m(torch.ones(2, 5)) | m.double() | m.to("meta") | m.share_memory() | m.to_empty(device="cpu")
nn.utils.parameters_to_vector(m.parameters()) | nn.utils.get_total_norm([x])
torch.compile(lambda q: q * 2, backend="eager")(x)
torch.compile(m, backend="eager")(torch.ones(2, 5))
torch.func.functional_call(m, dict(m.named_parameters()), torch.ones(2, 5))
torch.optim.swa_utils.AveragedModel(m)
""".replace("\n", " | ")
    .strip(" |")
    .split(" | ")
)


@pytest.mark.parametrize("expression", NEEDS_VALUES)
def test_explains_what_needs_values(expression):
    model, parameter = weight()
    scope = dict(x=parameter, m=model, torch=torch, nn=nn, F=F, numpy=numpy)
    scope |= dict(copy=copy, pickle=pickle, io=io)
    with pytest.raises(RuntimeError, match=EXPLAINED) as caught:
        eval(expression, scope)
    assert "weight" in str(caught.value) or "bias" in str(caught.value)
    assert "zerofx.full_params(model)" in str(caught.value)
    assert type(parameter) is ShardedParameter


def test_answers_metadata():
    model, x = weight()
    assert x.shape == (3, 5) and x.size(0) == 3 and x.numel() == 15 and len(x) == 3 and x.ndim == 2
    assert x.dtype is torch.float32 and x.device.type == "cpu" and x.stride() == (5, 1)
    assert x.is_contiguous() and x.is_floating_point() and x.is_leaf and not x.is_cuda
    assert x.requires_grad and not x.requires_grad_(False).requires_grad
    x.requires_grad = True
    assert x.grad is None and x.nbytes == 60 and x.type() == "torch.FloatTensor"
    assert repr(x) == str(x) == f"{x}"
    assert repr(x).startswith("ShardedParameter('weight', shape=(3, 5), dtype=torch.float32")
    assert (
        dict(model.named_parameters())["weight"] is x and x in {x} and isinstance(x, nn.Parameter)
    )
    assert model.state_dict(keep_vars=True)["weight"] is x
    assert x.untyped_storage().size() == 0
    x.grad = torch.ones(3, 5)
    assert torch.equal(x.grad, torch.ones(3, 5))
    del x.grad
    assert x.grad is None
    x.register_hook(lambda gradient: None).remove()


def test_copies_a_whole_value_as_load_state_dict_does():
    model, x = weight()
    with torch.no_grad():
        x.copy_(torch.arange(15.0, dtype=torch.float64).view(3, 5))
        with pytest.raises(RuntimeError, match="whole shape"):
            x.copy_(torch.ones(5))
    with pytest.raises(RuntimeError, match="no_grad"):
        x.copy_(torch.ones(3, 5))
    assert torch.equal(model.state_dict()["weight"], torch.arange(15.0).view(3, 5))


def test_parameters_are_the_same_objects_and_plain_during_calls():
    model, x = weight()
    REGISTRY.enter_call()
    REGISTRY.enter_call()
    REGISTRY.exit_call()
    assert type(x) is nn.Parameter and model.weight is x
    REGISTRY.exit_call()
    assert type(x) is ShardedParameter


def test_restores_a_users_own_class():
    class Own(nn.Parameter):
        pass

    model = nn.Linear(5, 3)
    model.weight = Own(model.weight.detach())
    bind(model)
    x = model.weight
    assert isinstance(x, Own) and isinstance(x, ShardedParameter)
    with pytest.raises(RuntimeError, match=EXPLAINED):
        x.sum()
    with full_params(model):
        assert type(x) is Own
    REGISTRY.enter_call()
    assert type(x) is Own
    REGISTRY.exit_call()
    unshard(model)
    assert type(x) is Own


class Dispatching(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_refuses_what_it_cannot_guard():
    communicator = Communicator.of(None)

    def refused(kind, parameter, words):
        info = ParameterInfo(0, "w", (4, 2), (2, 1), torch.float32, torch.device("cpu"), True, 1)
        with pytest.raises(kind, match=words) as caught:
            REGISTRY.bind([(parameter, info)], [], communicator, 3)
        assert "'w'" in str(caught.value)

    refused(TypeError, torch.zeros(4, 2), "not an nn.Parameter")
    refused(TypeError, torch.zeros(4, 2).as_subclass(Dispatching), "not an nn.Parameter")
    refused(ValueError, nn.Parameter(torch.zeros(4, 2, device="meta")), "meta device")
    refused(ValueError, nn.UninitializedParameter(), "not initialized")
    refused(ValueError, nn.Parameter(torch.zeros(4, 4)[:, ::2]), "not dense")
    refused(ValueError, nn.Parameter(torch.zeros(4, 1).expand(4, 2)), "not dense")
    with torch.inference_mode():
        created = nn.Parameter(torch.zeros(4, 2), requires_grad=False)
    refused(ValueError, created, "inference_mode")

    class Final(nn.Parameter):
        def __init_subclass__(cls):
            raise TypeError("Final has no subclasses")

    refused(TypeError, Final(torch.zeros(4, 2)), "cannot be guarded")


def test_refuses_two_objects_over_one_memory():
    model = nn.Module()
    model.a = nn.Parameter(torch.zeros(6))
    model.b = nn.Parameter(model.a.detach())
    with pytest.raises(ValueError, match="'a' and 'b' are two nn.Parameter objects"):
        bind(model)
    assert type(model.a) is nn.Parameter and model.a.untyped_storage().size() == 24


@pytest.mark.parametrize("stage", [1, 3])
def test_refuses_a_second_object_bound_later(stage):
    first, second = nn.Module(), nn.Module()
    first.a = nn.Parameter(torch.zeros(6))
    second.b = nn.Parameter(first.a.detach())
    bind(first, stage)
    with pytest.raises(ValueError, match="same memory"):
        bind(second, stage)


def test_parameters_cut_from_one_flat_buffer_are_independent():
    flat = torch.arange(10.0)
    model = nn.Module()
    model.a, model.b = nn.Parameter(flat[:4]), nn.Parameter(flat[4:])
    bind(model)
    assert model.a.untyped_storage().size() == 0
    assert torch.equal(flat, torch.arange(10.0))  # the user's own tensor stays readable
    assert torch.equal(model.state_dict()["b"], torch.arange(4.0, 10.0))


def test_refuses_another_stage_and_keeps_the_first():
    model = nn.Linear(5, 3)
    bind(model, 2)
    with pytest.raises(ValueError, match="'weight' is bound at ZeRO stage 2.* stage 3.*unshard"):
        bind(model, 3)
    assert [bound.stage for bound in bind(model, 2)] == [2, 2]
    unshard(model)
    assert [bound.stage for bound in bind(model, 3)] == [3, 3]


def test_binding_twice_changes_nothing():
    model, x = weight()
    first = [REGISTRY.lookup(p) for p in model.parameters()]
    shard = first[0].shard
    assert bind(model) == first and first[0].shard is shard and type(x) is ShardedParameter


@pytest.mark.parametrize("stage", [1, 3])
def test_what_was_not_bound_when_binding_failed_is_as_it_was(monkeypatch, stage):
    model, calls = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)), []
    before = copy.deepcopy(model.state_dict())

    def fails(members, communicator):
        calls.append(members)
        if len(calls) == 3:
            raise MemoryError("no more")

    monkeypatch.setattr(flat, "COALESCED_BYTES", 0)  # each comes alone
    with monkeypatch.context() as patch:
        patch.setattr(registry, "have_values", fails)
        with pytest.raises(MemoryError, match="no more"):
            bind(model, stage)
    bound = [name for name, p in model.named_parameters() if REGISTRY.lookup(p) is not None]
    assert bound == (["0.weight", "0.bias"] if stage == 3 else [])
    assert type(model[1].weight) is nn.Parameter
    assert torch.equal(model[1].weight, before["1.weight"])
    assert len(bind(model, stage)) == 4
    assert_same(model.state_dict(), before)


def test_entries_and_memory_go_with_the_model():
    gc.collect()
    before = len(REGISTRY)
    model = built()
    bounds = bind(model)
    assert all(p.untyped_storage().size() == 0 for p in model.parameters())
    shards = [weakref.ref(bound.shard) for bound in bounds]
    parameter = weakref.ref(model.one)
    assert len(REGISTRY) == before + len(bounds)
    REGISTRY.gradients.store(bounds[0], torch.zeros_like(bounds[0].shard))
    del model, bounds
    gc.collect()
    assert len(REGISTRY) == before and parameter() is None
    assert all(shard() is None for shard in shards)


def test_first_call_under_inference_mode_gives_updatable_shards():
    model = nn.Linear(5, 3)
    with torch.inference_mode():
        bounds = bind(model)
    bounds[0].shard.add_(1)
    with torch.inference_mode():
        model.load_state_dict(nn.Linear(5, 3).state_dict())


def test_backward_through_a_graph_from_before_is_an_error():
    model = nn.Linear(5, 3)
    loss = model(torch.ones(2, 5, requires_grad=True)).sum()
    bind(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def gradient_for(parameter: nn.Parameter, value: float = 2.0) -> torch.Tensor:
    bound = REGISTRY.lookup(parameter)
    parameter.grad = REGISTRY.gradients.store(
        bound, torch.full((bound.info.shard_numel,), value, dtype=parameter.dtype)
    )
    return parameter.grad


@pytest.mark.parametrize("stage", [2, 3])
def test_gradient_stubs(stage):
    model, x = weight(stage)
    bound = REGISTRY.lookup(x)
    REGISTRY.enter_call()
    stub = gradient_for(x)
    assert type(stub) is torch.Tensor
    REGISTRY.exit_call()
    assert type(x.grad) is ShardedGradient and x.grad is stub
    assert stub.untyped_storage().size() == 0 and stub.shape == x.shape
    assert repr(stub).startswith("ShardedGradient('weight'")
    for touch in (
        lambda: stub.norm(),
        lambda: stub.mul_(2),
        lambda: stub.clone(),
        lambda: nn.utils.clip_grad_norm_([x], 1.0),
        lambda: copy.deepcopy(stub),
    ):
        with pytest.raises(RuntimeError, match="gradient of parameter 'weight'"):
            touch()
    REGISTRY.enter_call()
    assert not x._backward_hooks
    assert REGISTRY.gradients.shard(bound, x.grad) is bound.gradient
    assert gradient_for(x, 3.0) is stub  # the same object: Dynamo's guards hold
    REGISTRY.exit_call()
    whole = torch.arange(15.0).view(3, 5)
    assert torch.equal(REGISTRY.gradients.shard(bound, whole), torch.arange(15.0))
    x.grad = None  # an eager zero_grad: released when the next call begins
    REGISTRY.enter_call()
    assert bound.gradient is None
    gradient_for(x)
    x.grad = None  # zero_grad inside the step: released when it ends
    REGISTRY.exit_call()
    assert bound.gradient is None
    with pytest.raises(RuntimeError, match="has been replaced since"):
        REGISTRY.gradients.shard(bound, stub)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("of_model", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_eager_zero_grad(stage, of_model, set_to_none, foreach):
    model, x = weight(stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach)
    attach_optimizer(optimizer)
    gradient_for(x)
    model.bias.grad = torch.ones(3)
    (model if of_model else optimizer).zero_grad(set_to_none=set_to_none)
    if set_to_none:
        assert x.grad is None and model.bias.grad is None
        return
    assert type(x.grad) is ShardedGradient and not model.bias.grad.any()
    assert not REGISTRY.lookup(x).gradient.any()


def test_eager_backward_into_a_stub_is_explained():
    model, x = weight(2)
    REGISTRY.enter_call()
    gradient_for(x)
    REGISTRY.exit_call()
    with pytest.raises(RuntimeError, match="eager backward.*'weight'"):
        model(torch.ones(2, 5)).sum().backward()
    x.grad = None
    model(torch.ones(2, 5)).sum().backward()
    assert torch.equal(x.grad, torch.full((3, 5), 2.0))


def test_full_params_keeps_writes_nests_and_survives_exceptions():
    model, x = weight()
    before = model.state_dict()["weight"]
    with pytest.raises(KeyError), full_params(model):
        with full_params(model):
            assert type(x) is nn.Parameter and torch.equal(x, before)
            with torch.no_grad():
                x.add_(1)
            kept = x.detach()
        model(torch.ones(1, 5))
        with pytest.raises(RuntimeError, match="inside `with zerofx.full_params"):
            REGISTRY.lookup(x).shard  # noqa: B018
        raise KeyError
    assert type(x) is ShardedParameter and x.untyped_storage().size() == 0
    assert torch.equal(model.state_dict()["weight"], before + 1)
    assert torch.equal(kept, before + 1)  # a view taken inside is a snapshot, not freed memory


def test_full_params_follows_a_new_dtype_and_refuses_a_new_shape():
    model, x = weight()
    with full_params(model):
        model.to(torch.bfloat16)
    assert x.dtype is torch.bfloat16 and REGISTRY.lookup(x).shard.dtype is torch.bfloat16
    with pytest.raises(ValueError, match="no longer fit"), full_params(model):
        x.data = torch.zeros(2, 2, dtype=torch.bfloat16)
    assert type(x) is nn.Parameter and type(model.bias) is ShardedParameter


def test_full_params_leaves_whole_parameters_alone():
    model, x = weight(2)
    with full_params(model):
        assert type(x) is nn.Parameter
    assert x.untyped_storage().size() == 60


def flat_adam_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What a compiled AdamW step leaves: flat shards of moments, and a step."""
    for number, parameter in enumerate(p for g in optimizer.param_groups for p in g["params"]):
        bound = REGISTRY.lookup(parameter)
        for key in ("exp_avg", "exp_avg_sq"):
            whole = moment(bound.info, number, key)
            if bound.stage > 0:
                whole = take_shard(whole, bound.info, bound.communicator.rank)
            optimizer.state[parameter][key] = whole
        optimizer.state[parameter]["step"] = torch.tensor(3.0)


def moment(info: ParameterInfo, number: int, key: str) -> torch.Tensor:
    values = torch.arange(1, info.numel + 1).add(100 * number + len(key)).to(info.dtype)
    return whole_from_flat(values, info)


def saved_and_loaded(state_dict):
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file)


def check_round_trips(stage: int) -> None:
    plain, model = built(), built(Communicator.of(None).rank)
    bind(model, stage)
    saved = model.state_dict()
    assert saved["head.weight"].data_ptr() == saved["embedding.weight"].data_ptr()
    again = model.state_dict()["head.weight"].data_ptr()
    assert (again == saved["head.weight"].data_ptr()) == (stage < 3)  # whole values: a snapshot
    assert_same(saved_and_loaded(saved), plain.state_dict())

    other = built(7)
    model.load_state_dict(other.state_dict(), strict=True)
    reloaded = model.state_dict()
    assert_same(reloaded, other.state_dict())
    plain.load_state_dict(reloaded)
    assert_same(plain.state_dict(), other.state_dict())
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**reloaded, "one": torch.ones(2)})

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p is not model.one])
    attach_optimizer(optimizer)
    optimizer.add_param_group({"params": [model.one], "lr": 0.5})
    attach_optimizer(optimizer)
    flat_adam_states(model, optimizer)
    shards = {p: dict(state) for p, state in optimizer.state.items()}
    saved = saved_and_loaded(optimizer.state_dict())
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in enumerate(parameters):
        info = REGISTRY.lookup(parameter).info
        assert saved["state"][number]["step"] == 3
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(saved["state"][number][key], moment(info, number, key))
            assert saved["state"][number][key].stride() == info.stride
            assert optimizer.state[parameter][key] is shards[parameter][key]

    twin = built()
    ordinary = torch.optim.AdamW([p for p in twin.parameters() if p is not twin.one])
    ordinary.add_param_group({"params": [twin.one]})
    ordinary.load_state_dict(copy.deepcopy(saved))
    assert ordinary.state[twin.conv.weight]["exp_avg"].shape == twin.conv.weight.shape
    optimizer.state.clear()
    optimizer.load_state_dict(ordinary.state_dict())
    assert optimizer.param_groups[1]["lr"] == 0.5
    for parameter, state in shards.items():
        for key, value in state.items():
            assert torch.equal(optimizer.state[parameter][key], value), (key, value.shape)

    model.one.requires_grad_(False)
    if stage > 0:
        with pytest.raises(RuntimeError, match="eager optimizer.step"):
            optimizer.step()
    if stage > 1:
        gradient_for(model.conv.weight, 4.0)
    unshard(model, optimizer)
    for parameter in model.parameters():
        assert type(parameter) is nn.Parameter and REGISTRY.lookup(parameter) is None
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
    assert_same(model.state_dict(), other.state_dict())
    assert optimizer.state[model.scalar]["exp_avg"].shape == ()
    last = saved["state"][len(parameters) - 1]
    assert torch.equal(optimizer.state[model.one]["exp_avg"], last["exp_avg"])
    if stage > 1:
        assert torch.equal(model.conv.weight.grad, torch.full_like(model.conv.weight, 4.0))
    assert not optimizer._optimizer_step_pre_hooks
    model.zero_grad()
    model.conv(torch.ones(1, 3, 4, 4)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_round_trips_alone(stage):
    check_round_trips(stage)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_round_trips_on_ranks(world, stage):
    world.run(check_round_trips, stage)


def check_first_bind_takes_rank_0s_values() -> None:
    rank = Communicator.of(None).rank
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    big = nn.Parameter(torch.full((1100, 1000), float(rank)))  # more than one coalesced message
    model.register_parameter("big", big)
    model.register_buffer("holes", torch.full((8,), rank)[::2])
    model.register_buffer("expanded", torch.full((1, 3, 1), rank).expand(2, 3, 4))
    model[1].num_batches_tracked.fill_(rank + 5)
    with torch.no_grad():
        model[0].weight.fill_(rank)
    bind(model, 3)
    saved = model.state_dict()
    assert not saved["0.weight"].any() and not saved["big"].any() and not saved["holes"].any()
    assert not saved["expanded"].any()
    assert saved["1.num_batches_tracked"] == 5
    model[1].num_batches_tracked.fill_(rank)
    bind(model, 3)  # the second time, buffers are each rank's own
    assert model[1].num_batches_tracked == rank


def test_first_bind_takes_rank_0s_values(world):
    world.run(check_first_bind_takes_rank_0s_values)


def bind_buffers_of_other_sizes() -> list[str]:
    rank, said = Communicator.of(None).rank, []
    others = (torch.zeros(3 + rank), torch.zeros(3, dtype=(torch.int32, torch.int64)[rank > 0]))
    for other in (*others, torch.zeros(3, 4) if rank else torch.zeros(4, 3).t()):
        model = nn.BatchNorm1d(3)
        model.running_var = other
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ValueError) as caught:
            bind(model, 3)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        said.append(str(caught.value))
    return said


def test_buffers_that_differ_between_ranks_are_refused_by_name(world):
    for sizes, dtypes, strides in world.run(bind_buffers_of_other_sizes):
        assert "buffer 'running_var' of a BatchNorm1d is torch.float32 (3,) (cpu)" in sizes
        assert "on rank 0 and torch.float32 (4,) (cpu) on rank 1" in sizes
        assert "is torch.int32 (3,) (cpu) on rank 0 and torch.int64" in dtypes
        assert "(3, 4) of strides (1, 3) (cpu) on rank 0 and torch.float32 (3, 4) (cpu)" in strides


def check_full_params_keeps_each_ranks_range() -> None:
    communicator = Communicator.of(None)
    model = nn.Linear(5, 3, bias=False)
    (bound,) = bind(model, 3)
    with full_params(model), torch.no_grad():
        model.weight.fill_(communicator.rank + 1)
    per_rank = bound.info.shard_numel
    expected = torch.arange(communicator.world_size).repeat_interleave(per_rank)[:15] + 1.0
    assert torch.equal(model.state_dict()["weight"].view(-1), expected)
    assert bound.shard.untyped_storage().nbytes() == 4 * per_rank


def test_full_params_keeps_each_ranks_range(world):
    world.run(check_full_params_keeps_each_ranks_range)


def check_persistent_bytes(stage: int) -> dict[str, int]:
    model = nn.Linear(5, 3)  # 15 and 3 elements
    bind(model, stage)
    optimizer = torch.optim.AdamW(model.parameters())
    attach_optimizer(optimizer)
    if stage > 0:
        flat_adam_states(model, optimizer)
    if stage > 1:
        gradient_for(model.weight)
    else:
        model.weight.grad = torch.ones(3, 5)
    mine = persistent_bytes([optimizer])
    unshard(model, optimizer)
    rest = persistent_bytes()
    return {kind: nbytes - rest[kind] for kind, nbytes in mine.items()}


def test_persistent_bytes_are_the_formulas(world):
    """4 bytes each: 15 + 3 elements whole, 8 + 2 on two ranks and 5 + 1 on three, padded."""
    n = {2: 10, 3: 6}[world.world_size]
    first = {2: 8, 3: 5}[world.world_size]
    steps = 2 * 4
    for stage, parameters, gradients in ((1, 18, 15), (2, 18, first), (3, n, first)):
        for rank in world.run(check_persistent_bytes, stage):
            assert rank == {
                "parameters": 4 * parameters,
                "gradients": 4 * gradients,
                "optimizer_states": 2 * 4 * n + steps,
            }


def check_missing_rank(touch: str) -> str:
    """Rank 0 alone touches; the others come when it has given up."""
    model = nn.Linear(5, 3)
    bind(model, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    attach_optimizer(optimizer)
    flat_adam_states(model, optimizer)
    scope = dict(m=model, o=optimizer, full_params=full_params, unshard=unshard)
    before, REGISTRY.barrier.join_timeout_s = REGISTRY.barrier.join_timeout_s, 0.5
    message = ""
    try:
        if Communicator.of(None).rank == 0:
            with pytest.raises(RuntimeError) as caught:
                eval(touch, scope)
            message = str(caught.value)
        torch.distributed.barrier()
        if Communicator.of(None).rank != 0:
            with pytest.raises(RuntimeError, match="gave up"):
                eval(touch, scope)
    finally:
        REGISTRY.barrier.join_timeout_s = before
    torch.distributed.barrier()
    assert type(model.weight) is ShardedParameter
    model.state_dict()  # all together again: the meeting that failed leaves nothing behind
    return message


@pytest.mark.parametrize(
    "touch", ["m.state_dict()", "full_params(m).__enter__()", "o.state_dict()", "unshard(m, o)"]
)
def test_a_missing_rank_is_an_error_that_says_so(ranks, touch):  # noqa: F811
    message = ranks(2).run(check_missing_rank, touch)[0]
    assert "is collective: call it on all ranks" in message and "[1]" in message


def test_unshard_wants_every_optimizer_with_shards():
    model, x = weight(1)
    optimizer = torch.optim.AdamW(model.parameters())
    attach_optimizer(optimizer)
    flat_adam_states(model, optimizer)
    with pytest.raises(ValueError, match="Give it too"):
        unshard(model)
    assert REGISTRY.lookup(x) is not None
    unshard(model, optimizer)


def test_attach_cuts_states_from_before_and_only_once():
    model = nn.Linear(5, 1)  # the bias has one element: its shard looks like a whole state
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    whole = copy.deepcopy(optimizer.state_dict())
    bind(model, 1)
    attach_optimizer(optimizer)
    assert optimizer.state[model.weight]["exp_avg"].shape == (5,)
    attach_optimizer(optimizer)
    saved = optimizer.state_dict()
    for number in (0, 1):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(saved["state"][number][key], whole["state"][number][key])
            assert saved["state"][number][key].shape == whole["state"][number][key].shape


def test_refused_states_leave_the_old_ones():
    model, x = weight(1)
    optimizer = torch.optim.AdamW(model.parameters())
    attach_optimizer(optimizer)
    flat_adam_states(model, optimizer)
    before = optimizer.state[x]["exp_avg"]
    bad = optimizer.state_dict()
    bad["state"][0]["exp_avg"] = torch.zeros(3)
    with pytest.raises(ValueError, match="'exp_avg' of parameter 'weight' has shape"):
        optimizer.load_state_dict(bad)
    assert optimizer.state[x]["exp_avg"] is before
    optimizer.state_dict()
