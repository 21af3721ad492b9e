"""Every form of a training step is, as a ZeRO program, the plain step on all ranks' batches.

A form is a function of ``zero``, which is ``torch.compile(..., backend="zero")`` or, for the
reference, nothing at all.  The reference is one eager process on the concatenated batch.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
import torch.utils.checkpoint
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
from tests import models
from tests.covering import long
from tests.models import ConvNet, Gpt, Lion, Mlp, language_loss, squared_loss
from tests.ranks import Ranks, ranks_fixture  # noqa: F401
from zerofx.runtime.whole import full_params, unshard

STAGES = (0, 1, 2, 3)
STEPS = 10


@dataclass
class Training:
    """One form built: ``step(*batch)`` is what the user's loop does with a batch."""

    step: Callable[..., Any]
    models: Sequence[nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    scheduled: bool = False
    """Whether the form changes its learning rates itself."""
    extra: Callable[[], Any] = tuple
    """What else must be equal at the end."""


@dataclass(frozen=True)
class Form:
    build: Callable[..., Training]
    batch: Callable[[int, int], tuple[torch.Tensor, ...]] = models.features
    rows: tuple[int, ...] = (4,)
    """How many rows of a batch are one rank's, step by step and over again."""
    graphs: int = 1
    """How many programs its functions compile to, whatever happens to hyperparameters."""
    sums_over_shards: bool = False
    """Whether it reads a norm of gradients, which stages 1 to 3 sum in another order."""
    functional_rounding: bool = False
    """Whether torch itself rounds otherwise once AOTAutograd has made its operators functional.

    Those that write in place go through strided memory, for which some processors have other code.
    Then the reference's forward and backward are those of torch's own ``aot_eager``.
    """
    rounding: float = 1e-6
    """How far results may be from the reference, relatively, when ranks share the batch."""
    same_batch: bool = False
    """Whether every rank gets the same rows, because statistics are not averaged over ranks."""
    only_alone: bool = False
    """Whether more ranks would compute something else: random draws, a sum over micro-batches."""
    only_long: bool = False


FORMS: dict[str, Form] = {}


def form(**facts):
    """Register a form under its function's name."""

    def register(build):
        FORMS[build.__name__] = Form(build, **facts)
        return build

    return register


def zero(stage: int, **options):
    """What a form wraps its functions in to have them compiled."""

    def compiled(step, **arguments):
        chosen = {"stage": stage, "lowering": "eager", **options, **arguments.pop("options", {})}
        return torch.compile(step, backend="zero", options=chosen, **arguments)

    return compiled


def eager(step, **_arguments):
    return step


def adamw(parameters, **hyperparameters):
    """AdamW that does not blow rounding up where a gradient is nearly zero."""
    return torch.optim.AdamW(parameters, **{"lr": 1e-3, "eps": 1e-3, **hyperparameters})


def rank_and_world_size() -> tuple[int, int]:
    if not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def built(name: str, wrap: Callable, rank: int = 0) -> Training:
    """A form with values of the rank's own: those of rank 0 must win."""
    torch.manual_seed(rank)
    return FORMS[name].build(wrap)


def run(name: str, training: Training, steps: range, world_size: int, rank: int | None) -> list:
    """Every step's results, on the rows of ``rank``, or of all ranks if that is None."""
    this = FORMS[name]
    results = []
    for number in steps:
        if not training.scheduled:
            change_lr(training, number)
        ranks = 1 if this.same_batch else world_size
        batch = this.batch(number, this.rows[number % len(this.rows)] * ranks)
        if rank is not None and not this.same_batch:
            batch = [tensor.chunk(world_size)[rank] for tensor in batch]
        torch.manual_seed(number)
        leaves = pytree.tree_leaves(training.step(*batch))
        results.append([torch.as_tensor(leaf).detach().clone() for leaf in leaves])
    return results


def change_lr(training: Training, number: int) -> None:
    for optimizer in training.optimizers:
        for group in optimizer.param_groups:
            lr = group.setdefault("initial_lr", float(group["lr"])) * (1 - number / 20)
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr


def state_of(training: Training) -> dict[str, Any]:
    """All that checkpoints would hold, by readable names."""
    found = {}
    for number, model in enumerate(training.models):
        found |= {f"model {number} {name}": value for name, value in model.state_dict().items()}
    for number, optimizer in enumerate(training.optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            found |= {f"optimizer {number} {index} {name}": state[name] for name in state}
    for number, value in enumerate(pytree.tree_leaves(training.extra())):
        found[f"extra {number}"] = value
    return {name: torch.as_tensor(value).clone() for name, value in found.items()}


def programs_compiled() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def trained(name: str, stage: int, steps: int = STEPS, options: dict | None = None) -> tuple:
    """Train a form as a rank or alone: results, final state, number of programs compiled."""
    torch._dynamo.reset()
    rank, world_size = rank_and_world_size()
    training = built(name, zero(stage, **(options or {})), rank)
    before = programs_compiled()
    results = run(name, training, range(steps), world_size, rank)
    return results, state_of(training), programs_compiled() - before


@functools.cache
def reference(name: str, world_size: int, steps: int = STEPS) -> tuple:
    """The same in one eager process on the batches of all ranks."""
    training = built(name, eager)
    if FORMS[name].functional_rounding:
        for model in training.models:
            model.compile(backend="aot_eager")
    with torch._dynamo.config.patch(allow_rnn=True):
        return run(name, training, range(steps), world_size, None), state_of(training)


def labelled(what: str) -> Callable[[str], str]:
    return lambda message: f"{what}: {message}"


def assert_same(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True, msg=labelled(what))


def assert_close(actual: torch.Tensor, expected: torch.Tensor, what: str, rounding=1e-5) -> None:
    tolerance = {"rtol": rounding, "atol": rounding / 10}
    torch.testing.assert_close(actual, expected, **tolerance, equal_nan=True, msg=labelled(what))


def assert_results(name: str, of_ranks: list[list], expected: list, *, exact: bool) -> None:
    """Compare the mean of the ranks' results with the reference's."""
    for number, leaves in enumerate(expected):
        for position, leaf in enumerate(leaves):
            what = f"result {position} of step {number}"
            each = [results[number][position] for results in of_ranks]
            if exact:
                assert_same(each[0], leaf, what)
                continue
            if leaf.dim() == 0:
                mean, whole = torch.stack(each).double().mean(0), leaf.double()
                tolerance = {"rtol": FORMS[name].rounding, "atol": 0}
                torch.testing.assert_close(
                    mean, whole, **tolerance, equal_nan=True, msg=labelled(what)
                )
            else:
                assert_close(torch.stack(each).mean(0), leaf, what)


def assert_states(states: list[dict], expected: dict, *, exact: bool, rounding=1e-5) -> None:
    for rank, state in enumerate(states):
        assert state.keys() == expected.keys()
        for key, value in expected.items():
            what = f"{key} on rank {rank}"
            if exact:
                assert_same(state[key], value, what)
            else:
                assert_close(state[key], value, what, rounding)


def assert_trains_alike(name: str, stage: int, of_ranks: list[tuple]) -> None:
    """Compare what every rank returned from ``trained`` with the reference."""
    results, states, compiled = zip(*of_ranks, strict=True)
    expected, expected_state = reference(name, len(of_ranks))
    exact = len(of_ranks) == 1 and (stage == 0 or not FORMS[name].sums_over_shards)
    assert_results(name, results, expected, exact=exact)
    rounding = max(1e-5, FORMS[name].rounding)
    assert_states(states, expected_state, exact=exact, rounding=rounding)
    assert compiled == (FORMS[name].graphs,) * len(of_ranks)


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


# Rounding to bfloat16 makes sums over the batch depend on who holds which rows.
@form(batch=models.tokens, sums_over_shards=True, rounding=5e-3)
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


@form(batch=models.tokens, only_long=True)
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


@form(only_long=True)
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


@form(graphs=2, only_long=True)
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
    only_long=True,
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
            only_long=(norm_type, foreach) not in QUICK_CLIPS,
        )


@form(only_long=True)
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


@form(rows=(4, 6), graphs=2, only_long=True)
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

SHARED = [name for name in FORMS if not FORMS[name].only_alone]
QUICK = [name for name in FORMS if not FORMS[name].only_long]
# One form for each way a stage changes a program: tied weights, gradients that outlive a call or
# are never reduced in it, norms, writes between gradient and update.
AT_EVERY_STAGE = (
    "tied_weights",
    "gradients_never_zeroed",
    "accumulation_across_two_functions",
    "accumulation_across_two_functions_local",
    "scaler_with_unscaled_clipping",
    "weights_decayed_by_hand",
)
# What is particular to these is outside the program, or is in another form's on two ranks.
ALONE_SAYS_IT = {
    "closure",
    "zero_grad_last_to_zeros",
    "model_zero_grad_last",
    "model_zero_grad_first_to_zeros",
    "gradients_zeroed_in_place",
    "clip_by_norm_3_foreach_False",
    "loss_detached_in_a_dict",
    "scaler_disabled",
    "scaler_without_unscale",
    "tensor_lr",
    "lr_schedulers",
    "one_cycle_of_lr_and_momentum",
    "double_precision",
    "recurrent",
    "batch_as_keywords",
    "model_from_the_enclosing_scope",
    "step_is_a_method",
    *(f"optimizer_{name}" for name in OPTIMIZERS if name not in ("AdamW", "RMSprop_centered")),
}
assert set(QUICK) >= ALONE_SAYS_IT


@pytest.fixture(scope="module")
def on_two_ranks(ranks):  # noqa: F811
    """``on_two_ranks(name, stage)``: what each of two ranks returned from ``trained``, once."""

    @functools.cache
    def train(name: str, stage: int) -> list[tuple]:
        return ranks(2).run(trained, name, stage)

    return train


@pytest.mark.parametrize("name", QUICK)
def test_alone_a_step_is_the_eager_one(name):
    assert_trains_alike(name, 3, [trained(name, 3)])


@pytest.mark.parametrize(
    "name",
    [long(name) if name in ALONE_SAYS_IT else name for name in QUICK if name in SHARED],
)
def test_two_ranks_train_as_one_process_on_both_batches(name, on_two_ranks):
    assert_trains_alike(name, 3, on_two_ranks(name, 3))


@pytest.mark.parametrize("stage", (0, 1, 2))
@pytest.mark.parametrize("name", AT_EVERY_STAGE)
def test_every_stage_trains_as_one_process(name, stage, on_two_ranks):
    assert_trains_alike(name, stage, on_two_ranks(name, stage))


@pytest.mark.parametrize(
    "name", [name for name in AT_EVERY_STAGE if not FORMS[name].sums_over_shards]
)
def test_stages_agree_bitwise_on_two_ranks(name, on_two_ranks):
    for rank in range(2):
        expected, expected_state, _ = on_two_ranks(name, 0)[rank]
        for stage in (1, 2, 3):
            results, state, _ = on_two_ranks(name, stage)[rank]
            assert_results(name, [results], expected, exact=True)
            assert_states([state], expected_state, exact=True)


@pytest.mark.long
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", FORMS)
def test_alone_every_form_is_the_eager_one_at_every_stage(name, stage):
    assert_trains_alike(name, stage, [trained(name, stage)])


@pytest.mark.long
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", SHARED)
def test_every_form_trains_at_every_stage_on_two_ranks(name, stage, on_two_ranks):
    assert_trains_alike(name, stage, on_two_ranks(name, stage))


@pytest.mark.long
@pytest.mark.parametrize("name", SHARED)
def test_every_form_trains_on_three_ranks(name, ranks):  # noqa: F811
    assert_trains_alike(name, 3, ranks(3).run(trained, name, 3))


# Checkpointing.


def calls(text: str, operator: str) -> int:
    return text.count(f"torch.ops.aten.{operator}(")


def test_checkpointed_blocks_are_computed_twice_and_others_once(tmp_path):
    def programs(name, recompute):
        folder = tmp_path / f"{name}_{recompute}"
        results, _, _ = trained(name, 3, 2, {"dump": str(folder), "recompute": recompute})
        (last,) = sorted(folder.glob("rank0/*"))
        return sorted(last.glob("*.py"))[-1].read_text(), results

    plain, _ = programs("uncheckpointed", True)
    kept, kept_results = programs("checkpointed", False)
    again, again_results = programs("checkpointed", True)
    # Calls in one block.  The result of its last matrix product is what the checkpoint saves.
    in_forward = {"gelu.default": 1, "native_layer_norm.default": 2, "addmm.default": 4}
    repeated = {"gelu.default": 1, "native_layer_norm.default": 2, "addmm.default": 3}
    for operator in in_forward:
        once = calls(plain, operator)
        assert once >= 2 * in_forward[operator] and calls(kept, operator) == once
        assert calls(again, operator) == once + 2 * repeated[operator]
    for one, other in zip(kept_results, again_results, strict=True):
        assert_same(one[0], other[0], "loss")


# State between steps.


def checkpoint_of(name: str, stage: int, steps: int) -> tuple[dict, dict]:
    """Train, then return the model's and the optimizer's state dict."""
    torch._dynamo.reset()
    rank, world_size = rank_and_world_size()
    training = built(name, zero(stage), rank)
    run(name, training, range(steps), world_size, rank)
    return training.models[0].state_dict(), training.optimizers[0].state_dict()


def load(training: Training, checkpoint: tuple[dict, dict]) -> None:
    training.models[0].load_state_dict(checkpoint[0])
    training.optimizers[0].load_state_dict(checkpoint[1])


@pytest.mark.parametrize("stage", (1, 3))
@pytest.mark.parametrize("name", ("several_parameter_groups", "tied_weights"))
def test_state_dicts_of_two_ranks_continue_in_an_eager_process(name, stage, ranks):  # noqa: F811
    checkpoints = ranks(2).run(checkpoint_of, name, stage, 5)
    expected, _ = reference(name, 2)
    for checkpoint in checkpoints:
        training = built(name, eager, rank=7)
        load(training, checkpoint)
        results = run(name, training, range(5, STEPS), 2, None)
        assert_results(name, [results], expected[5:], exact=False)


def continued(name: str, stage: int, checkpoint: tuple, bound_first: bool) -> tuple:
    """Load a checkpoint and train from step 5, before or after a first step has sharded."""
    torch._dynamo.reset()
    rank, world_size = rank_and_world_size()
    training = built(name, zero(stage), rank)
    if bound_first:
        run(name, training, range(1), world_size, rank)
    before = programs_compiled()
    load(training, checkpoint)
    results = run(name, training, range(5, STEPS), world_size, rank)
    return results, state_of(training), programs_compiled() - before


@pytest.mark.parametrize("bound_first", (False, True))
@pytest.mark.parametrize("stage", (1, 3))
def test_an_eager_checkpoint_continues_on_two_ranks(stage, bound_first, ranks):  # noqa: F811
    name = "several_parameter_groups"
    training = built(name, eager)
    run(name, training, range(5), 2, None)
    checkpoint = (training.models[0].state_dict(), training.optimizers[0].state_dict())
    of_ranks = ranks(2).run(continued, name, stage, checkpoint, bound_first)
    results, states, compiled = zip(*of_ranks, strict=True)
    expected, expected_state = reference(name, 2)
    assert_results(name, results, expected[5:], exact=False)
    assert_states(states, expected_state, exact=False)
    assert compiled == (0 if bound_first else 1,) * 2


def in_full_params(stage: int) -> dict[str, Any]:
    torch._dynamo.reset()
    rank, world_size = rank_and_world_size()
    training = built("plain", zero(stage), rank)
    (model,) = training.models
    run("plain", training, range(3), world_size, rank)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    batch = models.features(0, 4)
    with full_params(model):
        inside = {name: value.clone() for name, value in model.state_dict().items()}
        loss = squared_loss(model, *batch).item()
        with torch.no_grad():
            model.head.bias.fill_(2.0)
            model.body.weight.mul_(0.5)
    before = programs_compiled()
    after = {name: value.clone() for name, value in model.state_dict().items()}
    run("plain", training, range(3, 4), world_size, rank)
    return {
        "saved": saved, "inside": inside, "after": after, "loss": loss, "batch": batch,
        "compiled": programs_compiled() - before,
    }  # fmt: skip


@pytest.mark.parametrize("stage", (0, 3))
def test_full_params_shows_whole_values_and_keeps_what_is_written(stage, ranks):  # noqa: F811
    for found in ranks(2).run(in_full_params, stage):
        for name, value in found["saved"].items():
            assert_same(found["inside"][name], value, name)
        model = Mlp()
        model.load_state_dict(found["saved"])
        assert squared_loss(model, *found["batch"]).item() == found["loss"]
        expected = dict(found["saved"])
        expected["head.bias"] = torch.full_like(expected["head.bias"], 2.0)
        expected["body.weight"] = expected["body.weight"] * 0.5
        for name, value in expected.items():
            assert_same(found["after"][name], value, name)
        assert found["compiled"] == 0


def unsharded_after_five_steps(name: str, stage: int) -> tuple:
    torch._dynamo.reset()
    rank, world_size = rank_and_world_size()
    training = built(name, zero(stage), rank)
    (model,), (optimizer,) = training.models, training.optimizers
    run(name, training, range(5), world_size, rank)
    unshard(model, optimizer)
    eager_step = functools.partial(step_with(), model, optimizer)
    continuing = Training(eager_step, [model], [optimizer])
    return run(name, continuing, range(5, STEPS), world_size, None), state_of(continuing)


@pytest.mark.parametrize("stage", (1, 3))
def test_after_unshard_training_continues_eagerly(stage, ranks):  # noqa: F811
    name = "several_parameter_groups"
    of_ranks = ranks(2).run(unsharded_after_five_steps, name, stage)
    results, states = zip(*of_ranks, strict=True)
    expected, expected_state = reference(name, 2)
    for of_rank in results:
        assert_results(name, [of_rank], expected[5:], exact=False)
    assert_states(states, expected_state, exact=False)


def gradients_between_calls(stage: int) -> dict:
    """Two calls that leave their gradients, read from outside where the stage allows that."""
    torch._dynamo.reset()
    rank, world_size = rank_and_world_size()
    training = built("gradients_never_zeroed", zero(stage), rank)
    run("gradients_never_zeroed", training, range(2), world_size, rank)
    return {name: p.grad.clone() for name, p in training.models[0].named_parameters()}


@pytest.mark.parametrize("stage", (0, 1))
def test_gradients_between_calls_are_the_whole_average(stage, ranks):  # noqa: F811
    training = built("gradients_never_zeroed", eager)
    run("gradients_never_zeroed", training, range(2), 2, None)
    for gradients in ranks(2).run(gradients_between_calls, stage):
        for name, parameter in training.models[0].named_parameters():
            assert_close(gradients[name], parameter.grad, name)


@pytest.mark.parametrize("stage", (2, 3))
def test_gradients_between_calls_are_refused_with_words(stage):
    with pytest.raises(RuntimeError, match="gradient of parameter 'body.weight'") as caught:
        gradients_between_calls(stage)
    assert "inside the compiled step" in str(caught.value)


def normalised_features(stage: int) -> torch.Tensor:
    """The running mean after three of the rank's own batches."""
    torch._dynamo.reset()
    rank, _ = rank_and_world_size()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.BatchNorm1d(models.FEATURES), nn.Linear(models.FEATURES, 3))
    model[0].running_mean.fill_(float(rank))
    step = zero(stage)(step_with())
    optimizer = adamw(model.parameters())
    for number in range(3):
        step(model, optimizer, *models.features(10 * rank + number, 4))
    return model[0].running_mean


