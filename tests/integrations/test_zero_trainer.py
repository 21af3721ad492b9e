"""ZeroTrainer: Trainer on several ranks trains as Trainer in one process with their batches."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import IterableDataset
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertLMHeadModel,
    LlamaForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainerState,
    set_seed,
)
from transformers.trainer import TRAINER_STATE_NAME

import zerofx
from tests.kit.ranks import ranks_fixture  # noqa: F401
from tests.kit.trainers import CLASSES as VOCABULARY
from tests.kit.trainers import (
    ROWS,
    arguments,
    as_torchrun,
    built,
    check,
    logged,
    of_experts,
    rows,
    train_alone,
    train_on_rank,
)
from zerofx.errors import CheckpointError, StepError
from zerofx.integrations.trainer_parts import averaging_as_asked, explained
from zerofx.integrations.transformers import ZeroTrainer
from zerofx.runtime.memory.pages import return_freed_memory

MIB = 2**20


def check_saved(folder, model):
    saved = AutoModelForCausalLM.from_pretrained(folder)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(saved.state_dict()[name], value, rtol=1e-4, atol=1e-5)


def shallow():
    return built(num_hidden_layers=1)


@pytest.mark.slow(reason="two ranks and a single process train through Trainer")
def test_losses_norms_and_weights_are_those_of_one_process_with_all_batches(ranks, tmp_path):  # noqa: F811
    given = {"gradient_accumulation_steps": 2}
    two = {**given, "per_device_train_batch_size": 3}
    settings = two, None, None, 0, shallow
    found = ranks(2).run(train_on_rank, str(tmp_path / "two"), *settings, timeout_s=300)
    one = {**given, "per_device_train_batch_size": 6}
    expected, _, model = train_alone(tmp_path / "one", one, build=shallow)
    for losses, _ in found:
        check(losses, expected)
    check_saved(tmp_path / "two", model)


CASES = {
    "plain": {},
    # AdamW's first updates make much of gradients that are zero but for rounding.
    "four micro-batches": {"gradient_accumulation_steps": 4, "optim": "sgd"},
    "not clipped": {"max_grad_norm": 0},
    "clipped hard": {"max_grad_norm": 0.01},
    "warmup, cosine": {"lr_scheduler_type": "cosine", "warmup_steps": 2},
    "SGD": {"optim": "sgd"},
    "checkpointed": {"activation_checkpointing": True},
    "labels smoothed": {"label_smoothing_factor": 0.1},
}


@pytest.mark.nightly
@pytest.mark.parametrize("num_ranks", (2, 3))
@pytest.mark.parametrize("case", CASES)
def test_every_way_to_train(case, num_ranks, ranks, tmp_path):  # noqa: F811
    given = {"num_train_epochs": 2, **CASES[case]}
    batch = 6 if "gradient_accumulation_steps" in given else 12
    apart = {**given, "per_device_train_batch_size": batch // num_ranks}
    found = ranks(num_ranks).run(train_on_rank, str(tmp_path / "several"), apart, timeout_s=300)
    one = {**given, "per_device_train_batch_size": batch}
    expected, _, model = train_alone(tmp_path / "one", one)
    for losses, _ in found:
        check(losses, expected)
    check_saved(tmp_path / "several", model)


@pytest.mark.nightly
@pytest.mark.parametrize("zero", ({"lowering": "inductor"}, {"stage": 1}, {"offload": "optimizer"}))
def test_options_of_the_backend(zero, ranks, tmp_path):  # noqa: F811
    two = {"per_device_train_batch_size": 3}
    found = ranks(2).run(train_on_rank, str(tmp_path / "two"), two, zero, timeout_s=600)
    expected, _, _ = train_alone(tmp_path / "one", {"per_device_train_batch_size": 6})
    check(found[0][0], expected)


@pytest.mark.nightly
@pytest.mark.parametrize("num_ranks", (1, 3, 4))
def test_a_checkpoint_of_two_ranks_is_resumed_on_others(num_ranks, ranks, tmp_path):  # noqa: F811
    given = {"num_train_epochs": 3, "save_strategy": "steps", "save_steps": 3}
    two = {**given, "per_device_train_batch_size": 6}
    whole, _ = ranks(2).run(train_on_rank, str(tmp_path / "two"), two, timeout_s=300)[0]
    apart = {**given, "per_device_train_batch_size": 12 // num_ranks}
    checkpoint = str(tmp_path / "two" / "checkpoint-3")
    settings = str(tmp_path / "others"), apart, None, checkpoint
    resumed, _ = ranks(num_ranks).run(train_on_rank, *settings, timeout_s=300)[0]
    check(resumed, whole)


def resident(name):
    """Return this process's resident bytes: now, ``VmRSS``, or at the most, ``VmHWM``."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) * 1024


