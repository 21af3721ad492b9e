"""The parts of ``ZeroTrainer`` that need no trainer: what it refuses, and stand-ins it hands on."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer

import zerofx
from zerofx.integrations.models import is_peft


class Updated(AcceleratedOptimizer):
    """An optimizer, to those who call its ``step`` after the compiled step has done so.

    Raises: ValueError for an optimizer that has parameters of its own for evaluation; StepError, by
    ``step``, where no compiled step has updated, by ``check_again`` where one has already.
    """

    has_updated = False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if callable(getattr(optimizer, "eval", None)):
            raise ValueError(f"ZeroTrainer cannot train with {type(optimizer).__name__}: {_MOVES}.")
        super().__init__(optimizer, device_placement=False)

    def step(self, closure: Any = None) -> None:
        if not self.has_updated:
            raise zerofx.StepError(
                "The optimizer's step was called, and no compiled step has updated: a training_step"
                " of your own, in front of ZeroTrainer's, has to call super().training_step(...). "
                "Compute your loss in compute_loss or loss_and_seen."
            )
        self.has_updated = False

    def check_again(self) -> None:
        if self.has_updated:
            raise zerofx.StepError(
                "training_step was called again for a batch with which its first call has updated: "
                "call it once, and add up your losses in compute_loss or loss_and_seen."
            )

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        pass


class OnShards:
    """A model, to those who call it or read of it while it is in shards: calls run compiled."""

    def __init__(self, model: nn.Module, forward: Callable) -> None:
        self._model, self._forward = model, forward

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._forward(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The model's, for ``isinstance``: a loss may depend on the kind of model."""
        return type(self._model)


_MOVES = (
    "train() and eval() move whole parameters, which ranks have in shards; take an "
    "optimizer without a schedule of its own"
)
_CASTS = "behind a training it casts whole parameters, which ranks have in shards"
_UPDATES_ITSELF = ("lomo", "layerwise")
_OF_BITSANDBYTES = ("bnb", "8bit", "paged", "lion", "ademamix")


def checked(args: Any) -> Any:
    """Return the arguments, without what is done otherwise here.  Raises: ValueError."""
    optimizer = str(getattr(args.optim, "value", args.optim))
    has_own_way = any(word in optimizer for word in (*_UPDATES_ITSELF, *_OF_BITSANDBYTES))
    saves_at_once = getattr(args, "enable_jit_checkpoint", False)
    compiles = args.torch_compile and args.torch_compile_backend != "zero"
    for name, is_asked, reason in (
        ("fp16", args.fp16, "bf16=True needs no scaling of the loss"),
        ("fsdp", args.fsdp, "zero={'stage': 3} shards as it does"),
        ("deepspeed", args.deepspeed, "zero={'stage': 3} shards as it does"),
        ("auto_find_batch_size", args.auto_find_batch_size, "other ranks would wait for one's"),
        ("enable_jit_checkpoint", saves_at_once, "an update is saved before it is counted"),
        ("fp16_full_eval", args.fp16_full_eval, _CASTS),
        ("bf16_full_eval", args.bf16_full_eval, _CASTS),
        ("parallelism_config", args.parallelism_config, "all ranks share the batches"),
        ("optim", has_own_way, f"{optimizer} updates while backward runs, or through pointers"),
        ("optim", "schedule_free" in optimizer, f"of {optimizer}, {_MOVES}"),
        ("torch_compile", compiles, "the whole step is compiled already"),
        ("n_gpu > 1", args.n_gpu > 1, "each device needs a process: start it with torchrun"),
    ):
        if is_asked:
            raise ValueError(f"ZeroTrainer cannot train with `{name}`: {reason}. Leave it out.")
    args.torch_compile, args.torch_compile_backend = False, None
    if not hasattr(args, "zero_averages"):  # or they are another trainer's, and have been changed
        args.zero_averages = args.average_tokens_across_devices
    args.average_tokens_across_devices = False  # the compiler counts them, over all ranks
    return args


@contextmanager
def averaging_as_asked(args: Any) -> Iterator[None]:
    """Have Trainer count an evaluation's tokens over all ranks, if the user's arguments do so."""
    args.average_tokens_across_devices = args.zero_averages
    try:
        yield
    finally:
        args.average_tokens_across_devices = False


def leave_unwrapped(accelerator: Any) -> None:
    """Have no DDP around a model; with bf16 its forward, and no more, is under autocast."""
    prepare = functools.partial(accelerator.prepare_model, device_placement=False)
    accelerator.prepare_model = lambda model, **_: prepare(model, evaluation_mode=True)
    accelerator.prepare_optimizer = lambda optimizer, **_: (
        optimizer if isinstance(optimizer, Updated) else Updated(optimizer)
    )


def are_parts(trainer: Any, num_items_in_batch: Any) -> bool:
    """Return whether losses of micro-batches are parts of one already, and no means."""
    if getattr(trainer, "loss_is_scaled_for_ga", None) is not None:
        return trainer.loss_is_scaled_for_ga
    is_counted = trainer.model_accepts_loss_kwargs and num_items_in_batch is not None
    return is_counted or trainer.compute_loss_func is not None


