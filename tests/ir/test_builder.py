"""A pass's insertions have fresh metadata, which equal calls share."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from zerofx.ir.graph import Builder
from zerofx.ir.roles import Role

aten = torch.ops.aten


def built(*values):
    """A builder of a program with these inputs, and the inputs."""
    fakes = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    graph = fx.Graph()
    given = []
    for number, value in enumerate(values):
        node = graph.placeholder(f"value_{number}")
        node.meta["val"] = fakes.from_tensor(value)
        given.append(node)
    graph.output(tuple(given))
    gm = fx.GraphModule(nn.Module(), graph)
    builder = Builder(gm, "a pass")
    graph.inserting_before(graph.output_node()).__enter__()
    return builder, given


def called(builder, target, *args):
    return builder.call(target, *args, role=Role.WHOLE).meta["val"]


@pytest.mark.parametrize(
    "target, arguments, others",
    (
        (aten.view.default, ([2, 8],), ([4, 4],)),
        (aten.sum.dim_IntList, ([0],), ([0], True)),
        (aten.add.Tensor, (1,), (1.5,)),
        (aten.mul.Tensor, (True,), (1,)),
        (aten.slice.Tensor, (0, 0, 2), (0, 2, 4)),
    ),
)
def test_calls_of_other_arguments_have_metadata_of_their_own(target, arguments, others):
    values = torch.zeros(4, 4, dtype=torch.bool if target is aten.mul.Tensor else torch.float32)
    builder, (x, y) = built(values, values.clone())
    for given in (arguments, others, arguments):
        for node in (x, y):
            found, expected = called(builder, target, node, *given), target(values, *given)
            assert (found.shape, found.stride()) == (expected.shape, expected.stride())
            assert (found.dtype, found.storage_offset()) == (
                expected.dtype,
                expected.storage_offset(),
            )


def test_equal_calls_are_computed_once():
    builder, (x, y) = built(torch.ones(3), torch.ones(3))
    one = called(builder, aten.sin.default, x)
    assert called(builder, aten.sin.default, y) is one
    assert called(builder, aten.cos.default, y) is not one
    written = called(builder, aten.copy_.default, x, y)
    assert called(builder, aten.copy_.default, y, x) is not written, "it is what it writes to"


def test_what_layouts_do_not_tell_is_computed_each_time():
    plain = torch.ones(3, dtype=torch.complex64)
    builder, (x, conjugate) = built(plain, plain.conj())
    assert called(builder, aten._conj.default, x).is_conj()
    assert not called(builder, aten._conj.default, conjugate).is_conj()
    builder, (x, y) = built(torch.ones(3), torch.ones(3))
    sizes = {str(called(builder, aten.nonzero.default, node).shape[0]) for node in (x, y)}
    assert len(sizes) == 2
    builder, (x, sparse) = built(torch.ones(4, 2), torch.ones(4, 2).to_sparse())
    dense = called(builder, aten.mul.Tensor, x, 2.0)
    assert dense.layout is torch.strided
    assert called(builder, aten.mul.Tensor, sparse, 2.0).layout is torch.sparse_coo
