"""``ZeroStrategy`` for Lightning's Fabric: the loop is yours, and its step is compiled.

fabric = Fabric(strategy=ZeroStrategy(), devices=2)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import MixedPrecision, Precision
from lightning.fabric.strategies import DDPStrategy
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

import zerofx
from zerofx.integrations.checkpoints import (
    TOKEN,
    each_with_optimizers,
    folder_of,
    save_beside,
    shards_in,
)
from zerofx.integrations.default_dtype import DTYPES, DefaultDtype
from zerofx.integrations.models import check_library, plain

REST = "lightning.pt"
"""The file in a checkpoint that has all but models and optimizers."""

_MODELS = "zerofx_models"
"""The entry of that file that names the models, in the order of their folders."""


check_library("lightning", ">=2.6,<3", DDPStrategy, "setup_module", "clip_gradients_norm")


class ZeroStrategy(DDPStrategy):
    """Fabric through ``backend="zero"``: what is done with a batch is a function of yours::

        model, optimizer = fabric.setup(model, optimizer)

        @torch.compile(backend="zero", options={"stage": 3})
        def step(x, y):
            loss = cross_entropy(model(x), y)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss

    Norms that are not finite are no error in it: ``clip_gradients`` returns the norm.
    ``fabric.save`` writes a folder, in which each rank writes its shards.
    """

    def __init__(self, **named: Any) -> None:
        super().__init__(**named)
        self._backward_sync_control = None  # gradients of several calls are reduced in the last

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Prepare a model, which stays what it is: no DDP is around it.

        Raises: ValueError for a precision that scales losses.
        """
        precision = self.precision
        if isinstance(precision, MixedPrecision):
            if precision.scaler is not None:
                raise ValueError(
                    f"ZeroStrategy cannot train with precision={precision.precision!r}: bf16-mixed "
                    "needs no scaling of the loss."
                )
            self.precision = _Mixed("bf16-mixed", precision.device)
        elif dtype := DTYPES.get(precision.precision):
            precision.forward_context = partial(DefaultDtype, dtype)  # type: ignore[method-assign]
        return plain(module)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        return clip_grad_norm_(self.precision.main_params(optimizer), max_norm, norm_type)

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Mapping[str, Callable] | None = None,
    ) -> None:
        """Write a folder: of models and optimizers each rank its shards.  Collective.

        Raises: ValueError for a ``filter`` of a model or optimizer.
        """
        models, optimizers, rest = _sorted(state)
        if not models:
            super().save_checkpoint(path, state, storage_options, dict(filter or {}))
            return
        if (filter or {}).keys() - rest.keys():
            raise ValueError(
                "ZeroStrategy saves models and optimizers as they are: leave the filter out, or "
                "freeze what is not to be saved."
            )
        save, folder = super().save_checkpoint, Path(path)
        saved = save_beside(folder, list(models.values()), optimizers)
        named = {**rest, _MODELS: list(models), TOKEN: saved.token}
        saved.ranks.together(
            lambda: save(folder / REST, named, storage_options, dict(filter or {}))
        )
        saved.replace_old()

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read what any number of ranks has saved, each model by its name.  Collective.

        Raises: KeyError for a model that the checkpoint does not have, with ``strict``;
            ValueError without a state.
        """
        folder = Path(path)
        if not (folder / REST).exists():
            return super().load_checkpoint(path, state, strict, weights_only)
        given = {"model": state} if isinstance(state, nn.Module) else dict(state or {})
        models, optimizers, rest = _sorted(given)
        left = super().load_checkpoint(folder / REST, rest, strict, weights_only)
        if state is None and left.get(_MODELS):
            raise ValueError(
                f"The checkpoint {folder} has models {left[_MODELS]}, in shards that are read into "
                "models: give them by these names, fabric.load(path, {name: model, ...})."
            )
        # Older checkpoints have no names: models are in the order in which they were saved.
        saved, token = left.pop(_MODELS, list(models)), left.pop(TOKEN, None)
        if isinstance(state, nn.Module) and len(saved) == 1:
            models = {saved[0]: state}
        if strict and (missing := [name for name in models if name not in saved]):
            raise KeyError(
                f"The checkpoint {folder} has no model {missing[0]!r}, but {saved}: give the model "
                "by one of these names, or load with strict=False to leave it out."
            )
        found = each_with_optimizers(folder, list(models.values()), optimizers)
        for name, (_, model, own) in zip(models, found, strict=True):
            if name in saved:
                shards = shards_in(folder_of(folder, saved.index(name)), token, model)
                zerofx.load(shards, model, own, strict=strict)
        if isinstance(state, dict):
            state.update(rest)
        return left


class _Mixed(MixedPrecision):
    """Mixed precision in bfloat16, of which Fabric does not check how backward is called."""

    backward = Precision.backward


def _sorted(
    state: Mapping[str, Any],
) -> tuple[dict[str, nn.Module], list[Optimizer], dict[str, Any]]:
    """Return the models by their names, the optimizers, and all else."""
    models = {name: one for name, one in state.items() if isinstance(one, nn.Module)}
    optimizers = [one for one in state.values() if isinstance(one, Optimizer)]
    kinds = (nn.Module, Optimizer)
    return models, optimizers, {n: one for n, one in state.items() if not isinstance(one, kinds)}
