"""Fusion leaves out results that Inductor computes where they are read, or writes over others."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from zerofx.cost.fusion import Fusion, calls_library
from zerofx.cost.program import allocations
from zerofx.ir import ops
from zerofx.ir.interface import InputRole, set_input_role

aten = torch.ops.aten

NBYTES = 4 * 64 * 64


class Steps:
    """Builds a graph of operators on matrices of 64 x 64."""

    def __init__(self):
        self.graph = fx.Graph()
        self.x = self.graph.placeholder("x")
        self.x.meta["val"] = torch.empty(64, 64)
        set_input_role(self.x, InputRole("parameter", 0))

    def __call__(self, target, *operands):
        node = self.graph.call_function(target, operands)
        node.meta["val"] = torch.empty(64, 64)
        return node

    def counted(self, *results):
        """The (begin, end) of each node's memory, by node."""
        self.graph.output(results)
        fusion = Fusion(list(self.graph.nodes))
        found, _ = allocations(self.graph, 2, fusion=fusion)
        assert {one.nbytes for one in found} <= {NBYTES}
        return {one.node: (one.begin, one.end) for one in found}


@pytest.fixture
def steps():
    return Steps()


def test_elementwise_work_is_computed_where_it_is_read(steps):
    product = steps(aten.mm.default, steps.x, steps.x)
    sine = steps(aten.sin.default, product)
    turned = steps(aten.t.default, sine)
    cosine = steps(aten.cos.default, turned)
    last = steps(aten.mm.default, cosine, steps.x)
    counted = steps.counted(last)
    assert counted.keys() == {product, cosine, last}  # a product reads from memory
    # cosine is written over what it is made of, though sine is between them
    assert counted[product] == (1, 3) and counted[cosine] == (4, 5)


def test_what_leaves_its_region_is_in_memory(steps):
    sine = steps(aten.sin.default, steps.x)
    start = steps(ops.all_gather_start, steps.x, 2)
    last = steps(aten.cos.default, sine)
    assert steps.counted(start, last).keys() == {sine, start, last}


def test_what_is_read_later_is_not_written_over(steps):
    product = steps(aten.mm.default, steps.x, steps.x)
    sine = steps(aten.sin.default, product)
    other = steps(aten.mm.default, sine, product)
    assert steps.counted(other) == {product: (1, 3), sine: (2, 3), other: (3, 4)}


def test_one_input_is_written_over_once(steps):
    product = steps(aten.mm.default, steps.x, steps.x)
    maximum = steps(aten.max.dim, product, 0)
    maximum.meta["val"] = (torch.empty(64, 64), torch.empty(64, 64))
    assert len(steps.counted(maximum)) == 2


def test_products_and_attention_call_a_library(steps):
    assert calls_library(steps(aten.mm.default, steps.x, steps.x))
    assert not calls_library(steps(aten.sin.default, steps.x))


def images(channels: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(2, channels, 8, 8, dtype=dtype)


def test_a_convolution_reads_its_operands_with_their_channels_last(steps):
    steps.x.meta["val"] = images()
    weight = steps(aten.sin.default, steps.x)
    weight.meta["val"] = torch.empty(5, 3, 3, 3)
    convolution = steps(aten.convolution.default, steps.x, weight)
    steps(aten.convolution_backward.default, convolution, steps.x, weight)
    fusion = Fusion(list(steps.graph.nodes))
    assert fusion.layouts() == {convolution: {steps.x: (192, 1, 24, 3), weight: (27, 1, 9, 3)}}
    assert fusion.is_copied(steps.x), "it is an input, and has its layout"
    assert fusion.is_copied(weight), "the gradient reads it as it was made"


def test_what_only_convolutions_read_is_made_with_its_channels_last(steps):
    steps.x.meta["val"] = images()
    sine = steps(aten.sin.default, steps.x)
    sine.meta["val"] = images()
    steps(aten.convolution.default, sine, steps.x)
    assert not Fusion(list(steps.graph.nodes)).is_copied(sine)


@pytest.mark.parametrize(
    ("dtype", "widened"), ((torch.bfloat16, 4 * images().numel()), (torch.float32, None))
)
def test_a_batch_norm_widens_a_gradient_that_is_nowhere_in_memory(steps, dtype, widened):
    gradient = steps(aten.sin.default, steps.x)
    gradient.meta["val"] = images(dtype=dtype)
    norm = steps(aten.native_batch_norm_backward.default, gradient, steps.x)
    norm.meta["val"] = (images(dtype=dtype), torch.empty(3), torch.empty(3))
    assert Fusion(list(steps.graph.nodes)).widened().get(norm) == widened


def test_a_norm_that_is_computed_again_is_computed_where_it_is_read(steps):
    norm = steps(aten._native_batch_norm_legit_functional.default, steps.x)
    norm.meta["val"] = (torch.empty(64, 64), torch.empty(64))
    first = steps(operator.getitem, norm, 0)
    steps(aten.sin.default, first)
    assert Fusion(list(steps.graph.nodes)).is_computed_where_read(norm)
    steps(aten.cos.default, steps(operator.getitem, norm, 1))
    assert not Fusion(list(steps.graph.nodes)).is_computed_where_read(norm)


def test_what_layers_share_is_not_written_over(steps):
    """Its last reader leaves it alone as the others do."""
    set_input_role(steps.x, InputRole("other"))
    box = steps.graph.placeholder("box")
    box.meta["val"] = torch.empty(64, 64)
    set_input_role(box, InputRole("parameter", 0))
    angles = steps(aten.cos.default, steps.x)
    last = angles
    for _ in range(3):
        steps(aten.zero_.default, box)
        last = steps(aten.mul.Tensor, box, angles)
    steps.graph.output((last,))
    fusion = Fusion(list(steps.graph.nodes))
    assert not fusion.may_overwrite(last, angles)
