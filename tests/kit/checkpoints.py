"""A small model with one of everything, trained, saved and loaded, for the tests of checkpoints.

Functions travel to ranks by pickle: they are at the top level.
"""

from __future__ import annotations

import contextlib
import copy
import resource
from collections.abc import Collection, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
import zerofx
from tests.kit.models import Mlp, features, squared_loss


class Everything(nn.Module):
    """Tied, frozen, 0-dim, empty and channels-last parameters, and buffers.  Odd sizes."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 5)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.deep = nn.Parameter(torch.randn(2, 3, 2, 2))
        self.mixed = nn.Parameter(torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.randn(4, 3).t())

    def forward(self, tokens):
        self.calls.add_(1)
        x = self.embedding(tokens)
        seen = self.frozen(self.body(x))
        rest = self.deep.square().sum() + self.mixed.square().sum() + self.empty.sum()
        return self.head(x).logsumexp(-1).mean() * self.scale + seen.square().mean() + rest


def step(model, optimizer, tokens):
    loss = model(tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def built(seed: int = 0, make=torch.optim.AdamW, **values):
    model = Everything(seed)
    groups = [
        {"params": list(model.parameters())[:3], "lr": 3e-3},
        {"params": list(model.parameters())[3:]},
    ]
    return model, make(groups, **{"lr": 1e-2, **values})


def zero(stage: int = 3, **options):
    options = {"stage": stage, "lowering": "eager", **options}
    return torch.compile(step, backend="zero", options=options)


def train(compiled, pair, numbers) -> list[float]:
    """This rank's losses, of its part of each batch of 12."""
    losses = []
    for number in numbers:
        batch = torch.randint(0, 11, (12,), generator=torch.Generator().manual_seed(number))
        if dist.is_initialized():
            batch = batch.chunk(dist.get_world_size())[dist.get_rank()]
        losses.append(compiled(*pair, batch).item())
    return losses


def pair_of(seed: int = 0, make=torch.optim.AdamW, **model):
    """A small model with an optimizer that has states; nothing is compiled."""
    torch.manual_seed(seed)
    made = Mlp(**model)
    optimizer = make(made.parameters(), lr=1e-2)
    inputs, targets = features(seed, 4)
    squared_loss(made, inputs, targets[:, : made.head.out_features]).backward()
    optimizer.step()
    optimizer.zero_grad()
    return made, optimizer


def states(pair) -> tuple[dict, dict]:
    return copy.deepcopy((pair[0].state_dict(), pair[1].state_dict()))


def assert_same(one, other, path="") -> None:
    """Bitwise, dtypes and structure included."""
    assert type(one) is type(other), (path, type(one), type(other))
    if isinstance(one, dict):
        assert one.keys() == other.keys(), (path, one.keys() ^ other.keys())
        for key in one:
            assert_same(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{path}/{index}")
    elif isinstance(one, torch.Tensor):
        assert one.shape == other.shape and one.dtype == other.dtype, (path, one, other)
        bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
        assert torch.equal(*bits), path
    else:
        assert one == other, (path, one, other)


def refused(error, path, pair, **options) -> str:
    """The words with which loading is refused; nothing has changed then."""
    before = states(pair)
    with pytest.raises(error) as caught:
        zerofx.load(path, *pair, **options)
    assert_same(states(pair), before)
    return str(caught.value)


@contextlib.contextmanager
def file_size_limit(nbytes: int, ranks: Collection[int] = (0,)) -> Iterator[None]:
    """Have the kernel refuse to write behind so many bytes of any file, in these ranks."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if not dist.is_initialized() or dist.get_rank() in ranks:
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))  # Python ignores SIGXFSZ
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def save_trained(path, stage, extra=None, steps=3, make=torch.optim.AdamW, **options):
    """Train, save, and go on; losses of the steps after, and what was saved."""
    torch._dynamo.reset()
    pair, compiled = built(make=make), zero(stage, **options)
    train(compiled, pair, range(steps))
    saved = states(pair)
    zerofx.save(path, *pair, extra=extra)
    return train(compiled, pair, range(steps, steps + 2)), saved, states(pair)


def load_and_train(path, stage, is_bound, make=torch.optim.AdamW, steps=3, **options):
    """Load into other objects, of other values, and train on."""
    torch._dynamo.reset()
    pair, compiled = built(seed=1, make=make), zero(stage, **options)
    if is_bound:
        train(compiled, pair, range(7))
    extra = zerofx.load(path, *pair)
    loaded = states(pair)
    return train(compiled, pair, range(steps, steps + 2)), loaded, states(pair), extra
