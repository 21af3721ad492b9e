"""shard_parameters: gathered before use, freed after the last alias, gathered anew for backward."""

import functools
from collections import Counter
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.kit.covering import each_pair, each_value, first, only
from tests.kit.programs import (
    Captured,
    assert_program,
    assert_same_numerics,
    capture,
    clone,
    context_of,
    evaluation,
    execute,
    gathered_bytes,
    gathers_of,
    listing,
    mlp_step,
    nodes_of,
    rewritten,
    run_passes,
    smallest_step,
)
from zerofx import GraphError
from zerofx.ir import ops
from zerofx.ir.aliases import aliases
from zerofx.ir.graph import is_backward, program_order
from zerofx.ir.interface import input_role, placeholders
from zerofx.ir.roles import role
from zerofx.passes.manager import run_pipeline
from zerofx.passes.pipeline import PIPELINE

aten = torch.ops.aten


def sharded(captured, world_size=None, **options):
    return rewritten(captured, world_size, until="shard_parameters", **options)


def gather_waits(captured):
    waits = nodes_of(captured, ops.wait)
    return [node for node in waits if node.args[0].target is ops.all_gather_start]


def directions(captured, name):
    """For each gather of a parameter, the directions of what reads it: ``f``, ``b`` or ``fb``."""
    found = []
    for start in gathers_of(captured, name):
        (wait,) = start.users
        readers = {
            user
            for alias in aliases(wait)
            for user in alias.users
            if user.target is not ops.free and user not in aliases(wait)
        }
        found.append("".join(sorted({"fb"[is_backward(user)] for user in readers}, reverse=True)))
    return found


def assert_freed_right_after_the_last_alias_use(captured):
    order = program_order(captured.graph)
    for wait in gather_waits(captured):
        (free,) = [user for user in wait.users if user.target is ops.free]
        readers = [user for alias in aliases(wait) for user in alias.users if user is not free]
        last = max(readers, key=order.__getitem__)
        between = free.prev
        while between is not last and between.target is ops.free:
            between = between.prev
        assert between is last, f"{free.name} comes later than {last.name}"


def training_step(*parameters, forward, lr=0.05, shape=(4, 6), world_size=2) -> Captured:
    """``forward(x, *parameters)`` makes the loss."""
    optimizer = torch.optim.SGD([p for p in parameters if p.requires_grad], lr=lr)

    def step(x):
        loss = forward(x, *parameters).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    torch.manual_seed(1)
    return capture(step, torch.randn(shape), world_size=world_size)


def parameter(*shape):
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))) / 3)


# The rewrite


def test_gathers_before_the_first_use_and_frees_after_the_last():
    assert_program(
        sharded(smallest_step()),
        """
        input: other [3, 4]
        w: shard of parameter [4]
        all_gather_start = zerofx.all_gather_start(w, 2)
        wait = zerofx.wait(all_gather_start)
        view = view(wait, [4, 2])
        mm = mm(input, view)
        zerofx.free(wait)
        ...
        reduce_scatter_start = zerofx.reduce_scatter_start(view_1, 'mean', 2)
        wait_1 = zerofx.wait(reduce_scatter_start)
        update = zerofx.update(w, wait_1, SGD, 0, None)
        return []
        """,
    )


def test_an_inner_layer_is_gathered_once_per_direction():
    program = sharded(mlp_step(num_layers=4))
    assert directions(program, "2.weight") == ["f", "b"]
    assert directions(program, "4.weight") == ["f", "b"]


def test_the_last_layer_is_kept_from_forward_to_backward():
    program = sharded(mlp_step(num_layers=4))
    assert directions(program, "6.weight") == ["fb"]


def test_nothing_is_gathered_for_backward_that_backward_does_not_read():
    program = sharded(mlp_step(num_layers=4))
    assert directions(program, "0.weight") == ["f"]
    for bias in ("0.bias", "2.bias", "4.bias", "6.bias"):
        assert directions(program, bias) == ["f"]


