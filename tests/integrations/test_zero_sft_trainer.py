"""ZeroSFTTrainer: TRL's SFTTrainer on ranks trains, and measures, as it does in one process."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from peft import PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import zerofx
from tests.kit.ranks import ranks_fixture  # noqa: F401
from tests.kit.trainers import as_torchrun, built, logged
from zerofx.integrations.trl import ZeroSFTTrainer

SEEN = ("loss", "grad_norm", "learning_rate", "entropy", "mean_token_accuracy", "num_tokens")
WORDS = "a the cat dog sat ran on mat tree big small red blue and then under over it was of".split()


def texts():
    generator = torch.Generator().manual_seed(0)

    def some(least, most):
        number = int(torch.randint(least, most, (1,), generator=generator))
        chosen = torch.randint(len(WORDS), (number,), generator=generator)
        return " ".join(WORDS[at] for at in chosen)

    return Dataset.from_list(
        [{"prompt": some(2, 5), "completion": " " + some(2, 7)} for _ in range(24)]
    )


def tokenizer():
    words = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def config(folder, **given):
    return SFTConfig(
        **{
            "output_dir": str(folder),
            "num_train_epochs": 1,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "bf16": False,
            "activation_checkpointing": False,
            "disable_tqdm": True,
            "pad_to_multiple_of": 16,  # one size: a step is compiled for any after the second
            **given,
        }
    )


def small():
    tokens = {"vocab_size": len(WORDS) + 3, "pad_token_id": 0, "eos_token_id": 1}
    return built(num_hidden_layers=1, **tokens)


def train(trainer_class, folder, given, build=small, **more):
    trainer = trainer_class(
        build(),
        config(folder, **given),
        train_dataset=texts(),
        processing_class=tokenizer(),
        **more,
    )
    trainer.train()
    trainer.save_model()
    return logged(trainer, *SEEN)


def train_on_rank(folder, given):
    with as_torchrun():
        return train(ZeroSFTTrainer, folder, given, zero={"lowering": "eager"})


@pytest.mark.nightly
@pytest.mark.parametrize("num_ranks", (2, 3))
@pytest.mark.parametrize(
    "given",
    ({}, {"loss_type": "dft"}, {"gradient_accumulation_steps": 2}, {"optim": "adamw_torch"}),
)
def test_losses_and_measures_are_those_of_one_process(given, num_ranks, ranks, tmp_path):  # noqa: F811
    is_sgd = "optim" not in given
    given = {**given, "optim": "sgd", "learning_rate": 1.0} if is_sgd else given
    parts = given.get("gradient_accumulation_steps", 1)
    apart = {**given, "per_device_train_batch_size": 12 // num_ranks // parts}
    found = ranks(num_ranks).run(train_on_rank, str(tmp_path / "apart"), apart, timeout_s=600)
    one = {**given, "per_device_train_batch_size": 12 // parts}
    expected = torch.tensor(train(SFTTrainer, tmp_path / "one", one))
    assert len(expected) > 1
    for its in found:
        # The measures are read at the precision that is logged.
        torch.testing.assert_close(torch.tensor(its), expected, rtol=5e-6, atol=2e-6)
    if not is_sgd:  # AdamW blows up differences of gradients that are nearly 0
        return
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "apart").state_dict()
    for name, value in AutoModelForCausalLM.from_pretrained(tmp_path / "one").state_dict().items():
        torch.testing.assert_close(saved[name], value, rtol=1e-4, atol=1e-5)


def prompted():
    model = small()
    return get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))


@pytest.mark.slow(reason="trains through SFTTrainer and ZeroSFTTrainer")
def test_a_prompt_that_is_learnt_is_trained_and_saved(tmp_path):
    given = {"per_device_train_batch_size": 12, "optim": "sgd", "learning_rate": 1.0}
    zero = {"lowering": "eager", "stage": 3}
    found = train(ZeroSFTTrainer, tmp_path / "zero", given, prompted, zero=zero)
    expected = train(SFTTrainer, tmp_path / "trl", given, prompted)
    torch.testing.assert_close(found, expected, rtol=5e-6, atol=2e-6)
    prompts = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("zero", "trl"))
    torch.testing.assert_close(*prompts, rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
def test_behind_a_step_it_evaluates_as_trl_does(tmp_path):
    given = {"max_steps": 1, "per_device_train_batch_size": 12, "loss_type": "dft"}
    data = {"train_dataset": texts(), "eval_dataset": texts(), "processing_class": tokenizer()}
    model, zero = small(), {"lowering": "eager", "stage": 3}
    ours = ZeroSFTTrainer(model, config(tmp_path, **given), zero=zero, **data)
    ours.train()
    found = ours.evaluate(), ours.predict(ours.eval_dataset)
    zerofx.unshard(model, ours.optimizer.optimizer)
    theirs = SFTTrainer(model, config(tmp_path, **given), **data)
    expected = theirs.evaluate(), theirs.predict(theirs.eval_dataset)
    for name in ("loss", "entropy", "mean_token_accuracy"):
        assert found[0][f"eval_{name}"] == pytest.approx(expected[0][f"eval_{name}"], rel=5e-6)
    assert found[0]["eval_num_tokens"] > expected[0]["eval_num_tokens"] == 0
    torch.testing.assert_close(found[1].predictions, expected[1].predictions, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name, value", (("label_smoothing_factor", 0.1), ("activation_offloading", True))
)
def test_what_needs_more_of_trls_code_is_refused(name, value, tmp_path):
    given = config(tmp_path, **{name: value})
    with pytest.raises(ValueError, match=name):
        ZeroSFTTrainer(small(), given, train_dataset=texts(), processing_class=tokenizer())


def test_a_loss_of_ones_own_is_refused_with_where_to_write_it(tmp_path):
    with pytest.raises(ValueError, match="compute_loss_func.*override loss_and_seen"):
        ZeroSFTTrainer(small(), config(tmp_path), compute_loss_func=lambda *_: None)


class Doubles(SFTTrainer):
    def compute_loss(self, *arguments, **named):
        return 2 * SFTTrainer.compute_loss(self, *arguments, **named)


@pytest.mark.parametrize(
    "bases, own",
    (((ZeroSFTTrainer,), {"compute_loss": Doubles.compute_loss}), ((ZeroSFTTrainer, Doubles), {})),
    ids=("in front", "behind"),
)
def test_a_compute_loss_that_no_step_calls_is_refused(bases, own, tmp_path):
    kind = type("Mine", bases, own)
    with pytest.raises(ValueError, match=r"(Mine|Doubles)\.compute_loss`: override loss_and_seen"):
        kind(small(), config(tmp_path))
    loss = {"loss_and_seen": lambda self, inputs, count: None}
    for known in (type("Known", (kind,), loss), type("Known", bases, {"replaces": (Doubles,)})):
        with pytest.raises(ValueError, match="train_dataset` is required"):  # what is checked next
            known(small(), config(tmp_path))