def more_memory_while(save):
    return_freed_memory()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = resident("VmRSS")
    save()
    return resident("VmHWM") - before


def save_a_wide_model(folder):
    """Return the model's bytes, and those that saving takes more: weights alone, and everything."""
    wide = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 4}
    with as_torchrun():
        trainer = ZeroTrainer(
            built(**wide),
            arguments(folder, max_steps=1, per_device_train_batch_size=1),
            train_dataset=rows(),
            zero={"lowering": "eager", "stage": 3},
        )
        trainer.train()
        nbytes = sum(parameter.nbytes for parameter in trainer.model.parameters())
        weights = more_memory_while(trainer.save_model)
        everything = more_memory_while(lambda: trainer._save_checkpoint(trainer.model, None))
        return nbytes, weights, everything


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_saving_takes_a_shard_more_at_most(ranks, tmp_path):  # noqa: F811
    """Of AdamW's states, twice as large as the shard, too; a file's mapped pages are counted."""
    for nbytes, *more in ranks(2).run(save_a_wide_model, str(tmp_path), timeout_s=600):
        assert nbytes > 800 * MIB, "a rank that has all of it would be noticed"
        assert max(more) < nbytes / 2 + 256 * MIB


@pytest.mark.nightly
def test_a_checkpoint_that_was_written_over_in_part_is_not_loaded(tmp_path, monkeypatch):
    given = arguments(tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    zero = {"lowering": "eager", "stage": 1}
    trainer = ZeroTrainer(built(), given, train_dataset=rows(), zero=zero)
    trainer.train()
    checkpoint = str(tmp_path / "checkpoint-1")
    trainer._load_optimizer_and_scheduler(checkpoint)
    saved = trainer.model.lm_head.weight.detach().clone()
    with torch.no_grad():
        trainer.model.lm_head.weight.zero_()

    def refuse(*arguments):
        raise OSError("as if killed here")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_save_rng_state", refuse)
        with pytest.raises(OSError, match="as if killed here"):
            trainer._save_checkpoint(trainer.model, None)
    with pytest.raises(CheckpointError, match="checkpoint-1 was not saved to the end"):
        trainer._load_optimizer_and_scheduler(checkpoint)
    assert not trainer.model.lm_head.weight.any(), "nothing was loaded"
    trainer._save_checkpoint(trainer.model, None)
    with torch.no_grad():
        trainer.model.lm_head.weight.copy_(saved)
    trainer._load_optimizer_and_scheduler(checkpoint)
    assert not trainer.model.lm_head.weight.any()


@pytest.mark.parametrize("by_the_trainer", (False, True))
def test_weights_saved_over_a_whole_checkpoint_are_those_that_are_loaded(by_the_trainer, tmp_path):
    given = arguments(tmp_path, save_only_model=by_the_trainer)
    trainer = ZeroTrainer(built(), given, train_dataset=rows())
    zerofx.save(tmp_path / "zero", trainer.model).wait()
    (tmp_path / "zero.token").write_text(16 * "0")
    with torch.no_grad():
        trainer.model.lm_head.weight.fill_(2)
    trainer.save_model(str(tmp_path), _internal_call=by_the_trainer)
    with torch.no_grad():
        trainer.model.lm_head.weight.zero_()
    trainer.state.best_model_checkpoint = str(tmp_path)
    trainer._load_best_model()
    assert (trainer.model.lm_head.weight == 2).all()


@pytest.mark.nightly
def test_an_epoch_whose_last_update_has_fewer_micro_batches_is_resumed(ranks, tmp_path):  # noqa: F811
    given = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 1}
    given |= {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3}  # three and one
    whole, _ = ranks(2).run(train_on_rank, str(tmp_path / "whole"), given, timeout_s=300)[0]
    checkpoint = str(tmp_path / "whole" / "checkpoint-1")
    settings = str(tmp_path / "again"), given, None, checkpoint
    resumed, _ = ranks(2).run(train_on_rank, *settings, timeout_s=300)[0]
    check(resumed, whole)