def test_every_parameter_comes_in_as_a_shard():
    program = sharded(mlp_step())
    for node in placeholders(program.graph, "parameter"):
        assert input_role(node).sharded
        info = program.table[input_role(node).parameter]
        assert list(node.meta["val"].shape) == [info.shard_numel]
    assert not [n for n in placeholders(program.graph, "other") if input_role(n).sharded]


def test_an_evaluation_gathers_each_parameter_once_and_updates_nothing():
    assert_program(
        sharded(evaluation()),
        """
        0_weight: shard of parameter [10]
        0_bias: shard of parameter [2]
        input: other [2, 5]
        2_weight: shard of parameter [6]
        2_bias: shard of parameter [2]
        all_gather_start = zerofx.all_gather_start(0_weight, 2)
        wait = zerofx.wait(all_gather_start)
        view = view(wait, [4, 5])
        t = t(view)
        all_gather_start_1 = zerofx.all_gather_start(0_bias, 2)
        wait_1 = zerofx.wait(all_gather_start_1)
        view_1 = view(wait_1, [4])
        addmm = addmm(view_1, input, t)
        zerofx.free(wait_1)
        zerofx.free(wait)
        relu = relu(addmm)
        all_gather_start_2 = zerofx.all_gather_start(2_weight, 2)
        wait_2 = zerofx.wait(all_gather_start_2)
        view_2 = view(wait_2, [3, 4])
        t_1 = t(view_2)
        all_gather_start_3 = zerofx.all_gather_start(2_bias, 2)
        wait_3 = zerofx.wait(all_gather_start_3)
        slice = slice(wait_3, 0, 0, 3)
        view_3 = view(slice, [3])
        addmm_1 = addmm(view_3, relu, t_1)
        zerofx.free(wait_3)
        zerofx.free(wait_2)
        sum = sum(addmm_1)
        return [sum]
        """,
    )
    assert_same_numerics(execute(evaluation()), execute(sharded(evaluation())))


def test_leaves_a_function_without_parameters_alone():
    def double(x):
        return x * 2

    captured = capture(double, torch.randn(3))
    assert listing(sharded(captured)) == listing(captured)


def test_requires_sharded_gradients():
    program = clone(smallest_step())
    names = ("data_parallel", "shard_optimizer", "shard_parameters")
    passes = [step for step in PIPELINE if step.name in names]
    with pytest.raises(GraphError, match="'shard_parameters' requires sharded_gradients"):
        run_pipeline(program.gm, context_of(program), passes)


def test_an_update_gathers_nothing():
    program = sharded(mlp_step())
    assert len(nodes_of(program, ops.update)) == len(program.table)
    assert not nodes_of(program, aten.copy_.default, ops.take_shard)
    for start in nodes_of(program, ops.all_gather_start):
        assert start.args[0].op == "placeholder"


@pytest.mark.parametrize(
    ("clip", "world_size"), each_pair([False, True], [1, 2, 3, 4], default=[(False, 2), (True, 3)])
)
def test_computes_bitwise_what_stage_2_computes(world_size, clip):
    captured = clone(mlp_step(clip=clip), world_size)
    two = rewritten(captured, until="shard_gradients", stage=2)
    assert_same_numerics(execute(two), execute(sharded(captured)))


def test_the_program_is_the_same_on_every_rank():
    programs = {listing(sharded(mlp_step(clip=True), 4, rank=rank)) for rank in range(4)}
    assert len(programs) == 1


# Aliases


def split(x, w):
    a, b = w.split(3)
    return torch.tanh(x @ a.t()) * (x @ b.t())


def chunk(x, w):
    a, b = w.chunk(2, dim=1)
    return torch.tanh(x[:, :3] @ a.t()) + x[:, 3:] @ b.t()


def unbind(x, w):
    rows = w.unbind(0)
    return sum(torch.tanh((x * row).sum(1)) for row in rows)


def expand(x, w):
    return torch.tanh(x + w[0].expand(4, 6)) * w[1].expand(4, 6)


def select(x, w):
    return torch.tanh(x * w.select(0, 2)) + w[3, 4] * x


def transposed_twice(x, w):
    return torch.tanh(torch.tanh(x @ w.t()) @ w.t().t())


