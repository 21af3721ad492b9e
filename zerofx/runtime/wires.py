"""The operators that quantise what travels, and dequantise what has come."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zerofx.codegen.wires import blocks
from zerofx.ir.parameters import ParameterTable
from zerofx.runtime.memory.flat import without_gaps


class Wires:
    """Quantises parts of a program's buckets, which ``table`` knows."""

    def __init__(self, table: ParameterTable) -> None:
        self.table = table

    def quantize(
        self, flat: torch.Tensor, code: str, parts: int = 1, parameters: Sequence[int] = ()
    ) -> torch.Tensor:
        infos = [self.table[index] for index in parameters]
        return blocks.quantize(without_gaps(flat.detach(), infos), code, parts)

    def dequantize(
        self, wire: torch.Tensor, code: str, parts: int, numel: int, dtype: torch.dtype
    ) -> torch.Tensor:
        return blocks.dequantize(wire, code, parts, numel, dtype)
