"""A norm of gradients that is only looked at is summed by the updates that read them anyway."""

from __future__ import annotations

import functools
import gc
import itertools
import operator
import time
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
from tests.kit.allocations import Allocations
from tests.kit.covering import first
from tests.kit.ranks import ranks_fixture  # noqa: F401
from tests.passes.test_fold_gradient_work import Program, counting, without_pass
from zerofx.backend import zero
from zerofx.codegen import kernel
from zerofx.ir import ops
from zerofx.passes.fuse.fold_gradient_norms import fold_gradient_norms
from zerofx.passes.fuse.fold_gradient_work import fold_gradient_work
from zerofx.runtime.optimizer import update as updates
from zerofx.runtime.optimizer.steps import OptimizerSteps

aten = torch.ops.aten
BF16 = torch.bfloat16


# The rewrite of a program.


class Normed(Program):
    """A program that takes norms of flat shards."""

    def gradient(self, name, dtype=torch.float32):
        bucket = self.call(ops.flatten_bucket, [self.input(name, 6, dtype=dtype)], [0], 6)
        return self.call(ops.wait, self.call(ops.reduce_scatter_start, bucket, "mean", 1))

    def square(self, gradient, order=2.0):
        dtype = torch.promote_types(gradient.meta["val"].dtype, torch.float32)
        norm = self.call(aten.linalg_vector_norm.default, gradient, order, dtype=dtype)
        return self.call(aten.pow.Tensor_Scalar, norm, 2.0)

    def reduced(self, *squares):
        stacked = self.call(aten.stack.default, list(squares))
        total = self.call(ops.wait, self.call(ops.all_reduce_start, stacked, "sum"))
        parts = (self.call(aten.select.int, total, 0, at) for at in range(len(squares)))
        return [self.call(aten.sqrt.default, part) for part in parts]

    def total(self, *norms):
        stacked = self.call(aten.stack.default, list(norms))
        return self.call(aten.linalg_vector_norm.default, stacked, 2.0)

    def fold(self, *results):
        """Fold norms; return whether there were any."""
        self.output(results)
        before = str(self)
        fold_gradient_norms(self.module(), None)
        self.lint()
        return str(self) != before


@pytest.fixture
def program():
    return Normed()


@pytest.fixture
def inputs(program):
    """Two parameters, and a reduced gradient of each."""
    p, q = (program.input(name, 6, kind="parameter") for name in "pq")
    return p, q, program.gradient("g"), program.gradient("h")


def test_updates_give_the_squares_of_a_norm_behind_them(program, inputs):
    p, q, g, h = inputs
    updates = program.update(p, g), program.update(q, h, 1)
    norms = program.reduced(program.square(g), program.square(h))
    assert program.fold(*updates, program.total(*norms))
    one, other = program.updates()
    assert one.kwargs == other.kwargs == {"norm": 0}
    stacked = norms[0].args[0].args[0].args[0].args[0]
    assert [(node.target, node.args) for node in stacked.args[0]] == [
        (operator.getitem, (one, 1)),
        (operator.getitem, (other, 1)),
    ]
    assert list(g.users) == [one] and list(h.users) == [other]


def test_the_norm_of_what_work_makes_of_a_gradient_leaves_the_work_to_the_kernel(program, inputs):
    p, _, g, _ = inputs
    scaled = program.call(aten.mul.Tensor, g, program.input("scale"))
    one = program.update(p, scaled)
    total = program.total(*program.reduced(program.square(scaled)))
    assert program.fold(one, total)
    fold_gradient_work(program.module(), None)
    (one,) = program.updates()
    assert one.args[1] == [g] and one.kwargs.keys() == {"norm", "work", "coefficients"}


def test_a_norm_that_clips_is_left_alone(program, inputs):
    p, q, g, h = inputs
    total = program.total(*program.reduced(program.square(g), program.square(h)))
    one = program.update(p, program.call(aten.mul.Tensor, g, total))
    other = program.update(q, program.call(aten.mul.Tensor, h, total), 1)
    assert not program.fold(one, other, total)


