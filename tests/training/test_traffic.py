"""The bytes a rank sends: as many as the formula says, and as the kernel counts.

In the formulas Ψ is the bytes of all parameters and N the number of ranks: a gather or a reduction
of everything sends (N-1)/N · Ψ from each rank.
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
from tests.kit import models
from tests.kit.covering import each_value, exhaustive, only
from tests.kit.models import Gpt, language_loss
from tests.kit.ranks import ranks_fixture, ranks_on_sockets_fixture  # noqa: F401
from tests.kit.traffic import traffic_of
from zerofx.runtime.comm.communication import Communicator

STAGES = (0, 1, 2, 3)
TIMEOUT_S = 600.0

# Counted at the collectives.


@dataclass
class Sent:
    """Bytes by category that one rank sent in its first call and in a later one."""

    first: dict[str, int]
    later: dict[str, int]
    collectives: dict[str, int]


def build(tied: bool) -> nn.Module:
    model = Gpt()
    if not tied:
        model.head = nn.Linear(model.head.in_features, model.head.out_features, bias=False)
    return model


def count(stage: int, tied: bool, autocast: bool, bucket: bool = True) -> Sent:
    def step(model, optimizer, *batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = language_loss(model, *batch)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    torch._dynamo.reset()
    model = build(tied)
    optimizer = torch.optim.AdamW(model.parameters())
    communicator = Communicator.of(None)  # kept: only a living one is the step's own
    traffic = traffic_of(communicator)
    options = {"stage": stage, "lowering": "eager", "bucket": bucket}
    compiled = torch.compile(step, backend="zero", options=options)
    traffic.reset()
    compiled(model, optimizer, *models.tokens(0, 2))
    first = traffic.snapshot()
    traffic.reset()
    compiled(model, optimizer, *models.tokens(1, 2))
    later = traffic.snapshot()
    return Sent(first["sent_bytes"], later["sent_bytes"], later["collectives"])


def sent_once(elements: int, world_size: int, itemsize: int = 4) -> int:
    """What each rank sends of one tensor in one gather or reduction, padding included."""
    return (world_size - 1) * -(-elements // world_size) * itemsize


def padded(once: int, model: nn.Module, world_size: int) -> pytest.approx:
    """That many bytes, or more by padding: 16 bytes a parameter, and a rank, of each bucket."""
    slack = 16 * (world_size + 1) * len(list(model.parameters()))
    return pytest.approx(once + slack / 2, abs=slack / 2)


def gathers(model: nn.Module, autocast: bool) -> list[tuple[int, int]]:
    """(elements, item size) of each gather at stage 3, from what the modules compute.

    Forward reads everything.  Backward reads the weights of matrix products and norms; an embedding
    is only looked up.  A bias is only added to, but travels with the weights of its layer, a few
    bytes among many.  The head's product is the last of forward
    and the first of backward, so one gather serves both.
    """
    narrow = 2 if autocast else 4  # autocast casts for matrix products, not for norms or lookups
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) or name == "head":
            found.append((module.weight.numel(), narrow if name == "head" else 4))
        elif isinstance(module, nn.Linear):
            found += 2 * [(module.weight.numel(), narrow), (module.bias.numel(), narrow)]
        elif isinstance(module, nn.LayerNorm):
            # aten's layer-norm backward takes the bias too, though it needs only its shape.
            found += 2 * [(module.weight.numel(), 4), (module.bias.numel(), 4)]
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("stage, world_size", each_value((0, 1, 2), (2, 3)))
def test_up_to_stage_2_a_step_sends_every_parameter_twice(ranks, stage, world_size):
    model = build(tied=True)
    sizes = [parameter.numel() for parameter in model.parameters()]
    once = sum(sent_once(elements, world_size) for elements in sizes)
    for sent in ranks(world_size).run(count, stage, True, False, timeout_s=TIMEOUT_S):
        if stage == 0:
            assert sent.later["gather"] == 0
            assert sent.later["reduce"] / 2 == padded(once, model, world_size)
        else:
            assert sent.later["reduce"] == sent.later["gather"] == padded(once, model, world_size)
        check_the_rest(sent, stage, sizes, world_size)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "tied, autocast, world_size",
    [
        (True, False, 2),
        (False, True, 3),
        exhaustive(True, False, 3),
        exhaustive(False, True, 2),
    ],
)
def test_stage_3_gathers_twice_only_what_backward_reads(ranks, world_size, tied, autocast):
    model = build(tied)
    sizes = [parameter.numel() for parameter in model.parameters()]
    once = sum(sent_once(elements, world_size) for elements in sizes)
    gathered = sum(
        sent_once(elements, world_size, itemsize) for elements, itemsize in gathers(model, autocast)
    )
    for sent in ranks(world_size).run(count, 3, tied, autocast, timeout_s=TIMEOUT_S):
        assert sent.later["reduce"] == padded(once, model, world_size)
        assert sent.later["gather"] == padded(gathered, model, 2 * world_size + 1)
        assert once + gathered <= 3 * once
        check_the_rest(sent, 3, sizes, world_size)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", only((0, 3), [0, 1, 2, 3]))
def test_buckets_turn_a_collective_per_parameter_into_one_per_layer(ranks, stage):
    """And the bytes stay, but for padding and the biases that backward would not have gathered."""
    model = build(tied=True)
    parameters, layers = len(list(model.parameters())), 3  # embedding, block, last norm
    alone, together = (
        ranks(2).run(count, stage, True, False, bucket, timeout_s=TIMEOUT_S)
        for bucket in (False, True)
    )
    biases = sum(sent_once(p.numel(), 2) for p in model.parameters() if p.dim() == 1)
    for before, after in zip(alone, together, strict=True):
        reduction = "reduce_scatter" if stage else "all_reduce"
        assert before.collectives[reduction] == parameters
        assert after.collectives[reduction] == layers
        gathers = [sent.collectives.get("all_gather", 0) for sent in (before, after)]
        if stage == 0:
            assert gathers == [0, 0]
        elif stage < 3:
            assert gathers == [parameters, layers]
        else:  # most are gathered for forward and again for backward
            assert gathers[0] > parameters and layers <= gathers[1] <= 2 * layers
        padding = 16 * 3 * parameters * (1 if stage else 2)
        assert after.later["reduce"] <= before.later["reduce"] + padding
        again = (biases + padding) * (stage == 3)
        assert after.later["gather"] <= before.later["gather"] + padding + again
        assert after.later["scalar"] == before.later["scalar"]


@pytest.mark.nightly
def test_autocast_halves_what_stage_3_gathers_for_matrix_products():
    """The expectation above, seen as a whole: norms and the embedding's lookup stay fp32."""
    model = build(tied=False)
    kept = [m for m in model.modules() if isinstance(m, nn.LayerNorm | nn.Embedding)]
    wide = sum(elements * itemsize for m in kept for elements, itemsize in gathers(m, False))
    in_full, in_half = (
        sum(elements * itemsize for elements, itemsize in gathers(model, autocast))
        for autocast in (False, True)
    )
    assert in_half - wide == (in_full - wide) / 2