def strided(x, w):
    return torch.tanh(x[:, ::2] @ w[::2, 1:4].t())


def as_strided(x, w):
    return torch.tanh(x @ torch.as_strided(w, (6, 6), (1, 6)))


def diagonal(x, w):
    return torch.tanh(x * w.diagonal())


def reshape(x, w):
    return torch.tanh(x @ w.view(2, 3, 6).permute(2, 0, 1).reshape(6, 6))


def detached(x, w):
    return torch.tanh(x @ w) * (x @ w.detach())


def squeezed(x, w):
    return torch.tanh(x @ w.unsqueeze(0).squeeze(0).t())


def einsum(x, w):
    return torch.tanh(torch.einsum("bi,oi->bo", x, w))


def unfold(x, w):
    return torch.tanh(x @ w.unfold(1, 3, 3).reshape(6, 6))


VIEWS = (
    split,
    chunk,
    unbind,
    expand,
    select,
    transposed_twice,
    strided,
    as_strided,
    diagonal,
    reshape,
    detached,
    squeezed,
    einsum,
    unfold,
)


@functools.cache
def viewing_step(forward):
    """The viewed weight stands between two layers, so that it is gathered for each direction."""

    def between(x, before, w, after):
        return torch.tanh(forward(torch.tanh(x @ before), w)) * torch.tanh(x @ after).sum()

    parameters = parameter(6, 6), parameter(6, 6), parameter(6, 6)
    return training_step(*parameters, forward=between)


@pytest.mark.parametrize(
    "forward", only((split, expand, as_strided), VIEWS), ids=lambda function: function.__name__
)
def test_frees_after_the_last_alias_use(forward):
    captured = viewing_step(forward)
    program = rewritten(captured)
    assert_freed_right_after_the_last_alias_use(program)
    assert all(len(gathers_of(program, info.name)) <= 2 for info in program.table)
    assert_same_numerics(execute(captured), execute(program))


@pytest.mark.parametrize("world_size", only((3,), [3, 4]))
def test_views_of_a_padded_weight_are_rebuilt(world_size):
    captured = clone(
        training_step(
            parameter(5, 7), forward=lambda x, w: torch.tanh(x @ w[:, 2:].t()), shape=(4, 5)
        ),
        world_size,
    )
    assert captured.table[0].place.extent > captured.table[0].numel
    assert_same_numerics(execute(captured), execute(sharded(captured)))


@pytest.mark.nightly
def test_a_channels_last_weight_is_rebuilt_in_its_layout():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Conv2d(3, 2, 2))
    model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    captured = capture(step, torch.randn(2, 2, 4, 4), world_size=4)
    program = sharded(captured)
    for conv in nodes_of(program, aten.convolution.default):
        strides = conv.args[1].meta["val"].stride()
        assert strides[1] == 1, "the gathered weight is not channels-last"
    assert_same_numerics(execute(captured), execute(program))


@pytest.mark.nightly
def test_scalar_and_tiny_parameters_are_sharded_too():
    captured = training_step(
        nn.Parameter(torch.tensor(1.5)),
        parameter(1),
        parameter(6),
        forward=lambda x, scale, shift, bias: torch.tanh(x * scale + shift) * bias,
        world_size=4,
    )
    assert [info.shard_numel for info in captured.table] == [1, 1, 2]
    assert_same_numerics(execute(captured), execute(sharded(captured)))


@pytest.mark.nightly
def test_an_empty_parameter_does_not_break_the_step():
    captured = training_step(
        parameter(6, 6), parameter(0, 6), forward=lambda x, w, e: torch.tanh(x @ w) + e.sum()
    )
    assert_same_numerics(execute(captured), execute(sharded(captured)))


def test_a_frozen_parameter_is_gathered_and_never_updated():
    frozen = parameter(6, 6).requires_grad_(False)
    captured = training_step(
        parameter(6, 6),
        frozen,
        parameter(6, 6),
        forward=lambda x, a, f, b: torch.tanh(torch.tanh(x @ a) @ f) @ b,
    )
    program = sharded(captured)
    (info,) = [info for info in program.table if not info.requires_grad]
    assert directions(program, info.name) == ["f", "b"]
    assert info.index not in {node.args[3] for node in nodes_of(program, ops.update)}
    assert_same_numerics(execute(captured), execute(program))


