"""What a step does to gradients just before their update is done by the update's kernel."""

from __future__ import annotations

import contextlib
import functools
import operator
import time
from collections import Counter
from unittest import mock

import pytest
import torch
from torch import fx, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
from tests.kit.allocations import Allocations
from tests.kit.covering import first, only
from tests.kit.models import Lion
from tests.kit.ranks import ranks_fixture  # noqa: F401
from zerofx import compat
from zerofx.codegen import kernel
from zerofx.compiler import rewrite as compiler
from zerofx.ir import ops
from zerofx.ir.interface import InputRole, gradient_work, set_input_role
from zerofx.lower.regions import CompiledRegion
from zerofx.passes.fuse.fold_gradient_work import fold_gradient_work
from zerofx.passes.pipeline import PIPELINE
from zerofx.replay.reference import worked_on
from zerofx.runtime.comm.communication import Communicator
from zerofx.runtime.optimizer import update as updates
from zerofx.runtime.optimizer.steps import OptimizerSteps

aten = torch.ops.aten
BF16 = torch.bfloat16


# The rewrite of a program.


class Program(fx.Graph):
    """A program of flat shards, written a line at a time."""

    def input(self, name, *shape, dtype=torch.float32, kind="other"):
        node = self.placeholder(name)
        node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
        set_input_role(node, InputRole(kind))
        return node

    def call(self, target, *args, **kwargs):
        node = self.call_function(target, args, kwargs)
        values = fx.node.map_arg((args, kwargs), lambda operand: operand.meta["val"])
        node.meta["val"] = target(*values[0], **values[1])
        return node

    def update(self, shard, gradient, index=0):
        return self.call(ops.update, shard, gradient, 1, index, None)

    def module(self):
        return fx.GraphModule(nn.Module(), self)

    def updates(self):
        """The updates as they are after a pass, in order."""
        return [node for node in self.nodes if node.target in (ops.update, ops.update_together)]

    def fold(self, *results):
        self.output(results)
        fold_gradient_work(self.module(), None)
        self.lint()
        return Counter(node.target for node in self.nodes if node.op == "call_function")


@pytest.fixture
def program():
    return Program()


@pytest.fixture
def inputs(program):
    """Two parameters, a reduced gradient of each, and a coefficient."""
    p, q = (program.input(name, 6, kind="parameter") for name in "pq")
    g, h = (program.call(ops.wait, program.input(name, 6)) for name in ("reduced_g", "reduced_h"))
    return p, q, g, h, program.input("coefficient")


def test_a_product_with_a_number_is_folded(program, inputs):
    p, q, g, h, coefficient = inputs
    one = program.update(p, program.call(aten.mul.Tensor, g, coefficient))
    other = program.update(q, program.call(aten.mul.Tensor, h, coefficient), 1)
    left = program.fold(one, other)
    assert aten.mul.Tensor not in left
    one, other = program.updates()
    assert [one.args[1], other.args[1]] == [[g], [h]]
    assert one.kwargs == other.kwargs  # of which there is one kernel
    assert one.kwargs["coefficients"] == [coefficient]
    assert one.kwargs["work"] == (
        "mul_tensor = aten.mul.Tensor(gradient, coefficient); return mul_tensor"
    )
    operands, twice = (torch.ones(3), torch.tensor(2.0)), torch.full((3,), 2.0)
    assert torch.equal(gradient_work(one)(*operands), twice)
    (worked,) = worked_on([operands[0]], one.kwargs["work"], [operands[1]])
    assert torch.equal(worked, twice)


