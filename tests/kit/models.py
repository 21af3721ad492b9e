"""Small models, batches and an optimizer that several test modules train.

Sizes are odd so that no shard is free of padding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 33
FEATURES = 6


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def attention(self, x):
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, width))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """A causal language model whose head is its embedding."""

    def __init__(self, layers: int = 1, width: int = 15, checkpoint: bool = False):
        super().__init__()
        self.checkpoint = checkpoint
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads=3) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.checkpoint:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(self.norm(x))


class Mlp(nn.Module):
    def __init__(self, inputs: int = FEATURES, outputs: int = 3, dropout: float = 0.0):
        super().__init__()
        self.body = nn.Linear(inputs, 11)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(11, outputs)

    def forward(self, x):
        return self.head(self.dropout(F.gelu(self.body(x))))


class ConvNet(nn.Module):
    def __init__(self, norm: bool = True):
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)
        self.norm = nn.BatchNorm2d(5) if norm else nn.Identity()
        self.head = nn.Linear(5, 3)

    def forward(self, images):
        return self.head(F.relu(self.norm(self.conv(images))).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]):
        super().__init__()
        self.cell = kind(FEATURES, 7, batch_first=True)
        self.head = nn.Linear(7, 3)

    def forward(self, x):
        return self.head(self.cell(x.unsqueeze(1).expand(-1, 4, -1))[0][:, -1])


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, algorithm 2."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                direction = state["exp_avg"].mul(beta1).add(p.grad, alpha=1 - beta1).sign()
                p.add_(direction, alpha=-group["lr"])
                state["exp_avg"].mul_(beta2).add_(p.grad, alpha=1 - beta2)


# Batches: tuples of ``rows`` examples, the same for the same ``number``.


def tokens(number: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    text = torch.randint(0, VOCABULARY, (rows, 7), generator=_generator(number))
    return text[:, :-1], text[:, 1:]


def features(number: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, FEATURES, generator=_generator(number))
    return x, torch.stack([x.sin().sum(1), x.prod(1), x.abs().mean(1)], dim=1)


def images(number: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, 3, 6, 6, generator=_generator(number))
    return x, x.mean((2, 3))


def _generator(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + number)


def language_loss(model: nn.Module, inputs, targets) -> torch.Tensor:
    return F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())


def squared_loss(model: nn.Module, inputs, targets) -> torch.Tensor:
    return F.mse_loss(model(inputs), targets)
