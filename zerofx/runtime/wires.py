"""The operators that quantise what travels, and dequantise what has come."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zerofx.codegen.kernels import Keep
from zerofx.codegen.wires import blocks
from zerofx.codegen.wires.kernels import WireKernels
from zerofx.ir.parameters import ParameterTable
from zerofx.runtime.memory.flat import without_gaps


class Wires:
    """Quantises parts of a program's buckets, which ``table`` knows.

    With kernels if it ``is_compiled``, whose texts are given to ``keep``; the bits are the same.
    """

    def __init__(self, table: ParameterTable, is_compiled: bool, keep: Keep | None = None) -> None:
        self.table = table
        self._kernels = WireKernels(keep) if is_compiled else blocks

    def quantize(
        self,
        flat: torch.Tensor,
        code: str,
        parts: int = 1,
        parameters: Sequence[int] = (),
        axis: str = "",
    ) -> torch.Tensor:
        infos = [self.table.cut(index, axis) for index in parameters]
        return self._kernels.quantize(without_gaps(flat.detach(), infos), code, parts)

    def dequantize(
        self, wire: torch.Tensor, code: str, parts: int, numel: int, dtype: torch.dtype
    ) -> torch.Tensor:
        return self._kernels.dequantize(wire, code, parts, numel, dtype)
