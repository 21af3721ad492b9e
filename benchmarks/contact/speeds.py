"""Sections about time: against the peers, with offload, and the host's alone."""

from __future__ import annotations

import gc
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from models import Sizes, batches_of
from ranks import on_ranks
from systems import ALONE, ONE_PROCESS, SYSTEMS
from torch import nn

from contact.devices import copy_bandwidths
from contact.findings import Findings
from contact.place import RANKS_S, Place
from contact.steps import program, step_of, with_zerofx
from contact.trainings import together
from zerofx.cost.traffic import moved_bytes

Step = Callable[[torch.Tensor], Any]
OURS, FSDP = "zerofx 3", "FSDP2 + compile"
ROUNDS = 5


def speed(place: Place, found: Findings) -> None:
    alone = [OURS, FSDP, ONE_PROCESS]
    with found.part("one rank"):
        results = on_ranks(_take_turns, 1, place, alone, timeout_s=RANKS_S * place.patience)
        _compare_speeds(place, found, "one rank", results[0])
    if place.gpus == 1:
        return  # ranks that share a GPU say nothing about speed
    with found.part("ranks"):
        num_ranks = max(2, place.gpus)
        results = on_ranks(
            _take_turns, num_ranks, place, alone[:2], timeout_s=RANKS_S * place.patience
        )
        _compare_speeds(place, found, f"{num_ranks} ranks", results[0])


def _llama(place: Place, num_systems: int) -> tuple[Sizes, int, int]:
    """The sizes that fit, with rows and length of a batch: 1B parameters if they do."""
    if place.is_rehearsal:
        return Sizes("plain llama", 64, 64, 2), 2, 16
    total = torch.cuda.get_device_properties(place.device).total_memory  # the same on all ranks
    rows, length = 4, 2048
    for layers in (16, 8, 4, 2):
        sizes = Sizes("plain llama", 32_000, 2048, layers)
        parameters, tokens = sizes.num_parameters(), rows * length
        kept = 8 * parameters * num_systems  # bf16: parameter, two moments, gradient
        activations = tokens * (layers * sizes.width * 40 + sizes.vocabulary * 10)
        if kept + activations < 0.7 * total:
            return sizes, rows, length
    return replace(sizes, width=1024), 1, length


def _take_turns(rank: int, num_ranks: int, place: Place, names: list[str]) -> dict[str, Any]:
    """Train a copy of the model with each system, in turns; what fails leaves others alone."""
    sizes, rows, length = _llama(place, len(names))
    batches = batches_of(sizes, rows, length, rank, place.device)
    results: dict[str, Any] = {"sizes": str(sizes), "parameters": sizes.num_parameters()}
    results["tokens"] = rows * length * num_ranks
    steps: dict[str, Step] = {}
    for name in names:
        gc.collect()
        try:
            results[name] = {"seconds": []}
            steps[name] = _built(place, sizes, name, batches, results[name])
        except Exception as error:
            if num_ranks > 1:
                raise  # the others would wait for this one
            traceback.print_exc()  # to the log
            results[name]["error"] = f"{type(error).__name__}: {error}"
    for number in range(place.pick(ROUNDS, 1)):
        for name, step in steps.items():
            place.finish()
            together()
            given = [batches[(2 + 3 * number + i) % len(batches)] for i in range(3)]
            results[name]["seconds"].append(place.seconds(lambda: list(map(step, given))) / 3)  # noqa: B023
    for name, step in steps.items():
        results[name]["loss"] = step(batches[0]).item()
    return results


def _built(place: Place, sizes: Sizes, name: str, batches: list, result: dict) -> Step:
    before = 0 if place.is_rehearsal else torch.cuda.memory_allocated()
    model = place.built(sizes, place.pick(torch.bfloat16, torch.float32))
    started = time.perf_counter()
    step = {**SYSTEMS, **ALONE}[name](model)
    step(batches[0]).item()
    result["first_s"] = time.perf_counter() - started
    step(batches[1])
    if not place.is_rehearsal:
        place.finish()
        torch.cuda.reset_peak_memory_stats()
        step(batches[1])
        place.finish()
        result["peak"] = torch.cuda.max_memory_allocated() - before
    return step


def _compare_speeds(place: Place, found: Findings, where: str, results: dict) -> None:
    names = [name for name, result in results.items() if isinstance(result, dict)]
    found.note(f"{where}: {results['sizes']}, {results['tokens']} tokens a step, AdamW, "
               f"{place.pick('bf16', 'fp32')}")  # fmt: skip
    works = {name: "error" not in results[name] for name in names}
    for name in names:
        found.check(f"{where}: {name} trains", works[name], results[name].get("error", "")[:500])
        if works[name]:
            seconds = statistics.median(results[name]["seconds"])
            tokens_per_s = results["tokens"] / seconds
            flops = 6 * results["parameters"] * tokens_per_s / dist_size(where)
            found.figure(f"{where}: {name}", tokens_per_s, "tokens/s")
            found.figure(f"{where}: {name}, of 6 flops a parameter", flops / 1e12, "TFLOP/s a GPU")
            found.figure(f"{where}: {name}, first step", results[name]["first_s"], "s")
            if "peak" in results[name]:
                found.figure(f"{where}: {name}, peak", results[name]["peak"] / 2**30, "GiB")
    for name in names[1:]:
        if works[OURS] and works[name]:
            pairs = zip(results[OURS]["seconds"], results[name]["seconds"], strict=True)
            ratio = statistics.median(its / own for own, its in pairs)
            found.figure(f"{where}: {OURS} to {name}", ratio, "x")
            if not place.is_rehearsal:
                found.check(f"{where}: {OURS} is at least 0.95 of {name}", ratio >= 0.95,
                            f"{ratio:.2f}x")  # fmt: skip
            losses = results[OURS]["loss"], results[name]["loss"]
            off = abs(losses[0] - losses[1]) / abs(losses[1])
            found.at_most(f"{where}: {OURS}'s last loss is off {name}'s by", off,
                          place.pick(2e-2, 1e-3))  # fmt: skip


