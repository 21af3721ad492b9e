"""An update traced and run on shards is bitwise the update of torch.optim on the whole."""

import collections
import copy
import math
import signal
import types
import warnings
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn, optim

from tests.kit.covering import each_value, first, nightly, only
from zerofx.codegen.rewrite.elementwise import UpdateError
from zerofx.ir.mesh import Mesh
from zerofx.ir.parameters import ParameterInfo
from zerofx.runtime.optimizer import traces
from zerofx.runtime.optimizer.setup import UpdateSettings
from zerofx.runtime.optimizer.state_dict import attach_optimizer, unshard_states
from zerofx.runtime.optimizer.update import OptimizerRunner
from zerofx.runtime.parameters.parameter import ParameterState
from zerofx.runtime.parameters.registry import REGISTRY
from zerofx.runtime.storage.memory import HostMemory

WORLD_SIZE = 3


class Lion(optim.Optimizer):
    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros(p.shape)
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                update = state["exp_avg"] * beta1 + p.grad * (1 - beta1)
                p.add_(torch.sign(update), alpha=-group["lr"])
                state["exp_avg"].mul_(beta2).add_(p.grad, alpha=1 - beta2)


class HandWrittenAdam(optim.Optimizer):
    """math.sqrt, float() and an integer step, as in most tutorials."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, dict(lr=lr, betas=(0.9, 0.999), eps=1e-8))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["m"], state["v"] = torch.zeros_like(p.data), torch.zeros_like(p.data)
                state["step"] += 1
                state["m"].mul_(beta1).add_(p.grad, alpha=1 - beta1)
                state["v"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                size = float(group["lr"]) * math.sqrt(1 - beta2 ** state["step"])
                size = size / (1 - math.exp(state["step"] * math.log(beta1)))
                p.data.addcdiv_(state["m"], state["v"].sqrt().add_(group["eps"]), value=-size)


class GroupStep(optim.Optimizer):
    """Counts steps in the parameter group."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, dict(lr=lr, step=0))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] += 1
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] / group["step"])


class DecayMatrices(optim.Optimizer):
    def __init__(self, params, lr=1e-2):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim >= 2:
                    p.mul_(1 - group["lr"] / p.shape[0])
                p.add_(p.grad, alpha=-group["lr"])


class ScalesGradient(optim.Optimizer):
    def __init__(self, params, lr=1e-2):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(group["lr"])
                p.sub_(p.grad)


CASES = {
    "adamw": lambda p: optim.AdamW(p, lr=1e-2, foreach=False),
    "adamw_amsgrad_maximize": lambda p: optim.AdamW(p, amsgrad=True, maximize=True, foreach=False),
    "adam": lambda p: optim.Adam(p, lr=1e-2, foreach=False),
    "adam_l2": lambda p: optim.Adam(p, lr=1e-2, weight_decay=0.1, amsgrad=True, foreach=False),
    "sgd": lambda p: optim.SGD(p, lr=0.1, foreach=False),
    "sgd_nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=False),
    "sgd_dampening": lambda p: optim.SGD(
        p, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.01, maximize=True, foreach=False
    ),
    "rmsprop": lambda p: optim.RMSprop(p, foreach=False),
    "rmsprop_centered": lambda p: optim.RMSprop(p, momentum=0.9, centered=True, foreach=False),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1, lr_decay=0.1, foreach=False),
    "adamax": lambda p: optim.Adamax(p, weight_decay=0.01, foreach=False),
    "nadam": lambda p: optim.NAdam(p, foreach=False),
    "nadam_decoupled": lambda p: optim.NAdam(
        p, weight_decay=0.1, decoupled_weight_decay=True, foreach=False
    ),
    "radam": lambda p: optim.RAdam(p, lr=1e-2, foreach=False),
    "adadelta": lambda p: optim.Adadelta(p, foreach=False),
    "rprop": lambda p: optim.Rprop(p, foreach=False),
    "asgd": lambda p: optim.ASGD(p, foreach=False),
    "lion": Lion,
    "hand_written_adam": HandWrittenAdam,
    "group_step": GroupStep,
    "decay_matrices": DecayMatrices,
    "scales_gradient": ScalesGradient,
    "adamw_tensor_lr": lambda p: optim.AdamW(p, lr=torch.tensor(1e-2), foreach=False),
    "sgd_tensor_lr": lambda p: optim.SGD(p, lr=torch.tensor(1e-2), momentum=0.9, foreach=False),
}


