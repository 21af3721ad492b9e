"""A table of devices: what they are said to reach, and what share of it training gets.

None of the accelerators has been measured for this project: a plan for one says so, and its
intervals are wide.  ``python -m zerofx calibrate`` measures the machine that it runs on.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zerofx.hardware import Hardware, Link, with_links

GIB = 2**30

RANKS_OF_NODE = 8
"""Devices that reach each other over the fast link; every such machine in the table has so many."""


@dataclass(frozen=True)
class Device:
    """One kind of device.  Units: bytes, seconds, floating point operations, one direction.

    ``peak_flops_per_s`` are published ones of matrices by dtype, without sparsity; ``tf32`` is
    float32 with ``torch.set_float32_matmul_precision("high")``.  ``inner_bytes_per_s`` goes to the
    devices of the same machine, ``outer_bytes_per_s`` is a device's share of the network.
    ``memory_bytes`` is what the driver reports, less than the name says.
    """

    name: str
    title: str
    kind: str
    capability: tuple[int, int]
    num_units: int
    memory_bytes: int | None
    peak_flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    inner_bytes_per_s: float
    outer_bytes_per_s: float
    copy_bytes_per_s: float
    source: str
    is_measured: bool = False

    @property
    def efficiency(self) -> Efficiency:
        return OF_CPU if self.kind == "cpu" else OF_ACCELERATOR

    def hardware(self, axes: Sequence[tuple[str, int]], *, has_tf32: bool = False) -> Hardware:
        """Return the figures that plans are made with, for ranks along these axes.

        On two axes each has a link of its own: the fast one inside a machine if the inner axis has
        at most eight ranks, the network between machines.  A ring of all ranks has one too.
        """
        of, peak = self.efficiency, self.peak_flops_per_s
        float32 = peak["tf32" if has_tf32 and "tf32" in peak else "float32"]
        figures: dict[str, Any] = {
            "flops_per_s": of.matrices * peak["bfloat16"],
            "float32_flops_per_s": of.matrices * float32,
            "memory_bytes_per_s": of.memory * self.memory_bytes_per_s,
            "copy_bytes_per_s": of.copies * self.copy_bytes_per_s,
            "source": f"{self.title}: {self.source}; {self._standing}",
            "spread": of.spread,
        }
        (*_, (inner, ranks)) = axes
        if len(axes) == 1:
            return Hardware(**asdict(self._link(ranks, ranks)), **figures)
        (outer, nodes), _ = axes
        links = {outer: self._link(nodes, 1), inner: self._link(ranks, ranks)}
        together = self._link(nodes * ranks, ranks)
        return with_links({**links, f"{outer},{inner}": together}, **figures)

    @property
    def _standing(self) -> str:
        return "measured" if self.is_measured else "unmeasured, so its intervals are wide"

    def _link(self, ranks: int, neighbours: int) -> Link:
        """Return a ring's figures over so many ranks, of whom some share a machine.

        A machine's devices send on all its network cards together if neighbours are in the ring,
        and each on its own if none are.  Source: the latencies of a ring and its hops, protocol
        Simple, in NCCL's tuning model (src/graph/tuning.cc).
        """
        together = min(neighbours, RANKS_OF_NODE)
        nodes = math.ceil(ranks / together)
        speed = self.efficiency.link * self.outer_bytes_per_s * together
        if together > 1:
            inner = self.efficiency.link * self.inner_bytes_per_s
            speed = inner if nodes == 1 else min(inner, speed)
        outer_hops = nodes - 1 if self.kind != "cpu" else ranks - 1
        inner_hops = max(ranks - 1 - outer_hops, 0)
        latency_s = RING_S + inner_hops * INNER_HOP_S + outer_hops * OUTER_HOP_S
        return Link(latency_s, speed, overlaps=self.kind != "cpu")


RING_S, INNER_HOP_S, OUTER_HOP_S = 8.4e-6, 3.4e-6, 14e-6


@dataclass(frozen=True)
class Efficiency:
    """The shares of published figures that a training gets, and how wrong a step's lanes may be.

    ``spread`` is a factor: four of five times lie within it, above or below.
    """

    matrices: float
    memory: float
    link: float
    copies: float
    spread: float


OF_ACCELERATOR = Efficiency(matrices=0.65, memory=0.8, link=0.8, copies=0.8, spread=1.6)
"""Round figures.  Matrices of 4,096 in bfloat16 are said to reach 60 to 75% of an H100's peak."""