@contextmanager
def explained(are_parts: bool) -> Iterator[None]:
    """Say how to go on where loss=global refuses a loss that was to be a part of a mean."""
    try:
        yield
    except zerofx.StepError as error:
        if are_parts and "loss=global" in str(error):
            error.add_note(
                "Trainer takes this loss for one that is divided by num_items_in_batch. If it is a "
                "mean of each batch, set loss_is_scaled_for_ga = False in your trainer's class, or "
                "accepts_loss_kwargs = False in your model's."
            )
        raise


def has_loss_of(trainer: Any, ours: Any) -> bool:
    """Return whether a trainer's loss is that which its model returns."""
    kind = type(trainer)
    own = (
        kind.compute_loss is not Trainer.compute_loss
        or kind.loss_and_seen is not ours.loss_and_seen
    )
    return not own and trainer.label_smoother is None and trainer.compute_loss_func is None


def divides_by_items(model: Any) -> bool:
    """Return whether a model of transformers divides its loss by ``num_items_in_batch``.

    Trainer believes so of all that take keywords.  Those that do hand them on, with the labels; of
    the losses of a sequence's class some divide, and regression does not.
    """
    model = model.get_base_model() if is_peft(model) else model
    kind = type(model)
    if not kind.__module__.startswith("transformers.") or hasattr(model, "accepts_loss_kwargs"):
        return True
    if kind.__name__.endswith("ForSequenceClassification"):
        return False
    source = textwrap.dedent(inspect.getsource(kind.forward))
    calls = [call for call in ast.walk(ast.parse(source)) if isinstance(call, ast.Call)]
    handing_on = [call for call in calls if any(word.arg is None for word in call.keywords)]
    said = [ast.unparse(call) for call in handing_on]
    return "num_items_in_batch" in source or any(
        "labels" in call or "super()" in call for call in said
    )


def at_same_share(
    state: Any, args: Any, batches_in_epoch: int, updates_in_epoch: int
) -> tuple[int, int]:
    """Return the epochs and, of the next, the batches that as many samples are now.

    Raises: ValueError where the best checkpoint would be lost.
    """
    epoch, share = divmod(state.epoch, 1)
    micro_batches = args.gradient_accumulation_steps
    updates = round(share * batches_in_epoch) // micro_batches
    if args.max_steps <= 0:  # it ends with an epoch, whose updates are others now
        _renumber(state, int(epoch) * updates_in_epoch + updates, args)
    return int(epoch), 0 if args.ignore_data_skip else updates * micro_batches


def _renumber(state: Any, step: int, args: Any) -> None:
    """Go on with another number of updates.  Raises: ValueError where the best would be lost."""
    if step < state.global_step:
        best = Path(state.best_model_checkpoint or "")
        number = best.name.removeprefix("checkpoint-")
        in_the_way = best.parent.resolve() == Path(args.output_dir).resolve()
        if in_the_way and number.isdecimal() and int(number) > step:
            raise ValueError(
                f"{best} is the best so far, and this training, of more samples an update, goes "
                f"on from update {step}: it would save its own {best.name} in its place. Give "
                "another output_dir, and the path of the checkpoint to resume from."
            )
        state.best_global_step = None  # a folder of that number is another one from now on
    state.global_step = step


def go_to(step: int, scheduler: Any) -> None:
    """Have a schedule that was loaded at another step, where updates have been renumbered."""
    if isinstance(scheduler, LambdaLR) and scheduler.last_epoch not in (0, step):
        scheduler.last_epoch = step - 1
        scheduler.step()


_NEVER_CALLED = (
    "_clip_grad_norm",
    "compute_loss_context_manager",
    "autocast_smart_context_manager",
)
_NOT_CALLED_BEHIND = (
    *("training_step", "_get_grad_norm", "save_model", "_save_optimizer_and_scheduler"),
    *("_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_best_model"),
)


def check_class(kind: type, ours: type) -> None:
    """Check that what a trainer's class overrides is called.

    Raises: ValueError for what a class overrides of that which ``ours`` does in its own way.
    """
    order = kind.__mro__[: kind.__mro__.index(Trainer)]
    known = {ours, *(one for each in order for one in vars(each).get("replaces", ()))}
    for place, other in enumerate(order):
        is_behind = place > order.index(ours)
        names = (*_NEVER_CALLED, *(_NOT_CALLED_BEHIND if is_behind else ()))
        lost = [name for name in names if name in vars(other)]
        if lost and other not in known:
            raise ValueError(
                f"{kind.__name__} cannot train with {other.__name__}.{lost[0]}: the compiled step "
                "of ZeroTrainer does that, and never calls it. Move what it adds into compute_loss "
                "or loss_and_seen; if it adds nothing that you need, say so in your class: "
                f"replaces = ({other.__name__},)."
            )


def check_adapters(model: Any, args: Any) -> None:
    """Check that a model's adapters can be saved, and loaded as the arguments ask.

    Raises: ValueError for those that transformers has added, and for the best without a checkpoint.
    """
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(
            "ZeroTrainer saves adapters of peft's own models, and model.add_adapter has added some "
            "to another: give peft.get_peft_model(model, config) instead."
        )
    if is_peft(model) and args.load_best_model_at_end and args.save_only_model:
        raise ValueError(
            "ZeroTrainer loads the best adapters from a whole checkpoint: leave "
            "save_only_model out, or load_best_model_at_end."
        )