@pytest.mark.nightly
def test_arithmetic_on_a_parameter_is_repeated_on_every_gathered_copy():
    """A weight norm, a cast, a scale: cheap, and what is rebuilt need not be kept."""
    captured = training_step(
        parameter(6, 6),
        parameter(6, 6),
        parameter(6, 6),
        forward=lambda x, a, w, b: torch.tanh(torch.tanh(x @ a) @ (w * 2 + 1) / w.norm()) @ b,
    )
    program = sharded(captured)
    assert_freed_right_after_the_last_alias_use(program)
    assert_same_numerics(execute(captured), execute(program))


@pytest.mark.nightly
def test_a_penalty_on_the_weights_is_computed_from_whole_ones():
    captured = training_step(
        parameter(6, 6),
        parameter(6, 6),
        forward=lambda x, a, b: torch.tanh(x @ a) @ b + a.abs().sum() + b.norm() ** 2,
    )
    assert_same_numerics(execute(captured), execute(sharded(captured)))


# How often


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        heads = (part.unflatten(2, (2, -1)).transpose(1, 2) for part in self.split_heads(x))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def split_heads(self, x):
        return self.qkv(self.norm1(x)).chunk(3, dim=-1)


class GPT(nn.Module):
    """Tied embedding and head, learned positions."""

    def __init__(self, num_layers, width, vocabulary):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


@functools.cache
def gpt_step(num_layers=1, width=8, vocabulary=64):
    torch.manual_seed(0)
    model = GPT(num_layers, width, vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(tokens):
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return capture(step, torch.randint(0, vocabulary, (2, 9)), world_size=2)


@pytest.mark.nightly
def test_a_gpt_is_right_at_every_stage():
    captured = gpt_step(num_layers=2)
    before = execute(captured)
    for stage in (0, 1, 3):
        program = rewritten(captured, stage=stage)
        assert_same_numerics(before, execute(program), bitwise=False)


@pytest.mark.slow(reason="whole programs are rewritten and run")
def test_no_parameter_is_gathered_more_than_twice():
    for captured in (mlp_step(8, 16), gpt_step()):
        program = sharded(captured)
        starts = nodes_of(program, ops.all_gather_start)
        count = Counter(start.meta["zerofx"].parameter for start in starts)
        assert set(count) == {info.index for info in program.table}
        assert max(count.values()) <= 2


def test_a_tied_embedding_is_not_kept_between_its_two_ends():
    program = sharded(gpt_step())
    assert directions(program, "tokens.weight") == ["f", "fb"]
    first, second = gathers_of(program, "tokens.weight")
    order = program_order(program.graph)
    (free,) = [user for user in next(iter(first.users)).users if user.target is ops.free]
    blocks = [order[node] for node in gathers_of(program, "blocks.0.up.weight")]
    assert order[free] < blocks[0] < order[second]


def test_a_layer_used_in_a_loop_is_gathered_once_per_direction():
    def forward(x, first, recurrent, last):
        hidden = torch.tanh(x @ first)
        for _ in range(4):
            hidden = torch.tanh(hidden @ recurrent)
        return torch.tanh(hidden @ last)

    captured = training_step(parameter(6, 6), parameter(6, 6), parameter(6, 6), forward=forward)
    program = sharded(captured)
    names = [info.name for info in program.table]
    assert directions(program, names[1]) == ["f", "b"]
    assert_freed_right_after_the_last_alias_use(program)
    assert_same_numerics(execute(captured), execute(program))


@pytest.mark.nightly
def test_a_loop_over_two_layers_gathers_each_once_per_direction():
    def forward(x, first, a, b, last):
        hidden = torch.tanh(x @ first)
        for _ in range(3):
            hidden = torch.tanh(torch.tanh(hidden @ a) @ b)
        return torch.tanh(hidden @ last)

    parameters = [parameter(6, 6) for _ in range(4)]
    captured = training_step(*parameters, forward=forward)
    program = sharded(captured)
    assert [len(gathers_of(program, info.name)) for info in program.table] == [1, 2, 2, 1]
    assert_same_numerics(execute(captured), execute(program))


@pytest.mark.parametrize("accumulate", only(("local",), ["local", "sharded"]))
def test_micro_batches_gather_at_most_twice_each(accumulate):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batches):
        for i in range(2):
            model(batches[i]).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    captured = capture(step, torch.randn(2, 4, 6), world_size=2)
    program = sharded(captured, accumulate=accumulate)
    assert captured.num_backwards == 2
    for info in program.table:
        assert len(gathers_of(program, info.name)) <= 4
    assert max(gathered_bytes(program)) <= largest_two_consecutive(captured)
    assert_freed_right_after_the_last_alias_use(program)
    assert_same_numerics(execute(captured), execute(program), bitwise=False)


