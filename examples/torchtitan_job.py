"""Train with torchtitan's own trainer and its own arguments, sharded by zerofx.  It wants a GPU.

    torchrun --nproc-per-node 8 examples/torchtitan_job.py --module llama3 --config llama3_8b \\
        --hf_assets_path ./assets/hf/Llama-3.1-8B --checkpoint.enable

torchtitan makes the model, its values, the optimizer, the schedule, the batches, the log and the
profile. What is in its place: ``parallelize_fn`` leaves the model as it is, the whole step is one
compiled function, and checkpoints are zerofx's, from which any number of ranks resumes.
ZEROFX_STAGE, ZEROFX_OFFLOAD and the like say how it is sharded.

Rows that hold several documents attend across them, since flex_attention is not fused in a
compiled step: attention here is torch's own, and causal.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper
from torchtitan.config import ConfigManager
from torchtitan.distributed.utils import dist_max, dist_sum, dist_sum_tensor
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.tools.logging import init_logger, logger
from torchtitan.trainer import Trainer

import zerofx

STAGE = 3

FAMILIES = ("llama3", "qwen3")

CHECKPOINT_OPTIONS = (
    "initial_load_path",
    "initial_load_in_hf",
    "last_save_in_hf",
    "load_step",
    "exclude_from_loading",
    "enable_first_step_checkpoint",
    "create_seed_checkpoint",
    "load_only",
)


def training_step(model, loss_of, optimizer, batches, num_tokens, max_norm, ranks, bf16):
    """Return this rank's part of the loss and the norm of the gradients.

    ``batches`` are pairs of ids and labels, i64[rows, length]; ``num_tokens`` counts the labels of
    all ranks.  torchtitan adds the ranks' gradients up, and zerofx takes their mean.
    """
    total = 0.0
    for ids, positions, labels in batches:
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=bf16):
            loss = loss_of(model(ids, positions=positions), labels) / num_tokens
        (loss * ranks).backward()
        total = total + loss.detach()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return total, norm


class ZeroTrainer(Trainer):
    """torchtitan's trainer, with a step that zerofx shards.

    Raises: ValueError for what zerofx does not do beside torchtitan's trainer.
    """

    def __init__(self, config: Trainer.Config):
        refuse_what_is_left_out(config)
        spec = config.model_spec
        assert spec is not None
        for layer in spec.model.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
        config.model_spec = dataclasses.replace(spec, parallelize_fn=lambda model, **_: model)
        if isinstance(config.loss, ChunkedLossWrapper.Config):
            config.loss = config.loss.loss_fn  # ZEROFX_CHUNK_LOSS computes it in parts
        config.training.disable_cuda_graphs = True
        keeps, config.checkpoint.enable = config.checkpoint.enable, False
        super().__init__(config)
        (self.optimizer,) = self.optimizers
        folder = Path(config.dump_folder, config.checkpoint.folder)
        self.checkpointer = Checkpoints(self, folder, keeps)
        self.run = torch.compile(training_step, backend="zero", options={"stage": STAGE})

    def train_step(self, data_iterator) -> None:
        rates = self.lr_schedulers.get_metrics()
        batches, mine = [], torch.tensor(0)
        for _ in range(self.gradient_accumulation_steps):
            values, labels = next(data_iterator)
            mine += (labels != IGNORE_INDEX).sum()
            self.ntokens_seen += labels.numel()
            given = (values["input"], values.get("positions"), labels)
            batches.append([None if one is None else one.to(self.device) for one in given])
        mine = mine.to(self.device)
        mesh = self.parallel_dims.get_mesh("batch") if self.parallel_dims.dp_enabled else None
        num_tokens = mine if mesh is None else dist_sum_tensor(mine, mesh)
        training = self.config.training
        loss, norm = self.run(
            self.model_parts[0],
            self.loss_fn.fn,
            self.optimizer,
            batches,
            num_tokens,
            training.max_norm,
            1 if mesh is None else mesh.size(),
            training.mixed_precision_param == "bfloat16",
        )
        self.lr_schedulers.step()
        if not self.metrics_processor.should_log(self.step):
            return
        own = loss * num_tokens / mine
        seen = torch.tensor(self.ntokens_seen, device=self.device)
        means = (loss.item(), own.item(), seen.item())
        if mesh is not None:
            means = (dist_sum(loss, mesh), dist_max(own, mesh), dist_sum(seen, mesh))
        mean, largest, seen = means
        if not math.isfinite(mean):
            raise RuntimeError(f"the loss of step {self.step} is {mean}")
        extra = {"n_tokens_seen": seen, **rates}
        self.metrics_processor.log(self.step, mean, largest, norm.item(), extra_metrics=extra)


def refuse_what_is_left_out(config: Trainer.Config) -> None:
    """Refuse what torchtitan's trainer does elsewhere, and would be lost here in silence."""
    spec, parallelism, checkpoint = config.model_spec, config.parallelism, config.checkpoint
    assert spec is not None
    layers = spec.model.layers
    if spec.name not in FAMILIES or any(getattr(one, "moe", None) is not None for one in layers):
        raise ValueError(
            f"the model is {spec.name} {spec.flavor}, and this script is for dense ones of "
            f"{', '.join(FAMILIES)}: others have attention and updates of their own, which it "
            "would leave out."
        )
    for name in ("tensor", "pipeline", "context", "expert"):
        if (degree := getattr(parallelism, f"{name}_parallel_degree")) > 1:
            raise ValueError(
                f"{name}_parallel_degree is {degree}, and this script shards over data-parallel "
                "ranks alone. Leave it at 1."
            )
    if config.validator.enable:
        raise ValueError(
            "torchtitan's validator calls the model outside of the step. Validate in a function "
            'of your own that torch.compile(..., backend="zero") is given, or set '
            "--validator.no-enable"
        )
    usual = type(checkpoint)()
    for name in CHECKPOINT_OPTIONS:
        if getattr(checkpoint, name) != getattr(usual, name):
            raise ValueError(
                f"checkpoint.{name} is {getattr(checkpoint, name)!r}, which zerofx's checkpoints "
                "do not have: they go on from the last one that they have written. Leave it out, "
                "and load other weights into the model with zerofx.load or zerofx.load_safetensors."
            )
    if config.compile.enable and "model" in config.compile.components:
        raise ValueError("the whole step is compiled already: leave out --compile.enable")
    if config.activation_checkpoint is not None:
        logger.info(
            "Activation checkpointing is left out: ZEROFX_MEMORY_BUDGET=BYTES recomputes what "
            "does not fit."
        )


