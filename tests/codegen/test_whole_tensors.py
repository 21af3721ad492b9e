"""An update that needs whole tensors is divided into shards' parts and one that needs them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zerofx.codegen.rewrite.elementwise import UpdateError
from zerofx.codegen.rewrite.whole_tensors import divide, newton_schulz_flops, whole_update_flops
from zerofx.codegen.trace.arguments import group_values, read_arguments
from zerofx.codegen.trace.trace import trace_update
from zerofx.ir.parameters import ParameterInfo

SHAPE = (6, 4)


def optimizer_of(update):
    """A Muon whose step is ``update(group, p, state)``."""

    class Own(torch.optim.Muon):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    update(group, p, self.state[p])

    return Own([nn.Parameter(torch.ones(SHAPE))], lr=0.1)


def divided(optimizer, state=(), shape=SHAPE):
    """The parts of an update whose state holds these moments."""
    moments = {name: torch.zeros(24) for name in state}
    info = ParameterInfo(
        0, "p", shape, torch.empty(shape).stride(), torch.float32, torch.device("cpu"), True, 2
    )
    values = group_values(optimizer.param_groups[0])
    group = read_arguments(values, shard_shape=None, inputs=())
    known = read_arguments(moments, shard_shape=(24,), inputs=moments)
    update = trace_update(optimizer, info, group=group, state=known, sharded=False)
    return divide(update, shape)


def operators(gm):
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    return [n.target.__name__.split(".")[0] for n in calls if hasattr(n.target, "_schema")]


@pytest.mark.parametrize("state", ((), ("momentum_buffer",)))
def test_muon_iterates_between_two_elementwise_parts(state):
    muon = torch.optim.Muon([nn.Parameter(torch.ones(SHAPE))], ns_steps=1)
    parts = divided(muon, state)
    made = [] if state else ["zeros_like"]
    assert operators(parts.first) == [*made, "lerp_", "lerp", "_to_copy"]
    assert operators(parts.core) == [
        *("permute", "linalg_vector_norm", "clamp", "div_", "permute", "mm", "addmm", "addmm"),
        "permute",
    ]
    assert operators(parts.last) == ["mul_", "add_"]
    assert parts.core_dtype is torch.bfloat16


def test_parts_on_pieces_are_the_whole_update():
    torch.manual_seed(0)
    p, expected = (nn.Parameter(torch.ones(SHAPE)) for _ in range(2))
    eager = torch.optim.Muon([expected], lr=0.1)
    expected.grad = torch.randn(SHAPE)
    parts = divided(torch.optim.Muon([p], lr=0.1))
    group = group_values(eager.param_groups[0])
    scalars = read_arguments(group, shard_shape=None, inputs=()).scalars
    pieces = [slice(0, 5), slice(5, 5), slice(5, 24)]
    shards = [p.detach().view(-1)[piece].clone() for piece in pieces]
    inputs = [[expected.grad.view(-1)[piece], *scalars] for piece in pieces]
    begun = [parts.run_first(*pair) for pair in zip(shards, inputs, strict=True)]
    whole = torch.cat([taken for taken, _, _ in begun]).view(SHAPE)
    result = parts.core(whole, *begun[0][1]).reshape(-1)
    moments = []
    for shard, values, (_, _, left), piece in zip(shards, inputs, begun, pieces, strict=True):
        state, changed = parts.run_last(shard, values, left, result[piece])
        moments.append(state["momentum_buffer"])
        assert not changed
    eager.step()
    assert torch.equal(torch.cat(shards).view(SHAPE), expected)
    assert torch.equal(torch.cat(moments).view(SHAPE), eager.state[expected]["momentum_buffer"])


def test_an_elementwise_step_has_no_core():
    parts = divided(optimizer_of(lambda group, p, state: p.sub_(p.grad, alpha=group["lr"])))
    assert parts.core is None
    assert operators(parts.last) == ["sub_"]


def test_numbers_of_the_state_are_computed_once():
    def update(group, p, state):
        state["step"] = state.get("step", torch.tensor(0.0)) + 1
        p.sub_(p.grad / p.grad.norm() / state["step"], alpha=group["lr"])

    parts = divided(optimizer_of(update))
    assert "add" in operators(parts.first) and "add" not in operators(parts.last)


def test_a_moment_written_through_a_view_is_written_first():
    def update(group, p, state):
        state["m"] = torch.zeros_like(p)
        state["m"].data.add_(p.grad)
        p.sub_(state["m"] @ state["m"].T @ state["m"], alpha=group["lr"])

    parts = divided(optimizer_of(update))
    assert "add_" in operators(parts.first)


def decays_first(group, p, state):
    p.mul_(0.9)
    p.sub_(p @ p.T @ p)


def writes_a_moment_inside(group, p, state):
    state["m"].div_(state["m"].norm())
    p.sub_(state["m"])


def takes_two(group, p, state):
    p.sub_(state["m"] @ p.grad.T @ p.grad)


def gives_two(group, p, state):
    state["m"] = p.grad @ p.grad.T @ p.grad
    p.sub_(state["m"] @ state["m"].T @ state["m"]).add_(state["m"])


def gives_a_number(group, p, state):
    state["norm"] = p.grad.norm()
    p.sub_(p.grad)


@pytest.mark.parametrize(
    ("update", "words"),
    [
        (decays_first, "changes the parameter before it"),
        (writes_a_moment_inside, "writes to what the rest of the step reads"),
        (takes_two, "takes 2 and gives 1 tensors"),
        (gives_two, "gives 2 tensors"),
        (gives_a_number, "takes 1 and gives 1 tensors"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_operation_and_line(update, words):
    where = rf"Own cannot run on shards: `aten\.\S+` at {__file__}:\d+ .*{words}.*stage.: 0"
    with pytest.raises(UpdateError, match=where):
        divided(optimizer_of(update), state=("m",))


def test_work_is_counted_as_torch_counts_it():
    """By the products of a short side m and a long side n, in each of five steps."""
    from torch.utils.flop_counter import FlopCounterMode

    for shape in ((6, 4), (4, 6), (5, 5), (1, 7)):
        p = nn.Parameter(torch.ones(shape))
        muon = torch.optim.Muon([p])
        p.grad = torch.ones(shape)
        with FlopCounterMode(display=False) as counted:
            muon.step()
        assert whole_update_flops(muon) == {id(p): counted.get_total_flops()}


def test_only_optimizers_on_the_list_may_need_whole_tensors():
    p = nn.Parameter(torch.ones(SHAPE))
    assert whole_update_flops(torch.optim.AdamW([p])) == {}
    own = optimizer_of(lambda group, p, state: None)
    (flops,) = whole_update_flops(own).values()
    assert flops == newton_schulz_flops(SHAPE, {"ns_steps": 5})
