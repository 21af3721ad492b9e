"""On a mesh of two axes a step trains as one process does that sees all ranks' batches."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grad_norm_

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
import zerofx
from tests.kit.ranks import (  # noqa: F401
    ranks_fixture,
    ranks_on_sockets_fixture,
)
from tests.kit.traffic import traffic_of
from tests.kit.trainings import program_of
from zerofx.__main__ import main
from zerofx.backend import zero
from zerofx.cost.traffic import wire_bytes
from zerofx.errors import BudgetError
from zerofx.runtime.comm.agreement import AgreementError

AXES = ("node", "gpu")
STEPS = 4
ROWS = 2
MICRO_BATCHES = 2
SHAPES = ((2, 2), (2, 3))


@functools.cache
def mesh_of(nodes: int, gpus: int):
    return init_device_mesh("cpu", (nodes, gpus), mesh_dim_names=AXES)


class Tied(nn.Module):
    """One weight is used twice; the elements of hardly any parameter divide by 2 or 3."""

    def __init__(self, vocabulary: int = 13) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 7)
        self.hidden = nn.Linear(7, 7)
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, vocabulary)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.norm(torch.tanh(self.hidden(self.embedding(tokens)))))


def loss_of(model, tokens):
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def backward(model, tokens):
    loss = loss_of(model, tokens) / MICRO_BATCHES
    loss.backward()
    return loss.detach()


def update(model, optimizer):
    clip_grad_norm_(model.parameters(), 0.3)
    optimizer.step()
    optimizer.zero_grad()


def clipped(model, optimizer, batches):
    loss = loss_of(model, batches.flatten(0, 1))
    loss.backward()
    update(model, optimizer)
    return loss.detach()


def in_a_loop(model, optimizer, batches):
    losses = [backward(model, tokens) for tokens in batches]
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses).sum()


def scaled(model, optimizer, batches, scaler):
    loss = loss_of(model, batches.flatten(0, 1))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return loss.detach()


class Trainer:
    """A model, an optimizer, and what trains them: one process, or a rank if it has ``options``."""

    def __init__(
        self, form: str, options=None, make=torch.optim.AdamW, vocabulary: int = 13
    ) -> None:
        def compiled(step):
            return step if options is None else torch.compile(step, backend="zero", options=options)

        torch.manual_seed(0)
        self.form, self.model = form, Tied(vocabulary)
        self.optimizer = make(self.model.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        self.steps = {
            f.__name__: compiled(f) for f in (clipped, in_a_loop, scaled, backward, update)
        }

    def __call__(self, batches) -> torch.Tensor:
        """Train on micro-batches; return the loss."""
        if self.form == "across_calls":
            losses = [self.steps["backward"](self.model, tokens) for tokens in batches]
            self.steps["update"](self.model, self.optimizer)
            return torch.stack(losses).sum()
        if self.form == "scaled":
            return self.steps["scaled"](self.model, self.optimizer, batches, self.scaler)
        return self.steps[self.form](self.model, self.optimizer, batches)

    def whole(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


FORMS = ("clipped", "in_a_loop", "scaled", "across_calls")


def batches_of(number: int, of: int) -> torch.Tensor:
    """Micro-batches of all ranks: int64 [ranks, MICRO_BATCHES, ROWS, 6]."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(13, (of, MICRO_BATCHES, ROWS, 6), generator=generator)


def train_alone(form: str, of: int, first: int = 0, trainer=None, make=torch.optim.AdamW):
    """One process's losses and parameters, of all ranks' rows."""
    trainer = trainer or Trainer(form, make=make)
    losses = []
    for number in range(first, STEPS):
        batches = batches_of(number, of).transpose(0, 1).flatten(1, 2)
        losses.append(trainer(batches).double())
    return torch.stack(losses), trainer.whole()


def train_as_rank(trainer, first: int = 0, last: int = STEPS):
    """The mean of the ranks' losses, and the parameters."""
    ranks = dist.get_world_size()
    found = [trainer(batches_of(number, ranks)[dist.get_rank()]) for number in range(first, last)]
    losses = torch.stack(found).double()
    dist.all_reduce(losses)
    return losses / ranks, trainer.whole()


