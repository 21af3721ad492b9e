"""ZeroSeq2SeqTrainer: ranks generate, evaluate and train as Seq2SeqTrainer does in one process."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)

from tests.kit.ranks import ranks_fixture  # noqa: F401
from tests.kit.trainers import arguments, as_torchrun, check, logged
from zerofx.integrations.transformers import ZeroSeq2SeqTrainer

TOKENS, LENGTH = 16, 6


def built():
    set_seed(0)
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
    more = {"vocab_size": TOKENS, "dropout_rate": 0.0, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(**sizes, **more))


def rows(number):
    """Texts of one token, which is to be said again."""
    tokens = [2 + at % (TOKENS - 2) for at in range(number)]
    texts = [torch.tensor([token] * LENGTH + [1]) for token in tokens]
    return [{"input_ids": text, "labels": text} for text in texts]


def measure(outputs):
    predicted = outputs.predictions[:, 1 : LENGTH + 1]
    right = predicted == outputs.label_ids[:, :LENGTH]
    return {"right": float(right.mean()), "tokens": float(predicted.mean())}


def trained(kind, folder, rows_of_batch, **more):
    """Train with evaluations between, predict and train again; return losses, measures, tokens."""
    given = {"num_train_epochs": 2, "eval_strategy": "epoch", "per_device_eval_batch_size": 4}
    given |= {"predict_with_generate": True, "generation_max_length": LENGTH + 2}
    given |= {"per_device_train_batch_size": rows_of_batch}
    settings = arguments(folder, Seq2SeqTrainingArguments, **given)
    data = {"train_dataset": rows(24), "eval_dataset": rows(8)}
    trainer = kind(built(), settings, **data, compute_metrics=measure, **more)
    trainer.train()
    found = logged(trainer, "loss", "grad_norm"), logged(trainer, "eval_loss")
    measured = logged(trainer, "eval_right", "eval_tokens")
    tokens = trainer.predict(rows(8), max_length=5, num_beams=2).predictions
    trainer.train()
    return *found, measured, tokens.tolist(), logged(trainer, "loss", "grad_norm")


def trained_on_rank(folder, rows_of_batch):
    with as_torchrun():
        zero = {"lowering": "eager", "stage": 3}
        return trained(ZeroSeq2SeqTrainer, folder, rows_of_batch, zero=zero)


@pytest.mark.nightly
def test_ranks_generate_the_tokens_of_one_process_and_train_on(ranks, tmp_path):  # noqa: F811
    expected = trained(Seq2SeqTrainer, tmp_path / "one", 6)
    _, _, measured, tokens, _ = expected
    assert len(set(measured)) > 1 and len(set(map(tuple, tokens))) > 1, "the texts matter"
    for found in ranks(2).run(trained_on_rank, str(tmp_path / "two"), 3, timeout_s=600):
        for each, other in zip(found, expected, strict=True):
            check(each, other)
