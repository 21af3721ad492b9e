"""``ZeroTrainer``: the Trainer of transformers, whose updates are whole compiled steps.

from zerofx.integrations.transformers import ZeroTrainer as Trainer
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from transformers import Seq2SeqTrainer, Trainer, TrainingArguments
from transformers.trainer import SCHEDULER_NAME

import zerofx
from zerofx.integrations.models import (
    check_library,
    export_into,
    is_peft,
    is_saved_in,
    load_from,
    meet,
    plain,
    save_into,
    trained_values,
)

check_library(
    "transformers",
    ">=5,<6",
    Trainer,
    *("create_accelerator_and_postprocess", "_prepare_for_training", "_init_training_state"),
    *("set_initial_training_values", "_clip_grad_norm", "_get_grad_norm", "_load_best_model"),
    *("_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler", "_load_from_checkpoint"),
)


class ZeroTrainer(Trainer):
    """``transformers.Trainer`` through ``backend="zero"``.

    It takes ``zero``, a dict of options of the backend, beside what Trainer takes;
    ``ZEROFX_<NAME>`` in the environment wins.  ``loss`` is "global" by default, so that the update
    is that of one process with all ranks' batches.  In front of another class made of Trainer it
    turns that into one that trains so: ``class Mine(ZeroTrainer, RewardTrainer)``.

    Forward, backward, clipping and the update are one compiled function, called once for each
    micro-batch.  What Trainer does after it, ``optimizer.step()`` among that, finds it done: when
    ``on_pre_optimizer_step`` is called, parameters have been updated and gradients are gone.

    Raises: ValueError, when it is made, for arguments that do not go together with it.
    """

    args: TrainingArguments

    def __init__(
        self, model: Any = None, *others: Any, zero: dict[str, Any] | None = None, **named: Any
    ) -> None:
        self._zero = dict(zero or {})
        self._update: Callable | None = None
        self._forward: Callable | None = None
        self._norm: torch.Tensor | None = None
        self._is_whole = True  # what the model's parameters are between calls
        super().__init__(plain(model), *others, **named)
        if is_peft(self.model) and self.args.load_best_model_at_end and self.args.save_only_model:
            raise ValueError(
                "ZeroTrainer loads the best adapters from a whole checkpoint: leave "
                "save_only_model out, or load_best_model_at_end."
            )

    def create_accelerator_and_postprocess(self) -> None:
        self.args = _checked(copy.copy(self.args))
        super().create_accelerator_and_postprocess()
        # The model stays as it is: no DDP around it, and no forward of Accelerate's.
        self.accelerator.prepare_model = lambda model, **_: model
        self.accelerator.prepare_optimizer = lambda optimizer, **_: _Updated(optimizer)

    def _prepare_for_training(self, *arguments: Any) -> tuple[nn.Module, Any]:
        self._update = None
        return super()._prepare_for_training(*arguments)

    # The step

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        model.train()
        inputs = dict(self._prepare_inputs(inputs))
        parts = self.current_gradient_accumulation_steps
        if self._is_scaled(num_items_in_batch):
            parts = 1
        if self._update is None:
            # Of the means of several calls nobody knows beforehand what they are divided by.
            is_counted = num_items_in_batch is not None or parts == 1
            options = {"loss": "global" if is_counted else "rank", **self._zero}
            self._update = torch.compile(self._step, backend="zero", options=options)
        is_last = self.accelerator.sync_gradients
        loss, norm, seen = self._update(inputs, num_items_in_batch, parts, is_last)
        self._is_whole = False
        if is_last:
            self._norm = norm
        self.measure(inputs, seen)
        return loss.detach()

    def _step(
        self, inputs: dict[str, Any], count: Any, parts: int, is_last: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
        """Compute a micro-batch's gradients, and update with those of all where it is the last."""
        if count is not None:
            count = zerofx.local_count(count)
        with self._autocast():
            loss, seen = self.loss_and_seen(inputs, count)
        loss = loss / parts
        loss.backward()
        if not is_last:
            return loss, None, seen
        optimizer = self.optimizer.optimizer
        norm = clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        return loss, norm, seen

    def loss_and_seen(self, inputs: dict[str, Any], count: Any) -> tuple[torch.Tensor, Any]:
        """Compute a batch's loss, and what ``measure`` is given of it: part of what is compiled."""
        return self.compute_loss(self.model, inputs, num_items_in_batch=count), None

    def measure(self, inputs: dict[str, Any], seen: Any) -> None:
        """Do what the compiled step cannot: read numbers, and log them."""

    def _is_scaled(self, num_items_in_batch: Any) -> bool:
        """Return whether losses of micro-batches are parts of one already, and no means."""
        if getattr(self, "loss_is_scaled_for_ga", None) is not None:
            return self.loss_is_scaled_for_ga
        is_counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        return is_counted or self.compute_loss_func is not None

    def _autocast(self) -> AbstractContextManager:
        if self.args.bf16:
            return torch.autocast(self.args.device.type, torch.bfloat16)
        return nullcontext()

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor | None:
        return self._norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> torch.Tensor | None:
        return self._norm

    # Evaluation

    def evaluation_loop(self, *arguments: Any, **named: Any) -> Any:
        """Evaluate on shards; or on the whole model, where it generates."""
        if not getattr(self.args, "predict_with_generate", False) or self._is_whole:
            return super().evaluation_loop(*arguments, **named)
        with zerofx.full_params(self.model):
            self._is_whole = True
            try:
                return super().evaluation_loop(*arguments, **named)
            finally:
                self._is_whole = False

    def prediction_step(self, model: nn.Module, *arguments: Any, **named: Any) -> Any:
        if self._is_whole:
            with self._autocast():
                return super().prediction_step(model, *arguments, **named)
        if self._forward is None:
            options = {**self._zero, "loss": "rank"}
            self._forward = torch.compile(self._evaluate_batch, backend="zero", options=options)
        return super().prediction_step(self._forward, *arguments, **named)

    @torch.no_grad()
    def _evaluate_batch(self, **inputs: Any) -> Any:
        with self._autocast():
            return self.model(**inputs)

    # Checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write what ``from_pretrained`` reads.  Collective; no rank has the model whole.

        Of a model of peft the adapters are written, whole.
        """
        folder = Path(output_dir or self.args.output_dir)
        has_adapters = is_peft(self.model)
        state = trained_values(self.model) if has_adapters else {}
        if self.args.should_save:
            super()._save(str(folder), state_dict=state)
        if not has_adapters:
            export_into(folder, self.model, self.args.should_save)
        meet()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_into(Path(output_dir), self.model, [self.optimizer.optimizer])
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not is_saved_in(resume_from_checkpoint):  # it is Trainer's own
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if not is_saved_in(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        load_from(Path(checkpoint), self.model, [self.optimizer.optimizer])
        scheduler = self.lr_scheduler
        scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))
        if scheduler.last_epoch != self.state.global_step and isinstance(scheduler, LambdaLR):
            scheduler.last_epoch = self.state.global_step - 1
            scheduler.step()

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint)
        if is_saved_in(best):
            load_from(best, self.model)
        else:
            zerofx.load_safetensors(best, self.model)

    def set_initial_training_values(self, *arguments: Any) -> tuple:
        values = super().set_initial_training_values(*arguments)
        self._steps_in_epoch = values[5]
        return values

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        """Go on in the data where as many samples have been seen, whatever the ranks were."""
        begin = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        if resume_from_checkpoint is None or not self.state.epoch:
            return begin
        epoch, share = divmod(self.state.epoch, 1)
        micro_batches = self.args.gradient_accumulation_steps
        steps = round(share * self._steps_in_epoch) // micro_batches
        if self.args.max_steps <= 0:  # it ends with an epoch, whose steps are others now
            self.state.global_step = int(epoch) * num_update_steps_per_epoch + steps
        return int(epoch), 0 if self.args.ignore_data_skip else steps * micro_batches


class ZeroSeq2SeqTrainer(ZeroTrainer, Seq2SeqTrainer):
    """``transformers.Seq2SeqTrainer`` through ``backend="zero"``: see ``ZeroTrainer``.

    Where it generates, to evaluate, every rank has the model whole meanwhile.
    """


class _Updated(AcceleratedOptimizer):
    """An optimizer, to those who call its ``step`` after the compiled step has done so."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, device_placement=False)

    def step(self, closure: Any = None) -> None:
        pass

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        pass


