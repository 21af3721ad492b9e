"""Neighbouring shards updated in one kernel: as each by itself, for whatever lies next to what."""

import copy
import itertools
import weakref

import pytest
import torch
from torch import nn

from tests.kit.covering import each_value, first, nightly, only
from tests.runtime.optimizer.test_update import CASES, DecayMatrices, layout
from zerofx import compat
from zerofx.codegen import kernel
from zerofx.runtime.memory.flat import adjoin, join
from zerofx.runtime.optimizer import update as updates
from zerofx.runtime.optimizer.piece import joined_state
from zerofx.runtime.optimizer.setup import UpdateSettings
from zerofx.runtime.optimizer.update import OptimizerRunner

SHAPES = ((40, 3), (7,), (0, 5), (64, 2), (2,), (33,))


# One divides by the length of its parameters, the other has whole states before its first step.
NOT_HERE = {"decay_matrices", "adagrad"}


class Bucket:
    """One rank's shards of some parameters, one after the other in one buffer."""

    settings = UpdateSettings(rank=0, sharded=True)

    def __init__(self, make, together: bool, order=None, shapes=SHAPES):
        torch.manual_seed(0)
        self.together = together
        self.order = list(order or range(len(shapes)))
        self.parameters = [self.parameter(shape) for shape in shapes]
        self.optimizer = make(self.parameters)
        table = {i: (p, layout(p, 1, i)) for i, p in enumerate(self.parameters)}
        self.runner = OptimizerRunner(self.optimizer, table, self.settings)
        self.data = self.first_data()

    def parameter(self, shape):
        return nn.Parameter(torch.randn(shape))

    def first_data(self):
        return self.cut(torch.cat([p.detach().reshape(-1) for p in self.parameters]))

    def cut(self, flat):
        return list(flat.split([p.numel() for p in self.parameters]))

    def step(self, seed):
        generator = torch.Generator().manual_seed(seed)
        total = sum(p.numel() for p in self.parameters)
        grads = self.cut(torch.randn(total, generator=generator))
        self.runner.begin()
        if self.together:
            data, given = ([items[i] for i in self.order] for items in (self.data, grads))
            self.runner.run_together(data, given, self.order)
        else:
            for i, (data, grad) in enumerate(zip(self.data, grads, strict=True)):
                self.runner.run(data, grad, i)
        self.runner.end()

    @property
    def states(self):
        return [self.optimizer.state.get(p, {}) for p in self.parameters]


def assert_alike(one: Bucket, other: Bucket):
    for mine, its in zip(one.data, other.data, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)
    for mine, its in zip(one.states, other.states, strict=True):
        assert mine.keys() == its.keys()
        for name in mine:
            torch.testing.assert_close(mine[name], its[name], rtol=1e-5, atol=1e-6)


class Wholes(Bucket):
    """Whole parameters as stage 0 has them; together, each is seen flat."""

    def __init__(self, make, together: bool, order=None, shapes=SHAPES):
        self.settings = UpdateSettings(rank=0, sharded=False, seen_flat=together)
        super().__init__(make, together, order, shapes)

    def parameter(self, shape):
        """Matrices are transposed, and images' channels last."""
        value = torch.randn(shape)
        if value.dim() == 4:
            value = value.to(memory_format=torch.channels_last)
        return nn.Parameter(value.mT.contiguous().mT if value.dim() == 2 else value)

    def first_data(self):
        return [p.detach() for p in self.parameters]

    def cut(self, flat):
        pairs = zip(super().cut(flat), self.parameters, strict=True)
        return [part.view(p.shape) for part, p in pairs]


@pytest.fixture(autouse=True)
def join_whatever_the_size(monkeypatch):
    monkeypatch.setattr(updates, "FEWEST_ELEMENTS", 1)


@pytest.fixture
def uncompiled(monkeypatch):
    """The kernel's graph as it is: what is compiled is tested apart."""
    monkeypatch.setattr(compat.inductor, "CompiledForAnyLength", lambda gm: gm)