def test_a_chain_is_folded_with_what_it_branches_on(program, inputs):
    p, _, g, _, coefficient = inputs
    flag = program.input("flag", dtype=torch.bool)
    wide = program.call(aten._to_copy.default, g, dtype=torch.float64)
    scaled = program.call(aten.mul.Tensor, wide, coefficient)
    masked = program.call(
        aten.where.self, program.call(aten.isnan.default, wide), coefficient, wide
    )
    kept = program.call(aten.where.self, flag, scaled, masked)
    one = program.update(p, program.call(aten._to_copy.default, kept, dtype=torch.float32))
    assert set(program.fold(one)) == {ops.wait, ops.update_together, operator.getitem}
    (one,) = program.updates()
    assert one.args[1] == [g] and set(one.kwargs["coefficients"]) == {coefficient, flag}
    # As its text says, and as its kernel does.
    gradient, values = torch.tensor([1.0, torch.nan]), [torch.tensor(3.0), torch.tensor(True)]
    order = [coefficient, flag]
    given = [values[order.index(node)] for node in one.kwargs["coefficients"]]
    (worked,) = worked_on([gradient], one.kwargs["work"], given)
    torch.testing.assert_close(worked, gradient_work(one)(gradient, *given), equal_nan=True)


def test_work_on_a_matrix_is_that_on_a_flat_gradient(program, inputs):
    """As gradients are at stage 0: there is one kernel for matrices and vectors."""
    p, _, g, _, coefficient = inputs
    matrix, its = program.input("matrix", 2, 3, kind="parameter"), program.input("its", 2, 3)
    scaled = program.call(aten.mul.Tensor, program.call(ops.wait, its), coefficient)
    one = program.update(p, program.call(aten.mul.Tensor, g, coefficient))
    left = program.fold(one, program.update(matrix, scaled, 1))
    assert aten.mul.Tensor not in left
    one, other = program.updates()
    assert gradient_work(one) is gradient_work(other)


def test_equal_work_is_shared_and_other_work_is_not(program, inputs):
    p, q, g, h, coefficient = inputs
    one = program.update(p, program.call(aten.mul.Tensor, g, coefficient))
    other = program.update(q, program.call(aten.div.Tensor, h, coefficient), 1)
    program.fold(one, other)
    one, other = program.updates()
    assert one.kwargs["work"] != other.kwargs["work"]
    assert gradient_work(one) is not gradient_work(other)


def test_a_gradient_that_outlives_the_step_is_written(program, inputs):
    p, _, g, _, coefficient = inputs
    clipped = program.call(aten.mul.Tensor, g, coefficient)
    one = program.update(p, clipped)
    program.fold(one, clipped)
    assert one.args[1] is clipped and not one.kwargs


def test_what_something_behind_a_collective_reads_is_written(program, inputs):
    p, _, g, _, coefficient = inputs
    unscaled = program.call(aten.mul.Tensor, g, coefficient)
    program.call(ops.wait, coefficient)
    norm = program.call(aten.linalg_vector_norm.default, unscaled)
    clipped = program.call(aten.mul.Tensor, unscaled, norm)
    one = program.update(p, clipped)
    left = program.fold(one)
    (one,) = program.updates()
    assert one.args[1] == [unscaled] and left[aten.mul.Tensor] == 1


def test_a_norm_computed_where_the_gradient_is_needs_none_in_memory(program, inputs):
    p, _, g, _, coefficient = inputs
    unscaled = program.call(aten.mul.Tensor, g, coefficient)
    norm = program.call(aten.linalg_vector_norm.default, unscaled)
    one = program.update(p, program.call(aten.mul.Tensor, unscaled, norm))
    left = program.fold(one)
    (one,) = program.updates()
    assert one.args[1] == [g] and one.kwargs["coefficients"] == [coefficient, norm]
    assert left[aten.mul.Tensor] == 1  # the norm's


def test_a_wider_gradient_is_not_kept_for_the_sake_of_a_fold(program, inputs):
    p, _, g, _, coefficient = inputs
    narrow = program.call(aten._to_copy.default, g, dtype=BF16)
    norm = program.call(aten.linalg_vector_norm.default, narrow)
    one = program.update(p, program.call(aten.mul.Tensor, narrow, norm))
    program.fold(one)
    (one,) = program.updates()
    assert one.args[1] == [narrow]


def test_a_sum_of_two_gradients_is_computed_before(program, inputs):
    p, q, g, h, coefficient = inputs
    total = program.call(aten.add.Tensor, g, h)
    one = program.update(p, program.call(aten.mul.Tensor, total, coefficient))
    alone = program.update(q, program.call(aten.add.Tensor, g, h), 1)
    program.fold(one, alone)
    one, alone = program.updates()
    assert one.args[1] == [total] and not alone.kwargs