def _checked(args: Any) -> Any:
    """Return the arguments, without what is done otherwise here.  Raises: ValueError."""
    optimizer = str(getattr(args.optim, "value", args.optim))
    has_own_way = any(word in optimizer for word in ("lomo", "layerwise", "bnb", "8bit"))
    compiles = args.torch_compile and args.torch_compile_backend != "zero"
    for name, is_asked, reason in (
        ("fp16", args.fp16, "bf16=True needs no scaling of the loss"),
        ("fsdp", args.fsdp, "zero={'stage': 3} shards as it does"),
        ("deepspeed", args.deepspeed, "zero={'stage': 3} shards as it does"),
        ("auto_find_batch_size", args.auto_find_batch_size, "other ranks would wait for one's"),
        ("parallelism_config", args.parallelism_config, "all ranks share the batches"),
        ("optim", has_own_way, f"{optimizer} updates while backward runs, or through pointers"),
        ("torch_compile", compiles, "the whole step is compiled already"),
        ("n_gpu > 1", args.n_gpu > 1, "each device needs a process: start it with torchrun"),
    ):
        if is_asked:
            raise ValueError(f"ZeroTrainer cannot train with `{name}`: {reason}. Leave it out.")
    args.torch_compile, args.torch_compile_backend = False, None
    args.average_tokens_across_devices = False  # the compiler counts them, over all ranks
    return args