@pytest.fixture
def kernels(monkeypatch):
    """How often a kernel ran."""
    calls = itertools.count()
    ready = kernel.UpdateKernel.ready

    def counted(self, *values):
        next(calls)
        return ready(self, *values)

    monkeypatch.setattr(kernel.UpdateKernel, "ready", counted)
    return lambda: next(calls)


OF_ONE_ELEMENT = ((1,), (40, 3), (5,), (1, 1))


@pytest.mark.parametrize(
    "name, shapes",
    only(
        (("adamw", SHAPES), ("asgd", OF_ONE_ELEMENT)),
        each_value(sorted(CASES.keys() - NOT_HERE), (SHAPES, OF_ONE_ELEMENT)),
    ),
)
def test_together_is_as_each_by_itself(name, shapes, uncompiled):
    one = Bucket(CASES[name], together=True, shapes=shapes)
    other = Bucket(CASES[name], together=False, shapes=shapes)
    for seed in range(4):
        one.step(seed)
        other.step(seed)
        assert_alike(one, other)


@pytest.mark.parametrize("name", first(2, sorted(CASES.keys() - NOT_HERE)))
def test_neighbours_take_one_kernel(name, uncompiled, kernels):
    bucket = Bucket(CASES[name], together=True)
    bucket.step(0)
    bucket.step(1)
    assert kernels() == 2


