"""The steps that bugs are planted in: between them every pass has nodes of its own."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn

from tests.kit.coded_reductions import wide_mlp
from tests.kit.programs import Captured, capture, mlp_step
from tests.replay.test_dumped_programs import EVERYTHING, language_step, two_optimizers_step
from zerofx.passes.offload import offload_activations

SLOW = "latency_s=1e-4 bytes_per_s=1e9 flops_per_s=1e6 memory_bytes_per_s=1e6 copy_bytes_per_s=1e8"
"""Compute so slow that all copies of a small step hide behind it."""

FILES = {"offload_tier": "nvme", "offload_dir": "scratch"}


@dataclass(frozen=True)
class Form:
    """A captured step and the options of its passes."""

    step: Any
    options: Mapping[str, Any]

    @contextlib.contextmanager
    def captured(self) -> Iterator[Captured]:
        """The step, while activations are offloaded however small."""
        with mock.patch.object(offload_activations, "SMALLEST_BYTES", 1):
            yield self.step()

    @property
    def arguments(self) -> dict[str, Any]:
        return {**EVERYTHING, "bucket": True, **self.options}


def _clipped() -> Captured:
    return mlp_step(2, clip=True)


@functools.cache
def _masked() -> Captured:
    """Two micro-batches with masks of their own, and a loss over all ranks."""
    torch.manual_seed(0)
    model = nn.Linear(5, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, masks):
        optimizer.zero_grad()
        total = 0.0
        for number in range(2):
            out, mask = model(x[:, number]).square(), masks[:, number]
            loss = (out * mask).sum() / (mask.sum() + 1) / 2
            (loss + out.mean()).backward()
            total = total + loss.detach()
        optimizer.step()
        return loss, total

    return capture(step, torch.randn(3, 2, 5), torch.rand(3, 2, 4), world_size=2, loss="global")


@functools.cache
def _language() -> Captured:
    """A head with a bias, and a mean over tokens of other weights, of which some do not count."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Tanh(), nn.Linear(4, 9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = torch.linspace(0.5, 1.5, 9)

    def step(x, y):
        optimizer.zero_grad()
        logits = model(x)[:, :-1]
        each = nn.functional.cross_entropy(
            logits.reshape(-1, 9), y.view(-1), weight=weight, ignore_index=1
        )
        loss = each + 0.1 * torch.logsumexp(logits, -1).tanh().mean()
        loss.backward()
        optimizer.step()
        return loss

    return capture(step, torch.randint(9, (2, 6)), torch.randint(9, (2, 5)), world_size=2)


FORMS = {
    "layers, everything in files": Form(
        _clipped,
        {
            **FILES,
            "offload": "optimizer,params,activations",
            "recompute": False,
            "bucket_bytes": 200,
            "hardware": SLOW,
        },
    ),
    "convolutions, two optimizers": Form(two_optimizers_step, {"bucket_bytes": 500}),
    "language, checkpointed": Form(lambda: language_step(layers=1), {"bucket_bytes": 20_000}),
    **{
        f"layers, stage {stage}": Form(_clipped, {"stage": stage, "bucket_bytes": 200})
        for stage in range(3)
    },
    "layers, gathered in eight bits": Form(_clipped, {"gather_dtype": "int8", "bucket_bytes": 200}),
    "layers, reduced in eight bits": Form(
        lambda: wide_mlp(clip=True), {"stage": 2, "reduce_wire": "int8", "error_feedback": 1}
    ),
    "layers, states on the host": Form(
        _clipped, {"stage": 2, "offload": "optimizer", "bucket_bytes": 200}
    ),
    "language, loss in chunks": Form(_language, {"stage": 1, "chunk_loss": 3}),
    "masked, one loss over all ranks": Form(_masked, {"stage": 1, "loss": "global"}),
}
