"""Losses that are scaled, and steps that are skipped."""

from __future__ import annotations

import math

import torch
import torch.utils.checkpoint
from torch.nn.utils import clip_grad_norm_

from tests.kit import models
from tests.kit.models import Mlp, squared_loss
from tests.kit.step_forms.form import Training, adamw, form


def overflowing(number: int, rows: int):
    """Two batches that overflow the gradients, each in one example only."""
    x, y = models.features(number, rows)
    if number in (2, 5):
        y[-1] = math.inf
    return x, y


def scaled_step(model, optimizer, scaler, *batch):
    loss = squared_loss(model, *batch)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return loss, norm


def with_scaler(zero, step, scaler, make_optimizer=adamw):
    model = Mlp()
    optimizer = make_optimizer(model.parameters())
    compiled = zero(step)

    def call(*batch):
        return compiled(model, optimizer, scaler, *batch), scaler.get_scale()

    return Training(call, [model], [optimizer], extra=scaler.state_dict)


def scaler_of(**settings):
    device = torch.get_default_device().type
    return torch.amp.GradScaler(device, **{"init_scale": 256.0, "growth_interval": 2, **settings})


@form(batch=overflowing, sums_over_shards=True)
def scaler_with_unscaled_clipping(zero):
    return with_scaler(zero, scaled_step, scaler_of())


@form(sums_over_shards=True)
def scaler_disabled(zero):
    return with_scaler(zero, scaled_step, scaler_of(enabled=False))


@form(batch=overflowing)
def scaler_without_unscale(zero):
    def step(model, optimizer, scaler, *batch):
        loss = squared_loss(model, *batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    return with_scaler(zero, step, scaler_of(growth_factor=3.0, backoff_factor=0.25))


@form(batch=overflowing)
def scaler_of_two_optimizers(zero):
    model = Mlp()
    optimizers = [adamw(model.body.parameters()), adamw(model.head.parameters(), lr=3e-3)]
    scaler = scaler_of()

    @zero
    def step(model, first, second, scaler, *batch):
        loss = squared_loss(model, *batch)
        scaler.scale(loss).backward()
        scaler.unscale_(first)
        scaler.step(first)
        scaler.step(second)
        scaler.update()
        first.zero_grad()
        second.zero_grad()
        return loss

    def call(*batch):
        return step(model, *optimizers, scaler, *batch), scaler.get_scale()

    return Training(call, [model], optimizers, extra=scaler.state_dict)


@form(batch=overflowing)
def two_scalers(zero):
    pair = [Mlp(), Mlp()]
    optimizers = [adamw(model.parameters()) for model in pair]
    scalers = [scaler_of(), scaler_of(init_scale=64.0)]

    @zero
    def step(pair, optimizers, scalers, x, y):
        losses = [squared_loss(pair[0], x, y), squared_loss(pair[1], x, x[:, :3])]
        for loss, optimizer, scaler in zip(losses, optimizers, scalers, strict=True):
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return losses

    def call(*batch):
        return step(pair, optimizers, scalers, *batch), [s.get_scale() for s in scalers]

    return Training(
        call, pair, optimizers, extra=lambda: [scaler.state_dict() for scaler in scalers]
    )


@form(batch=overflowing)
def scaler_updated_after_the_call(zero):
    @zero
    def step(model, optimizer, scaler, *batch):
        loss = squared_loss(model, *batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        optimizer.zero_grad()
        return loss

    def step_and_update(model, optimizer, scaler, *batch):
        loss = step(model, optimizer, scaler, *batch)
        scaler.update()
        return loss

    return with_scaler(lambda whole: whole, step_and_update, scaler_of())