@pytest.mark.nightly
def test_recomputed_layers_read_the_copy_gathered_for_backward():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(3)]
    model = nn.ModuleList(blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        for block in model:
            x = checkpoint(block, x, use_reentrant=False)
        x.pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    captured = capture(step, torch.randn(4, 6), world_size=2)
    program = sharded(captured)
    for info in program.table:
        assert len(gathers_of(program, info.name)) <= 2
    assert directions(program, "0.0.weight") == ["f", "b"]
    assert_freed_right_after_the_last_alias_use(program)
    assert_same_numerics(execute(captured), execute(program))


@pytest.mark.nightly
def test_a_generator_and_its_critic_share_the_budget_of_two_backwards():
    torch.manual_seed(0)
    generator, critic = nn.Linear(4, 5), nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 1))
    updates_generator = torch.optim.SGD(generator.parameters(), lr=0.1)
    updates_critic = torch.optim.SGD(critic.parameters(), lr=0.1)

    def step(noise, real):
        (critic(generator(noise).detach()) - critic(real)).mean().backward()
        updates_critic.step()
        critic.zero_grad()
        critic(generator(noise)).mean().neg().backward()
        updates_generator.step()
        generator.zero_grad()
        critic.zero_grad()

    captured = capture(step, torch.randn(3, 4), torch.randn(3, 5), world_size=2)
    program = sharded(captured)
    assert all(len(gathers_of(program, info.name)) <= 4 for info in program.table)
    assert_freed_right_after_the_last_alias_use(program)
    assert_same_numerics(execute(captured), execute(program))


# After the update


def test_updated_values_read_after_the_step_are_gathered_anew():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(x):
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            return model(x).pow(2).mean(), model[0].weight.norm()

    captured = capture(step, torch.randn(4, 6), world_size=2)
    for program in (sharded(captured), rewritten(captured)):
        order = program_order(program.graph)
        update = {node.args[3]: node for node in nodes_of(program, ops.update)}
        for info in program.table:
            gathers = gathers_of(program, info.name)
            late = [node for node in gathers if order[node] > order[update[info.index]]]
            assert len(late) == 1
            assert late[0].args[0] is update[info.index]
        assert_same_numerics(execute(captured), execute(program))


def test_what_is_computed_before_an_update_and_read_after_it_is_a_shard_until_then():
    torch.manual_seed(0)
    model = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(x):
        old = model.weight.detach().clone()
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return old, old.t() @ old, (old + 1).to(torch.bfloat16)

    captured = capture(step, torch.randn(4, 6), world_size=2)
    program = sharded(captured)
    order = program_order(program.graph)
    (update,) = (n for n in nodes_of(program, ops.update) if n.args[3] == 0)
    (copy,) = nodes_of(program, aten.clone.default)
    assert role(copy) == "on_shard" and order[copy] < order[update]
    (gather,) = (user for user in copy.users if user.target is ops.all_gather_start)
    assert order[gather] > order[update]
    assert_same_numerics(execute(captured), execute(program))


