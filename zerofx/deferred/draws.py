"""Random numbers that are drawn later, as if they had been drawn when they were asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Draw:
    """The source of one operation's random numbers: a generator's state, or a seed.

    ``generator`` says whether the operation was given one, or uses its device's.
    """

    device: torch.device
    has_generator: bool
    state: torch.Tensor | None = None
    seed: int = 0

    def set(self, generator: torch.Generator) -> None:
        if self.state is not None:
            generator.set_state(self.state)
        else:
            generator.manual_seed(self.seed)

    def own_generator(self) -> torch.Generator:
        """A generator as the operation has found the one that it was given."""
        generator = torch.Generator(self.device)
        self.set(generator)
        return generator

    @contextlib.contextmanager
    def by_default(self) -> Iterator[None]:
        """Have the device's generator as the operation has found it; then as it was."""
        generator = default_generator(self.device)
        before = generator.get_state()
        self.set(generator)
        try:
            yield
        finally:
            generator.set_state(before)


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that a device's operations draw from if they are given none."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index]
    return torch.default_generator


def draw_seed(generator: torch.Generator) -> int:
    """One number from a generator, to seed another with."""
    with torch.inference_mode(False), torch.no_grad():
        drawn = torch.randint(2**62, (), generator=generator, device=generator.device)
        return int(drawn)