def test_a_norm_before_the_updates_is_left_alone(program, inputs):
    p, q, g, h = inputs
    total = program.total(*program.reduced(program.square(g), program.square(h)))
    assert not program.fold(program.update(p, g), program.update(q, h, 1), total)


def test_norms_that_somebody_reads_one_by_one_are_left_alone(program, inputs):
    p, q, g, h = inputs
    updates = program.update(p, g), program.update(q, h, 1)
    norms = program.reduced(program.square(g), program.square(h))
    assert not program.fold(*updates, program.total(*norms), norms[0])


def test_all_of_a_norm_or_nothing_is_folded(program, inputs):
    p, _, g, h = inputs
    one = program.update(p, g)  # h has none
    norms = program.reduced(program.square(g), program.square(h))
    assert not program.fold(one, program.total(*norms))


def test_another_norm_is_left_alone(program, inputs):
    p, _, g, _ = inputs
    one = program.update(p, g)
    norms = program.reduced(program.square(g, order=1.0))
    assert not program.fold(one, program.total(*norms))


def test_a_float64_norm_is_left_alone(program):
    p, g = program.input("p", 6, kind="parameter"), program.gradient("g", torch.float64)
    one = program.update(p, g)
    assert not program.fold(one, program.total(*program.reduced(program.square(g))))


def test_a_gradient_that_is_overwritten_before_its_norm_is_left_alone(program, inputs):
    p, _, g, h = inputs
    one = program.update(p, g)
    written = program.call(aten.copy_.default, g, h)
    total = program.total(*program.reduced(program.square(g)))
    assert not program.fold(one, written, total)


def test_two_norms_do_not_share_a_kernel(program, inputs):
    p, q, g, h = inputs
    updates = program.update(p, g), program.update(q, h, 1)
    norms = program.reduced(program.square(g), program.square(h))
    assert program.fold(*updates, *(program.total(norm) for norm in norms))
    assert [update.kwargs for update in program.updates()] == [{"norm": 0}, {"norm": 1}]


def test_padding_is_zero_as_it_was_reduced(program, inputs):
    p, _, g, _ = inputs
    cast = program.call(aten._to_copy.default, g, dtype=BF16)
    part = program.call(aten.slice.Tensor, cast, 0, 0, 4)
    one = program.update(p, part)
    masked = program.call(ops.mask_padding, part, 0, 0.0)
    assert program.fold(one, program.total(*program.reduced(program.square(masked))))
    (one,) = program.updates()
    assert one.kwargs == {"norm": 0} and list(part.users) == [one]


def test_padding_that_may_be_something_else_is_masked(program, inputs):
    p, _, g, _ = inputs
    shifted = program.call(aten.add.Tensor, g, 1.0)
    one = program.update(p, shifted)
    masked = program.call(ops.mask_padding, shifted, 0, 0.0)
    total = program.total(*program.reduced(program.square(masked)))
    assert not program.fold(one, total)


# Whole steps.


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


def monitored_step(model, optimizer, x, scaler=None):
    loss = model(x).float().square().mean()
    (loss if scaler is None else scaler.scale(loss)).backward()
    if scaler is not None:
        scaler.unscale_(optimizer)
    norm = get_total_norm(gradients(model))
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()
    return loss, norm


def scaled_step(model, optimizer, x):
    loss = model(x).float().square().mean()
    loss.backward()
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)
    norm = get_total_norm(gradients(model))
    optimizer.step()
    optimizer.zero_grad()
    return loss, norm


def clipped_step(model, optimizer, x):
    loss = model(x).float().square().mean()
    loss.backward()
    norm = clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return loss, norm


EACH_STAGE = [(1, monitored_step), (2, scaled_step), (3, monitored_step)]