@pytest.mark.nightly
def test_the_place_in_the_data_is_one_in_samples(ranks, tmp_path):  # noqa: F811
    """Four ranks make half as many steps of an epoch as two."""
    given = {
        "num_train_epochs": 2,
        "save_strategy": "steps",
        "save_steps": 4,
        "per_device_train_batch_size": 3,
        "lr_scheduler_type": "linear",
    }
    ranks(2).run(train_on_rank, str(tmp_path / "two"), given, timeout_s=300)
    checkpoint = str(tmp_path / "two" / "checkpoint-4")  # where the first epoch ends
    settings = str(tmp_path / "four"), given, None, checkpoint
    resumed, _ = ranks(4).run(train_on_rank, *settings, timeout_s=300)[0]
    rates = [rate for *_, rate in resumed]
    assert len(rates) == 4 + 2, "an epoch of four updates, and one of two"
    assert rates[4:] == pytest.approx([0.5e-2, 0.25e-2])


@pytest.mark.nightly
def test_a_resume_with_fewer_samples_in_an_update_trains_to_max_steps(tmp_path):
    """After as many epochs as eight updates of half the samples would be."""
    given = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4}
    zero = {"lowering": "eager", "stage": 1}
    for batch, checkpoint in ((12, None), (6, str(tmp_path / "checkpoint-4"))):
        settings = arguments(tmp_path, per_device_train_batch_size=batch, **given)
        trainer = ZeroTrainer(built(), settings, train_dataset=rows(), zero=zero)
        trainer.train(resume_from_checkpoint=checkpoint)
        assert trainer.state.global_step == 8 == len(logged(trainer, "loss"))


@pytest.mark.nightly
def test_evaluations_and_the_best_model(ranks, tmp_path):  # noqa: F811
    given = {
        "num_train_epochs": 3,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": True,  # so that the last is not the best
    }
    two = {**given, "per_device_train_batch_size": 3, "per_device_eval_batch_size": 4}
    found = ranks(2).run(train_on_rank, str(tmp_path / "two"), two, None, None, 16, timeout_s=300)
    # Trainer counts an evaluation's tokens over all ranks, unless it is told not to.
    one = {**given, "per_device_train_batch_size": 6, "per_device_eval_batch_size": 8}
    expected, evaluated, model = train_alone(tmp_path / "one", one, 16)
    assert max(evaluated) == evaluated[0] > evaluated[-1]
    check(found[0][0], expected)
    check(found[0][1], evaluated)
    check_saved(tmp_path / "two", model)


@pytest.mark.nightly
def test_autocast_is_trainers_to_its_precision(ranks, tmp_path):  # noqa: F811
    two = {"per_device_train_batch_size": 3, "bf16": True}
    found, _ = ranks(2).run(train_on_rank, str(tmp_path / "two"), two, timeout_s=300)[0]
    expected, _, _ = train_alone(tmp_path / "one", {**two, "per_device_train_batch_size": 6})
    exact, _, _ = train_alone(tmp_path / "exact", {"per_device_train_batch_size": 6})
    losses = [torch.tensor([loss for loss, *_ in each]) for each in (found, expected, exact)]
    torch.testing.assert_close(losses[0], losses[1], rtol=2e-3, atol=0)
    assert not torch.allclose(losses[0], losses[2], rtol=1e-6), "it was rounded"


def adapted():
    torch.manual_seed(1)
    config = LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights="gaussian")
    return get_peft_model(built(), config)


@pytest.mark.nightly
def test_adapters_are_trained_saved_and_resumed(ranks, tmp_path):  # noqa: F811
    given = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 2, "optim": "sgd"}
    given |= {"learning_rate": 1.0}
    two = {**given, "per_device_train_batch_size": 3}
    settings = two, None, None, 0, adapted
    found, _ = ranks(2).run(train_on_rank, str(tmp_path / "two"), *settings, timeout_s=300)[0]
    one = {**given, "per_device_train_batch_size": 6}
    expected, _, model = train_alone(tmp_path / "one", one, build=adapted)
    check(found, expected)
    written = {path.name for path in (tmp_path / "two").iterdir()}
    assert "adapter_model.safetensors" in written and "model.safetensors" not in written
    saved = PeftModel.from_pretrained(built(), tmp_path / "two").state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(saved[name], value, rtol=1e-4, atol=1e-6)
    settings = two, None, str(tmp_path / "two" / "checkpoint-2"), 0, adapted
    again, _ = ranks(2).run(train_on_rank, str(tmp_path / "again"), *settings, timeout_s=300)[0]
    check(again, expected)


