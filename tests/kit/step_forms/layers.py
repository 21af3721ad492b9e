"""Models, what of them is trained, and groups of parameters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch.nn.utils import clip_grad_norm_

from tests.kit import models
from tests.kit.models import Gpt, Mlp, language_loss
from tests.kit.step_forms.form import adamw, form, simple, step_with


@form()
def plain(zero):
    return simple(zero, step_with())


# Rounding to bfloat16 makes sums over the batch depend on who holds which rows.
@form(batch=models.tokens, sums_over_shards=True, rounding=5e-3)
def tied_weights_autocast_and_clipping(zero):
    device = torch.get_default_device().type

    def step(model, optimizer, *batch):
        with torch.autocast(device, torch.bfloat16):
            loss = language_loss(model, *batch)
        loss.backward()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return simple(zero, step, Gpt())


@form(batch=models.tokens)
def tied_weights(zero):
    return simple(zero, step_with(language_loss), Gpt())


@form(batch=models.tokens, only_exhaustive=True)
def uncheckpointed(zero):
    return simple(zero, step_with(language_loss), Gpt(layers=2))


@form(batch=models.tokens)
def checkpointed(zero):
    return simple(zero, step_with(language_loss), Gpt(layers=2, checkpoint=True))


@form(only_alone=True)
def checkpointed_dropout(zero):
    model = Mlp(dropout=0.3)

    def loss_of(model, x, y):
        out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        return F.mse_loss(out, y)

    return simple(zero, step_with(loss_of), model)


@form()
def frozen_parameters(zero):
    model = Mlp()
    model.body.requires_grad_(False)
    return simple(zero, step_with(), model)


@form(only_exhaustive=True)
def frozen_parameters_outside_the_optimizer(zero):
    model = Mlp()
    model.body.bias.requires_grad_(False)
    trainable = [p for p in model.parameters() if p.requires_grad]
    return simple(zero, step_with(), model, lambda _: adamw(trainable))


@form()
def frozen_parameters_whose_features_are_given_requires_grad(zero):
    """As models whose embeddings are frozen have it for activation checkpointing."""
    model = Mlp()
    model.body.requires_grad_(False)
    model.body.register_forward_hook(lambda module, inputs, output: output.requires_grad_(True))
    return simple(zero, step_with(), model)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        of_x = gradient @ weight if ctx.needs_input_grad[0] else None
        return of_x, gradient.t() @ x


@form()
def a_backward_of_its_own(zero):
    def loss_of(model, x, y):
        hidden = Product.apply(x, model.body.weight) + model.body.bias
        return F.mse_loss(Product.apply(hidden.tanh(), model.head.weight) + model.head.bias, y)

    return simple(zero, step_with(loss_of))


@form()
def several_parameter_groups(zero):
    model = Mlp()
    groups = [
        {"params": list(model.body.parameters()), "lr": 3e-3, "weight_decay": 0.3},
        {"params": [model.head.weight], "betas": (0.5, 0.7)},
        {"params": [model.head.bias], "weight_decay": 0.0, "amsgrad": True},
    ]
    return simple(zero, step_with(), model, lambda _: adamw(groups))