def on_mesh(shape, stage, **options):
    stages = dict(zip(AXES, reversed(stage), strict=True))
    return {"process_group": mesh_of(*shape), "stage": stages, "lowering": "eager", **options}


def train_on_mesh(form, shape, stage, options, make=torch.optim.AdamW):
    return train_as_rank(Trainer(form, on_mesh(shape, stage, **options), make))


def assert_trained(results, alone) -> None:
    """All ranks have the parameters of one process, and bitwise the same."""
    losses, parameters = alone
    for of_rank, state in results:
        torch.testing.assert_close(of_rank, losses, rtol=0, atol=1e-6)
        for name, value in parameters.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-5)
            assert torch.equal(state[name], results[0][1][name]), name


@pytest.mark.slow(reason="four ranks train: the least that has two axes")
def test_shards_over_one_axis_and_averages_over_both(ranks):
    results = ranks(4).run(train_on_mesh, "clipped", (2, 2), (3, 0), {})
    assert_trained(results, train_alone("clipped", 4))


PAIRS = ((1, 0), (2, 0), (3, 0), (2, 1), (3, 1), (3, 2))
"""The stages over the inner and the outer axis that differ."""


@pytest.mark.nightly
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stage", PAIRS)
@pytest.mark.parametrize("shape", SHAPES)
def test_trains_as_one_process(ranks, shape, stage, form):
    of = shape[0] * shape[1]
    results = ranks(of).run(train_on_mesh, form, shape, stage, {})
    assert_trained(results, train_alone(form, of))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    (
        {"lowering": "inductor"},
        {"accumulate": "local"},
        {"accumulate": "sharded"},
        {"bucket": False},
        {"memory_budget": 10**6},
        {"offload": "optimizer"},
        {"offload": "optimizer,params"},
        {"offload": "activations"},
        {"validate": True},
        {"check_order": True},
    ),
    ids=str,
)
@pytest.mark.parametrize("stage", ((3, 0), (3, 1), (3, 2), (3, 3), (2, 1), (2, 2)))
@pytest.mark.parametrize("form", ("clipped", "across_calls"))
def test_trains_so_with_every_option(ranks, form, stage, options):
    if stage not in ((3, 0), (3, 3)) and "params" in str(options):
        options = {"offload": "optimizer"}  # at stage 3 alone, and with updates where shards are
    results = ranks(4).run(train_on_mesh, form, (2, 2), stage, options)
    assert_trained(results, train_alone(form, 4))


@pytest.mark.nightly
@pytest.mark.parametrize("stage", ((1, 0), (3, 0), (1, 1), (3, 1), (3, 3)))
def test_trains_so_over_sockets(ranks_on_sockets, stage):
    results = ranks_on_sockets(6).run(train_on_mesh, "clipped", (3, 2), stage, {})
    assert_trained(results, train_alone("clipped", 6))


def train_with_one_stage(form, shape, stage):
    options = {"process_group": mesh_of(*shape), "stage": stage, "lowering": "eager"}
    return train_as_rank(Trainer(form, options))


@pytest.mark.nightly
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_an_int_is_the_stage_of_both_axes(ranks, stage, form):
    shape = (2, 3) if form == "clipped" else (2, 2)
    of = shape[0] * shape[1]
    results = ranks(of).run(train_with_one_stage, form, shape, stage)
    assert_trained(results, train_alone(form, of))


# A second shard inside the node


SECOND = {"secondary_shard": "gpu"}


@pytest.mark.nightly
@pytest.mark.parametrize("form", FORMS)
def test_trains_so_with_a_second_shard(ranks, form):
    results = ranks(4).run(train_on_mesh, form, (2, 2), (3, 3), SECOND)
    assert_trained(results, train_alone(form, 4))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    (
        {"lowering": "inductor"},
        {"accumulate": "local"},
        {"bucket": False},
        {"memory_budget": 10**6},
        {"offload": "optimizer"},
        {"validate": True},
        {"check_order": True},
    ),
    ids=str,
)
def test_trains_so_with_a_second_shard_and_every_option(ranks, options):
    results = ranks(4).run(train_on_mesh, "across_calls", (2, 2), (3, 3), SECOND | options)
    assert_trained(results, train_alone("across_calls", 4))