def layout(p, world_size, index=0):
    return ParameterInfo(
        index=index,
        name=f"p{index}",
        shape=tuple(p.shape),
        stride=p.stride(),
        dtype=p.dtype,
        device=p.device,
        requires_grad=True,
        world_size=world_size,
    )


def flat(tensor, info):
    return tensor.detach().permute(info.storage_order).reshape(-1)


def shard(tensor, info, rank):
    start, stop = info.owned_by(rank)
    result = tensor.new_zeros(info.shard_numel)
    result[: stop - start] = flat(tensor, info)[start:stop]
    return result


def bound(p, info, rank):
    mesh = Mesh.flat(info.world_size, rank)
    communicator = types.SimpleNamespace(
        rank=rank, world_size=info.world_size, group=None, mesh=mesh
    )
    return ParameterState(weakref.ref(p), info, 1, communicator, type(p), HostMemory())


def attach(optimizer, owners):
    """Shard an optimizer's states as those of these, of which there may be several in a process."""
    attach_optimizer(optimizer)
    attachment = REGISTRY.attached[optimizer]
    attachment.lookup = lambda parameter: owners.get(id(parameter))
    attachment.shard_states(optimizer)


class Ranks:
    """The runners of all ranks, each with an optimizer and parameters of its own."""

    def __init__(self, make, parameters, world_size=WORLD_SIZE, sharded=True):
        self.infos = [layout(p, world_size, i) for i, p in enumerate(parameters)]
        self.sharded = sharded
        self.optimizers, self.runners, self.data, self.own = [], [], [], []
        for rank in range(world_size):
            own = [nn.Parameter(p.detach().clone()) for p in parameters]
            self.optimizers.append(make(own))
            self.own.append(own)
            if sharded:
                owners = {id(p): bound(p, i, rank) for p, i in zip(own, self.infos, strict=True)}
                attach(self.optimizers[-1], owners)
            table = {i: (p, info) for i, (p, info) in enumerate(zip(own, self.infos, strict=True))}
            self.runners.append(
                OptimizerRunner(
                    self.optimizers[-1], table, UpdateSettings(rank=rank, sharded=sharded)
                )
            )
            self.data.append([self._piece(p, i, rank) for i, p in enumerate(own)])

    def _piece(self, tensor, index, rank):
        return shard(tensor, self.infos[index], rank) if self.sharded else tensor.detach()

    def step(self, gradients):
        for rank, runner in enumerate(self.runners):
            runner.begin()
            for i, gradient in enumerate(gradients):
                piece = self._piece(gradient.clone(), i, rank)
                before = piece.clone()
                assert runner.run(self.data[rank][i], piece, i) is self.data[rank][i]
                assert torch.equal(piece, before), "the program's gradient was changed"
            runner.end()

    def whole(self, index):
        info = self.infos[index]
        pieces = torch.cat([data[index] for data in self.data])[: info.numel]
        permuted = [info.shape[dim] for dim in info.storage_order]
        inverse = [info.storage_order.index(dim) for dim in range(len(info.shape))]
        return pieces.view(permuted).permute(inverse)

    def traces(self):
        return {runner.trace_count for runner in self.runners}


