"""Shards and wire bytes of large models on 4,096 ranks, against formulas of their shapes."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from zerofx.planning.models import call_of_model
from zerofx.planning.plan import axes_of, plan_of

pytest.importorskip("transformers")

pytestmark = pytest.mark.nightly(reason="steps of 8B and 70B parameters are traced and rewritten")

RANKS, NODES, GPUS = 4096, 512, 8
TOKENS = 128
F32, BF16 = 4, 2  # bytes of an element
ALIGNED = 4  # elements: where parameters begin in a bucket that has several


class Bucket(NamedTuple):
    """Parameters that one collective carries, and what gathers them in a step at stage 3."""

    numels: list[int]
    gathers: int
    itemsize: int

    def padded(self, ranks: int) -> int:
        """Elements, with what pads them to equal shards."""
        align = ALIGNED if len(self.numels) > 1 else 1
        whole = sum(up_to(numel, align) for numel in self.numels)
        return up_to(-(-whole // ranks), align) * ranks

    def gathered(self, bytes_of: int, ranks: int) -> int:
        """Bytes that a rank sends for buffers of so many bytes each."""
        return self.gathers * sent(bytes_of, ranks)


class Shapes(NamedTuple):
    """Sizes of a decoder with gated MLPs, of its ``config.json``."""

    hidden: int
    inner: int
    layers: int
    vocabulary: int
    keys: int  # elements of all heads of keys
    head: int = 0  # elements of norms of queries and keys, where there are any

    @property
    def buckets(self) -> list[Bucket]:
        """Layers have each large matrix alone, keys with values, and norms together.

        Autocast gathers matrices in bfloat16.  Forward and backward gather alike, but for the
        embedding, which backward does not read, and the head, which stays.
        """
        h, head = self.hidden, [self.head] * 2 * bool(self.head)
        matrices = [[h * h], [h * self.keys] * 2, [h * h], *[[h * self.inner]] * 3]
        layer = [
            Bucket([h, h, *head], 2, F32),
            *(Bucket(numels, 2, BF16) for numels in matrices),
        ]
        table = [self.vocabulary * h]
        rest = [Bucket(table, 1, F32), Bucket([h], 2, F32), Bucket(table, 1, BF16)]
        return layer * self.layers + rest

    @property
    def numels(self) -> list[int]:
        return [numel for bucket in self.buckets for numel in bucket.numels]


MODELS = {
    "llama-3-8b": Shapes(4096, 14336, 32, 128256, 1024),
    "llama-3-70b": Shapes(8192, 28672, 80, 128256, 1024),
    "qwen3-8b": Shapes(4096, 12288, 36, 151936, 1024, head=128),
}


def up_to(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def sent(nbytes: int, ranks: int) -> int:
    """Bytes that each rank sends to gather, or to reduce and scatter, buffers of ``nbytes``."""
    return nbytes * (ranks - 1) // ranks


def forecasts_of(name, mesh, stages):
    call = call_of_model(name, TOKENS).call
    return plan_of(call, axes_of(RANKS, mesh), call.options, stages).forecasts


@pytest.mark.parametrize(
    "name, stages", [("llama-3-8b", [0, 1, 2, 3]), ("llama-3-70b", [2, 3])], ids=["8b", "70b"]
)
def test_on_one_axis(name, stages):
    shapes = MODELS[name]
    padded = [bucket.padded(RANKS) for bucket in shapes.buckets]
    reduced = sum(sent(F32 * numel, RANKS) for numel in padded)
    gathered = sum(
        bucket.gathered(bucket.itemsize * numel, RANKS)
        for bucket, numel in zip(shapes.buckets, padded, strict=True)
    )
    norms = F32 * len(shapes.numels) * (RANKS - 1)  # of each gradient, from every other rank
    whole = F32 * sum(shapes.numels)
    shards = F32 * sum(padded) // RANKS
    forecasts = forecasts_of(name, None, stages)
    for stage in stages:
        found = forecasts[str(stage)]
        # Updates of whole parameters are divided, and so are their states.
        kept = whole if stage < 3 else shards, 2 * shards
        assert (found.kept["parameters"], found.kept["optimizer states"]) == kept
        if stage == 0:
            (nbytes,) = found.sent.values()
            in_all = 2 * sent(F32 * sum(padded), RANKS)
            assert in_all - len(padded) <= nbytes <= in_all  # each collective is rounded down
        else:
            comes_back = reduced if stage < 3 else gathered
            assert list(found.sent.values()) == [reduced + comes_back + norms]


@pytest.mark.parametrize("outside", [0, 1, 3])
def test_on_two_axes(outside):
    shapes = MODELS["qwen3-8b"]
    stage = {"gpu": 3, "node": outside}
    (found,) = forecasts_of("qwen3-8b", {"node": NODES, "gpu": GPUS}, [stage]).values()
    shards = GPUS if outside == 0 else RANKS
    in_node = in_gpu = 0
    for bucket in shapes.buckets:
        nbytes = F32 * bucket.padded(shards)
        gathered = bucket.itemsize * bucket.padded(shards)
        in_gpu += sent(nbytes, GPUS) + bucket.gathered(gathered, GPUS)
        if outside == 0:
            in_node += 2 * nbytes // GPUS * (NODES - 1) // NODES
        elif outside == 1:
            in_node += 2 * sent(nbytes // GPUS, NODES)
        else:
            in_node += sent(nbytes // GPUS, NODES) + bucket.gathered(gathered // GPUS, NODES)
    norms = F32 * len(shapes.numels)
    over_all = norms * (RANKS - 1) if outside else 0
    in_gpu += 0 if outside else norms * (GPUS - 1)
    in_all = F32 * sum(bucket.padded(shards) for bucket in shapes.buckets)
    assert found.kept["parameters"] == in_all // (shards if outside != 1 else GPUS)
    assert found.kept["optimizer states"] == 2 * in_all // shards
    assert found.sent == {"node": in_node, "gpu": in_gpu, "node,gpu": over_all}
