"""Counts of what a rank sends, by the formulas that sockets and the kernel are compared with."""

from __future__ import annotations

from collections import Counter

import torch

from zerofx.runtime.comm.communication import Communicator
from zerofx.runtime.comm.transport import SCALAR_BYTES


class Traffic:
    """Bytes this rank sends, by category, and gathered bytes alive on it.

    Categories: ``gather`` and ``reduce`` (parameters and gradients), ``exchange`` (what owners
    need whole, and back), ``scalar`` (sums and maxima of at most ``SCALAR_BYTES``) and ``setup``
    (broadcasts and gathers outside steps).  A broadcast counts as (N-1)/N of its size on every
    rank, the group's total shared out: who forwards to whom is the backend's choice.
    """

    CATEGORIES = ("gather", "reduce", "exchange", "scalar", "setup")

    def __init__(self) -> None:
        self.gathered_bytes = 0
        self.peak_gathered_bytes = 0
        self.reset()

    def reset(self) -> None:
        """Zero every count of what was sent; what is alive stays counted."""
        self.sent_bytes = dict.fromkeys(self.CATEGORIES, 0)
        self.collectives: Counter[str] = Counter()

    def reset_peak(self) -> None:
        self.peak_gathered_bytes = self.gathered_bytes

    def count(self, kind: str, category: str, nbytes: int) -> None:
        self.sent_bytes[category] += nbytes
        self.collectives[kind] += 1

    def gathered(self, nbytes: int) -> None:
        """Note that ``nbytes`` of gathered buffers came alive, or were freed if negative."""
        self.gathered_bytes += nbytes
        self.peak_gathered_bytes = max(self.peak_gathered_bytes, self.gathered_bytes)

    def snapshot(self) -> dict[str, object]:
        """Return a copy of all counts; ``sent_bytes`` and ``collectives`` are dicts in it."""
        return {
            "sent_bytes": dict(self.sent_bytes),
            "collectives": dict(self.collectives),
            "gathered_bytes": self.gathered_bytes,
            "peak_gathered_bytes": self.peak_gathered_bytes,
        }


def traffic_of(communicator: Communicator) -> Traffic:
    """Count what a communicator sends from now on: before a step that uses it is lowered."""
    if not isinstance(communicator, _Counting):
        communicator.__class__ = _Counting
        communicator.traffic = Traffic()
    return communicator.traffic


class _Counting(Communicator):
    """A communicator that counts."""

    traffic: Traffic

    def all_reduce_start(self, input, reduction, in_place=False):
        if reduction != "mean" and input.nbytes <= SCALAR_BYTES:
            self._count("all_reduce", "scalar", input, self.world_size * input.nbytes)
        else:
            padded = input.numel() + -input.numel() % self.world_size
            self._count("all_reduce", "reduce", input, 2 * padded * input.itemsize)
        return super().all_reduce_start(input, reduction, in_place)

    def all_to_all_start(self, parts):
        self._count("all_to_all", "reduce", parts, parts.nbytes)
        return super().all_to_all_start(parts)

    def reduce_scatter_start(self, flat, reduction, world_size):
        started = super().reduce_scatter_start(flat, reduction, world_size)
        self._count("reduce_scatter", "reduce", flat, flat.nbytes)
        return started

    def pieces_start(self, kind, pieces, offsets, numel, reduction):
        started = super().pieces_start(kind, pieces, offsets, numel, reduction)
        times = {"all_reduce": 2, "reduce_scatter": 1}[kind]
        self._count(kind, "reduce", pieces[0], times * numel * pieces[0].itemsize)
        return started

    def all_gather_start(self, shard, world_size, into=None):
        gathered = super().all_gather_start(shard, world_size, into)
        self._count("all_gather", "gather", shard, gathered.nbytes)
        self.traffic.gathered(gathered.nbytes)
        return gathered

    def free(self, gathered):
        super().free(gathered)
        self.traffic.gathered(-gathered.nbytes)

    def all_to_all(self, flat, sent, received):
        others = (flat.numel() - sent[self.rank]) * flat.itemsize
        self.traffic.count("all_to_all", "exchange", others)
        return super().all_to_all(flat, sent, received)

    def broadcast(self, tensor, src_group_rank=0):
        self._count("broadcast", "setup", tensor, tensor.nbytes)
        super().broadcast(tensor, src_group_rank)

    def gather_whole(self, shard):
        self._count("all_gather", "setup", shard, shard.nbytes * self.world_size)
        return super().gather_whole(shard)

    def abandon(self):
        super().abandon()
        self.traffic.gathered_bytes = 0

    def _count(self, kind: str, category: str, of: torch.Tensor, nbytes: int) -> None:
        """Count a collective of which each rank has an equal part; none of nothing, or alone."""
        if self.world_size > 1 and of.numel():
            self.traffic.count(kind, category, nbytes * (self.world_size - 1) // self.world_size)
