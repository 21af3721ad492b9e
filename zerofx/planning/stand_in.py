"""A device that this machine lacks, as a script sees it that is being planned for one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from zerofx import compat
from zerofx.devices import Device


def here(value: Any) -> Any:
    """Return the CPU for a device that is none, and anything else as it is."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return "cpu"
    return value


_DEVICE_AT = {"to": 1, "_parse_to": 0, "device": 0}
"""The position of the device among the arguments of functions that are given one there."""


def arguments_here(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return a call's arguments with the CPU in the place of each device, or of its number."""
    positional = list(map(here, args))
    named = {name: here(value) for name, value in kwargs.items()}
    at = _DEVICE_AT.get(func if isinstance(func, str) else getattr(func, "__name__", ""))
    if at is not None and at < len(args) and type(args[at]) is int:
        positional[at] = "cpu"
    if type(named.get("device")) is int:
        named["device"] = "cpu"
    return tuple(positional), named


class OnCpu(TorchFunctionMode):
    """While it is active, what a script makes on its accelerator or moves there is on the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args, kwargs = arguments_here(func, args, kwargs or {})
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*args, **kwargs)


@contextlib.contextmanager
def standing_in(device: Device) -> Iterator[None]:
    """Capture calls for a device, on the CPU: autocast and scalers for it are the CPU's then."""
    if device.kind == "cpu":
        yield
        return
    autocast, scaler = torch.autocast, torch.amp.GradScaler
    with (
        compat.other_device.tracing_on_cpu(arguments_here),
        mock.patch.object(autocast, "__init__", _autocast(autocast.__init__)),
        mock.patch.object(scaler, "__init__", _scaler(scaler.__init__)),
        mock.patch.object(torch.Tensor, "pin_memory", lambda tensor, *_: tensor),
    ):
        yield


@contextlib.contextmanager
def answering_for(device: Device, count: int) -> Iterator[None]:
    """Have torch answer a script as on a machine with so many devices, which compute on the CPU.

    For a CPU it says that there is no accelerator.
    """
    count = 0 if device.kind == "cpu" else count
    with compat.other_device.answering(_answers(device, count)), OnCpu():
        yield


def _answers(device: Device, count: int) -> dict[Any, dict[str, Callable]]:
    """Return what functions of torch say in place of their own answers, by module."""
    properties = SimpleNamespace(
        name=device.title,
        major=device.capability[0],
        minor=device.capability[1],
        total_memory=device.memory_bytes,
        multi_processor_count=device.num_units,
    )

    def always(value: Any) -> Callable[..., Any]:
        return lambda *_args, **_kwargs: value  # one each: Dynamo tells functions apart

    memory, current = device.memory_bytes, torch.device("cuda", 0) if count else None
    of_both: dict[str, Any] = {
        "is_available": bool(count),
        "device_count": count,
        "synchronize": None,
        "empty_cache": None,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
        "memory_stats": {},
        "reset_peak_memory_stats": None,
    }
    of_accelerator = {
        "current_device_index": 0,
        "set_device_index": None,
        "current_accelerator": current,
    }
    of_cuda = {
        "is_initialized": True,
        "init": None,
        "set_device": None,
        "current_device": 0,
        "manual_seed": None,
        "manual_seed_all": None,
        "ipc_collect": None,
        "get_device_name": device.title,
        "get_device_capability": device.capability,
        "get_device_properties": properties,
        "is_bf16_supported": True,
        "mem_get_info": (memory, memory),
    }
    answers = {torch.cuda: {**of_both, **(of_cuda if count else {})}}
    answers[torch.accelerator] = {**of_both, **of_accelerator}
    return {
        module: {name: always(value) for name, value in of.items()}
        for module, of in answers.items()
    }


def _autocast(init: Callable) -> Callable:
    """Return ``autocast.__init__`` that takes the accelerator's dtype, and works on the CPU."""

    @functools.wraps(init)
    def __init__(self, device_type, dtype=None, *args, **kwargs):
        if device_type == "cuda" and dtype is None:
            dtype = torch.get_autocast_dtype("cuda")
        init(self, here(device_type), dtype, *args, **kwargs)

    return __init__


def _scaler(init: Callable) -> Callable:
    @functools.wraps(init)
    def __init__(self, device="cuda", *args, **kwargs):
        init(self, here(device), *args, **kwargs)

    return __init__
