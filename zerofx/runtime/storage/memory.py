"""Memory of a device or of the host as a place of buckets, and an account of the host's."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from zerofx.accelerator import kind
from zerofx.errors import StepError
from zerofx.runtime.memory.flat import ordinary_tensors, without_base
from zerofx.runtime.memory.pages import aligned_empty, prefer_huge_pages
from zerofx.runtime.storage.bucket import Bucket, Location


class Memory(ABC):
    """A place of buckets where values stay between uses, each in the hands of its user."""

    location: Location

    @abstractmethod
    def empty(self, numel: int, dtype: torch.dtype, pinned: bool = False) -> Tensor:
        """An uninitialised flat tensor; ``pinned`` for copies that a GPU makes by itself."""

    @abstractmethod
    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies here."""

    def acquire(self, bucket: Bucket) -> None:
        """Move what lies elsewhere here: tensors of one name and dtype side by side."""
        with ordinary_tensors():
            bucket.prepare()
            for part in bucket.parts_elsewhere(self):
                memory = self.empty(part.numel, part.dtype, bucket.is_pinned)
                bucket.arrive(part.views(memory))

    def release(self, bucket: Bucket, *, dirty: bool, void: bool) -> None:
        """Move what the use has made here."""
        self.acquire(bucket)


class DeviceMemory(Memory):
    """Memory of a device.  On a machine without one, what is not the ``host``'s."""

    location = Location.DEVICE

    def __init__(self, device: torch.device, host: HostMemory) -> None:
        self.device, self.host = device, host

    def empty(self, numel: int, dtype: torch.dtype, pinned: bool = False) -> Tensor:
        memory = torch.empty(numel, dtype=dtype, device=self.device)
        prefer_huge_pages(memory)
        return memory

    def holds(self, tensor: Tensor) -> bool:
        return tensor.device == self.device and not self.host.holds(tensor)


class HostMemory(Memory):
    """Memory that belongs to the host and not to a device, on a machine without one too.

    There, what torch's CPU allocator gives stands for the device: none of this comes from it.
    ``nbytes`` is what is alive now, ``peak_nbytes`` the most there has been, ``num_allocations``
    how often memory has been taken.
    """

    location = Location.HOST

    def __init__(self) -> None:
        self.peak_nbytes = self.num_allocations = 0
        self._storages = WeakIdKeyDictionary()  # and their bytes
        # By address and stream: when the last copy there has been made.
        self._copied: dict[int, dict[Any, Any]] = {}

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
        nbytes = max(numel * dtype.itemsize, 1)
        with ordinary_tensors():
            is_pinned = pinned and kind() == "cuda"
            memory = aligned_empty(nbytes, pinned=is_pinned, before_free=self._settle)
            self._storages[memory.untyped_storage()] = nbytes
            self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
            self.num_allocations += 1
            return without_base(memory[: numel * dtype.itemsize].view(dtype))

    @property
    def nbytes(self) -> int:
        return sum(self._storages.data.values())  # in one go: other threads take memory too

    @property
    def is_empty(self) -> bool:
        return not len(self._storages)

    def holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage() in self._storages

    def is_copied_until(self, event: Any, tensor: Tensor, stream: Any) -> None:
        """Note that this stream copies to or from a tensor that lies here, until this event."""
        self._copied.setdefault(tensor.untyped_storage().data_ptr(), {})[stream] = event

    def copied(self, tensor: Tensor) -> Collection[Any]:
        """Return those events, for a stream to wait for: they are forgotten here."""
        return self._copied.pop(tensor.untyped_storage().data_ptr(), {}).values()

    def settle(self, tensor: Tensor) -> None:
        """Return once nothing copies a tensor that lies here: it may be written to."""
        self._settle(tensor.untyped_storage().data_ptr())

    def _settle(self, address: int) -> None:
        for event in self._copied.pop(address, {}).values():
            event.synchronize()
