"""The operators that quantise what travels, dequantise what has come, and keep what was lost."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from zerofx.codegen.kernels import Keep
from zerofx.codegen.wires import errors
from zerofx.codegen.wires.kernels import WireKernels
from zerofx.ir import ops
from zerofx.ir.mesh import DATA
from zerofx.ir.parameters import ParameterTable
from zerofx.runtime.comm.communication import Communicator
from zerofx.runtime.memory.flat import filled_up, kept_ranges, without_gaps
from zerofx.runtime.parameters.errors import SAVED_ERRORS, extent_of
from zerofx.runtime.parameters.parameter import ParameterState


class Wires:
    """Quantises parts of a program's buckets, which ``table`` knows.

    What wires of gradients lose is kept with the buckets' parameters, once they are ``bind``'s.
    With kernels if it ``is_compiled``, whose texts are given to ``keep``; the bits are the same.
    """

    def __init__(
        self,
        graph: fx.Graph,
        table: ParameterTable,
        communicator: Communicator,
        is_compiled: bool,
        keep: Keep | None = None,
    ) -> None:
        self.table, self.communicator = table, communicator
        self._kernels = WireKernels(is_compiled, keep)
        corrected = [node for node in graph.nodes if node.target is ops.correct]
        self._axes = {ops.argument(node, "axis") for node in corrected}
        self._bounds: Sequence[ParameterState] = ()

    def bind(self, bounds: Sequence[ParameterState]) -> None:
        """Know the program's parameters."""
        self._bounds = bounds

    def quantize(
        self, flat: torch.Tensor, code: str, parts: int = 1, parameters: Sequence[int] = ()
    ) -> torch.Tensor:
        infos = [self.table[index] for index in parameters]
        return self._kernels.quantize(without_gaps(flat.detach(), infos), code, parts)

    def dequantize(
        self, wire: torch.Tensor, code: str, parts: int, numel: int, dtype: torch.dtype
    ) -> torch.Tensor:
        return self._kernels.dequantize(wire, code, parts, numel, dtype)

    def dequantize_sum(
        self,
        received: torch.Tensor,
        code: str,
        parts: int,
        numel: int,
        reduction: str,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        divisor = self.communicator.world_size if reduction == "mean" else 1
        return self._kernels.dequantize_sum(received, code, parts, numel, divisor, dtype)

    def fill_up(self, flat: torch.Tensor, parameters: Sequence[int], numel: int) -> torch.Tensor:
        return filled_up(flat.detach(), [self.table[index] for index in parameters], numel)

    def correct(
        self,
        flat: torch.Tensor,
        parameters: Sequence[int],
        numel: int,
        axis: str = DATA,
        scale: torch.Tensor | None = None,
        rest: torch.Tensor | None = None,
    ) -> torch.Tensor:
        ranges = self._ranges(parameters, flat.numel())
        error = self._error(parameters, axis, numel, flat.device) if rest is None else rest
        return errors.corrected(flat.detach(), error, ranges, scale)

    def rounding_error(
        self,
        exact: torch.Tensor,
        wire: torch.Tensor,
        code: str,
        parts: int,
        scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._kernels.rounding_error(exact, wire, code, parts, scale)

    def keep_error(
        self,
        rest: torch.Tensor,
        sums: Sequence[torch.Tensor],
        parameters: Sequence[int],
        axis: str = DATA,
        found_inf: torch.Tensor | None = None,
    ) -> None:
        error = self._error(parameters, axis, rest.numel(), rest.device)
        along = self.communicator.along(axis)
        begin = along.rank * sums[0].numel() if sums else 0
        ranges = self._ranges(parameters, rest.numel())
        errors.keep(error, rest, sums, begin, self.communicator.world_size, ranges, found_inf)

    def _ranges(self, parameters: Sequence[int], numel: int) -> list[tuple[int, int]]:
        return kept_ranges([self.table[index] for index in parameters], numel)

    def _error(
        self, parameters: Sequence[int], axis: str, numel: int, device: torch.device
    ) -> torch.Tensor:
        """The memory of what has been lost of a bucket over an axis; zeros at first."""
        kept = self._bounds[parameters[0]].errors
        if axis not in kept or kept[axis].numel() != numel or kept[axis].device != device:
            kept[axis] = torch.zeros(numel, dtype=torch.float32, device=device)
            self._add_saved(kept[axis], parameters[0], axis)
        return kept[axis]

    def _add_saved(self, error: torch.Tensor, parameter: int, axis: str) -> None:
        """Add what a checkpoint has of a bucket's errors, to those that a rank begins with."""
        mesh = self.communicator.mesh
        takes_all = axis == mesh.outer or mesh.outer not in self._axes
        for info in self.table.bucket(self.table[parameter].place.bucket):
            extent = extent_of(info, error.numel())
            into = error[extent.at : extent.at + extent.stop - extent.start]
            its = self._bounds[info.index].parameter
            assert its is not None, "the caller holds its parameters"
            for saved in SAVED_ERRORS.take(its, mesh, axis, takes_all, extent):
                into.add_(saved.to(error.device))
