"""normalize: one operator per tensor, no copies into fresh memory, the same results bit by bit."""

import functools

import pytest
import torch
from torch import nn
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from tests.kit.programs import (
    assert_same_numerics,
    capture,
    evaluation,
    execute,
    listing,
    mlp_step,
    rewritten,
)
from zerofx import compat
from zerofx.ir.interface import InputRole, placeholders, set_input_role
from zerofx.passes.normalize import normalize

aten = torch.ops.aten


def trace(function, *inputs, roles=()):
    """``function`` as capture hands it to the passes: functional aten, every input with a role."""
    gm = make_fx(functionalize(function), tracing_mode="fake")(*inputs)
    for position, node in enumerate(placeholders(gm.graph)):
        set_input_role(node, roles[position] if position < len(roles) else InputRole("other"))
    return gm


def lowered(function, *inputs, least=1):
    """``function`` after AOTAutograd, with the decompositions that capture asks for.

    Traced, it has so many foreach operators at least.
    """
    programs = []

    def keep(gm, _inputs):
        programs.append(gm)
        return gm

    recorded = trace(function, *inputs)
    assert sum(map(is_foreach, targets(recorded))) >= least
    compat.aot.trace_to_aten(recorded, list(inputs), keep)
    return programs[0]


def targets(gm):
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


def is_foreach(target):
    return "_foreach_" in str(target)


PARAMETER = InputRole("parameter", 0)

UNARY = (
    "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg"
    " reciprocal round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc max"
).split()
if hasattr(torch, "_foreach_clone"):  # torch 2.11 has none
    UNARY.append("clone")

FOREACH = {name: lambda a, b, c, s, f=f"_foreach_{name}": getattr(torch, f)(a) for name in UNARY}
FOREACH |= {
    f"{name}, {kind}": lambda a, b, c, s, f=f"_foreach_{name}", pick=pick: getattr(torch, f)(
        a, pick(b, s)
    )
    for name in "add sub mul div maximum minimum clamp_min clamp_max pow".split()
    for kind, pick in {
        "list": lambda b, s: b,
        "number": lambda b, s: 0.5,
        "numbers": lambda b, s: [0.5, 2.0],
    }.items()
}
FOREACH |= {
    f"{name}, tensor": lambda a, b, c, s, f=f"_foreach_{name}": getattr(torch, f)(a, s)
    for name in ("mul", "div")  # Python gives add's tensor as a number, which needs its value
}
FOREACH |= {
    "add, tensor": lambda a, b, c, s: aten._foreach_add.Tensor(a, s),
    "add, alpha": lambda a, b, c, s: torch._foreach_add(a, b, alpha=0.3),
    "sub, alpha": lambda a, b, c, s: torch._foreach_sub(a, b, alpha=0.3),
    "add, tensor and alpha": lambda a, b, c, s: torch._foreach_add(a, s, alpha=0.3),
    "pow, of a number": lambda a, b, c, s: torch._foreach_pow(2.0, b),
    "lerp, number": lambda a, b, c, s: torch._foreach_lerp(a, b, 0.1),
    "lerp, numbers": lambda a, b, c, s: torch._foreach_lerp(a, b, [0.1, 0.2]),
    "lerp, list": lambda a, b, c, s: torch._foreach_lerp(a, b, c),
    "addcmul, default": lambda a, b, c, s: torch._foreach_addcmul(a, b, c),
    "addcmul, number": lambda a, b, c, s: torch._foreach_addcmul(a, b, c, 0.3),
    "addcmul, numbers": lambda a, b, c, s: torch._foreach_addcmul(a, b, c, [0.3, 0.4]),
    "addcdiv, default": lambda a, b, c, s: torch._foreach_addcdiv(a, b, c),
    "addcdiv, number": lambda a, b, c, s: torch._foreach_addcdiv(a, b, c, 0.3),
    "addcdiv, numbers": lambda a, b, c, s: torch._foreach_addcdiv(a, b, c, [0.3, 0.4]),
    "norm": lambda a, b, c, s: torch._foreach_norm(a),
    "norm 1": lambda a, b, c, s: torch._foreach_norm(a, 1),
    "norm inf": lambda a, b, c, s: torch._foreach_norm(a, float("inf")),
    "norm in double": lambda a, b, c, s: torch._foreach_norm(a, 2, dtype=torch.float64),
    "in place, mul": lambda a, b, c, s: torch._foreach_mul_(a, 0.5) or a,
    "in place, zero": lambda a, b, c, s: torch._foreach_zero_(a) or a,
    "in place, copy": lambda a, b, c, s: torch._foreach_copy_(a, b) or a,
    "in place, lerp": lambda a, b, c, s: torch._foreach_lerp_(a, b, 0.1) or a,
    "in place, sqrt": lambda a, b, c, s: torch._foreach_sqrt_(a) or a,
}