def test_a_narrow_cast_made_before_an_update_and_read_after_it_has_the_old_value():
    torch.manual_seed(0)
    model = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(x):
        with torch.no_grad():
            low = model.weight.to(torch.bfloat16)
        loss = (x @ low.float()).mean() + model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return low, low.t() * 2

    captured = capture(step, torch.randn(4, 6), world_size=2)
    assert_same_numerics(execute(captured), execute(sharded(captured)))


def test_two_optimizer_steps_in_one_program_read_what_the_first_wrote():
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(x, y):
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model(y).pow(2).mean().backward()
        optimizer.step()

    captured = capture(step, torch.randn(4, 6), torch.randn(4, 6), world_size=2)
    program = sharded(captured)
    assert len(nodes_of(program, ops.update)) == 4
    assert_same_numerics(execute(captured), execute(program))


def test_a_step_with_two_backwards_does_not_disturb_the_next_capture():
    """torch up to 2.14 remembers, for all later compilations, whose ``.grad`` was last None."""
    first, second = nn.Linear(6, 3), nn.Linear(6, 3)

    def step_twice(x):
        for _ in range(2):
            first(x).sum().backward()
            first.zero_grad()

    def step_once(x):
        second(x).sum().backward()
        seen = second.weight.grad.sum(), second.bias.grad.sum()
        second.zero_grad()
        return seen

    capture(step_twice, torch.randn(4, 6))
    assert len(nodes_of(capture(step_once, torch.randn(4, 6)), ops.gradient)) == 2


def test_a_hand_written_update_writes_the_shard():
    torch.manual_seed(0)
    model = nn.Linear(6, 3)

    def step(x):
        model(x).pow(2).mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1 * p.grad)
                p.grad = None

    captured = capture(step, torch.randn(4, 6), world_size=2)
    program = sharded(captured)
    writes = nodes_of(program, aten.copy_.default)
    assert len(writes) == 2
    for write in writes:
        assert write.args[0].op == "placeholder"
        assert write.meta["val"].dim() == 1
    assert_same_numerics(execute(captured), execute(program))
    # Once for forward.  Gathering the new values only to cut them again would be waste.
    assert len(nodes_of(program, ops.all_gather_start)) == 2


def test_averaged_weights_follow_on_shards():
    torch.manual_seed(0)
    model, average = nn.Linear(6, 3), nn.Linear(6, 3).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)

    captured = capture(step, torch.randn(4, 6), world_size=2)
    program = sharded(captured)
    assert not gathers_of(program, "average.weight"), "it is only read on shards"
    assert_same_numerics(execute(captured), execute(program))


@functools.cache
def clamping_step():
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.1, 0.1)

    return capture(step, torch.randn(4, 6), world_size=2)


@functools.cache
def normalizing_step():
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        with torch.no_grad():
            model.weight.div_(model.weight.norm(dim=1, keepdim=True))
            model.bias.copy_(model.weight[0, :3])
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return capture(step, torch.randn(4, 6), world_size=2)


@functools.cache
def assigning_step():
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        model.weight.data = model.weight.data * 0.9
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for p in model.parameters():
            p.data = p.data.clamp(-0.1, 0.1)

    return capture(step, torch.randn(4, 6), world_size=2)


