"""Write a model as other libraries read it, without any rank having it whole."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import zerofx


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
