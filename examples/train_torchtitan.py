"""Train a model of torchtitan on Python's standard library, beside torchtitan's own FSDP2.

    python examples/train_torchtitan.py
    torchrun --nproc-per-node 2 examples/train_torchtitan.py
    torchrun --nproc-per-node 2 examples/train_torchtitan.py --fsdp2

The model, its initialisation and its loss are torchtitan's; the loop is ``loop.py``'s, for the
library's own trainer wants CUDA. With ``--fsdp2`` it is sharded as that trainer does it, and runs
eagerly: the losses are the same.
"""

from __future__ import annotations

import argparse
import importlib
import sys

import torch
from corpus import read_bytes, source_files, split_files, text_batches
from loop import Launch, argument_parser, exit_status, train, warmup_cosine
from torch import nn

VOCABULARY = 256


def built(family: str, config: str, layers: int, device: torch.device) -> nn.Module:
    from torchtitan.models.common.attention import ScaledDotProductAttention

    configs = getattr(importlib.import_module(f"torchtitan.models.{family}"), f"{family}_configs")
    chosen = configs[config](attn_backend="flex")
    chosen.layers = chosen.layers[:layers]
    for layer in chosen.layers:  # flex_attention has no backward pass on a CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = chosen.build().to(device)
    model.init_states(buffer_device=device)
    return model


def shard_as_torchtitan_does(model: nn.Module, launch: Launch) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder

    axes = {"mesh_dim_names": ("fsdp",)}
    mesh = init_device_mesh(launch.device.type, (launch.world_size,), **axes)
    fp32 = torch.float32
    apply_fsdp_to_decoder(model, mesh, param_dtype=fp32, reduce_dtype=fp32, pp_enabled=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # gloo multiplies nothing while it adds
            module.set_force_sum_reduction_for_comms(True)


def training_step(model, optimizer, ids, share, bf16):
    from torchtitan.components.loss import cross_entropy_loss

    with torch.autocast(ids.device.type, torch.bfloat16, enabled=bf16):
        loss = cross_entropy_loss(model(ids[:, :-1]), ids[:, 1:]) / ids[:, 1:].numel()
    (loss * share).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__, steps=60, batch=8, lr=8e-4)
    parser.add_argument("--family", choices=("llama3", "qwen3"), default="llama3")
    parser.add_argument("--config", default="debugmodel", help="one that torchtitan has")
    parser.add_argument("--layers", type=int, default=2, help="of those, the first")
    parser.add_argument("--seq", type=int, default=64, help="bytes per row")
    parser.add_argument("--fsdp2", action="store_true", help="shard as torchtitan's trainer does")
    parser.add_argument("--target-loss", type=float, default=3.0)
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    launch = Launch.from_arguments(arguments)
    torch.manual_seed(arguments.seed)
    model = built(arguments.family, arguments.config, arguments.layers, launch.device)
    if arguments.fsdp2:
        shard_as_torchtitan_does(model, launch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, betas=(0.9, 0.95))
    scheduler = warmup_cosine(optimizer, arguments.steps)
    files, _ = split_files(source_files())
    batches = text_batches(
        read_bytes(files),
        batch=arguments.batch,
        seq=arguments.seq + 1,
        rank=launch.rank,
        world_size=launch.world_size,
        seed=arguments.seed,
    )
    run = training_step
    if not arguments.fsdp2:
        run = torch.compile(training_step, **launch.compile_arguments)
    share = 1 / launch.world_size if arguments.fsdp2 else 1.0  # its FSDP2 adds gradients up

    def step() -> torch.Tensor:
        ids = next(batches).to(launch.device)
        loss = run(model, optimizer, ids, share, arguments.bf16)
        scheduler.step()
        return loss

    losses = train(
        step,
        steps=arguments.steps,
        tokens_per_step=arguments.batch * arguments.seq,
        launch=launch,
    )
    return exit_status(losses, arguments.target_loss, launch)


if __name__ == "__main__":
    sys.exit(main())
