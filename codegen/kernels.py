"""Choose an update's kernel: one of our own in Triton on CUDA, one of Inductor's elsewhere."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from zerofx.codegen.kernel import UpdateKernel
from zerofx.codegen.pointwise import pointwise_program
from zerofx.codegen.program import Program
from zerofx.codegen.rewrite.elementwise import UpdateError
from zerofx.codegen.rewrite.gradient_work import GradientWork
from zerofx.codegen.trace.trace import Update
from zerofx.codegen.triton.launch import TritonKernel

logger = logging.getLogger("zerofx")

# Given a file's name and text, where somebody wants to read what is generated.
Keep = Callable[[str, str], object]


Kernel = UpdateKernel | TritonKernel | Update
"""``ready``, given the update's inputs, returns what runs it and returns its results.

The gradient is in ``gradient_dtype``.  One that ``may_wait`` takes ``launches=`` besides, and then
runs when they do.
"""


class Kernels:
    """The kernels of one optimizer's updates, made when they are first needed."""

    def __init__(self, keep: Keep | None = None) -> None:
        self._keep = keep
        self._known: dict[Hashable, UpdateKernel | TritonKernel | None] = {}
        self._programs: dict[Hashable, Program] = {}

    def find(
        self,
        update: Update,
        data: Tensor,
        gradient: Tensor,
        work: GradientWork | None = None,
        squares: bool = False,
    ) -> UpdateKernel | TritonKernel | None:
        """The kernel for shards like ``data``; None if no kernel can run the update.

        ``work`` and ``squares`` are those of ``pointwise_program``.
        """
        kind = (gradient.dtype, data.dtype, data.device.type)
        key = (update.computation, work, squares, *kind)
        if key not in self._known:
            options = {"work": work, "squares": squares}
            self._known[key] = self._make(update, data.device, gradient.dtype, options)
        return self._known[key]

    def program(
        self,
        update: Update,
        data: Tensor,
        gradient: Tensor,
        work: GradientWork | None = None,
        squares: bool = False,
    ) -> Program:
        """The program that such a kernel would be of.

        Raises: UpdateError if no program can be made of the update.
        """
        key = (update.computation, work, squares, gradient.dtype, data.device.type)
        if key not in self._programs:
            as_kernel: dict[str, Any] = (
                {"gradient_dtype": gradient.dtype}
                if runs_triton(data.device)
                else {"by_inductor": True}
            )
            self._programs[key] = pointwise_program(update, work=work, squares=squares, **as_kernel)
        return self._programs[key]

    def _make(
        self,
        update: Update,
        device: torch.device,
        gradient_dtype: torch.dtype,
        options: dict[str, Any],
    ) -> UpdateKernel | TritonKernel | None:
        kernel: UpdateKernel | TritonKernel | None = None
        if runs_triton(device):
            kernel = self._triton(update, gradient_dtype, options)
        try:
            kernel = kernel or UpdateKernel.of(update, **options)
        except UpdateError:
            return None
        if self._keep is not None:
            text = hashlib.sha256(kernel.source.encode()).hexdigest()[:8]
            self._keep(f"kernel_{update.optimizer.lower()}_{text}.py", kernel.source)
        return kernel

    def without(self, update: Update, is_coded: bool) -> Kernel:
        """Return what runs an update without compiling it.

        Where moments are kept in eight bits (``is_coded``) that is its program, which rounds alike
        whether they have been coded yet or have just been loaded.

        Raises: UpdateError if no program can be made of it then.
        """
        if not (is_coded and update.state):
            return update
        key = (update.computation, None)
        if key not in self._known:
            self._known[key] = UpdateKernel.of(update, is_compiled=False)
        kernel = self._known[key]
        assert kernel is not None
        return kernel

    def _triton(
        self, update: Update, gradient_dtype: torch.dtype, options: dict[str, Any]
    ) -> TritonKernel | None:
        try:
            return TritonKernel(pointwise_program(update, gradient_dtype=gradient_dtype, **options))
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


def runs_triton(device: torch.device) -> bool:
    """Return whether updates on a device run as Triton kernels."""
    return device.type == "cuda"