def tensors(*shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def set_lr(optimizer, lr):
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def compare(make, parameters, *, steps=10, lr=lambda i: 0.02 / (i + 1), sharded=True):
    """Run ranks and eager side by side; every step must agree bitwise.  Returns the ranks."""
    parameters = [nn.Parameter(p) for p in parameters]
    ranks = Ranks(make, parameters, sharded=sharded, world_size=WORLD_SIZE if sharded else 1)
    eager = make(parameters)
    for i in range(steps):
        gradients = [
            torch.empty_like(p).copy_(torch.randn(p.shape, dtype=p.dtype)) for p in parameters
        ]
        for optimizer in (eager, *ranks.optimizers):
            set_lr(optimizer, lr(i))
        ranks.step(gradients)
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient.clone()
        eager.step()
        for index, p in enumerate(parameters):
            whole = ranks.whole(index) if sharded else ranks.data[0][index]
            assert torch.equal(whole, p.detach()), f"step {i}, parameter {index}"
    for optimizer, own in zip(ranks.optimizers, ranks.own, strict=True):
        for index, p in enumerate(parameters):
            expected, got = eager.state.get(p, {}), optimizer.state.get(own[index], {})
            assert expected.keys() == got.keys()
            for name, value in expected.items():
                assert type(got[name]) is type(value), name
                if not isinstance(value, torch.Tensor) or value.ndim == 0:
                    assert got[name] == value, name
    return ranks


@pytest.mark.parametrize(
    "case",
    only(("adamw_amsgrad_maximize", "sgd_nesterov", "rmsprop_centered", "scales_gradient"), CASES),
)
def test_shards_agree_bitwise_with_eager_on_the_whole(case):
    torch.manual_seed(0)
    compare(CASES[case], tensors((7, 5), (11,)))


@pytest.mark.parametrize("case", first(1, ["adamw", "rprop", "radam", "lion", "asgd"]))
def test_whole_parameters_agree_bitwise_with_eager(case):
    compare(CASES[case], tensors((7, 5), (11,)), sharded=False)


@pytest.mark.parametrize("case", first(1, ["adamw", "sgd_nesterov", "adagrad", "nadam"]))
def test_double_parameters_agree_bitwise(case):
    compare(CASES[case], tensors((7, 5), dtype=torch.float64))


@pytest.mark.nightly
def test_bfloat16_parameters_agree_bitwise():
    compare(CASES["adamw"], tensors((7, 5), dtype=torch.bfloat16))


@pytest.mark.parametrize(
    "case", first(2, ["adamw", "adamw_tensor_lr", "hand_written_adam", "sgd_nesterov", "nadam"])
)
def test_fifty_learning_rates_need_two_traces(case):
    ranks = compare(CASES[case], tensors((7, 5), (11,), (7, 5)), steps=50)
    # First and later steps, of any shape; a hand-written one looks at it.
    assert ranks.traces() == ({4} if case == "hand_written_adam" else {2})


def test_stateless_optimizer_is_traced_once():
    assert compare(CASES["sgd"], tensors((7, 5)), steps=5).traces() == {1}


@pytest.mark.nightly
def test_warm_up_from_zero_does_not_retrace():
    ranks = compare(CASES["adamw"], tensors((7, 5)), lr=lambda i: i / 100)
    assert ranks.traces() == {2}


def test_branch_on_a_step_count_is_taken_again_and_remembered():
    ranks = compare(CASES["radam"], tensors((7, 5)), steps=12)
    assert ranks.traces() == {3}  # first step, before and after rho_t passes 5


def test_weight_decay_set_to_zero_takes_the_other_branch():
    parameter = nn.Parameter(torch.ones(5))
    ranks = Ranks(CASES["adamw"], [parameter])
    eager = CASES["adamw"]([parameter])
    for decay in (0.1, 0.1, 0.0, 0.1, 0.0):
        for optimizer in (eager, *ranks.optimizers):
            optimizer.param_groups[0]["weight_decay"] = decay
        parameter.grad = torch.ones(5)
        ranks.step([parameter.grad])
        eager.step()
        assert torch.equal(ranks.whole(0), parameter.detach())
    assert ranks.traces() == {3}


def test_state_is_created_as_shards():
    ranks = compare(CASES["adamw"], tensors((7, 5)), steps=1)
    for optimizer, own in zip(ranks.optimizers, ranks.own, strict=True):
        state = optimizer.state[own[0]]
        assert state["exp_avg"].shape == state["exp_avg_sq"].shape == (12,)
        assert state["step"].shape == () and state["step"] == 1


@pytest.mark.nightly
def test_states_of_several_parameters_share_no_memory():
    ranks = compare(CASES["adamw"], tensors((7, 5), (7, 5)), steps=2)
    first, second = (ranks.optimizers[0].state[p] for p in ranks.own[0])
    for name in first:
        assert first[name].data_ptr() != second[name].data_ptr()


def test_state_made_by_the_constructor_is_sharded():
    make = lambda p: optim.Adagrad(p, initial_accumulator_value=0.5, foreach=False)  # noqa: E731
    ranks = compare(make, tensors((7, 5)), steps=3)
    for optimizer, own in zip(ranks.optimizers, ranks.own, strict=True):
        assert optimizer.state[own[0]]["sum"].shape == (12,)


def test_whole_state_that_was_loaded_is_sharded():
    parameter = nn.Parameter(tensors((7, 5))[0])
    eager = CASES["adamw"]([parameter])
    parameter.grad = torch.ones(7, 5)
    eager.step()
    ranks = Ranks(CASES["adamw"], [parameter])
    for optimizer in ranks.optimizers:
        optimizer.load_state_dict(copy.deepcopy(eager.state_dict()))
    parameter.grad = torch.full((7, 5), 0.5)
    ranks.step([parameter.grad])
    eager.step()
    assert torch.equal(ranks.whole(0), parameter.detach())


def test_state_of_another_shape_is_refused():
    ranks = Ranks(CASES["adamw"], [nn.Parameter(torch.ones(7, 5))])
    ranks.step([torch.ones(7, 5)])
    ranks.optimizers[0].state[ranks.own[0][0]]["exp_avg"] = torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"state 'exp_avg' of parameter 'p0' has shape \(2, 2\)"):
        ranks.step([torch.ones(7, 5)])


