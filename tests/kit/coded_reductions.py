"""What a program computes whose reductions are of rounded gradients, in plain torch."""

import functools

import torch
from torch import nn

from tests.kit import programs
from tests.kit.programs import Captured, capture
from zerofx.codegen.wires.blocks import dequantize, quantize

NODES = (("node", 2), ("gpu", 2))


class _Axes:
    """Stands for a device mesh, of which options ask the names."""

    mesh_dim_names = ("node", "gpu")


AXES = _Axes()


def rounded(flat: torch.Tensor, code: str) -> torch.Tensor:
    """The float32 values that come back of a wire."""
    if code == "bfloat16":
        return flat.to(torch.bfloat16).float()
    return dequantize(quantize(flat, code), code, 1, flat.numel(), torch.float32)


def summed(flats, code: str, divisor: int) -> torch.Tensor:
    """The float32 sum of rounded values, in order."""
    total = rounded(flats[0], code)
    for flat in flats[1:]:
        total = total + rounded(flat, code)
    return total / divisor if divisor > 1 else total


def saves(flat: torch.Tensor, code: str, ranks: int) -> bool:
    """Whether the wires of a buffer's parts are no longer than they are."""
    part = flat[: -(-flat.numel() // ranks)]
    there = part.to(torch.bfloat16) if code == "bfloat16" else quantize(part.nan_to_num(), code)
    return there.nbytes <= part.nbytes


class FormulaReference(programs._Reference):
    """Computes reductions of gradients by the formula, over each axis with a code in ``CODES``.

    Over those of ``FEEDBACK`` it adds what was lost before, by the number of elements.
    """

    CODES: dict[str, str] = {}
    FEEDBACK: frozenset[str] = frozenset()

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.lost: dict[tuple[str, int], torch.Tensor] = {}

    def corrected(self, flat, axis, code, ranks):
        """What is sent of a buffer, and where what is lost of it goes."""
        flat = flat.nan_to_num(0.0)  # what nothing has filled is NaN here
        if axis not in self.FEEDBACK:
            return flat
        key = axis, flat.numel()
        flat = flat.float() + self.lost.get(key, 0.0)
        numel = -(-flat.numel() // ranks)
        parts = [rounded(part, code) for part in flat.split(numel)]
        self.lost[key] = flat - torch.cat(parts)
        return flat

    def reduce_scatter_start(self, flat, reduction, world_size, axis="data"):
        if axis not in self.CODES or not saves(flat, self.CODES[axis], world_size):
            return super().reduce_scatter_start(flat, reduction, world_size, axis)
        divisor = self.mesh.world_size if reduction == "mean" else 1
        place = self.mesh.ranks_along(axis).index(self.mesh.rank)
        sent = self._along(axis, self.corrected(flat, axis, self.CODES[axis], world_size))
        parts = [one.view(world_size, -1)[place] for one in sent]
        return summed(parts, self.CODES[axis], divisor).to(flat.dtype)

    def all_reduce_start(self, input, reduction, axis="data"):
        if axis not in self.CODES or reduction != "mean":
            return super().all_reduce_start(input, reduction, axis)
        code, mine = self.CODES[axis], self.mesh.ranks_along(axis)
        flat = self.corrected(input, axis, code, len(mine))
        sent = self._along(axis, flat)
        numel = -(-flat.numel() // len(sent))
        padded = [
            torch.cat([one, one.new_zeros(len(sent) * numel - one.numel())]).view(-1, numel)
            for one in sent
        ]
        sums = [summed(parts, code, self.mesh.world_size) for parts in zip(*padded, strict=True)]
        back = torch.cat([rounded(one, code) for one in sums])[: flat.numel()]
        if axis in self.FEEDBACK:
            place = mine.index(self.mesh.rank)
            own = self.lost[axis, flat.numel()][place * numel :][:numel]
            gone = (sums[place] - rounded(sums[place], code))[: own.numel()]
            own += gone * self.mesh.world_size
        return back.to(input.dtype)


def by_the_formula(captured: Captured, monkeypatch, codes: dict[str, str], feedback=(), **options):
    """Run the program without wires where reductions round what they are given."""
    with monkeypatch.context() as patched:
        patched.setattr(FormulaReference, "CODES", codes)
        patched.setattr(FormulaReference, "FEEDBACK", frozenset(feedback))
        patched.setattr(programs, "_Reference", FormulaReference)
        return programs.execute(programs.rewritten_by_rank(captured, **options))


@functools.cache
def wide_mlp(
    world_size: int = 2,
    axes=(),
    outer_stage: int = 0,
    clip: bool = False,
    num_batches: int = 1,
    dtype: torch.dtype = torch.float32,
    num_steps: int = 1,
) -> Captured:
    """Layers whose gradients have several blocks for each rank, none of them full for all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(37, 43), nn.GELU(), nn.Linear(43, 41, bias=False)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)

    def step(x):
        for _ in range(num_steps):
            for rows in x.chunk(num_batches):
                loss = model(rows).pow(2).mean()
                loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return capture(
        step,
        torch.randn(4, 37, dtype=dtype),
        world_size=world_size,
        axes=axes,
        outer_stage=outer_stage,
    )