@pytest.mark.parametrize("moves", [False, True], ids=["itself", "gathered"])
def test_a_parameter_that_may_have_been_updated_is_read_in_its_place(moves, program, inputs):
    p, q, _, _, coefficient = inputs
    source = q
    if moves:  # in a world of one: the same memory
        source = program.call(ops.wait, program.call(ops.all_gather_start, q, 1))
    product = program.call(aten.mul.Tensor, source, coefficient)
    one = program.update(q, q)
    other = program.update(p, product, 1)
    program.fold(one, other)
    assert other.args[1] is product


@pytest.mark.parametrize("element", [False, True], ids=["itself", "element"])
def test_a_coefficient_that_may_have_been_updated_is_read_in_its_place(element, program, inputs):
    p, q, g, h, coefficient = inputs
    number = program.input("scale", kind="parameter")
    if element:
        number = program.call(aten.select.int, q, 0, 0)
    product = program.call(aten.mul.Tensor, g, number)
    written = program.update(q, h, 1)
    one = program.update(p, product)
    program.fold(written, one)
    assert one.args[1] is product and not one.kwargs


def test_a_gradient_that_is_overwritten_is_read_in_its_place(program, inputs):
    p, _, g, h, coefficient = inputs
    product = program.call(aten.mul.Tensor, g, coefficient)
    written = program.call(aten.copy_.default, g, h)
    one = program.update(p, product)
    program.fold(one, written)
    assert one.args[1] is product


def test_a_gradient_without_work_is_left_alone(program, inputs):
    p, q, g, h, _ = inputs
    one, other = program.update(p, g), program.update(q, program.call(aten.tanh.default, h), 1)
    program.fold(one, other)
    assert not one.kwargs and not other.kwargs


# Whole steps.


def loss_of(model, x):
    return model(x).float().square().mean()


def clip_norm(model):
    clip_grad_norm_(model.parameters(), 0.1)


def clip_value(model):
    clip_grad_value_(model.parameters(), 0.003)


def scale(model):
    for parameter in model.parameters():
        parameter.grad.mul_(0.5).add_(0.001)


def nothing(model):
    pass


def clipped_step(work, model, optimizer, x):
    loss = loss_of(model, x)
    loss.backward()
    work(model)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def step_that_keeps(work, model, optimizer, x):
    optimizer.zero_grad()
    loss = loss_of(model, x)
    loss.backward()
    work(model)
    optimizer.step()
    return loss


def step_that_looks(work, model, optimizer, x):
    loss = loss_of(model, x)
    loss.backward()
    work(model)
    optimizer.step()
    seen = model[0].weight.grad.sum()
    optimizer.zero_grad()
    return loss + seen.detach()


def step_twice(work, model, optimizer, x):
    loss = loss_of(model, x)
    loss.backward()
    work(model)
    optimizer.step()
    work(model)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def batch(number, rank=0, world_size=1):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 12, generator=generator).chunk(world_size)[rank]


def adamw(groups, **options):
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0, **options)


class Trained:
    """Three steps of a compiled function; the kernels of each, and what they have made."""

    def __init__(
        self,
        stage,
        work=clip_norm,
        *,
        folds=True,
        step=clipped_step,
        dtype=torch.float32,
        bad=None,
        rank=0,
        world_size=1,
        make=adamw,
        **options,
    ):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = nn.Sequential(nn.Linear(12, 33), nn.GELU(), nn.Linear(33, 5)).to(dtype)
        groups = [
            {"params": model[0].parameters(), "weight_decay": 0.1},
            {"params": model[2].parameters(), "lr": 3e-3},
        ]
        optimizer = make(groups)
        called = functools.partial(step, work)
        if stage is not None:
            called = torch.compile(
                called,
                backend="zero",
                options={"stage": stage, "lowering": "inductor", **options},
            )
        self.kernels, self.losses, self.gradients = [], [], None
        with (
            contextlib.nullcontext() if folds else pytest.MonkeyPatch.context() as patched,
            counting() as calls,
        ):
            if patched is not None:
                without_pass(patched, "fold_gradient_work")
            for number in range(3):
                x = batch(number, rank, world_size).to(dtype)
                if bad is not None and number == 1:
                    x[0, 0] = bad
                self.losses.append(called(model, optimizer, x).item())
                self.kernels.append(calls.pop("kernels", 0))
        if stage in (None, 0, 1):
            self.gradients = [p.grad for p in model.parameters()]
        self.parameters = [v.detach().clone() for v in model.state_dict().values()]
        states = optimizer.state_dict()["state"].values()
        self.states = [value for state in states for _, value in sorted(state.items())]