def results_of(function, a0, a1, b0, b1, c0, c1, s):
    # Copies, so that what writes in place writes to memory of the program.
    return list(function([a0 + 0, a1 + 0], [b0, b1], [c0, c1], s))


@functools.cache
def all_foreach():
    """Inputs, and by name what a program of all operators computes of them."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 3), (4,)] * 3 + [()]
    inputs = [torch.rand(shape, generator=generator) * 0.8 + 0.1 for shape in shapes]

    def all_of(*inputs):
        return [one for function in FOREACH.values() for one in results_of(function, *inputs)]

    gm = lowered(all_of, *inputs, least=len(FOREACH))
    assert not any(map(is_foreach, targets(gm)))
    for node in gm.graph.nodes:
        if node.op == "call_function":
            assert node.meta["val"] is not None
    computed = iter(gm(*inputs))
    return inputs, {name: [next(computed), next(computed)] for name in FOREACH}


@pytest.mark.parametrize("name", FOREACH)
def test_a_foreach_operator_becomes_one_operator_per_tensor(name):
    inputs, computed = all_foreach()
    for actual, expected in zip(computed[name], results_of(FOREACH[name], *inputs), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        assert actual.dtype == expected.dtype


def test_metadata_of_the_single_operators_is_their_own():
    def function(a, b):
        return torch._foreach_norm([a, b], 2)

    gm = lowered(function, torch.randn(2, 3), torch.randn(4))
    norms = [node for node in gm.graph.nodes if node.target is aten.linalg_vector_norm.default]
    assert len(norms) == 2
    assert all(node.meta["val"].shape == () for node in norms)


def test_a_copy_into_fresh_memory_is_what_was_copied():
    def function(x):
        return aten.copy.default(torch.empty_like(x), x * 2) + 1

    gm = trace(function, torch.randn(2, 3))
    assert aten.copy.default in targets(gm)
    normalize(gm, None)
    assert targets(gm) == [aten.mul.Tensor, aten.add.Tensor]


@pytest.mark.parametrize(
    "into",
    [
        lambda x: torch.empty(x.shape, dtype=torch.bfloat16),
        lambda x: torch.empty(3, 2).t(),
        lambda x: torch.empty(5, 2, 3),
    ],
    ids=["dtype", "layout", "broadcast"],
)
def test_a_copy_that_changes_something_stays(into):
    def function(x):
        return aten.copy.default(into(x), x * 2)

    x = torch.randn(2, 3)
    gm = trace(function, x)
    normalize(gm, None)
    assert aten.copy.default in targets(gm)
    actual, expected = gm(x), function(x)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert actual.stride() == expected.stride()


@pytest.mark.parametrize("role", [PARAMETER, InputRole("other")], ids=["parameter", "other"])
def test_a_copy_of_an_input_does_not_become_its_alias(role):
    def function(p):
        return aten.copy.default(torch.empty_strided((2, 3), (3, 1)), p)

    p = torch.randn(2, 3)
    gm = trace(function, p, roles=[role])
    normalize(gm, None)
    gm.recompile()
    assert gm(p).data_ptr() != p.data_ptr()


def test_what_a_dropped_copy_overwrote_is_not_computed():
    def function(x, y):
        return aten.copy.default(x.exp(), y * 2)

    gm = trace(function, torch.randn(3), torch.randn(3))
    normalize(gm, None)
    assert targets(gm) == [aten.mul.Tensor]


@pytest.mark.parametrize("make", [torch.zeros_like, torch.ones_like])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_filling_like_a_parameter_does_not_read_it(make, dtype):
    def function(p, x):
        return make(p, dtype=dtype) + x

    inputs = torch.randn(2, 3), torch.randn(2, 3)
    gm = trace(function, *inputs, roles=[PARAMETER])
    normalize(gm, None)
    (parameter,) = placeholders(gm.graph, "parameter")
    assert not parameter.users
    torch.testing.assert_close(gm(*inputs), function(*inputs), rtol=0, atol=0)


def test_empty_memory_like_a_parameter_does_not_read_it_and_keeps_its_layout():
    def function(p):
        return torch.empty_like(p).fill_(3.0)

    parameter = torch.randn(3, 2).t()
    gm = trace(function, parameter, roles=[PARAMETER])
    normalize(gm, None)
    (node,) = placeholders(gm.graph, "parameter")
    assert not node.users
    assert gm(parameter).stride() == parameter.stride()


def test_zeros_like_a_transposed_parameter_keep_its_layout():
    def function(p):
        return torch.zeros_like(p)

    parameter = torch.randn(3, 2).t()
    gm = trace(function, parameter, roles=[PARAMETER])
    normalize(gm, None)
    assert gm(parameter).stride() == parameter.stride()


def test_filling_like_a_batch_is_left_alone():
    def function(x):
        return torch.zeros_like(x)

    gm = trace(function, torch.randn(2, 3))
    normalize(gm, None)
    assert targets(gm) == [aten.zeros_like.default]


def test_a_write_of_an_input_to_itself_is_dropped():
    gm = trace(lambda x: x * 2, torch.randn(3))
    (x,) = placeholders(gm.graph)
    with gm.graph.inserting_before(gm.graph.output_node()):
        write = gm.graph.call_function(aten.copy_.default, (x, x))
    write.meta = dict(x.meta)
    normalize(gm, None)
    assert targets(gm) == [aten.mul.Tensor]


def test_a_write_to_an_input_stays():
    gm = trace(lambda x, y: y * 2, torch.randn(3), torch.randn(3))
    x, _ = placeholders(gm.graph)
    (double,) = [node for node in gm.graph.nodes if node.target is aten.mul.Tensor]
    with gm.graph.inserting_before(gm.graph.output_node()):
        write = gm.graph.call_function(aten.copy_.default, (x, double))
    write.meta = dict(x.meta)
    normalize(gm, None)
    assert aten.copy_.default in targets(gm)


def test_leaves_other_programs_alone():
    def function(x, w):
        return torch.relu(x @ w.t()).sum()

    gm = trace(
        function, torch.randn(2, 3), torch.randn(4, 3), roles=[InputRole("other"), PARAMETER]
    )
    before = gm.code
    normalize(gm, None)
    assert gm.code == before


def test_is_idempotent():
    for captured in (mlp_step(clip=True), evaluation()):
        before = listing(captured)
        normalize(captured.gm, None)
        assert listing(captured) == before


def test_captured_steps_hold_neither_foreach_operators_nor_copies():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        model(x).pow(2).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        torch._foreach_mul_([p.grad for p in model.parameters()], 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    captured = capture(step, torch.randn(3, 4), world_size=2)
    assert not any(map(is_foreach, targets(captured.gm)))
    assert aten.copy.default not in targets(captured.gm)
    assert_same_numerics(execute(captured), execute(captured))


def test_the_users_line_survives_a_split():
    model = nn.Linear(4, 2)

    def step(x):
        model(x).pow(2).mean().backward()
        return torch._foreach_norm([p.grad for p in model.parameters()])

    captured = capture(step, torch.randn(3, 4), world_size=2)
    for node in captured.graph.nodes:
        if node.target is aten.linalg_vector_norm.default:
            assert "torch._foreach_norm([p.grad for p" in node.meta["stack_trace"]


@pytest.mark.parametrize("stage", (0, 3))
def test_what_was_written_back_before_an_update_is_returned_as_it_was(stage):
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(4, 2))
    optimizer = torch.optim.SGD([w], lr=0.1)

    def step(x):
        old = w.detach().clone()
        (x @ w).sum().backward()
        with torch.no_grad():
            w.copy_(old)
        optimizer.step()
        return old

    captured = capture(step, torch.randn(3, 4), world_size=2)
    assert_same_numerics(execute(captured), execute(rewritten(captured, stage=stage)))


@pytest.mark.parametrize("stage", (0, 3))
def test_parameters_that_are_given_one_value_are_updated_each(stage):
    torch.manual_seed(0)
    one, other = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))
    optimizer = torch.optim.SGD([one, other], lr=0.1)

    def step(x):
        (x @ one @ other).sum().backward()
        with torch.no_grad():
            value = torch.tanh(one)
            one.copy_(value)
            other.copy_(value)
        optimizer.step()

    captured = capture(step, torch.randn(3, 4), world_size=2)
    assert_same_numerics(execute(captured), execute(rewritten(captured, stage=stage)))
