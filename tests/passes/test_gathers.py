"""When parameters are gathered, and for how long: span planning on programs of a few letters."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from zerofx.ir.graph import Builder, program_order
from zerofx.ir.parameters import ParameterInfo, Place
from zerofx.passes.zero.gathers import GatherSource, GatherUnit, flatten, plan_spans, unflatten

aten = torch.ops.aten


def describe(index, name, shape, world_size=2, stride=None):
    value = torch.empty(shape) if stride is None else torch.empty_strided(shape, stride)
    return ParameterInfo(
        index=index,
        name=name,
        shape=tuple(shape),
        stride=tuple(value.stride()),
        dtype=torch.float32,
        device=torch.device("cpu"),
        requires_grad=True,
        world_size=world_size,
    )


def plan(program, num_backwards=None, regather=True, **elements):
    """Spans of each letter of a program such as ``"a b | b a"``, as texts like ``"0-3"``.

    A letter reads the parameter of its name; ``|`` separates forward from backward and back.
    Parameters have ten elements unless ``elements`` says otherwise.
    """
    graph = fx.Graph()
    names = sorted({letter for letter in program if letter.isalpha()})
    sources = {}
    for index, name in enumerate(names):
        node = graph.placeholder(name)
        node.meta["val"] = torch.empty(elements.get(name, 10))
        info = describe(index, name, (elements.get(name, 10),))
        sources[name] = GatherSource(node, info, node, regather=regather)
    first = len(names)
    backward, backwards = False, 0
    for letter in program.replace(" ", ""):
        if letter == "|":
            backward = not backward
            backwards += backward
            continue
        source = sources[letter]
        reader = graph.call_function(aten.relu.default, (source.node,))
        reader.meta["autograd_backward"] = backward
        source.uses.append((reader, source.node))
    order = program_order(graph)
    units = {name: GatherUnit([source]) for name, source in sources.items()}
    spans = plan_spans(list(units.values()), order, num_backwards or backwards)
    for unit, planned in spans.items():
        served = [use for span in planned for use in span.uses]
        (source,) = unit.sources
        assert sorted(served, key=lambda u: order[u[0]]) == source.uses, "a reader is left out"
        for span in planned:
            assert span.first == order[span.uses[0][0]]
            assert span.last == order[span.uses[-1][0]]
    return {
        name: " ".join(f"{s.first - first}-{s.last - first}" for s in spans[unit])
        for name, unit in units.items()
    }


def test_a_layer_is_gathered_for_forward_and_again_for_backward():
    assert plan("a b c | c b a") == {"a": "0-0 5-5", "b": "1-1 4-4", "c": "2-3"}


def test_the_last_layer_is_kept_from_forward_to_backward():
    assert plan("a b | b a")["b"] == "1-2"


def test_a_single_layer_is_gathered_once():
    assert plan("a | a") == {"a": "0-1"}


def test_what_backward_does_not_read_is_gathered_once():
    assert plan("a b c | c b") == {"a": "0-0", "b": "1-1 4-4", "c": "2-3"}
    assert plan("a b c") == {"a": "0-0", "b": "1-1", "c": "2-2"}


def test_readers_of_one_layer_share_its_gather():
    assert plan("a a b b | b b b a a") == {"a": "0-1 7-8", "b": "2-6"}


def test_a_loop_over_one_layer_is_gathered_once_per_direction():
    assert plan("a r r r r b | b r r r r a") == {"a": "0-0 11-11", "r": "1-4 7-10", "b": "5-6"}


def test_a_loop_over_two_layers_is_gathered_once_per_direction():
    planned = plan("a r s r s r s b | b s r s r s r a")
    assert planned["r"] == "1-5 10-14"
    assert planned["s"] == "2-6 9-13"


def test_a_tied_weight_spends_its_spare_gather_between_its_ends():
    """Nothing in backward reads an embedding's values but the head's product."""
    assert plan("e a b e | e b a", e=100) == {"e": "0-0 3-4", "a": "1-1 6-6", "b": "2-2 5-5"}


def test_a_spare_gather_goes_where_most_bytes_would_pass_meanwhile():
    assert plan("t a t b t | ", num_backwards=1, a=10, b=99)["t"] == "0-2 4-4"
    assert plan("t a t b t | ", num_backwards=1, a=99, b=10)["t"] == "0-0 2-4"


def test_no_more_than_two_gathers_per_backward():
    planned = plan("t a t b t c t | t c t b t a t")
    assert len(planned["t"].split()) == 2


def test_an_evaluation_has_the_same_budget_as_one_backward():
    assert plan("t a t b t", num_backwards=0)["t"] in ("0-0 2-4", "0-2 4-4")


def test_a_split_is_not_made_where_nothing_passes():
    assert plan("t t t a | a") == {"t": "0-2", "a": "3-4"}


def test_micro_batches_have_two_gathers_each():
    planned = plan("a b c | c b a | a b c | c b a")
    assert planned == {"a": "0-0 5-6 11-11", "b": "1-1 4-4 7-7 10-10", "c": "2-3 8-9"}


def test_a_layer_between_micro_batches_is_not_kept_while_the_first_one_is_gathered():
    """Layer ``a`` has no reader in backward, but is gathered again for the second forward."""
    planned = plan("a b c | c b | a b c | c b")
    assert planned["a"] == "0-0 5-5"
    assert planned["b"] == "1-1 4-4 6-6 9-9"


def test_a_value_that_may_not_be_gathered_again_lives_from_first_to_last():
    assert plan("a b | b a", regather=False) == {"a": "0-3", "b": "1-2"}


def test_a_source_without_readers_has_no_span():
    node = fx.Graph().placeholder("a")
    unit = GatherUnit([GatherSource(node, describe(0, "a", (4,)), node, regather=True)])
    assert plan_spans([unit], {node: 0}, 1) == {unit: []}


def test_padding_and_the_cast_count_into_a_gathers_bytes():
    graph = fx.Graph()
    node = graph.placeholder("a")
    node.meta["val"] = torch.empty(3)
    info = describe(0, "a", (5,), world_size=2)
    assert GatherUnit([GatherSource(node, info, node)]).nbytes == 24
    cast = GatherSource(node, info, node, cast_to=torch.bfloat16)
    assert GatherUnit([cast]).nbytes == 12


def test_a_units_bytes_are_its_buckets():
    """Whole, whichever of its parameters are read."""
    graph = fx.Graph()
    node = graph.placeholder("a")
    node.meta["val"] = torch.empty(3)
    place = Place(bucket=0, offset=0, extent=8, shard_numel=12)
    info = dataclasses.replace(describe(0, "a", (5,), world_size=2), assigned=place)
    assert GatherUnit([GatherSource(node, info, node)]).nbytes == 96


# Flat and whole


LAYOUTS = {
    "divisible": ((4, 2), None),
    "padded": ((5, 3), None),
    "vector": ((7,), None),
    "scalar": ((), None),
    "transposed": ((5, 3), (1, 5)),
    "channels last": ((2, 3, 2, 2), (12, 1, 6, 3)),
    "permuted": ((2, 3, 4), (1, 8, 2)),
    "size one": ((3, 1, 2), (2, 2, 1)),
}


def in_program(value, build):
    """``build(builder, node)`` on a program with one input, as a function of it."""
    fake_mode = FakeTensorMode()
    graph = fx.Graph()
    node = graph.placeholder("value")
    node.meta["val"] = fake_mode.from_tensor(value)
    graph.output(build(Builder(SimpleNamespace(graph=graph), "test"), node))
    return fx.GraphModule({}, graph)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("shape, stride", LAYOUTS.values(), ids=LAYOUTS)
def test_flattening_and_unflattening_are_inverse(shape, stride, world_size):
    info = describe(0, "w", shape, world_size, stride)
    whole = torch.empty_strided(info.shape, info.stride)
    whole.copy_(torch.arange(1.0, info.numel + 1).reshape(shape))
    flat = in_program(whole, lambda b, n: flatten(b, n, info, n))(whole)
    assert flat.shape == (info.place.extent,)
    assert flat[info.numel :].eq(0).all()
    memory = whole.as_strided((info.numel,), (1,))
    torch.testing.assert_close(flat[: info.numel], memory, rtol=0, atol=0)
    back = in_program(flat, lambda b, n: unflatten(b, n, info, info.shape, n))(flat)
    torch.testing.assert_close(back, whole, rtol=0, atol=0)
    sized = [dim for dim, size in enumerate(info.shape) if size > 1]
    assert [back.stride(dim) for dim in sized] == [info.stride[dim] for dim in sized]
    assert back.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def test_a_gradient_in_another_layout_than_its_parameter_is_laid_out_like_it():
    info = describe(0, "w", (5, 3), 2, (1, 5))
    gradient = torch.arange(15.0).reshape(5, 3)
    flat = in_program(gradient, lambda b, n: flatten(b, n, info, n))(gradient)
    torch.testing.assert_close(flat[:15], gradient.t().reshape(-1), rtol=0, atol=0)


def test_a_reshaped_value_is_unflattened_to_its_own_shape():
    info = describe(0, "w", (5, 3), 2)
    flat = torch.arange(16.0)
    whole = in_program(flat, lambda b, n: unflatten(b, n, info, (3, 5), n))(flat)
    torch.testing.assert_close(whole, torch.arange(15.0).view(3, 5), rtol=0, atol=0)