class Trained:
    """Three steps of a compiled function, or an eager one: norms, and what they have made."""

    def __init__(
        self,
        stage,
        step=monitored_step,
        *,
        dtype=torch.float32,
        sizes=(12, 33, 5),
        bad=None,
        rank=0,
        world_size=1,
        scaled=False,
        **options,
    ):
        torch.manual_seed(0)
        torch._dynamo.reset()
        first, between, last = sizes
        model = nn.Sequential(nn.Linear(first, between), nn.GELU(), nn.Linear(between, last))
        model.to(dtype)
        groups = [
            {"params": model[0].parameters(), "weight_decay": 0.1},
            {"params": model[2].parameters(), "lr": 3e-3},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0)
        if scaled:
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            step = functools.partial(step, scaler=scaler)
        if stage is not None:
            step = torch.compile(step, backend="zero", options={"stage": stage, **options})
        self.step = step
        self.norms = []
        for number in range(3):
            generator = torch.Generator().manual_seed(number)
            x = torch.randn(8, 12, generator=generator).chunk(world_size)[rank].to(dtype)
            if bad is not None and number == 1:
                x[0, 0] = bad
            self.norms.append(step(model, optimizer, x)[1].float())
        self.parameters = [value.detach().clone() for value in model.state_dict().values()]
        states = optimizer.state_dict()["state"].values()
        self.states = [value for state in states for _, value in sorted(state.items())]

    def reports(self):
        code = self.step._torchdynamo_orig_callable.__code__
        gc.collect()  # of another test's step, which has this code too
        (function,) = [known for known in zero.functions if known.code is code]
        return function.programs[0].reports


@pytest.fixture
def summed(monkeypatch):
    """How many kernels have given squares: a kernel whatever the length, and none compiled."""
    calls = []
    ready = kernel.UpdateKernel.ready

    def noted(self, *values):
        run = ready(self, *values)

        def run_noted():
            results = run()
            if self.program.squares is not None:
                calls.append(results[-1])
            return results

        return run_noted

    monkeypatch.setattr(kernel.UpdateKernel, "ready", noted)
    with counting():
        yield calls


def unfolded(monkeypatch, *args, **kwargs):
    with monkeypatch.context() as context:
        without_pass(context, "fold_gradient_norms")
        return Trained(*args, **kwargs)


def assert_same_updates(one, other):
    torch.testing.assert_close(one.parameters, other.parameters, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(one.states, other.states, rtol=0, atol=0, equal_nan=True)


def assert_norms(one, other, rtol=1e-6):
    torch.testing.assert_close(one.norms, other.norms, rtol=rtol, atol=0, equal_nan=True)


@pytest.mark.nightly
@pytest.mark.parametrize(("stage", "step"), EACH_STAGE)
def test_the_norm_is_eagers_and_the_updates_are_bitwise_as_without(
    stage, step, summed, monkeypatch
):
    folded = Trained(stage, step)
    assert len(summed) == 6  # a kernel for each group, three times
    assert_norms(folded, Trained(None, step))
    assert_same_updates(folded, unfolded(monkeypatch, stage, step))
    assert len(summed) == 6


@pytest.mark.slow(reason="whole programs are rewritten and run")
def test_short_updates_give_squares_without_a_kernel(summed, monkeypatch):
    with mock.patch.object(updates, "FEWEST_ELEMENTS", 10_000):  # ends before that of ``summed``
        folded = Trained(3)
        assert not summed
        assert_norms(folded, Trained(None))
        assert_same_updates(folded, unfolded(monkeypatch, 3))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options", first(1, [{}, {"master_weights": True}, {"moment_dtype": torch.int8}])
)
def test_squares_of_bf16_gradients_are_summed_in_fp32(options, summed, monkeypatch):
    monkeypatch.setattr("zerofx.codegen.rewrite.storage.FEWEST_CODED", 0)
    folded = Trained(3, dtype=BF16, **options)
    assert len(summed) >= 3
    plain = unfolded(monkeypatch, 3, dtype=BF16, **options)
    assert_same_updates(folded, plain)
    # torch rounds each parameter's norm to bfloat16; here what a kernel sums is rounded once.
    assert_norms(folded, plain, rtol=2**-7)


