"""Choose an update's kernel: one of our own in Triton on CUDA, one of Inductor's elsewhere."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerofx.codegen.kernel import UpdateKernel
from zerofx.codegen.pointwise import pointwise_program
from zerofx.codegen.rewrite.elementwise import UpdateError
from zerofx.codegen.rewrite.read_again import round_what_is_read_again
from zerofx.codegen.trace.trace import Update
from zerofx.codegen.triton.launch import TritonKernel, TritonUpdate

logger = logging.getLogger("zerofx")

# Given a file's name and text, where somebody wants to read what is generated.
Keep = Callable[[str, str], None]


@dataclass(frozen=True)
class Choice:
    """Return an update's kernel, and the dtype that it takes the gradient in.

    ``may_wait``: it takes ``launches=``, and then runs when they do.  ``ready`` takes what ``run``
    does, and returns what runs it in any thread; None for what runs on a GPU.
    """

    run: Callable[..., Sequence[Any]]
    gradient_dtype: torch.dtype
    may_wait: bool
    ready: Callable[..., Callable[[], Sequence[Any]]] | None = None


class Kernels:
    """The kernels of one optimizer's updates, made when they are first needed."""

    def __init__(self, keep: Keep | None = None) -> None:
        self._keep = keep
        self._known: dict[Hashable, Choice | None] = {}

    def find(
        self, update: Update, data: Tensor, gradient: Tensor, *, is_compiled: bool = True
    ) -> Choice | None:
        """The kernel for shards like ``data``; None if no kernel can run the update.

        With ``is_compiled`` false it stands for a kernel, and runs operator by operator.
        """
        key = (update.computation, gradient.dtype, data.dtype, data.device.type, is_compiled)
        if key not in self._known:
            self._known[key] = self._make(update, data, gradient, is_compiled)
        return self._known[key]

    def _make(
        self, update: Update, data: Tensor, gradient: Tensor, is_compiled: bool
    ) -> Choice | None:
        if is_compiled:
            update = round_what_is_read_again(update)
        if is_compiled and runs_triton(data.device):
            triton = self._triton(update, gradient.dtype)
            if triton is not None:
                self._write(update, triton.kernel.source)
                return Choice(triton, gradient.dtype, may_wait=True)
        kernel = UpdateKernel.of(update, is_compiled)
        if kernel is None:
            return None
        if is_compiled:
            self._write(update, kernel.readable())
        gradient_dtype = update.gradient_dtype or data.dtype
        if update.scales:
            return Choice(kernel.in_blocks, gradient_dtype, False, kernel.ready_in_blocks)
        return Choice(kernel, gradient_dtype, False, kernel.ready)

    def _triton(self, update: Update, gradient_dtype: torch.dtype) -> TritonUpdate | None:
        try:
            return TritonUpdate(
                TritonKernel(pointwise_program(update, gradient_dtype=gradient_dtype))
            )
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
