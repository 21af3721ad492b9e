"""The operators that quantise what travels, and dequantise what has come."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zerofx.codegen.wires import blocks, sums
from zerofx.ir.parameters import ParameterTable
from zerofx.runtime.memory.flat import filled_up, without_gaps


class Wires:
    """Quantises parts of a program's buckets, which ``table`` knows, on so many ranks."""

    def __init__(self, table: ParameterTable, num_ranks: int) -> None:
        self.table, self.num_ranks = table, num_ranks

    def quantize(
        self, flat: torch.Tensor, code: str, parts: int = 1, parameters: Sequence[int] = ()
    ) -> torch.Tensor:
        infos = [self.table[index] for index in parameters]
        return blocks.quantize(without_gaps(flat.detach(), infos), code, parts)

    def dequantize(
        self, wire: torch.Tensor, code: str, parts: int, numel: int, dtype: torch.dtype
    ) -> torch.Tensor:
        return blocks.dequantize(wire, code, parts, numel, dtype)

    def dequantize_sum(
        self,
        received: torch.Tensor,
        code: str,
        parts: int,
        numel: int,
        reduction: str,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        divisor = self.num_ranks if reduction == "mean" else 1
        return sums.dequantize_sum(received, code, parts, numel, divisor, dtype)

    def fill_up(self, flat: torch.Tensor, parameters: Sequence[int], numel: int) -> torch.Tensor:
        return filled_up(flat.detach(), [self.table[index] for index in parameters], numel)
