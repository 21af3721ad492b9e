"""Measure what can be seen of a step costs while nobody looks: dumps that are off, and agreement.

    python benchmarks/debugging.py
    python benchmarks/debugging.py --layers 4 --rounds 3 --dump

agreement   comparing schedules with the other ranks, of the rank that came last and so waited for
            nobody; and its share of the time to compile
compile     the first call, but for the time of a step
step        the median of the steps after it
bypassed    the same with the code taken out that asks whether to dump
dumped      the same with programs dumped (with --dump)

Medians over rounds, in which the variants take turns, in fresh processes; the slowest rank.
``lowering="eager"``: with Inductor compiling takes longer, and the rest is the same.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from unittest import mock

import torch
from models import Gpt, Sizes
from ranks import on_ranks
from tabulate import tabulate

from zerofx.compiler.program import Program
from zerofx.runtime.comm.agreement import Agreement

VARIANTS = ("off", "bypassed", "dumped")


@dataclass(frozen=True)
class Run:
    """Seconds of one rank."""

    compile_s: float
    step_s: float
    agreement_s: float


def measure(rank: int, num_ranks: int, layers: int, steps: int, variant: str) -> Run:
    torch.manual_seed(0)
    model = Gpt(Sizes(width=64, layers=layers, vocabulary=512))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 512, (1, 17))

    def step(model, optimizer, tokens):
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    spent = 0.0
    check = Agreement.check

    def timed(*arguments, **named):
        nonlocal spent
        began = time.perf_counter()
        is_same = check(*arguments, **named)
        spent += time.perf_counter() - began
        return is_same

    with tempfile.TemporaryDirectory() as folder:
        options = {"lowering": "eager", "hardware": "latency_s=3e-4 bytes_per_s=1e9"}
        if variant == "dumped":
            options["dump"] = folder
        compiled = torch.compile(step, backend="zero", options=options)
        began = time.perf_counter()
        with mock.patch.object(Agreement, "check", timed):
            if variant == "bypassed":
                with mock.patch.object(Program, "_new_dump", lambda self, ctx: None):
                    compiled(model, optimizer, tokens)
            else:
                compiled(model, optimizer, tokens)
        first_s = time.perf_counter() - began
        took = []
        for _ in range(steps):
            began = time.perf_counter()
            compiled(model, optimizer, tokens)
            took.append(time.perf_counter() - began)
    step_s = statistics.median(took)
    return Run(first_s - step_s, step_s, spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 12])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--dump", action="store_true", help="also with programs dumped")
    chosen = parser.parse_args()
    variants = VARIANTS if chosen.dump else VARIANTS[:2]
    rows = []
    for layers in chosen.layers:
        runs: dict[str, list[Run]] = {variant: [] for variant in variants}
        for _ in range(chosen.rounds):
            for variant in variants:
                found = on_ranks(measure, chosen.ranks, layers, chosen.steps, variant)
                slowest = max(found, key=lambda run: run.compile_s)
                agreement_s = min(run.agreement_s for run in found)
                runs[variant].append(Run(slowest.compile_s, slowest.step_s, agreement_s))
        for variant, of_variant in runs.items():
            compile_s = statistics.median(run.compile_s for run in of_variant)
            agreement_s = statistics.median(run.agreement_s for run in of_variant)
            step_s = statistics.median(run.step_s for run in of_variant)
            rows.append(
                (layers, variant, f"{compile_s:.2f}", f"{1e3 * step_s:.2f}",
                 f"{1e3 * agreement_s:.2f}", f"{agreement_s / compile_s:.3%}")
            )  # fmt: skip
    headers = ("layers", "dump", "compile s", "step ms", "agreement ms", "of compile")
    print(tabulate(rows, headers=headers, disable_numparse=True))


if __name__ == "__main__":
    main()
