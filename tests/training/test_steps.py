"""Every form of a training step is, as a ZeRO program, the plain step on all ranks' batches.

The forms are in ``tests/kit/step_forms``.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
from tests.kit import models
from tests.kit.covering import exhaustive, nightly, only
from tests.kit.models import Mlp, squared_loss
from tests.kit.ranks import Ranks, ranks_fixture  # noqa: F401
from tests.kit.step_forms.form import FORMS, STEPS, Training, adamw, simple, step_with
from tests.kit.step_forms.layers import Product
from tests.kit.step_forms.objects import OPTIMIZERS
from tests.kit.step_forms.training import (
    STAGES,
    assert_close,
    assert_results,
    assert_same,
    assert_states,
    assert_trains_alike,
    built,
    eager,
    programs_compiled,
    rank_and_world_size,
    reference,
    run,
    state_of,
    trained,
    zero,
)
from tests.passes.test_fold_gradient_work import counting
from zerofx.runtime.access import full_params, unshard

SHARED = [name for name in FORMS if not FORMS[name].only_alone]
QUICK = [name for name in FORMS if not FORMS[name].only_exhaustive]
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
# What the default run has of each kind of form.
OF_EACH_KIND = (
    "dropout",
    "batches_whose_shape_changes",
    "parameter_group_added_after_the_first_step",
    "accumulation_across_two_functions_local",
    "old_values_read_after_the_update",
    "scaler_with_unscaled_clipping",
)


@pytest.fixture(scope="module")
def on_two_ranks(ranks):  # noqa: F811
    """``on_two_ranks(name, stage)``: what each of two ranks returned from ``trained``, once."""

    @functools.cache
    def train(name: str, stage: int) -> list[tuple]:
        return ranks(2).run(trained, name, stage)

    return train


@pytest.mark.slow(reason="steps are compiled and run")
@pytest.mark.parametrize("name", only(OF_EACH_KIND, QUICK))
def test_alone_a_step_is_the_eager_one(name):
    assert_trains_alike(name, 3, [trained(name, 3)])


@pytest.mark.slow(reason="ranks compile and train")
@pytest.mark.parametrize(
    "name",
    only(
        ("weights_decayed_by_hand",),
        [exhaustive(name) if name in ALONE_SAYS_IT else name for name in QUICK if name in SHARED],
    ),
)
def test_two_ranks_train_as_one_process_on_both_batches(name, on_two_ranks):
    assert_trains_alike(name, 3, on_two_ranks(name, 3))


@pytest.mark.slow(reason="ranks compile and train")
@pytest.mark.parametrize("stage", (nightly(0), 1, nightly(2)))
@pytest.mark.parametrize("name", only(("weights_decayed_by_hand",), AT_EVERY_STAGE))
def test_every_stage_trains_as_one_process(name, stage, on_two_ranks):
    assert_trains_alike(name, stage, on_two_ranks(name, stage))


@pytest.mark.slow(reason="every stage trains on two ranks")
@pytest.mark.parametrize(
    "name",
    only(
        ("weights_decayed_by_hand",),
        [name for name in AT_EVERY_STAGE if not FORMS[name].sums_over_shards],
    ),
)
def test_stages_agree_bitwise_on_two_ranks(name, on_two_ranks):
    for rank in range(2):
        expected, expected_state, _ = on_two_ranks(name, 0)[rank]
        for stage in (1, 2, 3):
            results, state, _ = on_two_ranks(name, stage)[rank]
            assert_results(name, [results], expected, exact=True)
            assert_states([state], expected_state, exact=True)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name",
    (*AT_EVERY_STAGE, "batch_norm", "several_parameter_groups", "old_values_read_after_the_update"),
)
def test_kernels_for_whole_parameters_train_as_in_eager(name):
    with counting() as calls:
        results, state, _ = trained(name, 0, options={"lowering": "inductor"})
    assert calls["kernels"] > 0
    expected, expected_state = reference(name, 1)
    assert_results(name, [results], expected, exact=False)
    assert_states([state], expected_state, exact=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", FORMS)
def test_alone_every_form_is_the_eager_one_at_every_stage(name, stage):
    assert_trains_alike(name, stage, [trained(name, stage)])


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", SHARED)
def test_every_form_trains_at_every_stage_on_two_ranks(name, stage, on_two_ranks):
    assert_trains_alike(name, stage, on_two_ranks(name, stage))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SHARED)
def test_every_form_trains_on_three_ranks(name, ranks):  # noqa: F811
    assert_trains_alike(name, 3, ranks(3).run(trained, name, 3))


# Checkpointing.


def calls(text: str, operator: str) -> int:
    return text.count(f" = aten.{operator}(")


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_no_more_is_gathered_where_a_backward_is_written_by_hand(tmp_path):
    """Layers of two dtypes take turns, so two buckets do."""

    def gathers(product):
        model = nn.Module()
        for number, dtype in enumerate((torch.float32, torch.float64) * 3):
            model.register_parameter(f"w{number}", nn.Parameter(torch.ones(4, 4, dtype=dtype)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x):
            for number, weight in enumerate(model.parameters()):
                x = x.to(weight.dtype)
                x = (product if number % 2 else torch.mm)(x, weight.t())
            x.sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        folder = tmp_path / product.__name__
        zero(3, dump=str(folder), bucket_bytes=1 << 20)(step)(torch.ones(2, 4))
        (program,) = folder.glob("rank0/*/*_shard_parameters.py")
        return program.read_text().count("zerofx.all_gather_start(")

    def by_hand(x, transposed):
        return Product.apply(x, transposed.t())

    assert gathers(by_hand) == gathers(torch.mm)


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


def assert_continue_eagerly(name: str, checkpoints: list[tuple]) -> None:
    expected, _ = reference(name, 2)
    for checkpoint in checkpoints:
        training = built(name, eager, rank=7)
        load(training, checkpoint)
        results = run(name, training, range(LOADED_AT, STEPS), 2, None)
        assert_results(name, [results], expected[LOADED_AT:], exact=False)


GROUPS = "several_parameter_groups"
LOADED_AT, UNSHARDED_AT = 5, 8  # steps


def used_between_steps(stage: int, checkpoint: tuple) -> dict[str, Any]:
    """Train to where a checkpoint is, with all that a user may do on the way, and on from it."""
    torch._dynamo.reset()
    rank, world_size = rank_and_world_size()
    training = built(GROUPS, zero(stage), rank)
    (model,), (optimizer,) = training.models, training.optimizers
    run(GROUPS, training, range(LOADED_AT), world_size, rank)
    saved = copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()))
    batch = models.features(0, 4)
    with full_params(model):
        inside = {name: value.clone() for name, value in model.state_dict().items()}
        loss = squared_loss(model, *batch).item()
        with torch.no_grad():
            model.head.bias.fill_(2.0)
            model.body.weight.mul_(0.5)
    before = programs_compiled()
    written = {name: value.clone() for name, value in model.state_dict().items()}
    run(GROUPS, training, range(1), world_size, rank)
    load(training, checkpoint)
    results = run(GROUPS, training, range(LOADED_AT, UNSHARDED_AT), world_size, rank)
    state, compiled = state_of(training), programs_compiled() - before
    unshard(model, optimizer)
    eager_step = functools.partial(step_with(), model, optimizer)
    continuing = Training(eager_step, [model], [optimizer])
    unsharded = run(GROUPS, continuing, range(UNSHARDED_AT, STEPS), world_size, None)
    return {
        "saved": saved, "inside": inside, "loss": loss, "batch": batch, "written": written,
        "results": results, "state": state, "compiled": compiled,
        "unsharded": (unsharded, state_of(continuing)),
    }  # fmt: skip


def eager_checkpoint() -> tuple[dict, dict]:
    training = built(GROUPS, eager)
    run(GROUPS, training, range(LOADED_AT), 2, None)
    return training.models[0].state_dict(), training.optimizers[0].state_dict()


@pytest.fixture(scope="module", params=only((3,), (0, 1, 3)))
def between_steps(ranks, request):  # noqa: F811
    """Return what each of two ranks finds in one training."""
    return ranks(2).run(used_between_steps, request.param, eager_checkpoint())


def test_state_dicts_of_two_ranks_continue_in_an_eager_process(between_steps):
    assert_continue_eagerly(GROUPS, [found["saved"] for found in between_steps])


@pytest.mark.nightly
@pytest.mark.parametrize("stage", (1, 3))
def test_state_dicts_of_tied_weights_continue_in_an_eager_process(stage, ranks):  # noqa: F811
    checkpoints = ranks(2).run(checkpoint_of, "tied_weights", stage, LOADED_AT)
    assert_continue_eagerly("tied_weights", checkpoints)


def test_an_eager_checkpoint_continues_on_two_ranks(between_steps):
    expected, _ = reference(GROUPS, 2)
    _, expected_state = reference(GROUPS, 2, UNSHARDED_AT)
    of_ranks = [found["results"] for found in between_steps]
    assert_results(GROUPS, of_ranks, expected[LOADED_AT:UNSHARDED_AT], exact=False)
    assert_states([found["state"] for found in between_steps], expected_state, exact=False)
    assert [found["compiled"] for found in between_steps] == [0, 0]


def loaded_before_the_first_step(stage: int, checkpoint: tuple) -> tuple:
    torch._dynamo.reset()
    rank, world_size = rank_and_world_size()
    training = built(GROUPS, zero(stage), rank)
    before = programs_compiled()
    load(training, checkpoint)
    results = run(GROUPS, training, range(LOADED_AT, STEPS), world_size, rank)
    return results, state_of(training), programs_compiled() - before


@pytest.mark.nightly
@pytest.mark.parametrize("stage", (1, 3))
def test_an_eager_checkpoint_may_be_loaded_before_the_first_step(stage, ranks):  # noqa: F811
    of_ranks = ranks(2).run(loaded_before_the_first_step, stage, eager_checkpoint())
    results, states, compiled = zip(*of_ranks, strict=True)
    expected, expected_state = reference(GROUPS, 2)
    assert_results(GROUPS, results, expected[LOADED_AT:], exact=False)
    assert_states(states, expected_state, exact=False)
    assert compiled == (1, 1)


def test_full_params_shows_whole_values_and_keeps_what_is_written(between_steps):
    for found in between_steps:
        saved, _ = found["saved"]
        for name, value in saved.items():
            assert_same(found["inside"][name], value, name)
        model = Mlp()
        model.load_state_dict(saved)
        assert squared_loss(model, *found["batch"]).item() == found["loss"]
        expected = dict(saved)
        expected["head.bias"] = torch.full_like(expected["head.bias"], 2.0)
        expected["body.weight"] = expected["body.weight"] * 0.5
        for name, value in expected.items():
            assert_same(found["written"][name], value, name)


def test_after_unshard_training_continues_eagerly(between_steps):
    results, states = zip(*(found["unsharded"] for found in between_steps), strict=True)
    expected, expected_state = reference(GROUPS, 2)
    for of_rank in results:
        assert_results(GROUPS, [of_rank], expected[UNSHARDED_AT:], exact=False)
    assert_states(states, expected_state, exact=False)


def gradients_between_calls(stage: int) -> dict:
    """Two calls that leave their gradients, read from outside where the stage allows that."""
    torch._dynamo.reset()
    rank, world_size = rank_and_world_size()
    training = built("gradients_never_zeroed", zero(stage), rank)
    run("gradients_never_zeroed", training, range(2), world_size, rank)
    return {name: p.grad.clone() for name, p in training.models[0].named_parameters()}


@pytest.mark.nightly
@pytest.mark.parametrize("stage", (0, 1))
def test_gradients_between_calls_are_the_whole_average(stage, ranks):  # noqa: F811
    training = built("gradients_never_zeroed", eager)
    run("gradients_never_zeroed", training, range(2), 2, None)
    for gradients in ranks(2).run(gradients_between_calls, stage):
        for name, parameter in training.models[0].named_parameters():
            assert_close(gradients[name], parameter.grad, name)


@pytest.mark.parametrize("stage", only((3,), (2, 3)))
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


@pytest.mark.slow(reason="ranks compile and train")
def test_buffers_start_as_rank_0s_and_are_the_ranks_own_afterwards(ranks):  # noqa: F811
    for rank, mean in enumerate(ranks(2).run(normalised_features, 3)):
        norm = nn.BatchNorm1d(models.FEATURES)
        for number in range(3):
            norm(models.features(10 * rank + number, 4)[0])
        assert_close(mean, norm.running_mean, f"running mean on rank {rank}")


class Branched(nn.Module):
    """Has weights that one branch of ``torch.cond`` reads."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(models.FEATURES, 3)
        self.mix = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.lift(x)
        return torch.cond(h.sum() > 0, lambda h: self.mix(h), lambda h: h.sin(), (h,))


