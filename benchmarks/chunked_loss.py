"""Measure the head and the loss in chunks of tokens, beside the whole and beside torch's own.

    python benchmarks/chunked_loss.py
    python benchmarks/chunked_loss.py --vocabulary 32000 --tokens 512 --width 256 --rounds 1

A language model of one layer, fp32, AdamW, on 2 ranks of this machine: at stage 3 with
``chunk_loss=0`` and ``chunk_loss=1``; and each rank by itself, unsharded, with ``torch.compile``
alone, the loss written out or ``F.linear_cross_entropy`` (torch 2.13) in chunks.  Each in new
processes, and all once in every round.

Prints the peak of resident memory of later steps, above what is there after imports, and the median
of the seconds of all rounds' steps.  Fails if losses differ by more than 1e-5.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from memory import bytes_at_most, bytes_now, reset_peak
from ranks import on_ranks
from tabulate import tabulate
from torch import nn

SYSTEMS = ("zerofx whole", "zerofx in chunks", "torch.compile", "linear_cross_entropy")
CPU = torch.device("cpu")


class Model(nn.Module):
    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def hidden(self, tokens):
        hidden = self.embedding(tokens)
        return hidden + self.down(F.gelu(self.up(self.norm(hidden))))


def loss_of(model: Model, tokens, targets, is_fused: bool):
    hidden = model.hidden(tokens).flatten(0, 1)
    if is_fused:
        options = nn.modules.LinearCrossEntropyOptions()
        weight = model.head.weight
        return F.linear_cross_entropy(hidden, weight, targets.flatten(), options=options)
    return F.cross_entropy(model.head(hidden), targets.flatten())


def measured(rank: int, num_ranks: int, system: str, sizes: tuple[int, int, int], steps: int):
    """Return losses, bytes above the start at most, and the seconds of each later step."""
    vocabulary, count, width = sizes
    dist.barrier()
    start = bytes_now(CPU)
    torch.manual_seed(0)
    model = Model(vocabulary, width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    is_fused = system == "linear_cross_entropy"

    def step(tokens, targets):
        optimizer.zero_grad()
        loss = loss_of(model, tokens, targets, is_fused)
        loss.backward()
        optimizer.step()
        return loss

    if system.startswith("zerofx"):
        options = {"chunk_loss": int(system.endswith("chunks"))}
        step = torch.compile(step, backend="zero", options=options)
    else:  # what a user compiles of a step of one's own
        loss_compiled = torch.compile(loss_of)

        def step(tokens, targets):
            optimizer.zero_grad()
            loss = loss_compiled(model, tokens, targets, is_fused)
            loss.backward()
            optimizer.step()
            return loss

    generator = torch.Generator().manual_seed(0)  # ranks alike: all systems have the same losses
    tokens, targets = (torch.randint(vocabulary, (1, count), generator=generator) for _ in range(2))
    losses, seconds = [], []
    for number in range(2 + steps):
        if number == 2:
            reset_peak(CPU)
        dist.barrier()
        began = time.perf_counter()
        losses.append(step(tokens, targets).item())
        seconds.append(time.perf_counter() - began)
    return losses, bytes_at_most(CPU) - start, seconds[2:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--systems", nargs="+", default=SYSTEMS)
    arguments = parser.parse_args()
    sizes = arguments.vocabulary, arguments.tokens, arguments.width
    seconds, peaks, losses = defaultdict(list), defaultdict(list), {}
    for _ in range(arguments.rounds):
        for system in arguments.systems:
            found = on_ranks(measured, 2, system, sizes, arguments.steps)
            losses[system] = found[0][0]
            peaks[system].append(max(peak for _, peak, _ in found))
            seconds[system] += [
                max(pair) for pair in zip(*(each[2] for each in found), strict=True)
            ]
            print(system, losses[system], peaks[system], seconds[system], file=sys.stderr)
    first = arguments.systems[0]
    rows = []
    for system in arguments.systems:
        took, peak = statistics.median(seconds[system]), statistics.median(peaks[system])
        of_first = took / statistics.median(seconds[first])
        share = peak / statistics.median(peaks[first])
        rows.append(
            (system, f"{peak / 2**30:.2f}", f"{share:.2f}", f"{took:.2f}", f"{of_first:.2f}")
        )
    headers = ("system", "peak GiB", "of the first", "step s", "of the first")
    print(tabulate(rows, headers=headers, disable_numparse=True))
    reference = torch.tensor(losses[first])
    return int(
        any((torch.tensor(each) / reference - 1).abs().max() > 1e-5 for each in losses.values())
    )


if __name__ == "__main__":
    sys.exit(main())