@pytest.mark.nightly
def test_a_thousand_steps_of_experts_that_a_rank_does_not_use(ranks, tmp_path):  # noqa: F811
    given = {"max_steps": 1000, "per_device_train_batch_size": 1, "learning_rate": 1e-3}
    settings = given, None, None, 0, of_experts
    found = ranks(2).run(train_on_rank, str(tmp_path / "two"), *settings, timeout_s=900)
    one = {**given, "per_device_train_batch_size": 2}
    expected, _, _ = train_alone(tmp_path / "one", one, build=of_experts)
    for losses, _ in found:
        assert len(losses) == 1000
        check(losses[:20], expected[:20])  # later, another expert may be chosen for rounding


CLASSES = 3


def classifies():
    config = built(num_labels=CLASSES, pad_token_id=0).config
    torch.manual_seed(1)
    lora = LoraConfig(task_type=TaskType.SEQ_CLS, target_modules=["q_proj"], r=4)
    model = LlamaForSequenceClassification(config)
    model.score.register_buffer("scale", torch.full((1,), 2.0))
    return get_peft_model(model, lora)


def train_to_classify(kind, folder, batch, **more):
    data = [{**row, "labels": number % CLASSES} for number, row in enumerate(rows())]
    given = arguments(folder, per_device_train_batch_size=batch, optim="sgd", learning_rate=1.0)
    trainer = kind(classifies(), given, train_dataset=data, **more)
    trainer.train()
    trainer.save_model()


def classify_on_rank(folder):
    with as_torchrun():
        train_to_classify(ZeroTrainer, folder, 3, zero={"lowering": "eager", "stage": 3})


@pytest.mark.nightly
def test_the_modules_that_peft_saves_whole_are_saved(ranks, tmp_path):  # noqa: F811
    ranks(2).run(classify_on_rank, str(tmp_path / "two"), timeout_s=300)
    train_to_classify(Trainer, tmp_path / "one", 6)
    found, expected = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("two", "one")
    )
    assert found.keys() == expected.keys() and any("score" in name for name in found)
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)


def resized(folder, seed):
    """A model whose vocabulary has grown after it was saved, with a second adapter, frozen."""
    if not folder.exists():
        built().save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(seed)
    model.resize_token_embeddings(VOCABULARY + 3, mean_resizing=False)
    lora = {"target_modules": ["q_proj"], "r": 4, "init_lora_weights": False}
    lora["base_model_name_or_path"] = str(folder)
    model = get_peft_model(model, LoraConfig(**lora))
    model.add_adapter("other", LoraConfig(**lora))
    return model


@pytest.mark.nightly
def test_all_that_peft_saves_is_saved_frozen_or_not(tmp_path):
    model = resized(tmp_path / "base", 1)
    given = arguments(tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    zero = {"lowering": "eager", "stage": 3}
    trainer = ZeroTrainer(model, given, train_dataset=rows(), zero=zero)
    trainer.train()
    with zerofx.full_params(model):
        model.save_pretrained(tmp_path / "peft")
    for adapter in (".", "other"):
        found, expected = (
            load_file(tmp_path / folder / adapter / "adapter_model.safetensors")
            for folder in ("checkpoint-1", "peft")
        )
        assert any("embed_tokens" in name for name in found)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    again = resized(tmp_path / "base", 2)
    zerofx.load(tmp_path / "checkpoint-1" / "zero", again)
    with zerofx.full_params(model):
        torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)


def alone(kind, folder, given=None, times=1, resume=None, **more):
    """Train, as often, in one process; return what was logged, and what an evaluation says."""
    if issubclass(kind, ZeroTrainer):
        more["zero"] = {"lowering": "eager", "stage": 3}
    settings = arguments(folder, per_device_train_batch_size=6, **(given or {}))
    trainer = kind(built(), settings, train_dataset=rows(), eval_dataset=rows(8), **more)
    for _ in range(times):
        trainer.train(resume_from_checkpoint=resume)
    found = logged(trainer, "loss", "grad_norm")
    return found, [(trainer.evaluate()["eval_loss"], 0.0), (trainer.evaluate()["eval_loss"], 0.0)]


