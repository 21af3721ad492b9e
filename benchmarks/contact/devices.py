"""Sections about the machine: which GPUs a rank touches, and how fast everything is."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import zerofx
from contact.findings import Findings
from contact.place import Place
from contact.steps import batches, gpt, step_of, with_zerofx
from contact.trainings import shared_folder, together
from zerofx import hardware
from zerofx.runtime.comm.communication import Communicator
from zerofx.runtime.comm.measure import own_figures

TIMES = 5
GIB = 2**30


def threads(place: Place, found: Findings) -> None:
    """Compile, update on the host and save, each with its threads, on all ranks."""
    with found.part(place.words):
        results = place.on_ranks(_train_and_save)
        found.check(f"{place.words}: steps and saves run", all(r["trained"] for r in results))
        for rank, result in enumerate(results):
            for other, nbytes in result["elsewhere"].items():
                found.check(f"rank {rank} allocates nothing on GPU {other}", nbytes == 0,
                            f"{nbytes} bytes")  # fmt: skip
            if result["contexts"] is not None:
                contexts = result["contexts"]
                found.check(f"rank {rank} has a context on its own GPU only", contexts <= 1,
                            f"{contexts} GPUs")  # fmt: skip
    if place.gpus < 2:
        found.note("contexts and allocations on other GPUs (L2) take two GPUs: not shown here")


def _train_and_save(place: Place) -> dict[str, Any]:
    for options in ({"stage": 3}, {"stage": 3, "offload": "optimizer"}):
        torch.compiler.reset()
        model = gpt(place)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = with_zerofx(step_of(clip=1.0), options)
        given = batches(place, 4)
        for batch in given[:2]:
            step(model, optimizer, batch)
        folder = shared_folder(place)
        saving = zerofx.save(folder / "a", model, optimizer, asynchronous=True)
        for batch in given[2:]:
            step(model, optimizer, batch)
        saving.wait()
        place.finish()
        together()
        shutil.rmtree(folder, ignore_errors=True)
    own = None if place.is_rehearsal else place.device.index
    others = [index for index in range(place.gpus) if index != own]
    # Statistics of the allocator: to ask does not make a context.
    elsewhere = {index: torch.cuda.memory_stats(index).get("reserved_bytes.all.peak", 0)
                 for index in others}  # fmt: skip
    return {"trained": True, "elsewhere": elsewhere, "contexts": _contexts() if others else None}


def _contexts() -> int | None:
    """The GPUs on which this process has a context; None where nvidia-smi does not know it."""
    if not shutil.which("nvidia-smi"):
        return None
    query = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True, timeout=60).stdout.splitlines()
    own = {line.split(",")[1] for line in lines if line.split(",")[0].strip() == str(os.getpid())}
    return len(own) or None  # in a container it may see other numbers for processes


def link(place: Place, found: Findings) -> None:
    with found.part("this device"):
        _device_figures(place, found)
    if place.gpus == 1:
        found.hardware(latency_s=hardware.NOMINAL.latency_s,
                       bytes_per_s=hardware.NOMINAL.bytes_per_s)  # fmt: skip
        found.note("one GPU has no link: hardware.json has the assumed latency_s and bytes_per_s")
    with found.part(place.words):
        ranks = place.on_ranks(_link_figures)
        _compare_links(place, found, ranks)
    with found.part("hardware.json"):
        hardware.of(found.record["hardware"])
        found.check("the option hardware takes hardware.json", True)


def _device_figures(place: Place, found: Findings) -> None:
    sizes = {torch.float32: place.pick(8192, 256), torch.bfloat16: place.pick(16384, 256)}
    flops = {dtype: _flops_per_s(place, dtype, size) for dtype, size in sizes.items()}
    for dtype, figure in flops.items():
        found.figure(f"matrix products in {dtype}", figure / 1e12, "TFLOP/s")
    one, other = (torch.ones(place.pick(2**28, 2**18), device=place.device) for _ in range(2))
    bytes_per_s = 3 * one.nbytes / fastest(place, lambda: one.add_(other))
    found.figure("the device's memory, a sum in place", bytes_per_s / 1e9, "GB/s")
    copies = copy_bandwidths(place)
    for way, bandwidth in copies.items():
        found.figure(way, bandwidth / 1e9, "GB/s")
    here = torch.ones(place.pick(2**28, 2**18))
    there = torch.empty_like(here)
    on_host = 2 * here.nbytes / fastest(place, lambda: there.copy_(here))
    found.figure("the host's memory, a copy by torch's threads", on_host / 1e9, "GB/s")
    found.hardware(
        flops_per_s=flops[torch.bfloat16],
        float32_flops_per_s=flops[torch.float32],
        memory_bytes_per_s=bytes_per_s,
        copy_bytes_per_s=min(copies.values()),
        host_bytes_per_s=on_host,
    )


def _flops_per_s(place: Place, dtype: torch.dtype, size: int) -> float:
    matrix = torch.ones(size, size, dtype=dtype, device=place.device)
    return 2 * size**3 / fastest(place, lambda: matrix @ matrix)


def copy_bandwidths(place: Place) -> dict[str, float]:
    """Bytes a second from pinned memory to the device and back."""
    there = torch.ones(place.pick(2**27, 2**18), device=place.device)
    here = torch.empty(there.shape, pin_memory=not place.is_rehearsal)
    return {
        "from pinned memory": here.nbytes
        / fastest(place, lambda: there.copy_(here, non_blocking=True)),
        "to pinned memory": here.nbytes
        / fastest(place, lambda: here.copy_(there, non_blocking=True)),
    }


def fastest(place: Place, run: Callable[[], Any]) -> float:
    place.seconds(run)
    return min(place.seconds(run) for _ in range(TIMES))


def _link_figures(place: Place) -> dict[str, Any]:
    """Check what zerofx measures for itself beside bytes a second at larger sizes."""
    communicator = Communicator(dist.group.WORLD)
    ranks = communicator.world_size
    with torch.no_grad():
        figures = own_figures(communicator, place.device)
        found: dict[str, Any] = {"own": figures, "gathers": {}, "reductions": {}}
        for mib in place.pick((4, 64, 256, 1024), (1,)):
            numel = mib * 2**20 // 4 // ranks
            shard, whole = (torch.ones(n, device=place.device) for n in (numel, numel * ranks))
            sent = whole.nbytes * (ranks - 1) / ranks

            def gather() -> None:
                communicator.wait(communicator.all_gather_start(shard, ranks))  # noqa: B023

            def reduce() -> None:
                communicator.wait(communicator.reduce_scatter_start(whole, "mean", ranks))  # noqa: B023

            found["gathers"][mib] = sent / fastest(place, gather)
            found["reductions"][mib] = sent / fastest(place, reduce)
    return found


def _compare_links(place: Place, found: Findings, ranks: list[dict[str, Any]]) -> None:
    own = [rank["own"] for rank in ranks]
    mine = min(figures.bytes_per_s for figures in own)
    latency_s = max(figures.latency_s for figures in own)
    found.figure(f"{place.words}: zerofx's own latency", latency_s * 1e6, "us")
    found.figure(f"{place.words}: zerofx's own bandwidth", mine / 1e9, "GB/s")
    best = 0.0
    for kind in ("gathers", "reductions"):
        for mib in ranks[0][kind]:
            slowest = min(rank[kind][mib] for rank in ranks)
            best = max(best, slowest)
            found.figure(f"{place.words}: {kind} of {mib} MiB", slowest / 1e9, "GB/s")
    found.figure(f"{place.words}: zerofx's own bandwidth, of the best (L5)", mine / best, "x")
    if place.gpus != 1:
        found.hardware(latency_s=latency_s, bytes_per_s=best,
                       overlaps=all(figures.overlaps for figures in own))  # fmt: skip
    if place.gpus > 1:
        found.check(f"{place.words}: zerofx's own bandwidth is at least half the best",
                    mine >= best / 2, f"{mine / best:.2f}")  # fmt: skip
    else:
        found.check(f"{place.words}: the link was measured", best > 0)
