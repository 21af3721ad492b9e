"""Graphs as bytes: the same names, operators, metadata and values that are shared."""

from __future__ import annotations

import operator
import sys
import types

import torch
from torch import fx

from zerofx import compat
from zerofx.ir.packing import packed, unpacked
from zerofx.ir.roles import Provenance, Role

aten = torch.ops.aten


def body(constant=False):
    graph = fx.Graph()
    values = graph.placeholder("values")
    compat.inductor.mark_emptied(values)
    x = graph.call_function(operator.getitem, (values, 0))
    x.name = "donated_0"
    sine = graph.call_function(aten.sin.default, (x,))
    cloned = graph.call_function(
        aten.clone.default, (sine,), {"memory_format": torch.contiguous_format}
    )
    total = graph.call_function(aten.sum.dim_IntList, (cloned, [0]), {"dtype": torch.float64})
    if constant:
        total = graph.call_function(aten.add.Tensor, (total, graph.get_attr("one")))
    graph.output((total, float("inf")))
    root = {"one": torch.ones(())} if constant else {}
    return fx.GraphModule(root, graph)


def again(gm, meta=()):
    ((made,), _) = unpacked(packed([gm.graph], meta))
    return made


def test_a_graph_travels_with_its_names():
    gm = body()
    made = again(gm, [compat.inductor.EMPTIED])
    assert made.code == gm.code and "donated_0" in gm.code
    assert next(iter(made.graph.nodes)).meta == next(iter(gm.graph.nodes)).meta
    given = torch.ones(4)
    assert str(made([given])) == str(gm([given]))


def test_a_graph_travels_without_the_modules_of_a_script():
    name = "000_imported_first"
    module = types.ModuleType(name)
    module.torch = torch
    others = dict(sys.modules)
    sys.modules.clear()
    sys.modules.update({name: module, **others})
    try:
        data = packed([body().graph], [])
    finally:
        del sys.modules[name]
    assert unpacked(data)[0][0].code == body().code


def test_metadata_travel_and_what_is_shared_stays_shared():
    first, second = body(), body()
    with compat.tensors.fake_tensors():
        fake = torch.empty(6, 4).t()[1:]
    for gm in (first, second):
        for node in gm.graph.nodes:
            node.meta["val"] = fake
            node.meta["zerofx"] = Provenance(Role.GATHER, 3, "bucket")
            node.meta["unread"] = object()
    (one, other), beside = unpacked(
        packed([first.graph, second.graph], ["val", "zerofx"], {"places": (1, 2)})
    )
    assert beside == {"places": (1, 2)}
    values = {id(node.meta["val"]) for gm in (one, other) for node in gm.graph.nodes}
    assert len(values) == 1
    node = next(iter(one.graph.nodes))
    assert set(node.meta) == {"val", "zerofx"}
    assert node.meta["zerofx"] == Provenance(Role.GATHER, 3, "bucket")
    made = node.meta["val"]
    assert compat.tensors.is_fake(made)
    assert (made.shape, made.stride(), made.storage_offset(), made.dtype, made.device) == (
        (fake.shape, fake.stride(), fake.storage_offset(), fake.dtype, fake.device)
    )


def test_what_is_no_operator_stays():
    assert packed([body(constant=True).graph], []) is None


def test_real_tensors_and_symbolic_sizes_stay():
    gm = body()
    node = next(iter(gm.graph.nodes))
    node.meta["val"] = torch.ones(4)
    assert packed([gm.graph], []) is not None
    assert packed([gm.graph], ["val"]) is None
    shapes = torch.fx.experimental.symbolic_shapes.ShapeEnv()
    mode = torch._subclasses.FakeTensorMode(shape_env=shapes)
    dynamic = torch.fx.experimental.symbolic_shapes.StatelessSymbolicContext(
        dynamic_sizes=[torch.fx.experimental.symbolic_shapes.DimDynamic.DYNAMIC]
    )
    node.meta["val"] = mode.from_tensor(torch.ones(4), symbolic_context=dynamic)
    assert packed([gm.graph], ["val"]) is None