@pytest.mark.nightly
def test_a_second_training_updates_as_trainers_does(tmp_path):
    found, expected = (alone(kind, tmp_path, times=2) for kind in (ZeroTrainer, Trainer))
    check(found[0], expected[0])
    check(found[1], expected[1])


@pytest.mark.nightly
@pytest.mark.parametrize(
    "given", ({"max_grad_norm": -1.0}, {"label_smoothing_factor": 0.1}), ids=str
)
def test_alone_it_trains_and_evaluates_as_trainer(given, tmp_path):
    found, expected = (alone(kind, tmp_path, given) for kind in (ZeroTrainer, Trainer))
    check(found[0], expected[0])
    check(found[1], expected[1])


def looks(kind):
    """Return a class whose loss is computed from what it finds outside of the model's forward."""

    class Looks(kind):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            assert not torch.is_autocast_enabled("cpu") and outputs.logits.dtype == torch.float32
            assert model.config.vocab_size and isinstance(model, nn.Module)
            loss = outputs.loss + 10 * (outputs.logits @ outputs.logits.mT).square().mean()
            return (loss, outputs) if return_outputs else loss

    return Looks


@pytest.mark.nightly
def test_a_loss_of_ones_own_is_outside_of_autocast_as_trainers_is(tmp_path):
    given = {"bf16": True, "optim": "sgd"}
    found, expected = (alone(looks(kind), tmp_path, given) for kind in (ZeroTrainer, Trainer))
    for each, other in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(each), torch.tensor(other), rtol=1e-3, atol=1e-4)


def means(kind):
    """Return a class whose losses are means of micro-batches, and says so."""

    class Means(kind):
        loss_is_scaled_for_ga = False

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            return (outputs.loss, outputs) if return_outputs else outputs.loss

    return Means


@pytest.mark.nightly
def test_means_of_micro_batches_are_averaged_from_any_checkpoint_on(tmp_path):
    given = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 1, "optim": "sgd"}
    given |= {"gradient_accumulation_steps": 3}  # of an epoch's four
    expected, _ = alone(means(Trainer), tmp_path / "expected", given)
    found, _ = alone(means(ZeroTrainer), tmp_path / "found", given)
    check(found, expected)
    checkpoint = str(tmp_path / "found" / "checkpoint-1")  # the rest of the epoch is one batch
    check(alone(means(ZeroTrainer), tmp_path, given, resume=checkpoint)[0], expected)


def bert(kind=BertForSequenceClassification):
    set_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 32}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": CLASSES}
    dropout = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    return kind(BertConfig(vocab_size=VOCABULARY, **small, **layers, **dropout))


def trainer_of_bert(kind, folder, given, **more):
    data = [{**row, "labels": number % CLASSES} for number, row in enumerate(rows())]
    given = arguments(folder, optim="sgd", learning_rate=0.1, **given)
    return kind(bert(), given, train_dataset=data, eval_dataset=data, **more)


def bert_on_rank(folder, given):
    with as_torchrun():
        trainer = trainer_of_bert(ZeroTrainer, folder, given, zero={"lowering": "eager"})
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        return [before, *(loss for (loss,) in logged(trainer, "loss"))]


@pytest.mark.nightly
def test_means_of_a_model_that_takes_a_count_and_ignores_it(ranks, tmp_path):  # noqa: F811
    given = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
    found = ranks(2).run(bert_on_rank, str(tmp_path), given, timeout_s=300)
    alone = trainer_of_bert(Trainer, tmp_path, {"per_device_train_batch_size": 12})
    expected = [alone.evaluate()["eval_loss"]]
    alone.train()
    expected += [loss for (loss,) in logged(alone, "loss")]
    for losses in found:
        assert losses == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize("kind", (BertForMaskedLM, BertForSequenceClassification))
def test_a_loss_of_a_model_that_ignores_the_count_is_a_mean(kind, tmp_path):
    assert not ZeroTrainer(bert(kind), arguments(tmp_path)).model_accepts_loss_kwargs
    assert ZeroTrainer(bert(BertLMHeadModel), arguments(tmp_path)).model_accepts_loss_kwargs
    counting = ZeroTrainer(bert(kind), arguments(tmp_path), compute_loss_func=print)
    assert counting.model_accepts_loss_kwargs, "it is given the count"