def gathers_between_nodes(path):
    """Gathers along the outer axis of each call, of a training with much between its updates."""
    options = on_mesh((2, 2), (3, 3), **SECOND)
    trainer = Trainer("across_calls", options)
    batch = batches_of(0, 4)[dist.get_rank()][0]
    model, optimizer = trainer.model, trainer.optimizer
    evaluate = torch.compile(torch.no_grad()(loss_of), backend="zero", options=options)
    trainer.steps["backward"](model, batch)
    function = program_of(trainer.steps["backward"]).function
    traffic = traffic_of(function.communicator.along("node"))
    found = []

    def count(call, *args):
        traffic.reset()
        result = call(*args)
        found.append(traffic.sent_bytes["gather"] > 0)
        return result

    count(trainer.steps["backward"], model, batch)  # another micro-batch
    first = count(evaluate, model, batch)
    count(trainer.steps["update"], model, optimizer)
    count(trainer.steps["backward"], model, batch)
    second = count(evaluate, model, batch)
    zerofx.save(path, model, optimizer)
    with zerofx.full_params(model), torch.no_grad():
        whole = {name: p.detach().clone() for name, p in model.named_parameters()}
        for p in model.parameters():
            p.mul_(1.5)
    third = count(evaluate, model, batch)
    zerofx.load(path, model, optimizer)
    fourth = count(evaluate, model, batch)
    model.load_state_dict({name: 1.5 * value for name, value in whole.items()}, strict=False)
    fifth = count(evaluate, model, batch)
    assert second == fourth != first
    assert third == fifth != second
    alone = Tied()
    with torch.no_grad():
        for name, p in alone.named_parameters():
            p.copy_(1.5 * whole[name])
        torch.testing.assert_close(loss_of(alone, batch), third)
    return found


@pytest.mark.nightly
def test_a_second_shard_is_filled_once_after_each_change(ranks, tmp_path):
    changed, same = True, False
    wanted = [same, same, same, changed, same, changed, changed, changed]
    for found in ranks(4).run(gathers_between_nodes, str(tmp_path / "saved"), timeout_s=300):
        assert found == wanted


# Muon, of which owners compute updates


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6, bias=False) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def train_matrices(options, of: int, rank: int | None):
    torch.manual_seed(0)
    model = Matrices().layers
    optimizer = torch.optim.Muon(model.parameters(), lr=0.02)

    def step(x):
        for layer in model:
            x = x + torch.tanh(layer(x))
        x.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step = step if options is None else torch.compile(step, backend="zero", options=options)
    for number in range(STEPS):
        batch = torch.randn(of, 4, 6, generator=torch.Generator().manual_seed(number))
        step(batch.flatten(0, 1) if rank is None else batch[rank])
    return {name: value.clone() for name, value in model.state_dict().items()}


def train_matrices_on_mesh(stage):
    return train_matrices(on_mesh((2, 2), stage), 4, dist.get_rank())


@pytest.mark.nightly
@pytest.mark.parametrize("stage", ((1, 0), (3, 0), (1, 1), (3, 2), (3, 3)))
def test_owners_have_whole_tensors(ranks, stage):
    """They are ranks of one node, or all of them where all have shards of their own."""
    alone = train_matrices(None, 4, None)
    for state in ranks(4).run(train_matrices_on_mesh, stage):
        for name, value in alone.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-5)


# Checkpoints, and what else is between steps


def save_on_mesh(path, stage):
    """Train two steps, save, and go on; and be whole in between."""
    trainer = Trainer("clipped", on_mesh((2, 2), stage))
    train_as_rank(trainer, 0, 2)
    zerofx.save(path, trainer.model, trainer.optimizer)
    with zerofx.full_params(trainer.model):
        whole = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    for name, value in trainer.model.state_dict().items():
        assert name not in whole or torch.equal(value, whole[name])
    results = train_as_rank(trainer, 2)
    zerofx.unshard(trainer.model, trainer.optimizer)
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, results[1][name])
    return results


def load_as_ranks(path, options):
    trainer = Trainer("clipped", options)
    zerofx.load(path, trainer.model, trainer.optimizer)
    return train_as_rank(trainer, 2)


def load_on_mesh(path, shape, stage):
    return load_as_ranks(path, on_mesh(shape, stage))


