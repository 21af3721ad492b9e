"""AOTAutograd traces each parameter's gradient, and no copy of it that ``p.grad`` would be."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import tests.conftest  # noqa: F401  # the backend's name
from tests.kit.programs import _CapturingBackend, _Stop
from zerofx.capture.step import StepCapture
from zerofx.errors import StepError
from zerofx.ir import ops
from zerofx.ir.mesh import Mesh
from zerofx.options import Options


class Plain(nn.Module):
    """A layer of a weight and a bias."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(3))

    def forward(self, x):
        return (nn.functional.linear(x, self.weight) + self.bias).square().mean()


class Expanded(Plain):
    """A weight whose gradient is one number, expanded: in memory it lies otherwise than it."""

    def forward(self, x):
        return self.weight.sum() + (self.bias * x.mean()).square().sum()


class _Half(torch.autograd.Function):
    """Half a parameter's square, whose gradient is the parameter itself."""

    @staticmethod
    def forward(ctx, weight):
        ctx.save_for_backward(weight)
        return weight.square().sum() / 2

    @staticmethod
    def backward(ctx, _):
        return ctx.saved_tensors[0]


class Itself(Plain):
    """A weight whose gradient is the weight, in one memory."""

    def forward(self, x):
        return _Half.apply(self.weight) + (self.bias * x.mean()).square().sum()


def one_backward(model, optimizer, x):
    loss = model(x)
    loss.backward()
    optimizer.step()
    return loss


def scaled(model, optimizer, x):
    """Writes to a gradient in place, as clipping does."""
    loss = model(x)
    loss.backward()
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)
    optimizer.step()
    return loss


def two_backwards(model, optimizer, x):
    for _ in range(2):
        loss = model(x)
        loss.backward()
    optimizer.step()
    return loss


def of_a_gradient(model, optimizer, x):
    loss = model(x)
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + sum(gradient.square().sum() for gradient in gradients)).backward()
    optimizer.step()
    return loss


def dynamos_graph(step, model, monkeypatch):
    """Return the graph that is given to AOTAutograd."""
    graphs = []
    lower = StepCapture.lower

    def seen(self, *arguments):
        graphs.append(self.gm.graph)
        return lower(self, *arguments)

    monkeypatch.setattr(StepCapture, "lower", seen)
    torch._dynamo.reset()
    compiled = torch.compile(step, backend=_CapturingBackend(Mesh.flat(2), Options(stage=2)))
    with pytest.raises(_Stop):
        compiled(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, 4))
    return graphs[-1]


CASES = [
    (one_backward, Plain, 0),
    (scaled, Plain, 0),
    (two_backwards, Plain, 0),
    (one_backward, Expanded, 1),
    (of_a_gradient, Plain, 0),
    (one_backward, Itself, 1),
    (scaled, Itself, 1),
]


@pytest.mark.parametrize(("step", "model", "copied"), CASES)
def test_a_gradient_is_copied_only_where_it_lies_otherwise(step, model, copied, monkeypatch):
    graph = dynamos_graph(step, model(), monkeypatch)
    assert len(graph.find_nodes(op="call_function", target=torch.empty_like)) == copied
    marked = graph.find_nodes(op="call_function", target=ops.gradient)
    places = [node.meta["example_value"].untyped_storage()._cdata for node in marked]
    assert len(set(places)) == len(places), "each is in memory of its own"


@pytest.mark.parametrize(("step", "model"), [case[:2] for case in CASES])
def test_it_trains_as_eager_torch_does(step, model):
    losses = []
    for wrapped in (step, torch.compile(step, backend="zero", options={"lowering": "eager"})):
        torch._dynamo.reset()
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        got = [wrapped(net, optimizer, torch.arange(8.0).reshape(2, 4)).item() for _ in range(2)]
        losses.append((got, [value.clone() for value in net.state_dict().values()]))
    assert losses[0][0] == losses[1][0]
    assert all(map(torch.equal, losses[0][1], losses[1][1]))


class _Reversed(torch.autograd.Function):
    """Returns what it is given, and turns the sign of its gradient; it saves nothing."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class Reversed(Plain):
    def forward(self, x):
        return super().forward(_Reversed.apply(x * self.bias.mean()))


class Checkpointed(Plain):
    """An ``autograd.Function`` that is computed again in backward."""

    def forward(self, x):
        half = torch.utils.checkpoint.checkpoint(_Half.apply, self.weight, use_reentrant=False)
        return half + (self.bias * x.mean()).square().sum()


@pytest.mark.parametrize("model", [Itself, Reversed, Checkpointed])
def test_a_gradient_of_an_own_function_is_not_differentiated_again(model, request):
    """torch.compile leaves out what it depends on, with every backend."""
    net = model()
    compiled = torch.compile(of_a_gradient, backend="zero", options={"lowering": "eager"})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(StepError, match=r"an autograd\.Function computes") as told:
        compiled(net, optimizer, torch.ones(2, 4))
    assert f"at {request.path}" in str(told.value)


def test_a_gradient_of_others_beside_an_own_function_may_be():
    def step(model, optimizer, x):
        of_weight = model.weight.square().sum()
        (slope,) = torch.autograd.grad(of_weight, [model.weight], create_graph=True)
        loss = slope.square().sum() + _Half.apply(model.bias)
        loss.backward()
        optimizer.step()
        return loss

    found = []
    for one in (step, torch.compile(step, backend="zero", options={"lowering": "eager"})):
        torch._dynamo.reset()
        net = Plain()
        found.append(one(net, torch.optim.SGD(net.parameters(), lr=0.1), torch.ones(2, 4)).item())
    assert found[0] == found[1]
