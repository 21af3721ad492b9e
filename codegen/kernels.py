"""Choose an update's kernel: one of our own in Triton on CUDA, one of Inductor's elsewhere."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zerofx.codegen.kernel import UpdateKernel
from zerofx.codegen.pointwise import pointwise_program
from zerofx.codegen.rewrite.elementwise import UpdateError
from zerofx.codegen.rewrite.read_again import round_what_is_read_again
from zerofx.codegen.trace.trace import Update
from zerofx.codegen.triton.launch import TritonKernel

logger = logging.getLogger("zerofx")

# Given a file's name and text, where somebody wants to read what is generated.
Keep = Callable[[str, str], None]


class OperatorByOperator:
    """Stands for a kernel: the traced graph as it is."""

    may_wait = False

    def __init__(self, update: Update) -> None:
        self._update, self.gradient_dtype = update, update.gradient_dtype

    def ready(self, *values: Any) -> Callable[[], Sequence[Any]]:
        """Return what runs the update, in any thread."""
        return partial(self._update.run, *values)


Kernel = UpdateKernel | TritonKernel | OperatorByOperator
"""``ready``, given the update's inputs, returns what runs it and returns its results.

The gradient is in ``gradient_dtype``.  One that ``may_wait`` takes ``launches=`` besides, and then
runs when they do.
"""


class Kernels:
    """The kernels of one optimizer's updates, made when they are first needed."""

    def __init__(self, keep: Keep | None = None) -> None:
        self._keep = keep
        self._known: dict[Hashable, UpdateKernel | TritonKernel | None] = {}

    def find(
        self, update: Update, data: Tensor, gradient: Tensor
    ) -> UpdateKernel | TritonKernel | None:
        """The kernel for shards like ``data``; None if no kernel can run the update."""
        key = (update.computation, gradient.dtype, data.dtype, data.device.type)
        if key not in self._known:
            self._known[key] = self._make(round_what_is_read_again(update), data, gradient)
        return self._known[key]

    def _make(
        self, update: Update, data: Tensor, gradient: Tensor
    ) -> UpdateKernel | TritonKernel | None:
        triton = self._triton(update, gradient.dtype) if runs_triton(data.device) else None
        if triton is not None:
            self._write(update, triton.source)
            return triton
        kernel = UpdateKernel.of(update)
        if kernel is not None:
            self._write(update, kernel.readable())
        return kernel

    def without(self, update: Update) -> Kernel:
        """Return what runs an update without compiling it.

        Raises: UpdateError if its moments are in eight bits, and it cannot be split for these.
        """
        if not update.scales:
            return OperatorByOperator(update)
        key = (update.computation, None)
        if key not in self._known:
            self._known[key] = UpdateKernel.of(update, is_compiled=False)
        kernel = self._known[key]
        if kernel is None:
            raise UpdateError(
                f"{update.optimizer}.step changes a tensor that is one number after using it, "
                "and such an update does not run on blocks of moments in eight bits. Change it "
                "before its first use, keep it as a Python number, or use "
                "options={'moment_dtype': 'bfloat16'}."
            )
        return kernel

    def _triton(self, update: Update, gradient_dtype: torch.dtype) -> TritonKernel | None:
        try:
            program = pointwise_program(update, gradient_dtype=gradient_dtype)
            return TritonKernel(program)
        except UpdateError as error:
            logger.warning("%s It runs as torch.compile makes it.", error)
        except ImportError as error:
            logger.warning(
                "%s's update has no kernel of its own: %s. Install Triton: pip install "
                "'zerofx[gpu]'.",
                update.optimizer,
                error,
            )
        return None

    def _write(self, update: Update, source: str) -> None:
        if self._keep is not None:
            text = hashlib.sha256(source.encode()).hexdigest()[:8]
            self._keep(f"kernel_{update.optimizer.lower()}_{text}.py", source)


def runs_triton(device: torch.device) -> bool:
    """Return whether updates on a device run as Triton kernels."""
    return device.type == "cuda"