@pytest.mark.nightly
@pytest.mark.parametrize("bad", first(1, [torch.nan, torch.inf]))
def test_a_norm_that_is_not_finite_is_what_it_is_in_torch(bad, summed):
    folded = Trained(2, bad=bad)
    assert not folded.norms[1].isfinite() and summed
    assert_norms(folded, Trained(None, bad=bad))


@pytest.mark.nightly
def test_a_step_that_is_skipped_has_a_norm(summed):
    case = {"bad": torch.inf, "scaled": True, "sizes": (12, 32, 4)}  # of which none is padded
    folded = Trained(2, **case)
    assert len(summed) == 4  # of two steps
    assert not folded.norms[1].isfinite() and folded.norms[2].isfinite()
    assert all(value.isfinite().all() for value in folded.parameters)
    assert_norms(folded, Trained(None, **case))


@pytest.mark.nightly
@pytest.mark.parametrize("stage", first(1, [1, 3]))
def test_a_clipped_steps_program_is_unchanged(stage, summed):
    step = Trained(stage, clipped_step)
    (report,) = [one for one in step.reports() if one.name == "fold_gradient_norms"]
    assert report.counts == {"norms": 0, "gradients": 0} and not summed


def test_it_is_off_with_fuse_optimizer(summed):
    plain = Trained(3, fuse_optimizer=False)
    assert not summed
    assert_norms(plain, Trained(None))


def train_on_rank(stage, step):
    group = torch.distributed.group.WORLD
    ranked = {"rank": group.rank(), "world_size": group.size()}
    with pytest.MonkeyPatch.context() as monkeypatch, counting():
        folded = Trained(stage, step, **ranked)
        assert_same_updates(folded, unfolded(monkeypatch, stage, step, **ranked))
    return folded.norms


@pytest.mark.nightly
@pytest.mark.parametrize(("stage", "step"), EACH_STAGE)
def test_ranks_agree_on_the_norm(stage, step, ranks):
    one, other = ranks(2).run(train_on_rank, stage, step)
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    eager = Trained(None, step).norms
    torch.testing.assert_close(one[0], eager[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(one, eager, rtol=1e-4, atol=0)  # gradients are averaged otherwise


# Memory.


def peak_of_updates(monkeypatch):
    """Of a later step, compiled by default: its largest allocation in updates, and its peak.

    Units: bytes.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = torch.compile(
        monitored_step, backend="zero", options={"stage": 3, "bucket_bytes": 1 << 16 | 1 << 10}
    )
    spans = []
    update = OptimizerSteps.update_together

    def noted(self, *args, **kwargs):
        begin = time.time_ns()
        result = update(self, *args, **kwargs)
        spans.append((begin, time.time_ns()))
        return result

    monkeypatch.setattr(OptimizerSteps, "update_together", noted)
    for _ in range(3):
        step(model, optimizer, torch.randn(2, 128))
    spans.clear()
    with Allocations() as allocations:
        step(model, optimizer, torch.randn(2, 128))
    assert len(spans) == 4
    held = itertools.accumulate(nbytes for _, nbytes in allocations.changes)
    return max(allocations.sizes(spans)), max(held)


@pytest.mark.nightly
def test_a_gradient_is_gone_after_its_update(monkeypatch):
    largest, peak = peak_of_updates(monkeypatch)
    assert largest <= 64
    without_pass(monkeypatch, "fold_gradient_norms")
    _, peak_without = peak_of_updates(monkeypatch)
    assert peak + 2 * 4 * 128 * 128 <= peak_without  # of four
