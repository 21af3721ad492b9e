"""What is done with gradients before the update: clipping, arithmetic, a log."""

from __future__ import annotations

import functools
import math

import torch
import torch.utils.checkpoint
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tests.kit.models import Mlp, squared_loss
from tests.kit.step_forms.form import FORMS, Form, form, simple, step_with


def clip_by_norm(zero, norm_type, foreach):
    def step(model, optimizer, *batch):
        loss = squared_loss(model, *batch)
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 0.1, norm_type=norm_type, foreach=foreach)
        optimizer.step()
        optimizer.zero_grad()
        return loss, norm

    return simple(zero, step, make_optimizer=lambda p: torch.optim.SGD(p, lr=1e-3))


QUICK_CLIPS = {(1.0, False), (2.0, True), (3.0, False), (math.inf, True)}

for norm_type in (1.0, 2.0, 3.0, math.inf):
    for foreach in (None, True, False):
        FORMS[f"clip_by_norm_{norm_type:g}_foreach_{foreach}"] = Form(
            functools.partial(clip_by_norm, norm_type=norm_type, foreach=foreach),
            sums_over_shards=True,
            only_exhaustive=(norm_type, foreach) not in QUICK_CLIPS,
        )


@form(only_exhaustive=True)
def clip_by_value(zero):
    def clip(model):
        clip_grad_value_(model.parameters(), 0.01)

    return simple(zero, step_with(between=clip))


@form()
def clip_by_value_foreach(zero):
    def clip(model):
        clip_grad_value_(model.parameters(), 0.01, foreach=True)

    return simple(zero, step_with(between=clip))


@form()
def gradients_centred(zero):
    """As Yong et al. 2020, "Gradient Centralization", do: no work of one element."""

    def centre(model):
        for weight in (p for p in model.parameters() if p.dim() > 1):
            weight.grad.sub_(weight.grad.mean(1, keepdim=True))

    return simple(zero, step_with(between=centre))


@form()
def gradients_times_an_element_of_a_parameter(zero):
    def scale(model):
        with torch.no_grad():
            number = model.head.bias[0]
            for parameter in model.parameters():
                parameter.grad.mul_(number)

    return simple(zero, step_with(between=scale))


@form()
def gradients_masked_by_a_frozen_parameter(zero):
    """Sparse training by hand: each rank has drawn a mask, and that of rank 0 must win."""
    model = Mlp()
    mask = (torch.rand_like(model.head.weight) > 0.5).float()
    model.head.mask = torch.nn.Parameter(mask, requires_grad=False)

    def leave_out(model):
        model.head.weight.grad.mul_(model.head.mask)

    return simple(zero, step_with(between=leave_out), model)


@form(sums_over_shards=True)
def gradient_norms_for_logging(zero):
    def step(model, optimizer, *batch):
        loss = squared_loss(model, *batch)
        loss.backward()
        norms = {name: p.grad.norm() for name, p in model.named_parameters()}
        largest = max(p.grad.abs().max() for p in model.parameters())
        mean = torch.stack([p.grad.mean() for p in model.parameters()]).sum()
        whole = model.head.weight.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss, "norms": norms, "largest": largest, "mean": mean, "grad": whole}

    return simple(zero, step)
