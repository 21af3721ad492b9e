"""The models that the benchmarks train, and their sizes on the command line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

HEAD_WIDTH = 64


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """A causal language model in plain torch."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        width, heads = sizes.width, sizes.width // HEAD_WIDTH
        self.embedding = nn.Embedding(sizes.vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(sizes.layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, sizes.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embedding(tokens))))


class Llama(nn.Module):
    """Hugging Face's Llama, from a configuration: nothing is downloaded."""

    def __init__(self, sizes: Sizes):
        from transformers import (
            LlamaConfig,
            LlamaForCausalLM,
        )  # an extra: pip install .[huggingface]

        super().__init__()
        config = LlamaConfig(
            vocab_size=sizes.vocabulary,
            hidden_size=sizes.width,
            intermediate_size=3 * sizes.width,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.width // HEAD_WIDTH,
            num_key_value_heads=sizes.width // HEAD_WIDTH,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config)

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model.model.layers

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens).logits


class PlainLlamaBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self._attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape

        def heads(y: torch.Tensor) -> torch.Tensor:
            return y.view(rows, length, -1, HEAD_WIDTH).transpose(1, 2)

        query, key = rotated(heads(self.query(x))), rotated(heads(self.key(x)))
        mixed = F.scaled_dot_product_attention(query, key, heads(self.value(x)), is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, width))


def rotated(heads: torch.Tensor) -> torch.Tensor:
    """Turn pairs of features by their position.  Shapes: [rows, heads, length, features].

    Source: rotary position embedding, Su et al. 2021.
    """
    length, features = heads.shape[-2:]
    powers = torch.arange(0, features, 2, device=heads.device, dtype=torch.float32) / features
    positions = torch.arange(length, device=heads.device, dtype=torch.float32)
    angles = positions[:, None] * 10_000.0**-powers
    cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
    one, other = heads.chunk(2, dim=-1)
    return torch.cat((one * cos - other * sin, other * cos + one * sin), dim=-1)


class PlainLlama(nn.Module):
    """Llama in plain torch: rotary positions, RMSNorm, SwiGLU; needs nothing but torch."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(PlainLlamaBlock(sizes.width) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


MODELS = {"gpt": Gpt, "llama": Llama, "plain llama": PlainLlama}


@dataclass(frozen=True)
class Sizes:
    """Which model, how large.  Heads are 64 wide."""

    model: str = "gpt"
    vocabulary: int = 1024
    width: int = 320
    layers: int = 8

    def build(self) -> nn.Module:
        return MODELS[self.model](self)

    def num_parameters(self) -> int:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self.build().parameters())

    def widened(self, num_parameters: float) -> Sizes:
        """Return the narrowest sizes, the layers kept, with at least so many parameters."""
        sizes = self
        while sizes.num_parameters() < num_parameters:
            sizes = replace(sizes, width=sizes.width + HEAD_WIDTH)
        return sizes

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser, **layers: object) -> None:
        parser.add_argument("--model", choices=MODELS, default=Sizes.model)
        parser.add_argument("--vocabulary", type=int, default=Sizes.vocabulary)
        parser.add_argument("--width", type=int, default=Sizes.width, help="a multiple of 64")
        parser.add_argument("--layers", type=int, **{"default": Sizes.layers, **layers})

    @staticmethod
    def of(arguments: argparse.Namespace) -> Sizes:
        return Sizes(arguments.model, arguments.vocabulary, arguments.width, arguments.layers)

    def __str__(self) -> str:
        return (
            f"{self.model} of {self.num_parameters() / 1e6:.1f}M parameters, {self.layers} layers"
        )


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy of every next token.  Shapes: [rows, length + 1] -> []."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def batches_of(
    sizes: Sizes, rows: int, length: int, rank: int, device: torch.device
) -> list[torch.Tensor]:
    """Return eight batches of random tokens, the same whenever this rank asks."""
    generator = torch.Generator().manual_seed(rank)
    shape = (rows, length + 1)
    return [
        torch.randint(0, sizes.vocabulary, shape, generator=generator).to(device) for _ in range(8)
    ]
