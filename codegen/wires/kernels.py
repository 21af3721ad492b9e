"""Choose what makes wires and reads them: kernels of the same machinery as updates have."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from zerofx.codegen.kernel import UpdateKernel
from zerofx.codegen.kernels import Keep, runs_triton
from zerofx.codegen.program import Bound, Program
from zerofx.codegen.triton.expressions import DTYPES
from zerofx.codegen.triton.launch import TritonKernel
from zerofx.codegen.wires import blocks, errors, sums
from zerofx.codegen.wires.programs import (
    PARTS_AT_ONCE,
    dequantize_program,
    error_program,
    quantize_program,
    sum_program,
)
from zerofx.ir.wires import BLOCK, NARROW, check_parts, quantized_bytes, wire_length

logger = logging.getLogger("zerofx")

FEWEST_COMPILED = 2**16
"""On a CPU smaller buffers run operator by operator, which takes less than to call a kernel."""

Kernel = UpdateKernel | TritonKernel


class WireKernels:
    """Does what ``blocks.py``, ``sums.py`` and ``errors.py`` do, with kernels made when needed.

    On CUDA and on a CPU, where small buffers run operator by operator, and all if it is not
    ``is_compiled``.  With ``keep`` each kernel's text is kept.
    """

    def __init__(self, is_compiled: bool = True, keep: Keep | None = None) -> None:
        self._is_compiled, self._keep = is_compiled, keep
        self._known: dict[Hashable, Kernel | None] = {}

    def quantize(self, flat: Tensor, code: str, parts: int = 1) -> Tensor:
        """Return the wires of equal parts of a flat buffer; see ``blocks.quantize``."""
        kernel = self._find(flat, flat.dtype, quantize_program, flat.dtype, code)
        if kernel is None:
            return blocks.quantize(flat, code, parts)
        check_parts(parts, flat.numel())
        numel = flat.numel() // parts
        wire = flat.new_empty(parts * quantized_bytes(numel, code), dtype=torch.uint8)
        blocks.fill_up(wire, code, parts, numel)
        rows = zip(flat.view(parts, numel), _fields(wire, code, parts, numel), strict=True)
        _run(kernel, [[row, *fields] for row, fields in rows])
        return wire

    def dequantize(
        self, wire: Tensor, code: str, parts: int, numel: int, dtype: torch.dtype
    ) -> Tensor:
        """Return the values of wires of equal parts; see ``blocks.dequantize``."""
        kernel = self._find(wire, dtype, dequantize_program, dtype, code)
        if kernel is None:
            return blocks.dequantize(wire, code, parts, numel, dtype)
        check_parts(parts, wire.numel(), quantized_bytes(numel, code))
        flat = wire.new_empty(parts * numel, dtype=dtype)
        rows = zip(flat.view(parts, numel), _fields(wire, code, parts, numel), strict=True)
        _run(kernel, [[row, *fields] for row, fields in rows])
        return flat

    def dequantize_sum(
        self, received: Tensor, code: str, parts: int, numel: int, divisor: int, dtype: torch.dtype
    ) -> Tensor:
        """Return the sum of the values of wires, divided; see ``sums.dequantize_sum``."""
        its = dtype if parts <= PARTS_AT_ONCE else torch.float32
        ends = [*range(PARTS_AT_ONCE, parts, PARTS_AT_ONCE), parts]
        groups = [slice(begin, end) for begin, end in pairwise([0, *ends])]
        kernels: list[Kernel] = []
        for group in groups:
            divides = divisor if group.stop == parts else 1
            program = its, code, group.stop - group.start, group.start > 0, divides
            kernel = self._find(received, its, sum_program, *program)
            if kernel is None:
                return sums.dequantize_sum(received, code, parts, numel, divisor, dtype)
            kernels.append(kernel)
        check_parts(parts, received.numel(), wire_length(numel, code))
        total = received.new_empty(numel, dtype=its)
        fields = _fields(received, code, parts, numel)
        for kernel, group in zip(kernels, groups, strict=True):
            _run(kernel, [[total, *(tensor for one in fields[group] for tensor in one)]])
        return total.to(dtype)

    def rounding_error(
        self, exact: Tensor, wire: Tensor, code: str, parts: int, scale: Tensor | None = None
    ) -> Tensor:
        """Return what a wire has lost of float32 values; see ``errors.rounding_error``."""
        kernel = self._find(exact, exact.dtype, error_program, code, scale is not None)
        if kernel is None:
            return errors.rounding_error(exact, wire, code, parts, scale)
        numel = exact.numel() // parts
        check_parts(parts, wire.numel(), wire_length(numel, code))
        lost = torch.empty_like(exact)
        rows = zip(
            exact.view(parts, numel),
            _fields(wire, code, parts, numel),
            lost.view(parts, numel),
            strict=True,
        )
        numbers = [] if scale is None else [scale]
        _run(kernel, [[row, *fields, into] for row, fields, into in rows], numbers)
        return lost

    def _find(
        self, of: Tensor, dtype: torch.dtype, make: Callable[..., Program], *of_program: Hashable
    ) -> Kernel | None:
        on_cuda = runs_triton(of.device)
        is_small = of.numel() < (1 if on_cuda else FEWEST_COMPILED)
        if not self._is_compiled or is_small or dtype not in DTYPES:
            return None
        key = (make, of_program, of.device.type)
        if key not in self._known:
            self._known[key] = self._made(make(*of_program), on_cuda)
        return self._known[key]

    def _made(self, program: Program, on_cuda: bool) -> Kernel | None:
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


def _fields(wire: Tensor, code: str, parts: int, numel: int) -> list[tuple[Tensor, ...]]:
    """The tensors of each part's wire.

    Shapes: int8 [blocks, bytes of a block] and float32 [blocks]; or what is narrow, [numel].
    """
    if code == NARROW:
        return [(row,) for row in wire.view(parts, numel)]
    codes, scales = blocks.fields_of(wire, code, parts, numel)
    return list(zip(codes.view(torch.int8), scales, strict=True))


def _run(
    kernel: Kernel, segments: Sequence[Sequence[Tensor]], numbers: Sequence[Tensor] = ()
) -> None:
    """Run a kernel on parts: a tensor for each stream, as ``_fields`` gives those of wires."""
    program = kernel.program
    if isinstance(kernel, TritonKernel):
        given = dict(zip(program.device_numbers, numbers, strict=True))
        bound = [Bound(_entries(program, tensors), given) for tensors in segments]
        kernel.launch(bound)
        return
    for tensors in segments:
        numel = len(tensors[0])
        full = numel // BLOCK * BLOCK if program.is_in_blocks else numel
        if full:
            kernel(*_entries(program, _cut(program, tensors, 0, full)), *numbers)
        if full < numel:  # a block, too: of a wire there is all of it
            last = _cut(program, tensors, full, numel)
            filled = [
                F.pad(tensor, (0, BLOCK - len(tensor))) if stream.kind == "value" else tensor
                for stream, tensor in zip(program.streams, last, strict=True)
            ]
            kernel(*_entries(program, filled), *numbers)
            for stream, tensor, whole in zip(program.streams, last, filled, strict=True):
                if stream.kind == "value" and stream.store is not None:
                    tensor.copy_(whole[: len(tensor)])


def _cut(program: Program, tensors: Sequence[Tensor], begin: int, end: int) -> list[Tensor]:
    """Return what a part has of these elements, which begin with a block."""
    blocks_of_it = slice(begin // BLOCK, -(-end // BLOCK))
    return [
        tensor[begin:end] if tensor.dim() == 1 and not stream.is_per_block else tensor[blocks_of_it]
        for stream, tensor in zip(program.streams, tensors, strict=True)
    ]


def _entries(program: Program, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return a part's streams, flat: codes of its elements alone."""
    numel = len(tensors[0])
    return [
        tensor.flatten()[: stream.length(numel)]
        for stream, tensor in zip(program.streams, tensors, strict=True)
    ]