@pytest.mark.nightly
def test_weights_that_one_branch_reads_train_in_shards():
    models_trained = []
    for compile_step in (eager, zero(3)):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Branched()
        step, optimizer = compile_step(step_with()), adamw(model.parameters())
        for number in range(3):
            step(model, optimizer, *models.features(number, 4))
        models_trained.append(model.state_dict())
    for name, value in models_trained[0].items():
        assert_close(models_trained[1][name], value, name)


class RunningMeans(nn.Module):
    """Reassigns one buffer, and reads another one of some batches only."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.lift = nn.Linear(models.FEATURES, 3)
        self.register_buffer("mean", torch.tensor(float(rank)))
        self.register_buffer("offset", torch.tensor(float(rank)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.mean().detach()
        return self.lift(x) + (self.offset if x.size(0) < 4 else 0.0)


def means_with_recompilations(alone: bool) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Compile again behind the third call, on rank 1 or on both, and for other batches there."""
    torch._dynamo.reset()
    rank, _ = rank_and_world_size()
    model = RunningMeans(rank)
    step = zero(3)(step_with())
    optimizer = adamw(model.parameters())
    before = programs_compiled()
    for number in range(5):
        rows = 3 if number > 2 and (rank or not alone) else 4
        step(model, optimizer, *models.features(10 * rank + number, rows))
    unshard(model, optimizer)
    step(model, optimizer, *models.features(10 * rank + 5, 4))
    return model.mean, model.offset, programs_compiled() - before


@pytest.mark.slow(reason="ranks compile twice")
@pytest.mark.parametrize("alone", (True, nightly(False)))
def test_a_later_program_leaves_buffers_the_ranks_own(alone, ranks):  # noqa: F811
    """Rank 1 compiles for buffers that it has not had before, alone or as rank 0 does."""
    for rank, (mean, offset, programs) in enumerate(
        ranks(2).run(means_with_recompilations, alone, timeout_s=100)
    ):
        expected = torch.tensor(0.0)
        for number in range(6):
            rows = 3 if 2 < number < 5 and (rank or not alone) else 4
            batch = models.features(10 * rank + number, rows)[0]
            expected = 0.5 * expected + 0.5 * batch.mean()
        assert_close(mean, expected, f"running mean on rank {rank}")
        assert (float(offset), programs > 1) == (float(rank), bool(rank or not alone))


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


@pytest.mark.nightly
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