def test_whole_state_that_was_assigned_is_refused_with_a_remedy():
    ranks = Ranks(CASES["adamw"], [nn.Parameter(torch.ones(7, 5))])
    ranks.step([torch.ones(7, 5)])
    ranks.optimizers[1].state[ranks.own[1][0]]["exp_avg"] = torch.zeros(7, 5)
    words = r"shape \(7, 5\) on rank 1; expected that rank's shard, \(12,\).*load_state_dict"
    with pytest.raises(ValueError, match=words):
        ranks.step([torch.ones(7, 5)])


@pytest.mark.parametrize("dtype", first(1, [torch.bfloat16, torch.float64, torch.int64]))
def test_state_of_another_dtype_is_refused_by_name(dtype):
    ranks = Ranks(CASES["adamw"], [nn.Parameter(torch.ones(7, 5))])
    ranks.step([torch.ones(7, 5)])
    state = ranks.optimizers[0].state[ranks.own[0][0]]
    state["exp_avg"] = state["exp_avg"].to(dtype)
    words = f"state 'exp_avg' is {dtype} and the parameter torch.float32: .*load_state_dict"
    with pytest.raises(UpdateError, match=words):
        ranks.step([torch.ones(7, 5)])


def test_loaded_states_of_another_dtype_are_cast_as_by_torch():
    parameter = nn.Parameter(tensors((7, 5))[0])
    eager = CASES["adamw"]([parameter])
    parameter.grad = torch.ones(7, 5)
    eager.step()
    saved = copy.deepcopy(eager.state_dict())
    saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"].double()
    ranks = Ranks(CASES["adamw"], [parameter])
    for optimizer in ranks.optimizers:
        optimizer.load_state_dict(copy.deepcopy(saved))
    ranks.step([parameter.grad])
    eager.step()
    assert torch.equal(ranks.whole(0), parameter.detach())


def test_capturable_on_a_cpu_is_refused_as_by_torch():
    make = lambda p: optim.AdamW(p, capturable=True, foreach=False)  # noqa: E731
    ranks = Ranks(make, [nn.Parameter(torch.ones(5))])
    with pytest.raises(UpdateError, match="capturable=True"):
        ranks.step([torch.ones(5)])


class There(torch.Tensor):
    """A number that says it is on a GPU."""

    device = torch.device("cuda", 0)
    is_cpu = False

    def cpu(self):
        return torch.tensor(self.item())


@pytest.mark.nightly
def test_counts_on_an_accelerator_come_to_the_cpu_once(monkeypatch):
    """As ``fused`` and ``capturable`` leave them: each would be read at each step."""
    monkeypatch.setattr(traces, "is_accelerator", lambda device: True)
    start, gradient = torch.linspace(-1, 1, 5), torch.ones(5)
    plain, capturable = (
        Ranks(partial(optim.AdamW, lr=0.1, **given), [nn.Parameter(start.clone())])
        for given in ({"foreach": False}, {"capturable": True})
    )
    for ranks in (plain, capturable):
        ranks.step([gradient])
    for optimizer in capturable.optimizers:
        for state in optimizer.state.values():
            state["step"] = state["step"].as_subclass(There)
    for ranks in (plain, capturable):
        ranks.step([gradient])
    kept = [state["step"] for o in capturable.optimizers for state in o.state.values()]
    assert {type(step) for step in kept} == {torch.Tensor} and capturable.traces() == {2}
    assert torch.equal(plain.whole(0), capturable.whole(0))


def test_a_plain_fused_optimizer_counts_on_the_device_again():
    parameter = nn.Parameter(torch.empty(3, device="meta"))
    optimizer = optim.AdamW([parameter], capturable=True)
    optimizer.state[parameter] = {"step": torch.tensor(2.0)}
    unshard_states(optimizer, [])
    assert optimizer.state[parameter]["step"].is_meta