def test_a_mean_that_was_taken_for_a_part_is_refused_with_the_remedy():
    with pytest.raises(StepError) as refused, explained(True):
        raise StepError("loss=global: gradients of several calls are added up")
    assert "set loss_is_scaled_for_ga = False in your trainer's class" in refused.value.__notes__[0]
    with pytest.raises(StepError) as refused, explained(True):
        raise StepError("loss.item() reads a value while the step is compiled")
    assert not hasattr(refused.value, "__notes__")


def begin(trainer, checkpoint):
    """Begin a training; return the epochs and the batches that have been seen."""
    loader = trainer.get_train_dataloader()
    epochs, steps_in_epoch, *_, steps = trainer.set_initial_training_values(trainer.args, loader)
    begun = trainer._init_training_state(steps, steps_in_epoch, epochs, checkpoint, None)
    trainer._prepare_for_training(steps, loader, checkpoint)
    return begun


def test_the_schedule_of_trainers_own_checkpoint_goes_on_at_the_same_share(tmp_path):
    """Two updates of four are one of two with twice the samples."""
    given = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 2}
    train_alone(tmp_path, {**given, "per_device_train_batch_size": 12})
    given["per_device_train_batch_size"] = 24
    trainer = ZeroTrainer(built(), arguments(tmp_path, **given), train_dataset=rows())
    assert begin(trainer, str(tmp_path / "checkpoint-2")) == (1, 0)
    assert trainer.state.global_step == trainer.lr_scheduler.last_epoch == 1
    assert trainer.lr_scheduler.get_last_lr() == pytest.approx(2 * [0.5e-2])


def test_a_training_that_has_ended_makes_no_update_more(tmp_path):
    given = {"max_steps": 1, "per_device_train_batch_size": ROWS, "save_strategy": "steps"}
    train_alone(tmp_path, {**given, "save_steps": 1})
    data = {"train_dataset": rows(), "zero": {"lowering": "eager"}}
    trainer = ZeroTrainer(built(), arguments(tmp_path, **given), **data)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert trainer.state.global_step == 1 == len(logged(trainer, "loss"))


def first_values(folder):
    """Return the values that a rank evaluates with before it trains, of ranks that differ."""
    with as_torchrun():
        given = arguments(folder, eval_on_start=True, max_steps=1)
        trainer = ZeroTrainer(built(), given, train_dataset=rows(), eval_dataset=rows())
        with torch.no_grad():
            trainer.model.lm_head.weight.fill_(trainer.args.process_index)
        begin(trainer, None)
        return trainer.model.lm_head.weight.unique().tolist()


def test_an_evaluation_before_the_training_is_one_of_the_first_ranks_values(ranks, tmp_path):  # noqa: F811
    assert ranks(2).run(first_values, str(tmp_path)) == [[0.0], [0.0]]


@pytest.mark.nightly
def test_a_new_trainer_evaluates_a_model_that_is_in_shards(tmp_path):
    model, zero = built(), {"lowering": "eager", "stage": 3}
    given = arguments(tmp_path, max_steps=1)
    trainer = ZeroTrainer(model, given, train_dataset=rows(), zero=zero)
    trainer.train()
    found = ZeroTrainer(model, given, eval_dataset=rows(8), zero=zero).evaluate()["eval_loss"]
    zerofx.unshard(model, trainer.optimizer.optimizer)
    expected = Trainer(model, given, eval_dataset=rows(8)).evaluate()["eval_loss"]
    assert found == pytest.approx(expected, rel=2e-6)


class Endless(IterableDataset):
    def __iter__(self):
        return iter(rows())


def test_data_without_a_length_go_on_where_trainers_do(tmp_path):
    TrainerState(epoch=1.0, global_step=2, train_batch_size=8).save_to_json(
        str(tmp_path / TRAINER_STATE_NAME)
    )
    begin = []
    for kind in (ZeroTrainer, Trainer):
        given = arguments(tmp_path, max_steps=5, gradient_accumulation_steps=2)
        trainer = kind(built(), given, train_dataset=Endless())
        trainer.set_initial_training_values(given, trainer.get_train_dataloader())
        begin.append(trainer._init_training_state(5, 5, 1, str(tmp_path), None))
    assert begin[0] == begin[1] == (0, 4)