@functools.cache
def zeroing_step():
    torch.manual_seed(0)
    model = nn.Embedding(7, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(tokens):
        model(tokens).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.weight[0].zero_()

    return capture(step, torch.arange(6), world_size=2)


@pytest.mark.parametrize(
    ("step", "stage"),
    each_pair([clamping_step, normalizing_step, assigning_step, zeroing_step], range(4)),
)
def test_a_parameter_may_be_written_before_and_after_its_update(step, stage):
    captured = step()
    program = rewritten(captured, stage=stage)
    assert_same_numerics(execute(captured), execute(program), bitwise=False)


def test_a_value_that_is_assigned_is_written_to_the_shard():
    program = sharded(assigning_step())
    assert not nodes_of(program, aten.set_.source_Tensor)
    writes = nodes_of(program, aten.copy_.default)
    assert [write.args[0].op for write in writes] == ["placeholder"] * 2
    assert all(write.meta["val"].dim() == 1 for write in writes)


def test_weights_clamped_after_the_update_stay_on_shards():
    assert len(gathers_of(sharded(clamping_step()), "weight")) == 1


def test_a_parameter_overwritten_by_a_view_of_another_is_refused_or_right():
    """``a.copy_(b.t())``: no rank's shard of ``b.t()`` is a shard of ``b``."""
    a, b = parameter(6, 6), parameter(6, 6)

    def step(x):
        with torch.no_grad():
            a.copy_(b.t())
            return (x @ a).sum()

    captured = capture(step, torch.randn(4, 6), world_size=2)
    try:
        program = sharded(captured)
    except GraphError as error:
        assert "has no flat shard" in str(error)
    else:
        assert_same_numerics(execute(captured), execute(program))


def test_a_returned_copy_of_a_parameter_is_whole_and_not_freed():
    w = parameter(6, 6)

    def step(x):
        with torch.no_grad():
            return w * 2, w.clone(), x @ w

    captured = capture(step, torch.randn(4, 6), world_size=2)
    assert_same_numerics(execute(captured), execute(sharded(captured)))


# Memory


def gather_units(captured):
    """Bytes of each module with parameters of its own, in order of use, without repetitions."""
    sizes: Counter[str] = Counter()
    for info in captured.table:
        sizes[info.name.rpartition(".")[0]] += info.place.extent * info.dtype.itemsize
    names = [
        captured.table[start.meta["zerofx"].parameter].name.rpartition(".")[0]
        for start in nodes_of(rewritten(captured, prefetch=False), ops.all_gather_start)
    ]
    return [sizes[name] for before, name in pairwise([None, *names]) if name != before]


def largest_two_consecutive(captured):
    return max(a + b for a, b in pairwise(gather_units(captured)))


@pytest.mark.parametrize(
    "step, options",
    first(1, each_value(("mlp", "gpt", "gpt with a large vocabulary"), ({}, {"prefetch": False}))),
    ids=str,
)
def test_gathered_bytes_never_exceed_two_consecutive_units(step, options):
    captured = {
        "mlp": lambda: mlp_step(8, 16),
        "gpt": gpt_step,
        "gpt with a large vocabulary": lambda: gpt_step(vocabulary=1024),
    }[step]()
    program = rewritten(captured, **options)
    timeline = gathered_bytes(program)
    assert max(timeline) <= largest_two_consecutive(captured)
    assert timeline[-1] == 0


def test_without_prefetch_one_unit_is_whole_at_a_time():
    captured = mlp_step(8, 16)
    layer = (16 * 16 + 16) * 4
    assert max(gathered_bytes(rewritten(captured, prefetch=False))) <= layer


def test_peak_does_not_grow_with_depth():
    peaks = {max(gathered_bytes(rewritten(mlp_step(n, 16)))) for n in (4, 8)}
    assert len(peaks) == 1


def test_traffic_is_at_most_three_times_the_parameters():
    for captured in (mlp_step(8, 16), gpt_step()):
        program = rewritten(captured)
        size = sum(info.place.extent * info.dtype.itemsize for info in program.table)
        moved = 0
        for start in nodes_of(program, ops.is_collective):
            if role(start) == "reduce_scalar":
                continue
            whole = start if start.target is ops.all_gather_start else start.args[0]
            moved += whole.meta["val"].numel() * whole.meta["val"].element_size()
        assert 2 * size <= moved <= 3 * size


def test_traffic_is_twice_the_parameters_at_stages_1_and_2():
    for stage in (1, 2):
        program = rewritten(mlp_step(), stage=stage)
        for target in (ops.reduce_scatter_start, ops.all_gather_start):
            moved = [start.meta["zerofx"].parameter for start in nodes_of(program, target)]
            assert sorted(moved) == [info.index for info in program.table]


def test_counts_what_it_did():
    program = clone(mlp_step(num_layers=4))
    reports = run_passes(program)
    counts = reports["shard_parameters"].counts
    assert counts["sharded parameters"] == 8
    assert counts["gathers"] == len(nodes_of(program, ops.all_gather_start)) == 10
