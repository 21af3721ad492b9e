"""``ZeroTrainer``: the Trainer of transformers, whose updates are whole compiled steps.

from zerofx.integrations.transformers import ZeroTrainer as Trainer
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from transformers import Seq2SeqTrainer, Trainer, TrainingArguments
from transformers.trainer import SCHEDULER_NAME
from transformers.trainer_utils import has_length

import zerofx
from zerofx.checkpoint.contents import bound_parameters
from zerofx.integrations.checkpoints import (
    Saved,
    is_saved_in,
    remove_shards,
    save_beside,
    shards_in,
    token_in,
)
from zerofx.integrations.models import (
    check_library,
    export_into,
    is_peft,
    meet,
    peft_values,
    plain,
    read_by_peft,
)
from zerofx.integrations.trainer_parts import (
    OnShards,
    are_parts,
    at_same_share,
    averaging_as_asked,
    check_adapters,
    check_class,
    checked,
    divides_by_items,
    explained,
    go_to,
    has_loss_of,
    leave_unwrapped,
)
from zerofx.runtime.comm.communication import Communicator
from zerofx.runtime.memory.flat import make_equal
from zerofx.runtime.parameters.parameter import State

check_library(
    "transformers",
    ">=5,<6",
    Trainer,
    *("create_accelerator_and_postprocess", "_prepare_for_training", "_init_training_state"),
    *("set_initial_training_values", "_clip_grad_norm", "_get_grad_norm", "_load_best_model"),
    *("_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler", "_load_from_checkpoint"),
    "_save_rng_state",
)


class ZeroTrainer(Trainer):
    """``transformers.Trainer`` through ``backend="zero"``.

    It takes ``zero``, a dict of options of the backend, beside what Trainer takes;
    ``ZEROFX_<NAME>`` in the environment wins.  ``loss`` is "global" by default, so that the update
    is that of one process with all ranks' batches.  In front of another class made of Trainer it
    turns that into one that trains so: ``class Mine(ZeroTrainer, TheirTrainer)``.

    Forward, backward, clipping and the update are one compiled function, called once for each
    micro-batch.  What Trainer does after it, ``optimizer.step()`` among that, finds it done: when
    ``on_pre_optimizer_step`` is called, parameters have been updated and gradients are gone.

    Raises: ValueError, when it is made, for arguments that do not go together with it.
    """

    args: TrainingArguments
    replaces: tuple[type, ...] = ()
    """Classes behind it whose overrides of what it replaces are left out on purpose."""

    def __init__(
        self, model: Any = None, *others: Any, zero: dict[str, Any] | None = None, **named: Any
    ) -> None:
        check_class(type(self), ZeroTrainer)
        self._zero_options = dict(zero or {})
        self._zero_update: Callable | None = None
        self._zero_forward: Callable | None = None
        self._zero_norm: torch.Tensor | None = None
        self._zero_saved: Saved | None = None  # by a checkpoint that is being written
        self._zero_is_resumed = False
        super().__init__(plain(model), *others, **named)
        # What the model's parameters are between calls: another trainer may have it in shards.
        self._zero_is_whole = State.SHARDED not in {b.state for b in bound_parameters(self.model)}
        check_adapters(self.model, self.args)
        if has_loss_of(self, ZeroTrainer) and not divides_by_items(self.model):
            self.model_accepts_loss_kwargs = False

    def create_accelerator_and_postprocess(self) -> None:
        self.args = checked(copy.copy(self.args))
        super().create_accelerator_and_postprocess()
        leave_unwrapped(self.accelerator)

    def _prepare_for_training(self, *arguments: Any) -> tuple[nn.Module, Any]:
        check_adapters(self.model, self.args)
        self._zero_update = None
        prepared = super()._prepare_for_training(*arguments)
        self.optimizer.has_updated = False
        if self.args.eval_on_start and self._zero_is_whole:  # as DDP has done by then
            make_equal((*self.model.parameters(), *self.model.buffers()), Communicator.of(None))
        return prepared

    # The step

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        model.train()
        inputs = dict(self._prepare_inputs(inputs))
        is_last = self.accelerator.sync_gradients
        is_scaled = are_parts(self, num_items_in_batch)
        parts = 1 if is_scaled else self.current_gradient_accumulation_steps
        if is_last:
            self.optimizer.check_again()
        if self._zero_update is None:
            # Of the means of several calls nobody knows beforehand what they are divided by.
            is_counted = is_scaled or self.args.gradient_accumulation_steps == 1
            options = {"loss": "global" if is_counted else "rank", **self._zero_options}
            self._zero_update = torch.compile(self._zero_step, backend="zero", options=options)
        with explained(is_scaled):
            loss, norm, seen = self._zero_update(inputs, num_items_in_batch, parts, is_last)
        self._zero_is_whole = False
        if is_last:
            self._zero_norm, self.optimizer.has_updated = norm, True
        self.measure(inputs, seen)
        return loss.detach()

    def _zero_step(
        self, inputs: dict[str, Any], count: Any, parts: int, is_last: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
        """Compute a micro-batch's gradients, and update with those of all where it is the last."""
        if count is not None:
            count = zerofx.local_count(count)
        loss, seen = self.loss_and_seen(inputs, count)
        loss = loss / parts
        loss.backward()
        if not is_last:
            return loss, None, seen
        optimizer = self.optimizer.optimizer
        most = self.args.max_grad_norm or 0.0
        norm = clip_grad_norm_(self.model.parameters(), most if most > 0 else float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        return loss, norm, seen

    def loss_and_seen(self, inputs: dict[str, Any], count: Any) -> tuple[torch.Tensor, Any]:
        """Compute a batch's loss, and what ``measure`` is given of it: part of what is compiled."""
        return self.compute_loss(self.model, inputs, num_items_in_batch=count), None

    def measure(self, inputs: dict[str, Any], seen: Any) -> None:
        """Do what the compiled step cannot: read numbers, and log them."""

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor | None:
        return self._zero_norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> torch.Tensor | None:
        return self._zero_norm

    # Evaluation

    def evaluation_loop(self, *arguments: Any, **named: Any) -> Any:
        """Evaluate on shards; or on the whole model, where it generates."""
        was_whole = self._zero_is_whole
        is_gathered = getattr(self.args, "predict_with_generate", False) and not was_whole
        with zerofx.full_params(self.model) if is_gathered else nullcontext():
            self._zero_is_whole = was_whole or is_gathered
            try:
                return super().evaluation_loop(*arguments, **named)
            finally:
                self._zero_is_whole, self.model_wrapped = was_whole, self.model

    def prediction_step(self, model: nn.Module, *arguments: Any, **named: Any) -> Any:
        with averaging_as_asked(self.args):
            return super().prediction_step(self._wrap_model(model, False), *arguments, **named)

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        if training or self._zero_is_whole:
            return super()._wrap_model(model, training, dataloader)
        if self._zero_forward is None:
            options = {**self._zero_options, "loss": "rank"}
            self._zero_forward = torch.compile(self._zero_evaluate, backend="zero", options=options)
        return OnShards(self.model, self._zero_forward)

    @torch.no_grad()
    def _zero_evaluate(self, *arguments: Any, **named: Any) -> Any:
        return self.model(*arguments, **named)

    # Checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write what ``from_pretrained`` reads.  Collective; no rank has the model whole.

        Of a model of peft the adapters are written, whole.
        """
        folder = Path(output_dir or self.args.output_dir)
        has_adapters, ranks = is_peft(self.model), meet(self.model)
        if self.args.save_only_model or not _internal_call:
            remove_shards(folder, ranks)  # or they would be loaded, instead of what is written here
        state = peft_values(self.model, ranks) if has_adapters else {}

        def save_on_first() -> None:
            if self.args.should_save:
                self._save(str(folder), state_dict=state)

        with read_by_peft(self.model) if has_adapters else nullcontext():
            ranks.together(save_on_first)
        if not has_adapters:
            export_into(folder, self.model)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        saved = save_beside(Path(output_dir), [self.model], [self.optimizer.optimizer])
        saved.begin_rest(Path(output_dir))
        scheduler, path = self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME
        saved.ranks.on_first(lambda: torch.save(scheduler, path))
        self._zero_saved = saved

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the rest but trainer_state.json, before Trainer removes older checkpoints."""
        save, saved = super()._save_rng_state, self._zero_saved
        if saved is None:
            save(output_dir)
            return
        saved.ranks.together(lambda: save(output_dir))
        saved.write_token(Path(output_dir))
        saved.replace_old()
        self._zero_saved = None

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self._zero_is_resumed = True
        if not is_saved_in(resume_from_checkpoint):  # it is Trainer's own
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if is_saved_in(checkpoint):
            zerofx.load(self._zero_shards_in(checkpoint), self.model, [self.optimizer.optimizer])
            schedule = torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True)
            self.lr_scheduler.load_state_dict(schedule)
        else:
            super()._load_optimizer_and_scheduler(checkpoint)
        go_to(self.state.global_step, self.lr_scheduler)

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint)
        if is_saved_in(best):
            zerofx.load(self._zero_shards_in(best), self.model)
        else:
            zerofx.load_safetensors(best, self.model)

    def _zero_shards_in(self, checkpoint: str | Path) -> Path:
        return shards_in(Path(checkpoint), token_in(Path(checkpoint)), self.model)

    def set_initial_training_values(self, args: TrainingArguments, dataloader: Any) -> tuple:
        values = super().set_initial_training_values(args, dataloader)
        self._zero_steps_in_epoch = values[5] if has_length(dataloader) else None
        is_resumed, self._zero_is_resumed = self._zero_is_resumed, False
        # Epochs that have been seen may be more than all of it would be with this many samples.
        epochs = sys.maxsize if is_resumed and args.max_steps > 0 else values[0]
        return epochs, *values[1:]

    def _init_training_state(
        self, max_steps: int, updates_in_epoch: int, epochs: int, checkpoint: str | None, trial: Any
    ) -> tuple[int, int]:
        """Go on in the data where as many samples have been seen, whatever the ranks were."""
        given = max_steps, updates_in_epoch, epochs, checkpoint, trial
        begin, batches = super()._init_training_state(*given), self._zero_steps_in_epoch
        if checkpoint is None:
            return begin
        if self.state.epoch and batches is not None:
            begin = at_same_share(self.state, self.args, batches, updates_in_epoch)
        has_ended = self.state.global_step >= max_steps
        return (epochs, 0) if has_ended else begin


class ZeroSeq2SeqTrainer(ZeroTrainer, Seq2SeqTrainer):
    """``transformers.Seq2SeqTrainer`` through ``backend="zero"``: see ``ZeroTrainer``.

    Where it generates, to evaluate, every rank has the model whole meanwhile.
    """