def test_an_eager_fused_step_at_stage_0_counts_on_the_device():
    parameter = nn.Parameter(torch.empty(3, device="meta"))
    optimizer = optim.AdamW([parameter], capturable=True)
    attach_optimizer(optimizer)
    optimizer.state[parameter] = {"step": torch.tensor(2.0)}  # as a compiled step leaves it
    optimizer.step()
    assert optimizer.state[parameter]["step"].is_meta


@pytest.mark.parametrize(
    ("make", "numbers"),
    [(optim.NAdam, {"step", "mu_product"}), (optim.ASGD, {"step", "mu", "eta"})],
)
def test_a_capturable_step_has_all_its_numbers_on_the_device(make, numbers):
    parameter = nn.Parameter(torch.empty(3, device="meta"))
    optimizer = make([parameter], capturable=True)
    optimizer.state[parameter] = {name: torch.tensor(2.0) for name in numbers}
    optimizer.state[parameter]["exp_avg"] = torch.ones(3)  # not for this to move
    unshard_states(optimizer, [])
    found = optimizer.state[parameter].items()
    assert {name for name, value in found if value.is_meta} == numbers


@pytest.mark.parametrize("case", first(1, ["adamw", "lion", "rprop"]))
def test_shard_of_length_zero(case):
    ranks = compare(CASES[case], [torch.zeros(0, 4)], steps=3)
    assert ranks.data[0][0].shape == (0,)


@pytest.mark.parametrize(
    "case, shape", each_value(["adamw", "adagrad", "sgd_nesterov"], [(), (1,), (2,)])
)
def test_ranks_that_own_only_padding(case, shape):
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.tensor(2.0).expand(shape).clone())
    ranks, eager = Ranks(CASES[case], [parameter]), CASES[case]([parameter])
    for i in range(4):
        parameter.grad = torch.full(shape, i - 1.5)
        ranks.step([parameter.grad])
        eager.step()
        assert torch.equal(ranks.whole(0), parameter.detach())


@pytest.mark.parametrize("case", first(1, ["adamw", "adagrad", "lion", "sgd_nesterov"]))
def test_channels_last_parameter(case):
    parameter = torch.randn(4, 3, 2, 5).to(memory_format=torch.channels_last)
    compare(CASES[case], [parameter])


def test_several_groups_keep_their_own_hyperparameters():
    def make(p):
        groups = [{"params": p[:1], "weight_decay": 0.5}, {"params": p[1:], "betas": (0.5, 0.6)}]
        return optim.AdamW(groups, foreach=False)

    ranks = compare(make, tensors((7, 5), (7, 5)))
    assert ranks.traces() == {2}


def test_fused_optimizer_runs_its_single_tensor_form():
    parameters = [nn.Parameter(p) for p in tensors((7, 5))]
    ranks = Ranks(lambda p: optim.AdamW(p, fused=True), parameters)
    eager = optim.AdamW(parameters, foreach=False)
    for _ in range(3):
        parameters[0].grad = torch.randn(7, 5)
        ranks.step([parameters[0].grad])
        eager.step()
    assert torch.equal(ranks.whole(0), parameters[0].detach())


def test_number_of_the_group_changes_once_per_step():
    ranks = compare(GroupStep, tensors((7, 5), (11,)), steps=10)
    assert [o.param_groups[0]["step"] for o in ranks.optimizers] == [10] * WORLD_SIZE
    assert ranks.traces() == {2}  # one that finds out, one for any shape


class CountsInPlace(optim.Optimizer):
    """Counts steps in an attribute that stays the same object."""

    def __init__(self, params, count, lr=0.1):
        super().__init__(params, dict(lr=lr))
        self.count = count

    @torch.no_grad()
    def step(self, closure=None):
        self.count[0] += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad / self.count[0], alpha=-group["lr"])


@pytest.mark.parametrize(
    "make_count", [lambda: [0], nightly(lambda: {0: 0}), nightly(lambda: torch.zeros(1))]
)
def test_an_attribute_that_a_step_changes_in_place_is_refused(make_count):
    ranks = Ranks(lambda p: CountsInPlace(p, make_count()), [nn.Parameter(torch.ones(5))])
    with pytest.raises(UpdateError, match="changes its attribute `count`"):
        ranks.step([torch.ones(5)])
    assert [optimizer.count[0] for optimizer in ranks.optimizers] == [0] * WORLD_SIZE