def test_buffers_start_as_rank_0s_and_are_the_ranks_own_afterwards(ranks):  # noqa: F811
    for rank, mean in enumerate(ranks(2).run(normalised_features, 3)):
        norm = nn.BatchNorm1d(models.FEATURES)
        for number in range(3):
            norm(models.features(10 * rank + number, 4)[0])
        assert_close(mean, norm.running_mean, f"running mean on rank {rank}")


def lopsided(stage: int) -> tuple:
    """Rank 1 gets fewer rows at the second step, and compiles for them alone."""
    torch._dynamo.reset()
    rank, _ = rank_and_world_size()
    training = built("plain", zero(stage), rank)
    before = programs_compiled()
    for number in range(4):
        rows = 3 if (rank, number) == (1, 1) else 4
        training.step(*models.features(10 * rank + number, rows))
    return state_of(training), programs_compiled() - before


def test_a_rank_may_retrace_alone_for_a_batch_of_its_own(ranks):  # noqa: F811
    (state, alone), (other, retraced) = ranks(2).run(lopsided, 3)
    assert (alone, retraced) == (1, 2)
    assert_states([other], state, exact=True)
    training = built("plain", eager)
    (model,), (optimizer,) = training.models, training.optimizers
    for number in range(4):
        for rank in range(2):
            rows = 3 if (rank, number) == (1, 1) else 4
            (squared_loss(model, *models.features(10 * rank + number, rows)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_states([state], state_of(training), exact=False)


def test_a_returned_parameter_is_the_parameter_itself():
    torch._dynamo.reset()

    def step(model, optimizer, *batch):
        squared_loss(model, *batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        return model.head.weight

    training = simple(zero(3), step)
    for number in range(2):
        returned = training.step(*models.features(number, 4))
        assert returned is training.models[0].head.weight
