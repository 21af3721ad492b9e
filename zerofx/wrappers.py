"""Optimizers and models that another library has wrapped.

A step is traced through a wrapper's own ``step`` and ``zero_grad``, which do what they say: one
that updates at every second call does so.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from zerofx import compat
from zerofx.errors import StepError

logger = logging.getLogger("zerofx")

_UNWRAPPED: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""Modules around others of which it has been said that they are left out."""


def is_wrapper(optimizer: object) -> bool:
    """Return whether an optimizer has no parameter groups but those of another, which it wraps."""
    return isinstance(optimizer, torch.optim.Optimizer) and "param_groups" not in vars(optimizer)


def unwrapped(optimizer: Any) -> Any:
    """The optimizer that a wrapper shares its states and groups with; others as they are.

    Raises: TypeError if a wrapper does not say which that is.
    """
    while is_wrapper(optimizer):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer) or any(
            getattr(inner, name, None) is not getattr(optimizer, name, None)
            for name in ("param_groups", "state")
        ):
            raise TypeError(
                f"{type(optimizer).__name__} wraps an optimizer in a way that zerofx does not "
                "know: it has no attribute `optimizer` with the same states and parameter groups. "
                "Give the optimizer that it wraps."
            )
        optimizer = inner
    return optimizer


class WrappersMet:
    """The optimizers of which a step has its own methods, and not an update: wrappers, mostly.

    It is called with each of these, and with each module that the step calls and the names of what
    that is given; it returns the module that is called instead.
    Raises: StepError for those that cannot be traced.
    """

    def __init__(self) -> None:
        self._found: dict[str, None] = {}

    def __call__(self, value: Any, names: Iterable[str] = ()) -> Any:
        if isinstance(value, torch.nn.Module):
            _prepare_recording(value, names)
            return self._without_averaging(value)
        name = type(value).__name__
        is_one = is_wrapper(value)
        self._found[f"{name} {'wraps an optimizer' if is_one else 'has methods of its own'}"] = None
        if is_one and "step" in vars(value):
            value._opt_called = True  # as the scheduler's function around its step would
        if is_one and vars(value).get("scaler") is not None:
            raise StepError(
                f"{name} wraps an optimizer and a GradScaler, and learns from the optimizer's "
                "step() whether that was skipped, which a compiled step does not call. Train in "
                "bfloat16, which needs no scaler; or give the step the optimizer itself, which "
                f"{name} has as `optimizer`, and a torch.amp.GradScaler."
            )

    @staticmethod
    def _without_averaging(module: torch.nn.Module) -> torch.nn.Module:
        """Return what DistributedDataParallel wraps: the compiled step averages its gradients."""
        _refuse_sharded(module)
        _refuse_synchronised(module)
        if not isinstance(module, DistributedDataParallel):
            return module
        if module not in _UNWRAPPED:
            _UNWRAPPED.add(module)
            logger.info(
                "the step calls %s through the DistributedDataParallel around it, which is left "
                "out: the compiled step averages gradients. Its buffers for them stay allocated; "
                "without it there are none.",
                type(module.module).__name__,
            )
        return module.module

    def words(self) -> str:
        """Return advice, if wrappers may be the reason why a step cannot be traced; else ""."""
        return "".join(
            f" {found}: its step() and zero_grad() are traced, as parts of the step. If that is "
            "what fails, give the step an optimizer without them (a wrapper has it as "
            "`optimizer`), and do outside of the step what else they do."
            for found in self._found
        )


def _refuse_synchronised(module: torch.nn.Module) -> None:
    """Refuse a batch norm that talks to other ranks while it trains."""
    is_one = isinstance(module, torch.nn.SyncBatchNorm) and module.training
    if is_one and dist.is_initialized() and dist.get_world_size(module.process_group) > 1:
        raise StepError(
            "SyncBatchNorm talks to the other ranks itself, as a compiled step cannot. Leave "
            "convert_sync_batchnorm out and give the option batch_norm=global, with which every "
            "batch norm has the statistics of all ranks' batches."
        )


def _prepare_recording(module: torch.nn.Module, names: Iterable[str]) -> None:
    """Have a model of transformers record what is asked of it (``output_attentions``).

    It adds hooks for that when it is first asked, under a lock, which cannot be traced.
    """
    recording = sys.modules.get("transformers.utils.output_capturing")
    config = getattr(module, "config", None)
    if recording is None or config is None:
        return
    kinds = getattr(recording, "_CAN_RECORD_REGISTRY", {}).get(module) or ()
    asked = {f"output_{kind}" for kind in kinds}
    if not asked.isdisjoint(names) or any(getattr(config, name, False) for name in asked):
        recording.maybe_install_capturing_hooks(module)


def _refuse_sharded(module: torch.nn.Module) -> None:
    for kind in type(module).__mro__:
        if kind.__module__.startswith("torch.distributed.fsdp"):
            raise StepError(
                f"the step calls a model that is wrapped in {kind.__name__}, which communicates "
                "between ranks by itself. A compiled step averages gradients and shards what its "
                "stage says: build the model without it."
            )


def refuse_for_scaler(optimizer: Any) -> None:
    """Raise StepError, past Dynamo, for a wrapper that a GradScaler is given."""
    if is_wrapper(optimizer):
        name = type(optimizer).__name__
        raise compat.dynamo.pass_through_dynamo(
            StepError(
                f"a GradScaler is given {name}, which wraps an optimizer: it would call the "
                "wrapper's step() if gradients are finite, which is known when the compiled step "
                f"runs. Give it the optimizer itself, which {name} has as `optimizer`."
            )
        )
