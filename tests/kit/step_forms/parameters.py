"""Hyperparameters and parameters that change, in a step and between steps."""

from __future__ import annotations

import copy
import functools

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn.utils import clip_grad_norm_

from tests.kit.models import FEATURES, Mlp, squared_loss
from tests.kit.step_forms.form import STEPS, Training, adamw, form, simple, step_with


@form()
def tensor_lr(zero):
    return simple(zero, step_with(), make_optimizer=lambda p: adamw(p, lr=torch.tensor(2e-3)))


@form(graphs=2)
def parameter_group_added_after_the_first_step(zero):
    model = Mlp()
    optimizer = adamw(model.body.parameters())
    compiled = zero(step_with())
    calls = []

    def step(*batch):
        if len(calls) == 3:
            optimizer.add_param_group({"params": list(model.head.parameters()), "lr": 5e-4})
        calls.append(1)
        loss = compiled(model, optimizer, *batch)
        model.zero_grad()
        return loss

    return Training(step, [model], [optimizer])


@form(graphs=2)
def requires_grad_flipped_after_the_first_step(zero):
    model = Mlp()
    optimizer = adamw(model.parameters())
    compiled = zero(step_with())
    calls = []

    def step(*batch):
        model.body.requires_grad_(not 3 <= len(calls) < 6)
        calls.append(1)
        return compiled(model, optimizer, *batch)

    return Training(step, [model], [optimizer])


@form()
def lr_schedulers(zero):
    training = simple(zero, step_with(), make_optimizer=lambda p: adamw(p, lr=1e-3))
    (optimizer,) = training.optimizers
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, decay], [4])
    compiled = training.step

    def step(*batch):
        loss = compiled(*batch)
        schedule.step()
        return loss, schedule.get_last_lr()[0]

    return Training(step, training.models, training.optimizers, scheduled=True)


@form()
def one_cycle_of_lr_and_momentum(zero):
    training = simple(zero, step_with())
    (optimizer,) = training.optimizers
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=STEPS + 1)
    compiled = training.step

    def step(*batch):
        loss = compiled(*batch)
        schedule.step()
        return loss

    return Training(step, training.models, training.optimizers, scheduled=True)


@form()
def averaged_weights(zero):
    model = Mlp()
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = adamw(model.parameters())

    @zero
    def step(model, average, optimizer, *batch):
        loss = squared_loss(model, *batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mine, other in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(other, 0.1)
        return loss, squared_loss(average, *batch)

    return Training(
        functools.partial(step, model, average, optimizer), [model, average], [optimizer]
    )


class Own(torch.nn.Parameter):
    pass


@form(sums_over_shards=True)
def parameters_of_a_class_of_their_own(zero):
    """As bitsandbytes' are: frozen, and read by what goes through all of them."""
    model = Mlp()
    model.body.weight = Own(model.body.weight.detach(), requires_grad=False)
    model.head.weight = Own(model.head.weight.detach())
    step = step_with(between=lambda model: clip_grad_norm_(model.parameters(), 0.5))
    trained = [p for p in model.parameters() if p.requires_grad]
    return simple(zero, step, model, lambda _: adamw(trained))


@form()
def weights_decayed_by_hand(zero):
    def step(model, optimizer, *batch):
        loss = squared_loss(model, *batch)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.999)
                p.grad.add_(p, alpha=1e-3)
        optimizer.step()
        with torch.no_grad():
            model.head.bias.clamp_(-0.1, 0.1)
        optimizer.zero_grad()
        return loss

    return simple(zero, step)


@form()
def weights_written_after_the_update(zero):
    def step(model, optimizer, *batch):
        loss = squared_loss(model, *batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.999)
            model.head.bias.clamp_(-0.1, 0.1)
            model.body.weight[0].fill_(0.5)
            torch._foreach_mul_([model.body.bias, model.head.bias], 0.9)
        return loss

    return simple(zero, step)


@form()
def weights_overwritten_after_the_update(zero):
    """Of one bucket: the last is read when the first has been written to."""

    def step(model, optimizer, *batch):
        loss = squared_loss(model, *batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model[0].bias.zero_()
            model[1].weight.copy_(model[2].weight)
        return loss

    layers = [nn.Linear(FEATURES, size) for size in (FEATURES, FEATURES, FEATURES, 3)]
    return simple(zero, step, nn.Sequential(*layers))


@form()
def biases_updated_and_all_read_again(zero):
    """Nothing is frozen: the rest of each bucket is read behind the update of a part of it."""

    def step(model, optimizer, *batch):
        for _ in range(2):
            loss = squared_loss(model, *batch)
            loss.backward()
            optimizer.step()
            model.zero_grad()
        return loss

    return simple(zero, step, make_optimizer=lambda p: adamw([one for one in p if one.dim() == 1]))


@form()
def weights_assigned_as_data(zero):
    def step(model, optimizer, *batch):
        loss = squared_loss(model, *batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for p in model.parameters():
            p.data = p.data.clamp(-0.2, 0.2)
        return loss

    return simple(zero, step)


@form(sums_over_shards=True)
def penalty_in_the_loss(zero):
    def loss_of(model, *batch):
        penalty = sum(p.pow(2).sum() for p in model.parameters())
        return squared_loss(model, *batch) + 1e-2 * penalty

    return simple(zero, step_with(loss_of))
