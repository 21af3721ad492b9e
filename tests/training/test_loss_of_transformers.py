"""Models of transformers with their own losses, unmodified, over ranks that have unlike batches."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
import zerofx
from tests.kit.ranks import ranks_fixture  # noqa: F401

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.nightly

VOCABULARY, LENGTH = 64, 10
ROWS = (3, 1, 2, 4)
HEADS = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GROUPED = {**HEADS, "num_key_value_heads": 2, "vocab_size": VOCABULARY}
WITHOUT_DROPOUT = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
BERT = {**HEADS, **WITHOUT_DROPOUT, "vocab_size": VOCABULARY}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": VOCABULARY}
GPT2 |= {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0}
T5 |= {"decoder_start_token_id": 0, "pad_token_id": 0, "vocab_size": VOCABULARY}

MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, "head_dim": 8}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**GROUPED, "head_dim": 8}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
    "bert_masked": ("BertForMaskedLM", "BertConfig", BERT),
    "bert_classes": ("BertForSequenceClassification", "BertConfig", {**BERT, "num_labels": 3}),
    "bert_questions": ("BertForQuestionAnswering", "BertConfig", BERT),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {**HEADS, **WITHOUT_DROPOUT, "image_size": 16, "patch_size": 4, "num_labels": 3},
    ),
}


def batch_of(name: str, rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    rows = ROWS[rank]

    def drawn(below, *shape):
        return torch.randint(1, below, shape, generator=generator)

    if name == "vit":
        return {
            "pixel_values": torch.randn(rows, 3, 16, 16, generator=generator),
            "labels": drawn(3, rows),
        }
    tokens = drawn(VOCABULARY, rows, LENGTH)
    mask = torch.ones_like(tokens)
    mask[0, 7:] = 0
    batch = {"input_ids": tokens, "attention_mask": mask}
    if name == "bert_classes":
        return {**batch, "labels": drawn(3, rows)}
    if name == "bert_questions":
        return {
            **batch,
            "start_positions": drawn(LENGTH, rows),
            "end_positions": drawn(LENGTH, rows),
        }
    counts = torch.rand(rows, LENGTH, generator=generator) < 0.3 + 0.2 * rank
    counts[0, 1] = True
    return {**batch, "labels": tokens.masked_fill(~counts, -100)}


def train(name: str, batch: dict[str, torch.Tensor], options: dict | None):
    torch.manual_seed(0)
    kind, config, values = MODELS[name]
    model = getattr(transformers, kind)(getattr(transformers, config)(**values)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    def step(batch):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    if options is not None:
        step = torch.compile(step, backend="zero", options={"lowering": "eager", **options})
    losses = [step(batch).item() for _ in range(2)]
    with zerofx.full_params(model):
        parameters = [p.detach().clone() for p in model.parameters()]
    return losses, parameters, zerofx.explain(step) if options is not None else ""


def train_on_rank(name: str, options: dict):
    return train(name, batch_of(name, dist.get_rank()), {"loss": "global", **options})


LANGUAGE = ("llama", "qwen3", "gemma2", "gpt2", "t5", "bert_masked")


@pytest.mark.parametrize("lowering", ("eager", "inductor"))
@pytest.mark.parametrize("name", MODELS)
def test_trains_as_one_process(ranks, name, lowering):  # noqa: F811
    check(ranks, name, {"stage": 3, "lowering": lowering})


@pytest.mark.parametrize("lowering", ("eager", "inductor"))
@pytest.mark.parametrize("name", LANGUAGE)
def test_with_the_loss_in_chunks_it_trains_so_too(ranks, name, lowering):  # noqa: F811
    check(
        ranks, name, {"stage": 3, "lowering": lowering, "chunk_loss": 3}, r"chunk_loss .*losses: 1"
    )


def check(ranks, name, options, explained=""):  # noqa: F811
    batches = [batch_of(name, rank) for rank in range(2)]
    joined = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
    losses, parameters, _ = train(name, joined, None)
    for found, of_rank, text in ranks(2).run(train_on_rank, name, options, timeout_s=400):
        assert re.search(explained, text)
        torch.testing.assert_close(found, losses, rtol=2e-6, atol=0)
        for one, other in zip(of_rank, parameters, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
