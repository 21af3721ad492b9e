"""Takes a model as a library gives it, and saves it without any rank having it whole."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

import zerofx

CHECKPOINT = "zero"
"""The folder in a checkpoint of another library's that has what the ranks have written."""


def check_library(package: str, versions: str, kind: type, *names: str) -> None:
    """Check that a class of a library has what is replaced of it, or called.

    Raises: ImportError with the versions that have.
    """
    missing = [name for name in names if not hasattr(kind, name)]
    if missing:
        raise ImportError(
            f"{package} {metadata.version(package)} has no {kind.__name__}.{missing[0]}, which "
            f"zerofx needs: pip install '{package}{versions}'"
        )


def plain(model: Any) -> Any:
    """Return a model without DDP.  Raises: ValueError for one that is sharded already."""
    if isinstance(model, (DistributedDataParallel, DataParallel)):
        return plain(model.module)
    parts = list(model.modules()) if isinstance(model, nn.Module) else []
    for kind in {kind for part in parts for kind in type(part).__mro__}:
        if kind.__module__.startswith(("torch.distributed.fsdp", "deepspeed")):
            raise ValueError(
                f"The model is wrapped in {kind.__name__} already, and zerofx shards it itself: "
                "give the plain one."
            )
    for part in parts:
        if hasattr(part, "support_avx512bf16_for_cpu"):  # of bitsandbytes: other weights than in
            part.support_avx512bf16_for_cpu = False  # training, in a form that is not sharded
    return model


def save_into(folder: Path, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Write each rank's shards, over what has been saved there before.  Collective.

    Of a model of peft's the adapters alone.
    """
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    path, fresh = folder / CHECKPOINT, folder / f"{CHECKPOINT}.next"
    if is_first:
        folder.mkdir(exist_ok=True)
        shutil.rmtree(fresh, ignore_errors=True)
    meet()
    zerofx.save(fresh, model, optimizers, trainable_only=is_peft(model)).wait()
    if is_first:
        shutil.rmtree(path, ignore_errors=True)
        os.replace(fresh, path)
    meet()


def each_with_optimizers(
    folder: Path, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
) -> list[tuple[Path, nn.Module, list[Optimizer]]]:
    """Return the folder of each model, and the optimizers of its parameters.

    Raises: ValueError for an optimizer of none of them.
    """
    found = []
    for number, model in enumerate(models):
        ours = {id(parameter) for parameter in model.parameters()}
        own = [
            optimizer
            for optimizer in optimizers
            if any(id(p) in ours for group in optimizer.param_groups for p in group["params"])
        ]
        found.append((folder_of(folder, number), model, own))
    known = [id(optimizer) for _, _, own in found for optimizer in own]
    for optimizer in optimizers:
        if id(optimizer) not in known:
            raise ValueError(
                f"{type(optimizer).__name__} has parameters of no model that was given: give the "
                "model too, so that the optimizer's states can be saved and loaded."
            )
    return found


def folder_of(folder: Path, number: int) -> Path:
    """Return the folder that a model of a checkpoint is in."""
    return folder / f"model_{number}" if number else folder


def load_from(
    folder: Path, model: nn.Module, optimizers: Sequence[Optimizer] = (), strict: bool = True
) -> None:
    """Read what any number of ranks has saved.  Collective."""
    path = folder / CHECKPOINT
    if not path.exists():  # killed before it had its name
        path = folder / f"{CHECKPOINT}.next"
    zerofx.load(path, model, optimizers, strict=strict)


def is_saved_in(folder: str | os.PathLike[str]) -> bool:
    """Return whether ranks have saved in a folder."""
    return any((Path(folder) / f"{CHECKPOINT}{end}").exists() for end in ("", ".next"))


def export_into(folder: Path, model: nn.Module, is_first: bool) -> None:
    """Write a model as safetensors into a folder that may be there.  Collective.

    What it has of others is replaced.  ``is_first`` says which rank moves the files, one of those
    that share a disk.
    """
    weights = folder / "weights"
    if is_first:  # what a training that was killed has left
        shutil.rmtree(weights, ignore_errors=True)
    meet()
    zerofx.export_safetensors(weights, model)
    if is_first:
        for old in folder.glob("*.safetensors*"):
            old.unlink()
        for new in weights.glob("*.safetensors*"):
            os.replace(new, folder / new.name)
        shutil.rmtree(weights)
    meet()


def whole_values(model: nn.Module, is_first: bool) -> dict[str, torch.Tensor]:
    """Return all values of a model, in host memory, where ``is_first``; else none.  Collective."""
    with zerofx.full_params(model):
        if not is_first:
            return {}
        return {name: value.to("cpu", copy=True) for name, value in model.state_dict().items()}


def trained_values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters that are trained, by name, whole, in host memory.  Collective."""
    found = {}
    for place, module in model.named_modules():
        own = [name for name, p in module.named_parameters(recurse=False) if p.requires_grad]
        if own:
            with zerofx.full_params(module):
                for name in own:
                    value = getattr(module, name).detach()
                    found[f"{place}.{name}".lstrip(".")] = value.to("cpu", copy=True)
    return found


def meet() -> None:
    """Wait for all ranks."""
    if dist.is_initialized():
        dist.barrier()


def is_peft(model: object) -> bool:
    """Return whether a model is one of peft's, of which the adapters are saved."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def whole_in_peft(model: nn.Module) -> list[nn.Module]:
    """Return the modules that peft trains and saves whole, whose ``state_dict`` it calls."""
    kind = sys.modules["peft"].utils.ModulesToSaveWrapper
    return [module for module in model.modules() if isinstance(module, kind)]