class Checkpoints:
    """Saves and resumes for torchtitan's trainer, with zerofx's checkpoints."""

    def __init__(self, trainer: ZeroTrainer, folder: Path, is_on: bool):
        self.trainer, self.folder, self.is_on = trainer, folder, is_on

    def load(self, step: int = -1) -> bool:
        """Resume from the last checkpoint, on any number of ranks."""
        trainer = self.trainer
        if not self.is_on:
            return False
        found = zerofx.resume(self.folder, trainer.model_parts[0], trainer.optimizer)
        if found:
            trainer.load_state_dict(found["trainer"])
            trainer.lr_schedulers.load_state_dict(found["schedule"])
            if (batches := found.get(self._batches)) is None:
                logger.warning("This rank's batches begin anew: other ranks saved the checkpoint.")
            else:
                trainer.dataloader.load_state_dict(batches)
        return bool(found)

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        trainer, given = self.trainer, self.trainer.config.checkpoint
        if not self.is_on or not (last_step or curr_step % given.interval == 0):
            return False
        extra: dict[str, Any] = {
            "trainer": trainer.state_dict(),
            "schedule": trainer.lr_schedulers.state_dict(),
            self._batches: trainer.dataloader.state_dict(),
        }
        keep = given.keep_latest_k or None
        model, optimizer = trainer.model_parts[0], trainer.optimizer
        path = self.folder / f"step-{curr_step}"
        zerofx.save(path, model, optimizer, extra, keep=keep, asynchronous=not last_step)
        return True

    @property
    def _batches(self) -> str:
        return f"batches of rank {dist.get_rank()} of {dist.get_world_size()}"

    def maybe_wait_for_staging(self) -> None:
        """zerofx's saves wait by themselves."""

    def close(self) -> None:
        """So they do at the end."""


def main() -> int:
    init_logger()
    trainer = ZeroTrainer(ConfigManager().parse_args())
    try:
        trainer.train()
    finally:
        trainer.close()
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
