"""The device that computes, where it is no CPU: whatever torch knows as this machine's accelerator.

Streams, events and generators are asked of the device's own module, which has the names of
``torch.cuda`` for every kind: ``"cuda"`` is written only where CUDA is meant.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from zerofx.errors import StepError


def is_accelerator(device: torch.device) -> bool:
    """Return whether kernels on this device run in streams, beside the host."""
    return device.type not in ("cpu", "meta")


def module_of(device: torch.device) -> Any:
    """Return ``torch.cuda``, or what this torch has in its place; RuntimeError if nothing."""
    return torch.get_device_module(device)


def check_copies_beside(device: torch.device) -> None:
    """Refuse a device that has no streams to copy on while it computes.  Raises: StepError."""
    lacks = [name for name in _FOR_COPIES if not hasattr(module_of(device), name)]
    if lacks:
        raise StepError(
            f"torch {torch.__version__} has no torch.{device.type}.{lacks[0]}, with which zerofx "
            "copies beside what a device computes. There, leave out offload, and save without "
            "asynchronous=True."
        )


_FOR_COPIES = ("Stream", "Event", "current_stream", "stream")


def current(device: torch.device) -> AbstractContextManager:
    """Return a context in which a device is the current one of its kind; a CPU always is."""
    return module_of(device).device(device) if is_accelerator(device) else nullcontext()


def current_as_here() -> Callable[[], None]:
    """Return a function that gives another thread the device that is current in this one.

    To a new thread the first device is.
    """
    if kind() is None:
        return lambda: None
    return partial(torch.accelerator.set_device_index, torch.accelerator.current_device_index())


def kind() -> str | None:
    """Return the type of this machine's accelerator, such as ``"cuda"``; None if it has none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def free_bytes(device: torch.device) -> int:
    """Return what this process may take of an accelerator: what it has, and what is free."""
    module = module_of(device)
    free, _ = module.mem_get_info(device)
    return int(free + module.memory_reserved(device))
