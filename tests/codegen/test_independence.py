"""Optimizers that do not update each parameter by itself are found out before they train."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
from torch import nn

from zerofx.codegen.rewrite.elementwise import UpdateError
from zerofx.codegen.trace import independence
from zerofx.codegen.trace.independence import check_idle, check_independent


def optimizer_of(update):
    """An optimizer whose step is ``update(self)``, over two groups of one parameter each."""

    class Custom(torch.optim.Optimizer):
        def __init__(self, params, lr=0.1):
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure=None):
            update(self)

    Custom.__name__ = update.__name__
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]
    return Custom([{"params": [p]} for p in parameters])


def by_position(self):
    for group in self.param_groups:
        for i, p in enumerate(group["params"]):
            p.add_(p.grad, alpha=-group["lr"] * (i + 1))


def by_number(self):
    for group in self.param_groups:
        for p in group["params"]:
            p.add_(p.grad, alpha=-group["lr"] / len(group["params"]))


def by_first_group(self):
    for group in self.param_groups:
        for p in group["params"]:
            p.add_(p.grad, alpha=-self.param_groups[0]["lr"])


def by_global_norm(self):
    gradients = [p.grad for group in self.param_groups for p in group["params"]]
    norm = torch.stack([g.norm() for g in gradients]).norm()
    for group in self.param_groups:
        for p in group["params"]:
            p.add_(p.grad / norm, alpha=-group["lr"])


def by_chance(self):
    for group in self.param_groups:
        for p in group["params"]:
            p.add_(torch.randn_like(p), alpha=group["lr"])


@pytest.mark.parametrize(
    "update", [by_position, by_number, by_first_group, by_global_norm, by_chance]
)
def test_an_update_that_looks_elsewhere_is_refused(update):
    with pytest.raises(UpdateError, match=f"{update.__name__}.step does not update each parameter"):
        check_independent(optimizer_of(update))


def by_table(self):
    for group in self.param_groups:
        for p, factor in zip(group["params"], group["factors"], strict=False):
            p.add_(p.grad, alpha=-group["lr"] * factor)


def by_name(self):
    for group in self.param_groups:
        for p, name in zip(group["params"], group["param_names"], strict=True):
            p.add_(p.grad, alpha=-group["lr"] / (1 + len(name)))


def test_a_table_by_position_is_refused_and_names_are_not():
    optimizer = optimizer_of(by_table)
    group = optimizer.param_groups[0]
    group["params"] += [nn.Parameter(torch.ones(2)) for _ in range(3)]
    group["factors"] = optimizer.param_groups[1]["factors"] = [1.0, 1.0, 1.0, 0.5]
    with pytest.raises(UpdateError, match="by_table.step does not update each parameter by itself"):
        check_independent(optimizer)
    group["factors"][3] = 1.0
    assert check_independent(optimizer)
    optimizer = optimizer_of(by_name)
    for group in optimizer.param_groups:
        group["params"] += [nn.Parameter(torch.ones(2)) for _ in range(3)]
        group["param_names"] = ["w", "of.two", "of.three.parts", "bias"]
    assert check_independent(optimizer)


def by_number_once_warm(self):
    for group in self.param_groups:
        for p in group["params"]:
            state = self.state[p]
            state["step"] = state.get("step", 0) + 1
            shared = len(group["params"]) if state["step"] > 9 else 1
            p.add_(p.grad, alpha=-group["lr"] / shared)


def test_an_update_that_looks_elsewhere_later_is_refused_then():
    optimizer = optimizer_of(by_number_once_warm)
    assert check_independent(optimizer)
    assert check_independent(optimizer, {"step": 2, "momentum": torch.ones(7)})
    for more in ({"state": {"step": 9, "momentum": torch.ones(7)}}, {"num_steps": 10}):
        with pytest.raises(UpdateError, match="does not update each parameter by itself"):
            check_independent(optimizer, **more)


def clipped(self):
    """By the norm of all gradients, if that is larger than small tensors' is."""
    gradients = [p.grad for group in self.param_groups for p in group["params"]]
    norm = torch.stack([g.norm() for g in gradients]).norm()
    for group in self.param_groups:
        for p in group["params"]:
            p.add_(p.grad / torch.clamp(norm / 100, min=1), alpha=-group["lr"])


def adapted(self):
    """A rate for all that grows with what gradients have in common, as D-Adaptation's does."""
    for group in self.param_groups:
        for p in group["params"]:
            total = self.state[p].setdefault("total", torch.zeros_like(p)).add_(p.grad)
            group["d"] = max(group.get("d", 1e-6), 1e-7 * total.abs().sum().item())
        for p in group["params"]:
            p.add_(p.grad, alpha=-group["d"])


@pytest.mark.parametrize("update", [clipped, adapted])
def test_what_is_shared_only_where_gradients_are_large_is_refused(update):
    with pytest.raises(UpdateError, match="does not update each parameter by itself"):
        check_independent(optimizer_of(update))


def sign(self):
    for group in self.param_groups:
        for p in group["params"]:
            momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
            p.add_(torch.sign(momentum.lerp(p.grad, 0.1)), alpha=-group["lr"])
            momentum.lerp_(p.grad, 0.01)


def wants_one_dimension(self):
    for group in self.param_groups:
        for p in group["params"]:
            (length,) = p.shape
            p.sub_(p.grad, alpha=group["lr"] / length)


def test_others_pass():
    assert check_independent(optimizer_of(sign))