class Box:
    """An object with a number in it, as a user may keep one on an optimizer or in a group."""

    def __init__(self, *items):
        self.items = list(items)

    def __getitem__(self, place):
        return self.items[place]

    def __setitem__(self, place, value):
        self.items[place] = value


BOXES = {
    "object": lambda: Box(0),
    "counter": lambda: collections.Counter({0: 0}),
    "deque": lambda: collections.deque([0]),
    "array": lambda: np.zeros(1),
    "inside": lambda: Box(types.SimpleNamespace(n=0)),
}


@pytest.mark.parametrize("make_count", only((BOXES["object"],), BOXES.values()), ids=BOXES)
def test_an_object_that_a_step_changes_inside_is_refused(make_count):
    """On the optimizer or in a group, by its name and kind: a trace would have its first number."""

    class CountsInGroup(CountsInPlace):
        def step(self, closure=None):
            self.count = self.param_groups[0]["count"]
            super().step()
            del self.count

    class CountsInside(CountsInPlace):
        def step(self, closure=None):
            self.count[0].n += 1
            for p in self.param_groups[0]["params"]:
                p.add_(p.grad, alpha=-1 / self.count[0].n)

    kind = type(make_count()).__name__
    counts = CountsInside if make_count is BOXES["inside"] else CountsInPlace
    ranks = Ranks(lambda p: counts(p, make_count()), [nn.Parameter(torch.ones(5))])
    with pytest.raises(UpdateError, match=f"changes its attribute `count`, a {kind},"):
        ranks.step([torch.ones(5)])
    if counts is CountsInPlace:
        grouped = [{"params": [nn.Parameter(torch.ones(5))], "count": make_count()}]
        (group,) = grouped
        ranks = Ranks(lambda p: CountsInGroup([{**group, "params": p}], None), group["params"])
        with pytest.raises(UpdateError, match=f"the {kind} in its parameter group's `count`"):
            ranks.step([torch.ones(5)])


class ReadsHidden(optim.Optimizer):
    """Reads numbers where a trace finds constants: what changes there between steps holds."""

    of_class = 1.0

    def __init__(self, params, lr=0.1):
        super().__init__(params, dict(lr=lr, box=Box(1.0), array=np.ones(1)))
        self.config = types.SimpleNamespace(factor=1.0)
        self.table = {"factor": 1.0}
        self.tensor = torch.ones(())

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            factor = group["box"][0] * float(group["array"][0]) * self.config.factor
            factor *= self.table["factor"] * self.of_class
            for p in group["params"]:
                factor *= getattr(p, "lr_scale", 1.0)
                p.add_(p.grad * self.tensor, alpha=-group["lr"] * factor)


READ = ("box", "array", "config", "table", "of_class", "tensor", "lr_scale")


def test_what_changes_between_steps_is_read_again():
    """One after the other: a trace that is made anew for one would hide the next."""

    def change(optimizer, what, factor):
        if what in ("box", "array"):
            optimizer.param_groups[0][what][0] = factor
        elif what == "config":
            optimizer.config.factor = factor
        elif what == "table":
            optimizer.table["factor"] = factor
        elif what == "of_class":
            type(optimizer).of_class = factor
        elif what == "tensor":
            optimizer.tensor = torch.full((), factor)
        else:
            optimizer.param_groups[0]["params"][0].lr_scale = factor

    class Own(ReadsHidden):
        pass

    parameter, gradient = nn.Parameter(torch.ones(5)), torch.linspace(-1, 1, 5)
    ranks = Ranks(Own, [parameter], world_size=1)
    eager = Own([parameter])
    parameter.grad = gradient.clone()
    for what in ("nothing", *READ):
        for optimizer in (eager, *ranks.optimizers):
            if what != "nothing":
                change(optimizer, what, 0.5)
        ranks.step([gradient])
        eager.step()
        assert torch.equal(ranks.whole(0), parameter.detach()), what


def sets_an_attribute(self, group, p, state):
    p.n = getattr(p, "n", 0) + 1
    p.add_(p.grad, alpha=-1 / p.n)


def reads_a_tensor_of_its_own(self, group, p, state):
    p.add_(p.grad, alpha=self.scale.item())


def reads_state_of_nothing(self, group, p, state):
    p.add_(p.grad, alpha=self.state["boost"])


