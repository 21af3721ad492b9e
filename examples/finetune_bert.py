"""Teach a small Hugging Face BERT to tell code, comments and docstrings apart.

    python examples/finetune_bert.py
    torchrun --nproc-per-node 2 examples/finetune_bert.py

It sees one line at a time, as bytes, without the lines around it.  The exit status says
whether accuracy on lines of held-out files reached ``--target-accuracy``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import torch
from corpus import (
    LABELS,
    LINE_VOCABULARY,
    PAD_ID,
    labelled_lines,
    line_batches,
    source_files,
    split_files,
)
from loop import (
    Launch,
    argument_parser,
    report_memory,
    resident_peak_bytes,
    save_loss_curve,
    train,
    warmup_cosine,
)
from transformers import BertConfig, BertForSequenceClassification

EVALUATION_BATCHES = 16
EVALUATION_LINES_PER_BATCH = 96


def training_step(model, optimizer, batch, bf16):
    with torch.autocast(batch["labels"].device.type, torch.bfloat16, enabled=bf16):
        loss = model(**batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def predicted_labels(model, batch, bf16):
    with (
        torch.no_grad(),
        torch.autocast(batch["labels"].device.type, torch.bfloat16, enabled=bf16),
    ):
        return model(**batch).logits.argmax(-1)


def accuracy(
    predict: Callable[[dict], torch.Tensor], batches: Sequence[dict]
) -> tuple[float, list[float]]:
    """Return the share of lines labelled right, over all and for each label.

    Every rank must call this with the same batches: each prediction gathers the sharded
    parameters, and all ranks then see the same figure.
    """
    labels = torch.cat([batch["labels"] for batch in batches]).cpu()
    right = torch.cat([predict(batch) for batch in batches]).cpu() == labels
    by_label = [right[labels == label].float().mean().item() for label in range(len(LABELS))]
    return right.float().mean().item(), by_label


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__, steps=300, batch=48, lr=1e-3)
    parser.add_argument("--length", type=int, default=64, help="bytes of a line that are read")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=128, help="a multiple of 32")
    parser.add_argument("--target-accuracy", type=float, default=0.9)
    return parser.parse_args()


def main() -> int:
    baseline_bytes = resident_peak_bytes()
    arguments = parse_arguments()
    launch = Launch.from_arguments(arguments)
    # Ranks draw different dropout masks.  Their parameters differ too, until the first
    # call makes all equal to rank 0's.
    torch.manual_seed(arguments.seed + launch.rank)

    train_files, held_out_files = split_files(source_files())
    config = BertConfig(
        vocab_size=LINE_VOCABULARY,
        hidden_size=arguments.width,
        intermediate_size=4 * arguments.width,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.width // 32,
        max_position_embeddings=arguments.length,
        pad_token_id=PAD_ID,
        num_labels=len(LABELS),
    )
    model = BertForSequenceClassification(config).to(launch.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.01)
    scheduler = warmup_cosine(optimizer, arguments.steps)
    num_parameters = sum(p.numel() for p in model.parameters())
    launch.log(
        f"{num_parameters / 1e6:.2f}M parameters, {arguments.batch} lines per step over "
        f"{launch.world_size} rank(s) on {launch.device.type}, backend {launch.backend}"
    )

    def on_device(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor.to(launch.device) for name, tensor in batch.items()}

    batches = line_batches(
        labelled_lines(train_files),
        batch=arguments.batch,
        length=arguments.length,
        rank=launch.rank,
        world_size=launch.world_size,
        seed=arguments.seed,
    )
    held_out = line_batches(
        labelled_lines(held_out_files),
        batch=EVALUATION_LINES_PER_BATCH,
        length=arguments.length,
        seed=1,
    )
    evaluation = [on_device(next(held_out)) for _ in range(EVALUATION_BATCHES)]

    compiled_step = torch.compile(training_step, **launch.compile_arguments)
    compiled_predict = torch.compile(predicted_labels, **launch.compile_arguments)

    def predict(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return compiled_predict(model, batch, arguments.bf16)

    def step() -> torch.Tensor:
        loss = compiled_step(model, optimizer, on_device(next(batches)), arguments.bf16)
        scheduler.step()
        return loss

    model.eval()
    before, _ = accuracy(predict, evaluation)
    launch.log(f"accuracy before training {before:.1%} on {len(LABELS)} labels")

    model.train()
    losses = train(
        step,
        steps=arguments.steps,
        tokens_per_step=arguments.batch * arguments.length,
        launch=launch,
    )
    report_memory(launch, model, optimizer, compiled_step, baseline_bytes=baseline_bytes)
    # Before the collectives below: torchrun ends all ranks when one of them exits with 1.
    curve = arguments.out / "finetune_bert.png"
    save_loss_curve(losses, curve, "BERT on lines of Python", launch)

    model.eval()
    after, by_label = accuracy(predict, evaluation)
    each = ", ".join(f"{name} {a:.1%}" for name, a in zip(LABELS, by_label, strict=True))
    launch.log(f"accuracy after training {after:.1%} ({each})")
    if after >= arguments.target_accuracy:
        return 0
    launch.log(
        f"FAILED: accuracy on held-out lines is {after:.1%}, below the target "
        f"{arguments.target_accuracy:.1%}. The target is for the default settings: a run of "
        "another size needs its own --target-accuracy."
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
