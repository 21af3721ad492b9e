"""The speed of ranks and of their link: the numbers that plans are made with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

LARGEST_BUCKET_BYTES = 64 * 2**20
"""Two gathered buckets of this size are a small part of any memory that trains such layers."""

SMALLEST_BUCKET_BYTES = 2**20

LATENCY_SHARE = 0.1
"""The share of a bucket's transfer that may be latency."""

NEEDED = ("latency_s", "bytes_per_s")


@dataclass(frozen=True)
class Hardware:
    """Figures of a group's slowest rank and link.

    ``latency_s`` is what a collective takes that carries nothing, ``bytes_per_s`` what each rank
    sends in a second; ``overlaps`` says whether that goes on while the rank computes: reads of a
    neighbour's memory happen where the program waits for them.  ``copy_bytes_per_s`` is what goes
    between device and host in one direction, ``host_bytes_per_s`` what the host's memory carries,
    ``file_bytes_per_s`` what a rank's files do: nobody measures these three, they are of PCIe 4, of
    a few memory channels and of one NVMe disk.  ``flops_per_s`` is that of matrices,
    ``float32_flops_per_s`` of those in float32, if they are slower than others.  Units: seconds,
    bytes, floating point operations.
    """

    latency_s: float
    bytes_per_s: float
    overlaps: bool = True
    flops_per_s: float = 1e14
    memory_bytes_per_s: float = 1e12
    copy_bytes_per_s: float = 2.5e10
    host_bytes_per_s: float = 5e10
    file_bytes_per_s: float = 3e9
    source: str = "given"
    float32_flops_per_s: float | None = None

    def flops_per_s_in(self, dtype: torch.dtype) -> float:
        """The arithmetic of matrices of a dtype in a second."""
        if self.float32_flops_per_s is None or dtype.itemsize < torch.float32.itemsize:
            return self.flops_per_s
        return self.float32_flops_per_s

    def transfer_s(self, nbytes: int, world_size: int) -> float:
        """Seconds to gather or reduce-scatter a whole buffer; none in a world of one."""
        if world_size == 1:
            return 0.0
        return self.latency_s + nbytes * (world_size - 1) / world_size / self.bytes_per_s

    def bucket_bytes(self, world_size: int) -> int:
        """The smallest bucket of 1, 8 or 64 MiB of whose transfer a tenth or less is latency.

        Coarse, for a layout should not change with the noise of a measurement.  If a tenth is not
        to be had, or nothing travels, 64 MiB.
        """
        if world_size == 1:
            return LARGEST_BUCKET_BYTES
        chosen = SMALLEST_BUCKET_BYTES
        while chosen < LARGEST_BUCKET_BYTES:
            if self.latency_s <= LATENCY_SHARE * self.transfer_s(chosen, world_size):
                return chosen
            chosen *= 8
        return LARGEST_BUCKET_BYTES

    def __str__(self) -> str:
        """The text that the option ``hardware`` takes, without what is assumed of the host."""
        names = ("copy_bytes_per_s", "host_bytes_per_s", "file_bytes_per_s")
        assumed = {name: getattr(Hardware, name) for name in names}
        values = {
            name: value
            for name, value in asdict(self).items()
            if name != "source" and value not in (None, assumed.get(name))
        }
        return " ".join(f"{name}={value:g}" for name, value in values.items())


NOMINAL = Hardware(latency_s=1e-4, bytes_per_s=2.5e10, source="assumed")
"""Accelerators on a fast network: for programs that no group of ranks will run."""


def of(figures: str | Mapping[str, object]) -> Hardware:
    """Figures by name, or ``latency_s=3e-4 bytes_per_s=1e9 overlaps=0``; commas are as good.

    Or the path of a JSON file with these names, as ``benchmarks/first_contact.py`` writes it.
    ``latency_s`` and ``bytes_per_s`` must be among them.

    Raises: ValueError for a name that is unknown or missing, and for what is no positive number;
    ``overlaps`` is 0 or 1, and a latency may be 0.
    """
    given = _items(figures) if isinstance(figures, str) else figures
    unknowable = [field.name for field in fields(Hardware) if field.default is None]
    values = {n: v for n, v in given.items() if v is not None or n not in unknowable}
    known = [field.name for field in fields(Hardware) if field.name != "source"]
    for name in values:
        if name not in known:
            raise ValueError(f"{name!r} is unknown; known: {', '.join(known)}")
    for name in NEEDED:
        if name not in values:
            raise ValueError(f"{name} is missing; needed: {', '.join(NEEDED)}")
    numbers: dict[str, Any] = {name: _number(name, value) for name, value in values.items()}
    overlaps = numbers.pop("overlaps", 1.0)
    if overlaps not in (0.0, 1.0):
        raise ValueError(f"overlaps is 0 or 1, not {values['overlaps']!r}")
    return Hardware(**numbers, overlaps=bool(overlaps))


def _items(text: str) -> dict[str, object]:
    if text.strip().lower().endswith(".json"):
        try:
            content = Path(text.strip()).read_text(encoding="utf-8-sig")
            values = json.loads(content, object_pairs_hook=_each_once)
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"cannot be read as JSON: {error}") from None
        if not isinstance(values, dict):
            raise ValueError(f"{text} holds no figures by name")
        return values
    items = [item.partition("=") for item in text.replace(",", " ").split()]
    for name, separator, _ in items:
        if not separator:
            raise ValueError(f"{name!r} is not of the form name=number, nor a .json file's path")
    return _each_once([(name, value) for name, _, value in items])


def _each_once(items: Sequence[tuple[str, object]]) -> dict[str, object]:
    values = dict(items)
    for name in values:
        if sum(name == other for other, _ in items) > 1:
            raise ValueError(f"{name} is given twice")
    return values


def _number(name: str, value: object) -> float:
    is_switch, may_be_zero = name == "overlaps", name in ("latency_s", "overlaps")
    what = "0 or 1" if is_switch else "a positive number" + " or 0" * may_be_zero
    try:
        if isinstance(value, bool) and not is_switch:
            raise ValueError(value)
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} is {what}, not {value!r}") from None
    if not (0 < number < float("inf") or (may_be_zero and number == 0)):
        raise ValueError(f"{name} is {what}, not {value!r}")
    return number
