"""Count what the dispatcher does not see, compiled regions and kernels, by what they declare."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.kit.order.history import Range
from tests.kit.order.notes import Notes
from zerofx import compat
from zerofx.codegen.kernel import UpdateKernel
from zerofx.ir.aliases import memory_of, mutated_inputs
from zerofx.lower.regions import CompiledRegion


def patches(notes: Notes) -> Iterator[Any]:
    """Yield what has regions and update kernels noted as one operator each."""
    forward, ready = CompiledRegion.forward, UpdateKernel.ready

    def noted_forward(region: CompiledRegion, values: list[Any]) -> tuple[Any, ...]:
        written = written_by(region.gm)
        ranges = _ranges(notes, "a region", ((at in written, one) for at, one in enumerate(values)))
        with compat.tensors.without_dispatch_modes():
            results = forward(region, values)
        ranges += _ranges(notes, "a region", ((True, one) for one in results))
        notes.operator("a region", ranges)
        return results

    def noted_ready(kernel: UpdateKernel, *values: Any) -> Callable[[], list[Any]]:
        run = ready(kernel, *values)
        tensors = kernel.program.bind(values).tensors
        stored = [stream.store is not None for stream in kernel.program.streams]
        pairs = list(zip(stored, tensors, strict=True))
        pairs += [(False, value) for value in values if isinstance(value, Tensor)]

        def noted_run() -> list[Any]:
            notes.operator("an update", _ranges(notes, "an update", pairs))
            with compat.tensors.without_dispatch_modes():
                return run()

        return noted_run

    yield mock.patch.object(CompiledRegion, "forward", noted_forward)
    yield mock.patch.object(UpdateKernel, "ready", noted_ready)


def _ranges(notes: Notes, name: str, given: Iterable[tuple[bool, Any]]) -> list[Range]:
    found: list[Range] = []
    for writes, value in given:
        if isinstance(value, Tensor) and value.device.type == "cpu":
            found += notes.ranges(value, writes, name)
    return found


def written_by(gm: torch.fx.GraphModule) -> set[int]:
    """Return the positions of a region's inputs that it writes to."""
    roots = {
        root
        for node in gm.graph.nodes
        for changed in mutated_inputs(node)
        for root in memory_of(changed)
    }
    return {
        root.args[1]
        for root in roots
        if root.target is operator.getitem and root.args[0].op == "placeholder"
    }