def test_the_best_checkpoint_is_not_saved_over_with_lower_numbers(tmp_path):
    """Twelve updates of two samples are six of four."""
    old = tmp_path / "old"
    for name in ("checkpoint-8", "checkpoint-12"):
        (old / name).mkdir(parents=True)
    best = {"best_global_step": 8, "best_model_checkpoint": str(old / "checkpoint-8")}
    state = TrainerState(epoch=1.0, global_step=12, train_batch_size=2, **best)
    state.save_to_json(str(old / "checkpoint-12" / TRAINER_STATE_NAME))

    def begin_in(folder):
        given = arguments(folder, per_device_train_batch_size=4, num_train_epochs=2)
        trainer = ZeroTrainer(built(), given, train_dataset=rows())
        trainer.set_initial_training_values(given, trainer.get_train_dataloader())
        assert trainer._init_training_state(12, 6, 2, str(old / "checkpoint-12"), None) == (1, 0)
        return trainer.state

    with pytest.raises(ValueError, match=r"checkpoint-8 is the best so far.*another output_dir"):
        begin_in(old)
    begun = begin_in(tmp_path / "new")
    assert (begun.global_step, begun.best_global_step) == (6, None)
    assert begun.best_model_checkpoint == str(old / "checkpoint-8")


def predicts(kind):
    class Predicts(kind):
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            with torch.no_grad():
                return model(**self._prepare_inputs(inputs)).loss.detach(), None, None

    return Predicts


@pytest.mark.nightly
def test_a_prediction_of_ones_own_runs_on_shards(tmp_path):
    given = {"max_steps": 1}
    found, expected = (alone(predicts(kind), tmp_path, given)[1] for kind in (ZeroTrainer, Trainer))
    check(found, expected)


class Stops(TrainerCallback):
    def __init__(self, at):
        self.at, self.norms = at, []

    def on_step_end(self, args, state, control, **named):
        control.should_training_stop = state.global_step >= self.at

    def on_log(self, args, state, control, logs=None, **named):
        self.norms.append((logs or {}).get("grad_norm"))


@pytest.mark.nightly
def test_callbacks_see_and_stop_the_training(tmp_path):
    seen = Stops(2)
    trainer = ZeroTrainer(
        built(),
        arguments(tmp_path, per_device_train_batch_size=3),
        train_dataset=rows(),
        callbacks=[seen],
        zero={"lowering": "eager"},
    )
    assert trainer.train().global_step == 2
    assert all(norm > 0 for norm in seen.norms[:2])


