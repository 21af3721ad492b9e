"""Host memory for values that do not stay on the device, and an account of it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zerofx.errors import StepError
from zerofx.runtime.memory.flat import ordinary_tensors, without_base
from zerofx.runtime.memory.pages import aligned_empty


class HostMemory:
    """Memory that belongs to the host and not to a device, on a machine without one too.

    There, what torch's CPU allocator gives stands for the device: none of this comes from it.
    ``nbytes`` is what is alive now, ``peak_nbytes`` the most there has been, ``num_allocations``
    how often memory has been taken.
    """

    def __init__(self) -> None:
        self.nbytes = self.peak_nbytes = self.num_allocations = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # by address
        self._read: dict[int, Any] = {}  # by address: when the last copy of it has been made

    def available_bytes(self) -> int | None:
        """Return the bytes that the machine could still give; None if it does not say."""
        try:
            with open("/proc/meminfo", encoding="ascii") as file:
                lines = dict(line.split(":", 1) for line in file)
            return int(lines["MemAvailable"].split()[0]) * 1024
        except (OSError, KeyError, ValueError):
            pass
        try:
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, OSError, ValueError):
            return None

    def check_room(self, needed: dict[str, int]) -> None:
        """Refuse what there is no room for.  ``needed`` is in bytes, by what it is for.

        Raises: StepError with the numbers.
        """
        total, available = sum(needed.values()), self.available_bytes()
        if available is None or total <= available:
            return
        parts = ", ".join(f"{nbytes} of {what}" for what, nbytes in needed.items())
        raise StepError(
            f"the option offload needs {total} bytes of host memory on this rank ({parts}), and "
            f"{available} are available. Free some, train on more ranks so that each keeps a "
            "smaller shard, set moment_dtype, give a smaller batch, or leave offload out."
        )

    def empty(self, numel: int, dtype: torch.dtype, pinned: bool = False) -> Tensor:
        """An uninitialised flat tensor; ``pinned`` for copies that a GPU makes by itself."""
        nbytes = max(numel * dtype.itemsize, 1)
        with ordinary_tensors():
            memory = aligned_empty(nbytes, pinned=pinned)
            self._count(memory, nbytes)
            return without_base(memory[: numel * dtype.itemsize].view(dtype))

    def _count(self, memory: Tensor, nbytes: int) -> None:
        storage = memory.untyped_storage()
        address = storage.data_ptr()

        def gone(reference: Any) -> None:
            if self._storages.get(address) is reference:
                del self._storages[address]
            self.nbytes -= nbytes

        self._storages[address] = weakref.ref(storage, gone)
        self.nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
        self.num_allocations += 1

    @property
    def is_empty(self) -> bool:
        return not self._storages

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in memory that was taken here."""
        return tensor.untyped_storage().data_ptr() in self._storages

    def is_read_until(self, event: Any, tensor: Tensor) -> None:
        """Note that a GPU copies a tensor that lies here, until this event."""
        self._read[tensor.untyped_storage().data_ptr()] = event

    def settle(self, tensor: Tensor) -> None:
        """Return once nothing copies a tensor that lies here: it may be written to."""
        event = self._read.pop(tensor.untyped_storage().data_ptr(), None)
        if event is not None:
            event.synchronize()

    def take_in_shards(self, shards: Sequence[Tensor], pinned: bool) -> list[Tensor]:
        """Copies of flat tensors here, one behind the other.  Of one dtype."""
        lengths = [shard.numel() for shard in shards]
        flat = self.empty(sum(lengths), shards[0].dtype, pinned)
        with ordinary_tensors():
            for part, shard in zip(flat.split(lengths), shards, strict=True):
                part.copy_(shard)
        return list(flat.split(lengths))

    def take_in(self, states: Sequence[dict[str, Any]]) -> None:
        """Move what parameters' states hold per element here, where it is not here already.

        ``states`` are of parameters whose shards lie one behind the other: so do their states,
        name by name.
        """
        for name in dict.fromkeys(name for state in states for name in state):
            values = {
                index: state[name]
                for index, state in enumerate(states)
                if isinstance(state.get(name), Tensor)
            }
            if all(value.dim() == 0 or self.holds(value) for value in values.values()):
                for index, value in values.items():
                    if value.device.type != "cpu":
                        states[index][name] = value.cpu()
                continue
            for dtype in dict.fromkeys(value.dtype for value in values.values()):
                alike = {i: v for i, v in values.items() if v.dtype is dtype and v.dim()}
                flat = [value.detach().reshape(-1) for value in alike.values()]
                parts = self.take_in_shards(flat, pinned=False)
                with ordinary_tensors():
                    for (index, value), part in zip(alike.items(), parts, strict=True):
                        states[index][name] = without_base(part.view(value.shape))

    def give_back(self, states: Sequence[dict[str, Any]], device: torch.device) -> None:
        """Move what is here to a device again."""
        for state in states:
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim() and self.holds(value):
                    with ordinary_tensors():
                        state[name] = value.detach().to(device, copy=True)
