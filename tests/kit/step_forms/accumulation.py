"""Gradients that are zeroed here or there, kept, and added to."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

from torch.nn.utils import clip_grad_norm_

from tests.kit.models import Mlp, squared_loss
from tests.kit.step_forms.form import FORMS, Form, Training, adamw, form, simple


def zeroing(place: str, zero_grad: Callable):
    def step(model, optimizer, *batch):
        if place == "first":
            zero_grad(model, optimizer)
        loss = squared_loss(model, *batch)
        loss.backward()
        optimizer.step()
        if place == "last":
            zero_grad(model, optimizer)
        return loss

    return step


@form()
def zero_grad_first(zero):
    return simple(zero, zeroing("first", lambda model, optimizer: optimizer.zero_grad()))


@form()
def model_zero_grad_first(zero):
    return simple(zero, zeroing("first", lambda model, optimizer: model.zero_grad()))


# A gradient that outlives its call is None before the first and a tensor before the second.
@form(graphs=2, only_exhaustive=True)
def zero_grad_first_to_zeros(zero):
    return simple(zero, zeroing("first", lambda model, optimizer: optimizer.zero_grad(False)))


@form(graphs=2)
def zero_grad_last_to_zeros(zero):
    zero_grad = lambda model, optimizer: optimizer.zero_grad(set_to_none=False)  # noqa: E731
    return simple(zero, zeroing("last", zero_grad))


@form()
def model_zero_grad_last(zero):
    return simple(zero, zeroing("last", lambda model, optimizer: model.zero_grad()))


@form(graphs=2)
def model_zero_grad_first_to_zeros(zero):
    zero_grad = lambda model, optimizer: model.zero_grad(set_to_none=False)  # noqa: E731
    return simple(zero, zeroing("first", zero_grad))


@form(graphs=2)
def gradients_never_zeroed(zero):
    return simple(zero, zeroing("never", lambda model, optimizer: None))


@form(graphs=2)
def gradients_zeroed_in_place(zero):
    def zero_in_place(model, optimizer):
        for p in model.parameters():
            p.grad.zero_()

    return simple(zero, zeroing("last", zero_in_place))


@form()
def gradients_zeroed_eagerly(zero):
    training = simple(zero, zeroing("never", lambda model, optimizer: None))
    compiled, (optimizer,) = training.step, training.optimizers

    def step(*batch):
        loss = compiled(*batch)
        optimizer.zero_grad()
        return loss

    return Training(step, training.models, training.optimizers)


@form()
def closure(zero):
    def step(model, optimizer, *batch):
        def closure():
            optimizer.zero_grad()
            loss = squared_loss(model, *batch)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        optimizer.zero_grad()
        return loss

    return simple(zero, step)


def accumulate_in_a_loop(model, optimizer, *batch):
    total = 0.0
    for micro_batch in zip(*(tensor.chunk(2) for tensor in batch), strict=True):
        loss = squared_loss(model, *micro_batch) / 2
        loss.backward()
        total = total + loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    return total


@form()
def accumulation_in_a_loop(zero):
    return simple(zero, accumulate_in_a_loop)


@form()
def accumulation_in_a_loop_sharded(zero):
    return simple(zero, accumulate_in_a_loop, options={"accumulate": "sharded"})


# accumulate, without and with a gradient to add to, and update.
@form(graphs=3, sums_over_shards=True, rows=(6,))
def accumulation_across_two_functions(zero, **options):
    model = Mlp()
    optimizer = adamw(model.parameters())

    @functools.partial(zero, options=options)
    def accumulate(model, *batch):
        loss = squared_loss(model, *batch) / 3
        loss.backward()
        return loss

    @functools.partial(zero, options=options)
    def update(model, optimizer):
        norm = clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return norm

    def step(*batch):
        micro_batches = zip(*(tensor.chunk(3) for tensor in batch), strict=True)
        losses = [accumulate(model, *micro_batch) for micro_batch in micro_batches]
        return sum(loss.detach() for loss in losses), update(model, optimizer)

    return Training(step, [model], [optimizer])


FORMS["accumulation_across_two_functions_sharded"] = Form(
    functools.partial(accumulation_across_two_functions, accumulate="sharded"),
    graphs=3,
    sums_over_shards=True,
    rows=(6,),
    only_exhaustive=True,
)


FORMS["accumulation_across_two_functions_local"] = Form(
    functools.partial(accumulation_across_two_functions, accumulate="local"),
    graphs=3,
    sums_over_shards=True,
    rows=(6,),
)


# One program for calls that only accumulate, and one for those that also update.
@form(graphs=2)
def update_at_every_other_call(zero):
    model = Mlp()
    optimizer = adamw(model.parameters())
    calls = itertools.count(1)

    @zero
    def step(model, optimizer, is_last, *batch):
        loss = squared_loss(model, *batch) / 2
        loss.backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def call(*batch):
        return step(model, optimizer, next(calls) % 2 == 0, *batch)

    return Training(call, [model], [optimizer])