class Unusual(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(nn.functional.leaky_relu(p.grad, group["lr"]))


def test_an_operator_that_takes_no_tensor_for_a_number_runs_one_by_one(uncompiled, kernels):
    one, other = (Bucket(Unusual, together=together) for together in (True, False))
    for seed in range(2):
        one.step(seed)
        other.step(seed)
    assert_alike(one, other)
    assert kernels() == 0


@pytest.mark.parametrize("order", [(2, 0, 3, 1, 5, 4), nightly((5, 4, 3, 2, 1, 0))])
def test_the_order_of_updates_need_not_be_that_in_memory(order, uncompiled, kernels):
    one = Bucket(CASES["adamw"], together=True, order=order)
    other = Bucket(CASES["adamw"], together=False)
    for seed in range(3):
        one.step(seed)
        other.step(seed)
    assert_alike(one, other)
    assert kernels() == 3


def test_what_moves_between_steps_is_cut_anew(uncompiled, kernels):
    """A shard that leaves its bucket, and comes back; a parameter that changes its group."""
    one, other = Bucket(CASES["adamw"], together=True), Bucket(CASES["adamw"], together=False)
    for seed in range(5):
        home = one.data
        if seed == 1:
            one.data = [*home[:3], home[3].clone(), *home[4:]]
        if seed == 3:
            for bucket in (one, other):
                (group,) = bucket.optimizer.param_groups
                moved = {**group, "params": group["params"][3:], "weight_decay": 0.7}
                group["params"] = group["params"][:3]
                bucket.optimizer.param_groups.append(moved)
        one.step(seed)
        other.step(seed)
        if seed == 1:
            home[3].copy_(one.data[3])
            one.data = home
        assert_alike(one, other)
        assert kernels() == (1, 5, 7, 10, 13)[seed]  # with those that the question counts


@pytest.mark.nightly
def test_groups_part_neighbours(uncompiled, kernels):
    def two_groups(parameters):
        groups = [
            {"params": parameters[:3], "weight_decay": 0.5},
            {"params": parameters[3:], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=1e-2)

    one, other = Bucket(two_groups, together=True), Bucket(two_groups, together=False)
    for seed in range(3):
        one.step(seed)
        other.step(seed)
    assert_alike(one, other)
    assert kernels() == 6


def test_an_update_that_depends_on_the_shape_runs_one_by_one(uncompiled, kernels):
    shapes = ((40, 3), (7,), (64, 2))
    one = Bucket(DecayMatrices, together=True, shapes=shapes)
    other = Bucket(DecayMatrices, together=False, shapes=shapes)
    one.step(0)
    other.step(0)
    assert_alike(one, other)
    assert kernels() == 0


def swap_moments(bucket):
    state = bucket.states[0]
    state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"].abs(), state["exp_avg"].abs()


def set_in_place(tensor, value):
    tensor.data = torch.full_like(tensor, value)


DISTURBANCES = {
    "nothing": lambda b: None,
    "replaced": lambda b: b.states[3].update(exp_avg=b.states[3]["exp_avg"] * 2),
    "written to": lambda b: b.states[0]["exp_avg_sq"].mul_(2),
    "moved": lambda b: set_in_place(b.states[0]["exp_avg"], 0.5),
    "all moved": lambda b: [set_in_place(state["exp_avg"], 0.5) for state in b.states],
    "swapped": swap_moments,
    "inexact counts": lambda b: [state["step"].fill_(2.0**25) for state in b.states],
    "infinite counts": lambda b: [state["step"].fill_(torch.inf) for state in b.states],
    "all counts": lambda b: [state["step"].fill_(9) for state in b.states],
    "loaded": lambda b: b.optimizer.load_state_dict(b.optimizer.state_dict()),
    "rate": lambda b: b.optimizer.param_groups[0].update(lr=0.5),
    "no decay": lambda b: b.optimizer.param_groups[0].update(weight_decay=0.0),
    "maximizes": lambda b: b.optimizer.param_groups[0].update(maximize=True),
    "forgotten": lambda b: b.optimizer.state.pop(b.parameters[0]),
    "one count": lambda b: b.states[1]["step"].fill_(40),
}


@pytest.mark.slow(reason="many steps, some of which are traced anew")
def test_what_a_piece_was_known_by_is_looked_at_again(uncompiled):
    """Two steps between them: the second finds what it was as in the first."""
    one, other = (Bucket(CASES["adamw"], together=together) for together in (True, False))
    seeds = itertools.count()
    for disturb in DISTURBANCES.values():
        for bucket in (one, other):
            disturb(bucket)
        for seed in itertools.islice(seeds, 2):
            one.step(seed)
            other.step(seed)
            assert_alike(one, other)
    assert float(one.states[1]["step"]) == 40 + 2, "the last disturbance's, and steps since"


def test_a_piece_that_is_as_in_the_last_step_is_not_put_together_again(uncompiled, monkeypatch):
    bucket = Bucket(CASES["adamw"], together=True)
    bucket.step(0)  # makes states
    bucket.step(1)
    monkeypatch.setattr(updates, "joined_state", None)
    bucket.step(2)
    assert {float(state["step"]) for state in bucket.states} == {3.0}


def test_what_is_known_of_states_keeps_none_of_them(uncompiled):
    bucket = Bucket(CASES["adamw"], together=True)
    for seed in range(3):
        bucket.step(seed)
    known = [weakref.ref(state["exp_avg"]) for state in bucket.states]
    bucket.optimizer.state.clear()
    assert not any(reference() is not None for reference in known)


def test_each_parameter_has_a_step_of_its_own(uncompiled):
    bucket = Bucket(CASES["adamw"], together=True)
    bucket.step(0)
    bucket.step(1)
    steps = [state["step"] for state in bucket.states]
    assert all(one is not other for one, other in itertools.combinations(steps, 2))
    steps[0].add_(1)
    assert [step.item() for step in steps] == [3, 2, 2, 2, 2, 2]
    assert all(state["exp_avg"]._base is None for state in bucket.states)


@pytest.mark.slow(reason="kernels are compiled")
@pytest.mark.parametrize("name", first(1, ["adamw", "sgd_nesterov"]))
def test_the_compiled_kernel_is_as_the_optimizer(name, monkeypatch):
    monkeypatch.setattr(updates, "FEWEST_ELEMENTS", 8)
    one, other = Bucket(CASES[name], together=True), Bucket(CASES[name], together=False)
    for seed in range(3):
        one.step(seed)
        other.step(seed)
    assert_alike(one, other)


# Whole parameters.

WHOLE_SHAPES = ((40, 3), (7,), (5, 0), (4, 3, 2, 2), (), (1,), (33,))
SEEN_FLAT = 4  # of these: those of more than one element


@pytest.mark.parametrize("name", only(("adagrad",), sorted(CASES)))
def test_a_whole_parameter_is_updated_as_a_shard_that_is_all_of_it(name, uncompiled, kernels):
    # Rprop's masks of one number are refused: it would have to be read.
    shapes = [shape for shape in WHOLE_SHAPES if shape or name != "rprop"]
    one, other = (Wholes(CASES[name], together, shapes=shapes) for together in (True, False))
    for seed in range(3):
        one.step(seed)
        other.step(seed)
        assert_alike(one, other)
    pairs = zip(one.parameters, one.states, other.states, strict=True)
    for parameter, mine, its in pairs:
        for state, value in mine.items():
            if isinstance(value, torch.Tensor):  # a clone of a gradient lies like that
                assert value.stride() in (parameter.stride(), its[state].stride())
                assert value._base is None
    assert kernels() == 3 * SEEN_FLAT


@pytest.mark.nightly
def test_whole_parameters_continue_from_a_state_dict(uncompiled, kernels):
    one, other = (Wholes(CASES["adamw"], together) for together in (True, False))
    one.step(0)
    other.step(0)
    given = copy.deepcopy(other.optimizer.state_dict())
    # As from another model: what does not lie like its parameter is updated as it is.
    given["state"][3]["exp_avg"] = given["state"][3]["exp_avg"].contiguous()
    one.optimizer.load_state_dict(given)
    for seed in range(1, 4):
        one.step(seed)
        other.step(seed)
    assert_alike(one, other)
    assert kernels() == 5 + 3 * 4
    theirs = other.optimizer.state_dict()["state"]
    torch.testing.assert_close(one.optimizer.state_dict()["state"], theirs, rtol=1e-5, atol=1e-6)


def test_a_kernel_counts_as_a_write_to_a_whole_parameter(uncompiled, kernels):
    bucket = Wholes(CASES["adamw"], together=True)
    before = [p._version for p in bucket.parameters]
    bucket.step(0)
    assert all(p._version > v for p, v in zip(bucket.parameters, before, strict=True) if p.numel())


class Normed(torch.optim.Optimizer):
    """Not elementwise but for vectors."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / p.grad.norm() if p.ndim == 2 else p.grad, alpha=group["lr"])


def test_what_is_not_elementwise_is_updated_whole(uncompiled, kernels):
    shapes = ((40, 3), (7,), (40, 3), (7,), (40, 3))
    one, other = (Wholes(Normed, together, shapes=shapes) for together in (True, False))
    one.runner.prepare(range(len(shapes)))
    assert one.runner.trace_count == 3  # of a matrix twice
    for seed in range(3):
        one.step(seed)
        other.step(seed)
    assert_alike(one, other)
    assert one.runner.trace_count == 3 and kernels() == 3 * 2


@pytest.mark.nightly
def test_an_operator_without_a_kernel_leaves_parameters_whole(uncompiled, kernels):
    one, other = (Wholes(Unusual, together) for together in (True, False))
    for seed in range(2):
        one.step(seed)
        other.step(seed)
    assert_alike(one, other)
    assert kernels() == 0


def test_adjoin_and_join():
    flat = torch.arange(10.0)
    one, two, three = flat.split([3, 3, 4])
    assert adjoin(one, two) and adjoin(two, three)
    assert not adjoin(one, three) and not adjoin(two, one) and not adjoin(one, two.clone())
    assert torch.equal(join([one, flat[:0], two]), flat[:6])


def test_states_that_differ_in_kind_are_not_joined():
    shard = torch.ones(2)
    assert joined_state([{"a": shard}, {}], [2, 2]) is None
    assert joined_state([{"a": 1}, {"a": 2}], [2, 2]) is None
    assert joined_state([{"a": shard}, {"a": shard.double()}], [2, 2]) is None
    assert joined_state([{"a": 1}, {"a": 1}], [2, 2]) == {"a": 1}


def test_states_next_to_each_other_are_not_copied_again(uncompiled):
    bucket = Bucket(CASES["adamw"], together=True)
    bucket.step(0)
    addresses = [state["exp_avg"].data_ptr() for state in bucket.states]
    bucket.step(1)
    assert [state["exp_avg"].data_ptr() for state in bucket.states] == addresses
