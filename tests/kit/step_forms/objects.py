"""Dtypes, layouts and buffers, where objects come from, and optimizers."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from tests.kit import models
from tests.kit.models import ConvNet, Lion, Mlp, squared_loss
from tests.kit.step_forms.form import FORMS, Form, Training, adamw, form, simple, step_with


def features_in_double(number: int, rows: int):
    return tuple(tensor.double() for tensor in models.features(number, rows))


@form(batch=features_in_double)
def double_precision(zero):
    return simple(zero, step_with(), Mlp().double())


@form(batch=models.images)
def channels_last_weights(zero):
    return simple(zero, step_with(), ConvNet(norm=False).to(memory_format=torch.channels_last))


@form(functional_rounding=True)
def recurrent(zero):
    return simple(zero, step_with(), models.Recurrent(nn.GRU))


class WithBuffer(Mlp):
    """Buffers that only forward changes, and one kept out of the state dict."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("shift", torch.linspace(0, 1, models.FEATURES), persistent=False)

    def forward(self, x):
        self.calls += 1
        return super().forward(x + self.shift)


@form()
def counting_buffers(zero):
    return simple(zero, step_with(), WithBuffer())


@form()
def gradient_returned_as_it_is(zero):
    def step(model, optimizer, *batch):
        loss = squared_loss(model, *batch)
        loss.backward()
        optimizer.step()
        gradient = model.head.weight.grad
        optimizer.zero_grad()
        return loss, gradient

    return simple(zero, step)


# The kept gradients are None before the first call and tensors before the second.
@form(graphs=2)
def gradients_zeroed_twice_while_others_are_kept(zero):
    kept, zeroed = Mlp(), Mlp(outputs=5)
    optimizers = [adamw(kept.parameters()), adamw(zeroed.parameters())]

    @zero
    def step(kept, zeroed, for_kept, for_zeroed, x, y):
        for_kept.zero_grad()
        kept.zero_grad()
        loss = squared_loss(kept, x, y)
        loss.backward()
        for_kept.step()
        other = zeroed(x).square().mean()
        other.backward()
        for_zeroed.step()
        for_zeroed.zero_grad()
        zeroed.zero_grad()
        return loss, other, None

    def call(*batch):
        results = step(kept, zeroed, *optimizers, *batch)
        assert results[2] is None
        assert all(p.grad is None for p in zeroed.parameters())
        assert all(p.grad is not None for p in kept.parameters())
        return results[:2]

    return Training(call, [kept, zeroed], optimizers)


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


class WithLoss(Mlp):
    """Takes keywords and returns an object, as Hugging Face's models do."""

    def forward(self, inputs, labels):
        logits = super().forward(inputs)
        return Output(F.mse_loss(logits, labels), logits)


@form()
def batch_as_keywords(zero):
    model = WithLoss()
    optimizer = adamw(model.parameters())

    @zero
    def step(model, optimizer, batch):
        output = model(**batch)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return output.loss, output.logits.mean()

    def call(inputs, labels):
        return step(model, optimizer, {"inputs": inputs, "labels": labels})

    return Training(call, [model], [optimizer])


@form()
def model_from_the_enclosing_scope(zero):
    model = Mlp()
    optimizer = adamw(model.parameters())

    @zero
    def step(*batch):
        loss = squared_loss(model, *batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Training(step, [model], [optimizer])


@form()
def step_is_a_method(zero):
    class Trainer:
        def __init__(self):
            self.model = Mlp()
            self.optimizer = adamw(self.model.parameters())
            self.train_step = zero(self.step)

        def step(self, *batch):
            loss = squared_loss(self.model, *batch)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss

    trainer = Trainer()
    return Training(trainer.train_step, [trainer.model], [trainer.optimizer])


OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "Adam_amsgrad": functools.partial(torch.optim.Adam, amsgrad=True, weight_decay=0.1),
    "SGD_nesterov": functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9, nesterov=True),
    "RMSprop_centered": functools.partial(
        torch.optim.RMSprop, lr=1e-3, momentum=0.5, centered=True
    ),
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=1e-3, lr_decay=0.1),
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Lion": Lion,
}


def with_optimizer(zero, make_optimizer):
    return simple(zero, step_with(), make_optimizer=make_optimizer)


for name, make_optimizer in OPTIMIZERS.items():
    FORMS[f"optimizer_{name}"] = Form(
        functools.partial(with_optimizer, make_optimizer=make_optimizer)
    )
