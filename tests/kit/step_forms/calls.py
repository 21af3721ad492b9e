"""What else happens in a call, and calls of other kinds in between."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
import torch.utils.checkpoint

from tests.kit import models
from tests.kit.models import ConvNet, Mlp, squared_loss
from tests.kit.step_forms.form import Training, adamw, form, simple, step_with


@form()
def parameters_read_after_the_update(zero):
    def step(model, optimizer, *batch):
        loss = squared_loss(model, *batch)
        loss.backward()
        before = model.head.weight.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
        after = model.head.weight.detach().clone()
        return loss, after, (after - before).abs().sum(), squared_loss(model, *batch)

    return simple(zero, step)


@form()
def old_values_read_after_the_update(zero):
    def step(model, optimizer, *batch):
        old = {name: p.detach().clone() for name, p in model.named_parameters()}
        low = model.head.weight.detach().to(torch.bfloat16)
        loss = squared_loss(model, *batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        turned = old["head.weight"].t()
        return loss, old, low, turned @ turned.t(), old["head.weight"] * 2 - low

    return simple(zero, step)


@form()
def values_written_back_before_the_update(zero):
    """Perturbs weights and restores them, as SAM does, and returns what it has restored."""

    def step(model, optimizer, *batch):
        old = [p.detach().clone() for p in model.parameters()]
        squared_loss(model, *batch).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad, alpha=0.1)
        optimizer.zero_grad()
        loss = squared_loss(model, *batch)
        loss.backward()
        with torch.no_grad():
            for p, value in zip(model.parameters(), old, strict=True):
                p.copy_(value)
        optimizer.step()
        optimizer.zero_grad()
        return loss, old, old[0].sum()

    return simple(zero, step)


@form(only_alone=True)
def two_updates_in_one_call(zero):
    def step(model, optimizer, *batch):
        losses = []
        for micro_batch in zip(*(tensor.chunk(2) for tensor in batch), strict=True):
            loss = squared_loss(model, *micro_batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    return simple(zero, step)


@form()
def two_updates_of_one_batch(zero):
    def step(model, optimizer, *batch):
        losses = []
        for _ in range(2):
            loss = squared_loss(model, *batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
        return losses

    return simple(zero, step)


@form()
def loss_detached_in_a_dict(zero):
    def step(model, optimizer, *batch):
        loss = squared_loss(model, *batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss.detach(), "nested": [loss, {"twice": 2 * loss}]}

    return simple(zero, step)


@form(batch=models.images, same_batch=True)
def batch_norm(zero):
    return simple(zero, step_with(), ConvNet())


@form(only_alone=True)
def dropout(zero):
    return simple(zero, step_with(), Mlp(dropout=0.4))


@form(rows=(4, 4, 6, 5, 6, 7, 4), graphs=2)
def batches_whose_shape_changes(zero):
    return simple(zero, step_with())


@form(rows=(4, 4, 6, 5, 6, 7, 4), graphs=1)
def batches_marked_dynamic(zero):
    return simple(zero, step_with(), dynamic=True)


@form(rows=(4, 6), graphs=2, only_exhaustive=True)
def batches_compiled_for_each_shape(zero):
    return simple(zero, step_with(), dynamic=False)


@form()
def adversaries(zero):
    generator, discriminator = Mlp(outputs=3), Mlp(inputs=3, outputs=1)
    optimizers = [
        torch.optim.Adam(generator.parameters(), lr=1e-3, eps=1e-3),
        torch.optim.RMSprop(discriminator.parameters(), lr=1e-3, eps=1e-3),
    ]

    @zero
    def step(generator, discriminator, for_generator, for_discriminator, noise, real):
        for_discriminator.zero_grad()
        fake = generator(noise)
        on_real, on_fake = discriminator(real), discriminator(fake.detach())
        loss = F.softplus(-on_real).mean() + F.softplus(on_fake).mean()
        loss.backward()
        for_discriminator.step()
        for_generator.zero_grad()
        other_loss = F.softplus(-discriminator(fake)).mean()
        other_loss.backward()
        for_generator.step()
        for_discriminator.zero_grad()
        for_generator.zero_grad()
        return loss, other_loss

    both = [generator, discriminator]
    return Training(functools.partial(step, *both, *optimizers), both, optimizers)


def evaluate(model, *batch):
    with torch.no_grad():
        return squared_loss(model, *batch)


@form(graphs=2, batch=models.images, same_batch=True)
def evaluation_after_each_step(zero):
    model = ConvNet()
    optimizer = adamw(model.parameters())
    train, test = zero(step_with()), zero(evaluate)

    def step(*batch):
        model.train()
        loss = train(model, optimizer, *batch)
        model.eval()
        return loss, test(model, *batch)

    return Training(step, [model], [optimizer])


@form(graphs=2, only_alone=True)
def evaluation_before_the_first_step(zero):
    model = Mlp(dropout=0.5)
    optimizer = adamw(model.parameters())
    train, test = zero(step_with()), zero(evaluate)

    def step(*batch):
        model.eval()
        before = test(model, *batch)
        model.train()
        torch.manual_seed(0)
        return before, train(model, optimizer, *batch)

    return Training(step, [model], [optimizer])


@form(graphs=2)
def evaluation_under_inference_mode_first(zero):
    model = Mlp()
    optimizer = adamw(model.parameters())
    train, test = zero(step_with()), zero(evaluate)

    def step(*batch):
        with torch.inference_mode():
            before = test(model, *batch)
        return before.clone(), train(model, optimizer, *batch)

    return Training(step, [model], [optimizer])