def load_on_one_axis(path):
    return load_as_ranks(path, {"stage": 3, "lowering": "eager"})


@pytest.mark.nightly
@pytest.mark.parametrize("stage", ((1, 0), (3, 0), (2, 2), (3, 1), (3, 2), (3, 3)))
def test_a_checkpoint_loads_on_any_other_mesh(ranks, stage, tmp_path):
    path = str(tmp_path / "saved")
    results = ranks(4).run(save_on_mesh, path, stage)
    losses, parameters = train_alone("clipped", 4)
    assert_trained(results, (losses[2:], parameters))
    for found in (
        ranks(4).run(load_on_mesh, path, (2, 2), (3, 0)),
        ranks(4).run(load_on_mesh, path, (2, 2), (3, 2)),
        ranks(4).run(load_on_mesh, path, (2, 2), (3, 3)),
        ranks(4).run(load_on_one_axis, path),
    ):
        assert_trained(found, (losses[2:], parameters))
    trainer = Trainer("clipped")
    zerofx.load(path, trainer.model, trainer.optimizer)
    assert_trained([train_alone("clipped", 4, 2, trainer)], (losses[2:], parameters))


@pytest.mark.nightly
def test_ranks_that_hold_the_same_shard_save_it_once(ranks, tmp_path):
    ranks(4).run(save_on_mesh, str(tmp_path / "saved"), (3, 0))
    reader = FileSystemReader(str(tmp_path / "saved"))
    saved = reader.read_metadata().state_dict_metadata
    tensors = [of for of in saved.values() if hasattr(of, "chunks") and len(of.size)]
    assert len(tensors) > 3 * len(list(Tied().parameters()))
    for of in tensors:
        assert sum(chunk.sizes.numel() for chunk in of.chunks) == of.size.numel()
    assert max(len(of.chunks) for of in tensors) >= 4


def count_on_mesh(form, shape, stage):
    """Bytes at the collectives along each axis in one step, and those that the program says."""
    # Of 16 tokens all shards have equal parts: sockets fill up those that an all-reduce cuts.
    trainer = Trainer(form, on_mesh(shape, stage, bucket=True), vocabulary=16)
    train_as_rank(trainer, 0, 2)
    function = max((f for f in zero.functions if f.programs), key=lambda f: f.number)
    traffics = {axis: traffic_of(function.communicator.along(axis)) for axis in AXES}
    for traffic in traffics.values():
        traffic.reset()
    trainer(batches_of(2, shape[0] * shape[1])[dist.get_rank()])
    (program,) = function.programs
    said = {axis: wire_bytes(program.gm, dist.get_world_size(), axis).total for axis in AXES}
    torch._dynamo.reset()
    return {axis: sum(t.sent_bytes.values()) for axis, t in traffics.items()}, said


@pytest.mark.nightly
@pytest.mark.parametrize("stage", (*PAIRS, (1, 1), (2, 2), (3, 3)))
def test_collectives_along_each_axis_send_what_the_program_says(ranks, stage):
    for sent, said in ranks(4).run(count_on_mesh, "in_a_loop", (2, 2), stage):
        assert sent == said and all(said.values())


def train_deferred(shape, stage):
    with zerofx.deferred_init(exact=True):
        trainer = Trainer("clipped", on_mesh(shape, stage))
    return train_as_rank(trainer)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", ((3, 0), (3, 2), (3, 3)))
def test_parameters_that_are_made_late_are_those_made_at_once(ranks, stage):
    results = ranks(4).run(train_deferred, (2, 2), stage)
    assert_trained(results, train_alone("clipped", 4))


def train_on_unnamed(stage):
    options = {"process_group": init_device_mesh("cpu", (2, 2)), "stage": stage}
    return train_as_rank(Trainer("clipped", {**options, "lowering": "eager"}))


@pytest.mark.nightly
def test_axes_without_names_are_one(ranks):
    assert_trained(ranks(4).run(train_on_unnamed, 3), train_alone("clipped", 4))


