"""Every form of a training step is, as a ZeRO program, the plain step on all ranks' batches.

A form is a function of ``zero``, which is ``torch.compile(..., backend="zero")`` or, for the
reference, nothing at all.  The reference is one eager process on the concatenated batch.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
from tests import models
from tests.models import ConvNet, Gpt, Lion, Mlp, language_loss, squared_loss
from tests.ranks import ranks_fixture  # noqa: F401
from zerofx.runtime.guarded import ShardedParameter
from zerofx.runtime.whole import full_params, unshard

STAGES = (0, 1, 2, 3)
STEPS = 10
ROWS = 4  # of one rank's batch


@dataclass
class Training:
    """One form built: ``step(*batch)`` is what the user's loop does with a batch."""

    step: Callable[..., Any]
    models: Sequence[nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    scheduled: bool = False
    """Whether the form changes its learning rates itself."""
    extra: Callable[[], Any] = field(default=lambda: None)
    """What else must be equal at the end."""


@dataclass(frozen=True)
class Form:
    build: Callable[..., Training]
    batch: Callable = models.features
    graphs: int = 1
    """How many programs its functions compile to."""
    sums_over_shards: bool = False
    """Whether it reads a norm of gradients: summed in another order from stage 1 on."""
    rows: tuple[int, ...] = (ROWS,)
    """Rows of one rank's batch at each step, repeated."""
    same_batch: bool = False
    """Whether every rank gets the whole batch, as its statistics are not averaged."""
    largest_world: int = 2
    only_long: bool = False


FORMS: dict[str, Form] = {}


def form(name: str = "", **facts):
    def register(build):
        FORMS[name or build.__name__] = Form(build, **facts)
        return build

    return register


def adamw(parameters, **hyperparameters):
    """AdamW that does not blow rounding errors up where a gradient is nearly zero."""
    return torch.optim.AdamW(parameters, **{"lr": 1e-3, "eps": 1e-3, **hyperparameters})


def change_lr(training: Training, number: int) -> None:
    for optimizer in training.optimizers:
        for group in optimizer.param_groups:
            lr = group.setdefault("initial_lr", float(group["lr"])) * (1 - number / 20)
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr


def own_rows(whole: Sequence[torch.Tensor], rank: int, world_size: int) -> list[torch.Tensor]:
    return [tensor.chunk(world_size)[rank] for tensor in whole]


def run(training: Training, of: Form, steps: range, rank: int, batch_ranks: int) -> list:
    """Results of each step on this rank's rows of the batch of ``batch_ranks`` ranks."""
    results = []
    for number in steps:
        if not training.scheduled:
            change_lr(training, number)
        torch.manual_seed(number)
        rows = of.rows[number % len(of.rows)] * batch_ranks
        mine = (0, 1) if of.same_batch else (rank, batch_ranks)
        result = training.step(*own_rows(of.batch(number, rows), *mine))
        results.append([torch.as_tensor(leaf).detach().clone() for leaf in pytree.tree_leaves(result)])
    return results


def state_of(training: Training) -> dict[str, Any]:
    """All that a checkpoint would hold, by readable names."""
    found = {}
    for number, model in enumerate(training.models):
        found |= {f"model {number} {name}": value for name, value in model.state_dict().items()}
    for number, optimizer in enumerate(training.optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            found |= {f"optimizer {number} {index} {k}": v for k, v in state.items()}
    for number, value in enumerate(pytree.tree_leaves(training.extra())):
        found[f"extra {number}"] = value
    return {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for name, value in found.items()
    }


def unique_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def zero(stage: int, **options):
    """What a form wraps its functions in."""

    def compiled(step, **arguments):
        chosen = {"stage": stage, "lowering": "eager", **options, **arguments.pop("options", {})}
        return torch.compile(step, backend="zero", options=chosen, **arguments)

    return compiled


def eager(step, **_arguments):
    return step


def seen_by(rank: int = 0) -> int:
    """The seed of a rank's model: each its own, as zerofx takes rank 0's."""
    return rank


def trained(name: str, stage: int, steps: int = STEPS, **options):
    """Train a form here, as a rank or alone: results, final state, number of programs."""
    torch._dynamo.reset()
    distributed = torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if distributed else 0
    world_size = torch.distributed.get_world_size() if distributed else 1
    torch.manual_seed(seen_by(rank))
    training = FORMS[name].build(zero(stage, **options))
    before = unique_graphs()
    results = run(training, FORMS[name], range(steps), rank, world_size)
    return results, state_of(training), unique_graphs() - before


@functools.cache
def reference(name: str, world_size: int, steps: int = STEPS):
    torch.manual_seed(seen_by(0))
    training = FORMS[name].build(eager)
    whole = 1 if FORMS[name].same_batch else world_size
    rows = FORMS[name].rows
    scaled = Form(
        FORMS[name].build,
        FORMS[name].batch,
        rows=tuple(count * world_size for count in rows),
        same_batch=FORMS[name].same_batch,
    )
    del whole
    results = run(training, scaled, range(steps), 0, 1)
    return results, state_of(training)


def assert_equal(actual, expected, *, exact: bool, what: str) -> None:
    if not isinstance(expected, torch.Tensor):
        assert actual == expected, what
        return
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, what
    if exact or not expected.is_floating_point():
        same = torch.equal(actual.nan_to_num(), expected.nan_to_num())
        assert same and torch.equal(actual.isnan(), expected.isnan()), (
            f"{what} differs by {(actual - expected).abs().max()}"
        )
    else:
        torch.testing.assert_close(
            actual, expected, rtol=2e-5, atol=1e-6, equal_nan=True, msg=lambda m: f"{what}: {m}"
        )


def assert_trains_alike(name: str, ranks_results: list, *, exact: bool, graphs: int | None) -> None:
    """Compare what each rank returned with the reference."""
    world_size = len(ranks_results)
    expected, expected_state = reference(name, world_size, len(ranks_results[0][0]))
    for number, leaves in enumerate(expected):
        for position, leaf in enumerate(leaves):
            mine = [results[number][position] for results, _, _ in ranks_results]
            what = f"result {position} of step {number}"
            if exact:
                assert_equal(mine[0], leaf, exact=True, what=what)
                continue
            mean = torch.stack(mine).double().mean(0)
            torch.testing.assert_close(
                mean, leaf.double(), rtol=1e-6, atol=1e-9, equal_nan=True, msg=lambda m: f"{what}: {m}"
            )
    for rank, (_, state, compiled) in enumerate(ranks_results):
        assert state.keys() == expected_state.keys()
        for key, value in expected_state.items():
            assert_equal(state[key], value, exact=exact, what=f"{key} on rank {rank}")
        if graphs is not None:
            assert compiled == graphs, f"{compiled} programs on rank {rank}"


def is_exact(name: str, stage: int) -> bool:
    return stage == 0 or not FORMS[name].sums_over_shards


# The forms.


def step_with(loss_of=squared_loss, *, between=None):
    """forward, backward, something in between, update, zero_grad."""

    def step(model, optimizer, *batch):
        loss = loss_of(model, *batch)
        loss.backward()
        if between is not None:
            between(model)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def simple(zero, step, model=None, make_optimizer=adamw, **arguments) -> Training:
    """A form of one model, one optimizer and one function."""
    model = Mlp() if model is None else model
    optimizer = make_optimizer(model.parameters())
    compiled = zero(step, **arguments)
    return Training(functools.partial(compiled, model, optimizer), [model], [optimizer])


@form()
def plain(zero):
    return simple(zero, step_with())


@form(batch=models.tokens, sums_over_shards=True)
def tied_weights_autocast_and_clipping(zero):
    def step(model, optimizer, *batch):
        with torch.autocast("cpu", torch.bfloat16):
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


@form(batch=models.tokens)
def checkpointed(zero):
    return simple(zero, step_with(language_loss), Gpt(layers=2, checkpoint=True))


@form()
def checkpointed_dropout(zero):
    model = Mlp(dropout=0.3)

    def loss_of(model, x, y):
        out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        return F.mse_loss(out, y)

    return simple(zero, step_with(loss_of), model)


FORMS["checkpointed_dropout"] = Form(FORMS["checkpointed_dropout"].build, largest_world=1)


@form()
def frozen_parameters(zero):
    model = Mlp()
    model.body.requires_grad_(False)
    return simple(zero, step_with(), model)


@form()
def frozen_parameters_outside_the_optimizer(zero):
    model = Mlp()
    model.body.bias.requires_grad_(False)
    trainable = [p for p in model.parameters() if p.requires_grad]
    return simple(zero, step_with(), model, lambda _: adamw(trainable))


@form()
def several_parameter_groups(zero):
    model = Mlp()
    groups = [
        {"params": list(model.body.parameters()), "lr": 3e-3, "weight_decay": 0.3},
        {"params": [model.head.weight], "betas": (0.5, 0.7)},
        {"params": [model.head.bias], "weight_decay": 0.0, "amsgrad": True},
    ]
    return simple(zero, step_with(), model, lambda _: adamw(groups))


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


# A gradient that outlives its call is None before the first and a tensor before the second.
@form(graphs=2)
def zero_grad_first(zero):
    return simple(zero, zeroing("first", lambda model, optimizer: optimizer.zero_grad()))


@form(graphs=2)
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
    for micro_batch in zip(*(tensor.chunk(2) for tensor in batch)):
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


# accumulate: without and with a gradient to add to; update.
@form(graphs=3, sums_over_shards=True)
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
        losses = [accumulate(model, *micro) for micro in zip(*(t.chunk(3) for t in batch))]
        return sum(loss.detach() for loss in losses), update(model, optimizer)

    return Training(step, [model], [optimizer])


FORMS["accumulation_across_two_functions"] = Form(
    accumulation_across_two_functions, graphs=3, sums_over_shards=True, rows=(6,)
)
FORMS["accumulation_across_two_functions_sharded"] = Form(
    functools.partial(accumulation_across_two_functions, accumulate="sharded"),
    graphs=3,
    sums_over_shards=True,
    rows=(6,),
    only_long=True,
)


def clip_by_norm(zero, norm_type, foreach):
    def step(model, optimizer, *batch):
        loss = squared_loss(model, *batch)
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 0.1, norm_type=norm_type, foreach=foreach)
        optimizer.step()
        optimizer.zero_grad()
        return loss, norm

    return simple(zero, step, make_optimizer=lambda p: torch.optim.SGD(p, lr=1e-3))


for norm_type in (1.0, 2.0, 3.0, math.inf):
    for foreach in (None, True, False):
        FORMS[f"clip_by_norm_{norm_type:g}_foreach_{foreach}"] = Form(
            functools.partial(clip_by_norm, norm_type=norm_type, foreach=foreach),
            sums_over_shards=True,
            only_long=foreach is None or (norm_type, foreach) in [(1.0, True), (3.0, False)],
        )


@form()
def clip_by_value(zero):
    def clip(model):
        clip_grad_value_(model.parameters(), 0.01)

    return simple(zero, step_with(between=clip))


@form()
def clip_by_value_foreach(zero):
    def clip(model):
        clip_grad_value_(model.parameters(), 0.01, foreach=True)

    return simple(zero, step_with(between=clip))


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
def two_updates_in_one_call(zero):
    def step(model, optimizer, *batch):
        losses = []
        for micro_batch in zip(*(tensor.chunk(2) for tensor in batch)):
            loss = squared_loss(model, *micro_batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    return simple(zero, step)


# Micro-batches must be the same rows on any number of ranks: two updates of the same batch.
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


FORMS["two_updates_in_one_call"] = Form(two_updates_in_one_call, largest_world=1)


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


@form(largest_world=1)
def dropout(zero):
    return simple(zero, step_with(), Mlp(dropout=0.4))


@form(rows=(4, 4, 6, 5, 6, 7, 4), graphs=2)
def batches_whose_shape_changes(zero):
    return simple(zero, step_with())


@form(rows=(4, 4, 6, 5, 6, 7, 4), graphs=1)
def batches_marked_dynamic(zero):
    return simple(zero, step_with(), dynamic=True)


@form(rows=(4, 6), graphs=2)
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


@form(graphs=2)
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


FORMS["evaluation_before_the_first_step"] = Form(
    evaluation_before_the_first_step, graphs=2, largest_world=1
)


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
    return torch.amp.GradScaler("cpu", **{"init_scale": 256.0, "growth_interval": 2, **settings})


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
        for loss, optimizer, scaler in zip(losses, optimizers, scalers):
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


@form()
def tensor_lr(zero):
    return simple(
        zero, step_with(), make_optimizer=lambda p: adamw(p, lr=torch.tensor(2e-3))
    )


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
            for mine, other in zip(average.parameters(), model.parameters()):
                mine.lerp_(other, 0.1)
        return loss, squared_loss(average, *batch)

    return Training(
        functools.partial(step, model, average, optimizer), [model, average], [optimizer]
    )


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


@form(sums_over_shards=True)
def penalty_in_the_loss(zero):
    def loss_of(model, *batch):
        penalty = sum(p.pow(2).sum() for p in model.parameters())
        return squared_loss(model, *batch) + 1e-2 * penalty

    return simple(zero, step_with(loss_of))


def features_in_double(number: int, rows: int):
    return tuple(tensor.double() for tensor in models.features(number, rows))


@form(batch=features_in_double)
def double_precision(zero):
    return simple(zero, step_with(), Mlp().double())


@form(batch=models.images)
def channels_last_weights(zero):
    return simple(zero, step_with(), ConvNet(norm=False).to(memory_format=torch.channels_last))


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
    "RMSprop_centered": functools.partial(torch.optim.RMSprop, lr=1e-3, momentum=0.5, centered=True),
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

ALL = list(FORMS)
QUICK = [name for name in ALL if not FORMS[name].only_long]


@pytest.mark.parametrize("name", QUICK)
def test_alone_the_step_is_the_eager_one(name):
    assert_trains_alike(name, [trained(name, 3)], exact=is_exact(name, 3), graphs=FORMS[name].graphs)


@pytest.mark.parametrize("name", [name for name in QUICK if FORMS[name].largest_world > 1])
def test_two_ranks_train_as_one_process_on_both_batches(name, ranks):  # noqa: F811
    results = ranks(2).run(trained, name, 3)
    assert_trains_alike(name, results, exact=False, graphs=FORMS[name].graphs)
