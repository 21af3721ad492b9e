"""A simulated accelerator: asynchronous streams, memory of its own, collectives in streams.

``use()`` builds it with a C++ compiler, once for all processes, and makes it this process's
accelerator, as ``"sim"``.  It computes what the CPU computes, with the CPU's kernels; only when is
another question, which ``schedule`` decides:

- ``early``: whatever a stream is given runs at once if what it waits for is done;
- ``late``: nothing runs until the host waits, and then only what that needs;
- ``random``: a seed says how much of which stream runs at every call.

A program is right if it computes the same under all of them.  The host can't touch the memory, and
what is freed holds NaN or -1 until it is written again.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import os
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).parent / "source"
NAME = "sim"


def build() -> Any:
    """Return the extension, compiled if this source has not been.  RuntimeError if it can't be."""
    from torch.utils import cpp_extension

    sources = sorted(SOURCE.iterdir())
    digest = hashlib.sha256(f"{torch.__version__} {torch.__file__}".encode())
    for source in sources:
        digest.update(source.read_bytes())
    root = Path(tempfile.gettempdir(), f"zerofx-simulated-device-{os.getuid()}")
    folder = root / os.environ.get("SIMULATED_DEVICE_BUILD", digest.hexdigest()[:16])
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "one at a time", "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)  # ends with the process, which torch's own lock does not
        (folder / "lock").unlink(missing_ok=True)
        return cpp_extension.load(
            name="simulated_device",
            sources=[str(source) for source in sources if source.suffix == ".cpp"],
            extra_cflags=["-O1", "-std=c++20"],
            build_directory=str(folder),
            verbose="SIMULATED_DEVICE_VERBOSE" in os.environ,
        )


@functools.cache
def use() -> Any:
    """Make it this process's accelerator, and return the extension.  For good: it can't be undone.

    A process that is forked from this one can't use it.
    """
    import torch._meta_registrations  # shapes

    extension = build()
    torch.utils.rename_privateuse1_backend(NAME)
    extension.register_device()
    torch._register_device_module(NAME, _module(extension))
    torch.utils.generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_storage=True
    )
    _register_collectives(extension)
    _register_for_dynamo()
    atexit.register(extension.stop)
    return extension


@contextlib.contextmanager
def schedule(policy: str, seed: int = 0) -> Iterator[None]:
    """Run streams by this policy, behind what has been given to them before."""
    extension = use()
    torch.accelerator.synchronize()
    extension.choose(policy, seed)
    try:
        yield
    finally:
        torch.accelerator.synchronize()
        extension.choose("early", 0)


def _module(extension: Any) -> types.ModuleType:
    """What ``torch.cuda`` is for CUDA, as far as anything here asks for it."""
    module = types.ModuleType(f"torch.{NAME}")

    def index_of(device: Any = None) -> int:
        if isinstance(device, int):
            return device
        device = None if device is None else torch.device(device)
        return (
            extension.current_device() if device is None or device.index is None else device.index
        )

    def generator(device: Any) -> torch.Generator:
        return module.default_generators[index_of(device)]

    class Device:
        def __init__(self, device: Any) -> None:
            self.index = index_of(device)

        def __enter__(self) -> None:
            self.before = extension.current_device()
            extension.set_device(self.index)

        def __exit__(self, *_: object) -> None:
            extension.set_device(self.before)

    class DeviceOf(Device):
        def __init__(self, tensor: torch.Tensor) -> None:
            super().__init__(tensor.device if tensor.device.type == NAME else None)

    @contextlib.contextmanager
    def stream_context(stream: Any) -> Iterator[None]:
        if stream is None:
            yield
            return
        with stream:
            yield

    def manual_seed_all(seed: int) -> None:
        for one in module.default_generators:
            one.manual_seed(seed)

    def in_index(device: Any) -> torch.device:
        return torch.device(NAME, index_of(device))

    names = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "is_bf16_supported": lambda: True,
        "device_count": extension.device_count,
        "current_device": extension.current_device,
        "set_device": lambda device: extension.set_device(index_of(device)),
        "device": Device,
        "device_of": DeviceOf,
        "_exchange_device": lambda index: _exchange(extension, index),
        "_maybe_exchange_device": lambda index: _exchange(extension, index),
        "Stream": lambda device=None, priority=0: torch.Stream(in_index(device)),
        "Event": lambda enable_timing=False, **_: torch.Event(NAME, enable_timing=True),
        "stream": stream_context,
        "current_stream": lambda device=None: torch.accelerator.current_stream(in_index(device)),
        "set_stream": torch.accelerator.set_stream,
        "synchronize": lambda device=None: torch.accelerator.synchronize(in_index(device)),
        "default_generators": tuple(
            map(extension.default_generator, range(extension.device_count()))
        ),
        "manual_seed": lambda seed: generator(None).manual_seed(seed),
        "manual_seed_all": manual_seed_all,
        "seed_all": lambda: manual_seed_all(torch.seed()),
        "initial_seed": lambda: generator(None).initial_seed(),
        "get_rng_state": lambda device=NAME: generator(device).get_state(),
        "set_rng_state": lambda state, device=NAME: generator(device).set_state(state),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "memory_allocated": lambda device=None: extension.allocated_bytes(index_of(device)),
        "max_memory_allocated": lambda device=None: extension.peak_bytes(index_of(device)),
        "reset_peak_memory_stats": lambda device=None: extension.reset_peak(index_of(device)),
        "empty_cache": lambda: None,
    }
    for name, value in names.items():
        setattr(module, name, value)
    sys.modules[module.__name__] = module
    return module


def _exchange(extension: Any, index: int) -> int:
    before = extension.current_device()
    if index >= 0:
        extension.set_device(index)
    return before


def _register_collectives(extension: Any) -> None:
    import torch.distributed as dist

    def group(store: Any, rank: int, size: int, timeout: Any) -> Any:
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("simulated", store), rank, size, timeout)
        return extension.group(gloo, rank, size)

    dist.Backend.register_backend("simulated", group, devices=[NAME])


def _register_for_dynamo() -> None:
    from torch._dynamo import device_interface

    module = getattr(torch, NAME)

    class Interface(device_interface.DeviceInterface):
        device = module.device
        Event = torch.Event
        Stream = torch.Stream

        class Worker:
            set_device = staticmethod(module.set_device)
            current_device = staticmethod(module.current_device)
            get_device_properties = staticmethod(lambda device=None: None)

        current_device = staticmethod(module.current_device)
        set_device = staticmethod(module.set_device)
        device_count = staticmethod(module.device_count)
        is_available = staticmethod(module.is_available)
        stream = staticmethod(module.stream)
        current_stream = staticmethod(module.current_stream)
        set_stream = staticmethod(module.set_stream)
        synchronize = staticmethod(module.synchronize)
        exchange_device = staticmethod(module._exchange_device)
        maybe_exchange_device = staticmethod(module._maybe_exchange_device)
        is_bf16_supported = staticmethod(lambda including_emulation=False: True)
        memory_allocated = staticmethod(module.memory_allocated)
        get_compute_capability = staticmethod(lambda device=None: "simulated")

    device_interface.register_interface_for_device(NAME, Interface)
    for index in range(module.device_count()):
        device_interface.register_interface_for_device(f"{NAME}:{index}", Interface)
