"""Teach a small Llama that has only seen code to write prose, with adapters alone.

    python examples/finetune_lora.py
    torchrun --nproc-per-node 2 examples/finetune_lora.py

The base is trained first, on lines of code, and exported. Then ``peft`` freezes it and puts LoRA
adapters beside its projections, which are trained on lines of docstrings and comments: frozen
weights are sharded and gathered, and have neither gradients nor optimizer states.  Only the
adapters are saved.  In the end they are loaded beside the exported base, as a user of them would.
The exit status says whether that gives the same validation loss, and one below ``--target-loss``.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from corpus import CODE, COMMENT, DOCSTRING, labelled_lines, source_files, split_files, text_batches
from loop import (
    Launch,
    argument_parser,
    mean_loss,
    report_memory,
    resident_peak_bytes,
    save_loss_curve,
    train,
    warmup_cosine,
)
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import zerofx

VOCABULARY = 256


def training_step(model, optimizer, ids, bf16):
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=bf16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def validation_loss(model, ids, bf16):
    with torch.no_grad(), torch.autocast(ids.device.type, torch.bfloat16, enabled=bf16):
        return model(input_ids=ids, labels=ids).loss


def with_adapters(base: LlamaForCausalLM, rank: int) -> PeftModel:
    """Freeze ``base`` and put trainable matrices of a low rank beside its projections.

    Source: LoRA, Hu et al. 2021.
    """
    projections = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=projections, task_type="CAUSAL_LM"
    )
    return get_peft_model(base, config)


def trainable(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def texts(files: list[Path]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the files' lines of code, and those of prose.  Shapes: u8[bytes]."""
    lines = labelled_lines(files)
    code, prose = lines[CODE], lines[DOCSTRING] + lines[COMMENT]
    return tuple(
        torch.frombuffer(bytearray("\n".join(part).encode()), dtype=torch.uint8)
        for part in (code, prose)
    )


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*"))


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__, steps=150, batch=16, lr=1e-2)
    parser.add_argument("--base-steps", type=int, default=300, help="how long the base is trained")
    parser.add_argument("--base-lr", type=float, default=3e-3, help="and with which learning rate")
    parser.add_argument("--adapter-rank", type=int, default=8)
    parser.add_argument("--seq", type=int, default=128, help="bytes per row")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128, help="a multiple of 32")
    parser.add_argument("--target-loss", type=float, default=2.2, help="of validation, on prose")
    return parser.parse_args()


def main() -> int:
    baseline_bytes = resident_peak_bytes()
    arguments = parse_arguments()
    launch = Launch.from_arguments(arguments)
    if launch.backend != "zero":
        sys.exit("this example saves and loads with zerofx: leave out --backend")
    torch.manual_seed(arguments.seed)
    folder = arguments.out / "finetune_lora"
    if launch.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)  # a checkpoint is never written over another

    train_files, validation_files = split_files(source_files())
    code, prose = texts(train_files)
    _, held_out_prose = texts(validation_files)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=arguments.width,
        intermediate_size=3 * arguments.width,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.width // 32,
        num_key_value_heads=max(1, arguments.width // 64),
        max_position_embeddings=arguments.seq,
        use_cache=False,
    )
    compiled_step = torch.compile(training_step, **launch.compile_arguments)
    evaluate = torch.compile(validation_loss, **launch.compile_arguments)

    def trained(
        model: torch.nn.Module, text: torch.Tensor, *, steps: int, lr: float
    ) -> tuple[torch.optim.Optimizer, list[float]]:
        optimizer = torch.optim.AdamW(trainable(model), lr=lr, weight_decay=0.01)
        scheduler = warmup_cosine(optimizer, steps)
        batches = text_batches(
            text,
            batch=arguments.batch,
            seq=arguments.seq,
            rank=launch.rank,
            world_size=launch.world_size,
            seed=arguments.seed,
        )

        def step() -> torch.Tensor:
            ids = next(batches).to(launch.device)
            loss = compiled_step(model, optimizer, ids, arguments.bf16)
            scheduler.step()
            return loss

        tokens_per_step = arguments.batch * arguments.seq
        return optimizer, train(step, steps=steps, tokens_per_step=tokens_per_step, launch=launch)

    def loss_on_prose(model: torch.nn.Module, evaluate: Callable) -> float:
        return mean_loss(
            lambda ids: evaluate(model, ids.to(launch.device), arguments.bf16),
            text_batches(held_out_prose, batch=16, seq=arguments.seq, seed=1),
        )

    base = LlamaForCausalLM(config).to(launch.device)
    launch.log(
        f"a base of {sum(p.numel() for p in base.parameters()) / 1e6:.2f}M parameters, "
        f"{arguments.base_steps} steps on code over {launch.world_size} rank(s)"
    )
    optimizer, _ = trained(base, code, steps=arguments.base_steps, lr=arguments.base_lr)
    zerofx.export_safetensors(folder / "base", base)
    before = loss_on_prose(base, evaluate)

    zerofx.unshard(base, optimizer)  # peft puts modules around the plain ones
    model = with_adapters(base, arguments.adapter_rank)
    num_trainable = sum(p.numel() for p in trainable(model))
    launch.log(f"adapters of {num_trainable:,} parameters, {arguments.steps} steps on prose")
    optimizer, losses = trained(model, prose, steps=arguments.steps, lr=arguments.lr)
    report_memory(launch, model, optimizer, compiled_step, baseline_bytes=baseline_bytes)
    # Before the collectives below: torchrun ends all ranks when one of them exits with 1.
    save_loss_curve(losses, arguments.out / "finetune_lora.png", "LoRA on prose", launch)
    after = loss_on_prose(model, evaluate)
    launch.log(f"validation loss on prose {before:.3f}, with adapters {after:.3f} nats per byte")

    zerofx.save(folder / "adapters", model, trainable_only=True)
    launch.log(
        f"{folder_bytes(folder / 'adapters') / 1e6:.2f} MB of adapters saved, the base has "
        f"{folder_bytes(folder / 'base') / 1e6:.2f} MB"
    )
    # As by someone who has the two folders: nothing is made before it is read, shard by shard.
    with zerofx.deferred_init():
        fresh = LlamaForCausalLM(config).to(launch.device)
    zerofx.load_safetensors(folder / "base", fresh)
    fresh = with_adapters(fresh, arguments.adapter_rank)
    zerofx.load(folder / "adapters", fresh)
    loaded = loss_on_prose(fresh, evaluate)
    zerofx.unshard(fresh)
    merged = loss_on_prose(fresh.merge_and_unload(), validation_loss)
    launch.log(f"loaded beside the base: {loaded:.3f}; merged into it: {merged:.3f}")

    if loaded != after or abs(merged - after) > 1e-2:
        launch.log("FAILED: adapters that were saved and loaded give another validation loss")
        return 1
    if after <= arguments.target_loss:
        return 0
    launch.log(
        f"FAILED: the validation loss is {after:.3f}, above the target {arguments.target_loss}. "
        "The target is for the default settings: a run of another size needs its own --target-loss."
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