@pytest.mark.nightly
@pytest.mark.parametrize("stage", ((2, 0), (3, 2), (3, 3)))
def test_a_dumped_program_runs_as_all_ranks(ranks, stage, tmp_path, capsys):
    ranks(4).run(train_on_mesh, "clipped", (2, 2), stage, {"dump": str(tmp_path)})
    (program,) = (tmp_path / "rank1").glob("*/*_prefetch.py")
    assert f"OUTER_STAGE = {stage[1]}" in program.read_text()
    assert main(["run", str(program), "--random"]) == 0
    assert "rank 1 of 4, which ran in turns" in capsys.readouterr().out
    (explained,) = (tmp_path / "rank1").glob("*/explain.txt")
    for axis in (f"stage {stage[0]} over gpu and {stage[1]} over node", "along node (2)"):
        assert axis in explained.read_text()


# What is refused


def refuse(words, options) -> None:
    with pytest.raises(ValueError, match=words):
        Trainer("clipped", options)(batches_of(0, 1)[0])


def refuse_meshes():
    def given(mesh, stage):
        return {"process_group": mesh, "stage": stage, "lowering": "eager"}

    mesh = mesh_of(2, 2)
    refuse("node may have 0 or 1", given(mesh, {"gpu": 1, "node": 3}))
    offloaded = {**given(mesh, {"gpu": 3, "node": 1}), "offload": "params"}
    refuse("its outer axis has stage 1. Give it stage 3 or 0", offloaded)
    second = {**given(mesh, 3), "secondary_shard": "node"}
    refuse("must name the inner axis, the last, of a mesh of two axes", second)
    outside = {**given(mesh, {"gpu": 3, "node": 1}), "secondary_shard": "gpu"}
    refuse("needs parameters that are sharded over both axes: stage 3", outside)
    refuse("over both axes: stage 3", {**outside, "stage": {"gpu": 3, "node": 0}})
    delayed = {**given(mesh, {"gpu": 3, "node": 2}), "offload": "optimizer", "delayed_update": True}
    refuse("delayed_update needs .* its outer axis has stage 2", delayed)
    refuse("names rack, and the mesh .* has the axes node, gpu", given(mesh, {"rack": 0, "gpu": 3}))
    refuse("leaves out node", given(mesh, {"gpu": 3}))
    refuse("process_group is none", {"stage": {"gpu": 3, "node": 0}})
    unnamed = init_device_mesh("cpu", (2, 2))
    refuse("not one with names", given(unnamed, {"gpu": 3, "node": 0}))
    tensor_parallel = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    refuse(r"pass these, e.g. mesh\['dp'\]", given(tensor_parallel, 3))
    joint = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a,b", "c"))
    refuse("names with a comma are those of several axes", given(joint, 3))
    three = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))
    refuse("mesh of 3 dimensions", given(three, 3))
    swapped = dist.device_mesh.DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=AXES)
    refuse("has all of the world's ranks, in their order", given(swapped, {"gpu": 3, "node": 0}))


@pytest.mark.nightly
def test_what_is_no_mesh_of_data_parallel_ranks_is_refused(ranks):
    ranks(4).run(refuse_meshes)


def disagree():
    stage = (3, 0) if dist.get_rank() else (2, 0)
    with pytest.raises(AgreementError, match="stage"):
        train_on_mesh("clipped", (2, 2), stage, {})


@pytest.mark.nightly
def test_ranks_with_other_stages_say_so(ranks):
    ranks(4).run(disagree)


def bind_twice():
    trainer = Trainer("clipped", on_mesh((2, 2), (3, 0)))
    train_as_rank(trainer, 0, 1)
    flat = torch.compile(clipped, backend="zero", options={"stage": 3, "lowering": "eager"})
    with pytest.raises(ValueError, match="bound to another process group"):
        flat(trainer.model, trainer.optimizer, batches_of(0, 4)[dist.get_rank()])


@pytest.mark.nightly
def test_a_model_on_a_mesh_is_not_one_on_all_ranks(ranks):
    ranks(4).run(bind_twice)


def exceed_budget():
    options = on_mesh((2, 2), (3, 3), offload="auto", memory_budget=10, **SECOND)
    with pytest.raises(BudgetError, match="this step allocates"):
        Trainer("clipped", options)(batches_of(0, 4)[dist.get_rank()])


@pytest.mark.nightly
def test_a_budget_that_second_shards_do_not_fit_in_is_refused(ranks):
    ranks(4).run(exceed_budget)