def test_what_cannot_be_tried_is_left_for_tracing_with_a_warning():
    words = "wants_one_dimension.step .* ValueError: too many values .*every parameter by itself"
    with pytest.warns(UserWarning, match=words):
        assert not check_independent(optimizer_of(wants_one_dimension))


def wants_vectors(self):
    for group in self.param_groups:
        for p in group["params"]:
            (_,) = p.shape
            assert p.dtype == torch.float64
            p.sub_(p.grad, alpha=group["lr"] / len(group["params"]))


def test_it_is_tried_on_tensors_like_its_own_if_it_takes_no_others():
    optimizer = optimizer_of(wants_vectors)
    for group in optimizer.param_groups:
        group["params"] = [nn.Parameter(torch.ones(9, dtype=torch.float64))]
    with pytest.raises(UpdateError, match="wants_vectors.step does not update each parameter"):
        check_independent(optimizer)


@pytest.mark.parametrize(("update", "is_refused"), [(sign, False), (by_global_norm, True)])
def test_it_is_tried_whatever_the_default_device_is(update, is_refused):
    optimizer = optimizer_of(update)
    with torch.device("meta"):
        with pytest.raises(UpdateError) if is_refused else contextlib.nullcontext():
            assert check_independent(optimizer)


class Bias(nn.Parameter):
    """A parameter that is not decayed."""


def by_class(self):
    for group in self.param_groups:
        for p in group["params"]:
            p.sub_(p.grad + (0 if isinstance(p, Bias) else 0.1) * p, alpha=group["lr"])


@pytest.mark.parametrize(("update", "is_refused"), [(by_class, True), (sign, False)])
def test_an_update_that_looks_at_a_parameters_class_is_refused_where_there_are_several(
    update, is_refused
):
    optimizer = optimizer_of(update)
    assert check_independent(optimizer)
    optimizer.param_groups[0]["params"] = [Bias(torch.ones(3))]
    if not is_refused:
        assert check_independent(optimizer)
        return
    with pytest.raises(UpdateError, match="by_class.step updates .* class Bias otherwise"):
        check_independent(optimizer)


def decays_all(self):
    for group in self.param_groups:
        for p in group["params"]:
            p.mul_(1 - group["lr"])
            if p.grad is not None:
                p.sub_(p.grad, alpha=group["lr"])


def counts_all(self):
    for group in self.param_groups:
        for p in group["params"]:
            state = self.state[p]
            state["step"] = state.get("step", 0) + 1
            if p.grad is not None:
                p.sub_(p.grad, alpha=group["lr"] / state["step"])


def prepares_all(self):
    for group in self.param_groups:
        for p in group["params"]:
            average = self.state[p].setdefault("average", torch.zeros_like(p))
            if p.grad is not None:
                p.sub_(average.lerp_(p.grad, 0.1), alpha=group["lr"])


@pytest.mark.parametrize("update", [decays_all, counts_all])
def test_an_update_of_parameters_without_gradients_is_refused(update):
    optimizer = optimizer_of(update)
    assert check_independent(optimizer)
    with pytest.raises(
        UpdateError, match=f"{update.__name__}.step changes parameters that have no"
    ):
        check_idle(optimizer)


@pytest.mark.parametrize("update", [sign, prepares_all])
def test_others_leave_those_without_gradients_alone_or_cannot_step(update):
    check_idle(optimizer_of(update))


def test_nothing_is_left_behind():
    optimizer = optimizer_of(sign)
    before = torch.get_rng_state()
    groups = [dict(group) for group in optimizer.param_groups]
    with mock.patch("torch.random.fork_rng", wraps=torch.random.fork_rng) as forked:
        assert check_independent(optimizer)
    kinds = {call.kwargs["device_type"] for call in forked.call_args_list}
    assert kinds == {"cpu"}, "2.11 takes no None"
    assert torch.equal(torch.get_rng_state(), before)
    assert not optimizer.state and [dict(group) for group in optimizer.param_groups] == groups
    assert all(p.grad is None for group in groups for p in group["params"])


class LargerOnly(Exception):
    """Is raised by an update that takes no small tensors."""


def in_vectors(self):
    """Takes vectors alone, as a step that looks at shapes may."""
    for group in self.param_groups:
        for p in group["params"]:
            if p.shape == (4, 4):
                raise LargerOnly
            p.sub_(p.grad / p.grad.norm(), alpha=group["lr"])


@pytest.mark.parametrize("update", [sign, in_vectors])
def test_trials_seed_no_generator_of_an_accelerator(update):
    """Ranks would draw the same dropout masks, and the same ones after each trial."""
    optimizer = optimizer_of(update)
    with mock.patch("torch.cuda.manual_seed_all") as seeded:
        check_independent(optimizer)
        check_independent(optimizer, {"step": 1})
        check_idle(optimizer)
    seeded.assert_not_called()


def test_a_trial_on_an_accelerator_puts_back_its_generator():
    given = mock.MagicMock()
    given.get_rng_state.side_effect = lambda device: f"state of {device}"
    device = torch.device("cuda", 1)
    tensors = [mock.Mock(device=device), mock.Mock(device=torch.device("cpu"))]
    with mock.patch("torch.get_device_module", return_value=given):
        with independence._seeded(7, tensors):
            given.manual_seed.assert_called_once_with(7)
            given.device.assert_called_once_with(device)
            given.set_rng_state.assert_not_called()
        given.set_rng_state.assert_called_once_with("state of cuda:1", device)
