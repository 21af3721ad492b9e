"""Refuses for ``ZeroStrategy`` what would train otherwise, or have ranks wait for each other."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.plugins import TorchSyncBatchNorm

from zerofx.checkpoint.contents import bound_parameters

_HOOKS = (
    *("on_before_zero_grad", "on_before_backward"),
    *("on_after_backward", "on_before_optimizer_step"),
)
_METHODS = ("backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping")
_OF_DDP = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")


_NO_DDP = (
    "the compiled step sends gradients, and no DDP does; leave it out, "
    "zero={'reduce_wire': 'bfloat16'} sends fewer bits"
)


def check(trainer: Any, module: pl.LightningModule) -> None:
    """Raises: ValueError for what is done otherwise here."""

    def overridden(one: Any, base: type, names: tuple[str, ...]) -> str:
        methods = [(name, getattr(getattr(one, name), "__func__", None)) for name in names]
        found = [name for name, method in methods if method is not getattr(base, name)]
        return ", ".join(f"{type(one).__name__}.{name}" for name in found)

    inside = "gradients are nowhere but inside of the compiled step"
    own = overridden(module, pl.LightningModule, (*_HOOKS, *_METHODS))
    callbacks = [overridden(one, pl.Callback, _HOOKS) for one in trainer.callbacks]
    kinds = (pl.callbacks.StochasticWeightAveraging, pl.callbacks.WeightAveraging)
    averages = [type(one).__name__ for one in trainer.callbacks if isinstance(one, kinds)]
    precision = trainer.precision_plugin.precision
    sync = trainer.strategy._layer_sync
    hooks = {name: getattr(trainer.strategy, f"_{name}") for name in _OF_DDP}
    for name, is_asked, reason in (
        (
            "automatic_optimization=False",
            not module.automatic_optimization,
            'compile your step yourself, with torch.compile(step, backend="zero")',
        ),
        (own, own, inside),
        *((names, names, inside) for names in callbacks),
        *((name, given is not None, _NO_DDP) for name, given in hooks.items()),
        (
            ", ".join(averages),
            averages,
            "it averages whole parameters, and ranks have them in shards",
        ),
        (
            type(sync).__name__,
            sync is not None and not isinstance(sync, TorchSyncBatchNorm),
            'sync_batchnorm=True or zero={"batch_norm": "global"} have statistics of all ranks',
        ),
        (
            f"precision={precision!r}",
            precision not in ("32-true", "bf16-mixed", "bf16-true", "64-true"),
            "bf16-mixed needs no scaling of the loss",
        ),
    ):
        if is_asked:
            raise ValueError(f"ZeroStrategy cannot train with {name}: {reason}.")


def check_batches(
    module: pl.LightningModule, numbers: list[int | float], zero: dict[str, Any]
) -> None:
    """Check that all ranks have as many batches, where they need each other in each.  Collective.

    Raises: ValueError where they do not: one would wait for the others.
    """
    is_gathered = any(bound.stage == 3 for bound in bound_parameters(module))
    if not is_gathered and zero.get("batch_norm") != "rank0":
        return
    found: list[Any] = [numbers]
    if dist.is_initialized():
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, numbers)
    if any(other != numbers for other in found):
        raise ValueError(
            f"ZeroStrategy cannot predict with as many batches as ranks have here, {found}: those "
            "with more would wait for the others. Give the DataLoader a sampler of yours, "
            "DistributedSampler(data, shuffle=False), which repeats samples until all have as many."
        )
