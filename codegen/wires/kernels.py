"""Choose what quantises and dequantises: kernels of the same machinery as updates have."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from zerofx.codegen.kernel import UpdateKernel
from zerofx.codegen.kernels import Keep, runs_triton
from zerofx.codegen.program import Bound, Program
from zerofx.codegen.triton.expressions import DTYPES
from zerofx.codegen.triton.launch import TritonKernel
from zerofx.codegen.wires import blocks
from zerofx.codegen.wires.programs import dequantize_program, quantize_program
from zerofx.ir.wires import check_parts, quantized_bytes

logger = logging.getLogger("zerofx")

FEWEST_COMPILED = 2**16
"""On a CPU smaller buffers run operator by operator, which takes less than to call a kernel."""


class WireKernels:
    """Does what ``blocks.py`` does, in the same bits, with kernels that are made when needed.

    Those are of ``int8``, on CUDA and on a CPU: other codes, and small buffers on a CPU, run
    operator by operator.  With ``keep`` each kernel's text is kept.
    """

    def __init__(self, keep: Keep | None = None) -> None:
        self._keep = keep
        self._known: dict[Hashable, UpdateKernel | TritonKernel | None] = {}

    def quantize(self, flat: Tensor, code: str, parts: int = 1) -> Tensor:
        """Return the wires of equal parts of a flat buffer; see ``blocks.quantize``."""
        kernel = self._find(quantize_program, flat.dtype, code, flat)
        if kernel is None:
            return blocks.quantize(flat, code, parts)
        check_parts(parts, flat.numel())
        numel = flat.numel() // parts
        wire = flat.new_empty(parts * quantized_bytes(numel, code), dtype=torch.uint8)
        codes, scales = blocks.fields_of(wire, code, parts, numel)
        blocks.fill_up(wire, code, parts, numel)
        rows = zip(flat.view(parts, numel), codes, scales, strict=True)
        _run(kernel, [[row, *_entries(its, scale, numel)] for row, its, scale in rows])
        return wire

    def dequantize(
        self, wire: Tensor, code: str, parts: int, numel: int, dtype: torch.dtype
    ) -> Tensor:
        """Return the values of wires of equal parts; see ``blocks.dequantize``."""
        kernel = self._find(dequantize_program, dtype, code, wire)
        if kernel is None:
            return blocks.dequantize(wire, code, parts, numel, dtype)
        check_parts(parts, wire.numel(), quantized_bytes(numel, code))
        flat = wire.new_empty(parts * numel, dtype=dtype)
        codes, scales = blocks.fields_of(wire, code, parts, numel)
        rows = zip(codes, scales, flat.view(parts, numel), strict=True)
        _run(kernel, [[*_entries(its, scale, numel), row] for its, scale, row in rows])
        return flat

    def _find(
        self, make: Callable[[torch.dtype], Program], dtype: torch.dtype, code: str, of: Tensor
    ) -> UpdateKernel | TritonKernel | None:
        on_cuda = runs_triton(of.device)
        is_small = of.numel() < (1 if on_cuda else FEWEST_COMPILED)
        if code != "int8" or is_small or dtype not in DTYPES:
            return None
        key = (make, dtype, of.device.type)
        if key not in self._known:
            self._known[key] = self._made(make(dtype), on_cuda)
        return self._known[key]

    def _made(self, program: Program, on_cuda: bool) -> UpdateKernel | TritonKernel | None:
        try:
            kernel = TritonKernel(program) if on_cuda else UpdateKernel(program)
        except ImportError as error:
            logger.warning(
                "what travels has no kernel of its own: %s. It is made operator by operator. "
                "Install Triton: pip install 'zerofx[gpu]'.",
                error,
            )
            return None
        if self._keep is not None:
            text = hashlib.sha256(kernel.source.encode()).hexdigest()[:8]
            self._keep(f"kernel_{program.optimizer}_{text}.py", kernel.source)
        return kernel


def _run(kernel: UpdateKernel | TritonKernel, segments: list[list[Tensor]]) -> None:
    if isinstance(kernel, TritonKernel):
        kernel.launch([Bound(tensors, {}) for tensors in segments])
        return
    for tensors in segments:
        kernel(*tensors)


def _entries(codes: Tensor, scales: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """The codes of a part's elements, flat, and its scales."""
    return codes.flatten()[:numel].view(torch.int8), scales
