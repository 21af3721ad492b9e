"""Train a small Hugging Face Llama on Python's standard library, in bf16 with accumulation.

    python examples/train_llama.py
    torchrun --nproc-per-node 2 examples/train_llama.py

The step takes ``--accumulate`` micro-batches: gradients are summed on each rank by an
ordinary loop, and cross the network once.
"""

from __future__ import annotations

import argparse
import sys

import torch
from corpus import read_bytes, source_files, split_files, text_batches
from loop import (
    Launch,
    argument_parser,
    exit_status,
    mean_loss,
    report_memory,
    resident_peak_bytes,
    save_loss_curve,
    train,
    warmup_cosine,
)
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 256


def training_step(model, optimizer, ids, accumulate, bf16):
    total = 0.0
    for micro_batch in ids.chunk(accumulate):
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=bf16):
            loss = model(input_ids=micro_batch, labels=micro_batch).loss / accumulate
        loss.backward()
        total = total + loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return total


def validation_loss(model, ids, bf16):
    with torch.no_grad(), torch.autocast(ids.device.type, torch.bfloat16, enabled=bf16):
        return model(input_ids=ids, labels=ids).loss


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__, steps=200, batch=16, lr=1.5e-3)
    parser.set_defaults(bf16=True)
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per step")
    parser.add_argument("--seq", type=int, default=128, help="bytes per row")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128, help="a multiple of 32")
    parser.add_argument("--target-loss", type=float, default=2.2)
    return parser.parse_args()


def main() -> int:
    baseline_bytes = resident_peak_bytes()
    arguments = parse_arguments()
    launch = Launch.from_arguments(arguments)
    torch.manual_seed(arguments.seed)
    if arguments.batch % (arguments.accumulate * launch.world_size):
        sys.exit(
            f"--batch {arguments.batch} does not divide into {arguments.accumulate} equal "
            f"micro-batches on each of {launch.world_size} rank(s)"
        )

    train_files, validation_files = split_files(source_files())
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=arguments.width,
        intermediate_size=3 * arguments.width,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.width // 32,
        num_key_value_heads=max(1, arguments.width // 64),
        max_position_embeddings=arguments.seq + 1,
        tie_word_embeddings=True,
        # As in train_gpt.py: 0.02 is for wider models.
        initializer_range=0.05,
        use_cache=False,
        # Every byte is text: none starts, ends or pads a row.
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).to(launch.device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=arguments.lr, betas=(0.9, 0.95), weight_decay=0.1
    )
    scheduler = warmup_cosine(optimizer, arguments.steps)
    num_parameters = sum(p.numel() for p in model.parameters())
    launch.log(
        f"{num_parameters / 1e6:.2f}M parameters, {arguments.batch} x {arguments.seq} bytes per "
        f"step in {arguments.accumulate} micro-batches over {launch.world_size} rank(s) on "
        f"{launch.device.type}, backend {launch.backend}"
    )

    batches = text_batches(
        read_bytes(train_files),
        batch=arguments.batch,
        seq=arguments.seq,
        rank=launch.rank,
        world_size=launch.world_size,
        seed=arguments.seed,
    )
    compiled_step = torch.compile(training_step, **launch.compile_arguments)

    def step() -> torch.Tensor:
        ids = next(batches).to(launch.device)
        loss = compiled_step(model, optimizer, ids, arguments.accumulate, arguments.bf16)
        scheduler.step()
        return loss

    losses = train(
        step,
        steps=arguments.steps,
        tokens_per_step=arguments.batch * arguments.seq,
        launch=launch,
    )
    report_memory(launch, model, optimizer, compiled_step, baseline_bytes=baseline_bytes)
    # Before the collectives below: torchrun ends all ranks when one of them exits with 1.
    curve = arguments.out / "train_llama.png"
    save_loss_curve(losses, curve, "Llama on the standard library", launch)

    evaluate = torch.compile(validation_loss, **launch.compile_arguments)
    validation = mean_loss(
        lambda ids: evaluate(model, ids.to(launch.device), arguments.bf16),
        text_batches(read_bytes(validation_files), batch=16, seq=arguments.seq, seed=1),
    )
    launch.log(f"validation loss {validation:.3f} nats per byte")
    return exit_status(losses, arguments.target_loss, launch)


if __name__ == "__main__":
    sys.exit(main())
