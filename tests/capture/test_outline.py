"""An outline of a graph tells what running all of it does: what is written to, what results are."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from zerofx.compat import outline

FIELDS = ("output_type", "raw_type", "base_idx", "dynamic_dims", "requires_grad")


def told(metadata):
    """Return what AOTAutograd's metadata say of writes and results."""
    return [
        metadata.input_info,
        [[getattr(info, field) for field in FIELDS] for info in metadata.output_info],
        metadata.num_intermediate_bases,
        metadata.tokens,
        metadata.grad_enabled_mutation,
        metadata.mutated_inp_runtime_indices,
        metadata.mutated_graph_handled_indices_seen_by_autograd,
    ]


@pytest.fixture
def found(monkeypatch):
    """Has each graph run whole too, and compares; lists how each was told: "" or why not."""
    by_outline, reasons = outline._by_outline, []

    def compared(gm, collect):
        try:
            by_it = by_outline(gm, collect)
        except outline.UnknownError as reason:
            reasons.append(str(reason))
            raise
        whole = collect()
        assert told(by_it) == told(whole)
        reasons.append("")
        return whole

    monkeypatch.setattr(outline, "_by_outline", compared)
    return reasons


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("of_out", torch.ones(6, 4))

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


@torch.compiler.allow_in_graph
def counts_in_hiding(x, seen):
    """Writes to what it is given, which its name does not say."""
    seen.add_(x.detach().mean(0))
    return x * 2


@torch.compiler.allow_in_graph
def changes_in_hiding(x, weight):
    with torch.no_grad():
        weight.mul_(0.5)
    return x * 2


def plain(model, optimizer, x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def clipped(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach(), x.view(-1)


def accumulating(model, optimizer, x):
    for part in x.chunk(2):
        (model(part).square().mean() / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
    return x


def writing(model, optimizer, x):
    x.mul_(2)
    model.seen[0] = x.mean()
    model.seen += 1
    torch.add(model.seen, 1, out=model.seen)
    model.seen.view(2, 2).t_()
    return plain(model, optimizer, x)


def evaluating(model, optimizer, x):
    with torch.no_grad():
        out = model.first(x)
        return out, out[:1], out.t(), model.first.weight, model.seen.view(2, 2)


def averaging(model, optimizer, x):
    loss = plain(model, optimizer, x)
    with torch.no_grad():
        torch._foreach_mul_([model.seen], 0.9)
        model.seen.lerp_(model.last.weight.detach().mean(1), 0.1)
    return loss


def counting(model, optimizer, x):
    return plain(lambda x: model(counts_in_hiding(x, model.seen)), optimizer, x)


def dropping(model, optimizer, x):
    return plain(lambda x: F.dropout(model(x), 0.5), optimizer, x)


def run(step, dynamic=False):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    @torch.compile(backend="zero", dynamic=dynamic, options={"lowering": "eager"})
    def compiled(x):
        return step(model, optimizer, x)

    for rows in (6, 8) if dynamic else (6, 6):
        compiled(torch.randn(rows, 4))
    return model


STEPS = [plain, clipped, accumulating, writing, evaluating, averaging, dropping]


@pytest.mark.parametrize("step", STEPS)
def test_an_outline_tells_what_the_whole_graph_does(step, found):
    run(step)
    assert set(found) == {""}


@pytest.mark.parametrize("step", [plain, accumulating])
def test_an_outline_tells_it_of_sizes_that_are_symbols(step, found):
    run(step, dynamic=True)
    assert set(found) == {""}


def test_batch_norms_statistics_are_written(found):
    """Which no name says, nor, of a tensor without elements, its version."""
    model = run(plain)
    assert set(found) == {""}
    assert model.norm.running_mean.abs().sum() > 0
    assert model.norm.num_batches_tracked == 2


def halving_through_data(model, optimizer, x):
    """Writes what has a version of its own."""
    with torch.no_grad():
        return halves_in_hiding(model.first(x), model.last.weight)


@torch.compiler.allow_in_graph
def halves_in_hiding(x, weight):
    weight.data.mul_(0.5)
    return x * 2


def changing(model, optimizer, x):
    with torch.no_grad():
        return changes_in_hiding(model.first.bias, model.last.weight) + x.sum()


@pytest.mark.parametrize(
    ("step", "halved"), [(counting, False), (changing, True), (halving_through_data, True)]
)
def test_functions_that_are_not_torchs_are_left_to_the_whole_graph(step, halved, found):
    model = run(step)
    assert all("is no function of torch" in reason for reason in found)
    torch.manual_seed(0)
    if halved:
        weight = model.state_dict()["last.weight"]
        torch.testing.assert_close(weight, Net().last.weight.detach() / 4)  # two calls
    else:
        assert model.seen.any()


def test_a_write_that_an_outline_lacks_is_found(found, monkeypatch):
    """By the versions of what Dynamo has run."""
    monkeypatch.setattr(outline, "_may_act", lambda *_: False)
    run(plain)
    assert set(found) == {"an input is written to otherwise"}


def adding_in_bfloat16(model, optimizer, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.last(model.first(x).relu())
        hidden += model.seen
    return plain(torch.Tensor.float, optimizer, hidden)


def grading_without_gradients(model, optimizer, x):
    out = model.last(model.first(x))
    with torch.no_grad():
        (grad,) = torch.autograd.grad(out, [model.last.weight], grad_outputs=model.of_out)
        model.last.weight.sub_(grad)
    return out.detach()


@pytest.mark.parametrize("step", [adding_in_bfloat16, grading_without_gradients])
def test_modes_are_put_back_where_an_outline_does_not_run(step, found):
    run(step)
    assert any("does not run" in reason for reason in found)
    assert torch.is_grad_enabled() and outline._depth_of_autocast() == 0
    linear, x = nn.Linear(4, 4), torch.randn(2, 4)
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = linear(x)  # casts weights once within one, and no longer
        with torch.no_grad():
            linear.weight.zero_()
            linear.bias.zero_()
    assert not out.any()


def test_transforms_of_functions_are_left_to_the_whole_graph(found):
    def mapped(model, optimizer, x):
        return plain(lambda x: torch.func.vmap(model.first)(x), optimizer, x)

    run(mapped)
    assert found and all(found)


def test_inputs_in_one_memory_are_left_to_the_whole_graph(found):
    seen = torch.zeros(8)

    @torch.compile(backend="zero", options={"lowering": "eager"})
    def step(one, other):
        return one * 2, other + 1

    step(seen[:4], seen[4:])
    assert all(found)