def without_pass(monkeypatch, name):
    """Compile without one pass of the pipeline."""
    others = tuple(step for step in PIPELINE if step.name != name)
    monkeypatch.setattr(compiler, "PIPELINE", others)


class counting:
    """A kernel whatever the length, and none of them compiled: that is tested apart."""

    def __enter__(self):
        calls = {}
        ready = kernel.UpdateKernel.ready

        def counted(self, *values):
            calls["kernels"] = calls.get("kernels", 0) + 1
            return ready(self, *values)

        self.patches = [
            mock.patch.object(kernel.UpdateKernel, "ready", counted),
            mock.patch.object(updates, "FEWEST_ELEMENTS", 0),
            mock.patch.object(compat.inductor, "CompiledForAnyLength", lambda gm: gm),
            mock.patch.object(compat.inductor, "compile_with_inductor", lambda gm, *_: gm),
            mock.patch.object(CompiledRegion, "_known", {}),
        ]
        for patch in self.patches:
            patch.start()
        return calls

    def __exit__(self, *error):
        for patch in self.patches:
            patch.stop()


def assert_bitwise(one, other):
    torch.testing.assert_close(one.losses, other.losses, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(one.parameters, other.parameters, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(one.states, other.states, rtol=0, atol=0, equal_nan=True)


def assert_close(one, other, **tolerance):
    tolerance = {"rtol": 1e-5, "atol": 1e-6, "equal_nan": True} | tolerance
    torch.testing.assert_close(one.losses, other.losses, **tolerance)
    torch.testing.assert_close(one.parameters, other.parameters, **tolerance)
    torch.testing.assert_close(one.states, other.states, **tolerance)


EACH_STAGE = [(0, clip_norm), (1, scale), (2, clip_value), (3, clip_norm)]


@pytest.mark.nightly
@pytest.mark.parametrize(("stage", "work"), EACH_STAGE)
def test_a_step_trains_as_without(stage, work):
    folded = Trained(stage, work)
    assert_bitwise(folded, Trained(stage, work, folds=False))
    assert_close(folded, Trained(stage, work, fuse_optimizer=False))


@pytest.mark.nightly
def test_fewer_kernels_run_the_clipped_step():
    """As many as without clipping: one for the neighbours of a group."""
    assert Trained(3).kernels == Trained(3, nothing).kernels == [2, 2, 2]
    assert Trained(0).kernels == [4, 4, 4]  # one for each parameter
    assert Trained(3, folds=False).kernels == [4, 4, 4]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options", first(1, [{}, {"master_weights": True}]), ids=["plain", "masters"]
)
def test_gradients_in_bf16_are_rounded_as_the_step_says(options):
    folded = Trained(3, dtype=BF16, **options)
    assert_bitwise(folded, Trained(3, dtype=BF16, folds=False, **options))


@pytest.mark.nightly
@pytest.mark.parametrize(("bad", "work"), [(torch.nan, clip_norm), (torch.inf, clip_value)])
def test_what_is_not_finite_spreads_as_without(bad, work):
    folded = Trained(2, work, bad=bad)
    assert any(value.isnan().any() for value in folded.parameters)
    assert_bitwise(folded, Trained(2, work, bad=bad, folds=False))


@pytest.mark.nightly
@pytest.mark.parametrize("stage", only((0, 3), (0, 1, 3)))
def test_a_gradient_that_is_read_afterwards_has_been_clipped(stage):
    eager = Trained(None, step=step_that_looks)
    assert_close(Trained(stage, step=step_that_looks), eager)
    kept = Trained(stage, step=step_that_keeps)
    eager = Trained(None, step=step_that_keeps)
    assert_close(kept, eager)
    if kept.gradients is not None:
        torch.testing.assert_close(kept.gradients, eager.gradients)


@pytest.mark.nightly
def test_two_updates_in_a_step_have_work_of_their_own():
    assert_close(Trained(3, step=step_twice), Trained(None, step=step_twice))


@pytest.mark.nightly
@pytest.mark.parametrize(("stage", "kernels"), [(0, 4), (2, 2)])
def test_a_scaled_step_unscales_in_the_kernel(stage, kernels):
    def step(_, model, optimizer, x):
        loss = loss_of(model, x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    found = []
    for options in ({}, {"fuse_optimizer": False}):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        found.append(Trained(stage, step=step, bad=float("inf"), **options))
    folded, unfused = found
    assert_close(folded, unfused)
    assert all(value.isfinite().all() for value in folded.parameters)
    assert folded.kernels == [kernels, 0, kernels]  # one step was skipped


def train_on_rank(stage, work, make=adamw):
    group = torch.distributed.group.WORLD
    ranked = {"rank": group.rank(), "world_size": group.size(), "make": make}
    folded = Trained(stage, work, **ranked)
    assert_close(folded, Trained(stage, work, fuse_optimizer=False, **ranked))
    assert any(folded.kernels)
    return folded.parameters


@pytest.mark.nightly
@pytest.mark.parametrize(("stage", "work"), EACH_STAGE)
def test_ranks_train_as_without(stage, work, ranks):
    one, other = ranks(2).run(train_on_rank, stage, work)
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    torch.testing.assert_close(one, Trained(None, work).parameters, rtol=1e-4, atol=1e-5)


OPTIMIZERS = {
    "amsgrad": functools.partial(adamw, amsgrad=True),
    "momentum": functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "lion": Lion,
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_whole_parameters_train_as_in_eager(name, ranks):
    make = OPTIMIZERS[name]
    eager = Trained(None, make=make)
    alone = Trained(0, make=make)
    assert alone.kernels == [4, 4, 4]
    assert_close(alone, eager)
    assert_close(alone, Trained(0, make=make, fuse_optimizer=False))
    one, other = ranks(2).run(train_on_rank, 0, clip_norm, make)
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    torch.testing.assert_close(one, eager.parameters, rtol=1e-4, atol=1e-5)


# Memory.


def allocated_for_updates(monkeypatch) -> int:
    """The largest allocation of a later step, compiled by default, once gradients' norm is known.

    Units: bytes; 0 for none.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 63), nn.Linear(63, 170))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = torch.compile(functools.partial(clipped_step, clip_norm), backend="zero")
    waited, spans = [0], []
    wait, update = Communicator.wait, OptimizerSteps.update_together

    def noted_wait(self, started):
        result = wait(self, started)
        waited[0] = time.time_ns()
        return result

    def noted_update(self, *args, **kwargs):
        result = update(self, *args, **kwargs)
        spans.append((waited[0], time.time_ns()))
        return result

    monkeypatch.setattr(Communicator, "wait", noted_wait)
    monkeypatch.setattr(OptimizerSteps, "update_together", noted_update)
    for _ in range(3):
        step(model, optimizer, torch.randn(2, 512))
    spans.clear()
    with Allocations() as allocations:
        step(model, optimizer, torch.randn(2, 512))
    assert spans
    return max(allocations.sizes(spans), default=0)


@pytest.mark.nightly
def test_a_clipped_update_allocates_nothing_beyond_states(monkeypatch):
    with monkeypatch.context() as context:
        assert allocated_for_updates(context) <= 64  # numbers: the norm's, the coefficient
    without_pass(monkeypatch, "fold_gradient_work")
    assert allocated_for_updates(monkeypatch) >= 4 * 512 * 63  # that the instrument works
