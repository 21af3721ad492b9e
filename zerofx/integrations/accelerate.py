"""``ZeroAccelerator``: the Accelerator of accelerate, whose updates are whole compiled steps.

from zerofx.integrations.accelerate import ZeroAccelerator as Accelerator
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, DistributedType
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.nn.utils import clip_grad_norm_

import zerofx
from zerofx.integrations.checkpoints import (
    Saved,
    each_with_optimizers,
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
    whole_values,
)
from zerofx.options import resolve

Step = TypeVar("Step", bound=Callable[..., Any])


check_library(
    "accelerate",
    ">=1.12,<2",
    Accelerator,
    *("prepare_model", "register_load_state_pre_hook", "register_save_state_pre_hook"),
)


class ZeroAccelerator(Accelerator):
    """``accelerate.Accelerator`` through ``backend="zero"``.

    It takes ``zero``, a dict of options of the backend, beside what Accelerator takes.  What the
    training loop does with a batch becomes a function, and ``compile`` its decorator::

        @accelerator.compile
        def step(batch):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for batch in loader:
            with accelerator.accumulate(model):
                loss = step(batch)
                scheduler.step()

    Losses are means over ranks, as DDP has them; ``zero={"loss": "global"}`` makes them one over
    all batches.

    Raises: ValueError, when it is made, for arguments that do not go together with it; StepError,
    by ``backward`` outside of a compiled step.
    """

    _models: list[nn.Module]
    _optimizers: list[AcceleratedOptimizer]

    def __init__(self, *arguments: Any, zero: dict[str, Any] | None = None, **named: Any) -> None:
        self._zero = dict(zero or {})
        self._is_last = True
        super().__init__(*arguments, **named)
        _check(self)

    # The step

    def compile(self, step: Step) -> Step:
        """Compile what is done with a batch: forward, backward, clipping and the update.

        Also of use for a function under ``torch.no_grad()``, which evaluates.

        Raises: ValueError for micro-batches of which ranks have unequally many.
        """
        parts = self.gradient_accumulation_steps
        if parts > 1 and self.num_processes > 1 and resolve(self._zero).uneven:
            raise ValueError(
                "ZeroAccelerator cannot train with `uneven` and "
                f"gradient_accumulation_steps={parts}: Accelerate updates where a rank's own "
                "batches end, and the others would still be adding up. Leave `uneven` out, and let "
                "ranks have equally many batches (even_batches=True, the default); or loop over "
                "the micro-batches inside of the step."
            )
        compiled = torch.compile(step, backend="zero", options=self._zero)

        @functools.wraps(compiled)  # with its marks, by which zerofx.no_data knows a step
        def call(*arguments: Any, **named: Any) -> Any:
            self._is_last = self.gradient_state.sync_gradients
            return compiled(*arguments, **named)

        return call  # type: ignore[return-value]

    def accumulate(self, *models: nn.Module) -> AbstractContextManager:
        """As Accelerator has it, around the call of a compiled step."""
        if torch.compiler.is_compiling():
            raise zerofx.StepError(
                "accelerator.accumulate() counts micro-batches, which a compiled step cannot: put "
                "it around the call, with accelerator.accumulate(model): step(batch)"
            )
        return super().accumulate(*models)

    @property
    def sync_gradients(self) -> bool:
        """Tell whether the micro-batch is the last one of an update."""
        return (
            self._is_last if torch.compiler.is_compiling() else self.gradient_state.sync_gradients
        )

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.gradient_state.sync_gradients = value

    def backward(self, loss: torch.Tensor, **named: Any) -> None:
        if not torch.compiler.is_compiling():
            raise zerofx.StepError(
                "ZeroAccelerator.backward() belongs into a function that accelerator.compile "
                "decorates, together with the forward pass in front of it and the update behind it."
            )
        (loss / self.gradient_accumulation_steps).backward(**named)

    def join_uneven_inputs(
        self, joinables: Any, even_batches: bool | None = None
    ) -> AbstractContextManager:
        """Join nothing, in one process.  Raises: StepError in several."""
        if self.num_processes > 1:
            raise zerofx.StepError(
                "accelerator.join_uneven_inputs joins what DDP sends, and no DDP is here: leave it "
                "out, and ranks have equally many batches; or, with even_batches=False, give "
                "zero={'uneven': 1}, and behind the loop: while zerofx.no_data(step): pass"
            )
        return super().join_uneven_inputs(joinables, even_batches)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        return clip_grad_norm_(parameters, max_norm, norm_type)

    # What is prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare a model, which stays what it is: no DDP is around it."""
        return super().prepare_model(plain(model), device_placement, evaluation_mode=True)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> torch.optim.Optimizer:
        if isinstance(optimizer, _Optimizer):
            return optimizer
        prepared = _Optimizer(optimizer, self)
        self._optimizers.append(prepared)
        return prepared

    # Checkpoints

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return all values of a model on the main process, and nothing on others.  Collective.

        Of a model of peft's those that are saved, on all processes: ``save_pretrained`` reads them.
        """
        if is_peft(model):
            return peft_values(model, meet(model))
        return whole_values(model)

    def save_model(self, model: nn.Module, save_directory: Any, *others: Any, **named: Any) -> None:
        """Write a model as safetensors.  Collective; no rank has the model whole."""
        export_into(Path(save_directory), model)

    def save_state(self, output_dir: Any = None, *others: Any, **named: Any) -> Any:
        """Save as Accelerator does; of models and optimizers each rank its shards.  Collective."""
        save, found = super().save_state, list[Saved]()
        with self._without_shards() as (models, optimizers):

            def save_shards(_: list, weights: list, folder: Any) -> None:
                found.append(save_beside(Path(folder), models, optimizers))
                found[0].begin_rest(Path(folder))

            hook = self.register_save_state_pre_hook(save_shards)
            self._save_model_state_pre_hook.move_to_end(hook.id, last=False)
            try:
                where = meet(nn.ModuleList(models), optimizers).together(
                    lambda: save(output_dir, *others, **named)
                )[0]
            finally:
                hook.remove()
        found[0].write_token(Path(where))
        found[0].replace_old()
        return where

    def load_state(self, input_dir: Any = None, *others: Any, **named: Any) -> None:
        """Load what any number of ranks has saved.  Collective.

        Raises: CheckpointError, before anything is loaded, where that was not saved to the end.
        """
        found: list[Any] = []
        with self._without_shards() as prepared:

            def find_shards(_: list, folder: Any) -> None:
                token = token_in(Path(folder))
                for place, model, optimizers in each_with_optimizers(Path(folder), *prepared):
                    found.append((shards_in(place, token, model), model, optimizers))

            hook = self.register_load_state_pre_hook(find_shards)
            try:
                super().load_state(input_dir, *others, **named)
            finally:
                hook.remove()
        # A rank that has not saved finds no count of micro-batches, and would update by itself.
        ranks = meet(nn.ModuleList(prepared[0]), prepared[1])
        self.step = ranks.on_first(lambda: self.step)
        for shards, model, optimizers in found:
            zerofx.load(shards, model, optimizers)

    @contextmanager
    def _without_shards(self) -> Iterator[tuple[list[nn.Module], list[torch.optim.Optimizer]]]:
        """Have Accelerator save and load what else there is."""
        models, optimizers = self._models, self._optimizers
        self._models, self._optimizers = [], []
        try:
            yield models, [optimizer.optimizer for optimizer in optimizers]
        finally:
            self._models, self._optimizers = models, optimizers


class _Optimizer(AcceleratedOptimizer):
    """An optimizer that updates where a micro-batch is the last one of an update."""

    def __init__(self, optimizer: torch.optim.Optimizer, accelerator: ZeroAccelerator) -> None:
        super().__init__(optimizer, device_placement=False)
        self._accelerator = accelerator

    def step(self, closure: Any = None) -> None:
        if self._accelerator.sync_gradients:
            self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        if self._accelerator.sync_gradients:
            self.optimizer.zero_grad(set_to_none is not False)


def _check(accelerator: Accelerator) -> None:
    """Raises: ValueError for what is done otherwise here."""
    state = accelerator.state
    backend = getattr(state.dynamo_plugin.backend, "value", "NO")
    for name, is_asked, reason in (
        ("fp16", state.mixed_precision == "fp16", "bf16 needs no scaling of the loss"),
        ("fp8", state.mixed_precision == "fp8", "no kernel of its products is known to the passes"),
        ("FSDP", state.distributed_type == DistributedType.FSDP, _SHARDS),
        ("DeepSpeed", state.distributed_type == DistributedType.DEEPSPEED, _SHARDS),
        ("Megatron-LM", state.distributed_type == DistributedType.MEGATRON_LM, _SHARDS),
        ("XLA", state.distributed_type == DistributedType.XLA, "it has a compiler of its own"),
        ("parallelism_config", accelerator.parallelism_config, "all ranks share the batches"),
        ("dynamo_backend", backend != "NO", "the whole step is compiled already"),
    ):
        if is_asked:
            raise ValueError(f"ZeroAccelerator cannot train with {name}: {reason}. Leave it out.")


_SHARDS = "zero={'stage': 3} shards as it does"