def check_the_rest(sent: Sent, stage: int, sizes: list[int], world_size: int) -> None:
    """Scalars and first-call traffic stand apart, and only scalars recur."""
    assert sent.later["setup"] == 0
    # Stage 0 sees whole gradients.  On shards, every gradient's norm is summed in one collective,
    # gathered by all at a float each.
    norms = 0 if stage == 0 else (world_size - 1) * 4 * len(sizes)
    assert sent.later["scalar"] == norms
    broadcast = 4 * sum(sizes) * (world_size - 1) / world_size  # parameters become rank 0's
    assert broadcast - 4 <= sent.first["setup"] <= broadcast
    for category in ("gather", "reduce", "scalar"):
        assert sent.first[category] == sent.later[category]


# Counted by the kernel.


class ThreeLayers(nn.Module):
    """1.5 million parameters, 6 MB."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(600, 900), nn.GELU(), nn.Linear(900, 900), nn.GELU(), nn.Linear(900, 150)
        )

    def forward(self, x):
        return self.layers(x)


@dataclass
class Counted:
    """Bytes of 20 steps on one rank, by who counted; of the loopback, step by step."""

    by_zerofx: int
    by_sockets: int
    on_loopback: list[int]


def loopback_bytes() -> int:
    """All that this machine has sent to itself: payload, headers and acknowledgements."""
    with open("/proc/net/dev") as table:
        (line,) = [line for line in table if line.strip().startswith("lo:")]
    return int(line.split(":")[1].split()[8])


TCP_INFO_BYTES = 256
BYTES_ACKED = 120  # offset of tcpi_bytes_acked in struct tcp_info, Linux 4.1 and later


def socket_bytes() -> int:
    """What the peers of this process's TCP connections have received from it: payload only."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
        except OSError:  # not a TCP socket, or closed meanwhile
            continue
        if len(info) >= BYTES_ACKED + 8:
            total += struct.unpack_from("<Q", info, BYTES_ACKED)[0]
    return total


def measure(stage: int) -> Counted:
    def step(model, optimizer, x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    torch._dynamo.reset()
    model = ThreeLayers()
    optimizer = torch.optim.AdamW(model.parameters())
    communicator = Communicator.of(None)
    traffic = traffic_of(communicator)
    compiled = torch.compile(step, backend="zero", options={"stage": stage, "lowering": "eager"})
    x = torch.randn(2, 600)
    compiled(model, optimizer, x)
    traffic.reset()
    on_loopback = []
    sockets = socket_bytes()
    for _ in range(20):
        dist.barrier()
        before = loopback_bytes()
        dist.barrier()  # no rank sends until both have read
        compiled(model, optimizer, x)
        dist.barrier()  # nor has any more to send
        on_loopback.append(loopback_bytes() - before)
    return Counted(sum(traffic.sent_bytes.values()), socket_bytes() - sockets, on_loopback)


@pytest.mark.nightly
@pytest.mark.skipif(not os.path.exists("/proc/net/dev"), reason="the kernel's counts are Linux's")
@pytest.mark.parametrize("stage", only((3,), [0, 1, 3]))
def test_the_kernel_counts_the_same_bytes_within_5_percent(ranks_on_sockets, stage):
    counted = ranks_on_sockets(2).run(measure, stage, timeout_s=TIMEOUT_S)
    for rank in counted:
        assert rank.by_sockets == pytest.approx(rank.by_zerofx, rel=0.05)
    # Other programs on this machine can only add to the loopback: the quietest step is ours.
    per_step = sum(rank.by_zerofx for rank in counted) / 20
    quietest = min(min(rank.on_loopback) for rank in counted)
    assert quietest == pytest.approx(per_step, rel=0.05)
