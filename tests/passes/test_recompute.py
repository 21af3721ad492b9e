"""recompute: what torch.utils.checkpoint drops is computed again in backward, late and once."""

import functools
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import tests.conftest  # noqa: F401
from tests.kit import models
from tests.kit.covering import only
from tests.kit.programs import (
    assert_same_numerics,
    capture,
    clone,
    evaluation,
    execute,
    listing,
    mlp_step,
    nodes_of,
    rewritten,
    run_passes,
)
from zerofx.ir.graph import is_backward, program_order
from zerofx.ir.roles import provenance, role

aten = torch.ops.aten


def recomputed(captured, **options):
    return rewritten(captured, until="recompute", stage=0, **options)


def trained(model, forward, *args):
    """A captured step that minimises ``forward``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(*inputs):
        loss = forward(*inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return capture(step, *args, world_size=2)


@functools.cache
def checkpointed_mlp(checkpointed=True):
    """Two blocks of Linear, GELU, Linear."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(2)]
    model = nn.ModuleList(blocks)

    def forward(x):
        for block in model:
            x = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
        return x.pow(2).mean()

    return trained(model, forward, torch.randn(3, 4))


def operator_counts(captured):
    names = (aten.addmm.default, aten.gelu.default, aten.mm.default)
    return Counter(node.target for node in nodes_of(captured, *names))


def saved_for_backward(captured):
    """Floating forward results that backward reads, in elements, inputs and views left out."""
    found = set()
    for node in captured.graph.nodes:
        if node.op != "call_function" or is_backward(node) or role(node) == "recompute":
            continue
        readers = [user for user in node.users if is_backward(user)]
        if readers and node.target not in (aten.t.default, aten.detach.default):
            found.add(node)
    return sum(node.meta["val"].numel() for node in found)


def test_repeats_checkpointed_nodes_in_backward():
    program = clone(checkpointed_mlp())
    reports = run_passes(program, until="recompute", stage=0)
    assert reports["recompute"].counts["recomputed"] > 0
    plain, repeated = operator_counts(checkpointed_mlp(False)), operator_counts(program)
    # The first Linear and the GELU of each block.  Nobody reads what the second Linear makes.
    assert repeated[aten.addmm.default] == plain[aten.addmm.default] + 2
    assert repeated[aten.gelu.default] == plain[aten.gelu.default] + 2
    assert repeated[aten.mm.default] == plain[aten.mm.default]


def test_repeated_nodes_say_so_and_stand_in_backward():
    program = recomputed(checkpointed_mlp())
    repeated = [node for node in program.graph.nodes if role(node) == "recompute"]
    assert len([node for node in repeated if node.target is aten.gelu.default]) == 2
    for node in repeated:
        assert is_backward(node)
        assert provenance(node).inserted_by == "recompute"


def test_backward_no_longer_reads_what_was_dropped():
    assert saved_for_backward(recomputed(checkpointed_mlp())) < saved_for_backward(
        recomputed(checkpointed_mlp(False))
    )
    for gelu in nodes_of(recomputed(checkpointed_mlp()), aten.gelu.default):
        directions = {is_backward(user) for user in gelu.users}
        assert directions == {is_backward(gelu)}


def test_repeats_as_late_as_the_first_reader():
    """Each block is computed again when backward comes to it, not at backward's start."""
    program = recomputed(checkpointed_mlp())
    order = program_order(program.graph)
    gelus = [node for node in nodes_of(program, aten.gelu.default) if is_backward(node)]
    backwards = nodes_of(program, aten.gelu_backward.default)
    assert len(gelus) == len(backwards) == 2
    # The last block's gradient is finished before the first block is computed again.
    assert order[backwards[0]] < order[gelus[1]] or order[backwards[1]] < order[gelus[0]]


def test_turned_off_the_values_are_kept():
    program = clone(checkpointed_mlp())
    reports = run_passes(program, until="recompute", stage=0, recompute=False)
    assert reports["recompute"].skipped == "turned off"
    assert operator_counts(program) == operator_counts(checkpointed_mlp(False))
    assert_same_numerics(execute(checkpointed_mlp()), execute(program))


def test_leaves_steps_without_checkpoints_alone():
    for captured in (mlp_step(), evaluation(), checkpointed_mlp(False)):
        assert listing(recomputed(captured)) == listing(captured)


def test_is_bitwise_the_program_before_it():
    before = execute(checkpointed_mlp(False))
    assert_same_numerics(before, execute(checkpointed_mlp()))
    assert_same_numerics(before, execute(recomputed(checkpointed_mlp())))
    for stage in range(4):
        program = rewritten(checkpointed_mlp(), stage=stage)
        assert_same_numerics(before, execute(program))


