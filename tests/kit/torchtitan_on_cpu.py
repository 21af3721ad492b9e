"""torchtitan's trainer on CPUs, small: the one of ``examples/torchtitan_job.py`` or its own.

    torchrun --nproc-per-node 2 -m tests.kit.torchtitan_on_cpu zero|own FOLDER STEPS

Rank 0 prints what it logs of each step as JSON.  The trainer asks for CUDA alone; here torch's CPU
answers for one, and it is given batches and first values that do not depend on sharding.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

LENGTH, ROWS, LAYERS, WORDS = 32, 2, 2, 256


def answer_for_cuda() -> None:
    """Have torchtitan take the CPU for its device.  Before it is imported."""
    answers: dict[str, Any] = {
        "get_device_name": lambda *_: "cpu",
        "get_device_properties": lambda *_: SimpleNamespace(total_memory=2**34),
        "memory_stats": lambda *_: {},
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda: None,
        "current_device": lambda: 0,
    }
    for name, answer in answers.items():
        setattr(torch.cpu, name, answer)
    torch._utils._get_available_device_type = lambda: "cpu"
    if not hasattr(dist, "set_timeout"):  # torch 2.13
        dist.set_timeout = lambda *_: None


def small(config: Any, folder: str, steps: int) -> None:
    """Have a configuration of torchtitan's be of a model that trains in seconds."""
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer

    class Words(BaseTokenizer):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config, **_options):
            pass

        encode = decode = get_vocab_size = None

    class Batches(BaseDataLoader):
        """Ids by rank and number; the second rank's first labels do not count."""

        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config, *, dp_rank, **_options):
            self.rank, self.count = dp_rank, 0

        def __iter__(self):
            while True:
                generator = torch.Generator().manual_seed(1000 * self.rank + self.count)
                ids = torch.randint(0, WORDS, (ROWS, LENGTH + 1), generator=generator)
                labels = ids[:, 1:].clone()
                labels[:, : 3 * self.rank] = -100
                self.count += 1
                positions = torch.arange(LENGTH).expand(ROWS, -1)
                yield {"input": ids[:, :-1], "positions": positions}, labels

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    config.tokenizer, config.dataloader = Words.Config(), Batches.Config()
    model = config.model_spec.model
    model.layers = model.layers[:LAYERS]
    config.optimizer.implementation = "for-loop"
    training = config.training
    training.local_batch_size, training.seq_len, training.steps = ROWS, LENGTH, steps
    training.global_batch_size = 2 * ROWS * dist.get_world_size()
    training.mixed_precision_param = "float32"
    training.disable_cuda_graphs = True
    config.dump_folder, config.checkpoint.interval = folder, 2


def its_own(config: Any) -> Any:
    """torchtitan's trainer, sharded by its FSDP2."""
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.trainer import Trainer

    def shard(model: nn.Module, **_options: Any) -> nn.Module:
        axes = {"mesh_dim_names": ("fsdp",)}
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), **axes)
        apply_fsdp_to_decoder(model, mesh, torch.float32, torch.float32, pp_enabled=False)
        for module in model.modules():
            if isinstance(module, FSDPModule):  # gloo multiplies nothing while it adds
                module.set_force_sum_reduction_for_comms(True)
        return model

    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.model_spec = dataclasses.replace(config.model_spec, parallelize_fn=shard)
    config.loss, config.activation_checkpoint = config.loss.loss_fn, None
    return Trainer(config)


def give_values(model: nn.Module) -> None:
    """Give a model, sharded or not, the same matrices."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    named = sorted(model.named_parameters())
    with torch.no_grad():
        for number, (_, matrix) in enumerate(named):
            if matrix.dim() > 1:
                generator = torch.Generator().manual_seed(number)
                value = torch.randn(matrix.shape, generator=generator) * 0.05
                if isinstance(matrix, DTensor):
                    value = distribute_tensor(value, matrix.device_mesh, matrix.placements)
                matrix.copy_(value)


def main(kind: str, folder: str, steps: str) -> None:
    answer_for_cuda()
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    dist.init_process_group("gloo")
    config = llama3_debugmodel()
    small(config, folder, int(steps))
    if kind == "zero":
        from torchtitan_job import ZeroTrainer

        config.checkpoint.enable = True
        trainer = ZeroTrainer(config)
    else:
        trainer = its_own(config)
    give_values(trainer.model_parts[0])
    seen: list[tuple[float, ...]] = []

    def log(step, mean, largest, norm, extra_metrics):
        seen.append((step, mean, largest, norm, extra_metrics["n_tokens_seen"]))

    with mock.patch.object(trainer.metrics_processor, "log", log):
        trainer.train()
    trainer.close()
    if dist.get_rank() == 0:
        print(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