REFUSED = {
    "fp16": ({"fp16": True}, "fp16.*bf16=True"),
    "auto_find_batch_size": ({"auto_find_batch_size": True}, "auto_find_batch_size"),
    "8-bit optimizer": ({"optim": "adamw_bnb_8bit"}, "optim.*adamw_bnb_8bit"),
    "paged optimizer": ({"optim": "paged_adamw_32bit"}, "optim.*paged_adamw_32bit"),
    "bitsandbytes' Lion": ({"optim": "lion_32bit"}, "optim.*lion_32bit"),
    "bitsandbytes' AdEMAMix": ({"optim": "ademamix"}, "optim.*ademamix"),
    "schedule-free": ({"optim": "schedule_free_adamw"}, r"optim.*train\(\) and eval\(\) move"),
    "saved at once": (
        {"enable_jit_checkpoint": True},
        "enable_jit_checkpoint.*before it is counted",
    ),
    "cast to evaluate": ({"bf16_full_eval": True}, "bf16_full_eval.*whole parameters"),
    "compiled by Trainer": ({"torch_compile": True}, "torch_compile.*compiled already"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_go_together_is_named_when_it_is_made(case, tmp_path):
    given, words = REFUSED[case]
    with pytest.raises(ValueError, match=words):
        ZeroTrainer(built(), arguments(tmp_path, **given), train_dataset=rows())


@pytest.mark.parametrize(
    "name, value",
    (
        ("fsdp", "full_shard"),
        ("deepspeed", {"zero_optimization": {"stage": 3}}),
        ("parallelism_config", object()),
        ("n_gpu", 2),
    ),
)
def test_another_way_to_use_several_devices_is_named_when_it_is_made(name, value, tmp_path):
    given = arguments(tmp_path)
    setattr(given, "_n_gpu" if name == "n_gpu" else name, value)
    with pytest.raises(ValueError, match=f"cannot train with `{name}"):
        ZeroTrainer(built(), given, train_dataset=rows())


class Steps(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        return super().training_step(model, inputs, num_items_in_batch)


class Clips(Trainer):
    def _clip_grad_norm(self, model):
        return super()._clip_grad_norm(model)


@pytest.mark.parametrize(
    "kind, words", ((Steps, "Steps.training_step"), (Clips, "Clips._clip_grad_norm")), ids=str
)
def test_an_override_that_is_never_called_is_refused(kind, words, tmp_path):
    made = type("Mine", (ZeroTrainer, kind), {})
    with pytest.raises(ValueError, match=f"Mine cannot train with {words}: .*compute_loss"):
        made(built(), arguments(tmp_path), train_dataset=rows())
    known = type("Mine", (ZeroTrainer, kind), {"replaces": (kind,)})
    known(built(), arguments(tmp_path), train_dataset=rows())


class StepsAgain(ZeroTrainer):
    times = 2

    def training_step(self, model, inputs, num_items_in_batch=None):
        steps = range(self.times)
        return sum(super(StepsAgain, self).training_step(model, inputs) for _ in steps)


@pytest.mark.nightly
def test_a_second_update_of_one_batch_is_an_error(tmp_path):
    given = arguments(tmp_path, max_steps=1)
    trainer = StepsAgain(built(), given, train_dataset=rows(), zero={"lowering": "eager"})
    with pytest.raises(StepError, match=r"training_step was called again .* compute_loss"):
        trainer.train()
    trainer.times = 1
    trainer.train()


class OwnStep(ZeroTrainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = self.compute_loss(model, inputs)
        self.accelerator.backward(loss)
        return loss.detach()


def test_a_step_of_ones_own_that_updates_nothing_is_an_error(tmp_path):
    with pytest.raises(StepError, match=r"has to call super\(\)\.training_step"):
        OwnStep(built(), arguments(tmp_path), train_dataset=rows()).train()


class Saves(ZeroTrainer):
    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        Path(output_dir, "note.txt").write_text("mine")


def test_what_is_saved_beside_the_model_is_saved(tmp_path):
    Saves(built(), arguments(tmp_path), train_dataset=rows()).save_model()
    assert {"note.txt", "config.json", "model.safetensors"} <= {f.name for f in tmp_path.iterdir()}


class MovesToEvaluate(torch.optim.SGD):
    def train(self):
        pass

    def eval(self):
        pass


def test_an_optimizer_that_moves_parameters_to_evaluate_is_refused(tmp_path):
    model = built()
    given = {"optimizers": (MovesToEvaluate(model.parameters()), None), "train_dataset": rows()}
    with pytest.raises(ValueError, match=r"MovesToEvaluate: train\(\) and eval\(\) move whole"):
        ZeroTrainer(model, arguments(tmp_path), **given).train()


def test_adapters_that_transformers_has_added_are_refused(tmp_path):
    model = built()
    model.add_adapter(LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"give peft\.get_peft_model\(model, config\) instead"):
        ZeroTrainer(model, arguments(tmp_path), train_dataset=rows())


def test_a_model_that_is_sharded_already_is_refused(tmp_path):
    model = built()
    kind = type(model.lm_head)
    model.lm_head.__class__ = type("FSDPLinear", (FSDPModule, kind), {})
    with pytest.raises(ValueError, match="wrapped in FSDPModule already"):
        ZeroTrainer(model, arguments(tmp_path), train_dataset=rows())


def test_arguments_of_another_trainer_average_as_they_were_asked_to(tmp_path):
    for is_asked in (True, False):
        given = arguments(tmp_path, average_tokens_across_devices=is_asked)
        first = ZeroTrainer(built(), given)
        second = ZeroTrainer(built(), first.args)
        with averaging_as_asked(second.args):
            assert second.args.average_tokens_across_devices == is_asked


def test_the_averaging_around_a_model_is_left_out(tmp_path):
    model = built()
    trainer = ZeroTrainer(nn.DataParallel(model), arguments(tmp_path), train_dataset=rows())
    assert trainer.model is model


def test_the_backend_may_be_named_in_the_arguments(tmp_path):
    given = arguments(tmp_path, torch_compile_backend="zero")
    trainer = ZeroTrainer(built(), given, train_dataset=rows())
    assert not trainer.args.torch_compile
    assert given.torch_compile, "the user's own stay as they are"