def adds_to_a_shared_state(self, group, p, state):
    state["n"].add_(1)
    p.add_(p.grad / state["n"])


def keeps_an_enumeration(self, group, p, state):
    state["phase"] = signal.SIGINT


@pytest.mark.parametrize(
    ("update", "words"),
    [
        (sets_an_attribute, "changes `p.n`.*keep it in `self.state"),
        (reads_a_tensor_of_its_own, "reads a number off a tensor that is neither in"),
        (
            reads_state_of_nothing,
            r"may read `self.state\['boost'\]`, which belongs to no parameter",
        ),
        (adds_to_a_shared_state, "one Tensor for state `n` of several parameters"),
        (keeps_an_enumeration, "an object of class Signals as state `phase`"),
    ],
)
def test_what_a_trace_would_take_for_constant_is_refused(update, words):
    class Custom(optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})
            self.scale, shared = torch.ones(()), torch.zeros(())
            for p in self.param_groups[0]["params"]:
                if update is adds_to_a_shared_state:
                    self.state[p]["n"] = shared
            if update is reads_state_of_nothing:
                self.state["boost"] = 2.0

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    update(self, group, p, self.state[p])

    ranks = Ranks(Custom, [nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(3))], sharded=False)
    with pytest.raises(UpdateError, match=words):
        ranks.step([torch.ones(5), torch.ones(3)])


class SharesLater(optim.Optimizer):
    """Divides by how many parameters there are, once it is warm."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                number = len(group["params"]) if state["step"] > 9 else 1
                p.add_(p.grad, alpha=-group["lr"] / number)


def test_a_branch_that_looks_at_other_parameters_is_refused_when_it_is_taken():
    ranks = Ranks(SharesLater, [nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(4))])
    for _ in range(9):
        ranks.step([torch.ones(5), torch.ones(4)])
    before = ranks.whole(0).clone()
    for _ in range(2):  # the next call is no better
        with pytest.raises(UpdateError, match="does not update each parameter by itself"):
            ranks.step([torch.ones(5), torch.ones(4)])
    assert torch.equal(ranks.whole(0), before)


def test_lr_scheduler_wrapping_step_is_not_called_and_not_warned():
    ranks = Ranks(CASES["sgd"], [nn.Parameter(torch.ones(5))], world_size=1)
    scheduler = optim.lr_scheduler.StepLR(ranks.optimizers[0], 1, gamma=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            ranks.step([torch.ones(5)])
            scheduler.step()
    assert torch.allclose(ranks.whole(0), torch.tensor(1 - 0.1 * 1.75))


def test_parameter_that_left_the_optimizer_is_an_error():
    ranks = Ranks(CASES["sgd"], [nn.Parameter(torch.ones(5))])
    ranks.optimizers[0].param_groups.clear()
    with pytest.raises(UpdateError, match="'p0' in any parameter group"):
        ranks.step([torch.ones(5)])


def test_run_outside_of_a_step_is_an_error():
    ranks = Ranks(CASES["sgd"], [nn.Parameter(torch.ones(5))])
    with pytest.raises(RuntimeError, match=r"call begin\(\)"):
        ranks.runners[0].run(torch.ones(2), torch.ones(2), 0)


@pytest.mark.nightly
def test_nan_hyperparameter_behaves_as_in_eager():
    ranks = Ranks(CASES["adamw"], [nn.Parameter(torch.ones(5))])
    for lr in (0.1, math.nan, math.nan, math.nan):
        for optimizer in ranks.optimizers:
            set_lr(optimizer, lr)
        ranks.step([torch.ones(5)])
    assert ranks.whole(0).isnan().all()
    assert ranks.traces() == {2}  # the first step with 0.1, the later ones with NaN


@pytest.mark.nightly
def test_muon_runs_on_whole_matrices():
    make = lambda p: optim.Muon(p, lr=0.02)  # noqa: E731
    ranks = compare(make, tensors((8, 6)), steps=4, sharded=False)
    assert ranks.traces() == {2}


def test_gradient_of_another_dtype_is_cast_to_the_parameters():
    ranks = Ranks(CASES["sgd"], [nn.Parameter(torch.ones(6))])
    ranks.step([torch.ones(6, dtype=torch.bfloat16)])
    assert ranks.data[0][0].dtype is torch.float32
    assert torch.allclose(ranks.whole(0), torch.full((6,), 0.9))