def dist_size(where: str) -> int:
    """The ranks that a title speaks of."""
    first = where.split()[0]
    return int(first) if first.isdecimal() else 1


# Offload


def overlap(place: Place, found: Findings) -> None:
    """Steps in turn with and without offload; what copies take alone is for their bandwidth."""
    bandwidth = min(copy_bandwidths(place).values())
    sizes = Sizes("plain llama", *place.pick((8192, 1536, 8), (64, 64, 2)))
    rows, length = place.pick((4, 2048), (2, 16))
    batches = batches_of(sizes, rows, length, 0, place.device)
    steps: dict[str, Step] = {}
    moved: dict[str, Any] = {}
    for offload in ("", "optimizer", "params", "activations", "optimizer,params,activations"):
        name = offload or "nothing"
        with found.part(f"{name} offloaded"):
            model = place.built(sizes, place.pick(torch.bfloat16, torch.float32))
            steps[name] = _offloading(model, offload)
            for batch in batches[:3]:
                steps[name](batch)
            moved[name] = moved_bytes(program().gm)
            found.check(f"{name} offloaded: it trains", True)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(place.pick(ROUNDS, 1)):
        for name, step in steps.items():
            given = batches[number % len(batches)]
            seconds[name].append(place.seconds(lambda: step(given)))  # noqa: B023
    found.note(f"{sizes}, {rows} x {length} tokens")
    base = statistics.median(seconds["nothing"])
    for name, times in seconds.items():
        median = statistics.median(times)
        found.figure(f"{name} offloaded: a step", median * 1e3, "ms")
        if name == "nothing":
            continue
        copies_s = max(moved[name].to_host, moved[name].to_device) / bandwidth
        both_s = (moved[name].to_host + moved[name].to_device) / bandwidth
        exposed_s = median - base
        found.figure(f"{name} offloaded: exposed", exposed_s * 1e3, "ms")
        found.figure(f"{name} offloaded: its copies alone, both ways at once", copies_s * 1e3, "ms")
        if not place.is_rehearsal and "optimizer" not in name:
            words = f"{exposed_s * 1e3:.1f} of {both_s * 1e3:.1f} ms"
            found.check(
                f"{name} offloaded: exposes less than copies take", exposed_s < both_s, words
            )


def _offloading(model: nn.Module, offload: str) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    options: dict[str, Any] = {"stage": 3, **({"offload": offload} if offload else {})}
    step = with_zerofx(step_of(), options)
    return lambda batch: step(model, optimizer, batch)


# Host


def host(place: Place, found: Findings) -> None:
    """A call's time until it returns, of a model so small that the device has finished before."""
    layers = place.pick((8, 16), (1, 2))
    per_step: dict[str, list[float]] = {}
    for name in (OURS, ONE_PROCESS):
        with found.part(name):
            per_step[name] = [_host_s(place, name, count) for count in layers]
            for count, seconds in zip(layers, per_step[name], strict=True):
                found.figure(f"{name}: host time of a step, {count} layers", seconds * 1e3, "ms")
            slope = (per_step[name][1] - per_step[name][0]) / (layers[1] - layers[0])
            found.figure(f"{name}: host time of a layer", slope * 1e6, "us")
            found.check(f"{name}: it was timed", True)
    for name, options in {
        "stage 3": {"stage": 3},
        "stage 0": {"stage": 0},
        "stage 3, eager lowering": {"stage": 3, "lowering": "eager"},
    }.items():
        with found.part(f"{name}: a step without waits"):
            _without_waits(place, options)
            found.check(f"{name}: a step in bf16, clipped, does not wait for the device", True)
    if place.is_rehearsal:
        found.note("a CPU has no waits to be found: the steps ran")


def _host_s(place: Place, name: str, layers: int) -> float:
    torch.compiler.reset()
    sizes = Sizes("plain llama", 256, 128, layers)
    batches = batches_of(sizes, 1, 16, 0, place.device)
    step = {**SYSTEMS, **ALONE}[name](place.built(sizes))
    for batch in batches[:4]:
        step(batch)
    seconds = []
    for number in range(place.pick(30, 3)):
        place.finish()  # an empty queue takes all launches of a step without waiting
        started = time.perf_counter()
        step(batches[number % len(batches)])
        seconds.append(time.perf_counter() - started)
    place.finish()
    return statistics.median(seconds)


def _without_waits(place: Place, options: dict[str, Any]) -> None:
    """Raise RuntimeError, from CUDA's own watch, where a step waits for the device."""
    torch.compiler.reset()
    sizes = Sizes("plain llama", 256, 128, 2)
    batches = batches_of(sizes, 2, 32, 0, place.device)
    model = place.built(sizes, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    step = with_zerofx(step_of(clip=1.0), options)
    for batch in batches[:3]:
        step(model, optimizer, batch)
    place.finish()
    if place.is_rehearsal:
        step(model, optimizer, batches[3])
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(model, optimizer, batches[3])
    finally:
        torch.cuda.set_sync_debug_mode("default")
