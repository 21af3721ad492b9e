"""Sections about updates: the kernels, their tuning, and how fast they move memory."""

from __future__ import annotations

import copy
import functools
import statistics

import optimizer
import torch

from contact.findings import Findings
from contact.place import Place
from contact.steps import batches, gpt, moved, train
from tests.codegen import interpreted
from tests.codegen.exact import excess
from tests.codegen.variants import VARIANTS
from zerofx.codegen import kernels as choice
from zerofx.codegen.triton.launch import TritonKernel
from zerofx.runtime.optimizer import update as runtime_updates

TRAINED = ("adamw", "sgd_nesterov", "rmsprop_centered", "lion")
"""Optimizers that are trained for 20 steps too, a kernel after the other."""

LEARNING_RATE = 1e-2


def kernels(place: Place, found: Findings) -> None:
    if place.is_rehearsal:
        interpreted.start()
    device, length = place.device.type, place.pick(2**20 + 7, 1500)
    worst = 0.0
    for name in VARIANTS:
        with found.part(name):
            results = excess(name, length, device)
            worst = max(worst, *results.values())
            tensor, largest = max(results.items(), key=lambda item: item[1])
            found.at_most(f"{name}: the worst result, {tensor}", largest, 1, " of what may be")
    for name in place.pick(TRAINED, TRAINED[:1]):
        with found.part(f"{name}, 20 steps"):
            errors = interpreted.errors_against_float64(name, device=device)
            epsilon = torch.finfo(torch.float32).eps
            largest = max(
                own / max(2 * plain, epsilon * size) for own, plain, size in errors.values()
            )
            found.at_most(f"{name}, 20 steps of 5 lengths in one launch", largest, 1)
    found.figure("largest error, of what may be", worst, "")
    found.figure("kernels", len(VARIANTS), "")


def tuning(place: Place, found: Findings) -> None:
    """Tuning on live memory would update hundreds of times: moments would be 10 times as large."""
    if place.is_rehearsal:
        interpreted.start()
        for module in (choice, runtime_updates):
            module.runs_triton = lambda device: True
    launched = count_launches()
    makers = {
        "AdamW": lambda p: torch.optim.AdamW(p, lr=LEARNING_RATE, eps=1e-4),
        "SGD": lambda p: torch.optim.SGD(p, lr=LEARNING_RATE, momentum=0.9),
    }
    for name, make in makers.items():
        with found.part(name):
            _first_steps(place, found, name, make, launched)


def count_launches() -> list[int]:
    """Count the launches of Triton kernels from here on; an entry for each."""
    launched: list[int] = []
    launch = TritonKernel.launch

    @functools.wraps(launch)
    def counted(self, segments):
        launched.append(len(segments))
        return launch(self, segments)

    TritonKernel.launch = counted
    return launched


def _first_steps(place: Place, found: Findings, name: str, make, launched: list[int]) -> None:
    torch.compiler.reset()
    model = gpt(place).to(torch.bfloat16)
    start = copy.deepcopy(model)
    twin = copy.deepcopy(model)
    of_model, of_twin = make(model.parameters()), make(twin.parameters())
    given = batches(place, 2)  # the second step has a kernel of its own: states are there
    before = len(launched)
    reset_peak(place)
    train(model, of_model, given, options={"stage": 3}, clip=0.1)
    first_bytes = peak_bytes(place)
    found.check(f"{name}: a Triton kernel ran", len(launched) > before)
    train(twin, of_twin, given, clip=0.1)
    ratio = moved(model, twin, start)
    found.at_most(f"{name}: parameters, off the eager steps' by this much of its move", ratio, 0.3)
    states = [optimizer.state_dict()["state"] for optimizer in (of_model, of_twin)]
    for state in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
        own, expected = (
            [s[state].double().cpu().flatten() for s in each.values() if state in s]
            for each in states
        )
        if expected:
            difference = torch.cat(own) - torch.cat(expected)
            ratio = (difference.norm() / torch.cat(expected).norm()).item()
            found.at_most(f"{name}: {state}, off the eager steps'", ratio, 0.1)
    if not place.is_rehearsal:
        torch.compiler.reset()
        again = copy.deepcopy(start)
        reset_peak(place)
        train(again, make(again.parameters()), given, options={"stage": 3}, clip=0.1)
        later_bytes = peak_bytes(place)
        scratch = (first_bytes - later_bytes) / 2**20
        found.figure(f"{name}: a first step's peak above one whose kernels are tuned (L6)",
                     scratch, "MiB")  # fmt: skip


def reset_peak(place: Place) -> None:
    if not place.is_rehearsal:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


def peak_bytes(place: Place) -> int:
    return 0 if place.is_rehearsal else torch.cuda.max_memory_allocated()


COMPARED = ("zerofx", "AdamW(fused=True)", "zerofx masters", "zerofx rounded", "zerofx clipped")


def update(place: Place, found: Findings) -> None:
    device = place.device.type
    length = place.pick(2**28, 2**16)
    if not place.is_rehearsal:
        free, _ = torch.cuda.mem_get_info()
        length = min(length, int(0.7 * free) // (20 * (len(COMPARED) + 2)) // 1024 * 1024)
    generator = torch.Generator(device).manual_seed(0)
    start, gradient = (torch.randn(length, device=device, generator=generator) for _ in range(2))
    systems = []
    for name in COMPARED:
        with found.part(name):
            make = optimizer.zerofx if name in optimizer.ZEROFX else optimizer.torch_optimizer
            systems.append(make(name, start, gradient))
    rounds, steps = place.pick((9, 5), (1, 1))
    timed = optimizer.timed_in_turn(systems, start, device, rounds, steps)
    speeds = {
        system.name: system.bytes_per_element * length / statistics.median(system.fastest_s)
        for system in timed
    }
    for name, bytes_per_s in speeds.items():
        found.figure(f"{name}", bytes_per_s / 1e9, "GB/s")
    found.figure("elements", length, "")
    for name, difference in optimizer.differences(timed).items():
        found.at_most(f"{name}: off {COMPARED[1]} by", difference, optimizer.LARGEST_DIFFERENCE)
    if place.is_rehearsal:
        return
    for name in ("zerofx", "zerofx masters", "zerofx rounded", "zerofx clipped"):
        share = speeds[name] / speeds["copy"]
        found.check(f"{name}: at least 0.8 of a copy's GB/s", share >= 0.8, f"{share:.2f}")
    share = speeds["zerofx"] / speeds[COMPARED[1]]
    found.check(f"zerofx: at least 0.95 of {COMPARED[1]}", share >= 0.95, f"{share:.2f}")