OF_CPU = Efficiency(matrices=0.8, memory=0.8, link=0.8, copies=0.8, spread=2.0)

_NVIDIA = "published peaks of NVIDIA's data sheet"

DEVICES = {
    one.name: one
    for one in (
        Device(
            "h100",
            "NVIDIA H100 80GB HBM3",
            "cuda",
            (9, 0),
            132,
            79 * GIB,
            {"bfloat16": 989.4e12, "tf32": 494.7e12, "float32": 66.9e12},
            3.35e12,
            450e9,  # NVLink 4: 900 GB/s in both directions
            50e9,  # one NDR card of 400 Gb/s each
            63e9,  # PCIe 5 x16
            f"{_NVIDIA} for H100 SXM5",
        ),
        Device(
            "h200",
            "NVIDIA H200",
            "cuda",
            (9, 0),
            132,
            139 * GIB,
            {"bfloat16": 989.4e12, "tf32": 494.7e12, "float32": 66.9e12},
            4.8e12,
            450e9,
            50e9,
            63e9,
            f"{_NVIDIA} for H200 SXM",
        ),
        Device(
            "a100",
            "NVIDIA A100-SXM4-80GB",
            "cuda",
            (8, 0),
            108,
            79 * GIB,
            {"bfloat16": 312e12, "tf32": 156e12, "float32": 19.5e12},
            2.039e12,
            300e9,  # NVLink 3: 600 GB/s in both directions
            25e9,  # one HDR card of 200 Gb/s each
            31.5e9,  # PCIe 4 x16
            f"{_NVIDIA} for A100 80GB SXM4",
        ),
        Device(
            "mi300x",
            "AMD Instinct MI300X",
            "cuda",  # torch's name for ROCm too
            (9, 4),
            304,
            191 * GIB,
            {"bfloat16": 1307.4e12, "tf32": 653.7e12, "float32": 163.4e12},
            5.3e12,
            448e9,  # seven Infinity Fabric links of 64 GB/s
            50e9,
            63e9,
            "published peaks of AMD's data sheet for MI300X",
        ),
        Device(
            "b200",
            "NVIDIA B200",
            "cuda",
            (10, 0),
            148,
            178 * GIB,
            {"bfloat16": 2250e12, "tf32": 1125e12, "float32": 75e12},
            7.67e12,  # 7,680 bits at 3,996 MHz, as its driver says; the data sheet rounds to 8
            900e9,  # NVLink 5: 1.8 TB/s in both directions
            50e9,
            63e9,
            f"{_NVIDIA} for HGX B200",
        ),
        Device(
            "cpu",
            "one core of a CPU with AVX-512",
            "cpu",
            (0, 0),
            1,
            None,  # its ranks share what there is
            {"bfloat16": 100e9, "float32": 100e9},
            1e10,
            2e9,  # gloo, through sockets of one machine
            1.25e9,  # 10 Gb/s Ethernet
            1e10,
            "round figures",
        ),
    )
}
"""The devices that a plan can be made for, by name."""


def device_named(name: str) -> Device:
    """Return the device of a name.  Raises: ValueError, with the nearest one."""
    found = DEVICES.get(name.lower())
    if found is not None:
        return found
    (nearest,) = difflib.get_close_matches(name.lower(), DEVICES, n=1, cutoff=0.0)
    raise ValueError(
        f"device {name!r} is not in the table; did you mean {nearest!r}? Known: "
        f"{', '.join(DEVICES)}. For another one give its figures: --hardware "
        "'latency_s=1e-5 bytes_per_s=4e11 flops_per_s=6e14 memory_bytes_per_s=2.6e12' (the option "
        "hardware), or the file that `python -m zerofx calibrate --json FILE` writes there."
    )