def test_random_draws_are_kept_and_what_surrounds_them_is_repeated():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 4))

    def forward(x):
        return checkpoint(model, x, use_reentrant=False).pow(2).mean()

    captured = trained(model, forward, torch.randn(3, 4))
    program = recomputed(captured)
    draws = [
        node
        for node in program.graph.nodes
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    ]
    assert len(draws) == 1
    assert len([n for n in nodes_of(program, aten.gelu.default) if is_backward(n)]) == 1
    assert_same_numerics(execute(captured), execute(program))


@torch.library.custom_op("zerofx_tests::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(x)


@noise.register_fake
def _(x):
    return torch.empty_like(x)


def test_an_operator_of_somebody_elses_is_kept_for_it_may_draw():
    torch.manual_seed(0)
    first, second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(x):
        def block(x):
            hidden = first(x)
            return second((hidden * noise(hidden.detach())).relu()).tanh()

        return checkpoint(block, x, use_reentrant=False).pow(2).mean()

    captured = trained(nn.ModuleList([first, second]), forward, torch.randn(3, 4))
    program = recomputed(captured)
    assert len(nodes_of(program, torch.ops.zerofx_tests.noise.default)) == 1
    assert_same_numerics(execute(captured), execute(program))


@pytest.mark.parametrize("dropout", only((0.3,), [0.0, 0.3]))
def test_attention_is_repeated_unless_it_draws(dropout):
    torch.manual_seed(0)
    model = nn.ModuleDict({"qkv": nn.Linear(4, 12), "out": nn.Linear(4, 4)})

    def block(x):
        heads = (part.unsqueeze(1) for part in model["qkv"](x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True, dropout_p=dropout)
        return model["out"](mixed.squeeze(1))

    def forward(x):
        return checkpoint(block, x, use_reentrant=False).pow(2).mean()

    captured = trained(model, forward, torch.randn(2, 3, 4))
    assert_same_numerics(execute(captured), execute(recomputed(captured)))
    assert_same_numerics(execute(captured), execute(rewritten(captured)))


def test_every_backward_repeats_anew():
    """What the first micro-batch computed again must not be kept for the second."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batches):
        for i in range(2):
            checkpoint(model, batches[i], use_reentrant=False).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    captured = capture(step, torch.randn(2, 3, 4), world_size=2)
    program = recomputed(captured)
    assert len([n for n in nodes_of(program, aten.gelu.default) if is_backward(n)]) == 2
    assert_same_numerics(execute(captured), execute(program))


@pytest.mark.nightly
def test_a_loss_with_two_backwards_repeats_for_each():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        y = checkpoint(model, x, use_reentrant=False)
        y.pow(2).mean().backward(retain_graph=True)
        y.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    captured = capture(step, torch.randn(3, 4), world_size=2)
    assert_same_numerics(execute(captured), execute(recomputed(captured)))


@pytest.mark.nightly
def test_nested_checkpoints_repeat_the_inner_one():
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    outer = nn.Linear(4, 4)
    model = nn.ModuleList([inner, outer])

    def block(x):
        return torch.tanh(outer(checkpoint(inner, x, use_reentrant=False)))

    def forward(x):
        return checkpoint(block, x, use_reentrant=False).pow(2).mean()

    captured = trained(model, forward, torch.randn(3, 4))
    program = recomputed(captured)
    assert [n for n in nodes_of(program, aten.gelu.default) if is_backward(n)]
    assert_same_numerics(execute(captured), execute(program))


def test_a_selective_policy_keeps_what_it_says():
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    def policy(ctx, op, *args, **kwargs):
        if op is aten.addmm.default:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def contexts():
        return create_selective_checkpoint_contexts(policy)

    def forward(x):
        return checkpoint(model, x, use_reentrant=False, context_fn=contexts).pow(2).mean()

    captured = trained(model, forward, torch.randn(3, 4))
    program = recomputed(captured)
    assert not [n for n in nodes_of(program, aten.addmm.default) if is_backward(n)]
    assert len([n for n in nodes_of(program, aten.gelu.default) if is_backward(n)]) == 1
    assert_same_numerics(execute(captured), execute(program))


@pytest.mark.nightly
def test_the_compiled_lowering_takes_a_checkpointed_attention():
    """Its tags are obeyed once: Inductor refuses them on an operator that might draw.

    And of a layer norm that is repeated, a part may be repeated far away, and read by nobody.
    """

    def step(model, optimizer, *batch):
        with torch.autocast("cpu", torch.bfloat16):
            loss = models.language_loss(model, *batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def losses(lowering):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = models.Gpt(layers=2, checkpoint=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compiled = torch.compile(step, backend="zero", options={"lowering": lowering})
        return [compiled(model, optimizer, *models.tokens(number, 2)) for number in range(2)]

    torch.testing.assert_close(losses("inductor"), losses("eager"), rtol=1e-3, atol=0)
