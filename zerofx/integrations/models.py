"""Takes a model as a library gives it, and saves it without any rank having it whole."""

from __future__ import annotations

import copy
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

import zerofx
from zerofx.checkpoint import barrier
from zerofx.checkpoint.barrier import Ranks


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


_OWN_NAMES = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors|model\.safetensors\.index\.json")
"""Files that an export writes, and removes where an earlier one has left them."""

_UNFINISHED = re.compile(r"weights\.[0-9a-f]{16}")
"""Folders that exports write to, with a token in their names."""


def export_into(folder: Path, model: nn.Module) -> None:
    """Write a model as safetensors into a folder that may be there.  Collective.

    Files of an earlier export are replaced; what else is in the folder stays.
    """
    ranks = meet(model)

    def begin() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if _UNFINISHED.fullmatch(path.name):  # what a training that was killed has left
                shutil.rmtree(path, ignore_errors=True)
        return secrets.token_hex(8)

    weights = folder / f"weights.{ranks.on_first(begin)}"

    def replace() -> None:
        new = {path.name for path in weights.iterdir() if _OWN_NAMES.fullmatch(path.name)}
        for name in new:
            os.replace(weights / name, folder / name)
        for old in folder.iterdir():
            if _OWN_NAMES.fullmatch(old.name) and old.name not in new:
                old.unlink()
        shutil.rmtree(weights, ignore_errors=True)

    zerofx.export_safetensors(weights, model)
    ranks.on_first(replace)


def whole_values(model: nn.Module) -> dict[str, Any]:
    """Return all values of a model, in host memory, on rank 0; else none.  Collective."""
    ranks = meet(model)
    found: dict[str, Any] = {}

    def copy_all() -> None:
        for name, value in model.state_dict().items():
            is_tensor = isinstance(value, torch.Tensor)
            found[name] = value.to("cpu", copy=True) if is_tensor else copy.deepcopy(value)

    with zerofx.full_params(model):
        ranks.on_first(copy_all)
    return found


def meet(model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> Ranks:
    """Wait for all ranks and return them: what fails on one fails on all."""
    return barrier.meet(model, optimizers, None, "a checkpoint")


def is_peft(model: object) -> bool:
    """Return whether a model is one of peft's, of which the adapters are saved."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


@contextmanager
def read_by_peft(model: Any) -> Iterator[None]:
    """Have whole what peft reads of its model to save it: prompts, and ``modules_to_save``."""
    kind = sys.modules["peft"].utils.ModulesToSaveWrapper
    modules = [module for module in model.modules() if isinstance(module, kind)]
    if any(config.is_prompt_learning for config in model.peft_config.values()):
        modules.append(model.prompt_encoder)
    with ExitStack() as whole:
        for module in modules:
            whole.enter_context(zerofx.full_params(module))
        yield


def names_in_peft(model: Any, ranks: Ranks) -> list[str]:
    """Return the names of the parameters that are trained, or that peft saves.  Collective.

    Of frozen ones it saves those of other adapters, and embeddings that have been resized.
    """
    choose = sys.modules["peft"].get_peft_model_state_dict

    def ask() -> list[str]:
        found = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        values = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
        state = {name: torch.empty(value.shape, device="meta") for name, value in values}
        for adapter, config in model.peft_config.items():
            if not config.is_prompt_learning:
                chosen = {id(value) for value in choose(model, state, adapter).values()}
                found.update(name for name, value in state.items() if id(value) in chosen)
        return sorted(found)

    with read_by_peft(model):
        return ranks.on_first(ask)


def peft_values(model: nn.Module, ranks: Ranks) -> dict[str, torch.Tensor]:
    """Return what peft saves of a model by name, whole, and all buffers.  Collective."""
    names, found = set(names_in_peft(model, ranks)), dict(model.named_buffers())
    for place, module in model.named_modules():
        own = {f"{place}.{name}".lstrip("."): name for name in module._parameters}
        if not names.isdisjoint(own):
            with zerofx.full_params(module):
                for full_name in names & own.keys():
                    value = getattr(module, own[full_name]).detach()
                    found[full_name] = value.to("cpu", copy=True)
    return found
